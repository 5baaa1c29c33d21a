"""The tables between comment markers are what their generators in tools/ give."""

import importlib
import json
import os
import re

import pytest

from tests.docs.test_code_blocks import PAGES, ROOT


@pytest.fixture
def tool(monkeypatch):
    """Import a module of tools/."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module


def test_the_support_table_is_what_explain_says(tool):
    """Features B4."""
    for package in ("torch", "triton"):  # without triton explain rightly says that GPUs run the reference backend
        pytest.importorskip(package, reason=f"{package} is not installed")
    support, block = tool("support_table"), tool("marked_block")
    for page, name, make in (
        (support.README, support.SHORT, support.short_table), (support.PAGE, support.BLOCK, support.support_table),
    ):  # fmt: skip
        committed = block.read_block(page.read_text(), name)
        assert committed == make(), "run: python tools/support_table.py --write"


def test_a_cell_of_the_short_table_holds_one_word_or_one_figure(tool):
    pytest.importorskip("torch", reason="torch is not installed")
    support, block = tool("support_table"), tool("marked_block")
    lines = block.read_block(support.README.read_text(), support.SHORT).splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    assert {row[0].strip("`") for row in rows} == set(support.RECIPES)
    assert all(re.fullmatch(r"(runs|fast|-)\*?|\d\.\d\dx", cell) for row in rows for cell in row[1:])


@pytest.mark.slow("needs a training package that make test does not install")
def test_the_shares_of_experts_are_those_of_reports(tool):
    pytest.importorskip("transformers", reason="transformers is not installed")
    shares, block = tool("shares_table"), tool("marked_block")
    assert block.read_block(shares.PAGE.read_text(), shares.BLOCK) == shares.shares_table()
    found = shares.counted("GptOss", {"num_hidden_layers": 1, "num_local_experts": 2})
    width, hidden, heads, kv = 2880, 2880, 64 * 64, 8 * 64  # of the published model
    assert found["experts"] == 2 * (2 * hidden * width + 2 * hidden + width * hidden + width)
    assert found["others"] == 2 * width * heads + heads + width + 2 * (width * kv + kv)
    assert found["left"] == 2 * 201088 * width
    rest = found["all"] - found["experts"] - found["others"] - found["left"]
    assert rest == 3 * width + 2 * width + 2 + 64  # norms, router, sinks


def test_no_cell_of_the_peers_holds_two_figures(tool):
    peers = tool("peers_table")
    lines = [line for line in peers.peers_table().splitlines() if line.startswith("|")][2:]
    cells = [cell.strip() for line in lines for cell in line.strip("|").split("|")[2:]]
    assert all(re.fullmatch(r"\d\.\d\d|-", cell) for cell in cells)
    assert {ratio.work for ratio in peers.ratios()} == set(peers.WORKS.values())
    # The layer of README's text is that of the table and of the picture.
    ratio = next(one for one in peers.ratios() if (one.work, one.library) == (peers.WORKS["layer"], "microfloat"))
    assert ratio.value == peers.layer_ratio(ratio.recipe)
    ours, peer, bf16 = (f"{peers.rows()['layer', name]['median_ms']:.1f}" for name in ("delayed", "te.delayed", "bf16"))
    assert f"{ours} ms under `delayed`, {bf16} in bf16" in peers.layer_source()
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"under delayed scaling takes {ours} ms, TransformerEngine's {peer}, compiled bf16's {bf16})" in text


def test_the_support_table_shows_what_explain_changes(tool, monkeypatch):
    pytest.importorskip("torch", reason="torch is not installed")
    support = tool("support_table")
    from microfloat.support import Support
    from microfloat.torch.convert.explain import Explanation, GemmRow

    asked = []

    def explain(recipe, device):
        asked.append(device)
        verdicts = {"fprop": Support(True, True, "-"), "dgrad": Support(True, False, "-"),
                    "wgrad": Support(False, False, "no kernel")}  # fmt: skip
        if device == "sm_100":
            verdicts = dict.fromkeys(verdicts, Support(True, True, "this path is not yet run on the hardware"))
        rows = tuple(
            GemmRow(gemm, "-", "native", f"{gemm} kernel (e2m1)", verdict) for gemm, verdict in verdicts.items()
        )
        return Explanation(recipe, str(device), rows)

    monkeypatch.setattr(support.mf, "explain", explain)
    text = support.support_table()
    assert "| fprop **accelerated** (1); dgrad runs (2); wgrad does not run (3) |" in text
    assert "| accelerated, untried (1, 2, 3) |" in text
    assert "2. native backend: dgrad kernel." in text
    assert set(asked) == {"cpu", "sm_80", "sm_89", "sm_90", "sm_100"}


def test_a_recipe_per_row(tool):
    pytest.importorskip("torch", reason="torch is not installed")
    from microfloat.recipes import RECIPES

    lines = tool("support_table").support_table().split("\n\n")[0].splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == list(RECIPES)


def test_the_measured_tables_are_what_the_committed_json_gives(tool):
    block = tool("marked_block")
    for page, name, make in tool("measured_table").BLOCKS:
        committed = block.read_block(page.read_text(), name)
        assert committed == make(), f"{page.name}, {name}. Run: python tools/measured_table.py --write"


def test_the_bytes_on_the_wire_are_those_of_the_layouts(tool):
    wire, block = tool("wire_table"), tool("marked_block")
    committed = block.read_block(wire.PAGE.read_text(), wire.BLOCK)
    assert committed == wire.wire_table(), "run: python tools/wire_table.py --write"
    assert "| `nvfp4` | 0.563 (0.28x) |" in committed  # 4 bits, and 8 for every 16 values
    assert "| `mxfp8` | 1.031 (0.52x) |" in committed


def test_the_families_of_checkpoints_are_the_rows_of_the_library(tool):
    families, block = tool("families_table"), tool("marked_block")
    committed = block.read_block(families.PAGE.read_text(), families.BLOCK)
    assert committed.strip() == families.families_table(), "run: python tools/families_table.py --write"
    assert "| P_packed, P_scale (E4M3) | P_global_scale, divides | `compressed-tensors` |" in committed


def test_the_first_page_names_targets_that_its_engines_read(tool):
    """Those of a plain model that was converted; conditions of a reader are marked, and refusals are not listed."""
    families, block = tool("families_table"), tool("marked_block")
    page = families.ROOT / "docs" / "index.md"
    text = families.engines_table()
    assert block.read_block(page.read_text(), "targets by engine") == text, (
        "run: python tools/families_table.py --write"
    )
    rows = {row.split(" ")[1]: row for row in text.splitlines() if row.startswith("| ")}
    assert "`ct:mxfp8` [4]" in rows["transformers"]  # no numbered experts
    assert "modelopt" not in rows["transformers"]
    assert "`ct:mxfp4` [3]" in rows["SGLang"]  # experts alone
    assert "`ct:nvfp4`" not in rows["TensorRT-LLM"]  # it refuses weights without activations
    assert "`ct:fp8`" not in rows["TensorRT-LLM"]
    assert "hf:mxfp8" not in rows["vLLM"]  # but for one model
    assert all("`modelopt:fp8` [1]" in rows[name] for name in ("vLLM", "SGLang", "TensorRT-LLM"))
    # What most engines read comes first in its cell, and what holds for some models alone comes last.
    assert all(row.split("|")[2].startswith(" `ct:fp8_dynamic`, ") for row in rows.values() if "`" in row)
    assert rows["vLLM"].split("|")[4].strip() == "`modelopt:nvfp4`, `ct:nvfp4`"
    assert rows["SGLang"].split("|")[3].startswith(" `modelopt:mxfp8`, ")
    for cell in (cell for row in rows.values() for cell in row.split("|")):
        marked = ["[" in target for target in cell.split(", ")]
        assert marked == sorted(marked)


def test_make_tables_regenerates_every_block_of_the_pages(tool):
    """Those of each tool, and none is left in a page that no tool writes."""
    pytest.importorskip("torch", reason="torch is not installed")
    tables = tool("tables")
    written = [(page.relative_to(ROOT).as_posix(), name) for page, name, _ in tables.BLOCKS]
    tools = [path.stem for path in sorted((ROOT / "tools").glob("*.py")) if "\nBLOCKS" in path.read_text()]
    own = [(page.relative_to(ROOT).as_posix(), name)
           for name in tools if name != "tables" for page, name, _ in tool(name).BLOCKS]  # fmt: skip
    found = [(page.relative_to(ROOT).as_posix(), name)
             for page in PAGES for name in re.findall(r"^<!-- /(.+) -->$", page.read_text(), re.MULTILINE)]  # fmt: skip
    assert sorted(written) == sorted(own)
    assert sorted(written) == sorted(found)
    assert "tools/tables.py --write" in (ROOT / "Makefile").read_text().split("\ntables:", 1)[1].split("\n\n", 1)[0]


def test_the_tables_of_evidence_are_those_of_its_runs(tool):
    """Every block, and a row that costs stands before one that does not."""
    evidence, block = tool("evidence_table"), tool("marked_block")
    for page, name, make in evidence.BLOCKS:
        assert block.read_block(page.read_text(), name) == make().strip(), "run: python tools/evidence_table.py --write"
    gap = evidence.Gap("mxfp4", {0: 0.05, 1: 0.06}, 0.055, 0.001)
    assert evidence.cells_of(gap, [{"mxfp4": gap}], 0.01) == [
        "`mxfp4`", "+0.0550 ± 0.0010", "+0.0500, +0.0600", "+0.0550", "**costs**",
    ]  # fmt: skip
    assert evidence.ORDER[:2] == (evidence.FAILED, evidence.verdict(gap, 0.01))


def test_the_tables_of_a_trained_model_put_what_costs_first(tool, tmp_path, monkeypatch):
    served, block = tool("served_table"), tool("marked_block")
    for page, name, make in served.BLOCKS:
        assert block.read_block(page.read_text(), name) == make().strip(), "run: python tools/served_table.py --write"
    ways = [
        {"name": name, "group": group, "bits": 4.5, "loss": {"code": 2.0}, "above": {"code": [above, 0.001]},
         "divergence": {"code": [far, 0.0]}}
        for name, group, above, far in
        (("bf16", "", 0.0, 0.0), ("a", "weights", -0.01, 0.001), ("b", "cache", 0.02, 0.1))
    ]  # fmt: skip
    rows = [{"row": "good", "cosine": {"up": 0.99}, "sqnr": {"fprop": {"up": 30.0}}},
            {"row": "bad", "cosine": {"up": 0.5}, "sqnr": {}}]  # fmt: skip
    run = {"row": "bf16", "steps": 10, "size": {"batch": 100, "context": 2000}}
    found = {"served": ways, "gradients": rows, "run": run, "tokens": 9, "batch": 1, "date": "today", "command": "it",
             "environment": {"device": "a chip", "torch": "2"}}  # fmt: skip
    (tmp_path / "found.json").write_text(json.dumps(found))
    monkeypatch.setattr(served, "RESULTS", tmp_path / "found.json")
    lines = served.served_table().splitlines()
    assert lines[2:4] == [
        "| `b` | keys and values | 4.50 | +0.0200 ± 0.0010 | 0.10000 |",
        "| `a` | weights | 4.50 | -0.0100 ± 0.0010 | 0.00100 |",
    ]
    assert "`bf16`, 2 million" in lines[5]
    assert served.gradients_table().splitlines()[2:4] == [
        "| `bad` | 0.5000 | 0.5000 |  |  |  |", "| `good` | 0.9900 | 0.9900 | 30.0 |  |  |",
    ]  # fmt: skip


def test_gaps_of_a_longer_run_stand_beside_those_of_the_same_seed(tool, tmp_path, monkeypatch):
    evidence = tool("evidence_table")

    def write(name, steps, gap):
        runs = [
            {"row": row, "seed": 0, "held_out": {"code": loss}} for row, loss in (("bf16", 2.0), ("mxfp4", 2.0 + gap))
        ]
        found = {"runs": runs, "steps": steps, "size": {"batch": 10, "context": 1000}, "date": "today", "command": "it",
                 "environment": {"device": "a chip", "torch": "2"}}  # fmt: skip
        (tmp_path / name).write_text(json.dumps(found))
        return tmp_path / name

    short, long = write("short", 200, 0.05), write("long", 400, 0.06)
    monkeypatch.setattr(evidence, "LONGER", long)
    read = evidence.results
    monkeypatch.setattr(evidence, "results", lambda file=short: read(file))
    lines = evidence.longer_table().splitlines()
    assert lines[0].startswith("| row, seed 0 | gap at 2 million tokens | gap at 4 million tokens |")
    assert lines[2] == "| `mxfp4` | +0.0500 | +0.0600 | +0.0100 |"


def test_rows_keep_their_bits_where_no_scale_is_of_the_whole_tensor(tool):
    """What was tried is what the casts say, for a call of other sizes too."""
    pytest.importorskip("torch", reason="torch is not installed")
    neighbours, block = tool("neighbours_table"), tool("marked_block")
    committed = block.read_block(neighbours.PAGE.read_text(), neighbours.BLOCK)
    assert committed.strip() == neighbours.neighbours_table(), "run: python tools/neighbours_table.py --write"
    from microfloat import recipes

    others = (
        recipes.Float8RowScaling(wgrad="high_precision"),
        recipes.NVFP4BlockScaling(path="folded"),
        neighbours.mf.WeightActivation("mxfp8", weight="mxfp4"),
        neighbours.mf.WeightActivation("nvfp4", scales="static"),
        recipes.Float8CurrentScaling(amax_epsilon=1.0),
    )
    for recipe in others:
        measured = [
            cast is not None and cast.takes_amax and cast.tensor_scale != "row" and not recipe.is_static
            for cast in (recipe.fprop.lhs, recipe.dgrad.lhs)
        ]
        y, dx = neighbours.outcomes(recipe, rows=3, width=64)
        assert (y, dx) == (not measured[0], None if recipe.dgrad.lhs is None else not measured[1]), recipe


@pytest.fixture
def demo_result():
    """Results as examples/train_gpt.py writes them, with round figures."""
    entry = {
        "train_loss": [3.0, 2.0], "final_train": 2.0, "final_heldout": 2.25, "seconds": 10.0, "gap_to_bf16": 0.0,
        "underflow": {"x": 0.0, "w": 0.0, "dy": 0.0},
    }  # fmt: skip
    nvfp4 = {**entry, "final_heldout": 2.5, "gap_to_bf16": 0.25, "underflow": {"x": 0.0625, "w": 0.0, "dy": 0.5}}
    sizes = {"preset": "tiny", "steps": 2, "batch": 4, "context": 8, "layers": 1, "dim": 16, "seed": 0}
    return {
        "recipes": {"bf16": entry, "nvfp4": nvfp4}, "complete": True, "config": sizes,
        "corpus": {"train_bytes": 1_500_000}, "machine": {"processor": "a processor", "cores": 2},
        "versions": {"python": "3.11.7", "microfloat": "0.1.0", "torch": "2.13.0"},
    }  # fmt: skip


def test_the_demo_table_shows_the_recorded_result(tool, demo_result, tmp_path):
    measured = tool("measured_table")
    source, target = tmp_path / "results.json", tmp_path / "kept" / "demo.json"
    source.write_text(json.dumps(demo_result))
    os.utime(source, (1_700_000_000, 1_700_000_000))
    measured.record(source, target)
    text = measured.demo_table(target)
    assert "| `bf16` | 2.0000 | 2.2500 |  | 0.00% | 0.00% | 0.00% |" in text
    assert "| `nvfp4` | 2.0000 | 2.5000 | +0.2500 | 6.25% | 0.00% | 50.00% |" in text
    assert "train_gpt.py --preset tiny --steps 2 --recipe nvfp4` on a processor, 2 cores, 2023-11-1" in text


def test_an_interrupted_run_is_no_result(tool, demo_result, tmp_path):
    measured, source = tool("measured_table"), tmp_path / "results.json"
    source.write_text(json.dumps({**demo_result, "complete": False}))
    for use in (measured.demo_table, lambda path: measured.record(path, tmp_path / "demo.json")):
        with pytest.raises(ValueError, match="interrupted"):
            use(source)


def test_blocks_are_replaced_between_their_markers(tool):
    block = tool("marked_block")
    page = "a\n<!-- one -->\nold\n<!-- /one -->\nb\n"
    written = block.write_block(page, "one", "new | line\n")
    assert written == "a\n<!-- one -->\n\nnew | line\n\n<!-- /one -->\nb\n"
    assert block.read_block(written, "one") == "new | line"
    assert block.write_block(written, "one", "new | line") == written


@pytest.mark.parametrize(
    "page", ["", "<!-- one -->", "<!-- /one --><!-- one -->", "<!-- one --> <!-- one --><!-- /one -->"]
)
def test_a_page_without_its_markers_is_refused(tool, page):
    with pytest.raises(ValueError, match="once each"):
        tool("marked_block").read_block(page, "one")


def test_the_architecture_page_lists_every_file(tool):
    block, files = tool("marked_block"), tool("files_table")
    committed = block.read_block(files.PAGE.read_text(), files.BLOCK)
    listed = re.findall(r"^\| `(.*?)` \| .+ \|$", committed, re.MULTILINE)
    found = [path.relative_to(files.PACKAGE).as_posix() for paths in files.files_by_folder().values() for path in paths]
    assert listed == found, "run: python tools/files_table.py --write"
