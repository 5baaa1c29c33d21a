"""The table of docs/laboratory/jax.md is what its generator gives, and the generator says what a result holds."""

import importlib
import json

import pytest

from tests.docs.test_code_blocks import ROOT


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("jax_tables")


@pytest.fixture
def result():
    """Results as benchmarks/jax_linear.py writes them, shortened."""
    seen = {"__cublas$lt$matmul$f8": [{"kind": "__cublas$lt$matmul$f8"}], "triton": [{"kind": "__triton_gemm"}]}
    gemms = {role: {"gemms": 1, "fp8": 1, "seen": seen["__cublas$lt$matmul$f8"]} for role in ("fprop", "dgrad")}
    gemms["wgrad"] = {"gemms": 1, "fp8": 1, "seen": seen["triton"]}
    shape, common = [16384, 4096, 14336], {"ratio_of": "bf16", "passed": True, "limit": 1.8}
    rows = [
        {"id": "j.l.delayed", "shape": shape, "bf16_ms": 8.0, "median_ms": 5.0, "ratio": 1.6, "target": 1.5,
         "temporary_ratio": 1.25, "hlo": {"gemms": gemms}, **common},
        {"id": "j.l.delayed.flax", "shape": shape, "flax_ms": 6.0, "median_ms": 5.0, "ratio": 1.2, "target": 1.0},
        {"id": "j.l.row", "shape": shape, "passed": False, "reason": "differs from the reference backend; not timed"},
    ]  # fmt: skip
    return {
        "command": "python benchmarks/jax_linear.py", "machine": "A GPU", "date": "2026-11-20", "python": "3.12.3",
        "versions": {"jax": "0.11.0", "flax": None}, "rows": rows,
    }  # fmt: skip


def test_the_page_holds_what_the_generator_gives(tables):
    block = importlib.import_module("marked_block")
    for page, name, make in tables.BLOCKS:
        assert block.read_block(page.read_text(), name) == make(), "run: python tools/jax_tables.py --write"


def test_a_row_per_measurement(tables, result, tmp_path):
    path = tmp_path / "jax_linear.json"
    path.write_text(json.dumps(result))
    text = tables.jax_linear_table(path)
    gemms = "fprop cuBLASLt FP8, dgrad cuBLASLt FP8, wgrad triton_gemm"
    assert f"| `j.l.delayed` | 16384 x 4096 x 14336 | 8.00 | 5.00 | 1.60 | 1.50 | {gemms} | 1.25 |" in text
    assert "| `j.l.delayed.flax` | 16384 x 4096 x 14336 | 6.00 | 5.00 | 1.20 | 1.00 |  |  |" in text
    assert "Flax's own" in text
    assert "| `j.l.row` | 16384 x 4096 x 14336 |  |  |  |  | differs from the reference backend; not timed |  |" in text
    assert "`python benchmarks/jax_linear.py` on A GPU, 2026-11-20; jax 0.11.0, Python 3.12.3." in text


def test_a_missing_result_is_said(tables, monkeypatch):
    assert "No result" in tables.jax_linear_table(ROOT / "benchmarks" / "results" / "no_such.json")
