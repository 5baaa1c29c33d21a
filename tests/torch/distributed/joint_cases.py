"""Cases of tests/torch/distributed/test_fsdp.py: weights that share a scale in training, and their way to a server."""

import copy

import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import microfloat.torch as mf
from microfloat.recipes import WeightActivation, WeightOnly
from microfloat.torch.distributed import ColwiseParallel, low_precision_all_gather, refit


class Joined(nn.Module):
    """q, k and v of 64 columns, whose amaxes differ, and gate and up behind them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        for number, name in enumerate(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            setattr(self, name, nn.Linear(64, 64, bias=False))
            getattr(self, name).weight.data.mul_(3**number)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.q_proj(x) + self.k_proj(x) + self.v_proj(x)
        return torch.relu(self.gate_proj(x)) * self.up_proj(x)


WAYS = ("whole", "each", "gathered", "checkpointed", "columns")


def joint_scales(rank: int, ways: tuple[str, ...] = WAYS) -> dict[str, bool]:
    """Is the forward of a sharded model the one that is served, after a step, by the way in which it is sharded?"""
    mesh, made = init_device_mesh("cpu", (2,)), {}
    torch.manual_seed(7)
    x = torch.randn(6, 64)
    for config in (WeightOnly("nvfp4"), WeightActivation("fp8_tensor", backward="dequantized")):
        for way in ways:
            model = Joined()
            mf.convert(model, config)
            if way == "gathered":
                low_precision_all_gather(model)
            if way == "columns":
                parallelize_module(model, mesh, {name: ColwiseParallel() for name in ("gate_proj", "up_proj")})
            for layer in model.children() if way == "each" else ():
                fully_shard(layer, mesh=mesh)
            if way != "columns":
                fully_shard(model, mesh=mesh)
            optimizer = torch.optim.SGD(model.parameters(), 1e-3)
            y = checkpoint(model, x, use_reentrant=False) if way == "checkpointed" else model(x)
            y.square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                y = model(x)
            whole = Joined()
            full = {
                name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()
            }
            whole.load_state_dict(full)
            mf.quantize_(whole, config)
            expected = whole(x)
            expected = expected.chunk(2, -1)[rank] if way == "columns" else expected
            made[f"{config.label} {way}"] = torch.equal(y, expected)
    return made


def refitted(rank: int) -> bool:
    """Are the tensors for a server those of a model that is not sharded?"""
    model = Joined()
    model.up_proj.weight.data[63] = 0
    whole = copy.deepcopy(model)
    mf.convert(model, WeightOnly("nvfp4"))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    made, expected = dict(refit(model, "modelopt:nvfp4")), dict(refit(whole, "modelopt:nvfp4"))
    same = [
        torch.equal(made[name].flatten().view(torch.uint8), one.flatten().view(torch.uint8))
        for name, one in expected.items()
    ]
    return made.keys() == expected.keys() and len(same) == 15 and all(same)


CASES = (joint_scales, refitted)
