"""Processes of one group, started once, that run many cases; every wait ends."""

import datetime
import io
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests import processes
from tests.torch.distributed.world import end_group

Case = Callable[[int], Any]


def on_gpus(rank: int) -> None:
    """All that follows runs on the GPU of the rank."""
    import torch

    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")


def _worker(rank: int, world: int, backend: str, cases: Sequence[Case], path: str, seconds: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=seconds)
    device = None if backend == "gloo" else torch.device("cuda", rank)
    if device is not None:  # before anything asks for the current one
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=world, timeout=wait, device_id=device
    )
    made: dict[str, Any] = {}
    for case in cases:
        torch.manual_seed(0)
        start = time.process_time()
        try:
            made[case.__name__] = case(rank)
        except Exception:
            made[case.__name__] = traceback.format_exc()
            break  # the others may wait for this rank
        finally:
            made["seconds of " + case.__name__] = time.process_time() - start
    copied = io.BytesIO()  # tensors that go through a queue vanish with the process that has made them
    torch.save(made, copied)
    results.put((rank, copied.getvalue()))
    dist.barrier()
    end_group()


def run_ranks(cases: Sequence[Case], path: str, world: int = 2, backend: str = "gloo", seconds: int = 60) -> list[dict]:
    """Result of every case on each of `world` ranks, or the text of its exception.

    `path`: of a file that does not exist; `seconds`: the longest wait for another rank.
    """
    import torch

    results = processes.process_queue()
    workers = [processes.process(_worker, rank, world, backend, cases, path, seconds, results) for rank in range(world)]
    for worker in workers:
        worker.start()
    try:
        made = dict(results.get(timeout=4 * seconds) for _ in workers)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()
    return [torch.load(io.BytesIO(made[rank]), weights_only=False) for rank in range(world)]


def of(ranks: list[dict], case: Case) -> list[Any]:
    """Result of `case`, rank by rank; fails with the traceback of a rank that raised."""
    made = [returned.get(case.__name__, "Traceback: an earlier case failed") for returned in ranks]
    errors = [value for value in made if isinstance(value, str) and "Traceback" in value]
    if errors:
        pytest.fail("\n".join(errors))
    return made
