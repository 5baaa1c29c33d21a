"""Processes of one gloo group, in which many cases run: what each returns on every rank."""

import datetime
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

_LONGEST = 100  # seconds


def _worker(rank: int, world: int, backend: str, cases: tuple, path: str, results) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    timeout = datetime.timedelta(seconds=_LONGEST // 2)
    dist.init_process_group(backend, init_method=f"file://{path}", rank=rank, world_size=world, timeout=timeout)
    made = {}
    for case in cases:
        try:
            made[case.__name__] = case(rank, world)
        except BaseException:
            made[case.__name__] = traceback.format_exc()
            break  # ranks may not be at one point of the program any more
    results.put((rank, made))
    dist.barrier()
    dist.destroy_process_group()


def run_ranks(world: int, cases: tuple[Callable, ...], path: str, backend: str = "gloo") -> list[dict]:
    """By rank: what every case has returned, or its traceback as text."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(target=_worker, args=(rank, world, backend, cases, path, results), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    made = dict(results.get(timeout=_LONGEST) for _ in workers)
    for worker in workers:
        worker.join(_LONGEST)
    return [made[rank] for rank in range(world)]


def of(ranks: list[dict], case: Callable) -> list:
    """What a case has returned, by rank; its failure on any of them fails the test."""
    made = [returned.get(case.__name__, "Traceback: an earlier case has failed") for returned in ranks]
    failed = [value for value in made if isinstance(value, str) and "Traceback" in value]
    assert not failed, "\n".join(failed)
    return made
