"""Both operands of a matrix, by XLA's operations or by one of our Triton kernels; the bytes are the same.

x_RC is a matrix as it lies in memory. Its *row* operand contracts C, its *column* operand contracts R and is the
transposed matrix. `kernels` says where kernels can be called. Source: docs/jax.md, "What casts on a GPU".
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat.jax._collectives import max_over
from microfloat.jax.backends import cuda, gemms, kernels, reference
from microfloat.jax.backends.reference import Decoded, Operand
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.recipes import Cast, Gemm

__all__ = ["CastOf", "Given", "Operands", "cast_both", "decodes", "uses_kernel"]


class CastOf(NamedTuple):
    """One operand that is wanted: its Cast, its random stream, and whether it is decoded for a bfloat16 GEMM."""

    cast: Cast
    stream: int | Array = 0
    decoded: bool = False


class Given(NamedTuple):
    """What a cast reads besides the matrix; all may be traced.

    `words`: the call seed's. `batch`: the index of the matrix in a batch. `amax`, `scale_enc`: see `ops.quantize`.
    """

    words: Array | np.ndarray | None = None
    batch: Array | int | None = None
    amax: Array | None = None
    scale_enc: Array | None = None


class Operands(NamedTuple):
    """The operand forms that were wanted, and the live amax of the matrix if it was recorded."""

    row: Operand | None
    column: Operand | None
    amax: Array | None = None


class _Static(NamedTuple):
    """What one compiled cast depends on."""

    row: CastOf | None
    column: CastOf | None
    axes: frozenset[str]
    records: bool
    capability: tuple[int, int] | None


def cast_both(
    x_RC: Array,
    row: CastOf | None,
    column: CastOf | None,
    given: Given = Given(),  # noqa: B008 - immutable
    *,
    axes: frozenset[str] = frozenset(),
    records: bool = False,
    backend: str = "auto",
) -> Operands:
    """The row operand [R, C] and the column operand [C, R] of a matrix of any wide float dtype, each if wanted.

    `axes`: mesh axes over which a measured tensor amax is the maximum (inside shard_map). `records`: the amax of the
    matrix is a result too.
    """
    chip = cuda.capability()
    static = _Static(row, column, axes, records, chip)
    if chip is None or not all(_by_kernel(wanted, given, x_RC, backend) for wanted in (row, column)):
        return _by_xla(static, x_RC, given)
    if not _shares(row, column):
        first = cast_both(x_RC, row, None, given, axes=axes, records=records, backend=backend)
        return first._replace(column=cast_both(x_RC, None, column, given, axes=axes, backend=backend).column)
    return _on_either(static)(x_RC, given._replace(batch=None))


def _by_kernel(wanted: CastOf | None, given: Given, x_RC: Array, backend: str) -> bool:
    if wanted is None:
        return True
    counted = isinstance(wanted.stream, int) and wanted.stream < 1 << 31 and given.batch is None
    return (counted or not wanted.cast.is_stochastic) and uses_kernel(wanted.cast, x_RC.shape, backend)


def uses_kernel(cast: Cast, shape: Sequence[int] | None, backend: str = "auto") -> bool:
    """Whether a matrix is cast by a kernel where this is called."""
    return not kernels.why_no_kernel(cast, shape, backend)


def decodes(gemm: Gemm, cast: Cast, shape: Sequence[int], backend: str) -> bool:
    """Whether an operand of a GEMM that multiplies in bfloat16 is cast straight to what it reads, by a kernel."""
    if backend == "reference" or gemm.accumulate == "exact" or not uses_kernel(cast, shape, backend):
        return False
    kind_a, kind_b = (reference.kind_of(operand, 0) for operand in gemm.casts)
    return gemms.choose(kind_a, kind_b, cuda.capability(), gemm.path).way == "bf16"


def _shares(row: CastOf | None, column: CastOf | None) -> bool:
    """Whether one launch serves both."""
    if row is None or column is None:
        return True
    from microfloat.kernels.tables import kernel_cast, share_a_launch

    return share_a_launch(kernel_cast(row.cast), kernel_cast(column.cast))


@lru_cache(maxsize=1024)
def _on_either(static: _Static) -> Callable[[Array, Given], Operands]:
    return kernels.on_either(partial(_by_triton, static), partial(_by_xla, static))


def _by_triton(static: _Static, x_RC: Array, given: Given) -> Operands:
    from microfloat.jax.backends.triton import _casts
    from microfloat.kernels.tables import kernel_cast

    row, column = (
        None if one is None else _casts.Wanted(kernel_cast(one.cast), int(one.stream), one.decoded)
        for one in (static.row, static.column)
    )
    words = None if given.words is None else jnp.asarray(given.words, jnp.uint32)
    arguments = _casts.Arguments(words, given.amax, given.scale_enc, static.axes, static.records)
    assert static.capability is not None
    first, second, amax = _casts.cast_by_kernel(x_RC, row, column, arguments, static.capability)
    return Operands(first, second, amax)


def _by_xla(static: _Static, x_RC: Array, given: Given) -> Operands:
    """The same by XLA's operations."""
    row, column = static.row, static.column
    amax = max_over(tensor_amax(x_RC), static.axes) if static.records else None
    if given.scale_enc is not None and any(wanted is not None and wanted.cast.is_gradient for wanted in (row, column)):
        given = given._replace(amax=tensor_amax(x_RC) if amax is None else amax)
    first = None if row is None else _one_by_xla(row, x_RC, given, static.axes)
    second = None
    if column is not None:
        cast = column.cast
        if cast.transposes and first is not None and row is not None and row.cast == cast:
            second = reference.transposed(first, cast.format, x_RC.shape[1])
        elif cast.transposes and cuda.converts(cast.format.element):
            # The codes of the matrix as it lies are transposed, not what they are made of.
            second = reference.transposed(
                _one_by_xla(column, x_RC, given, static.axes), cast.format, x_RC.shape[1]
            )  # fmt: skip
        else:
            second = _one_by_xla(column, cuda.turned(x_RC), given, static.axes)
    return Operands(_decoded(row, first, x_RC.shape[1]), _decoded(column, second, x_RC.shape[0]), amax)


def _decoded(wanted: CastOf | None, made: reference.Matrix | None, cols: int) -> Operand | None:
    if wanted is None or made is None or not wanted.decoded:
        return made
    cast = wanted.cast
    return Decoded(*gemms.bf16_values(made, reference.Kind(cast.format, cast.hadamard, cols, cast.rule.power_of_two)))


def _one_by_xla(wanted: CastOf, x_RC: Array, given: Given, axes: frozenset[str]) -> reference.Matrix:
    """The codes of one operand form."""
    noise = None
    if wanted.cast.is_stochastic and given.words is not None:
        noise = reference.Noise(given.words, wanted.stream, 0 if given.batch is None else given.batch)
    return reference.cast_matrix(x_RC, wanted.cast, noise, amax=given.amax, scale_enc=given.scale_enc, axes=axes)
