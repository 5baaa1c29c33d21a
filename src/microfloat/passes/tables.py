"""Sizes of tiles and numbers of warps of kernels, chosen by measurement; the same for every framework."""

from collections.abc import Callable
from typing import NamedTuple

from microfloat.kernels.casts.nvfp4 import FOLDED
from microfloat.kernels.casts.scaled import TILE, converts_once
from microfloat.kernels.constants import BlockCast, Nvfp4Cast, ScaledCast
from microfloat.kernels.device import nvfp4_2d
from microfloat.kernels.device.squares import takes


class Warps(NamedTuple):
    """Number of warps of a program, and most registers of a thread (None: the compiler chooses)."""

    # Casts wait for memory more than they compute, so a limit that lets more programs share a multiprocessor pays.

    number: int
    registers: int | None = None


# Rows, columns and warps of one program, by kernel: chosen by measurement (`python -m benchmarks quantize --sweep`).
TILES = {
    "cast": (128, 128, Warps(8)),
    "cast_once": (256, 128, Warps(8, 128)),  # whole tiles, `scaled.converts_once`
    "cast_tiles": (128, 128, Warps(8)),  # those of the format
    "axes": (128, 128, Warps(4)),
    "together": (64, 128, Warps(4, 168)),  # three programs per SM, whatever they cast
    "blocks": (128, 128, Warps(8, 80)),
    "blocks_long": (128, 128, Warps(8, 112)),  # blocks of 128
    "squares": (256, 64, Warps(8, 72)),  # MX both ways, `kernels.device.squares`
    "block_rows": (32, 256, Warps(8, 64)),
    "block_values": (32, 128, Warps(8, 64)),
    "fold": (128, 128, Warps(8, 64)),
    "fold_squares": (128, 128, Warps(8, 80)),
    "nvfp4": (64, 64, Warps(4, 80)),
    "nvfp4_tiles": (32, 256, Warps(4, 128)),
    "nvfp4_2d": (128, 128, Warps(4)),  # both operands, `kernels.device.nvfp4_2d`
    "nvfp4_2d_folded": (128, 128, Warps(4, 128)),
    "nvfp4_2d_small": (64, 64, Warps(1)),  # where whole tiles of the size above do not cover the matrix
    "nvfp4_rows": (32, 256, Warps(4, 112)),
    "nvfp4_values": (32, 128, Warps(4, 80)),
    "nvfp4_folded": (128, 128, Warps(8, 128)),  # with more, one program fits on a multiprocessor
    "nvfp4_amax": (128, 128, Warps(8)),
    "nvfp4_together": (32, 128, Warps(4, 168)),
    "dequantize": (64, 128, Warps(4)),
    "fold_codes": (128, 128, Warps(8)),  # those of the formats
    "turn": (128, 128, Warps(8)),
    "tails": (16, 512, Warps(4)),
    "fused_scaled": (64, 128, Warps(8)),
    "fused_gradients": (64, 64, Warps(4, 128)),  # those of gate and of up
    "fused_blocks": (128, 128, Warps(8)),
    "fused_squares": (128, 64, Warps(4, 112)),
    "fused_values": (32, 256, Warps(4)),
}
# Tiles that a program of `casts.nvfp4` casts if ENOUGH_PROGRAMS remain for a GPU: constants that it computes once for
# all its tiles cost an eighth of a tile.
NVFP4_STEPS = {"nvfp4": 8, "nvfp4_tiles": 1, "nvfp4_rows": 1, "nvfp4_values": 1}
ENOUGH_PROGRAMS = 1024
# For `amax.amax_contiguous`: elements that a program loads at once; loads in a piece; programs on a multiprocessor, as
# many as fit; warps.
AMAX_PIECES = (4096, 4, 4, Warps(16))


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b) of non-negative integers."""
    return -(-a // b)


def tile_of_scaled(
    row: ScaledCast | None, column: ScaledCast | None, source: int, shape: tuple[int, int],
    fills: Callable[[int, int], bool],
) -> tuple[int, int, Warps]:  # fmt: skip
    """Rows, columns and warps of a tile of `casts.scaled`; `fills` tells if whole tiles of a size cover the matrix."""
    if source == TILE:
        return TILES["cast_tiles"]
    rows, columns, warps = TILES["cast_once"]
    enough = ceil_div(shape[0], rows) * ceil_div(shape[1], columns) >= ENOUGH_PROGRAMS
    if enough and converts_once(row, column, source, fills(rows, columns), rows):
        return rows, columns, warps
    return TILES["cast"]


def tile_of_blocks(
    row: BlockCast | None, column: BlockCast | None, kind: int, fills: Callable[[int, int], bool]
) -> tuple[int, int, Warps]:
    """Rows, columns and warps of a tile of `casts.blocks`; `fills` tells if whole tiles of a size cover the matrix."""
    squares = TILES["squares"]
    if takes(row, column, kind, fills(squares[0], squares[1])):
        return squares
    casts = [cast for cast in (row, column) if cast is not None]
    if max(cast.BLOCK for cast in casts) > 32:
        return TILES["blocks_long"]
    if all(cast.OUTPUT for cast in casts):  # only values are written
        return TILES["block_values"]
    return TILES["blocks" if column else "block_rows"]


def tile_of_nvfp4(
    row: Nvfp4Cast | None, column: Nvfp4Cast | None, kind: int, shape: tuple[int, int]
) -> tuple[int, int, Warps, int]:
    """Rows, columns and warps of a tile of `casts.nvfp4`, and the number of tiles that one program casts."""
    folds = any(FOLDED.value <= cast.OUTPUT for cast in (row, column) if cast is not None)
    for name in ("nvfp4_2d_folded",) if folds else ("nvfp4_2d", "nvfp4_2d_small"):
        tile = TILES[name]
        if nvfp4_2d.takes(row, column, kind, shape[0] % tile[0] == shape[1] % tile[1] == 0, tile[0]):
            return *tile, 1
    if folds:
        return *TILES["nvfp4_folded"], 1
    values = all(cast.OUTPUT for cast in (row, column) if cast is not None)  # only values are written
    name = "nvfp4_tiles" if column is not None and column.TILE else "nvfp4"
    if values or column is None:
        name = "nvfp4_values" if values else "nvfp4_rows"
    (rows, columns, warps), steps = TILES[name], NVFP4_STEPS[name]
    enough = ceil_div(shape[0], rows * steps) * ceil_div(shape[1], columns) >= ENOUGH_PROGRAMS
    return rows, columns, warps, steps if enough else 1
