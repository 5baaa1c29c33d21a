"""The 16-point Hadamard transform along the contraction axis, in the defined order (docs/numerics.md 5.2).

Legend: R = rows of the operand form, C = its contraction length; names in _CR have the contraction axis first, which
makes every butterfly an operation on whole rows.
"""

import torch

from microfloat.recipes import Hadamard
from microfloat.torch.backends.reference._grid import Chunk, Grid, Workspace
from microfloat.torch.backends.reference._load import load_float32

__all__ = ["inverse", "transform"]


def transform(x_RC: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    """bfloat16 [R, C rounded up to 16]: ``bf16(bf16(x) diag(sgn) H / 4)`` per 16 columns, zero-padded."""
    rows, length = x_RC.shape
    padded = -(-length // hadamard.size) * hadamard.size
    result = torch.empty(rows, padded, dtype=torch.bfloat16, device=x_RC.device)
    workspace = Workspace(x_RC.device)
    signs = _signs(hadamard, x_RC.device)
    for chunk in Grid(rows, length, (1, hadamard.size), False).chunks(x_RC.device, across=True):
        values_CR = _load_contraction_first(x_RC, chunk, hadamard.size, workspace)
        values_CR.view(values_CR.shape[0] // hadamard.size, hadamard.size, chunk.shape[0]).mul_(signs)
        values_CR = _butterflies(values_CR, hadamard.size, workspace).mul_(0.25)
        columns = slice(chunk.columns.start, chunk.columns.start + values_CR.shape[0])
        narrow_CR = workspace.take("narrow", tuple(values_CR.shape), torch.bfloat16).copy_(values_CR)
        narrow_RC = workspace.take("narrow_across", (values_CR.shape[1], values_CR.shape[0]), torch.bfloat16)
        result[chunk.rows, columns] = narrow_RC.copy_(narrow_CR.t())
    return result


def _load_contraction_first(x_RC: torch.Tensor, chunk: Chunk, size: int, workspace: Workspace) -> torch.Tensor:
    """float32 [C of the chunk, up to a multiple of `size`, R of the chunk], rounded to bfloat16."""
    rows, columns = chunk.shape
    values_CR = workspace.take("contraction_first", (-(-columns // size) * size, rows), torch.float32)
    part = x_RC[chunk.rows, chunk.columns]
    load_float32(part.t(), values_CR[:columns], workspace)
    values_CR[columns:].zero_()
    if x_RC.dtype != torch.bfloat16:
        values_CR.copy_(values_CR.to(torch.bfloat16))
    return values_CR


def inverse(x_RC: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    """float32 [R, C]: ``(x' H / 4) diag(sgn)``. Undoes `transform` up to rounding."""
    rows, columns = x_RC.shape
    workspace = Workspace(x_RC.device)
    values_CR = workspace.take("contraction_first", (columns, rows), torch.float32).copy_(x_RC.t())
    values_CR = _butterflies(values_CR, hadamard.size, workspace).mul_(0.25)
    values_CR.view(columns // hadamard.size, hadamard.size, rows).mul_(_signs(hadamard, x_RC.device))
    return values_CR.t()


def _butterflies(values_CR: torch.Tensor, size: int, workspace: Workspace) -> torch.Tensor:
    """Distances 1, 2, 4, 8: every pair (i, i + h) along the first axis becomes (sum, difference), float32."""
    length, rows = values_CR.shape
    source, target = values_CR, workspace.take("butterflies", (length, rows), torch.float32)
    distance = 1
    while distance < size:
        shape = (length // (2 * distance), 2, distance, rows)
        low, high = source.view(shape).unbind(1)
        sums, differences = target.view(shape).unbind(1)
        torch.add(low, high, out=sums)
        torch.sub(low, high, out=differences)
        source, target = target, source
        distance *= 2
    return source


def _signs(hadamard: Hadamard, device: torch.device) -> torch.Tensor:
    signs = [-1.0 if hadamard.sign_mask >> i & 1 else 1.0 for i in range(hadamard.size)]
    return torch.tensor(signs, dtype=torch.float32, device=device)[:, None]
