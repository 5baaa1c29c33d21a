"""Processes of one group, started once, that run many cases; every wait ends."""

import contextlib
import datetime
import io
import os
import queue
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests import processes
from tests.torch.distributed.world import end_group

Case = Callable[[int], Any]
GRACE = 20  # seconds for the texts of ranks that wait for one which has failed


class With:
    """A case that is given options, under its own name."""

    def __init__(self, case: Case, **options: Any) -> None:
        self.case, self.options, self.__name__ = case, options, case.__name__

    def __call__(self, rank: int) -> Any:
        return self.case(rank, **self.options)


def on_gpus(rank: int) -> None:
    """All that follows runs on the GPU of the rank."""
    import torch

    torch.cuda.set_device(rank)
    torch.set_default_device(f"cuda:{rank}")


def _worker(
    rank: int, world: int, backend: str, takes_gpus: bool, cases: Sequence[Case], path: str, seconds: int, results: Any
) -> None:  # fmt: skip
    if not takes_gpus:  # of which there may be fewer than ranks
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read when CUDA is initialised, not when torch is imported
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


def run_ranks(
    cases: Sequence[Case], path: str, world: int = 2, backend: str = "gloo", seconds: int = 60,
    takes_gpus: bool | None = None,
) -> list[dict]:  # fmt: skip
    """Result of every case on each of `world` ranks, or the text of its exception.

    `path`: of a file that does not exist; `seconds`: the longest wait for another rank; `takes_gpus`: whether ranks see
    the GPUs of the machine, None: those of NCCL alone.
    """
    takes_gpus = backend == "nccl" if takes_gpus is None else takes_gpus

    if backend == "nccl":  # kernels are compiled meanwhile
        seconds *= 4
    results = processes.process_queue()
    settings = world, backend, takes_gpus, cases, path, seconds, results
    workers = [processes.process(_worker, rank, *settings) for rank in range(world)]
    for worker in workers:
        worker.start()
    made: dict[int, bytes] = {}
    try:
        until = time.monotonic() + 4 * seconds
        while len(made) < world and time.monotonic() < until:
            ended = not any(worker.is_alive() for worker in workers)
            with contextlib.suppress(queue.Empty):
                made.update([results.get(timeout=1)])
                ended = False
            if ended:  # NCCL ends a process whose collective has timed out
                break
            if any(_failed(value) for copied in made.values() for value in _loaded(copied).values()):
                until = min(until, time.monotonic() + GRACE)
    finally:
        for worker in workers:
            worker.join(10)
            worker.kill()
    assert made, "no rank has returned anything"
    return [_loaded(made[rank]) if rank in made else {} for rank in range(world)]


def _loaded(copied: bytes) -> dict:
    import torch

    return torch.load(io.BytesIO(copied), weights_only=False)


def of(ranks: list[dict], case: Case) -> list[Any]:
    """Result of `case`, rank by rank; fails with the traceback of a rank that raised."""
    made = [returned.get(case.__name__, "Traceback: an earlier case failed") for returned in ranks]
    errors = [value for value in made if _failed(value)]
    if errors:
        pytest.fail("\n".join(errors))
    return made


def _failed(value: object) -> bool:
    return isinstance(value, str) and "Traceback" in value
