"""Host side of the kernels without a framework: a matrix and its casts become passes, which torch and JAX bind.

A `Pass` is one launch: its kernel, the key of the compiled version, how many programs, and every argument. `Passes` are
the launches that fill the operands of a matrix and the buffers they fill (`matrix`). `casts` makes them from the
`OperandSpec` of each orientation, `producers` from an activation or a norm and the casts of its result, `conversions`
from codes and scales that stand already. Nothing here allocates or starts anything.

This module imports no Triton, so that schedules may speak of operands where it is not installed.
"""

from typing import NamedTuple

from microfloat.recipes import Cast

__all__ = ["OperandSpec"]


class OperandSpec(NamedTuple):
    """One operand of a matrix: its cast, its form (`microfloat.layout`), whether a GEMM takes it turned, and the word
    of its random counters (docs/numerics.md 5.3).
    """

    cast: Cast
    form: str = "codes"
    turned: bool = False
    stream: int = 0
