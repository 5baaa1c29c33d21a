"""Programs that make the operands of a GEMM from a matrix, in the form and memory order in which the GEMM reads them.

Forms are those of the native backend: codes, values (decoded to bfloat16), folded (MX to 1x128), tiles (MX to 128x128).
A left operand [R, C] lies row by row. A right one is its transpose, [C, R], with unit stride along the first axis; its
scales likewise, but for those of 1x128 blocks, which lie column-major on both sides. Legend: R = rows of an operand,
C = its contraction length.
"""

from typing import NamedTuple

import torch

from microfloat.kernels.tables import NO_SIGNS, same_values, share_a_launch
from microfloat.recipes import Cast
from microfloat.torch.backends.triton import _blocks, _nvfp4, _scaled
from microfloat.torch.backends.triton._launch import Matrix, ceil_div
from microfloat.torch.backends.triton._plans import CastPlan, plan_of
from microfloat.torch.backends.triton._programs import (
    FOLDED,
    GIVEN,
    NOTHING,
    RECORD,
    SECOND,
    SECOND_GIVEN,
    SECOND_RECORD,
    SOURCE,
    TILES,
    WORDS,
    Builder,
    Program,
    Room,
)
from microfloat.torch.backends.triton._together import (
    fits_together,
    fits_values_together,
    together_launch,
    values_launch,
)

__all__ = ["Want", "cast_program", "pair_program"]

_SIDE = 128  # elements along which folded and FP8 blocks share a scale
_SCALES_TOGETHER = 4  # what the number of tiles in a row is rounded up to, for their GEMM
_SCALAR = Room((), (), torch.float32)


class Want(NamedTuple):
    """One operand: its cast and form, whether it stands right in its GEMM, and its word of random counters."""

    cast: Cast
    form: str
    right: bool
    stream: int


class _Part(NamedTuple):
    """A `Want` with what it means for one matrix. `place`: where its results stand, codes first, then the scale."""

    plan: CastPlan
    want: Want
    rows: int
    length: int
    place: int
    is_column: bool


_Parts = tuple["_Part | None", "_Part | None"]


def cast_program(x: torch.Tensor, row: Want | None, column: Want | None, *, records: bool = False) -> Program | None:
    """The program for one matrix, its operand as it lies and that of its transpose; None where no kernel serves one.

    `records`: delayed casts record the amax of the matrix.
    """
    matrix = _matrix(x)
    parts = _parts(matrix, row, column)
    if any(part is not None and (part.plan.refusal or part.plan.bare is not None) for part in parts):
        return None
    builder = Builder(x.device)
    for together in _passes(*parts):
        _form(builder, matrix, together, records)
    return Program(builder)


_Wants = tuple[Want | None, Want | None]


def pair_program(
    x: torch.Tensor, x_wants: _Wants, w: torch.Tensor, w_wants: _Wants, *, records: bool = False,
    draws_seed: bool = False,
) -> Program | None:  # fmt: skip
    """The program for two matrices in one launch, each with a scale of its own; None where that does not fit.

    `draws_seed`: it also makes the words of a call seed (what x is given) from the 64 bits that were drawn (what w is
    given), for later casts; neither x nor w is rounded stochastically.
    """
    builder = Builder(x.device, operands=8)
    first, second = _matrix(x), _matrix(w)
    both = _parts(first, *x_wants), _parts(second, *w_wants, base=4)
    if any(len(_passes(*parts)) != 1 or _seed(*parts) != NOTHING for parts in both):
        return None
    matrices = [(first, both[0]), (second, both[1])]
    if all(part.want.form == "values" for parts in both for part in parts if part is not None):
        if not fits_values_together(_casts(matrices)):
            return None
        matrices = [(matrix, _only_row(builder, *parts)) for matrix, parts in matrices]
        _values_together(builder, matrices, draws_seed)
        return Program(builder)
    blocks = {_wide_block(part) for parts in both for part in parts if part is not None}
    if draws_seed or len(blocks) != 1 or None in blocks:
        return None
    if not fits_together(first, second):
        return None
    _together(builder, matrices, records)
    return Program(builder)


def _matrix(x: torch.Tensor) -> Matrix:
    return Matrix(x if x.dim() == 2 else x.view(-1, x.shape[-1]))


def _parts(matrix: Matrix, row: Want | None, column: Want | None, base: int = 0) -> _Parts:
    extents = ((matrix.rows, matrix.columns), (matrix.columns, matrix.rows))
    first, second = (
        None if want is None else _Part(plan_of(want.cast), want, *extents[turned], base + 2 * turned, bool(turned))
        for turned, want in enumerate((row, column))
    )
    return first, second


