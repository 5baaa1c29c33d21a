"""Host side of the kernels without a framework: a matrix and its casts become passes, which torch and JAX bind.

A `Pass` is one launch: its kernel, the key of the compiled version, how many programs, and every argument. `Passes` are
the launches that fill the operands of a matrix and the buffers they fill (`matrix`). `casts` makes them from the
`OperandSpec` of each orientation, `producers` from an activation or a norm and the casts of its result, `conversions`
from codes and scales that stand already. Nothing here allocates or starts anything. This module imports no Triton, so
that schedules may speak of operands where it is not installed.
"""

from typing import Any, NamedTuple

from microfloat.routes import OperandSpec

__all__ = ["CastInputs", "OperandSpec"]


class CastInputs(NamedTuple):
    """Tensors that casts of one matrix read and write besides it: the encode scale of delayed scaling; words of the
    call seed; the history whose first element takes the amax; int64 [2] for the elements that folding to 1x128 and to
    128x128 changed (row and column operand; of one launch to either: the first); the amax where it need not be
    measured; the groups of its rows.
    """

    scale_enc: Any = None
    seed: Any = None
    record: Any = None
    folded: Any = None
    tiles: Any = None
    amax: Any = None
    groups: Any = None
