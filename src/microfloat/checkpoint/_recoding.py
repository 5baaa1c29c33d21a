"""Recodings that keep every value where the target's scales reach: MX formats as FP8 tiles, and MXFP4 as NVFP4.

A block of 32 keeps its elements, or gets them shifted by a power of two (docs/numerics.md 9.3).
"""

import numpy as np

from microfloat.checkpoint._casting import experts_of, slabs
from microfloat.checkpoint.records import Record
from microfloat.formats import E4M3, E5M2, MXFP4, NVFP4, ElementFormat, ScaledFormat, decode, encode
from microfloat.reference import pack_fp4

_BLOCK = 32
_LARGEST, _SMALLEST = 8, -9  # exponents of the powers of two in E4M3
_LEAST_LEVEL = -117  # of a tensor scale, whose reciprocal is a normal number (docs/numerics.md 2.4)
_FOLDED = ((1, 128), (128, 128))


def recodes(source: ScaledFormat, target: ScaledFormat, scale_dtype: np.dtype) -> bool:
    """True where values of `source` are written in `target` without a new scale; `scale_dtype` holds FP32 scales."""
    if source == MXFP4 and target == NVFP4:
        return True
    is_mx = source.scale.name == "E8M0" and source.block == (1, _BLOCK) and source.element != E5M2
    is_folded = target.element == E4M3 and target.block in _FOLDED and target.scale.bits == 32
    return is_mx and is_folded and target.tensor_scale is None and scale_dtype != np.float16


def largest_scales(record: Record) -> np.ndarray:
    """float32 [E], the largest scale of a block with a value in every matrix; 0 where all are zero."""
    found = np.zeros(experts_of(record), np.float32)
    for expert, slab in slabs(record):
        bytes_RB, _, codes_RBC = _blocks(slab)
        assert slab.format is not None
        used = bytes_RB[(codes_RBC & _magnitude(slab.format.element)).any(-1) & (bytes_RB != 255)]
        if used.size:
            found[expert] = max(found[expert], np.ldexp(np.float32(1), int(used.max()) - 127))
    return found


def recode(slab: Record, fmt: ScaledFormat, largest: np.float32 | None) -> tuple[Record, int]:
    """The record of a slab in `fmt`, and how many blocks of 32 do not fit; `largest`: the largest scale, for NVFP4."""
    assert slab.format is not None
    element = slab.format.element
    bytes_RB, is_nan_RB, codes_RBC = _blocks(slab)
    used_RBC = (codes_RBC & _magnitude(element)) != 0
    # The tensor scale is a power of two. Exponents of blocks are biased as E8M0 bytes are.
    power, group_GH = max(int(np.log2(largest)) - _LARGEST, _LEAST_LEVEL) if largest else 0, None
    if fmt.tensor_scale is not None:
        exponent_RB = np.clip(bytes_RB, power + _SMALLEST + 127, power + _LARGEST + 127)
    else:
        exponent_RB, group_GH, is_nan_RB = _of_tiles(bytes_RB, used_RBC.any(-1), is_nan_RB, fmt, element)
    shift_RB = np.where(used_RBC.any(-1), bytes_RB - exponent_RB, 0)  # zeros are zeros under every scale
    made_RBC, lossy = _shifted(codes_RBC, shift_RB, element, fmt.element, is_nan_RB)
    rows, length = slab.logical_shape
    codes = made_RBC.reshape(rows, -1)[:, :length]
    if group_GH is not None:
        with np.errstate(all="ignore"):
            scale = np.where(group_GH == 255, np.float32(np.nan), np.ldexp(np.float32(1), group_GH - 127))
        return Record(slab.name, codes, scale.astype(np.float32), None, fmt, slab.logical_shape), lossy
    halves = used_RBC.reshape(rows, -1, 16).any(-1)
    bytes_of = encode(np.ldexp(np.float32(1), exponent_RB - power - 127), E4M3)
    scale = np.where(halves, np.repeat(bytes_of, 2, 1), np.uint8(0))
    scale = np.where(np.repeat(is_nan_RB, 2, 1), np.uint8(0x7F), scale)[:, : length // 16]
    level, scale = np.ldexp(np.float32(1), power), np.ascontiguousarray(scale)
    return Record(slab.name, pack_fp4(codes), scale, level, fmt, slab.logical_shape), lossy


def _magnitude(element: ElementFormat) -> int:
    """The bits of a code beside its sign."""
    return (1 << (element.bits - 1)) - 1


def _blocks(slab: Record) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scale bytes int32 [R, B], those that are NaN, and the codes [R, B, 32], a short last block filled with zeros."""
    assert slab.scale is not None
    codes = slab.to_quantized().unpacked_codes()
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % _BLOCK)))
    scale = slab.scale.view(np.uint8).astype(np.int32)
    return scale, scale == 255, codes.reshape(len(codes), -1, _BLOCK)


def _of_tiles(
    bytes_RB: np.ndarray, used_RB: np.ndarray, is_nan_RB: np.ndarray, fmt: ScaledFormat, element: ElementFormat
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The biased exponent of the tile of each block, that of each tile (255: NaN), and the blocks of NaN tiles."""
    rows, blocks = bytes_RB.shape
    height = fmt.block[0] or 1
    headroom = int(np.log2(E4M3.max / element.max))
    padding = ((0, -rows % height), (0, -blocks % 4))
    tiles = np.pad(np.where(used_RB | is_nan_RB, bytes_RB, 0), padding)
    tiles = tiles.reshape(tiles.shape[0] // height, height, -1, 4).max((1, 3))
    is_nan = tiles == 255

    def spread(array: np.ndarray) -> np.ndarray:
        return np.repeat(np.repeat(array, height, 0), 4, 1)[:rows, :blocks]

    exponent = np.where(is_nan, 255, np.maximum(tiles - headroom, 1))
    return spread(exponent), exponent, spread(is_nan)


def _shifted(
    codes_RBC: np.ndarray, shift_RB: np.ndarray, source: ElementFormat, target: ElementFormat, is_nan_RB: np.ndarray
) -> tuple[np.ndarray, int]:
    """Codes of `target` for values times 2^shift, to nearest even, and the number of blocks that changed a value."""
    if source == target and not shift_RB.any():
        return codes_RBC, 0
    with np.errstate(all="ignore"):
        values = decode(codes_RBC, source)
        scaled = np.ldexp(values, shift_RB[..., None])
        made = encode(scaled, target)
        changed = (np.ldexp(decode(made, target).astype(np.float64), -shift_RB[..., None]) != values) & ~np.isnan(
            values
        )
    changed = changed.any(-1) & ~is_nan_RB
    if target.has_nan:
        made = np.where(is_nan_RB[..., None], np.uint8(target.nan_code), made)
    return made, int(np.count_nonzero(changed))
