"""Both operands of a matrix, by XLA's operations or by a Triton kernel, with the same bytes (docs/jax.md).

The *row* operand of x_RC contracts C; the *column* operand contracts R and is the transposed matrix.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat import passes
from microfloat.chips import Chip
from microfloat.jax.backends import cuda, gemms, kernels, reference, shards
from microfloat.jax.backends.reference import Decoded, Operand
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.transformations import max_over
from microfloat.layout import FOLDED
from microfloat.recipes import Cast, Gemm
from microfloat.routes import WRITES_VALUES, OperandSpec, family_of, route_of


class CastInputs(NamedTuple):
    """The inputs of casts besides the matrix: words of the seed, index in a batch, `amax`, `scale_enc`."""

    words: Array | np.ndarray | None = None
    batch: Array | int | None = None
    amax: Array | None = None
    scale_enc: Array | None = None

    def of(self, *operands: OperandSpec | None) -> "CastInputs":
        """The inputs that these casts read: no seed unless one is stochastic, no encode scale unless one is delayed."""
        casts = [operand.cast for operand in operands if operand is not None]
        words, batch = (self.words, self.batch) if any(cast.is_stochastic for cast in casts) else (None, None)
        return CastInputs(words, batch, self.amax, self.scale_enc if any(cast.is_delayed for cast in casts) else None)


class Operands(NamedTuple):
    """The operand forms that were asked for, and the live amax of the matrix if it was recorded."""

    row: Operand | None
    column: Operand | None
    amax: Array | None = None


class _Static(NamedTuple):
    """Everything one compiled cast depends on."""

    row: OperandSpec | None
    column: OperandSpec | None
    axes: frozenset[str]
    records: bool
    capability: tuple[int, int] | None


def cast_both(
    x_RC: Array, row: OperandSpec | None, column: OperandSpec | None, inputs: CastInputs, *,
    axes: frozenset[str] = frozenset(), records: bool = False, backend: str = "auto",
) -> Operands:  # fmt: skip
    """The row operand [R, C] and the column operand [C, R] of a matrix of any wide float dtype; None for no cast.
    `axes`: mesh axes over which a measured tensor amax is the maximum. `records`: the amax is a result too."""
    chip, inputs = cuda.capability(), inputs.of(row, column)
    operands = [one for one in (row, column) if one is not None]
    by_kernel = bool(chip and operands) and all(_by_kernel(one, inputs, x_RC, backend) for one in operands)
    if row is not None and column is not None and not _together(row.cast, column.cast, by_kernel=by_kernel):
        first = cast_both(x_RC, row, None, inputs, axes=axes, records=records, backend=backend)
        return first._replace(column=cast_both(x_RC, None, column, inputs, axes=axes, backend=backend).column)
    static = _Static(row, column, axes, records, chip)
    if not by_kernel:
        return _by_xla(static, x_RC, inputs)
    on_device = _on_either if kernels.is_local() else _on_shards
    return on_device(static)(x_RC, inputs._replace(batch=None))


def _together(row: Cast, column: Cast, *, by_kernel: bool) -> bool:
    """Both casts read the same inputs and, on a GPU, one launch serves both."""
    if row.is_delayed != column.is_delayed or not by_kernel:
        return row.is_delayed == column.is_delayed
    from microfloat.passes.matrix import is_one_pass

    return is_one_pass(OperandSpec(row), OperandSpec(column))


def _by_kernel(operand: OperandSpec, inputs: CastInputs, x_RC: Array, backend: str) -> bool:
    counted = isinstance(operand.stream, int) and operand.stream < 1 << 31 and inputs.batch is None
    return (counted or not operand.cast.is_stochastic) and not kernels.why_no_kernel(operand.cast, x_RC.shape, backend)


def form_of(gemm: Gemm, side: str, cast: Cast, shape: Sequence[int], backend: str, *, at_once: bool) -> str:
    """The form of an operand of a GEMM as its cast makes it: codes, unless a kernel casts it (`form_by_kernel`)."""
    chip = cuda.capability()
    if chip is None or backend == "reference" or kernels.why_no_kernel(cast, shape, backend):
        return "codes"
    return form_by_kernel(gemm, side, chip, gemms.library(), at_once=at_once)


def form_by_kernel(gemm: Gemm, side: str, chip: tuple[int, int], library: str, *, at_once: bool) -> str:
    """The form in which a kernel casts an operand ("lhs" or "rhs"): folded to FP8 for microfloat's GEMM; values, if the
    GEMM reads them `at_once` and multiplies them; else codes."""
    route = route_of(gemm, Chip(chip), library=library)
    form = getattr(route, side)
    if route.kind == "blocks" and form in FOLDED:
        return form
    writes_values = family_of(getattr(gemm, side))[0] in WRITES_VALUES
    return "values" if at_once and writes_values and route.kind == "values" and route.rhs not in FOLDED else "codes"


@lru_cache(maxsize=1024)
def _on_either(static: _Static) -> Callable[[Array, CastInputs], Operands]:
    return kernels.on_either(partial(_by_triton, static), partial(_by_xla, static))


@lru_cache(maxsize=1024)
def _on_shards(static: _Static) -> Callable[[Array, CastInputs], Operands]:
    unit = math.lcm(*(shards.unit_of(one.cast) for one in (static.row, static.column) if one is not None))
    return shards.on_shards(lambda axes: _on_either(static._replace(axes=axes)), partial(_by_xla, static), unit)


def _by_triton(static: _Static, x_RC: Array, inputs: CastInputs) -> Operands:
    from microfloat.jax.backends import program

    words = None if inputs.words is None else jnp.asarray(inputs.words, jnp.uint32)
    given = passes.CastInputs(inputs.scale_enc, words, amax=inputs.amax)
    assert static.capability is not None, "a kernel runs on a chip"
    about = static.axes, static.records, static.capability
    return Operands(*program.cast_by_kernel(x_RC, static.row, static.column, given, *about))


def _by_xla(static: _Static, x_RC: Array, inputs: CastInputs) -> Operands:
    """Both operands by XLA's operations."""
    row, column = static.row, static.column
    amax = max_over(tensor_amax(x_RC), static.axes) if static.records else None
    if inputs.scale_enc is not None and any(one is not None and one.cast.is_gradient for one in (row, column)):
        inputs = inputs._replace(amax=tensor_amax(x_RC) if amax is None else amax)

    def codes(operand: OperandSpec, matrix: Array) -> reference.Matrix:
        noise = None
        if operand.cast.is_stochastic and inputs.words is not None:
            noise = reference.Noise(inputs.words, operand.stream, 0 if inputs.batch is None else inputs.batch)
        given = {"amax": inputs.amax, "scale_enc": inputs.scale_enc}
        return reference.cast_matrix(matrix, operand.cast, noise, **given, axes=static.axes)

    first = None if row is None else codes(row, x_RC)
    second = None
    if column is not None:
        cast = column.cast
        same = first if row is not None and row.cast == cast else None
        if cast.transposes and (same is not None or cuda.converts(cast.format.element)):
            # The codes of the matrix as it lies are transposed, not the numbers that they are made of.
            second = reference.transposed(same or codes(column, x_RC), cast.format, x_RC.shape[1])
        else:
            second = codes(column, cuda.turned(x_RC))
    return Operands(_decoded(row, first, x_RC.shape[1]), _decoded(column, second, x_RC.shape[0]), amax)


def _decoded(operand: OperandSpec | None, made: reference.Matrix | None, cols: int) -> Operand | None:
    if operand is None or made is None or operand.form == "codes":
        return made
    cast = operand.cast
    kind = reference.Kind(cast.format, cast.hadamard, cols, cast.rule.power_of_two)
    if operand.form in FOLDED:
        return reference.with_level(reference.folded(made, kind, operand.form)[0])
    return Decoded(*gemms.bf16_values(made, kind))