def _passes(row: _Part | None, column: _Part | None) -> list[_Parts]:
    """Both operands in one pass where their forms and casts allow it, else in two."""
    if row is None or column is None:
        return [(row, column)]
    if row.want.form == column.want.form and share_a_launch(row.plan, column.plan):
        return [(row, column)]
    return [(row, None), (None, column)]


def _wide_block(part: _Part) -> tuple[int | None, int | None] | None:
    """The block of an FP8 cast with one scale per tensor or per row; None for every other operand."""
    wide = part.want.form == "codes" and part.plan.family == "scaled" and part.plan.block[1] is None
    return part.plan.block if wide else None


def _mode(row: _Part | None, column: _Part | None) -> int:
    """Where the scales of a matrix come from: given, from its amax, from those of its rows and columns."""
    part = row or column
    assert part is not None
    if part.plan.block == (1, None):
        return _scaled.AXES
    return _scaled.GIVEN if part.plan.cast.is_delayed else _scaled.AMAX


def _plan(part: _Part | None) -> CastPlan | None:
    return None if part is None else part.plan


def _streams(row: _Part | None, column: _Part | None) -> dict[str, int]:
    row_stream, column_stream = (0 if part is None else part.want.stream for part in (row, column))
    return {"row_stream": row_stream, "column_stream": column_stream}


def _seed(row: _Part | None, column: _Part | None) -> int:
    return GIVEN if any(part is not None and part.plan.stochastic for part in (row, column)) else NOTHING


def _form(builder: Builder, matrix: Matrix, parts: _Parts, records: bool) -> None:
    """Rooms and launches of one pass."""
    part = parts[0] or parts[1]
    assert part is not None
    form, family, block = part.want.form, part.plan.family, part.plan.block
    if form == "values":
        (_nvfp4_values if family == "nvfp4" else _block_values)(builder, matrix, *parts)
    elif form in ("folded", "tiles"):
        _folded(builder, matrix, *parts, tile=form == "tiles")
    elif block == (None, None):
        _tensorwise(builder, matrix, parts, records)
    elif family == "scaled" and block == (1, None):
        _rowwise(builder, matrix, *parts)
    elif family == "scaled":
        _tiles(builder, matrix, *parts)
    else:
        _blockwise(builder, matrix, *parts)


def _lying(rows: int, length: int, right: bool, dtype: torch.dtype) -> Room:
    """[R, C] row by row, presented as its transpose where it stands right."""
    return Room((length, rows), (1, length), dtype) if right else Room((rows, length), (length, 1), dtype)


def _codes(builder: Builder, part: _Part | None, dtype: torch.dtype | None = None) -> int:
    if part is None:
        return NOTHING
    return builder.put(part.place, _lying(part.rows, part.length, part.want.right, dtype or part.plan.codes_dtype))


def _block_scale(builder: Builder, part: _Part | None, tile: int) -> int:
    """float32 scales of 1x128 blocks (0), or of 128x128 tiles in rows of a multiple of `tile`."""
    if part is None:
        return NOTHING
    along = ceil_div(part.length, _SIDE)
    if tile:
        along = ceil_div(along, tile) * tile
        return builder.put(part.place + 1, _lying(ceil_div(part.rows, _SIDE), along, part.want.right, torch.float32))
    return builder.put(part.place + 1, Room((part.rows, along), (1, part.rows), torch.float32))


def _tensorwise(builder: Builder, matrix: Matrix, parts: _Parts, records: bool) -> None:
    plans = _plan(parts[0]), _plan(parts[1])
    cast = (plans[0] or plans[1]).cast  # type: ignore[union-attr]
    delayed = cast.is_delayed
    record = RECORD
    if delayed and cast.is_gradient and not records:  # the scale depends on what is recorded
        record, records = builder.add(Room((1,), (1,), torch.float32, cleared=True)), True
    if _seed(*parts) == NOTHING and not delayed and fits_together(matrix, None):
        _together(builder, [(matrix, parts)], records, record)
        return
    codes, scale = [_codes(builder, part) for part in parts], _shared_scale(builder, parts)
    source = GIVEN
    if not delayed:
        source = builder.add(_SCALAR)
        builder.launch(_scaled.amax_launch(matrix), SOURCE, source, WORDS)
    mode = _scaled.GIVEN if delayed else _scaled.AMAX
    launch = _scaled.cast_launch(matrix, *plans, mode, records=records, **_streams(*parts))
    record, words = (record, WORDS) if records else (NOTHING, NOTHING)
    builder.launch(launch, SOURCE, *codes, scale, scale, source, NOTHING, record, words, _seed(*parts))


