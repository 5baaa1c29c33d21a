"""Passes that cast one matrix, or two matrices in one launch.

The row operand of a matrix x [R, C] is x, quantized along C; its column operand is x.T, quantized along R. One launch
makes both where their forms and casts allow it. Results come in threes, codes (or values), scale and tensor scale, in
the layout of `microfloat.layout.layout_of`: first the row operand, then the column operand, then those of a second
matrix.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

from microfloat.errors import NotSupportedError
from microfloat.kernels.casts import blocks, fold, groups, nvfp4, pair, scaled
from microfloat.kernels.constants import BlockCast, Nvfp4Cast, ScaledCast
from microfloat.kernels.constants import Pass as MatrixConstants
from microfloat.kernels.device import nvfp4_2d
from microfloat.kernels.device.tiles import SCALE_COLUMN_MAJOR, SCALE_ROW_MAJOR
from microfloat.layout import Layout, Part, layout_of, stored_length
from microfloat.passes import OperandSpec, tables
from microfloat.passes.amaxes import measure, measure_groups, measure_transformed
from microfloat.passes.matrix import (
    GROUP_ROWS,
    NO_SIGNS,
    SCALAR,
    At,
    Buffer,
    KernelCast,
    Matrix,
    Pass,
    Passes,
    is_one_pass,
    kernel_cast,
    specialization,
)
from microfloat.passes.tables import ceil_div
from microfloat.recipes import Cast
from microfloat.routes import WRITES_VALUES

_LONGEST_ROW = 32768  # that a program of `scaled.cast_rows` holds in registers
_GIVEN, _AMAX, _AXES, _TILE = (mode.value for mode in (scaled.GIVEN, scaled.AMAX, scaled.AXES, scaled.TILE))
_CODES, _VALUES = blocks.CODES.value, blocks.VALUES.value
_NVFP4_FOLDED = {"folded": nvfp4.FOLDED.value, "tiles": nvfp4.TILED.value}
_TILES_TOGETHER = 4  # rows of 128x128 scales are padded to a multiple of this (`microfloat.layout`)
# Most elements of matrices that one launch measures and casts: larger ones do not stay in the L2 cache between the two
# readings, and the time of a second launch does not matter beside theirs.
_MOST_TOGETHER = 1 << 24


@dataclass(frozen=True, slots=True)
class _Operand:
    """An operand of one matrix: its spec, constants, layout and buffers.

    `at`: number of its first result. `codes`, `scale`, `tensor_scale`: positions of its parts, NOTHING if missing
    (NVFP4 kernels write a tensor scale even if it is not stored). `ordered`: scales are column-major. `nvfp4_cast`:
    constant of `kernels.casts.nvfp4`, None in other families.
    """

    spec: OperandSpec
    numbers: KernelCast
    layout: Layout
    at: int
    codes: int
    scale: int
    tensor_scale: int
    ordered: bool
    nvfp4_cast: Nvfp4Cast | None

    @property
    def block_cast(self) -> BlockCast:
        """Constant of `kernels.casts.blocks`."""
        order = SCALE_COLUMN_MAJOR if self.ordered else SCALE_ROW_MAJOR
        return self.numbers.block_cast(_VALUES if self.spec.form == "values" else _CODES, order.value)


class Both(NamedTuple):
    """Both operands of a matrix, None for one that is not made, and the arguments of launches.

    `one`: the first operand that is made. `codes`, `scales`, `tensor_scales`, `seed`: positions of tensors. `counts`:
    those of the counts of a fold, of both operands together, and of scratch words; NOTHING for other casts.
    """

    operands: tuple[_Operand | None, _Operand | None]
    one: _Operand
    codes: tuple[int, int]
    scales: tuple[int, int]
    tensor_scales: tuple[int, int]
    streams: tuple[int, int]
    seed: int
    counts: tuple[int, int]

    @staticmethod
    def of(row: _Operand | None, column: _Operand | None) -> "Both":
        """The pair of these operands, at least one of which is made."""
        one = row or column
        assert one is not None
        parts = [
            (At.NOTHING, At.NOTHING, At.NOTHING, 0) if operand is None
            else (operand.codes, operand.scale, operand.tensor_scale, operand.spec.stream)
            for operand in (row, column)
        ]  # fmt: skip
        draws = any(operand is not None and operand.spec.cast.is_stochastic for operand in (row, column))
        codes, scales, levels, streams = zip(*parts, strict=True)
        forms = {operand.spec.form for operand in (row, column) if operand is not None}
        counted = At.FOLDED if "folded" in forms else At.TILES if "tiles" in forms else At.NOTHING
        counts = counted, At.WORDS if counted else At.NOTHING
        return Both((row, column), one, codes, scales, levels, streams, At.SEED if draws else At.NOTHING, counts)


def cast_passes(
    matrix: Matrix, row: OperandSpec | None, column: OperandSpec | None, *, records: bool = False,
    given_amax: bool = False, batch: int = 0,
) -> Passes:  # fmt: skip
    """The passes that make the row and the column operand of a matrix; None for an operand that is not read.

    `records`: the first element of RECORD takes the amax. `given_amax`: AMAX holds the amax. `batch`: a word of the
    random counters. Raises NotSupportedError if a cast has no kernel, or none for its form.
    """
    _refuse(matrix, row, column)
    passes = Passes(6)
    tails = _copy_tails(passes, matrix) if matrix.groups else At.NOTHING
    alone = row is None or column is None or is_one_pass(row, column, matrix.device.orders_scales)
    for number, specs in enumerate([(row, column)] if alone else [(row, None), (None, column)]):
        _Casting(passes, matrix, batch, given_amax, tails).cast(At.SOURCE, specs, records and number == 0)
    return passes


def _copy_tails(passes: Passes, matrix: Matrix) -> int:
    """Add the launch that copies rows of groups that fill no tile (`kernels.casts.groups`); returns their position."""
    rows, columns, warps = tables.TILES["tails"]
    shape = ((matrix.groups + 1) * GROUP_ROWS, matrix.columns)
    tails = passes.add(Buffer(shape, (matrix.stride_r, 1), matrix.dtype))
    programs = shape[0] // rows * ceil_div(matrix.columns, columns)
    scalars = (matrix.rows // GROUP_ROWS, matrix.groups, matrix.columns, matrix.stride_r)
    passes.launches.append(Pass(
        groups.copy_tails, (matrix.key, *map(specialization, scalars[:2]), warps), programs,
        (At.SOURCE, At.GROUPS, tails), scalars, (rows, columns), warps,
    ))  # fmt: skip
    return tails


def pair_passes(
    first: Matrix, first_specs: tuple[OperandSpec | None, OperandSpec | None], second: Matrix,
    second_specs: tuple[OperandSpec | None, OperandSpec | None], *, records: bool = False, draws_seed: bool = False,
) -> Passes | None:  # fmt: skip
    """The pass that casts two matrices with scales of their own in one launch; None where they do not fit into one.

    `draws_seed`: it also makes the words of a call seed (SEED) from the 64 bits that were drawn (SECOND_SEED), for
    later casts; neither matrix is rounded stochastically.
    """
    passes = Passes(12)
    for matrix, specs in ((first, first_specs), (second, second_specs)):
        there = [spec for spec in specs if spec is not None]
        if any(kernel_cast(spec.cast).refusal or spec.cast.is_stochastic for spec in there) or not there:
            return None
        if (len(there) == 2 and not is_one_pass(*specs, matrix.device.orders_scales)) or matrix.is_column_major:
            return None
    matrices = [
        (first, operands_of(passes, first, first_specs)),
        (second, operands_of(passes, second, second_specs, (6, 9))),
    ]
    operands = [one for _, both in matrices for one in both.operands if one is not None]
    if all(one.spec.form == "values" for one in operands):
        matrices = [(matrix, _without_copies(passes, both)) for matrix, both in matrices]
        return passes if _values_together(passes, matrices, draws_seed) else None
    # FP8 with a scale per tensor, or per row; of both matrices the same, given or measured.
    kinds = {(one.spec.form, one.numbers.family, one.numbers.block, one.spec.cast.is_delayed) for one in operands}
    wide = [("codes", "scaled", block) for block in ((None, None), (1, None))]
    if draws_seed or len(kinds) != 1 or next(iter(kinds))[:3] not in wide or not _fit_together([first, second]):
        return None
    if any(one.numbers.bare is not None for one in operands):
        return None
    _together(passes, matrices, records)
    return passes


def _refuse(matrix: Matrix, row: OperandSpec | None, column: OperandSpec | None) -> None:
    """Raise NotSupportedError for operands that no kernel serves."""
    for spec in (row, column):
        if spec is None:
            continue
        numbers, name = kernel_cast(spec.cast), spec.cast.format.name
        if numbers.refusal:
            raise NotSupportedError(f"the triton backend has no kernel for {numbers.refusal}. Use backend='reference'.")
        if spec.form == "values" and numbers.family not in WRITES_VALUES:
            raise NotSupportedError(f"no kernel decodes {name} to bfloat16 values. Ask for the form 'codes'.")
        folds = numbers.block == (1, 32) and not numbers.float_scale and numbers.bare is None
        folds |= numbers.family == "nvfp4" and not (numbers.is_scaled_per_row and spec.form == "tiles")
        if spec.form in ("folded", "tiles") and not folds:
            raise NotSupportedError(
                f"folding: got {name} (hadamard {spec.cast.hadamard}), needed an MX format of 1x32 blocks without a "
                "Hadamard transform, or NVFP4 (in tiles, under one tensor scale)."
            )
    if (row or column) is None or not matrix.rows * matrix.columns:
        raise NotSupportedError(
            f"casts by kernels: got a {matrix.rows} x {matrix.columns} matrix and the operands {row}, {column}, needed "
            "elements and at least one operand. Use backend='reference'."
        )


_Specs = tuple[OperandSpec | None, OperandSpec | None]


def operands_of(passes: Passes, matrix: Matrix, specs: _Specs, results: tuple[int, int] = (0, 3)) -> Both:
    """Both operands of a row-major matrix, registered as results; `results`: numbers of their first results."""
    paired = None not in specs
    row, column = (
        None if spec is None else _operand(passes, matrix, spec, kernel_cast(spec.cast), at, of_transpose, paired)
        for spec, at, of_transpose in zip(specs, results, (False, True), strict=True)
    )
    return Both.of(row, column)


def _operand(
    passes: Passes, matrix: Matrix, spec: OperandSpec, numbers: KernelCast, at: int, of_transpose: bool, paired: bool
) -> _Operand:
    rows, length = (matrix.columns, matrix.rows) if of_transpose else (matrix.rows, matrix.columns)
    layout = layout_of(spec.cast, rows, length, spec.form, of_transpose=of_transpose, paired=paired, turned=spec.turned)
    # FP8 block GEMMs read 1x128 scales column-major; launches that write both operands write MX scales likewise.
    ordered = (numbers.block == (1, 128) and numbers.float_scale) or (paired and numbers.block == (1, 32))
    if matrix.with_scales and layout.scale is not None and numbers.block in ((None, None), (1, None)):
        # Groups have scales of their own; rows of x have them as they are.
        shape = (matrix.with_scales,) if numbers.block == (None, None) else (matrix.rows, 1)
        if numbers.block == (1, None) and of_transpose:
            shape = (matrix.with_scales, matrix.columns)
        if not spec.cast.is_delayed:
            layout = layout._replace(scale=Part(shape, shape[1:] + (1,) * len(shape[:1]), layout.scale.dtype))
    if not matrix.device.orders_scales and layout.scale is not None and layout.scale.dtype == "uint8":
        shape, ordered = layout.scale.shape, False
        layout = layout._replace(scale=Part(shape, shape[1:] + (1,) * len(shape[:1]), layout.scale.dtype))
    codes, scale, tensor_scale = (
        At.NOTHING if part is None else passes.put(at + number, part) for number, part in enumerate(layout)
    )
    cast = numbers.nvfp4_cast
    if cast is not None:
        if tensor_scale == At.NOTHING and spec.form not in _NVFP4_FOLDED:
            tensor_scale = passes.add(SCALAR)
        # Units are aligned if every row has a whole number of them; values have the layout of the matrix.
        stored = stored_length(length, spec.cast.hadamard)
        if spec.form == "values":
            aligned = (matrix.columns if of_transpose else stored) % 2 == 0
            cast = cast._replace(OUTPUT=_VALUES, ALIGNED=aligned)
        elif spec.form in _NVFP4_FOLDED:
            cast = cast._replace(OUTPUT=_NVFP4_FOLDED[spec.form], ALIGNED=stored % 4 == 0)
        else:
            cast = cast._replace(OUTPUT=_CODES, ALIGNED=stored % 8 == 0)
    return _Operand(spec, numbers, layout, at, codes, scale, tensor_scale, ordered, cast)


def shared_scale(passes: Passes, both: Both) -> int:
    """Let both operands of a matrix share one scale; returns its position."""
    row, column = both.operands
    if row is not None and column is not None:
        part = column.layout.scale
        assert part is not None
        passes.share(column.at + 1, row.at + 1, part)
    return both.one.scale


def _each_scale(both: Both, scale: int) -> tuple[int, int]:
    """Positions of a shared scale for both operands; each operand writes it, since XLA makes an array for each."""
    row, column = both.operands
    return At.NOTHING if row is None else scale, At.NOTHING if column is None else scale


def scaled_casts(both: Both) -> tuple[ScaledCast | None, ScaledCast | None]:
    """Constants of `kernels.casts.scaled` for both operands."""
    row, column = (None if one is None else one.numbers.scaled_cast for one in both.operands)
    return row, column


def block_casts(both: Both) -> tuple[BlockCast | None, BlockCast | None]:
    """Constants of `kernels.casts.blocks` for both operands."""
    row, column = (None if one is None else one.block_cast for one in both.operands)
    return row, column


@dataclass(frozen=True, slots=True)
class _Casting:
    """Builder of the launches that make one operand of a matrix, or both in one launch."""

    passes: Passes
    matrix: Matrix
    batch: int
    given_amax: bool
    tails: int = At.NOTHING

    @property
    def plan(self) -> tuple[int, int]:
        """Positions of the plan and the tails of rows in groups, NOTHING without groups."""
        return (At.GROUPS, self.tails) if self.matrix.groups else (At.NOTHING, At.NOTHING)

    def cast(self, source: int, specs: _Specs, records: bool) -> None:
        """Add the launches that make these operands."""
        matrix = self.matrix
        one = specs[0] or specs[1]
        assert one is not None
        numbers = kernel_cast(one.cast)
        if numbers.bare is not None:
            self._transformed(source, specs, numbers.bare, records)
            return
        # The transpose of a column-major matrix is row-major. Folding keeps the order, since it counts by operand.
        exchanged = matrix.is_column_major and one.form not in ("folded", "tiles")
        if exchanged:
            both = operands_of(self.passes, matrix.transposed, (specs[1], specs[0]), (3, 0))
            replace(self, matrix=matrix.transposed)._pass(source, both, records)
        else:
            self._pass(source, operands_of(self.passes, matrix, specs), records)

    def _transformed(self, source: int, specs: _Specs, bare: Cast, records: bool) -> None:
        """Add the launch of the Hadamard transform, and the cast `bare` of its result, whose rows are the operand."""
        is_column = specs[0] is None
        spec = specs[0] or specs[1]
        assert spec is not None
        assert spec.cast.hadamard is not None
        matrix = self.matrix.transposed if is_column else self.matrix
        operand = _operand(self.passes, self.matrix, spec, kernel_cast(bare), 3 * is_column, is_column, False)
        columns = ceil_div(matrix.columns, 16) * 16
        made = self.passes.add(Buffer((matrix.rows, columns), (columns, 1), "bfloat16"))
        rows, width, warps = tables.TILES["nvfp4"]
        # The transform pads the columns of its output.
        constants = (spec.cast.hadamard.sign_mask, matrix.how(rows, width)._replace(EVEN=False))
        self.passes.launches.append(Pass(
            nvfp4.transform, (matrix.key, constants, warps), matrix.tiles(rows, width), (source, made), matrix.sizes,
            constants, warps,
        ))  # fmt: skip
        transformed = Matrix(matrix.rows, columns, columns, 1, "bfloat16", 16, matrix.device)
        as_column = is_column and spec.form == "values"  # values have the layout of the matrix
        both = Both.of(None, operand) if as_column else Both.of(operand, None)
        if as_column:
            transformed = transformed.transposed
        replace(self, matrix=transformed)._pass(made, both, records)

    def _pass(self, source: int, both: Both, records: bool) -> None:
        form, family, block = both.one.spec.form, both.one.numbers.family, both.one.numbers.block
        if family == "nvfp4":
            self._nvfp4(source, both)
        elif form in ("folded", "tiles"):
            self._folded(source, both)
        elif family == "blocks":
            self._blocks(source, both)
        elif block == (None, None):
            self._tensor(source, both, records)
        elif block == (1, None):
            self._rows(source, both)
        else:
            self._scaled(source, both, both.scales, _TILE)

    def _scaled(
        self, source: int, both: Both, scales: tuple[int, int], mode: int,
        sources: tuple[int, int] = (At.NOTHING, At.NOTHING), record: int = At.NOTHING,
    ) -> None:  # fmt: skip
        """Add the launch of `casts.scaled`; `mode`: the source of its scales, GIVEN, AMAX, AXES or TILE."""
        matrix, casts, streams = self.matrix, scaled_casts(both), both.streams
        rows, columns, warps = tables.tile_of_scaled(*casts, mode, (matrix.rows, matrix.columns), matrix.fills)
        grouped = bool(matrix.with_scales) and mode in (_AMAX, _AXES)
        of_matrix = MatrixConstants(*casts, matrix.how(rows, columns, units=True))
        constants = (mode, record != At.NOTHING, grouped, of_matrix)
        words = At.NOTHING if record == At.NOTHING else At.WORDS
        self.passes.launches.append(Pass(
            scaled.cast_scaled, (matrix.key, constants, warps, *streams), matrix.tiles(rows, columns),
            (source, *both.codes, *scales, *sources, record, words, both.seed, *self.plan),
            (*streams, both.one.numbers.epsilon, matrix.each, *matrix.sizes), constants, warps,
        ))  # fmt: skip

    def _tensor(self, source: int, both: Both, records: bool) -> None:
        """FP8 per tensor: with a given scale, or with an amax that is given or measured."""
        passes, matrix = self.passes, self.matrix
        cast = both.one.spec.cast
        record = At.RECORD if records else At.NOTHING
        if cast.is_delayed:
            if cast.is_gradient and not records:  # its stored scale depends on the recorded amax
                record = passes.add(Buffer((1,), (1,), "float32", cleared=True))
            mode, amax = _GIVEN, At.SCALE_ENC
        elif matrix.with_scales:
            mode = _AMAX
            amax, _ = measure_groups(passes, matrix, source, self.plan, row=False, column=False)
        elif self.given_amax or not matrix.device.measures:
            mode, amax = _AMAX, At.AMAX
        elif source == At.SOURCE and both.seed == At.NOTHING and _fit_together([matrix]):
            _together(passes, [(matrix, both)], records)
            return
        else:
            mode, amax = _AMAX, passes.add(SCALAR)
            measure(passes, matrix, source, amax)
        scales = _each_scale(both, shared_scale(passes, both))
        self._scaled(source, both, scales, mode, (amax, At.NOTHING), record)

    def _rows(self, source: int, both: Both) -> None:
        """FP8 per row of each operand."""
        passes, matrix = self.passes, self.matrix
        made = [one is not None for one in both.operands]
        # One program may hold a row, whose codes are whole words of 16 bytes.
        fits = matrix.stride_c == 1 and matrix.columns <= _LONGEST_ROW and (matrix.columns | matrix.stride_r) % 16 == 0
        if matrix.with_scales:
            amaxes = measure_groups(passes, matrix, source, self.plan, *made)
        elif not made[1] and both.seed == At.NOTHING and matrix.kind and fits:
            self._row_by_row(source, both)
            return
        elif source == At.SOURCE and both.seed == At.NOTHING and _fit_together([matrix]):
            _together(passes, [(matrix, both)], False)
            return
        else:
            amaxes = measure_groups(passes, matrix, source, (), *made)
        self._scaled(source, both, both.scales, _AXES, amaxes)

    def _row_by_row(self, source: int, both: Both) -> None:
        """FP8 per row, the row operand alone: each row is read once."""
        matrix, numbers = self.matrix, both.one.numbers
        block = 1 << (matrix.columns - 1).bit_length()
        constants = numbers.scaled_cast, matrix.kind, matrix.device.conversions, block
        self.passes.launches.append(Pass(
            scaled.cast_rows, (matrix.key, constants), matrix.rows, (source, both.codes[0], both.scales[0]),
            (numbers.epsilon, matrix.columns, matrix.stride_r), constants, tables.Warps(max(min(block >> 10, 16), 1)),
        ))  # fmt: skip

    def _blocks(self, source: int, both: Both) -> None:
        """MX and FP8 in blocks: codes and scales, or bfloat16 values."""
        matrix, streams, casts = self.matrix, both.streams, block_casts(both)
        rows, columns, warps = tables.tile_of_blocks(*casts, matrix.kind, matrix.fills)
        constants = (*casts, matrix.how(rows, columns, units=True))
        outputs = both.codes[0], both.scales[0], both.codes[1], both.scales[1]
        epsilons = (0.0 if one is None else one.numbers.epsilon for one in both.operands)
        self.passes.launches.append(Pass(
            blocks.quantize_blocks, (matrix.key, constants, warps, *streams, self.batch), matrix.tiles(rows, columns),
            (source, *outputs, both.seed, *self.plan), (*streams, self.batch, *epsilons, *matrix.sizes), constants,
            warps,
        ))  # fmt: skip

    def _folded(self, source: int, both: Both) -> None:
        """MX folded to one scale per 1x128 or 128x128, with counts of changed elements."""
        matrix, streams = self.matrix, both.streams
        are_tiles = [one is not None and one.spec.form == "tiles" for one in both.operands]
        multiples = [_TILES_TOGETHER if is_tile else 0 for is_tile in are_tiles]
        casts, how = scaled_casts(both), matrix.how(128, 128, units=True)
        constants = (*casts, *multiples, how)
        warps = tables.TILES["fold_squares" if fold.folds(*casts, sum(multiples), how.KIND, how.EVEN) else "fold"][2]
        outputs = both.codes[0], both.scales[0], both.codes[1], both.scales[1]
        self.passes.launches.append(Pass(
            fold.fold_blocks, (matrix.key, constants, warps, *streams), matrix.tiles(128, 128),
            (source, *outputs, *both.counts, both.seed, *self.plan),
            (*streams, *matrix.sizes), constants, warps,
        ))  # fmt: skip

    def _nvfp4(self, source: int, both: Both) -> None:
        """NVFP4: codes and scales, bfloat16 values, or folded to FP8 with counts of changed elements."""
        passes, matrix = self.passes, self.matrix
        if all(one is None or one.spec.form == "values" for one in both.operands):
            both = _without_copies(passes, both)
            measured = not self.given_amax and matrix.device.measures
            if source == At.SOURCE and measured and not self.batch and _values_together(passes, [(matrix, both)]):
                return
        amaxes = (At.AMAX, At.AMAX) if self.given_amax else self._nvfp4_amaxes(source, both)
        row, column = (None if one is None else one.nvfp4_cast for one in both.operands)
        casts, levels = (row, column), both.tensor_scales
        rows, columns, warps, steps = tables.tile_of_nvfp4(*casts, matrix.kind, (matrix.rows, matrix.columns))
        of_matrix, streams = MatrixConstants(*casts, matrix.how(rows, columns)), both.streams
        constants = (0 if matrix.with_scales else steps, of_matrix)
        each = matrix.each or matrix.with_scales
        outputs = both.codes[0], both.scales[0], levels[0], both.codes[1], both.scales[1], levels[1]
        passes.launches.append(Pass(
            nvfp4.quantize_nvfp4, (matrix.key, constants, warps, *streams, self.batch, specialization(each)),
            matrix.tiles(rows * steps, columns), (source, *outputs, *amaxes, both.seed, *both.counts, *self.plan),
            (*streams, self.batch, each, *matrix.sizes), constants, warps,
        ))  # fmt: skip

    def _nvfp4_amaxes(self, source: int, both: Both) -> tuple[int, int]:
        """Positions of the amaxes of both operands: of the matrix, its Hadamard transform, or every operand row."""
        passes, matrix = self.passes, self.matrix
        found: list[int | None] = [None, None]
        plain = None
        for at, one in enumerate(both.operands):
            if one is not None and one.numbers.is_scaled_per_row:
                found[at] = measure_groups(passes, matrix, source, (), at == 0, at == 1)[at]
        for at in (1, 0):
            one = both.operands[at]
            if one is None or found[at] is not None or one.numbers.signs == NO_SIGNS:
                continue
            plain, found[at] = measure_transformed(passes, matrix, source, self.plan, one.numbers.signs, at == 0)
        lacks = (one is not None and amax is None for one, amax in zip(both.operands, found, strict=True))
        if plain is None and any(lacks):
            plain = At.AMAX
            if matrix.with_scales:
                plain, _ = measure_groups(passes, matrix, source, self.plan, row=False, column=False)
            elif matrix.device.measures:
                plain = passes.add(SCALAR)
                measure(passes, matrix, source, plain)
        row, column = (plain or At.NOTHING if amax is None else amax for amax in found)
        return row, column


def _without_copies(passes: Passes, both: Both) -> Both:
    """The operands to write: if both have the same values, the column operand becomes a view of the row operand."""
    row, column = both.operands
    if row is None or column is None:
        return both
    first, second = row.numbers.nvfp4_cast, column.numbers.nvfp4_cast
    if first is None or second is None or not nvfp4_2d.codes_are_shared(first, second):
        return both
    passes.share(column.at, row.at, column.layout.codes)
    if column.layout.tensor_scale is not None:
        passes.share(column.at + 2, row.at + 2, column.layout.tensor_scale)
    return Both.of(row, None)


_Matrices = list[tuple[Matrix, Both]]


def _fit_together(matrices: list[Matrix]) -> bool:
    """True if one launch is to measure and cast these matrices."""
    elements = sum(matrix.rows * matrix.columns for matrix in matrices)
    fit = elements <= _MOST_TOGETHER and not any(matrix.index64 for matrix in matrices)
    return fit and all(matrix.device.at_once for matrix in matrices)


def _together(passes: Passes, matrices: _Matrices, records: bool) -> None:
    """One launch for one or two matrices with scales per tensor or per row, measured first where they are not given."""
    numbers = matrices[0][1].one.numbers
    mode = _AXES if numbers.block == (1, None) else _GIVEN if numbers.cast.is_delayed else _AMAX
    rows, columns, warps = tables.TILES["together"]
    tensors: list[int] = []
    scalars: list[float] = []
    tiles, of_each, keys = 0, [], []
    inputs = ((At.SOURCE, At.SCALE_ENC, At.RECORD), (At.SECOND, At.SECOND_SCALE_ENC, At.SECOND_RECORD))
    for (source, scale_enc, record), (matrix, both) in zip(inputs, matrices, strict=False):
        scales = both.scales
        if mode == _AXES:
            amaxes = passes.add(Buffer((matrix.rows + matrix.columns,), (1,), "int32"))
        else:
            scales = _each_scale(both, shared_scale(passes, both))
            amaxes = scale_enc if mode == _GIVEN else At.NOTHING
        tensors += [source, *both.codes, *scales, amaxes, record if records else At.NOTHING]
        tiles += matrix.tiles(rows, columns)
        scalars += [both.one.numbers.epsilon, *matrix.sizes]
        of_each.append(MatrixConstants(*scaled_casts(both), matrix.how(rows, columns, units=True)))
        keys.append(matrix.key)
    if len(matrices) == 1:
        tensors, scalars, of_each = tensors + [At.NOTHING] * 7, [*scalars, 0.0, 0, 0, 0, 0], [*of_each, None]
    constants = (mode, records, *of_each)
    passes.launches.append(Pass(
        pair.cast_pair, (*keys, constants, warps), min(tiles, matrices[0][0].device.at_once),
        (*tensors, At.WORDS if records or mode != _GIVEN else At.NOTHING), tuple(scalars), constants, warps,
        cooperative=mode != _GIVEN,
    ))  # fmt: skip


def _values_together(passes: Passes, matrices: _Matrices, draws_seed: bool = False) -> bool:
    """One launch that measures one or two matrices and casts them to NVFP4 values; it may make a call seed as well.

    False, and none, where they do not fit: a row operand is transformed, or the column operand of a second matrix, or
    an amax is one of rows.
    """
    for number, (matrix, both) in enumerate(matrices):
        if matrix.index64 or not matrix.device.at_once:
            return False
        for one, transforms in zip(both.operands, (False, number == 0), strict=True):
            numbers = None if one is None else one.numbers
            if numbers is not None and (
                numbers.family != "nvfp4" or numbers.is_scaled_per_row or (numbers.signs != NO_SIGNS and not transforms)
            ):
                return False
    if sum(matrix.rows * matrix.columns for matrix, _ in matrices) > _MOST_TOGETHER:
        return False
    rows, columns, warps = tables.TILES["nvfp4_together"]
    tensors: list[int] = []
    scalars: list[int] = []
    tiles, of_each, keys, streams = 0, [], [], []
    for source, (matrix, both) in zip((At.SOURCE, At.SECOND), matrices, strict=False):
        tensors += [source, both.codes[0], both.tensor_scales[0], both.codes[1], both.tensor_scales[1]]
        tiles += matrix.tiles(rows, columns)
        scalars += [*both.streams, *matrix.sizes]
        row, column = (None if one is None else one.nvfp4_cast for one in both.operands)
        of_each.append(MatrixConstants(row, column, matrix.how(rows, columns)))
        keys.append(matrix.key)
        streams.append(both.streams)
    if len(matrices) == 1:
        tensors, scalars, of_each = tensors + [At.NOTHING] * 5, [*scalars, 0, 0, 0, 0, 0, 0], [*of_each, None]
    seeds = (At.SEED, At.SECOND_SEED) if draws_seed else (matrices[0][1].seed, At.NOTHING)
    constants = (draws_seed, *of_each)
    passes.launches.append(Pass(
        pair.values_pair, (*keys, *streams, constants, warps), min(tiles, matrices[0][0].device.at_once),
        (*tensors, *seeds, At.WORDS), tuple(scalars), constants, warps, cooperative=True,
    ))  # fmt: skip
    return True
