"""Casts of a matrix by the kernels of `microfloat.kernels`: one pass over it writes both operands.

x_RC is a matrix as it lies in memory. Its *row* operand contracts C and is x itself; its *column* operand contracts R
and is the transposed matrix. Each is wanted as codes and scales, or decoded: code times block scale in bfloat16, exact,
in the layout of x, which a bfloat16 GEMM reads in any orientation.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from microfloat.formats import ScaledFormat
from microfloat.jax.backends.reference import Decoded, Matrix, Operand
from microfloat.jax.backends.triton._launch import Output, call
from microfloat.jax.numerics.bits import FLOAT8
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.transformations import max_over
from microfloat.kernels.casts import amax as amax_kernels
from microfloat.kernels.casts import blocks as block_kernels
from microfloat.kernels.casts import dequantize as dequantize_kernels
from microfloat.kernels.casts import nvfp4 as nvfp4_kernels
from microfloat.kernels.casts import scaled as scaled_kernels
from microfloat.kernels.constants import How
from microfloat.kernels.device.convert import WORDS_BF16, WORDS_F16
from microfloat.kernels.device.tiles import SCALE_ROW_MAJOR
from microfloat.kernels.tables import (
    NO_SIGNS,
    TILES,
    KernelCast,
    Warps,
    ceil_div,
    tile_of_blocks,
    tile_of_nvfp4,
    tile_of_scaled,
)
from microfloat.layout import stored_length

__all__ = ["Arguments", "Wanted", "cast_by_kernel", "decode_by_kernel"]

_CODES, _VALUES = block_kernels.CODES.value, block_kernels.VALUES.value
_GIVEN, _AMAX, _AXES, _TILE = (
    mode.value
    for mode in (scaled_kernels.GIVEN, scaled_kernels.AMAX, scaled_kernels.AXES, scaled_kernels.TILE)
)  # fmt: skip
_SIDE = 128  # of the tiles of FP8_128x128
_INT32_MAX = 2**31 - 1


class Wanted(NamedTuple):
    """One operand of a matrix: its numbers, its random stream, and whether it is decoded."""

    cast: KernelCast
    stream: int
    decoded: bool

    @property
    def output(self) -> int:
        """What a kernel calls it."""
        return _VALUES if self.decoded else _CODES


class Arguments(NamedTuple):
    """What a cast reads besides its matrix: the call seed's words, an amax or an encode scale that is given.

    `axes`: mesh axes over which a measured amax is the maximum. `records`: the live amax is a result too.
    """

    words: Array | None = None
    amax: Array | None = None
    scale_enc: Array | None = None
    axes: frozenset[str] = frozenset()
    records: bool = False


class _Source(NamedTuple):
    """The matrix, and how kernels read it: arrays of XLA lie in rows, at multiples of 16 bytes."""

    x: Array
    capability: tuple[int, int]

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    @property
    def kind(self) -> int:
        """Two elements at once, where rows begin at multiples of 8 bytes."""
        words = {"bfloat16": WORDS_BF16.value, "float16": WORDS_F16.value}.get(self.x.dtype.name, 0)
        return 0 if self.columns % 4 else words

    def fills(self, tile_rows: int, tile_columns: int) -> bool:
        """Whether whole tiles cover it."""
        return self.rows % tile_rows == 0 and self.columns % tile_columns == 0

    def programs(self, tile: tuple[int, int], steps: int = 1) -> int:
        """One for every tile, or for `steps` of them, one below the other."""
        return ceil_div(self.rows, tile[0] * steps) * ceil_div(self.columns, tile[1])

    def common(self, tile: tuple[int, int]) -> dict[str, Any]:
        """The arguments that all kernels name alike."""
        rows, columns = self.rows, self.columns
        return {
            "x_ptr": self.x, "R": rows, "C": columns, "stride_r": columns, "stride_c": 1, "HOW": self.how(tile)
        }  # fmt: skip

    def how(self, tile: tuple[int, int], *, units: bool = False) -> How:
        """The constants of a pass over tiles of this size; `units`: codes are stored two and four at a time."""
        rows, columns = self.rows, self.columns
        # Offsets inside a tile, and the numbers of block scales, of which there is one for 16 elements at most.
        index64 = max(128 * rows, 128 * columns, rows * columns >> 4) > _INT32_MAX
        pairs, quads = units and columns % 2 == 0, units and rows % 4 == 0
        hardware = self.capability >= (8, 9)
        return How(self.kind, self.kind, self.fills(*tile), index64, hardware, *tile, pairs, quads)

    def start(
        self, kernel: Any, tile: tuple[int, int, Warps], arguments: Mapping[str, Any], steps: int = 1
    ) -> dict[str, Array]:
        """One pass of a kernel over the matrix; `tile`: rows, columns, warps; a program takes `steps` of them."""
        height, width, warps = tile
        known = {**self.common((height, width)), **arguments}
        needed = {name: known[name] for name in kernel.arg_names}
        return call(kernel, self.programs((height, width), steps), self.capability, needed, warps)


Results = tuple[Operand | None, Operand | None, Array | None]


def cast_by_kernel(
    x_RC: Array, row: Wanted | None, column: Wanted | None, arguments: Arguments, capability: tuple[int, int]
) -> Results:
    """The row and the column operand of a matrix, each if it is wanted, and the live amax if it is recorded.

    The casts share a launch (`kernels.tables.share_a_launch`). Bytes are those of `reference.cast_matrix`.
    """
    source = _Source(x_RC, capability)
    first = row or column
    if first is None:
        return None, None, None
    decoded = (row is not None and row.decoded) or (column is not None and column.decoded)
    if first.cast.family == "nvfp4":
        return _nvfp4(source, row, column, arguments)
    if first.cast.family == "blocks" or decoded:
        return _blocks(source, row, column, arguments)
    return _scaled(source, row, column, arguments)


def _streams(row: Wanted | None, column: Wanted | None, arguments: Arguments) -> dict[str, Any]:
    stochastic = any(wanted is not None and wanted.cast.stochastic for wanted in (row, column))
    return {
        "seed_ptr": arguments.words if stochastic else None, "row_stream": row.stream if row else 0,
        "column_stream": column.stream if column else 0, "batch": 0,
    }  # fmt: skip


def _code_dtype(cast: KernelCast) -> Any:
    return FLOAT8.get(cast.cast.format.element.name, jnp.uint8)


def _codes(wanted: Wanted, rows: int, length: int) -> Output:
    """Room for the codes of an operand."""
    return Output((rows, ceil_div(length, wanted.cast.codes_per_byte)), _code_dtype(wanted.cast))


def _blocks(source: _Source, row: Wanted | None, column: Wanted | None, arguments: Arguments) -> Results:
    """Blocks of 16 to 128 under E8M0 or float32 scales."""
    sizes = {"row": (source.rows, source.columns), "column": (source.columns, source.rows)}
    given: dict[str, Any] = {}
    for side, wanted in (("row", row), ("column", column)):
        out = scale = constant = None
        if wanted is not None:
            cast, extents = wanted.cast, sizes[side]
            constant = cast.block_cast(wanted.output, SCALE_ROW_MAJOR.value)
            if wanted.decoded:
                out = Output((source.rows, source.columns), jnp.bfloat16)
            else:
                grid = tuple(ceil_div(extent, size or extent) for extent, size in zip(extents, cast.block, strict=True))
                out, scale = _codes(wanted, *extents), Output(grid, jnp.float32 if cast.float_scale else jnp.uint8)
        given |= {f"{side}_out": out, f"{side}_scale": scale, side.upper(): constant}
        given[f"{side}_epsilon"] = wanted.cast.epsilon if wanted else 0.0
    tile = tile_of_blocks(given["ROW"], given["COLUMN"], source.kind, source.fills)
    given["HOW"] = source.how(tile[:2], units=True)
    done = source.start(block_kernels.quantize_blocks, tile, given | _streams(row, column, arguments))
    operands = []
    for side, wanted in (("row", row), ("column", column)):
        out = done.get(f"{side}_out")
        if wanted is None or out is None:
            operands.append(None)
        elif wanted.decoded:
            operands.append(Decoded(out if side == "row" else out.T, None))
        else:
            operands.append(Matrix(out, done[f"{side}_scale"], None))
    return operands[0], operands[1], None


def _scaled(source: _Source, row: Wanted | None, column: Wanted | None, arguments: Arguments) -> Results:
    """FP8 per tensor, per row and over tiles of 128 x 128."""
    first = row or column
    assert first is not None
    cast, rows, columns = first.cast, source.rows, source.columns
    shapes: dict[str, tuple[int, ...]] = {"row": (1, 1), "column": (1, 1)}
    given: dict[str, Any] = {"source_ptr": None, "source2_ptr": None, "SOURCE": _TILE}
    if cast.block == (None, None):
        given["SOURCE"], given["source_ptr"] = _GIVEN, arguments.scale_enc
        if arguments.scale_enc is None:
            amax = arguments.amax
            if amax is None:
                amax = max_over(tensor_amax(source.x), arguments.axes)
            given["SOURCE"], given["source_ptr"] = _AMAX, amax
    elif cast.block == (1, None):
        shapes = {"row": (rows, 1), "column": (columns, 1)}
        given["SOURCE"] = _AXES
        given["source_ptr"], given["source2_ptr"] = _axis_amaxes(source, row is not None, column is not None)
    else:
        tiles = (ceil_div(rows, _SIDE), ceil_div(columns, _SIDE))
        shapes = {"row": tiles, "column": tiles[::-1]}
    for side, wanted, extents in (("row", row, (rows, columns)), ("column", column, (columns, rows))):
        given[f"{side}_out"] = _codes(wanted, *extents) if wanted else None
        given[f"{side}_scale"] = Output(shapes[side], jnp.float32) if wanted else None
        given[side.upper()] = wanted.cast.scaled_cast if wanted else None
    # The scale of a gradient under a given one depends on what is recorded.
    records = arguments.records or (given["SOURCE"] == _GIVEN and cast.cast.is_gradient)
    given |= {
        "RECORDS": records, "record_ptr": Output((), jnp.float32, zeroed=True) if records else None,
        "scratch_ptr": _scratch() if records else None, "epsilon": cast.epsilon,
    }  # fmt: skip
    tile = tile_of_scaled(given["ROW"], given["COLUMN"], given["SOURCE"], (rows, columns), source.fills)
    given["HOW"] = source.how(tile[:2], units=True)
    done = source.start(scaled_kernels.cast_scaled, tile, given | _streams(row, column, arguments))
    made = [
        Matrix(done[f"{side}_out"], done[f"{side}_scale"], None) if wanted else None
        for side, wanted in (("row", row), ("column", column))
    ]
    return made[0], made[1], done.get("record_ptr") if arguments.records else None


def _scratch() -> Output:
    """Words in which the programs of a launch meet: int64 to the kernel, zero when it starts."""
    return Output((16,), jnp.uint32, zeroed=True, pointer="*i64")


def _axis_amaxes(source: _Source, of_rows: bool, of_columns: bool) -> tuple[Array | None, Array | None]:
    """The amax of every row [R] and of every column [C], each if it is asked for, NaN ignored."""
    given: dict[str, Any] = {
        "ROW": of_rows, "COLUMN": of_columns,
        "row_amax": Output((source.rows,), jnp.float32, zeroed=True, pointer="*i32") if of_rows else None,
        "column_amax": Output((source.columns,), jnp.float32, zeroed=True, pointer="*i32") if of_columns else None,
    }  # fmt: skip
    done = source.start(amax_kernels.amax_rows_columns, TILES["axes"], given)
    return done.get("row_amax"), done.get("column_amax")


def _nvfp4(source: _Source, row: Wanted | None, column: Wanted | None, arguments: Arguments) -> Results:
    """FP4 codes under E4M3 scales along 16."""
    amaxes = _nvfp4_amaxes(source, row, column, arguments)
    given: dict[str, Any] = {"row_amax": amaxes[0], "column_amax": amaxes[1]}
    for side, wanted in (("row", row), ("column", column)):
        given |= _nvfp4_side(source, side, wanted)
    height, width, warps, steps = tile_of_nvfp4(
        given["ROW"], given["COLUMN"], source.kind, (source.rows, source.columns)
    )
    given |= _streams(row, column, arguments) | {"STEPS": steps}
    done = source.start(nvfp4_kernels.quantize_nvfp4, (height, width, warps), given, steps)
    operands = []
    for side, wanted in (("row", row), ("column", column)):
        if wanted is None:
            operands.append(None)
            continue
        level = wanted.cast.cast.rule.two_level
        outer = done[f"{side}_tensor_scale"] if level is not None and level.tensor_scale else None
        out = done[f"{side}_out"]
        if wanted.decoded:
            operands.append(Decoded(out if side == "row" else out.T, outer))
        else:
            operands.append(Matrix(out, done[f"{side}_scale"], outer))
    return operands[0], operands[1], None


def _nvfp4_side(source: _Source, side: str, wanted: Wanted | None) -> dict[str, Any]:
    """The arguments of one operand."""
    names = (f"{side}_out", f"{side}_scale", f"{side}_tensor_scale", side.upper())
    if wanted is None:
        return dict.fromkeys(names)
    rows, length = (source.rows, source.columns) if side == "row" else (source.columns, source.rows)
    stored = stored_length(length, wanted.cast.cast.hadamard)
    level = Output((rows, 1) if wanted.cast.is_scaled_per_row else (), jnp.float32)
    if wanted.decoded:
        aligned = (stored if side == "row" else source.columns) % 2 == 0
        out = Output((rows, stored) if side == "row" else (stored, source.columns), jnp.bfloat16)
        scale = None
    else:
        aligned = stored % 8 == 0
        out = _codes(wanted, rows, stored)
        height = 16 if wanted.cast.block[0] == 16 else 1
        scale = Output((ceil_div(rows, height), ceil_div(stored, 16)), jnp.uint8)
    constant = wanted.cast.nvfp4_constant(wanted.output, aligned)
    return dict(zip(names, (out, scale, level, constant), strict=True))


def _nvfp4_amaxes(
    source: _Source, row: Wanted | None, column: Wanted | None, arguments: Arguments
) -> tuple[Array | None, Array | None]:
    """The amax that each operand's first level needs: of the matrix, of its transform, or of every operand row."""
    if arguments.amax is not None:
        return arguments.amax, arguments.amax
    found: dict[str, Array | None] = {"row": None, "column": None}
    plain = None
    for side, wanted in (("row", row), ("column", column)):
        if wanted is None:
            continue
        if wanted.cast.is_scaled_per_row:
            found[side] = _axis_amaxes(source, side == "row", side == "column")[side == "column"]
        elif wanted.cast.signs != NO_SIGNS:
            given = {
                "out_ptr": Output((2,), jnp.float32), "scratch_ptr": _scratch(), "MASK": wanted.cast.signs,
                "ALONG_ROWS": side == "row",
            }  # fmt: skip
            both = source.start(amax_kernels.amax_transformed, TILES["nvfp4_amax"], given)["out_ptr"]
            both = max_over(both, arguments.axes)
            plain, found[side] = both[0], both[1]
    for side, wanted in (("row", row), ("column", column)):
        if wanted is not None and found[side] is None:
            if plain is None:
                plain = max_over(tensor_amax(source.x), arguments.axes)
            found[side] = plain
    return found["row"], found["column"]


