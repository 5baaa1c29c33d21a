"""Saved activations over the ranks of a group: the gradients of one rank alone, in a part of its memory."""

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.torch.distributed import distribute_saved_activations  # noqa: E402
from tests.torch.distributed.ranks import of, run_ranks  # noqa: E402

WORLD = 2
# Sizes at which neither codes nor values are multiples of the ranks, or of words of 8 bytes.
ROWS, WIDTHS = 67, (99, 161, 33)


def gradients(model: nn.Module, x: torch.Tensor, context=None) -> tuple[list[torch.Tensor], object]:
    """Those of x and of every parameter, where the forward ran inside `context`."""
    model, x = copy.deepcopy(model), x.clone().requires_grad_()
    torch.manual_seed(5)
    if context is None:
        y = model(x * 1.0)  # what autograd saves is no leaf
    else:
        with context:
            y = model(x * 1.0)
    y.square().sum().backward()
    return [x.grad, *[one.grad for one in model.parameters()]], context


def same_gradients(rank: int) -> dict:
    """By recipe: equal bits, and the share of bytes that is kept."""
    found = {}
    x = torch.randn(ROWS, WIDTHS[0], generator=torch.Generator().manual_seed(1))
    for name in (None, "mxfp8", "nvfp4", "delayed", "fp8_current"):
        torch.manual_seed(0)
        middle = nn.Sequential(nn.Linear(*WIDTHS[:2]), nn.GELU(), nn.Dropout(0.1), nn.Linear(*WIDTHS[1:]))
        if name is not None:
            mf.convert(middle, name)
        plain, _ = gradients(middle, x)
        for held_alike in (True, False):
            ours = x if held_alike else x * (1 + rank)
            plain, _ = gradients(middle, ours)
            made, context = gradients(middle, ours, distribute_saved_activations())
            equal = all(map(torch.equal, plain, made))
            found[name, held_alike] = equal, context.whole_bytes, context.kept_bytes
    return found


def memory_orders(rank: int) -> dict:
    """Tensors in any memory, and those that only the ranks together can tell apart."""
    base = torch.randn(64, 3, 51, generator=torch.Generator().manual_seed(2))
    flipped = base.clone()
    if rank == 1:  # two sign bits, which cancel out in a sum
        flipped.view(-1)[[7, 9]] *= -1
    late = base.clone()
    late[-1, -1, -1] += rank
    ways = {
        "in order": (base, True), "turned": (base.permute(2, 0, 1), True), "bfloat16": (base.bfloat16(), True),
        "with gaps": (base, False), "expanded": (base, False),
        "two sign bits": (flipped, False), "the last element": (late, False),
        "another shape": (base[: 64 - rank], False), "small on one rank": (base[: 7 - rank], False),
        "small": (base[:2], False), "empty on one rank": (base[: 64 * rank], False),
    }  # fmt: skip
    found = {}
    for name, (values, _) in ways.items():
        x = values.clone(memory_format=torch.preserve_format).requires_grad_()
        with distribute_saved_activations() as context:
            kept = x * 1.0
            if name == "with gaps":
                kept = torch.cat([kept, kept], -1)[:, :, ::2]
            elif name == "expanded":
                kept = kept[:1].expand(64, 3, 51)
            alive = weakref.ref(kept)
            y = kept.square().sum() + (kept.square() * 0.25).sum()
        wanted = 2 * kept.detach() + 0.5 * kept.detach()
        (got,) = torch.autograd.grad(y, kept, retain_graph=True)
        del kept
        gc.collect()
        found[name] = torch.equal(got, wanted), context.whole_bytes, context.kept_bytes, alive() is None
    return {"found": found, "shared": {name: shared for name, (_, shared) in ways.items()}}


def fused_block(rank: int) -> dict:
    """A decoder layer of ours, also recomputed in backward."""
    torch.manual_seed(0)
    block = mf.TransformerLayer(64, 96, 2, recipe="mxfp8")
    x = torch.randn(2, 33, 64)
    plain, _ = gradients(block, x)
    found = {}
    for name, run in {"eager": block, "recomputed": _Recomputed(block)}.items():
        made, context = gradients(run, x, distribute_saved_activations())
        found[name] = all(map(torch.equal, plain, made)), context.kept_bytes / max(context.whole_bytes, 1)
    return found


class _Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mf.checkpoint(self.block, x)


CASES = (same_gradients, memory_orders, fused_block)


RANKS = pytest.mark.slow("ranks of their own for saved activations")


def test_one_rank_packs_nothing(tmp_path) -> None:  # features D8
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        ((name, (are_equal, kept)), *_) = fused_block(0).items()
    finally:
        dist.destroy_process_group()
    assert (name, are_equal, kept) == ("eager", True, 0.0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"), WORLD, seconds=30)


@RANKS
def test_gradients_are_equal_and_saved_bytes_halve(ranks) -> None:  # features D8
    for found in of(ranks, same_gradients):
        for (name, held_alike), (equal, whole, kept) in found.items():
            assert equal, (name, held_alike)
            assert whole > 8192, name
            if held_alike:
                assert whole / 2 <= kept < 0.54 * whole, name  # scales of less than 4096 bytes are whole
            else:  # weights and the mask of the dropout are shared
                assert 0.6 * whole < kept < whole, name


@RANKS
def test_tensors_in_any_memory_and_what_ranks_do_not_share(ranks) -> None:
    for returned in of(ranks, memory_orders):
        for name, (equal, whole, kept, freed) in returned["found"].items():
            shared = returned["shared"][name]
            assert equal, name
            assert kept == (-(-whole // 2) if shared else whole), name
            assert freed == shared, name


@RANKS
def test_a_layer_of_many_products(ranks) -> None:
    for found in of(ranks, fused_block):
        assert found["eager"][0]
        assert 0.5 <= found["eager"][1] < 0.7  # q, k and v are views of one product, with gaps
        assert found["recomputed"] == (True, 0.5)  # the one tensor that a recomputation starts from
