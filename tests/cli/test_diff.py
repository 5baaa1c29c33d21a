"""`microfloat diff`: features O6."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from tests.cli.checkpoints import llama, nvfp4_file, write

pytest.importorskip("typer", reason="typer is not installed")


@pytest.fixture
def pair(tmp_path):
    """Two files of two tensors; the second one of B is off by a little, and B's NaN stands where A's does."""
    generator = np.random.default_rng(3)
    same, other = (generator.normal(size=(300, 32)).astype(np.float32) for _ in range(2))
    same[5, 5] = np.nan
    noisy = other * np.float32(1.01)
    write(tmp_path / "a.safetensors", {"same.weight": same, "other.weight": other})
    write(tmp_path / "b.safetensors", {"same.weight": same, "other.weight": noisy})
    return tmp_path / "a.safetensors", tmp_path / "b.safetensors", other, noisy


def test_figures_are_those_of_the_metrics(microfloat, pair, monkeypatch):
    from microfloat import metrics
    from microfloat.cli import diff

    a, b, other, noisy = pair
    for elements in (1 << 22, 1000):  # in one window, and in several
        monkeypatch.setattr(diff, "ELEMENTS", elements)
        done = microfloat("diff", a, b, "--json")
        assert done.code == 0
        rows = {row["name"]: row for row in done.json["tensors"]}
        row = rows["other.weight"]
        assert row["sqnr_db"] == pytest.approx(metrics.sqnr_db(other, noisy))
        assert row["relative"] == pytest.approx(metrics.relative_error(other, noisy))
        assert row["max_abs"] == pytest.approx(np.abs(noisy - other).max(), rel=1e-6)
        assert rows["same.weight"]["sqnr_db"] == "inf"
        assert rows["same.weight"]["non_finite"] == 1


def test_a_threshold(microfloat, pair):
    a, b, *_ = pair
    assert microfloat("diff", a, b, "--threshold-db", 39).code == 0
    done = microfloat("diff", a, b, "--threshold-db", 41, "--json")
    assert done.code == 1
    assert [row["problem"] for row in done.json["tensors"]] == [None, "below 41 dB"]
    assert microfloat("diff", a, b, "--threshold-db", 41, "--layers", "same").code == 0


def test_nan_where_the_reference_is_finite_is_a_problem(microfloat, pair, tmp_path):
    a, _, other, _ = pair
    broken = other.copy()
    broken[0, 0] = np.nan
    write(tmp_path / "b.safetensors", {"other.weight": broken})
    done = microfloat("diff", a, tmp_path / "b.safetensors", "--layers", "other", "--json")
    assert done.code == 1
    (row,) = done.json["tensors"]
    assert "NaN" in row["problem"]
    assert row["max_abs"] == "nan"
    done = microfloat("diff", tmp_path / "b.safetensors", a, "--layers", "other", "--json")  # the other way round
    assert done.code == 1
    assert done.json["tensors"][0]["problem"].startswith("B differs where A has NaN or infinity")
    assert microfloat("diff", tmp_path / "b.safetensors", tmp_path / "b.safetensors").code == 0


def test_the_first_differing_byte_of_packed_codes(microfloat, tmp_path):
    a = nvfp4_file(tmp_path)
    data = bytearray(a.read_bytes())
    header = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + header])["model.layers.0.mlp.up_proj.weight_packed"]["data_offsets"]
    place = 8 + header + start + 3 * 32 + 5  # byte 5 of row 3: elements 10 and 11
    was = data[place] >> 4
    data[place] ^= 0x30
    b = tmp_path / "b.safetensors"
    b.write_bytes(data)
    done = microfloat("diff", a, b, "--bytes", "--json")
    assert done.code == 1
    (row,) = done.json["tensors"]
    assert (row["part"], row["index"], row["differing"]) == ("codes", [3, 11], 1)
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    assert (int(row["code_a"], 16), int(row["code_b"], 16)) == (was, was ^ 3)
    assert (row["value_a"], row["value_b"]) == (values[was], values[was ^ 3])
    assert microfloat("diff", a, a, "--bytes").code == 0


def test_bytes_of_scales_and_of_plain_tensors(microfloat, tmp_path, pair):
    a, b, _, noisy = pair
    rows = microfloat("diff", a, b, "--bytes", "--json").json["tensors"]
    assert [(row["name"], row["index"]) for row in rows] == [("other.weight", [0, 0])]
    assert rows[0]["value_b"] == pytest.approx(float(noisy[0, 0]))
    first = nvfp4_file(tmp_path)
    data = bytearray(first.read_bytes())
    header = int.from_bytes(data[:8], "little")
    start, _ = json.loads(data[8 : 8 + header])["model.layers.0.mlp.up_proj.weight_scale"]["data_offsets"]
    data[8 + header + start + 6] ^= 1
    second = tmp_path / "scale.safetensors"
    second.write_bytes(data)
    (row,) = microfloat("diff", first, second, "--bytes", "--json").json["tensors"]
    assert (row["part"], row["index"]) == ("scale", [1, 2])
    code = int(row["code_b"], 16)
    assert row["value_b"] == float(np.array([code], np.uint8).view(ml_dtypes.float8_e4m3fn)[0])


def test_tensors_that_only_one_has_and_other_shapes(microfloat, tmp_path):
    x = np.ones((4, 4), np.float32)
    write(tmp_path / "a.safetensors", {"x": x, "a": x, "y": x})
    write(tmp_path / "b.safetensors", {"x": x, "b": x, "y": x[:2]})
    done = microfloat("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--json")
    assert done.code == 1
    assert (done.json["only_a"], done.json["only_b"]) == (["a"], ["b"])
    assert "shape [2, 4]" in {row["name"]: row["problem"] for row in done.json["tensors"]}["y"]
    text = microfloat("diff", tmp_path / "a.safetensors", tmp_path / "b.safetensors", columns=40).out
    assert max(map(len, text.splitlines())) <= 40


def test_a_quantized_copy_against_its_original_with_a_picture(microfloat, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from microfloat import reference

    model = llama(tmp_path)
    x = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)  # what nvfp4_file quantizes
    write(tmp_path / "plain.safetensors", {"model.layers.0.mlp.up_proj.weight": x})
    path = tmp_path / "errors.png"
    done = microfloat("diff", tmp_path / "plain.safetensors", nvfp4_file(tmp_path), "--plot", path, "--json")
    (row,) = done.json["tensors"]
    noise = np.square(reference.dequantize(reference.quantize(x, "nvfp4")).astype(np.float64) - x).sum()
    assert row["sqnr_db"] == pytest.approx(10 * math.log10(np.square(x, dtype=np.float64).sum() / noise), abs=1e-3)
    assert row["formats"] == ["float32", "nvfp4"]
    assert path.stat().st_size > 10_000
    assert microfloat("diff", model, model, "--plot", tmp_path / "equal.png").code == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["A", "nowhere"], "B: got nowhere"),
        (["A", "OTHER"], "tensors of the same names"),
        (["A", "A", "--layers", "nothere"], "--layers"),
        (["A", "A", "--bytes", "--threshold-db", "3"], "--threshold-db"),
        (["A", "A", "--threshold-db", "nan"], "finite"),
        (["A", "A", "--plot", "x"], "--plot"),
    ],
)
def test_a_wrong_question_exits_2(microfloat, pair, tmp_path, words, named):
    write(tmp_path / "other.safetensors", {"z": np.ones(3, np.float32)})
    paths = {"A": pair[0], "OTHER": tmp_path / "other.safetensors"}
    microfloat("diff", *[paths.get(word, word) for word in words]).refuses(named)
