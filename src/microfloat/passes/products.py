"""Passes that multiply a few rows of x by a weight stored as codes (`kernels.gemm.decode` and its neighbours)."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

from microfloat.formats import ScaledFormat
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.kernels.device import convert
from microfloat.kernels.gemm import decode, warpgroups
from microfloat.layout import Part
from microfloat.passes.conversions import SCALE_KINDS
from microfloat.passes.matrix import INT32_MAX, At, Buffer, Device, Pass, Passes, specialization
from microfloat.passes.tables import SHARED_BYTES, SYSTEM_BYTES, Warps
from microfloat.recipes import Hadamard
from microfloat.routes import MOST_DECODED_ROWS

# Positions in the table of tensors; At.SOURCE is x. PLAN: table of the row tiles of groups, of `rows_of_tile` rows.
CODES, SCALE, LEVEL, BIAS, PLAN = 3, 4, 5, 6, 7
_X_KINDS = {"bfloat16": convert.WORDS_BF16.value, "float16": convert.WORDS_F16.value}
_CHUNK_BITS = 1024  # a chunk of the codes of a row, which four lanes read in two halves
_WARPS_THAT_ORDER = 4
_SUMMED_TOGETHER = 1024  # elements of y that a program adds up
Division = TypeVar("Division")  # what a table says of one
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
) -> Passes | None:  # fmt: skip
    """The passes of y [M, N] from x [M, K] and codes [N, K], or None where no kernel multiplies so many rows.

    `dtypes`: of x, y and the bias (None without a bias). `level_stride`: 1 for a tensor scale per row, else 0.
    `experts`: rows of x come in groups. `cut`: None chooses one.
    """
    (m, k, n), (x_dtype, dtype, bias) = shape, dtypes
    if cut is None:
        about = scale_strides, bias is not None, device
        if experts is None:
            cut = cut_of(codes, shape, *about, halves=x_dtype != "bfloat16")
        else:
            cut = cut_of_experts(codes, shape, experts.number, *about)
    if cut is None:
        return None
    passes = Passes(1)
    out = passes.put(0, Part((m, n), (n, 1), dtype))
    assert experts is None or not (cut.SPLITS or cut.DEPENDENT), "experts are not multiplied so"
    splits, cut = max(cut.SPLITS, 1), of_kernel(cut)
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
    if cut.WARPGROUPS:
        sums = out if splits == 1 else passes.add(Buffer((splits, m, n), (m * n, n, 1), "float32"))
        scalars = (m, n, k * codes.BITS // 128, scale_strides[0], level_stride, splits)
        programs = -(-n // (16 * cut.ROW_WARPS)) * splits
        passes.launches.append(Pass(
            warpgroups.decode_warpgroups, (*about, *map(specialization, scalars[1:-1])), programs,
            (x, CODES, *inputs, sums), scalars, (codes, cut, kind, hardware, device.conversions), Warps(cut.ROW_WARPS),
            dependent=cut.DEPENDENT, shared_bytes=warpgroups.bytes_of_x(codes, cut),
            spread=_most_beside(programs, device.multiprocessors, _most_of(codes, cut)),
        ))  # fmt: skip
        if splits > 1:
            _add_sum(passes, about, codes, cut, (sums, *inputs, out), (m, n, scale_strides[0], level_stride, splits))
        return passes
    strides = *scale_strides, level_stride, *((0, 0) if experts is None else experts[1:])
    scalars = (m, n, k // 8, k * codes.BITS // 128, *strides, entries)
    tiles = -(-n // (16 * cut.TILES * cut.ROW_WARPS))
    passes.launches.append(Pass(
        decode.decode_gemm, (*about, *map(specialization, scalars[1:])), tiles * entries,
        (x, CODES, *inputs, plan, out), scalars, (codes, cut, kind, hardware, device.conversions),
        Warps(cut.ROW_WARPS * cut.LENGTH_WARPS), dependent=cut.DEPENDENT,
    ))  # fmt: skip
    return passes


def _add_sum(
    passes: Passes, about: tuple, codes: DecodeCodes, cut: DecodeCut, tensors: tuple[int, ...],
    scalars: tuple[int, int, int, int, int],
) -> None:  # fmt: skip
    """Add the pass that makes y of the sums of all parts of K; `scalars`: M, N, two strides and the number of parts."""
    m, n, *_ = scalars
    passes.launches.append(Pass(
        warpgroups.sum_parts, (*about, *map(specialization, scalars[1:-1])), m * -(-n // _SUMMED_TOGETHER), tensors,
        scalars, (codes, cut, about[0] >= 0, _SUMMED_TOGETHER), Warps(4), dependent=cut.DEPENDENT,
    ))  # fmt: skip


def _most_beside(programs: int, processors: int, most: int) -> int:
    """Number of programs on a multiprocessor if all run at once with at most `most` on each; otherwise 0."""
    # Without this limit, launches that begin early fill some multiprocessors twice while others run the launch before.
    each = -(-programs // processors)
    return each if each <= most else 0


def of_kernel(cut: DecodeCut) -> DecodeCut:
    """The cut for which a kernel is compiled: SPLITS is 2 for any number above 1, which is an argument."""
    return cut._replace(SPLITS=min(cut.SPLITS, 2))


def rows_of_tile(cut: DecodeCut) -> int:
    """Rows of x that one program multiplies."""
    return 8 * cut.TOKENS


class _Division(NamedTuple):
    """Fields of a `DecodeCut` for `decode_gemm`, as its table holds them."""

    ROW_WARPS: int
    LENGTH_WARPS: int
    TILES: int
    STAGES: int
    AHEAD: int
    ORDERED: int
    DEPENDENT: int


# Kind of codes: the most rows of x: divisions where the weight has few rows, some, or many (48 and 128 for each
# multiprocessor): the fastest of 20 to 48 that were measured on an H100 with 4096, 8192 and 28672 rows
# (benchmarks/results/decode_few_cuts.json); NVFP4 stood for all FP4 but MXFP4 of 5 to 16 rows. More warps along K where
# rows of the weight are few, and more rows of a warp where there are many, or many of x: those share what is read of x.
_FP8_64 = ((1, 8, 2, 1, 2, 1, 1), (2, 4, 2, 1, 2, 1, 1), (4, 1, 2, 1, 2, 1, 1))
_ROWS_OF_FP8: dict[int, tuple[tuple[int, ...], ...]] = {
    8: ((1, 8, 2, 2, 2, 0, 1), (1, 8, 2, 1, 2, 0, 1), (1, 8, 1, 1, 4, 0, 1)),
    16: ((1, 8, 1, 2, 4, 1, 1), (2, 4, 1, 2, 4, 1, 1), (2, 4, 2, 1, 4, 1, 1)),
    32: ((1, 8, 1, 1, 2, 1, 1), (2, 4, 1, 1, 2, 1, 1), (4, 1, 1, 1, 2, 1, 1)),
    64: _FP8_64,
}
_ROWS_OF_FP4: dict[int, tuple[tuple[int, ...], ...]] = {
    4: ((1, 8, 1, 2, 8, 0, 1), (1, 4, 1, 2, 8, 0, 1), (1, 4, 2, 1, 8, 0, 1)),
    8: ((1, 8, 1, 1, 8, 1, 1), (2, 4, 1, 1, 8, 1, 1), (2, 2, 1, 1, 4, 1, 1)),
    16: ((1, 8, 1, 1, 4, 1, 1), (2, 4, 1, 1, 4, 1, 1), (2, 2, 2, 1, 4, 1, 1)),
    32: ((1, 8, 2, 1, 4, 1, 1), (2, 4, 2, 1, 4, 1, 1), (4, 1, 2, 1, 4, 1, 1)),
    64: ((1, 8, 2, 1, 1, 1, 1), (2, 4, 2, 1, 1, 1, 1), (4, 1, 2, 1, 1, 1, 1)),
}
_DIVISIONS: dict[str, dict[int, tuple[tuple[int, ...], ...]]] = {
    "FP4": _ROWS_OF_FP4,
    "MXFP4": {
        **_ROWS_OF_FP4,
        8: ((1, 8, 1, 2, 4, 1, 1), (1, 4, 1, 2, 4, 1, 1), (2, 2, 1, 1, 4, 1, 1)),
        16: ((1, 8, 1, 1, 4, 1, 1), (2, 4, 1, 2, 4, 1, 1), (2, 2, 1, 1, 2, 1, 1)),
    },
    "MX": {
        4: ((1, 8, 1, 2, 4, 0, 1), (1, 8, 2, 1, 4, 0, 1), (1, 4, 2, 1, 4, 0, 1)),
        8: ((1, 8, 1, 2, 4, 0, 1), (1, 8, 2, 1, 4, 0, 1), (1, 4, 1, 1, 4, 1, 1)),
        16: ((1, 8, 1, 1, 4, 1, 1), (2, 4, 1, 1, 4, 1, 1), (2, 2, 2, 1, 2, 1, 1)),
        32: ((1, 8, 2, 1, 4, 1, 1), (2, 4, 1, 1, 2, 1, 1), (2, 2, 1, 1, 4, 1, 1)),
        64: ((1, 8, 2, 1, 1, 1, 1), (2, 4, 2, 1, 2, 1, 1), (4, 1, 2, 1, 1, 1, 1)),
    },
    "FP8": _ROWS_OF_FP8,
    "BLOCKS": {
        8: ((1, 8, 1, 2, 2, 0, 1), *_ROWS_OF_FP8[8][1:]),
        16: ((1, 8, 1, 1, 4, 1, 1), (2, 4, 1, 2, 4, 1, 1), (2, 2, 1, 1, 2, 1, 1)),
        32: ((1, 8, 2, 1, 2, 1, 1), (2, 4, 2, 1, 4, 1, 1), (4, 2, 2, 1, 2, 1, 1)),
        64: _FP8_64,
    },
}  # fmt: skip


# Those of a Hopper whose codes come through shared memory (STAGES of 0), where that is faster than the division above:
# on an H200 by 2 to 14 % (benchmarks/results/decode_shared_cuts.json). None: it is not.
_SHARED: dict[str, dict[int, tuple[tuple[int, ...] | None, ...]]] = {
    "FP4": {
        4: ((1, 8, 1, 0, 8, 0, 1), (2, 4, 1, 0, 8, 0, 1), None),
        8: ((1, 8, 1, 0, 8, 1, 1), (2, 4, 1, 0, 8, 1, 1), None),
        16: ((1, 8, 1, 0, 4, 1, 1), (1, 4, 1, 0, 4, 1, 1), None),
    },
    "MXFP4": {
        4: ((1, 8, 1, 0, 8, 0, 1), (2, 4, 1, 0, 8, 0, 1), (1, 4, 2, 0, 8, 0, 1)),
        8: ((1, 8, 1, 0, 8, 1, 1), (2, 4, 1, 0, 8, 1, 1), (1, 4, 2, 0, 8, 1, 1)),
        16: (None, None, (1, 4, 2, 0, 4, 1, 1)),
    },
}


# With how many warps `gemm.warpgroups` multiplies on a Hopper, by the most rows of x
# (benchmarks/results/decode_warpgroup_cuts.json).
_BY_OTHERS = (None, None, None)
_BY_WARPGROUPS: dict[str, dict[int, tuple[int | None, ...]]] = {
    "FP4": {32: _BY_OTHERS, 64: (8, 8, 8), 128: (8, 8, 16)},
    "MXFP4": {16: _BY_OTHERS, 32: (None, 8, 8), 64: (8, 8, 8), 128: (8, 8, 16)},
    "MX": {64: _BY_OTHERS, 128: (8, 8, 8)},
    "FP8": {64: _BY_OTHERS, 128: (8, 8, 8)},
}
_MOST_PARTS = 8  # of K: more of them were not tried
_LEAST_STEPS = 4  # chunks of a part of K


def _kind_of(codes: DecodeCodes) -> str:
    """Kind of codes: the key of the tables of divisions."""
    if codes.SCALE not in _SCALES_OF_BYTES:
        return "BLOCKS" if codes.WIDTH else "FP8"
    if codes.BITS == 8:
        return "MX"
    return "MXFP4" if SCALE_KINDS["E8M0"] == codes.SCALE else "FP4"


def cut_of(
    codes: DecodeCodes, shape: tuple[int, int, int], scale_strides: tuple[int, int], bias: bool, device: Device,
    *, halves: bool = False,
) -> DecodeCut | None:  # fmt: skip
    """The cut of a product of M, K, N, None where no kernel multiplies so many rows; `halves`: x is float16."""
    m, k, n = shape
    kind, size = _kind_of(codes), (n >= 48 * device.multiprocessors) + (n >= 128 * device.multiprocessors)
    tokens = next((tokens for tokens in (1, 2, 4, 8, 16) if m <= 8 * tokens), 0)
    by_groups = device.warpgroups and device.places and not halves
    if by_groups and (warps := _of_most(_BY_WARPGROUPS.get(kind, {}), m, size)):
        cut = fitted(by_warpgroups(warps, tokens), codes, k, scale_strides, bias)
        if cut.WARPGROUPS:
            tiles, chunks = -(-n // (16 * warps)), -(-k * codes.BITS // _CHUNK_BITS)
            return cut._replace(SPLITS=_parts_that_fill(tiles, chunks, device.multiprocessors, _most_of(codes, cut)))
    if m > MOST_DECODED_ROWS:
        return None
    if device.warpgroups and (row := _of_most(_SHARED.get(kind, {}), m, size)):
        cut = fitted(_cut_by(_Division(*row), tokens, early=True), codes, k, scale_strides, bias)
        if cut.STAGES == 0:
            return cut
    row = _of_most(_DIVISIONS[kind], m, size)
    assert row is not None, "every size of weight has a division"
    own = _Division(*row)
    if n < 16 * device.multiprocessors:
        own = own._replace(ROW_WARPS=1, LENGTH_WARPS=8, TILES=1)
    length, chunks = own.LENGTH_WARPS, -(-k * codes.BITS // _CHUNK_BITS)
    while length > 1 and length > chunks:
        length //= 2
    cut = _cut_by(own._replace(LENGTH_WARPS=length), tokens, bool(own.DEPENDENT) and device.warpgroups)
    return fitted(cut, codes, k, scale_strides, bias)


def _of_most(table: Mapping[int, Sequence[Division | None]], rows: int, size: int) -> Division | None:
    """Entry of a table for the smallest limit that holds `rows` rows of x, and for a weight of size class `size`."""
    return next((of_size[size] for most, of_size in table.items() if rows <= most), None)


def _cut_by(own: _Division, tokens: int, early: bool) -> DecodeCut:
    return DecodeCut(
        own.ROW_WARPS, own.LENGTH_WARPS, own.TILES, tokens, own.STAGES, own.AHEAD, False, False, False,
        bool(own.ORDERED), DEPENDENT=early,
    )  # fmt: skip


def by_warpgroups(warps: int, tokens: int, splits: int = 1) -> DecodeCut:
    """A cut of `gemm.warpgroups`."""
    return DecodeCut(
        warps, 1, 1, tokens, 0, 1, False, False, False, True, DEPENDENT=True, SPLITS=splits, WARPGROUPS=True
    )


def _most_of(codes: DecodeCodes, cut: DecodeCut) -> int:
    """Most programs of `warpgroups` that fit into the shared memory of a Hopper's multiprocessor."""
    return SHARED_BYTES // (warpgroups.bytes_of_x(codes, cut) + warpgroups.bytes_declared(codes, cut) + SYSTEM_BYTES)