_SCALES = {
    "FP32": dequantize_kernels.SCALE_FLOAT.value, "E8M0": dequantize_kernels.SCALE_E8M0.value,
    "E4M3": dequantize_kernels.SCALE_E4M3.value,
}  # fmt: skip


def decode_by_kernel(matrix: Matrix, fmt: ScaledFormat, length: int, capability: tuple[int, int]) -> Array:
    """Code times block scale in bfloat16 [R, length] of an operand form with E8M0 or E4M3 scales, one per block."""
    height, width, warps = TILES["dequantize"]
    rows = matrix.codes.shape[0]
    arguments = {
        "codes_ptr": matrix.codes, "scale_ptr": matrix.scale, "tensor_scale_ptr": None,
        "out_ptr": Output((rows, length), jnp.bfloat16), "R": rows, "C": length,
        "scale_stride_r": matrix.scale.shape[1], "scale_stride_k": 1, "tensor_scale_stride": 0,
        "MB": fmt.element.mantissa_bits, "BIAS": fmt.element.bias, "SCALE": _SCALES[fmt.scale.name],
        "HEIGHT": fmt.block[0], "WIDTH": fmt.block[1], "LEVELS": 1, "BF16": True, "PAIRS": length % 2 == 0,
        "EVEN": rows % height == 0 and length % width == 0, "INDEX64": max(rows, height * length) > _INT32_MAX,
        "HW": capability >= (8, 9), "BM": height, "BN": width,
    }  # fmt: skip
    programs = ceil_div(rows, height) * ceil_div(length, width)
    return call(dequantize_kernels.dequantize, programs, capability, arguments, warps)["out_ptr"]
