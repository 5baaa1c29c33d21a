"""The Hadamard transform along the contraction axis, in the defined order (docs/numerics.md 5.2).

Legend: R = rows of the operand form, C = its contraction length; names in _CR have the contraction axis first, which
makes every butterfly an operation on whole rows.
"""

import torch

from microfloat.recipes import Hadamard
from microfloat.torch.reference._grid import Grid, Workspace


def transform(x_RC: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    """bfloat16 [R, C in whole groups]: ``bf16(bf16(x) diag(sgn) H * size^-1/2)`` per `size` columns, zero-padded.

    A transposed view: it lies in memory with the contraction axis first.
    """
    x_CR, size = x_RC.t(), hadamard.size
    length, rows = x_CR.shape
    result_CR = torch.empty(-(-length // size) * size, rows, dtype=torch.bfloat16, device=x_CR.device)
    workspace = Workspace(x_CR.device)
    signs = _signs(hadamard, x_CR.device)
    for chunk in Grid(length, rows, (size, 1), False, contraction=0).chunks(x_CR.device):
        part = x_CR[chunk.rows, chunk.columns]
        padded, columns = -(-part.shape[0] // size) * size, part.shape[1]
        if part.dtype != torch.bfloat16:
            part = part.to(torch.bfloat16)
        if part.stride(1) != 1:  # read across: transpose it in two bytes, which torch does faster than while widening
            part = part.contiguous()
        values_CR = workspace.take("contraction_first", (padded, columns), torch.float32)
        values_CR[: part.shape[0]] = part
        values_CR[part.shape[0] :].zero_()
        values_CR.view(padded // size, size, columns).mul_(signs)
        values_CR = _butterflies(values_CR, size, workspace).mul_(hadamard.size**-0.5)
        result_CR[chunk.rows.start : chunk.rows.start + padded, chunk.columns] = values_CR
    return result_CR.t()


def inverse(x_RC: torch.Tensor, hadamard: Hadamard) -> torch.Tensor:
    """``(x' H * size^-1/2) diag(sgn)``, float32 [R, C], which undoes `transform` up to rounding."""
    rows, columns = x_RC.shape
    workspace = Workspace(x_RC.device)
    values_CR = workspace.take("contraction_first", (columns, rows), torch.float32).copy_(x_RC.t())
    values_CR = _butterflies(values_CR, hadamard.size, workspace).mul_(hadamard.size**-0.5)
    values_CR.view(columns // hadamard.size, hadamard.size, rows).mul_(_signs(hadamard, x_RC.device))
    return values_CR.t()


def _butterflies(values_CR: torch.Tensor, size: int, workspace: Workspace) -> torch.Tensor:
    """Distances 1, 2, 4, 8 and so on: every pair (i, i + h) along the first axis becomes (sum, difference), float32."""
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
    # Without a copy from the host, which a CUDA graph could not capture. The mask as a signed number of 64 bits:
    mask = hadamard.sign_mask - (hadamard.sign_mask >> 63 << 64)
    points = torch.arange(hadamard.size, device=device)[:, None]
    return (1 - 2 * (torch.full_like(points, mask) >> points & 1)).to(torch.float32)
