"""`microfloat formats`: features O7."""

import math

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from microfloat.formats import ELEMENTS, FORMATS

DTYPES = {
    "E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2, "E3M2": ml_dtypes.float6_e3m2fn,
    "E2M3": ml_dtypes.float6_e2m3fn, "E2M1": ml_dtypes.float4_e2m1fn,
}  # fmt: skip


def test_every_element_and_format_is_listed(microfloat):
    document = microfloat("formats", "--json").json
    assert [row["name"] for row in document["elements"]] == list(ELEMENTS)
    assert [row["name"] for row in document["formats"]] == list(FORMATS)
    bits = {row["name"]: row["bits_per_element"] for row in document["formats"]}
    assert bits["nvfp4"] == 4.5
    assert bits["mxfp6_e2m3"] == 6.25
    assert bits["fp8_128x128"] == pytest.approx(8.002, abs=1e-3)
    layouts = {row["name"]: row["layout"] for row in document["elements"]}
    assert layouts["E4M3"] == "S EEEE MMM"


def test_a_name_shows_what_belongs_to_it(microfloat):
    document = microfloat("formats", "NVFP4", "--json").json
    assert [row["name"] for row in document["elements"]] == ["E2M1"]
    assert [row["name"] for row in document["formats"]] == ["nvfp4"]
    document = microfloat("formats", "e2m1", "--json").json
    assert {row["name"] for row in document["formats"]} == {"mxfp4", "nvfp4", "nvfp4_row", "nvfp4_2d"}


def test_the_scale_e8m0_is_a_name(microfloat):
    done = microfloat("formats", "e8m0")
    assert "2^(b - 127)" in done.out
    document = microfloat("formats", "E8M0", "--json").json
    assert document["elements"] == []
    assert {row["scale"] for row in document["formats"]} == {"E8M0"}
    microfloat("formats", "e8m0", "--values").refuses("an element")


@pytest.mark.parametrize("element", ELEMENTS)
def test_the_values_are_those_of_another_implementation(microfloat, element):
    rows = microfloat("formats", element, "--values", "--json").json["values"][element]
    want = np.arange(1 << ELEMENTS[element].bits, dtype=np.uint8).view(DTYPES[element]).astype(float)
    np.testing.assert_array_equal([float(row["value"]) for row in rows], want)
    assert [int(row["code"], 16) for row in rows] == list(range(len(rows)))


def test_codes_are_decoded(microfloat):
    rows = microfloat("formats", "decode", "0x3C", "0b1", "255", "--as", "e4m3", "--json").json["codes"]
    assert [row["value"] for row in rows] == [1.5, 2.0**-9, "nan"]
    assert [row["kind"] for row in rows] == ["normal", "subnormal", "NaN"]
    assert rows[0]["bits"] == "0 0111 100"
    rows = microfloat("formats", "decode", "127", "0", "255", "--as", "e8m0", "--json").json["codes"]
    assert [row["value"] for row in rows] == [1.0, 2.0**-127, "nan"]


@pytest.mark.parametrize("words", [["-1e9"], ["--", "-1e9"]])
def test_negative_numbers_are_values(microfloat, words):
    for line in (["encode", *words, "--as", "e4m3"], ["encode", "--as", "e4m3", *words]):
        (row,) = microfloat("formats", *line, "--json").json["values"]
        assert (row["input"], row["value"], row["saturated"]) == (-1e9, -448.0, True)


def test_values_are_encoded(microfloat):
    done = microfloat("formats", "encode", "1.7", "-0.3", "9", "2.5", "inf", "--as", "nvfp4", "--json")
    rows = done.json["values"]
    assert [row["value"] for row in rows] == [1.5, -0.5, 6.0, 2.0, 6.0]  # 2.5 is a tie: the even code is that of 2
    assert [row["saturated"] for row in rows] == [False, False, True, False, True]
    assert (rows[0]["below"], rows[0]["above"]) == (1.5, 2.0)
    assert rows[0]["relative_error"] == pytest.approx(-0.2 / 1.7)
    assert rows[4]["relative_error"] is None
    assert rows[2]["above"] is None


