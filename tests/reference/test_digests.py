"""The oracle against the known answers of docs/numerics.md; its digests are in tests/contract/test_pinned.py."""

import numpy as np
import pytest

from microfloat import formats, reference
from microfloat.formats import (
    E2M1,
    E4M3,
    E5M2,
    FP8_TENSOR,
    FP8_TENSOR_E5M2,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8,
    MXFP8_E5M2,
    NVFP4,
)  # fmt: skip
from microfloat.recipes import Cast, Current, Delayed, Hadamard
from microfloat.reference import hadamard_transform
from tests import digests
from tests.digests import (
    APPENDIX_A,
    APPENDIX_C,
    FOLDED_SCALES_N,
    FOLDS,
    SEED,
    digest,
    input_set,
)


def f32(*values):
    return np.array(values, np.float32)


def bits(*words):
    return np.array(words, np.uint32).view(np.float32)


def hexadecimal(array):
    return np.ascontiguousarray(array).tobytes().hex()


def quantize(pin):
    return reference.quantize(pin.x, pin.cast, **pin.arguments)


def test_input_sets():
    assert {name: digest(input_set(name)) for name in digests.SET_DIGESTS} == digests.SET_DIGESTS


def test_appendix_a_is_complete():
    folds = [fold for fold in FOLDS if fold.cast.format is MXFP8 and fold.set != "N"]
    assert len(APPENDIX_A) + len(folds) == 221


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.id)
def test_folding(fold):
    folded, lossy = reference.fold(reference.quantize(input_set(fold.set), fold.cast), fold.block)
    assert fold.digest(folded.scale, folded.codes, lossy) == fold.expected
    if fold.set == "N":
        assert digest(folded.scale) == FOLDED_SCALES_N[fold.block]


def test_the_other_order_of_nvfp4_scales_would_be_seen():
    q = reference.quantize(input_set("A"), NVFP4)
    block = np.repeat(formats.decode(q.scale, E4M3), 16, axis=1)
    other = formats.decode(q.unpacked_codes(), E2M1) * block * q.tensor_scale
    assert int((other != reference.dequantize(q)).sum()) == 216


def test_swizzled_and_packed_bytes():
    assert digest(reference.swizzle_scales(reference.quantize(input_set("A"), MXFP8).scale)) == "b93921aecde7"
    assert digest(reference.pack_fp6(reference.quantize(input_set("A"), MXFP6_E2M3).codes)) == "83e905a0017e"


def test_hadamard_of_a_line():
    transformed = hadamard_transform(np.arange(-8, 8, dtype=np.float32)[None] * np.float32(0.5), Hadamard())
    expected = [
        -3.25,
        -3.75,
        -0.75,
        -0.25,
        -0.75,
        -0.25,
        -3.25,
        4.25,
        -0.25,
        -0.75,
        -3.75,
        0.75,
        -3.75,
        -1.25,
        0.75,
        0.25,
    ]
    assert transformed[0].tolist() == expected


def test_two_level_of_a_line():
    q = reference.quantize(np.arange(-16, 16, dtype=np.float32)[None] * np.float32(0.37), NVFP4)
    assert hexadecimal(q.scale) == "7e7d"
    assert hexadecimal(q.codes) == "ffefeededdccab991022435465667677"
    assert int(q.tensor_scale.view(np.uint32)) == 0x3B1055D2


def test_two_level_of_a_nan_and_of_an_infinity():
    lone_nan = np.zeros((1, 32), np.float32)
    lone_nan[0, 3] = np.nan
    q = reference.quantize(lone_nan, NVFP4)
    assert (hexadecimal(q.scale), q.unpacked_codes()[0].tolist()) == ("7f00", [7] * 16 + [0] * 16)
    infinity = np.ones((1, 32), np.float32)
    infinity[0, 3] = np.inf
    q = reference.quantize(infinity, NVFP4)
    assert hexadecimal(q.scale) == "7e23"
    assert q.unpacked_codes()[0].tolist() == [0, 0, 0, 7] + [0] * 12 + [7] * 16
    assert q.tensor_scale == 1


