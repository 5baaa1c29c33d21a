"""Pages for users show what to choose and what it costs; targets, limits and ids stand in docs/laboratory."""

import importlib
import itertools
import json
import re

import pytest

from tests.docs.test_code_blocks import PAGES, ROOT

USER_PAGES = [page for page in PAGES if page.parent.name != "laboratory"]
LABORATORY_WORDS = {"id", "target", "stretch", "limit"}


def headers(text):
    """The cells of the head of every table."""
    lines = text.splitlines()
    for head, rule in itertools.pairwise(lines):
        if re.fullmatch(r"\|(?: -+:? \|)+", rule):
            yield {cell.strip() for cell in head.strip("|").split("|")}


@pytest.fixture
def tables(monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("user_tables")


@pytest.fixture
def results(tables, monkeypatch, tmp_path):
    """Write the rows of result files in place of the committed ones."""

    def write(name, *rows, **document):
        common = {"backend": "native", "mode": "eager", "device": "NVIDIA H200", "date": "2026-11-20"}
        rows = [{**common, "median_ms": 2.0, **row} for row in rows]
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows, **document}))

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return write


def test_pages_for_users_have_no_columns_of_the_laboratory():
    shown = {
        page.relative_to(ROOT).as_posix(): words
        for page in USER_PAGES
        for words in [set.union(set(), *headers(page.read_text())) & LABORATORY_WORDS]
        if words or "target is missed" in page.read_text()
    }
    assert not shown
    assert list(headers("| id | ms |\n| --- | ---: |\n")) == [{"id", "ms"}]


def test_a_column_of_a_recipe_is_that_of_its_row(tables, results):
    shape = [16384, 4096, 14336]
    results(
        "linear",
        {"id": "l.current", "recipe": "current", "shape": shape, "base_ms": 3.5, "ratio": 1.75},
        {"id": "l.current", "recipe": "current", "shape": shape, "variant": "outliers", "base_ms": 3.0, "ratio": 1.5},
        {"id": "l.fwd.fp8", "recipe": "current", "shape": shape, "base_ms": 9.0, "ratio": 4.5},
        {"id": "l.torchao", "recipe": "tensorwise", "shape": shape, "base_ms": 9.0, "ratio": 4.5},
    )
    text = tables.linear_table()
    assert "| `fp8_current` | 3.50 | 2.00 | 1.75 | 1.50 |  |" in text
    assert "4.50" not in text
    assert "`benchmarks/results/linear.json` (H200, 2026-11-20)" in text


def test_ratios_of_stored_weights_span_their_shapes(tables, results):
    rows = [{"id": "d.nvfp4.m16", "recipe": "nvfp4", "ratio": ratio} for ratio in (2.5, 2.25, 3.0)]
    results("decode", *rows, {"id": "d.experts8.nvfp4.m16", "recipe": "nvfp4", "ratio": 9.0})
    text = tables.decode_table("decode")
    assert "| 16 | 2.25 to 3.00 |  |" in text
    assert "| 16, 8 experts, 2 a token | 9.00 |  |" in text
    assert tables.span([1.001, 1.0]) == "1.00"


def test_bits_of_a_weight_count_its_scales(tables):
    assert tables.bits("nvfp4") == pytest.approx(4.5, abs=1e-4)
    assert tables.bits("mxfp8") == 8.25


def test_steps_of_two_gpus_stand_beside_each_other(tables, results):
    extra = {"gathered_bytes": 100, "peak_bytes": 200}
    half = {"gathered_bytes": 50, "peak_bytes": 150}
    for name, device, ms in (("fsdp", "NVIDIA H200", 5.0), ("fsdp_h100", "NVIDIA H100 80GB HBM3", 8.0)):
        results(name, {"id": "fsdp.bf16", "device": device, "extra": extra, "median_ms": 10.0},
                {"id": "fsdp.current.low", "recipe": "current", "device": device, "extra": half, "median_ms": ms,
                 "ratio": 10 / ms})  # fmt: skip
    text = tables.ranks_table("fsdp", "fsdp_h100")
    assert "| recipe | H200, ms | times as fast | H100, ms | times as fast |" in text
    assert "| bf16 | 10.0 | 1.00 | 10.0 | 1.00 | 1.00 | 1.00 |" in text
    assert "| `fp8_current`, codes gathered | 5.0 | 2.00 | 8.0 | 1.25 | 0.50 | 0.75 |" in text


def test_the_choice_names_recipes_and_their_loss(tables):
    from microfloat.recipes import RECIPES

    text = tables.choice_table()
    for page in ("index.md", "performance.md"):
        assert text in (ROOT / "docs" / page).read_text(), "run: python tools/user_tables.py --write"
    taken = set(re.findall(r"^\|[^|]*\|[^|]*\| `(\w+)` \|", text, re.MULTILINE))
    assert taken <= set(RECIPES)
    assert {"delayed", "fp8_current", "mxfp8", "nvfp4"} <= taken
    demo = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["recipes"]
    assert f"{demo['nvfp4']['gap_to_bf16']:+.3f} |" in text
    peaks = {row["id"]: row["extra"]["peak_gib"] for row in tables.rows_of(tables.RESULTS / "model.json")}
    share = peaks["model.nvfp4"] / peaks["model.bf16.compiled"]
    assert f"| {share:.2f} | {demo['nvfp4']['gap_to_bf16']:+.3f} |" in text
