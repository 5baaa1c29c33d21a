"""Casts whose programs wait for each other, beside collectives whose programs wait for another GPU: neither starves."""

import multiprocessing
import socket

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402

WORLD, STEPS, SECONDS = 2, 40, 180
RECIPES_WITH_WAITING_CASTS = ["fp8_current", "fp8_row", "nvfp4"]

pytestmark = pytest.mark.gpu


def _step(layer, x, dy):
    torch.cuda.manual_seed(5)
    leaf = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = layer(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad, layer.weight.grad


def _rank(rank, port, recipe):
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    torch.manual_seed(1)
    layer = mf.Linear(1024, 2048, device="cuda", dtype=torch.bfloat16, recipe=recipe)
    x, dy = (torch.randn(2048, size, device="cuda", dtype=torch.bfloat16) for size in (1024, 2048))
    expected = _step(layer, x, dy)
    total = torch.ones(32 << 20, device="cuda")
    dist.all_reduce(total.clone())
    torch.cuda.synchronize()
    for turn in range(STEPS):
        if rank == turn % WORLD:  # the other rank's collective is already running and waits for this one
            made = _step(layer, x, dy)
            work = dist.all_reduce(total, async_op=True)
        else:
            work = dist.all_reduce(total, async_op=True)
            made = _step(layer, x, dy)
        made = (*made, *_step(layer, x, dy))
        work.wait()
        total.div_(WORLD)
        for got, want in zip(made, (*expected, *expected), strict=True):
            assert torch.equal(got, want)
    assert bool((total == 1).all())
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", RECIPES_WITH_WAITING_CASTS)
def test_casts_and_collectives_at_once(recipe):
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, sees {torch.cuda.device_count()}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_rank, args=(rank, port, recipe)) for rank in range(WORLD)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(SECONDS)
            assert process.exitcode == 0, "a rank failed" if process.exitcode else f"still waiting after {SECONDS} s"
    finally:
        for process in ranks:
            process.kill()
