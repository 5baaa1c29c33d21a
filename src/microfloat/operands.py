"""The table of the six operands: three GEMMs, two sides each, and what every side reads.

    fprop  y = x @ w.T     contracts K     x [M, K]       w [N, K]
    dgrad  dx = dy @ w     contracts N     dy [M, N]      w.T [K, N]
    wgrad  dw = dy.T @ x   contracts M     dy.T [N, M]    x.T [K, M]

Legend: M = rows of x, K = in features, N = out features. Source: docs/numerics.md, sections 5.3 and 6.
"""

from typing import NamedTuple

GEMMS = ("fprop", "dgrad", "wgrad")
TENSORS = ("x", "w", "dy")


class Operand(NamedTuple):
    """One side of one GEMM: the tensor that it reads, plain or transposed, and the random stream of its cast."""

    gemm: str
    side: str
    tensor: str
    transposed: bool
    stream: int

    @property
    def key(self) -> tuple[str, str]:
        """(GEMM, side), as recipes name the operand."""
        return self.gemm, self.side


OPERANDS = (
    Operand("fprop", "lhs", "x", False, 0),
    Operand("fprop", "rhs", "w", False, 1),
    Operand("dgrad", "lhs", "dy", False, 2),
    Operand("dgrad", "rhs", "w", True, 3),
    Operand("wgrad", "lhs", "dy", True, 4),
    Operand("wgrad", "rhs", "x", True, 5),
)


_ROWS, _COLUMNS = ({one.tensor: one for one in OPERANDS if one.transposed == turned} for turned in (False, True))
# Both operands of "x", "w" or "dy": the one as the tensor lies ("row"), and its transpose ("column").
OPERANDS_OF = {tensor: (_ROWS[tensor], _COLUMNS[tensor]) for tensor in TENSORS}
