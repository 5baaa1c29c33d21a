"""Passes over stored codes and scales: decoding, folding, transposing codes, tiles of scales for Blackwell's GEMMs."""

import math

from microfloat.formats import ScaledFormat
from microfloat.kernels.casts import dequantize
from microfloat.kernels.gemm import swizzle
from microfloat.layout import Part, codes_dtype, folded_format
from microfloat.passes import tables
from microfloat.passes.matrix import INT32_MAX, At, Device, Pass, Passes, specialization

SCALE, TENSOR_SCALE = 3, 4  # positions in the table, besides At.SOURCE = codes
SCALE_KINDS = {
    "FP32": dequantize.SCALE_FLOAT.value, "E8M0": dequantize.SCALE_E8M0.value, "E4M3": dequantize.SCALE_E4M3.value,
}  # fmt: skip
_SWIZZLED_TOGETHER = 32  # tiles of scales that a program of `swizzle` moves


def dequantize_passes(
    fmt: ScaledFormat, rows: int, columns: int, scale_strides: tuple[int, int], level_stride: int | None, dtype: str,
    device: Device,
) -> Passes:  # fmt: skip
    """The pass that decodes an operand [R, C]; `level_stride`: stride of tensor scales (0: one for all) or None."""
    passes = Passes(1)
    out = passes.put(0, Part((rows, columns), (columns, 1), dtype))
    tile_rows, tile_columns, warps = tables.TILES["dequantize"]
    constants = (
        fmt.element.mantissa_bits, fmt.element.bias, SCALE_KINDS[fmt.scale.name], fmt.block[0] or 1,
        fmt.block[1] or tile_columns, 1 if level_stride is None else 2, dtype == "bfloat16", columns % 2 == 0,
        rows % tile_rows == 0 and columns % tile_columns == 0, max(tile_rows * columns, rows) > INT32_MAX,
        device.conversions, tile_rows, tile_columns,
    )  # fmt: skip
    scalars = (rows, columns, *scale_strides, level_stride or 0)
    key = (device.number, fmt.element.name, dtype, constants, *map(specialization, scalars))
    programs = -(-rows // tile_rows) * -(-columns // tile_columns)
    tensors = (At.SOURCE, SCALE, At.NOTHING if level_stride is None else TENSOR_SCALE, out)
    passes.launches.append(Pass(dequantize.dequantize, key, programs, tensors, scalars, constants, warps))
    return passes


def fold_codes_passes(
    fmt: ScaledFormat, form: str, rows: int, columns: int, scale_strides: tuple[int, int], scale: Part, device: Device
) -> Passes:
    """The pass that folds MX codes [R, C] to the form "folded" or "tiles"; `scale`: layout of the new scales."""
    folded = folded_format(fmt, form)
    passes = Passes(2)
    out = passes.put(0, Part((rows, columns), (columns, 1), codes_dtype(folded.element)))
    out_scale = passes.put(1, scale)
    tile_rows, tile_columns, warps = tables.TILES["fold_codes"]
    headroom = math.floor(math.log2(folded.element.max / fmt.element.max))
    constants = (
        fmt.element.mantissa_bits, fmt.element.bias, folded.element.mantissa_bits, folded.element.bias, headroom,
        form == "tiles", columns % 2 == 0, rows % tile_rows == 0 and columns % tile_columns == 0,
        max(tile_rows * columns, rows * max(scale.strides)) > INT32_MAX, device.conversions, tile_rows, tile_columns,
    )  # fmt: skip
    scalars = (rows, columns, *scale_strides, *scale.strides, scale.shape[1])
    key = (device.number, constants, *map(specialization, scalars))
    programs = -(-rows // tile_rows) * -(-columns // tile_columns)
    tensors = (At.SOURCE, SCALE, out, out_scale)
    passes.launches.append(Pass(dequantize.fold_codes, key, programs, tensors, scalars, constants, warps))
    return passes


def turn_codes_passes(rows: int, columns: int, dtype: str, device: Device) -> Passes:
    """The pass that transposes one-byte codes [R, C]; R and C are multiples of 4."""
    passes = Passes(1)
    out = passes.put(0, Part((columns, rows), (rows, 1), dtype))
    tile_rows, tile_columns, warps = tables.TILES["turn"]
    constants = (
        rows % tile_rows == 0 and columns % tile_columns == 0, tile_rows * max(rows, columns) > INT32_MAX,
        device.conversions, tile_rows, tile_columns,
    )  # fmt: skip
    key = (device.number, constants, specialization(rows), specialization(columns))
    programs = -(-rows // tile_rows) * -(-columns // tile_columns)
    tensors = (At.SOURCE, out)
    passes.launches.append(Pass(dequantize.turn_codes, key, programs, tensors, (rows, columns), constants, warps))
    return passes


def swizzle_passes(rows: int, columns: int, strides: tuple[int, int], words: bool, device: Device) -> Passes:
    """The pass that moves scales into tiles of 128 x 4, padded with 0 (docs/numerics.md 7.2); `words`: four at once."""
    passes, tiles = Passes(1), -(-columns // 4)
    out = passes.put(0, Part((512 * -(-rows // 128) * tiles,), (1,), "uint8"))
    scalars, constants = (rows, columns, *strides), (words, _SWIZZLED_TOGETHER)
    key = (device.number, constants, *map(specialization, scalars))
    programs = -(-rows // 128) * -(-tiles // _SWIZZLED_TOGETHER)
    passes.launches.append(Pass(swizzle.swizzle_scales, key, programs, (At.SOURCE, out), scalars, constants))
    return passes
