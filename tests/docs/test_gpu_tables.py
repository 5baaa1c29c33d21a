"""The tables of GPU results: misses in bold, figures beyond a limit marked, reasons why a row is not there."""

import importlib
import json

import pytest

from tests.docs.test_code_blocks import ROOT

COMMON = {
    "mode": "eager", "backend": "native", "dtype": "bfloat16", "device": "a GPU", "driver": "1", "date": "2026-11-20",
    "versions": {"torch": "2.11", "triton": "3.6"}, "command": "python -m benchmarks linear",
}  # fmt: skip


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("gpu_tables")


@pytest.fixture
def written(tmp_path):
    def write(rows, **document):
        path = tmp_path / "rows.json"
        path.write_text(json.dumps({"command": "", "rows": [{**COMMON, **row} for row in rows], **document}))
        return path

    return write


def timed(row_id, ratio, **fields):
    return {"id": row_id, "shape": [16, 32, 64], "median_ms": 2.0, "base_ms": 2.0 * ratio, "ratio": ratio, **fields}


def test_misses_limits_and_absences_of_a_linear(tables, written):
    path = written([
        timed("l.delayed", 1.79, target=1.7, stretch=1.75, limit=1.72, passed=True, beyond_limit=True,
              extra={"gemms_ms": 1.75, "limit_of_run": 1.85}),
        timed("l.nvfp4", 0.73, target=0.8, stretch=0.9, limit=0.93, passed=False, beyond_limit=False),
        {"id": "l.grouped", "skipped": "no grouped matmul"},
    ])  # fmt: skip
    text = tables.linear_table(path)
    assert "| `l.delayed` | 16 x 32 -> 64 | 3.58 | 2.00 | 1.79† | 1.70 | 1.75 | 1.72 | 1.85 | 1.75 |" in text
    assert "| `l.nvfp4` | 16 x 32 -> 64 | 1.46 | 2.00 | **0.73** | 0.80 | 0.90 | 0.93 |  |  |" in text
    assert "bold" in text
    assert "†: above" in text
    assert "`l.grouped` did not run: no grouped matmul." in text
    assert "`python -m benchmarks linear` on a GPU, 2026-11-20; torch 2.11, triton 3.6." in text


def test_the_mean_of_the_shapes_of_a_cast(tables, written):
    rows = [timed("q.amax", ratio, extra={"equal_copy_ratio": 0.9, "torchao_ms": 8.0}) for ratio in (0.8, 1.0)]
    rows.append(timed("f.rmsnorm.fp8", 2.0, variant="unfused"))
    rows.append(timed("f.rmsnorm.fp8", 0.85, extra={"equal_copy_ratio": 0.8}))
    mean = {"stretch": 0.98, "limit": 1.0, "beyond_limit": False}
    summary = {
        "q.amax": {"ratio": 0.894, "worst": 0.8, "target": 0.9, "passed": False, **mean},
        "f.rmsnorm.fp8": {"ratio": 0.85, "worst": 0.85, "target": 0.8, "passed": True, **mean},
    }
    text = tables.quantize_table(written(rows, summary=summary))
    assert "| `q.amax` | **0.89** | 0.80 | 0.90 | 0.90 | 0.98 |  | 4.00 |" in text
    assert "| `f.rmsnorm.fp8` | 0.85 | 0.85 | 0.80 | 0.80 | 0.98 | 2.00 |  |" in text


def test_time_and_memory_of_a_block_stand_in_one_row(tables, written):
    extra = {"peak_gib": 4.1, "peak_ratio": 1.02}
    rows = [
        timed("b.eager", 1.7, recipe="current", variant="fused", label="b.eager.fused", tflops=1000.0, target=1.67,
              passed=True, extra=extra),
        {"id": "b.mem.eager", "recipe": "current", "variant": "fused", "value": 4.1, "unit": "GiB", "ratio": 1.02,
         "passed": False},
    ]  # fmt: skip
    text = tables.block_table(written(rows))
    assert (
        "| `b.eager.fused` | current, fused | eager | 3.40 | 2.00 | 1.70 | 1.67 |  | 1000 | 4.10 | **1.02** |" in text
    )


def test_counts_and_host_times(tables, written):
    rows = [
        {"id": "h.fwdbwd", "recipe": "delayed", "value": 600.0, "unit": "us", "ratio": 2.6, "target": 2.5,
         "passed": False},
        {"id": "h.launches", "recipe": "delayed", "variant": "forward", "value": 4, "unit": "launches", "target": 3,
         "passed": False},
    ]  # fmt: skip
    text = tables.host_table(written(rows))
    assert "| `h.fwdbwd.delayed` |  | 600.0 us | **2.6** | 2.5 |" in text
    assert "| `h.launches.delayed.forward` |  | **4 launches** |  | 3 |" in text


def test_gemms_by_shape(tables, written):
    rows = [timed("m.row.fast", 1.9, tflops=1300.0, extra={"bf16_tflops": 690.0})]
    text = tables.matmul_table(written(rows))
    assert "| bf16 | 690 |" in text
    assert "| `m.row.fast` | 1300 (1.90) |" in text


def test_kernels_by_kind(tables, written):
    names = [("nvjet_hsh", 100.0), ("cast_scaled", 10.0), ("amax_kernel", 5.0), ("Memset", 1.0), ("nvjet_x", 200.0)]
    kernels = [{"kernel": name, "us": us} for name, us in names]
    row = {"id": "profile", "recipe": "current", "value": 316.0, "unit": "us", "extra": {"kernels": kernels}}
    assert "| `current` | 0.10 + 0.20 | 0.01 | 0.01 | 0.00 | 0.32 |" in tables.profile_table(written([row]))


def test_tokens_per_second(tables, written):
    row = timed("t.gpt", 1.1, recipe="mxfp8", value=1234.6, unit="tokens/s", extra={"bf16_tokens_per_s": 1122})
    assert "| `mxfp8` | eager | 1122 | 1235 | 1.10 |" in tables.train_table(written([row]))


def test_what_was_not_measured_says_how(tables, monkeypatch, tmp_path):
    monkeypatch.setattr(tables, "RESULTS", ROOT / "benchmarks" / "nothing")
    assert tables.generated("train").startswith("Not measured yet: `python -m benchmarks train --json")


def test_weights_that_are_dequantized_once_stand_beside_codes(tables, written):
    rows = [
        timed(f"d.kept.{name}.m{m}", ratio, shape=[m, 64, 32], recipe=recipe, passed=ratio >= 0.95,
              extra={"ratio_by_codes": 0.66})
        for name, recipe in (("nvfp4", "nvfp4"), ("row", "fp8_row")) for m, ratio in ((256, 1.0), (128, 0.9))
    ]  # fmt: skip
    text = tables.decode_table(written(rows))
    assert "| 128 | **0.90** (0.66) | **0.90** (0.66) |\n| 256 | 1.00 (0.66) | 1.00 (0.66) |" in text
    assert "Weights of 32 x 64." in text
    assert "rows of x |" not in text
