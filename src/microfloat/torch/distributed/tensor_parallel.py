"""Tensor and sequence parallel styles for `torch.distributed.tensor.parallel.parallelize_module`."""

from torch.distributed.tensor import parallel

__all__ = ["ColwiseParallel", "RowwiseParallel", "SequenceParallel"]


class ColwiseParallel(parallel.ColwiseParallel):
    """Shard a Linear's weight by its rows, over the ranks of a mesh."""


class RowwiseParallel(parallel.RowwiseParallel):
    """Shard a Linear's weight by its columns, over the ranks of a mesh."""


class SequenceParallel(parallel.SequenceParallel):
    """Shard a norm's inputs by their sequence, over the ranks of a mesh."""
