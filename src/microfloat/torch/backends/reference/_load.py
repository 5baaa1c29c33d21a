"""Reading a window of a matrix of any strides as float32, fast where the matrix is stored column by column."""

import torch

from microfloat.torch.backends.reference._grid import Workspace

__all__ = ["is_stored_across", "load_float32"]


def is_stored_across(x_RC: torch.Tensor) -> bool:
    """Whether neighbours in memory are neighbours along the rows axis."""
    return x_RC.stride(0) < x_RC.stride(1) and x_RC.shape[0] > 1


def load_float32(part: torch.Tensor, target: torch.Tensor, workspace: Workspace) -> None:
    """``target[:] = part``, exact; `target` is float32 [r, c], contiguous or not.

    A transposing copy is fast in torch between two contiguous tensors of one dtype only, hence the steps.
    """
    if part.device.type != "cpu" or not is_stored_across(part) or part.numel() < 4096:
        target.copy_(part)
        return
    rows, columns = part.shape
    across = part.t()
    if not across.is_contiguous():
        across = workspace.take("across", (columns, rows), part.dtype).copy_(across)
    along = workspace.take("along", (rows, columns), part.dtype)
    target.copy_(along.copy_(across.t()))
