"""Launches of `kernels.casts.measures` that sum what `microfloat.torch.measuring` defines: one plan for each tensor.

A plan holds everything that is decided by sizes: the casts of parts of a tensor, their measures, and where each of
them finds its memory. A run of it allocates twice, for what it needs and for what it leaves, and starts launches with
addresses that are sums of a base, an offset and steps for the rows and columns before the part. What counts is the host
time of a watched step, which has thousands of these launches. Plans are kept, and serve every layer with tensors of the
same sizes. What they leave is gathered together, by one launch for many tensors.

Legend: R = rows of an operand form (of a part of it), C = its contraction length.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import ModuleType
from typing import NamedTuple, TypeAlias

import torch

from microfloat.layout import ALIGNMENT, Part
from microfloat.passes import CastInputs, OperandSpec
from microfloat.passes.casts import cast_passes
from microfloat.passes.matrix import At, Buffer, Passes, kernel_cast
from microfloat.passes.measures import (
    BIAS,
    CODES,
    NUMBERS,
    RESULT,
    ROW,
    SCALE,
    SECOND,
    TENSOR_SCALE,
    WHOLE,
    Left,
    Scales,
    cast_measures,
    gather_passes,
    numbers_of_product,
    product_measures,
    rows_measures,
    whole_measures,
    widen_passes,
)
from microfloat.passes.tables import ceil_div
from microfloat.recipes import Cast
from microfloat.torch._typing import Maybe
from microfloat.torch.backends.base import dtype_name
from microfloat.torch.measuring import Place, Rows, Slab, casts_whole
from microfloat.torch.program import Prepared, misaligned_of

__all__ = ["NUMBERS", "gather", "measure_operand", "measure_result", "numbers_of_product", "serves"]


Start: TypeAlias = Callable[..., None]  # (stream, *addresses), or tensors before a kernel is compiled
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_UNIT = 128  # parts begin at multiples of it
_BLOCK = 32  # of rows that no cast is measured of
# The bases of addresses: memory that a run allocates, the words and the numbers that it fills, and what it is given.
_MADE, _KEPT, _WORDS, _NUMBERS, _SOURCE, _SCALE_ENC, _SEED, _ANY_SEED, _SCRATCH = range(9)
_RESULT, _A, _B, _BIAS = range(_SOURCE, _SOURCE + 4)


def serves(dtype: torch.dtype, cast: Cast | None = None) -> bool:
    """True if kernels read tensors of this dtype, and codes of this cast."""
    return dtype in _DTYPES and (cast is None or not kernel_cast(cast).refusal)


class _Field(NamedTuple):
    """Where an argument of a launch begins: at a base, `offset` bytes on, and so many more for all 128 rows, and for
    all 128 columns, before the part that is measured.
    """

    base: int
    offset: int = 0
    down: int = 0
    across: int = 0
    dtype: torch.dtype = torch.uint8

    def tensor(self, base: torch.Tensor, starts: tuple[int, int]) -> torch.Tensor:
        """A tensor that begins there, for Triton."""
        offset, size = self.offset + starts[0] * self.down + starts[1] * self.across, self.dtype.itemsize
        if base.dtype == self.dtype:
            return base.as_strided((1,), (1,), base.storage_offset() + offset // size)
        flat = base.view(torch.uint8)[offset:]
        return flat[: len(flat) // size * size].view(self.dtype)


Given: TypeAlias = Mapping[int, _Field | None]  # what stands at positions of a table


class _Memory:
    """One allocation for many buffers, each at a multiple of 16 bytes."""

    def __init__(self) -> None:
        self.size = 0

    def add(self, buffer: Buffer) -> tuple[int, int]:
        """The offset of a buffer, and its size."""
        last = sum((n - 1) * stride for n, stride in zip(buffer.shape, buffer.strides, strict=True))
        offset, size = self.size, (last + 1) * getattr(torch, buffer.dtype).itemsize
        self.size += ceil_div(size, ALIGNMENT) * ALIGNMENT
        return offset, size


class _Plan:
    """Launches over one tensor and its parts, with everything decided but addresses.

    `product`: shape, strides and offset in float64 of both factors of a product and of the product itself, which torch
    multiplies after so many launches.
    """

    def __init__(
        self, programs: ModuleType, device: torch.device, misaligned: frozenset[int], starts: tuple[int, int]
    ) -> None:  # fmt: skip
        """`misaligned`: bases that are no multiples of 16 bytes; `starts`: as of a run."""
        self.product: list[tuple] = []
        self._programs, self._misaligned, self._starts_at = programs, misaligned, starts
        self._empty = programs.fast_empty(device)
        self._fields: list[_Field] = []
        self._made, self._kept = _Memory(), _Memory()
        self._cleared: list[slice] = []
        self._prepared: list[tuple[Prepared, itemgetter]] = []
        self._before = 0
        self._starts: list[tuple[Start, itemgetter]] = []
        self._left: list[tuple[itemgetter, Left]] = []
        self._needs_scratch = False

    # ---------------------------------------------------------------------------------------------------- construction

    def add(
        self, passes: Passes, given: Given, numbers: _Field | None = None, kept: Sequence[int] = ()
    ) -> list[_Field | None]:
        """Add launches; returns the fields of their buffers.

        `given`: the fields of positions up to MADE; `numbers`: that of the first buffer, if it is not allocated here;
        `kept`: numbers of the buffers that outlive the run.
        """
        buffers: list[_Field | None] = []
        for index, made in enumerate(passes.buffers):
            if made is None or (index == 0 and numbers is not None):
                buffers.append(None if made is None else numbers)
                continue
            dtype = getattr(torch, made.dtype)
            dtype = torch.uint8 if dtype.itemsize == 1 else dtype  # FP8, as `programs.as_bytes`
            offset, size = (self._kept if index in kept else self._made).add(made)
            buffers.append(_Field(_KEPT if index in kept else _MADE, offset, dtype=dtype))
            if made.cleared:
                self._cleared.append(slice(offset, offset + size))
        for launch in passes.launches:
            taken = [self._taken(passes, at, given, buffers) for at in launch.tensors]
            self._needs_scratch |= At.WORDS in launch.tensors
            aligned = tuple(field is None or self._is_aligned(field) for field in taken)
            kernel = self._programs.kernel_of(
                launch.kernel, launch.cooperative, launch.dependent, launch.shared_bytes, launch.spread
            )
            arguments = launch.key, launch.programs, launch.scalars, launch.constants, launch.warps, aligned
            self._prepared.append((kernel.prepared(*arguments), self._pick(taken)))
        return buffers

    def leave(self, fields: Sequence[_Field | None], left: Left) -> None:
        """Say what is to be gathered of a part: the fields of its numbers, sums, sample, scales and spans."""
        self._left.append((self._pick(fields), left))

    def _pick(self, fields: Sequence[_Field | None]) -> itemgetter:
        """A getter of these fields from a table of all, whose first entry is None."""
        self._fields += [field for field in dict.fromkeys(fields) if field is not None and field not in self._fields]
        return itemgetter(*(0 if field is None else 1 + self._fields.index(field) for field in fields))

    @staticmethod
    def _taken(passes: Passes, at: int, given: "Given", buffers: "Sequence[_Field | None]") -> _Field | None:
        """The field of a position in the table of a launch."""
        if at >= At.MADE:
            return buffers[at - At.MADE]
        if at >= 0:
            return given.get(at)
        part = passes.slices[~at]
        whole = buffers[part.buffer]
        assert whole is not None
        dtype = whole.dtype if part.dtype is None else getattr(torch, part.dtype)
        return whole._replace(offset=whole.offset + part.offset * whole.dtype.itemsize, dtype=dtype)

    def _is_aligned(self, field: _Field) -> bool:
        begins = field.offset + self._starts_at[0] * field.down + self._starts_at[1] * field.across
        return field.base not in self._misaligned and not begins & (ALIGNMENT - 1)

    def multiply(self, factors: Sequence[tuple], rows: int, columns: int) -> _Field:
        """Let torch multiply here; returns the field of the product [rows, columns], which is float64 without gaps."""
        self._before = len(self._prepared)
        offset, _ = self._made.add(Buffer((rows, columns), (columns, 1), "float64"))
        self.product = [*factors, ((rows, columns), (columns, 1), offset // 8)]
        return _Field(_MADE, offset, dtype=torch.float64)

    # --------------------------------------------------------------------------------------------------------- running

    def run(
        self, words: Place, numbers: Place | None, given: Sequence[Maybe], starts: tuple[int, int]
    ) -> tuple[list[int], torch.Tensor]:
        """Start everything on the current stream of the current device, that of the tensors.

        Returns rows of the table of `gather`, and the memory that they point to. `given`: the tensors of bases from
        SOURCE on. `starts`: the first row and column that are measured, by 128.
        """
        made = self._empty((self._made.size // 8,), (1,), torch.float64)
        kept = self._empty((self._kept.size // 8,), (1,), torch.float64) if self._kept.size else made
        for cleared in self._cleared:
            made.view(torch.uint8)[cleared].zero_()
        device = made.get_device()
        stream = 0 if device < 0 else torch._C._cuda_getCurrentRawStream(device)
        places = words, numbers or words
        bases = [made.data_ptr(), kept.data_ptr(), *[place.address for place in places]]
        if self._needs_scratch:
            given = *given, self._programs.scratch(device)
        bases += [0 if tensor is None else tensor.data_ptr() for tensor in given]
        row, column = starts
        table: list[int | None] = [None]
        table += [bases[base] + offset + row * down + column * across for base, offset, down, across, _ in self._fields]
        if self._starts:
            self._start(self._starts, stream, table, made)
        else:
            tensors = [made, kept, *[place.tensor for place in places], *given]
            first = [None, *[field.tensor(tensors[field.base], starts) for field in self._fields]]
            self._start(self._prepared, stream, first, made)
            if all(prepared.at is not None for prepared, _ in self._prepared):  # all are compiled
                self._starts = [(prepared.at, pick) for prepared, pick in self._prepared if prepared.at is not None]
        rows: list[int] = []
        for pick, left in self._left:
            rows += [address or 0 for address in pick(table)]
            rows += left
        return rows, kept

    def _start(
        self, starting: Sequence[tuple[Start, itemgetter]], stream: int, table: Sequence[object], made: torch.Tensor
    ) -> None:  # fmt: skip
        """Start launches with what they take from a table, and multiply between them."""
        if self.product:
            for start, pick in starting[: self._before]:
                start(stream, *pick(table))
            a, b, exact = (made.as_strided(*one) for one in self.product)
            torch.mm(a, b, out=exact)
            starting = starting[self._before :]
        for start, pick in starting:
            start(stream, *pick(table))


# ------------------------------------------------------------------------------------------------------------- plans


_PLANS: dict[tuple, _Plan] = {}
_MOST_PLANS = 1024


def _plan(key: tuple, make: Callable[[], _Plan]) -> _Plan:
    """The plan of a key, made where there is none yet."""
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= _MOST_PLANS:  # shapes made anew for every call must not pile up
            _PLANS.clear()
        plan = _PLANS[key] = make()
    return plan


def _like(x: torch.Tensor) -> tuple:
    """All that plans depend on of a tensor."""
    return x.shape, x.stride(), x.dtype, x.data_ptr() & (ALIGNMENT - 1)


@functools.cache
def _any_seed(device: torch.device) -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


@functools.cache
def _steps_unevenly(measured: tuple[Rows, ...]) -> bool:
    """True where a part of the scales of a whole operand may begin at any address."""
    casts = [one.cast for one in measured if one.cast is not None and casts_whole(one.cast)]
    return any(cast.format.block[0] not in (1, None) for cast in casts)


# ---------------------------------------------------------------------------------------------------------- operands


def measure_operand(
    programs: ModuleType, matrix: torch.Tensor, measured: tuple[Rows, ...], parts: tuple[slice, slice], batch: int,
    inputs: CastInputs, words: Place, numbers: Place | None,
) -> tuple[list[int], torch.Tensor]:  # fmt: skip
    """Count a matrix into the words, and measure parts of it, which `gather` makes NUMBERS of for each of `measured`.

    `parts`: its rows, and its columns, that are measured. Returns what `gather` takes, and the memory that it reads.
    """
    device = matrix.get_device()
    any_seed = _any_seed(matrix.device)
    seed = any_seed if inputs.seed is None else inputs.seed
    given = matrix, inputs.scale_enc, seed, any_seed
    misaligned, starts = misaligned_of(given, _SOURCE), (parts[0].start // _UNIT, parts[1].start // _UNIT)
    uneven = (starts[0] & 15, starts[1] & 15) if _steps_unevenly(measured) else None
    sizes = parts[0].stop - parts[0].start, parts[1].stop - parts[1].start
    plan = _plan(
        (measured, sizes, batch, device, misaligned, uneven, *_like(matrix)),
        lambda: _operand_plan(programs, matrix, measured, parts, batch, misaligned),
    )  # fmt: skip
    return plan.run(words, numbers, given, starts)


def _operand_plan(
    programs: ModuleType, matrix: torch.Tensor, measured: Sequence[Rows], parts: tuple[slice, slice], batch: int,
    misaligned: frozenset[int],
) -> _Plan:  # fmt: skip
    plan = _Plan(programs, matrix.device, misaligned, (parts[0].start // _UNIT, parts[1].start // _UNIT))
    down, across = (_UNIT * stride * matrix.element_size() for stride in matrix.stride())
    source, words = _Field(_SOURCE, dtype=matrix.dtype), _Field(_WORDS, dtype=torch.int64)
    slabs = source._replace(down=down), source._replace(across=across)
    plan.add(whole_measures(programs.matrix_of(matrix)), {At.SOURCE: source, WHOLE: words})
    given = {
        At.WORDS: _Field(_SCRATCH, dtype=torch.int64), At.SCALE_ENC: _Field(_SCALE_ENC, dtype=torch.float32),
        At.AMAX: words._replace(dtype=torch.float32),  # the low word of the first
    }  # fmt: skip
    for number, (cast, turned, stream, in_use) in enumerate(measured):
        own, slab = matrix[:, parts[1]] if turned else matrix[parts[0]], slabs[turned]
        rows, fields, scale = programs.matrix_of(own.t() if turned else own), {}, None
        if cast is None:
            passes, left = rows_measures(rows, _BLOCK)
        else:
            is_whole, spec = casts_whole(cast), OperandSpec(cast, stream=stream)
            made = cast_passes(
                programs.matrix_of(matrix if is_whole else own), *((None, spec) if turned else (spec, None)),
                given_amax=cast.takes_amax and cast.tensor_scale != "row" and not is_whole, batch=batch,
            )  # fmt: skip
            seed = _Field(_SEED if in_use else _ANY_SEED, dtype=torch.int64)
            at = slice(3, 6) if turned else slice(0, 3)
            given_to_cast = {**given, At.SOURCE: source if is_whole else slab, At.SEED: seed}
            buffers = plan.add(made, given_to_cast, kept=(at.start + 1,))
            fields, scales = _codes_of(cast, made.layouts[at], buffers[at], turned, own.shape[turned], is_whole)
            scale = fields[SCALE]
            passes, left = cast_measures(rows, cast, scales)
        sums, sample, spans = plan.add(passes, {At.SOURCE: slab, **fields}, kept=range(3))
        plan.leave((_Field(_NUMBERS, 8 * NUMBERS * number), sums, sample, scale, spans), left)
    return plan


def _codes_of(
    cast: Cast, layouts: Sequence[Part | None], buffers: Sequence[_Field | None], turned: bool, rows: int,
    is_whole: bool,
) -> tuple[Given, Scales]:  # fmt: skip
    """The fields of codes, scale and tensor scale of so many rows of an operand, and how their scales lie.

    `is_whole`: the operand has further rows, before them and behind.
    """
    (codes, scale, level), (height, width) = layouts, cast.format.block
    assert codes is not None
    assert scale is not None
    shape, strides = ((1, 1), (0, 0)) if len(scale.shape) < 2 else (scale.shape, scale.strides)
    level_stride = None if level is None else level.strides[0] if level.strides else 0
    fields: dict[int, _Field | None] = dict(zip((CODES, SCALE, TENSOR_SCALE), buffers, strict=True))
    if is_whole:
        rows_of_scale = 1 if height is None else ceil_div(rows, height)
        shape = shape if len(scale.shape) < 2 else (rows_of_scale, shape[1])
        for position, stride, tall in (
            (CODES, codes.strides[0], 1), (SCALE, strides[0], height or 1), (TENSOR_SCALE, level_stride or 0, 1)
        ):  # fmt: skip
            field = fields[position]
            if field is not None:
                step = _UNIT // tall * stride * field.dtype.itemsize
                fields[position] = field._replace(across=step) if turned else field._replace(down=step)
    if width is None:  # all columns share a scale
        strides = strides[0], 0
    return fields, Scales((shape[0], shape[1]), (strides[0], strides[1]), level_stride)


# ----------------------------------------------------------------------------------------------------------- results


def measure_result(
    programs: ModuleType, result: torch.Tensor, words: Place, numbers: Place | None = None,
    factors: tuple[Slab, Slab] | None = None, starts: tuple[int, int] = (0, 0), bias: Maybe = None,
) -> None:  # fmt: skip
    """Count a matrix into the words, and compare its part that is ``a @ b.T + bias`` of these factors with float64.

    `numbers`: as many as `numbers_of_product` says. `starts`: the first row and column of that
    part; `bias` [columns of the result].
    """
    device = result.get_device()
    a, b = (None, None) if factors is None else factors
    given = result, a and a.matrix, b and b.matrix, bias
    misaligned, key = misaligned_of(given, _SOURCE), ()
    starts = starts[0] // _UNIT, starts[1] // _UNIT
    if a is not None and b is not None:
        key = tuple(
            (one.turned, None if one.part is None else one.part.stop - one.part.start, *_like(one.matrix))
            for one in (a, b)
        )
    plan = _plan(
        ("result", device, misaligned, key, bias is not None and bias.dtype, *_like(result)),
        lambda: _result_plan(programs, result, factors, starts, bias, misaligned),
    )  # fmt: skip
    plan.run(words, numbers, given, starts)


def _step(factor: Slab) -> int:
    """Bytes from a row of a factor to the one 128 further on; 0 where all rows are the part."""
    stride = factor.matrix.stride(int(factor.turned)) * factor.matrix.element_size()
    return 0 if factor.part is None else _UNIT * stride


def _result_plan(
    programs: ModuleType, result: torch.Tensor, factors: tuple[Slab, Slab] | None, starts: tuple[int, int], bias: Maybe,
    misaligned: frozenset[int],
) -> _Plan:  # fmt: skip
    plan = _Plan(programs, result.device, misaligned, starts)
    whole, words = _Field(_RESULT, dtype=result.dtype), _Field(_WORDS, dtype=torch.int64)
    plan.add(whole_measures(programs.matrix_of(result)), {At.SOURCE: whole, WHOLE: words})
    if factors is None:
        return plan
    a, b = (programs.matrix_of(one.rows) for one in factors)
    a_at, b_at = _Field(_A, down=_step(factors[0])), _Field(_B, across=_step(factors[1]))
    a_wide, b_wide = plan.add(
        widen_passes(*(one.transposed if one.is_column_major else one for one in (a, b))),
        {At.SOURCE: a_at._replace(dtype=factors[0].matrix.dtype), SECOND: b_at._replace(dtype=factors[1].matrix.dtype)},
    )
    assert a_wide is not None
    assert b_wide is not None
    widened = [
        ((one.rows, one.columns), (1, one.rows) if one.is_column_major else (one.columns, 1), wide.offset // 8)
        for one, wide in ((a, a_wide), (b, b_wide))
    ]
    b_shape, b_strides, b_offset = widened[1]
    exact = plan.multiply([widened[0], (b_shape[::-1], b_strides[::-1], b_offset)], a.rows, b.rows)
    down, across = (_UNIT * stride * result.element_size() for stride in result.stride())
    row, column = starts[0] * _UNIT, starts[1] * _UNIT
    part = programs.matrix_of(result[row : row + a.rows, column : column + b.rows])
    given = {At.SOURCE: exact, RESULT: whole._replace(down=down, across=across)}
    if bias is not None:
        given[BIAS] = _Field(_BIAS, across=_UNIT * bias.element_size(), dtype=bias.dtype)
    name = None if bias is None else dtype_name(bias.dtype)
    plan.add(product_measures(part, name), given, _Field(_NUMBERS, dtype=torch.float64))
    return plan


# ------------------------------------------------------------------------------------------------------------ sample


def gather(programs: ModuleType, device: torch.device, rows: list[int]) -> None:
    """Make the numbers of all parts that `measure_operand` has measured, in one launch."""
    is_cuda = device.type == "cuda"
    table = torch.tensor(rows, dtype=torch.int64, pin_memory=is_cuda)
    index, stream = -1, 0
    if is_cuda:
        table = table.to(device, non_blocking=True)
        index = table.get_device()
        stream = torch._C._cuda_getCurrentRawStream(index)
    (launch,) = gather_passes(len(rows) // ROW, programs.device_of(index)).launches
    arguments = launch.key, launch.programs, launch.scalars, launch.constants, launch.warps
    with torch.cuda.device(index):
        programs.kernel_of(launch.kernel).prepared(*arguments)(stream, table)
