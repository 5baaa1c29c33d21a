"""Host side of the kernels, without a framework: from a matrix and its casts to launches as data.

A `Pass` is one launch: a kernel, the key of its compiled version, the number of programs, and all arguments. `Passes`
are the launches that fill the operands of a matrix, with the buffers to allocate (`matrix`). They are made by `casts`,
from the `OperandSpec` of each operand; by `producers`, from an activation or norm and the casts of its result; by
`conversions`, from stored codes; by `products`, from x and a stored weight. torch and JAX allocate and launch. This
module imports no Triton, so schedules can describe operands where it is not installed.
"""

from typing import Any, NamedTuple

from microfloat.routes import OperandSpec

__all__ = ["CastInputs", "OperandSpec"]


class CastInputs(NamedTuple):
    """Further tensors that the casts of one matrix read and write.

    `scale_enc`: encode scale of delayed scaling. `seed`: words of the call seed. `record`: amax history, whose first
    element takes the amax. `folded`, `tiles`: int64 [2], numbers of elements that folding to 1x128 and to 128x128
    changed in the row and the column operand; one launch for both forms counts in `folded`. `amax`: an amax that need
    not be measured. `groups`: plan of the groups of rows.
    """

    scale_enc: Any = None
    seed: Any = None
    record: Any = None
    folded: Any = None
    tiles: Any = None
    amax: Any = None
    groups: Any = None
