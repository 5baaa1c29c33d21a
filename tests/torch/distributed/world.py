"""The process group of a test, and its end."""

import contextlib
from collections.abc import Iterator

# The group that ended last. Its threads end with it, when another has ended: by then nothing in C++ holds it.
_ended: list = []


def end_group() -> None:
    """`destroy_process_group`, of which the Python object is kept.

    A DistributedDataParallel that outlives its gloo group destroys it from C++ with Python's lock held, and waits for a
    thread that may wait for that lock, to drop the last collective (seen in torch 2.13 with plain layers, once in some
    hundred ends; pytorch/pytorch#56297 is of this kind). Of what Python holds torch gives the lock back first.
    """
    import torch.distributed as dist

    _ended[:] = [dist.group.WORLD]
    dist.destroy_process_group()


@contextlib.contextmanager
def world_of_one() -> Iterator[None]:
    """This process alone is the world, over gloo."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        end_group()
