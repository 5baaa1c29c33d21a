"""Passes that multiply a few rows of x by a weight stored as codes (`kernels.gemm.decode`)."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from microfloat.formats import ScaledFormat
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.kernels.device import convert
from microfloat.kernels.gemm import decode
from microfloat.layout import Part
from microfloat.passes.conversions import SCALE_KINDS
from microfloat.passes.matrix import INT32_MAX, At, Buffer, Device, Pass, Passes, specialization
from microfloat.passes.tables import Warps
from microfloat.recipes import Hadamard
from microfloat.routes import MOST_DECODED_ROWS

# Positions in the table of tensors; At.SOURCE is x. PLAN: table of the row tiles of groups, of `rows_of_tile` rows.
CODES, SCALE, LEVEL, BIAS, PLAN = 3, 4, 5, 6, 7
_X_KINDS = {"bfloat16": convert.WORDS_BF16.value, "float16": convert.WORDS_F16.value}
_CHUNK_BITS = 1024  # a chunk of the codes of a row, which four lanes read in two halves
_WARPS_THAT_ORDER = 4
_SCALES_OF_BYTES = SCALE_KINDS["E8M0"], SCALE_KINDS["E4M3"]


def stored_codes(fmt: ScaledFormat, hadamard: Hadamard | None, level: str | None, length: int) -> DecodeCodes | None:
    """Constants for the stored codes of a weight [N, `length`]; None if the kernel does not read the format."""
    element, (height, width), scale = fmt.element, fmt.block, SCALE_KINDS[fmt.scale.name]
    bits = 4 if element.codes_per_byte == 2 else 8
    widths = {"FP32": (None, 128) if bits == 8 else (), "E8M0": (32,), "E4M3": (16,) if bits == 4 else ()}
    if width not in widths[fmt.scale.name] or hadamard is not None or length * bits % 128:
        return None
    return DecodeCodes(element.mantissa_bits, element.bias, bits, scale, height or 1, width or 0, level is not None)


class DecodedExperts(NamedTuple):
    """Number of experts with weights [E, N, K]; distances between the scales, and tensor scales, of neighbours."""

    number: int
    scale_stride: int
    level_stride: int


def decode_passes(
    codes: DecodeCodes, shape: tuple[int, int, int], dtypes: tuple[str, str, str | None],
    scale_strides: tuple[int, int], level_stride: int, device: Device, experts: DecodedExperts | None = None,
    cut: DecodeCut | None = None,
) -> Passes:  # fmt: skip
    """The passes of y [M, N] from x [M, K] and codes [N, K], of at most 64 rows or in groups.

    `dtypes`: of x, y and the bias (None without a bias). `level_stride`: 1 for a tensor scale per row, else 0.
    `experts`: rows of x come in groups. `cut`: None chooses one.
    """
    (m, k, n), (x_dtype, dtype, bias) = shape, dtypes
    if cut is None:
        about = scale_strides, bias is not None, device
        if experts is None:
            cut = cut_of(codes, shape, *about)
        else:
            cut = cut_of_experts(codes, shape, experts.number, *about)
    passes = Passes(1)
    out = passes.put(0, Part((m, n), (n, 1), dtype))
    assert experts is None or not cut.DEPENDENT, "experts are not multiplied so"
    tile, entries = rows_of_tile(cut), 1
    if experts is not None:  # the most tiles of x if no tile holds rows of two groups
        entries = (m + min(experts.number + 1, m) * (tile - 1)) // tile
    hardware, kind = device.number >= 0, _X_KINDS[x_dtype]
    plan = At.NOTHING if experts is None else PLAN
    about, x = (device.number, dtypes, codes, cut), At.SOURCE
    if cut.ORDERED:
        # Warps of `decode_order` for one tile of x: half chunks x eights of rows x steps.
        chunks = cut.LENGTH_WARPS * -(-k * codes.BITS // (_CHUNK_BITS * cut.LENGTH_WARPS))
        items = 2 * chunks * cut.TOKENS * (16 // codes.BITS)
        programs = -(-items // _WARPS_THAT_ORDER)
        words = entries * programs * _WARPS_THAT_ORDER * 128 * (1 if x_dtype == "bfloat16" else 2)
        x = passes.add(Buffer((words,), (1,), "int32"))
        scalars = (m, k // 8, programs)
        passes.launches.append(Pass(
            decode.decode_order, (*about, *map(specialization, scalars)), entries * programs,
            (At.SOURCE, plan, x), scalars, (cut, codes.BITS, kind, hardware, _WARPS_THAT_ORDER),
            Warps(_WARPS_THAT_ORDER), dependent=cut.DEPENDENT,
        ))  # fmt: skip
    inputs = SCALE, LEVEL if codes.LEVEL else At.NOTHING, At.NOTHING if bias is None else BIAS
    strides = *scale_strides, level_stride, *((0, 0) if experts is None else experts[1:])
    scalars = (m, n, k // 8, k * codes.BITS // 128, *strides, entries)
    tiles = -(-n // (16 * cut.TILES * cut.ROW_WARPS))
    passes.launches.append(Pass(
        decode.decode_gemm, (*about, *map(specialization, scalars[1:])), tiles * entries,
        (x, CODES, *inputs, plan, out), scalars, (codes, cut, kind, hardware, device.conversions),
        Warps(cut.ROW_WARPS * cut.LENGTH_WARPS), dependent=cut.DEPENDENT,
    ))  # fmt: skip
    return passes


def rows_of_tile(cut: DecodeCut) -> int:
    """Rows of x that one program multiplies."""
    return 8 * cut.TOKENS


# Kind of codes: the most rows of x: divisions (ROW_WARPS, LENGTH_WARPS, TILES, STAGES, AHEAD, ORDERED of a `DecodeCut`)
# where the weight has few rows, some, or many (48 and 128 for each multiprocessor): the fastest of 20 to 48 that were
# measured on an H100 with 4096, 8192 and 28672 rows (benchmarks/results/decode_few_cuts.json); NVFP4 stood for all FP4
# but MXFP4 of 5 to 16 rows, and of 17 to 64 on an H200 (benchmarks/results/decode_few_cuts_h200.json). More warps along
# K where rows of the weight are few, and more rows of a warp where there are many, or many of x: those share what is
# read of x.
_FP8_64 = ((1, 8, 2, 1, 2, 1), (2, 4, 2, 1, 2, 1), (4, 1, 2, 1, 2, 1))
_ROWS_OF_FP8: dict[int, tuple[tuple[int, ...], ...]] = {
    8: ((1, 8, 2, 2, 2, 0), (1, 8, 2, 1, 2, 0), (1, 8, 1, 1, 4, 0)),
    16: ((1, 8, 1, 2, 4, 1), (2, 4, 1, 2, 4, 1), (2, 4, 2, 1, 4, 1)),
    32: ((1, 8, 1, 1, 2, 1), (2, 4, 1, 1, 2, 1), (4, 1, 1, 1, 2, 1)),
    64: _FP8_64,
}
_ROWS_OF_FP4: dict[int, tuple[tuple[int, ...], ...]] = {
    4: ((1, 8, 1, 2, 8, 0), (1, 4, 1, 2, 8, 0), (1, 4, 2, 1, 8, 0)),
    8: ((1, 8, 1, 1, 8, 1), (2, 4, 1, 1, 8, 1), (2, 2, 1, 1, 4, 1)),
    16: ((1, 8, 1, 1, 4, 1), (2, 4, 1, 1, 4, 1), (2, 2, 2, 1, 4, 1)),
    32: ((1, 8, 2, 1, 4, 1), (2, 4, 2, 1, 4, 1), (4, 1, 2, 1, 4, 1)),
    64: ((1, 8, 2, 1, 1, 1), (2, 4, 2, 1, 1, 1), (4, 1, 2, 1, 1, 1)),
}
_DIVISIONS: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "FP4": _ROWS_OF_FP4,
    "MXFP4": {
        **_ROWS_OF_FP4,
        8: ((1, 8, 1, 2, 4, 1), (1, 4, 1, 2, 4, 1), (2, 2, 1, 1, 4, 1)),
        16: ((1, 8, 1, 1, 4, 1), (2, 4, 1, 2, 4, 1), (2, 2, 1, 1, 2, 1)),
        32: ((1, 8, 2, 1, 4, 1), (2, 4, 1, 1, 2, 1), (4, 1, 2, 2, 2, 1)),
        64: ((2, 4, 1, 2, 2, 1), (4, 2, 1, 2, 2, 1), (4, 1, 2, 1, 2, 1)),
    },
    "MX": {
        4: ((1, 8, 1, 2, 4, 0), (1, 8, 2, 1, 4, 0), (1, 4, 2, 1, 4, 0)),
        8: ((1, 8, 1, 2, 4, 0), (1, 8, 2, 1, 4, 0), (1, 4, 1, 1, 4, 1)),
        16: ((1, 8, 1, 1, 4, 1), (2, 4, 1, 1, 4, 1), (2, 2, 2, 1, 2, 1)),
        32: ((1, 8, 2, 1, 4, 1), (2, 4, 1, 1, 2, 1), (2, 2, 1, 1, 4, 1)),
        64: ((1, 8, 2, 1, 1, 1), (2, 4, 2, 1, 2, 1), (4, 1, 2, 1, 1, 1)),
    },
    "FP8": _ROWS_OF_FP8,
    "BLOCKS": {
        8: ((1, 8, 1, 2, 2, 0), *_ROWS_OF_FP8[8][1:]),
        16: ((1, 8, 1, 1, 4, 1), (2, 4, 1, 2, 4, 1), (2, 2, 1, 1, 2, 1)),
        32: ((1, 8, 2, 1, 2, 1), (2, 4, 2, 1, 4, 1), (4, 2, 2, 1, 2, 1)),
        64: _FP8_64,
    },
}  # fmt: skip


# Those of a Hopper whose codes come through shared memory (STAGES of 0), where that is faster than the division above:
# on an H200 by 2 to 14 % (benchmarks/results/decode_shared_cuts.json). None: it is not.
_SHARED: dict[str, dict[int, tuple[tuple[int, ...] | None, ...]]] = {
    "FP4": {
        4: ((1, 8, 1, 0, 8, 0), (2, 4, 1, 0, 8, 0), None),
        8: ((1, 8, 1, 0, 8, 1), (2, 4, 1, 0, 8, 1), None),
        16: ((1, 8, 1, 0, 4, 1), (1, 4, 1, 0, 4, 1), None),
    },
    "MXFP4": {
        4: ((1, 8, 1, 0, 8, 0), (2, 4, 1, 0, 8, 0), (1, 4, 2, 0, 8, 0)),
        8: ((1, 8, 1, 0, 8, 1), (2, 4, 1, 0, 8, 1), (1, 4, 2, 0, 8, 1)),
        16: (None, None, (1, 4, 2, 0, 4, 1)),
    },
}


def _kind_of(codes: DecodeCodes) -> str:
    """Kind of codes: the key of the tables of divisions."""
    if codes.SCALE not in _SCALES_OF_BYTES:
        return "BLOCKS" if codes.WIDTH else "FP8"
    if codes.BITS == 8:
        return "MX"
    return "MXFP4" if SCALE_KINDS["E8M0"] == codes.SCALE else "FP4"


def cut_of(
    codes: DecodeCodes, shape: tuple[int, int, int], scale_strides: tuple[int, int], bias: bool, device: Device,
) -> DecodeCut:  # fmt: skip
    """The cut of a product of M, K, N, with at most 64 rows of x."""
    m, k, n = shape
    kind, size = _kind_of(codes), (n >= 48 * device.multiprocessors) + (n >= 128 * device.multiprocessors)
    tokens = next(tokens for tokens in (1, 2, 4, 8) if m <= 8 * tokens)
    if device.is_hopper and (row := _of_most(_SHARED.get(kind, {}), m, size)):
        cut = fitted(_cut_by(row, tokens, early=True), codes, k, scale_strides, bias)
        if cut.STAGES == 0:
            return cut
    row = _of_most(_DIVISIONS[kind], m, size)
    assert row is not None, "every size of weight has a division"
    cut = _cut_by(row, tokens, early=device.is_hopper)
    if n < 16 * device.multiprocessors:
        cut = cut._replace(ROW_WARPS=1, LENGTH_WARPS=8, TILES=1)
    length, chunks = cut.LENGTH_WARPS, -(-k * codes.BITS // _CHUNK_BITS)
    while length > 1 and length > chunks:
        length //= 2
    return fitted(cut._replace(LENGTH_WARPS=length), codes, k, scale_strides, bias)


def _of_most(table: Mapping[int, Sequence[tuple[int, ...] | None]], rows: int, size: int) -> tuple[int, ...] | None:
    """Entry of a table for the smallest limit that holds `rows` rows of x, and for a weight of size class `size`."""
    return next((of_size[size] for most, of_size in table.items() if rows <= most), None)


def _cut_by(row: tuple[int, ...], tokens: int, early: bool) -> DecodeCut:
    row_warps, length_warps, tiles, stages, ahead, ordered = row
    sizes = row_warps, length_warps, tiles, tokens, stages, ahead
    return DecodeCut(*sizes, False, False, False, bool(ordered), DEPENDENT=early)


def fitted(cut: DecodeCut, codes: DecodeCodes, length: int, scale_strides: tuple[int, int], bias: bool) -> DecodeCut:
    """A cut with the fields that follow from the operands: BIAS, EVEN, WIDE, and an AHEAD of one chunk at most.

    STAGES = 0 stays only if shared memory takes the codes: whole chunks of four-bit codes, with scales in words
    without gaps.
    """
    stride_r, stride_k = scale_strides
    wide = codes.SCALE in _SCALES_OF_BYTES and stride_k == 1 and stride_r % 4 == 0
    ahead = min(cut.AHEAD, 2 * 16 // codes.BITS)
    even = length * codes.BITS % (_CHUNK_BITS * cut.LENGTH_WARPS) == 0
    width = 16 if SCALE_KINDS["E4M3"] == codes.SCALE else 32
    in_words = wide and width == codes.WIDTH
    stages = cut.STAGES if even and in_words and codes.BITS == 4 else max(cut.STAGES, 1)
    return cut._replace(BIAS=bias, EVEN=even, WIDE=wide, STAGES=stages, AHEAD=ahead)


@functools.lru_cache(512)
def cut_of_experts(
    codes: DecodeCodes, shape: tuple[int, int, int], experts: int, scale_strides: tuple[int, int], bias: bool,
    device: Device,
) -> DecodeCut:  # fmt: skip
    """The cut of products of M rows of x in all with N x K weights of `experts` experts."""
    # Tiles of x hold twice the mean group (at most 64 rows): few groups need a second tile, which decodes once more.
    m, k, n = shape
    rows = min(m, 2 * -(-m // experts), MOST_DECODED_ROWS)
    alike = device._replace(is_hopper=False)  # no launch of experts begins early
    return cut_of(codes, (rows, k, n * min(experts, m)), scale_strides, bias, alike)._replace(GROUPED=True)


def fits(codes: DecodeCodes, shape: tuple[int, int, int], experts: int = 0) -> bool:
    """True if the kernel serves a product of M, K, N: not too many rows of x, for each expert, and 32-bit offsets."""
    (m, k, n), number = shape, max(experts, 1)
    return m <= number * MOST_DECODED_ROWS and max(number * n * k * codes.BITS // 32, 8 * m * k) <= INT32_MAX