def _shared_scale(builder: Builder, parts: _Parts, base: int = 0) -> int:
    """Both operands of a matrix have one scale."""
    scale = builder.put(base + 1, _SCALAR)
    if parts[1] is not None:
        builder.share(base + 3, base + 1, _SCALAR)
    return scale


def _together(
    builder: Builder, matrices: list[tuple[Matrix, _Parts]], records: bool, first_record: int = RECORD
) -> None:
    """One launch for one or two matrices with scales of their own, per tensor or per row."""
    positions: list[int] = []
    places = ((SOURCE, GIVEN, first_record), (SECOND, SECOND_GIVEN, SECOND_RECORD))
    mode = _mode(*matrices[0][1])
    axes, delayed = mode == _scaled.AXES, mode == _scaled.GIVEN
    for base, (source, given, record), (matrix, parts) in zip((0, 4), places, matrices, strict=False):
        codes = [_codes(builder, part) for part in parts]
        if axes:
            scales = [_row_scale(builder, part) for part in parts]
            known = builder.add(Room((matrix.rows + matrix.columns,), (1,), torch.int32))
        else:
            scales, known = [_shared_scale(builder, parts, base)] * 2, given if delayed else NOTHING
        positions += [source, *codes, *scales, known, record if records else NOTHING]
    positions += [NOTHING] * (14 - len(positions))
    casts = _casts(matrices)
    words = WORDS if records or not delayed else NOTHING
    builder.launch(together_launch(casts, mode, records=records), *positions, words)


def _casts(matrices: list[tuple[Matrix, _Parts]]) -> list[tuple[Matrix, CastPlan | None, CastPlan | None]]:
    return [(matrix, _plan(row), _plan(column)) for matrix, (row, column) in matrices]


def _values_together(builder: Builder, matrices: list[tuple[Matrix, _Parts]], draws_seed: bool = False) -> None:
    """One launch that measures one or two matrices and casts them to NVFP4 values."""
    positions: list[int] = []
    for source, (_, parts) in zip((SOURCE, SECOND), matrices, strict=False):
        positions += [source, *(at for part in parts for at in (_values(builder, part), _tensor_scale(builder, part)))]
    positions += [NOTHING] * (10 - len(positions))
    streams = [tuple(_streams(*parts).values()) for _, parts in matrices]
    launch = values_launch(_casts(matrices), streams, draws_seed)
    seed, draw = (GIVEN, SECOND_GIVEN) if draws_seed else (_seed(*matrices[0][1]), NOTHING)
    builder.launch(launch, *positions, seed, draw, WORDS)


def _row_scale(builder: Builder, part: _Part | None) -> int:
    if part is None:
        return NOTHING
    return builder.put(part.place + 1, _lying(part.rows, 1, part.want.right, torch.float32))


