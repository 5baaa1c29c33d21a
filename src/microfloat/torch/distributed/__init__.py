"""Low precision across ranks, on torch.distributed and DTensor: every rank makes the bytes that one process would.

One module per kind of parallelism; importing this package needs a torch with distributed support.
"""

from microfloat.torch.distributed.expert_parallel import Dispatched, dispatch
from microfloat.torch.distributed.fsdp import low_precision_all_gather, precompute_scales
from microfloat.torch.distributed.refit import refit
from microfloat.torch.distributed.tp_styles import ColwiseParallel, RowwiseParallel, SequenceParallel
from microfloat.torch.scaling.rank_errors import check_ranks, named_failures

__all__ = [
    "ColwiseParallel", "Dispatched", "RowwiseParallel", "SequenceParallel", "check_ranks", "dispatch",
    "low_precision_all_gather", "named_failures", "precompute_scales", "refit",
]  # fmt: skip
