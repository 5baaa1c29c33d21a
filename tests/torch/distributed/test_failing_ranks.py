"""Ranks that die, hang or raise in the middle of a collective: the others end with an error that names them.

# features D12
"""

import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as mfd  # noqa: E402
from microfloat.recipes import DelayedScaling  # noqa: E402
from tests import processes  # noqa: E402

Step = Callable[[], object]
TIMEOUT = 4  # seconds, of the group


def mlp(recipe: object) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))
    mf.convert(model, recipe)
    return model


# Each case makes a step that ranks repeat together; the library's own names come first, torch's own collectives last.


def amaxes_of_regions(folder: Path) -> Step:
    layer = mf.Linear(32, 32)

    def step() -> None:
        with mf.autocast(recipe=DelayedScaling()):
            y = layer(torch.ones(2, 32))
        y.sum().backward()

    return step


def amaxes_of_sharded_layers(folder: Path) -> Step:
    return sequence_parallel(None, "fp8_current")


def sequence_parallel(folder: Path | None, recipe: str = "mxfp4") -> Step:
    """Gathers of codes in forward and backward, and reduce-scatters of y and of dx."""
    world = dist.get_world_size()
    mesh, model = init_device_mesh("cpu", (world,)), mlp(recipe)
    column = mfd.ColwiseParallel(input_layouts=Shard(0))
    row = mfd.RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, {"0": column, "2": row})
    x = DTensor.from_local(torch.randn(64, 128, requires_grad=True), mesh, [Shard(0)])
    return lambda: model(x).to_local().sum().backward()


def all_to_all(folder: Path) -> Step:
    world = dist.get_world_size()
    x, sizes = torch.ones(512 * world, 256).bfloat16().requires_grad_(), [512] * world

    def step() -> None:
        sent = mfd.dispatch(x, sizes, recipe="mxfp8")
        sent.combine(sent.x).sum().backward()

    return step


def gather_of_codes(folder: Path) -> Step:
    """Gathers of FSDP2 in forward and backward, and its reduce-scatter of gradients."""
    model = mfd.low_precision_all_gather(mlp("mxfp8"))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return lambda: model(torch.ones(32, 128)).sum().backward()


def scales_of_sharded_weights(folder: Path) -> Step:
    model = fully_shard(mfd.low_precision_all_gather(mlp("fp8_current")))
    model(torch.ones(32, 128))
    model.reshard()

    def step() -> None:
        with torch.no_grad():  # as an optimizer, so that they are measured anew
            for parameter in model.parameters():
                parameter.mul_(1.0)
        mfd.precompute_scales(model)

    return step


def gradients_of_ddp(folder: Path) -> Step:
    model = DistributedDataParallel(mlp("nvfp4"))
    return lambda: model(torch.ones(32, 128)).sum().backward()


def save(folder: Path) -> Step:
    """A checkpoint for each step; the first two are there before anything fails."""
    model, done = fully_shard(mlp("delayed")), [0]

    def step() -> None:
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"step{done[0]}")
        done[0] += 1

    step()
    step()
    return step


def leave(how: str) -> None:
    """Take this rank out of what all ranks do."""
    if how == "raises":
        raise ValueError("a shape of its own")
    time.sleep(60)


def _failing(rank: int, world: int, case: Callable, how: str, folder: Path) -> None:
    torch.set_num_threads(1)
    wait = datetime.timedelta(seconds=TIMEOUT)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=wait)
    step, last = case(folder), rank == world - 1
    step()
    if last and how == "dies":  # from another thread, wherever the steps are by then
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()
    try:
        with mfd.named_failures():
            while True:
                if last and how != "dies" and time.monotonic() > start + 0.5:
                    leave(how)
                step()
    except Exception as error:
        (folder / str(rank)).write_text(f"{time.monotonic() - start:.1f} {type(error).__name__} {error}")
    os._exit(1)


OURS = (
    amaxes_of_regions, amaxes_of_sharded_layers, sequence_parallel, all_to_all, gather_of_codes,
    scales_of_sharded_weights, gradients_of_ddp, save,
)  # fmt: skip
SLOW = pytest.mark.slow("ranks that die or hang, one start of processes for each")
FAILURES = [pytest.param(case, how, 2, marks=SLOW) for case in OURS for how in ("dies", "hangs")]
FAILURES += [(gradients_of_ddp, "raises", 2), pytest.param(all_to_all, "dies", 4, marks=SLOW)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("case", "how", "world"), FAILURES)
def test_a_rank_that_fails_is_named_by_the_others(tmp_path, case, how, world) -> None:
    workers = [processes.process(_failing, rank, world, case, how, tmp_path) for rank in range(world)]
    for worker in workers:
        worker.start()
    try:
        for worker in workers[:-1]:
            worker.join(90)
    finally:
        for worker in workers:
            worker.kill()
    named = "raised ValueError: a shape of its own" if how == "raises" else "died, or did not come to it"
    for rank in range(world - 1):
        seconds, kind, text = (tmp_path / str(rank)).read_text().split(" ", 2)
        assert kind == "RankError", text
        assert f"rank {world - 1} {named}" in text
        assert float(seconds) < 30  # of which the timeout is 4, and the wait for the others 5
    if case is save:  # what was written before is whole
        complete = sorted(path.parent for path in tmp_path.glob("step*/.metadata"))
        assert len(complete) >= 2
        model = mlp("delayed")
        dcp.load({"model": model.state_dict()}, checkpoint_id=complete[-1], no_dist=True)
        assert torch.equal(model[0].weight, mlp("delayed")[0].weight)
