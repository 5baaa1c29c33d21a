"""Compile-time constants of kernels, as named tuples: a kernel reads ``HOW.EVEN`` or ``CAST.STOCHASTIC``.

Triton passes plain tuples to constexpr functions, which restore the names by ``ScaledCast(*cast)``. Nothing here
imports Triton. `RULE` is the mantissa threshold of an E8M0 scale; for an FP32 scale it is 1 where scales are powers of
two. `GRADIENT` is True for the cast of an output gradient, whose scales show overflow (`scales.unless_infinite`).
"""

from typing import NamedTuple


class How(NamedTuple):
    """Constants of a kernel that handles a matrix tile by tile, BM x BN elements at a time.

    LOADS: how inputs are loaded (`convert`). KIND: the form of the values, which differs from LOADS only after a
    producer (`produce`). EVEN: whole tiles cover the matrix, so nothing is masked. INDEX64: offsets need 64 bits.
    HW: the GPU has FP8 conversions. PAIRS, QUADS: the codes of a row, and of a column, are stored two and four at a
    time, since their number is a multiple of 2 and of 4.
    """

    LOADS: int
    KIND: int
    EVEN: bool
    INDEX64: bool
    HW: bool
    BM: int
    BN: int
    PAIRS: bool = False
    QUADS: bool = False


class ScaledCast(NamedTuple):
    """A cast of `casts.scaled`, or the MX cast of `casts.fold`."""

    MB: int
    BIAS: int
    RULE: int
    STOCHASTIC: bool
    GRADIENT: bool


class BlockCast(NamedTuple):
    """A cast of `casts.blocks`.

    FAMILY: kind of scale, `scales.E8M0` or `scales.FP32`. BLOCK: length of a block along the contraction axis; TILE:
    blocks are BLOCK x BLOCK. OUTPUT: `CODES`, or `VALUES` (dequantized bfloat16 in the layout of the input).
    SCALE_LAYOUT: order in which the scales of one-row blocks are stored (`tiles.scale_offset`).
    """

    MB: int
    BIAS: int
    FAMILY: int
    RULE: int
    BLOCK: int
    STOCHASTIC: bool
    OUTPUT: int
    SCALE_LAYOUT: int
    TILE: bool
    GRADIENT: bool


class Nvfp4Cast(NamedTuple):
    """A cast of `casts.nvfp4`.

    RULE, CAPACITY, INVERSE_SIX: constants of the scale rule (`scales`). SIGNS: sign mask of the Hadamard transform, or
    -1 without one. TILE: blocks are 16 x 16. PER_ROW: every row of the operand has its own amax and tensor scale.
    OUTPUT: `CODES`; `VALUES`: code x block scale in bfloat16, which is exact, in the layout of the input and without
    the tensor scale; `FOLDED`, `TILED`: these rounded to E4M3 with a float32 scale for 1x128 or 128x128, which takes up
    the tensor scale. ALIGNED: groups of eight codes, of two values or of four bytes start at multiples of their size.
    """

    RULE: int
    CAPACITY: float
    INVERSE_SIX: float
    STOCHASTIC: bool
    SIGNS: int
    TILE: bool
    PER_ROW: bool
    OUTPUT: int
    ALIGNED: bool
    GRADIENT: bool


class Pass(NamedTuple):
    """Constants of a matrix in a launch: the casts of its row and column operand (or None), and its tiles."""

    ROW: ScaledCast | Nvfp4Cast | None
    COLUMN: ScaledCast | Nvfp4Cast | None
    HOW: How


class DecodeCodes(NamedTuple):
    """Format of the stored codes of a weight in `gemm.decode`.

    BITS: size of a code in memory, 4 or 8. SCALE: kind of stored scale (`casts.dequantize`). HEIGHT, WIDTH: rows and
    elements that share a scale; a WIDTH of 0 means the whole row. LEVEL: the weight has a tensor scale too.
    """

    MB: int
    BIAS: int
    BITS: int
    SCALE: int
    HEIGHT: int
    WIDTH: int
    LEVEL: bool


class DecodeCut(NamedTuple):
    """Division of a product among the programs of `gemm.decode`.

    A program has ROW_WARPS times LENGTH_WARPS warps, each with TILES tiles of 16 rows of the weight and 8 * TOKENS rows
    of x. STAGES: number of chunks (128 bytes of a row) by which codes are loaded ahead of their use; 0: they are copied
    through shared memory, one chunk ahead. AHEAD: number of steps (8 elements of a lane) by which x is loaded ahead.
    EVEN: K is a whole number of chunks for every warp. WIDE: the scales of a row are whole words without gaps. ORDERED:
    x has the order of `decode_order`. GROUPED: a plan assigns the rows of x to the weights of experts.

    DEPENDENT: a launch begins while the one before it ends, prefetches codes into the L2 cache, and then waits for it
    (programmatic dependent launch, Hopper and newer).
    """

    ROW_WARPS: int
    LENGTH_WARPS: int
    TILES: int
    TOKENS: int
    STAGES: int
    AHEAD: int
    BIAS: bool
    EVEN: bool
    WIDE: bool
    ORDERED: bool
    GROUPED: bool = False
    DEPENDENT: bool = False


class OwnGemm(NamedTuple):
    """The cut of a program of microfloat's FP8 GEMM with 1x128 scales: warpgroups that multiply, parts of 64 rows of
    each, stages of its ring, rows of tiles to go down before the next column, registers of a multiplying thread."""

    warpgroups: int
    parts: int
    stages: int
    group: int
    registers: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of C that one program makes at a time."""
        return 64 * self.warpgroups * self.parts, 128


# By whether the second operand has 128x128 scales ("tiles", and in JAX those of rows); chosen by measurement.
OWN_GEMMS = {False: OwnGemm(2, 2, 4, 8, 240), True: OwnGemm(3, 1, 4, 8, 160)}
