"""Conversions that keep the values of MX formats: bits against a statement in NumPy, and the blocks that do not fit."""

import ml_dtypes
import numpy as np
import pytest

from microfloat.checkpoint import Record, convert, load, save
from microfloat.formats import FORMATS

NAME = "model.layers.0.mlp.experts.0.down_proj.weight"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def source(folder, scale, codes, name="mxfp4", names=(NAME,), dtype="bfloat16"):
    """A checkpoint of MXFP4 bytes [N, B] and codes [N, 32 * B], or of another MX format."""
    packed = codes if name == "mxfp8" else (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    records = [
        Record(one, packed, scale.astype(np.uint8), format=FORMATS[name], logical_shape=codes.shape) for one in names
    ]
    target = {"mxfp4": "ct:mxfp4", "mxfp8": "ct:mxfp8"}[name]
    save(records, folder, format=target, config={"model_type": "llama", "dtype": dtype})
    return folder


def random(rows=136, blocks=9, spread=12, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (rows, 32 * blocks))
    codes[rows // 2] &= 8  # zeros of both signs
    return rng.integers(120 - spread, 121, (rows, blocks)), codes


def of_tile(scale, codes, sizes):
    """FP8 codes, scales and blocks with other values, tile by tile (docs/numerics.md 9.3)."""
    rows, blocks = scale.shape
    values = np.where(codes & 8, -1, 1) * E2M1[codes & 7]
    made, scales, lossy = np.zeros(codes.shape, ml_dtypes.float8_e4m3fn), [], 0
    for first in range(0, rows, sizes):
        line = []
        for group in range(0, blocks, 4):
            tile = [
                (r, b) for r in range(first, min(first + sizes, rows)) for b in range(group, min(group + 4, blocks))
            ]
            used = [scale[r, b] for r, b in tile if values[r, 32 * b : 32 * b + 32].any()]
            exponent = max(max(used, default=0) - 6, 1)
            line.append(2.0 ** (exponent - 127))
            for r, b in tile:
                x = values[r, 32 * b : 32 * b + 32]
                with np.errstate(over="ignore", invalid="ignore"):
                    y = np.where(x == 0, x, x * 2.0 ** float(scale[r, b] - exponent))
                made[r, 32 * b : 32 * b + 32] = y.astype(ml_dtypes.float8_e4m3fn)
                lossy += any(made[r, 32 * b : 32 * b + 32].astype(float) != y)
        scales.append(line)
    return made.view(np.uint8), np.array(scales, np.float32), lossy


@pytest.mark.parametrize("to", ["deepseek:fp8", "ct:fp8_block", "microfloat:fp8_1x128"])
@pytest.mark.parametrize("spread", [5, 14, 22])
def test_mxfp4_as_fp8_tiles_has_the_bits_of_the_statement(tmp_path, to, spread):
    scale, codes = random(spread=spread)
    report = convert(source(tmp_path / "source", scale, codes), tmp_path / "out", to=to)
    made, scales, lossy = of_tile(scale, codes, 1 if to.endswith("1x128") else 128)
    record, [layer] = load(tmp_path / "out")[NAME], report.layers
    np.testing.assert_array_equal(record.codes.view(np.uint8), made)
    np.testing.assert_array_equal(record.scale, scales)
    assert (layer.action, layer.inexact_blocks) == ("recoded", lossy)
    assert (layer.sqnr_db == np.inf) == (lossy == 0)
    assert (lossy > 0) == (spread > 14)
    assert any(f"{lossy} blocks of 32 are rounded" in note for note in report.notes) == (lossy > 0)


def of_nvfp4(scale, codes, largest=None):
    """Codes, E4M3 bytes, tensor scale and blocks with other values (docs/numerics.md 9.3)."""
    values = np.where(codes & 8, -1.0, 1.0) * E2M1[codes & 7]
    rows, blocks = scale.shape
    used = values.reshape(rows, blocks, 32).any(-1)
    largest = scale[used].max() if largest is None else largest
    power = max(largest - 127 - 8, -117)
    made, scales, lossy = codes.copy(), np.zeros((rows, 2 * blocks), ml_dtypes.float8_e4m3fn), 0
    for r, b in zip(*np.nonzero(used), strict=True):
        exponent = min(max(scale[r, b] - 127 - power, -9), 8)
        x = values[r, 32 * b : 32 * b + 32] * 2.0 ** (scale[r, b] - 127 - power - exponent)
        nearest = x.astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
        lossy += any(nearest.astype(float) != x)
        made[r, 32 * b : 32 * b + 32] = nearest.view(np.uint8)
        for half in (0, 1):
            if x[16 * half : 16 * half + 16].any():
                scales[r, 2 * b + half] = 2.0**exponent
    return made, scales.view(np.uint8), np.float32(2.0**power), lossy


@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:nvfp4"])
@pytest.mark.parametrize(("spread", "is_exact"), [(6, True), (17, True), (30, False)])
def test_mxfp4_as_nvfp4_has_the_bits_of_the_statement(tmp_path, to, spread, is_exact):
    scale, codes = random(spread=spread, seed=1)
    codes[3, :16] = 0  # one half of a block
    report = convert(source(tmp_path / "source", scale, codes), tmp_path / "out", to=to)
    made, scales, level, lossy = of_nvfp4(scale, codes)
    record, [layer] = load(tmp_path / "out")[NAME], report.layers
    np.testing.assert_array_equal(record.codes, made[:, 0::2] | made[:, 1::2] << 4)
    np.testing.assert_array_equal(record.scale.view(np.uint8), scales)
    assert record.tensor_scale == level
    assert (layer.action, layer.inexact_blocks) == ("recoded", lossy)
    assert (lossy == 0) == is_exact == (layer.sqnr_db == np.inf) == (not any("rounded" in one for one in report.notes))


@pytest.mark.parametrize("to", ["ct:nvfp4", "deepseek:fp8", "ct:mxfp8"])
@pytest.mark.parametrize("byte", [0, 1, 127, 250])
def test_scales_at_the_ends_of_their_range_and_matrices_of_zeros(tmp_path, to, byte):
    codes = np.random.default_rng(byte).integers(0, 16, (4, 128))
    folder = source(tmp_path / "source", np.full((4, 4), byte), codes)
    convert(folder, tmp_path / "out", to=to)
    tiny = to == "ct:nvfp4" and byte == 0  # below the least tensor scale
    same = load(tmp_path / "out")[NAME].dequantize() == load(folder)[NAME].dequantize()
    assert same.all() != tiny
    zeros = source(tmp_path / "zeros", np.full((4, 4), byte), np.full((4, 128), 8))
    report = convert(zeros, tmp_path / "of_zeros", to=to)
    assert not load(tmp_path / "of_zeros")[NAME].dequantize().any()
    assert not any(layer.inexact_blocks for layer in report.layers)


def test_members_of_a_fused_group_share_the_power_of_two(tmp_path):
    names = [f"model.layers.0.mlp.experts.0.{one}_proj.weight" for one in ("gate", "up")]
    scale, codes = random(rows=4, spread=3)
    save(
        [
            Record(name, codes[:, ::2].astype(np.uint8), (scale + shift).astype(np.uint8), None, FORMATS["mxfp4"],
                   (4, codes.shape[1]))
            for name, shift in zip(names, (0, 5), strict=True)
        ], tmp_path / "source", format="ct:mxfp4",
    )  # fmt: skip
    report = convert(tmp_path / "source", tmp_path / "out", to="ct:nvfp4")
    levels = {float(record.tensor_scale) for record in load(tmp_path / "out").values()}
    assert len(levels) == 1
    assert [layer.sqnr_db for layer in report.layers] == [np.inf, np.inf]
    report = convert(tmp_path / "source", tmp_path / "alone", to="ct:nvfp4", fuse=())
    assert len({float(record.tensor_scale) for record in load(tmp_path / "alone").values()}) == 2


def test_a_rule_that_is_named_casts(tmp_path):
    scale, codes = random(rows=4, spread=3)
    folder = source(tmp_path / "source", scale, codes)
    for number, options in enumerate([{"scale_rule": "two_level"}, {"four_over_six": True}]):
        report = convert(folder, tmp_path / str(number), to="ct:nvfp4", **options)
        assert [layer.action for layer in report.layers] == ["cast"]
    half = source(tmp_path / "half", scale, codes, dtype="float16")
    assert convert(half, tmp_path / "tiles", to="ct:fp8_block").layers[0].action == "cast"
    assert convert(half, tmp_path / "wide", to="deepseek:fp8").layers[0].action == "recoded"


def test_mxfp8_keeps_its_values_as_fp8_tiles(tmp_path):
    rng = np.random.default_rng(2)
    codes = rng.choice(np.setdiff1d(np.arange(256), [127, 255]), (130, 160)).astype(np.uint8)
    folder = source(tmp_path / "source", rng.integers(118, 121, (130, 5)), codes, "mxfp8")
    report = convert(folder, tmp_path / "out", to="hf:finegrained_fp8")
    a, b = (load(path)[NAME].dequantize() for path in (folder, tmp_path / "out"))
    changed = (a != b).reshape(130, 5, 32).any(-1).sum()
    assert report.layers[0].inexact_blocks == changed > 0
    assert report.worst.sqnr_db > 60