def test_philox_known_answers():
    zero = reference.philox((0, 0, 0, 0), (0, 0))
    assert zero.tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    pi = reference.philox((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert pi.tolist() == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    ones = reference.philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2)  # the third published answer of Random123
    assert ones.tolist() == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    assert reference.derive(0x0123456789ABCDEF, 1, 2, 3) == (0x2C7DDB62, 0xEF75A72B)


def test_random_bytes_known_answers():
    stream_4 = reference.random_bytes(2, 32, SEED, 4)
    assert hexadecimal(stream_4[0, :16]) == "41759428caa3c2ce2c80c78cf374272a"
    assert hexadecimal(stream_4[0, 16:]) == "99bb93d51f90c157cb3d70ce2b704940"
    assert hexadecimal(stream_4[1, :16]) == "a093626f96dde792ceb82afdc1721cfa"
    assert hexadecimal(reference.random_bytes(1, 16, SEED, 0)) == "8183d7330587facd43a5b62b04715e59"
    assert hexadecimal(reference.random_bytes(2, 16, SEED, 4, batch=3)[1]) == "0b0824794b0e12ec7800b8295cd44c3a"


def test_stochastic_rounding_example():
    y = f32(0.3, -0.3, 1.9, 2.2, 5, -6.5, 0, -0.0, 0.26, 0.24, 3.4, 4, 1, 0.75, 1.75, 2.5)
    stochastic = formats.encode_bits(y, E2M1, reference.random_bytes(1, 16, SEED, 4)[0])
    assert "".join(f"{code:x}" for code in stochastic) == "09447f0800662134"
    assert "".join(f"{code:x}" for code in formats.encode(y, E2M1)) == "19446f0810562244"


def test_delayed_example():
    history, scale_enc, seen = np.zeros(4, np.float32), np.float32(1), []
    for amax in (2, 8, 1, 0, 4, 1, 1, 1, 1):
        history = reference.record_amax(history, amax)
        history, scale_enc = reference.update_delayed(history, scale_enc, E4M3)
        seen.append(float(scale_enc))
    assert seen == [224, 56, 56, 56, 56, 112, 112, 112, 448]


# Appendix B: scale byte / first data byte of a block [v, 0, 0, ...] under E4M3 floor, ceil, even, rceil, then E2M1.
APPENDIX_B = """
0 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00
2^-149 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00 | 0/00
2^-128 | 0/30 | 0/30 | 0/30 | 0/30 | 0/01 | 0/01 | 0/01 | 0/01
2^-127 | 0/38 | 0/38 | 0/38 | 0/38 | 0/02 | 0/02 | 0/02 | 0/02
2^-126 | 0/40 | 0/40 | 0/40 | 0/40 | 0/04 | 0/04 | 0/04 | 0/04
2^-119 | 0/78 | 0/78 | 0/78 | 0/78 | 6/06 | 6/06 | 6/06 | 6/06
2^-118 | 1/78 | 1/78 | 1/78 | 1/78 | 7/06 | 7/06 | 7/06 | 7/06
1 | 119/78 | 119/78 | 119/78 | 119/78 | 125/06 | 125/06 | 125/06 | 125/06
1+ulp | 119/78 | 120/70 | 119/78 | 119/78 | 125/06 | 126/04 | 125/06 | 125/06
1.5 | 119/7c | 120/74 | 119/7c | 119/7c | 125/07 | 126/05 | 125/07 | 125/07
1.75 | 119/7e | 120/76 | 119/7e | 119/7e | 125/07 | 126/06 | 126/06 | 126/06
1.75+ulp | 119/7e | 120/76 | 119/7e | 120/76 | 125/07 | 126/06 | 126/06 | 126/06
1.875 | 119/7e | 120/77 | 119/7e | 120/77 | 125/07 | 126/06 | 126/06 | 126/06
1.9375 | 119/7e | 120/78 | 120/78 | 120/78 | 125/07 | 126/06 | 126/06 | 126/06
448 | 127/7e | 128/76 | 127/7e | 127/7e | 133/07 | 134/06 | 134/06 | 134/06
448+ulp | 127/7e | 128/76 | 127/7e | 128/76 | 133/07 | 134/06 | 134/06 | 134/06
6 | 121/7c | 122/74 | 121/7c | 121/7c | 127/07 | 128/05 | 127/07 | 127/07
6+ulp | 121/7c | 122/74 | 121/7c | 121/7c | 127/07 | 128/05 | 127/07 | 128/05
2^127 | 246/78 | 246/78 | 246/78 | 246/78 | 252/06 | 252/06 | 252/06 | 252/06
FMAX | 246/7e | 247/78 | 247/78 | 247/78 | 252/07 | 253/06 | 253/06 | 253/06
Inf | 255/7f | 255/7f | 255/7f | 255/7f | 255/77 | 255/77 | 255/77 | 255/77
-Inf | 255/7f | 255/7f | 255/7f | 255/7f | 255/77 | 255/77 | 255/77 | 255/77
NaN | 255/7f | 255/7f | 255/7f | 255/7f | 255/77 | 255/77 | 255/77 | 255/77
"""
ULP_ABOVE = {"1+ulp": 1.0, "1.75+ulp": 1.75, "448+ulp": 448.0, "6+ulp": 6.0}


def boundary_value(text):
    if text in ULP_ABOVE:
        return np.nextafter(np.float32(ULP_ABOVE[text]), np.float32(np.inf))
    if text.startswith("2^"):
        return np.float32(2.0 ** int(text[2:]))
    return np.finfo(np.float32).max if text == "FMAX" else np.float32(text)


@pytest.mark.parametrize("row", APPENDIX_B.strip().splitlines(), ids=lambda row: row.split(" |")[0])
def test_boundary_bytes(row):
    text, *cells = (cell.strip() for cell in row.split("|"))
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = boundary_value(text)
    casts = [Cast(fmt, rule) for fmt in (MXFP8, MXFP4) for rule in ("floor", "ceil", "even", "rceil")]
    found = []
    for cast in casts:
        q = reference.quantize(x, cast)
        found.append(f"{q.scale[0, 0]}/{q.codes[0, 0]:02x}")
    assert found == cells


def test_appendix_b_is_complete():
    assert sum(row.count("|") for row in APPENDIX_B.strip().splitlines()) == 184


# C.1: the order of the sums decides these blocks.
@pytest.mark.parametrize(
    ("rule", "row", "second", "data", "sb", "tensor_scale"),
    [
        ("four_over_six_mae_256", "11.5 -10 6.5 -1 -1.5 -3 -8.5 -6.5 6.5 -.5 -6 -7.5 10 1 -8 -1.5", 13,
         "f795bade95ed17ae", "7678", 0x3C0AAAAB),
        ("four_over_six_mse_256", "-8.5 -8.5 -4 7 -7.5 -7 9 -10 -8 3 1 3 3 4.5 5 11.5", 13,
         "ee6ceef63e314375", "7678", 0x3C0AAAAB),
        ("four_over_six_mse_256", "10 2.5 11.5 -8 -3 -2.5 10 2 -3.5 -7.5 -4 -5 -10.5 -1.5 2.5 -7.5", 100,
         "25d6aa15dabb9ed2", "6378", 0x3D855555),
    ],
)  # fmt: skip
def test_four_over_six_order(rule, row, second, data, sb, tensor_scale):
    """Features R16."""
    x = np.zeros((2, 16), np.float32)
    x[0], x[1, 0] = np.array(row.split(), np.float32), second
    q = reference.quantize(x, Cast(NVFP4, rule))
    assert (hexadecimal(q.codes[0]), hexadecimal(q.scale)) == (data, sb)
    assert q.codes[1].tolist() == [7] + [0] * 7
    assert int(q.tensor_scale.view(np.uint32)) == tensor_scale


def test_a_nan_of_negative_sign():
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = bits(0xFFC00001)[0]
    expected = {MXFP8: 0x7F, MXFP8_E5M2: 0x7F, MXFP6_E2M3: 0x1F, MXFP6_E3M2: 0x1F, MXFP4: 0x77}
    for fmt, byte in expected.items():
        q = reference.quantize(x, Cast(fmt, "rceil"))
        assert (int(q.scale[0, 0]), set(q.codes[0].tolist())) == (255, {byte})
        assert int(formats.encode(x, fmt.element)[0, 0]) == fmt.element.nan_code
        assert np.isnan(reference.dequantize(q)).all()


@pytest.mark.parametrize(
    ("rule", "byte", "tensor_scale"), [("two_level", 0, 1), ("two_level_torchao", 8, 1), ("one_level_e4m3", 8, None)]
)
def test_zeros(rule, byte, tensor_scale):
    q = reference.quantize(np.zeros((2, 32), np.float32), Cast(NVFP4, rule))
    assert (set(q.scale.flat), set(q.codes.flat)) == ({byte}, {0})
    assert q.tensor_scale == tensor_scale


@pytest.mark.parametrize(
    ("x", "scale", "e4m3", "e5m2"),
    [
        (bits(0x006CE3EE, 0x803671F7, 0x80000000, 0), 0x00800000, "36ae8000", "3bb78000"),
        (bits(0x04DD2EFC, 0x845D2EFC, 0x80000000, 0), 0x00800000, "7ef68000", "5fdb8000"),
        (f32(np.inf, 1, -0.0, np.nan), 0x3F800000, "7e38807f", "7b3c807f"),
    ],
)
def test_tiny_and_infinite_tensors(x, scale, e4m3, e5m2):
    for fmt, codes in ((FP8_TENSOR, e4m3), (FP8_TENSOR_E5M2, e5m2)):
        q = reference.quantize(x[None], fmt)
        assert (int(q.scale.view(np.uint32)), hexadecimal(q.codes)) == (scale, codes)


def test_epsilon_changes_56_scales():
    x = input_set("A")
    plain = reference.quantize(x, Cast("fp8_1x128", "amax"))
    floored = reference.quantize(x, Cast("fp8_1x128", "amax", scaling=Current(1.9e6)))
    assert int((plain.scale != floored.scale).sum()) == 56
    assert plain.scale.size == 128


def test_delayed_update_with_extreme_amaxes():
    history, scale_enc, seen = np.zeros(3, np.float32), np.float32(1), []
    for amax in (np.inf, np.nan, 1e-40, 0, 2, np.inf):
        history = reference.record_amax(history, amax)
        history, scale_enc = reference.update_delayed(history, scale_enc, E4M3)
        seen.append(f"{int(scale_enc.view(np.uint32)):08X}")
    assert seen == ["3F800000", "3F800000", "7E800000", "7E800000", "43600000", "43600000"]
    assert history.tolist() == [0, 2, 0]


@pytest.mark.parametrize(
    ("fmt", "word", "scale", "code"),
    [
        (MXFP8, 0x3FE703BC, 119, 0x7E),
        (MXFP8, 0x3FE703BD, 120, 0x76),
        (MXFP4, 0x3FDF8FFF, 125, 7),
        (MXFP4, 0x3FDF9000, 126, 5),
    ],
)
def test_outlier_aware_thresholds(fmt, word, scale, code):
    x = np.zeros((1, 32), np.float32)
    x[0, 0] = bits(word)[0]
    q = reference.quantize(x, Cast(fmt, "oas"))
    assert (int(q.scale[0, 0]), int(q.codes[0, 0])) == (scale, code)


def test_hadamard_order_of_additions():
    words = "c08e 3a95 b8ad 3c99 bd7b 3a68 c470 3e70 38a5 3e16 4438 c503 bd18 40ad 43c9 b81c"
    expected = "c40e 43ef 440e c3f1 c454 4349 4453 c348 4483 3f3f c483 bec4 43b8 c42b c3b8 442a"
    x = bits(*(int(word, 16) << 16 for word in words.split()))
    transformed = hadamard_transform(x[None], Hadamard())[0]
    assert " ".join(f"{word >> 16:04x}" for word in transformed.view(np.uint32).tolist()) == expected


@pytest.mark.parametrize(
    ("pin_id", "codes", "scale"),
    [
        ("C.7 nvfp4 axis -1", (50, 128), (50, 16)),
        ("C.7 nvfp4 axis -2", (250, 32), (250, 4)),
        ("C.7 mxfp8", (50, 256), (50, 8)),
        ("C.8 mxfp4 odd", (64, 17), (64, 2)),
        ("C.8 nvfp4_2d 3-D", (4, 8, 256), (2, 32)),
        ("C.8 nvfp4 stochastic 3-D", (4, 8, 256), (4, 8, 32)),
        ("C.8 fp8_128x128 3-D", (4, 8, 512), (1, 4)),
    ],
)
def test_shapes(pin_id, codes, scale):
    (pin,) = (pin for pin in APPENDIX_C if pin.id == pin_id)
    q = quantize(pin)
    assert (q.codes.shape, q.scale.shape) == (codes, scale)
    assert reference.dequantize(q).shape == pin.x.shape


def test_delayed_cast_uses_the_given_scale():
    x = f32(1, -2, 3, 500)[None]
    q = reference.quantize(x, Cast(FP8_TENSOR_E5M2, scaling=Delayed()), scale_enc=np.float32(0.3))
    assert np.array_equal(q.codes, formats.encode(x * np.float32(0.3), E5M2))
    assert q.scale == np.float32(1) / np.float32(0.3)