def _parts_that_fill(tiles: int, chunks: int, processors: int, most: int) -> int:
    """Number of parts of K, with `most` programs on a multiprocessor, that take `warpgroups` the shortest time."""

    def duration(parts: int) -> float:
        each = -(-tiles * parts // processors)
        return each / parts if each <= most or parts == 1 else math.inf

    return min(range(1, min(_MOST_PARTS, max(1, chunks // _LEAST_STEPS)) + 1), key=duration)


def fitted(cut: DecodeCut, codes: DecodeCodes, length: int, scale_strides: tuple[int, int], bias: bool) -> DecodeCut:
    """A cut with the fields that follow from the operands: BIAS, EVEN, WIDE, and an AHEAD of one chunk at most.

    STAGES = 0 and WARPGROUPS stay only if shared memory takes the codes: whole chunks, with scales in words without
    gaps and, for STAGES = 0, four bits per code.
    """
    stride_r, stride_k = scale_strides
    wide = codes.SCALE in _SCALES_OF_BYTES and stride_k == 1 and stride_r % 4 == 0
    ahead = min(cut.AHEAD, 2 * 16 // codes.BITS)
    even = length * codes.BITS % (_CHUNK_BITS * cut.LENGTH_WARPS) == 0
    width = 16 if SCALE_KINDS["E4M3"] == codes.SCALE else 32
    in_words = wide and width == codes.WIDTH
    stages = cut.STAGES if even and in_words and codes.BITS == 4 else max(cut.STAGES, 1)
    groups = cut.WARPGROUPS and even and (in_words or codes.WIDTH == 0)
    return cut._replace(
        BIAS=bias, EVEN=even, WIDE=wide, STAGES=0 if groups else stages, AHEAD=ahead,
        SPLITS=cut.SPLITS if groups else 0, WARPGROUPS=groups,
    )  # fmt: skip


@functools.lru_cache(512)
def cut_of_experts(
    codes: DecodeCodes, shape: tuple[int, int, int], experts: int, scale_strides: tuple[int, int], bias: bool,
    device: Device,
) -> DecodeCut:  # fmt: skip
    """The cut of products of M rows of x in all with N x K weights of `experts` experts."""
    # Tiles of x hold twice the mean group (at most 64 rows): few groups need a second tile, which decodes once more.
    m, k, n = shape
    rows = min(m, 2 * -(-m // experts), MOST_DECODED_ROWS)
    alike = device._replace(warpgroups=False)  # experts are multiplied by `decode_gemm`, one launch after the other
    cut = cut_of(codes, (rows, k, n * min(experts, m)), scale_strides, bias, alike)
    assert cut is not None, "decode_gemm multiplies so many rows"
    return cut._replace(GROUPED=True)


def fits(codes: DecodeCodes, shape: tuple[int, int, int], most: int = MOST_DECODED_ROWS, experts: int = 1) -> bool:
    """True if the kernel serves a product of M, K, N: at most `most` rows of x, and offsets of 32 bits."""
    m, k, n = shape
    return m <= most and max(experts * n * k * codes.BITS // 32, 8 * m * k) <= INT32_MAX
