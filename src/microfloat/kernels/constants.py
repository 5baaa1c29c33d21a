"""The constants of a pass, by name: kernels take these tuples whole and read ``HOW.EVEN``, ``CAST.STOCHASTIC``. Triton
hands them to constexpr functions without the names, which ``ScaledCast(*cast)`` and so on give back.

Nothing here imports Triton. `RULE` of casts with E8M0 scales is the mantissa threshold, of those with FP32 scales 1 for
powers of two. `GRADIENT`: scales are those of an output gradient (`scales.unless_infinite`).
"""

from typing import NamedTuple

__all__ = ["BlockCast", "DecodeCodes", "DecodeCut", "How", "Nvfp4Cast", "Pass", "ScaledCast"]


class How(NamedTuple):
    """Constants of a pass that reads, computes and writes a matrix, one tile of BM x BN at a time.

    LOADS: how inputs are read (`convert`); KIND: how values come, the same but for producers (`produce`). EVEN: whole
    tiles cover the matrix, so that nothing is masked. INDEX64: offsets need 64 bits. HW: the hardware has FP8
    conversions. PAIRS, QUADS: rows of C codes, and of R, hold whole units of two and of four, stored at once; False
    where a kernel does not ask.
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
    """A cast of `scaled`, and the MX cast that `fold` folds."""

    MB: int
    BIAS: int
    RULE: int
    STOCHASTIC: bool
    GRADIENT: bool


class BlockCast(NamedTuple):
    """A cast of `blocks`.

    FAMILY: of scales, `scales.E8M0` or `scales.FP32`. BLOCK: its length along the contraction axis; TILE: blocks are
    BLOCK x BLOCK. OUTPUT: `CODES`, or `VALUES` (dequantized bfloat16 in the layout of the input). SCALE_LAYOUT: where
    the scales of one-row blocks go (`tiles.scale_offset`).
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
    """A cast of `nvfp4`.

    RULE, CAPACITY, INVERSE_SIX: the constants of the scale rule (`scales`). SIGNS: those of the Hadamard transform, or
    -1 without one. TILE: blocks are 16 x 16. PER_ROW: one amax, and one tensor scale, for every row of the operand.
    OUTPUT: `CODES`, or `VALUES`, which are code x block scale in bfloat16 (exact; the tensor scale stays outside) in
    the layout of the input. ALIGNED: units of eight codes (two values) are.
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
    """One matrix of a launch that casts two: the casts of its row and its column operand, or None, and how."""

    ROW: ScaledCast | Nvfp4Cast | None
    COLUMN: ScaledCast | Nvfp4Cast | None
    HOW: How


class DecodeCodes(NamedTuple):
    """The stored codes of a weight as `gemm.decode` reads them.

    BITS: those that a code takes in memory, 4 or 8. SCALE: what a stored scale is (`casts.dequantize`). HEIGHT, WIDTH:
    rows and elements that share one; a WIDTH of 0 is the whole row. LEVEL: there is a tensor scale.
    """

    MB: int
    BIAS: int
    BITS: int
    SCALE: int
    HEIGHT: int
    WIDTH: int
    LEVEL: bool


class DecodeCut(NamedTuple):
    """Division of a product among programs of `gemm.decode`.

    A program has ROW_WARPS times LENGTH_WARPS warps, each with TILES tiles of 16 rows of the weight and 8 * TOKENS rows
    of x. STAGES: chunks (128 bytes of a row) that codes are loaded before their use; 0: they are copied through shared
    memory, a chunk before. AHEAD: steps (8 elements of a lane) that x is. EVEN: the contraction is a whole number of
    chunks for every warp. WIDE: the scales of a row are whole words without gaps. ORDERED: x comes as `decode_order`
    writes it. GROUPED: a plan says which rows of x meet which expert's weight.

    DEPENDENT: its launches begin while the one before them ends, ask the L2 cache for codes, and then wait for it
    (programmatic dependent launch, Hopper and newer).

    SPLITS: 0, or `gemm.decode_wide` multiplies, and the contraction is cut into so many parts. A program of it has
    ROW_WARPS warps with TILES tiles of 16 rows each. AHEAD: steps of 64 bytes of a row that an iteration takes, 1 or 2;
    STAGES counts iterations, and EVEN means whole ones. LENGTH_WARPS and ORDERED say nothing. OVERLAPS: the next step
    is decoded while the products of one are under way; with an AHEAD of 1, and scales that are no blocks of float32.

    WARPGROUPS: `gemm.warpgroups` multiplies, with codes through shared memory (STAGES of 0). A program of it has
    ROW_WARPS warps with 16 rows each, and x comes ORDERED for it; AHEAD says nothing, and SPLITS what it says of
    `gemm.decode_wide`.
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
    SPLITS: int = 0
    OVERLAPS: bool = False
    WARPGROUPS: bool = False
