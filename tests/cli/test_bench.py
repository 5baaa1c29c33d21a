"""`microfloat bench`: features O8."""

import csv
import json

import pytest

from microfloat.cli import bench, machine
from microfloat.pictures import roofline

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("typer", reason="typer is not installed")
SMALL = ("--device", "cpu", "--milliseconds", "1")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The document of a run, and the file that holds it."""
    from typer.testing import CliRunner

    from microfloat.cli.app import app

    words = ["bench", "--shapes", "32x48x64,64x64x64", "--formats", "mxfp8,nvfp4", *SMALL, "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    path = tmp_path_factory.mktemp("bench") / "now.json"
    path.write_text(result.stdout)
    return json.loads(result.stdout), path


def test_a_row_for_each_shape_and_format(measured):
    document, _ = measured
    assert document["device"] == machine.processor()
    assert document["versions"]["torch"]
    assert document["copy_gbs"] > 0
    rows = {(row["shape"], row["format"]): row for row in document["rows"]}
    assert set(rows) == {(shape, name) for shape in ("32x48x64", "64x64x64") for name in ("mxfp8", "nvfp4")}
    row = rows["32x48x64", "nvfp4"]
    assert (row["m"], row["n"], row["k"]) == (32, 48, 64)
    assert row["operands"] == ["nvfp4", "nvfp4_2d"]
    assert row["gemm_p10_ms"] <= row["gemm_ms"] <= row["gemm_p90_ms"]
    assert row["tflops"] == pytest.approx(2 * 32 * 48 * 64 / row["gemm_ms"] / 1e9)
    assert row["ratio_to_bf16"] == pytest.approx(row["bf16_ms"] / row["gemm_ms"])
    assert row["quantize_gbs"] == pytest.approx(32 * 64 * (2 + 4.5 / 8) / row["quantize_ms"] / 1e6)


def test_a_regression_against_a_baseline_exits_1(microfloat, measured, tmp_path):
    document, _ = measured
    words = ("--shapes", "64x64x64", "--formats", "mxfp8", *SMALL, "--json")

    def run(factor):
        rows = [{**row, "gemm_ms": row["gemm_ms"] * factor, "quantize_ms": row["quantize_ms"] * factor}
                for row in document["rows"]]  # fmt: skip
        path = tmp_path / "before.json"
        path.write_text(json.dumps({**document, "rows": rows}))
        return microfloat("bench", "--baseline", path, *words)

    done = run(1e-3)
    assert done.code == 1
    assert done.json["regressions"] == ["gemm mxfp8 64x64x64", "quantize mxfp8 64x64x64"]
    done = run(1e3)
    assert done.code == 0
    assert done.json["regressions"] == []
    assert done.json["rows"][0]["change"] < -0.9


def test_a_result_that_differs_is_not_timed(microfloat, monkeypatch):
    from microfloat.torch.timing import Maker

    monkeypatch.setattr(Maker, "difference", lambda self, shape: 0.5)
    done = microfloat("bench", "--shapes", "64x64x64", "--formats", "mxfp8", *SMALL, "--json")
    assert done.code == 1
    (row,) = done.json["rows"]
    assert "differs from the reference" in row["problem"]
    assert "gemm_ms" not in row


def test_a_gpu_multiplies_operands_as_a_layer_makes_them(microfloat):
    """As on a Hopper: every recipe, and formats of no recipe; operands folded, decoded or as they are."""
    from microfloat.recipes import RECIPES
    from microfloat.torch import backends
    from tests.torch.linear.scheduled.setting import block_gemms

    names = [*RECIPES, "mxfp6_e2m3", "nvfp4_row"]
    with backends.pretend(chip="h200", interpreted=False), block_gemms("cpu", []):
        done = microfloat("bench", "--shapes", "32x48x64", "--formats", ",".join(names), *SMALL, "--json")
    assert done.code == 0
    rows = {row["format"]: row for row in done.json["rows"]}
    assert list(rows) == names
    assert "vendor FP8 GEMM" in rows["fp8_row"]["kernel"]
    assert "fold" in rows["mxfp4"]["kernel"]
    assert all(row["gemm_ms"] > 0 for row in rows.values())


def test_a_kernel_that_does_not_compile_is_a_row_with_its_problem(microfloat, monkeypatch):
    from microfloat.torch.timing import Maker

    class CompilationError(Exception):
        """Triton's are no RuntimeErrors."""

    def fails(self, x, w):
        raise CompilationError("at 12:3:\n  store(scale_ptr, scale)")

    monkeypatch.setattr(Maker, "bound", fails)
    done = microfloat("bench", "--shapes", "64x64x64", "--formats", "mxfp8", *SMALL, "--json")
    assert done.code == 1
    assert done.json["rows"][0]["problem"] == "CompilationError: at 12:3: store(scale_ptr, scale)"


def test_a_table_file_and_a_picture(microfloat, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    table, picture = tmp_path / "rows.csv", tmp_path / "roof.png"
    words = ("--shapes", "32x32x32", "--formats", "fp8_128x128", *SMALL)
    done = microfloat("bench", *words, "--csv", table, "--plot", picture, columns=80)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= 80
    with table.open() as file:
        (row,) = csv.DictReader(file)
    assert float(row["gemm_ms"]) > 0
    assert picture.stat().st_size > 5000
    assert roofline([], 100.0, "nothing").axes  # a run without a single time still has a picture


def test_shapes_by_name():
    assert bench.Shape(4096, 28672, 4096) in bench.shapes_of("llama8b,8x8x8")
    assert bench.shapes_of("8x16x32,8x16x32") == [bench.Shape(8, 16, 32)]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--shapes", "8x8"], "--shapes: got '8x8'"),
        (["--shapes", "0x8x8"], "--shapes"),
        (["--formats", "nvpf4"], "Did you mean 'nvfp4'"),
        (["--formats", ","], "--formats"),
        (["--device", "tpu"], "--device"),
        (["--baseline", "nowhere.json"], "nowhere.json"),
        (["--plot", "roof.txt"], "--plot"),
        (["--csv", "nowhere/table.csv"], "Create nowhere first"),
        (["--csv", "."], "This is a folder"),
    ],
)
def test_a_wrong_question_exits_2(microfloat, words, named):
    microfloat("bench", *words).refuses(named)


def test_a_baseline_that_does_not_compare_exits_2(microfloat, measured, tmp_path):
    document, path = measured
    words = ("--formats", "mxfp8", *SMALL, "--baseline")
    assert "without any of these" in microfloat("bench", "--shapes", "16x16x16", *words, path).err
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**document, "device": "NVIDIA H200"}))
    assert "times of different devices do not compare" in microfloat("bench", *words, other).err
    other.write_text("[1]")
    assert "microfloat bench --json" in microfloat("bench", *words, other).err
    other.write_text("{")
    assert "It is no JSON" in microfloat("bench", *words, other).err