def test_the_picture_of_the_number_lines(microfloat, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "lines.png"
    done = microfloat("formats", "--plot", path, "--json")
    assert done.json["plot"] == str(path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_formats_are_measured_on_a_tensor(microfloat, tmp_path):
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    save_file({"w": x.astype(np.float16), "b": x[0]}, tmp_path / "x.safetensors")
    for words in (["x.npy"], ["x.safetensors", "--tensor", "w"], ["x.safetensors", "--tensor", "b"]):
        names = ["nvfp4", "int4:ue5m3:1x16"]
        rows = microfloat("formats", *names, "--on", tmp_path / words[0], *words[1:], "--json").json["comparison"]
        assert [row["format"] for row in rows] == names
        assert all(row["sqnr_db"] > 15 for row in rows)
    assert len(microfloat("formats", "--on", tmp_path / "x.npy", "--json").json["comparison"]) == len(FORMATS)
    microfloat("formats", "nvfp4", "--on", tmp_path / "x.safetensors").refuses("--tensor: got '', needed one of")
    np.save(tmp_path / "object.npy", np.array([object()]), allow_pickle=True)
    microfloat("formats", "nvfp4", "--on", tmp_path / "object.npy").refuses("--on: got")


@pytest.mark.parametrize("name", ["e3m1", "int5"])
def test_an_element_without_a_stock_format_has_no_empty_table(microfloat, name):
    done = microfloat("formats", name)
    assert "Elements" in done.out
    assert "elements and their scales" not in done.out
    assert microfloat("formats", name, "--json").json["formats"] == []
    assert "elements and their scales" in microfloat("formats", "e3m2").out


def test_elements_and_formats_that_their_names_say(microfloat):
    (row,) = microfloat("formats", "int4:ue5m3:1x16", "--json").json["formats"]
    assert (row["element"], row["scale"], row["scale_rule"]) == ("INT4", "UE5M3", "one_level")
    rows = microfloat("formats", "e3m0", "--values", "--json").json["values"]["E3M0"]
    assert [row["value"] for row in rows[:8]] == [0, 0.25, 0.5, 1, 2, 4, 8, 16]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nvpf4"], "Did you mean 'nvfp4'"),
        (["decode", "0x1FF", "--as", "e4m3"], "CODE: got 0x1FF, needed a code of E4M3, 0 to 0xff"),
        (["decode", "x", "--as", "e4m3"], "CODE: got 'x'"),
        (["decode", "--as", "e4m3"], "got no code"),
        (["decode", "1"], "Add --as e4m3"),
        (["encode", "one", "--as", "e4m3"], "VALUE: got 'one'"),
        (["encode", "1", "--as", "e8m0"], "the scale rule of a cast chooses powers of two"),
        (["e4m3", "--as", "e4m3"], "needed decode or encode before it"),
        (["e4m3", "e5m2"], "one name"),
        (["--valeus"], "option: got --valeus"),
        (["decode", "1", "--as", "e4m3", "--values"], "formats decode: got --values"),
        (["--plot", "lines.bmp"], "ends in one of .pdf, .png, .svg"),
        (["--plot", "nowhere/lines.png"], "a folder that exists"),
        (["mxfp4", "--tensor", "x"], "--on: got no file"),
        (["mxfp4", "--on", "x.npy", "--values"], "--on: got --values or --as"),
    ],
)
def test_a_wrong_question_is_answered_with_what_is_needed(microfloat, words, named):
    microfloat("formats", *words).refuses(named)


def test_a_value_that_is_no_number(microfloat):
    rows = microfloat("formats", "encode", "nan", "1e300", "--as", "e5m2", "--json").json["values"]
    assert [row["kind"] for row in rows] == ["NaN", "normal"]
    assert math.isnan(float(rows[0]["value"]))
