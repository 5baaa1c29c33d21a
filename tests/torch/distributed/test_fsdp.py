"""FSDP2: converted models give the bytes of one process, and keep no weight between forward and backward.

# features D6, D7, D9 and D12
"""

import copy

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import recipes  # noqa: E402
from tests.torch.distributed.ranks import of, run_ranks  # noqa: E402

pytestmark = pytest.mark.xdist_group("fsdp")

RECIPES = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp6": recipes.MXFP6BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}


class MLP(nn.Module):
    def __init__(self, width: int = 128, inner: int = 256, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.up = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(recipe: object = None, **options: object) -> nn.Sequential:
    """Two blocks with the same values on every rank."""
    torch.manual_seed(1)
    model = nn.Sequential(MLP(**options), MLP(**options))
    if recipe is not None:
        mf.convert(model, recipe)
    return model


def shard(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def example(rows: int = 64, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """The same values on every rank, so that the mean of all gradients is that of one."""
    torch.manual_seed(2)
    return torch.randn(rows, 128).to(dtype).requires_grad_()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, recipe: object, steps: int = 2, rows: int = 64, context: object = None) -> list:
    """Outputs and input gradients of some steps, then the weights and buffers that these lead to."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = []
    for _ in range(steps):
        x = example(rows)
        with mf.autocast(recipe=recipe):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made += [y.detach(), x.grad]
    mf.update_scaling(model)
    return made + [whole(value).detach() for value in (*model.parameters(), *model.buffers())]


def same(first: list, second: list) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def every_recipe(rank: int) -> dict[str, bool]:
    made = {}
    for name, recipe in RECIPES.items():
        model = stack(recipe)
        made[name] = same(train(shard(copy.deepcopy(model)), recipe), train(model, recipe))
    return made


def saved_bytes(model: nn.Module) -> int:
    """Memory that a forward leaves to its backward; that of a weight which FSDP2 has freed is 0."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(example(8))
    found = sum(storage.nbytes() for storage in storages.values())
    y.sum().backward()
    return found


def memory_between(rank: int) -> dict[str, int]:
    """Eight rows, beside four weights of 32768 elements."""
    made = {"bf16": saved_bytes(shard(stack()))}
    for name, recipe in RECIPES.items():
        made[name] = saved_bytes(shard(stack(recipe)))
    fused = stack()
    mf.convert(fused, RECIPES["current"], fuse=True)
    made["fused"] = saved_bytes(shard(fused))
    return made


CASES = (every_recipe, memory_between)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("fsdp") / "store"))


def test_every_recipe_trains_as_in_one_process(ranks) -> None:
    for made in of(ranks, every_recipe):
        assert made == dict.fromkeys(RECIPES, True)


def test_no_weight_is_kept_between_forward_and_backward(ranks) -> None:
    for made in of(ranks, memory_between):
        assert max(made.values()) - made["bf16"] < 4 * 32768 / 2 / 2  # half of the weights' operands in 4 bits