def _rowwise(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> None:
    if _seed(row, column) == NOTHING and fits_together(matrix, None):
        _together(builder, [(matrix, (row, column))], False)
        return
    rows, columns = matrix.rows if row else 0, matrix.columns if column else 0
    amaxes = builder.add(Room((rows + columns,), (1,), torch.int32, cleared=True))
    row_amax = amaxes if row else NOTHING
    column_amax = (builder.part(amaxes, 4 * rows) if row else amaxes) if column else NOTHING
    builder.launch(_scaled.axes_launch(matrix, row is not None, column is not None), SOURCE, row_amax, column_amax)
    codes = _codes(builder, row), _codes(builder, column)
    scales = _row_scale(builder, row), _row_scale(builder, column)
    launch = _scaled.cast_launch(
        matrix, _plan(row), _plan(column), _scaled.AXES, records=False, **_streams(row, column)
    )  # fmt: skip
    builder.launch(
        launch, SOURCE, *codes, *scales, row_amax, column_amax, NOTHING, NOTHING, _seed(row, column)
    )  # fmt: skip


def _tiles(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> None:
    launch = _scaled.cast_launch(
        matrix, _plan(row), _plan(column), _scaled.TILE, records=False, **_streams(row, column)
    )  # fmt: skip
    codes = _codes(builder, row), _codes(builder, column)
    scales = _block_scale(builder, row, 1), _block_scale(builder, column, 1)
    builder.launch(
        launch, SOURCE, *codes, *scales, NOTHING, NOTHING, NOTHING, NOTHING, _seed(row, column)
    )  # fmt: skip


def _blockwise(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> None:
    launch = _blocks.blocks_launch(matrix, _plan(row), _plan(column), **_streams(row, column))
    positions = [at for part in (row, column) for at in (_codes(builder, part), _block_scale(builder, part, 0))]
    builder.launch(launch, SOURCE, *positions, _seed(row, column))


def _folded(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None, *, tile: bool) -> None:
    multiple = _SCALES_TOGETHER if tile else 0
    launch = _blocks.fold_launch(matrix, _plan(row), _plan(column), multiple, **_streams(row, column))
    positions = []
    for part in (row, column):
        dtype = None if part is None else _blocks.folded_dtype(part.plan)
        positions += [_codes(builder, part, dtype), _block_scale(builder, part, multiple)]
    builder.launch(launch, SOURCE, *positions, TILES if tile else FOLDED, WORDS, _seed(row, column))


def _values_room(part: _Part) -> Room:
    """Values lie as the matrix does, whichever operand they are."""
    right = part.want.right is not part.is_column
    rows, length = (part.length, part.rows) if part.is_column else (part.rows, part.length)
    return _lying(rows, length, right, torch.bfloat16)


def _values(builder: Builder, part: _Part | None) -> int:
    return NOTHING if part is None else builder.put(part.place, _values_room(part))


def _only_row(builder: Builder, row: _Part | None, column: _Part | None) -> _Parts:
    """The operands to write: where both have the same values, those of the column are a view of the row's."""
    if row is None or column is None or not same_values(row.plan, column.plan):
        return row, column
    builder.share(column.place, row.place, _values_room(column))
    if row.plan.cast.rule.two_level.tensor_scale:  # type: ignore[union-attr]
        builder.share(column.place + 1, row.place + 1, _SCALAR)
    return row, None


def _block_values(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> None:
    launch = _blocks.blocks_launch(matrix, _plan(row), _plan(column), _blocks.VALUES, **_streams(row, column))
    values = _values(builder, row), _values(builder, column)
    builder.launch(launch, SOURCE, values[0], NOTHING, values[1], NOTHING, _seed(row, column))


def _nvfp4_values(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> None:
    row, column = _only_row(builder, row, column)
    if fits_values_together([(matrix, _plan(row), _plan(column))]):
        _values_together(builder, [(matrix, (row, column))])
        return
    amaxes = _nvfp4_amaxes(builder, matrix, row, column)
    launch = _nvfp4.nvfp4_launch(matrix, _plan(row), _plan(column), _nvfp4.VALUES, **_streams(row, column))
    positions = []
    for part in (row, column):
        positions += [_values(builder, part), NOTHING, _tensor_scale(builder, part)]
    builder.launch(launch, SOURCE, *positions, *amaxes, _seed(row, column))


def _tensor_scale(builder: Builder, part: _Part | None) -> int:
    """Where the first level of a two-level scale goes: beside the values, or nowhere that anyone reads."""
    if part is None:
        return NOTHING
    room = Room((part.rows, 1), (1, 1), torch.float32) if part.plan.is_scaled_per_row else _SCALAR
    level = part.plan.cast.rule.two_level
    return builder.put(part.place + 1, room) if level is not None and level.tensor_scale else builder.add(room)


def _nvfp4_amaxes(builder: Builder, matrix: Matrix, row: _Part | None, column: _Part | None) -> tuple[int, int]:
    """Launches that measure what each operand's first level needs, in the order of `_nvfp4._amaxes`."""
    row_amax = column_amax = plain = None
    if row and row.plan.is_scaled_per_row:
        row_amax = _axis_amax(builder, matrix, True)
    if column and column.plan.is_scaled_per_row:
        column_amax = _axis_amax(builder, matrix, False)
    for part in (column, row):
        is_row = part is row
        if part is None or (row_amax if is_row else column_amax) is not None:
            continue
        if part.plan.signs == NO_SIGNS:
            continue
        both = builder.add(Room((2,), (1,), torch.float32))
        launch = _nvfp4.transformed_amax_launch(matrix, part.plan.signs, along_rows=is_row)
        builder.launch(launch, SOURCE, both, WORDS)
        plain, transformed = both, builder.part(both, 4)
        row_amax, column_amax = (transformed, column_amax) if is_row else (row_amax, transformed)
    if plain is None and ((row and row_amax is None) or (column and column_amax is None)):
        plain = builder.add(_SCALAR)
        builder.launch(_scaled.amax_launch(matrix), SOURCE, plain, WORDS)
    usual = NOTHING if plain is None else plain
    return usual if row_amax is None else row_amax, usual if column_amax is None else column_amax


def _axis_amax(builder: Builder, matrix: Matrix, row: bool) -> int:
    amax = builder.add(Room((matrix.rows if row else matrix.columns,), (1,), torch.int32, cleared=True))
    positions = (amax, NOTHING) if row else (NOTHING, amax)
    builder.launch(_scaled.axes_launch(matrix, row, not row), SOURCE, *positions)
    return amax
