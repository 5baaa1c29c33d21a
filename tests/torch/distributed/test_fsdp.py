"""FSDP2: converted models give the bytes of one process, and keep no weight between forward and backward.

# features D6, D7, D9 and D12
"""

import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed import init_device_mesh  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat import recipes  # noqa: E402
from microfloat.errors import InvalidValueError, MicrofloatError, NotSupportedError  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch.distributed import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    low_precision_all_gather,
    precompute_scales,
)
from microfloat.torch.distributed import fsdp as gathering  # noqa: E402
from tests.torch.distributed import joint_cases, quantized_cases  # noqa: E402
from tests.torch.distributed.ranks import With, of, on_gpus, run_ranks  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

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


CHECKPOINTS = ("delayed", "mxfp8")
EVERY = tuple(RECIPES)
Names = tuple[str, ...]


class MLP(nn.Module):
    def __init__(self, width: int = 128, inner: int = 256, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, dtype=dtype)
        self.up = nn.Linear(width, inner, bias=False, dtype=dtype)
        self.down = nn.Linear(inner, width, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(recipe: object = None, seed: int = 1, **options: object) -> nn.Sequential:
    """Two blocks with the same values on every rank."""
    torch.manual_seed(seed)
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


def kind() -> str:
    """The device type on which this process makes tensors."""
    return torch.get_default_device().type


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(model: nn.Module, recipe: object, after: object = None, optimizer: object = None, **options: object) -> list:
    """Outputs and input gradients of two steps, then the weights and buffers that these lead to."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    made = []
    for _ in range(2):
        x = example()
        with mf.autocast(recipe=recipe):
            y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if after is not None:
            after(model)
        made += [y.detach(), x.grad]
    mf.update_scaling(model)
    return made + [whole(value).detach() for value in (*model.parameters(), *model.buffers())]


@functools.cache
def alone(name: str) -> list:
    """What one process makes of a recipe."""
    return train(stack(RECIPES[name]), RECIPES[name])


def same(first: list, second: list) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def every_recipe(rank: int, names: Names = EVERY) -> dict[str, bool]:
    made = {}
    for name in names:
        recipe = RECIPES[name]
        made[name] = same(train(shard(stack(recipe)), recipe), alone(name))
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


def memory_between(rank: int, names: Names = EVERY) -> dict[str, int]:
    """Eight rows, beside four weights of 32768 elements."""
    made = {"bf16": saved_bytes(shard(stack()))}
    for name in names:
        made[name] = saved_bytes(shard(stack(RECIPES[name])))
    fused = stack()
    mf.convert(fused, RECIPES["current"], fuse=True)
    made["fused"] = saved_bytes(shard(fused))
    return made


def low_precision(rank: int, names: Names = EVERY) -> dict[str, tuple[bool, set[str]]]:
    """Training with low-precision gathers against one process, and why weights stayed in high precision."""
    made = {}
    for name in names:
        recipe = RECIPES[name]
        sharded = shard(low_precision_all_gather(stack(recipe)))
        made[name] = same(train(sharded, recipe), alone(name)), reasons(sharded)
    return made


def reasons(model: nn.Module) -> set[str]:
    return {row.reason.partition("gather in high precision: ")[2] for row in mf.explain(model)}


def the_codes(rank: int, names: Names = EVERY) -> dict[str, list[bool]]:
    """Operands gathered for forward and for backward, against the casts of the gathered weight."""
    made = {}
    for name in names:
        model, recipe = stack(RECIPES[name]), RECIPES[name]
        layer, weight = model[0].up, model[0].up.weight.detach().clone()
        shard(low_precision_all_gather(model))
        if reasons(model) != {""}:
            continue
        found: list[bool] = []

        def compare(row: bool, found=found, weight=weight, layer=layer, recipe=recipe) -> None:
            gather = layer.weight.contents
            casts = [recipe.fprop.rhs, None] if row else [None, recipe.dgrad.rhs]
            cast = casts[not row]
            options = {"scale_enc": gather.scale_enc} if cast.is_delayed else {}
            wanted = backends.choose("reference", weight.device).quantize_both(weight, *casts, **options)[not row]
            operand = gather.operand(cast, not row, weight.dtype, gather.scale_enc)
            for name in ("codes", "scale", "tensor_scale"):
                a, b = getattr(operand, name), getattr(wanted, name)
                same = a is b is None or torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
                found.append(same)

        layer.register_forward_hook(lambda module, x, y, compare=compare: compare(True))
        with mf.autocast(recipe=recipe):
            y = model(example())
        layer.register_full_backward_pre_hook(lambda module, dy, compare=compare: compare(False))
        y.sum().backward()
        made[name] = found
    return made


@contextlib.contextmanager
def counted():
    """Bytes that this rank sends in all-gathers, and the elements of its all-reduces."""
    found = {"gathered": 0, "reduced": 0}
    own = {name: getattr(dist, name) for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)}
    reduce = dist.all_reduce

    def counting(name: str):
        def gather(output, part, *arguments, **options):
            found["gathered"] += part.numel() * part.element_size()
            return own[name](output, part, *arguments, **options)

        return gather

    def counting_reduce(tensor, *arguments, **options):
        found["reduced"] += 1
        return reduce(tensor, *arguments, **options)

    with contextlib.ExitStack() as stack:
        for name in own:
            stack.enter_context(mock.patch.object(dist, name, counting(name)))
        stack.enter_context(mock.patch.object(dist, "all_reduce", counting_reduce))
        yield found


def weights_alone(recipe: object) -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(2)))
    if recipe is not None:
        mf.convert(model, recipe)
    return model


def bytes_on_the_wire(rank: int) -> dict[str, tuple[float, int, int]]:
    """Share of bfloat16's bytes that are gathered in a step; all-reduces of a step, and after `precompute_scales`."""
    made, bf16 = {}, 0
    for name in (None, "current", "delayed", "block", "mxfp8", "mxfp4", "nvfp4"):
        model = weights_alone(RECIPES.get(name))
        model = shard(low_precision_all_gather(model) if name else model)
        x, steps = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True), []
        for step in range(2):
            with counted() as before:
                if step:
                    with torch.no_grad():  # as an optimizer, so that what was measured before serves no more
                        for parameter in model.parameters():
                            parameter.mul_(0.75)
                    precompute_scales(model)
            with counted() as found:
                model(x).sum().backward()
            steps.append((found, before))
        if name is None:
            bf16 = steps[0][0]["gathered"]
        else:
            (first, _), (second, before) = steps
            assert first["gathered"] == second["gathered"]
            made[name] = first["gathered"] / bf16, first["reduced"], (before["reduced"], second["reduced"])
    return made


def ways_of_training(rank: int, names: Names = CHECKPOINTS) -> dict[str, bool]:
    """Options of FSDP2 and of the step, each against one process."""
    made = {}
    for name in names:
        recipe = RECIPES[name]
        wanted = alone(name)

        def against(way: str, got: list, wanted: list = wanted, name: str = name) -> None:
            made[f"{name}: {way}"] = same(got, wanted)

        def fresh(recipe=recipe) -> nn.Sequential:
            return low_precision_all_gather(stack(recipe))

        against("kept after forward", train(shard(fresh(), reshard_after_forward=False), recipe))
        against("precomputed", train(shard(fresh()), recipe, after=precompute_scales))
        model = shard(fresh())
        for block in model:
            block.forward = functools.partial(mf.checkpoint, block.forward)
        against("recomputed", train(model, recipe))

        plain = copy.deepcopy(stack(recipe)).float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mixed = shard(low_precision_all_gather(copy.deepcopy(plain)), mp_policy=policy)
        wanted = train(shard(plain, mp_policy=policy), recipe, fused=True)
        against("master weights", train(mixed, recipe, fused=True), wanted)
    return made


def accumulation(rank: int, names: Names = CHECKPOINTS) -> dict[str, bool]:
    """Three microbatches, each a step of delayed scaling, of which the last one reduces gradients and reshards."""
    made = {}
    for name in names:
        recipe, results = RECIPES[name], []
        for model in (stack(recipe), shard(low_precision_all_gather(stack(recipe)))):
            for index in range(3):
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(index == 2)
                    model.set_reshard_after_backward(index == 2)
                with mf.autocast(recipe=recipe):
                    y = model(example(32 + index))
                y.float().square().mean().backward()
            results.append([whole(p.grad) for p in model.parameters()])
        made[name] = same(*results)
    return made


def high_precision_islands(rank: int) -> list[bool]:
    """A weight gathered as codes, read in high precision, and under another dtype."""
    plain, sharded = stack(RECIPES["mxfp8"]), shard(low_precision_all_gather(stack(RECIPES["mxfp8"])))
    made = []
    for model in (plain, sharded):
        x = example()
        with mf.autocast(enabled=False):
            y = model(x)
        y.sum().backward()
        z = model(example().detach())
        with torch.autocast(kind(), torch.float16), torch.no_grad():
            autocast = model(example())
        made.append([y.detach(), x.grad, z.detach(), autocast, *(whole(p.grad) for p in model.parameters())])
    return [torch.equal(a, b) for a, b in zip(*made, strict=True)]


def nan_on_one_rank(rank: int) -> dict[str, bool]:
    made = {}
    for name in ("current", "delayed", "mxfp8", "nvfp4"):
        model = shard(low_precision_all_gather(stack(RECIPES[name])))
        if rank == 1:
            with torch.no_grad():
                model[0].up.weight.to_local()[0, 0] = float("nan")
        with mf.autocast(recipe=RECIPES[name]):
            made[name] = bool(model(example()).isnan().any())
    return made


def uneven_shards(rank: int) -> tuple[bool, set[str]]:
    recipe = RECIPES["current"]
    model = nn.Sequential(MLP(inner=257), MLP(inner=2))
    mf.convert(model, recipe)
    sharded = shard(low_precision_all_gather(copy.deepcopy(model)))
    return same(train(sharded, recipe), train(model, recipe)), reasons(sharded)


def no_rows_on_one_rank(rank: int, names: Names = ("delayed", "current", "mxfp8")) -> dict[tuple, bool]:
    """Gradients beside those of one process, whose mean with zeros has half of them; all that ranks gather together."""
    made = {}
    for name in names:
        for way in ("", "kept", "recomputed"):
            results = []
            for model in (stack(RECIPES[name]), shard(low_precision_all_gather(stack(RECIPES[name])),
                                                      reshard_after_forward=way != "kept")):  # fmt: skip
                if way == "recomputed":
                    for block in model:
                        block.forward = functools.partial(mf.checkpoint, block.forward)
                x = example()
                is_sharded = bool(results)
                with mf.autocast(recipe=RECIPES[name]):
                    y = model(x[: 0 if is_sharded and rank else 64])
                y.sum().backward()
                results.append([whole(p.grad) * (2 if is_sharded else 1) for p in model.parameters()])
            made[name, way] = same(*results)
    return made


def refusals(rank: int) -> list[str]:
    """A recipe that changes after the call, a model that is not sharded after it, and one that was before it."""
    model, made = shard(low_precision_all_gather(stack(RECIPES["mxfp8"]))), []
    assert reasons(low_precision_all_gather(model)) == {""}  # a second call changes nothing
    model[0].up.pin(RECIPES["nvfp4"])
    for one in (model, low_precision_all_gather(stack(RECIPES["mxfp8"]))):
        try:
            one(example())
        except NotSupportedError as error:
            made.append(str(error))
    try:
        low_precision_all_gather(shard(stack(RECIPES["mxfp8"])))
    except InvalidValueError as error:
        made.append(str(error))
    return made


def after_a_refusal(rank: int, names: Names = ("current", "mxfp8")) -> dict[str, bool]:
    """If a step is that of a model which never refused a call, after weights have changed: FSDP2 leaves the layers in
    which a forward raised gathered, and `reshard` lets go what it has gathered. The same of plain layers."""
    made = {}
    for name, recipe in ((None, None), *((name, RECIPES[name]) for name in names)):
        for low in (False, True) if name else (False,):
            results = []
            for refuses in (False, True):
                model = stack(recipe)
                model = shard(low_precision_all_gather(model) if low else model)
                if refuses:
                    try:
                        model(example()[:, :64])
                    except (RuntimeError, MicrofloatError):
                        results.append(True)
                    for module in model.modules():
                        if isinstance(module, FSDPModule):
                            module.reshard()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.5)
                results.append(train(model, recipe))
            wanted, refused, found = results
            made[f"{name}, {low}"] = refused and same(found, wanted)
    return made


def saved(rank: int, names: Names = CHECKPOINTS) -> dict[str, list]:
    """Two steps, a checkpoint, and two more; what the state dict holds."""
    made = {}
    for name in names:
        recipe = RECIPES[name]
        model = shard(low_precision_all_gather(stack(recipe)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        train(model, recipe, optimizer=optimizer)
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        locals_ = [getattr(value, "_local_tensor", value) for value in state["model"].values()]
        dcp.save(state, checkpoint_id=checkpoint_of(name))
        made[name] = [
            {type(value).__name__ for value in locals_}, train(model, recipe, optimizer=optimizer),
            resume(shard(low_precision_all_gather(stack(recipe, seed=5))), name),
        ]  # fmt: skip
    return made


def checkpoint_of(name: str) -> str:
    return os.path.join(os.environ["FSDP_TEST_FOLDER"], name)


def resume(model: nn.Module, name: str) -> list:
    """Two steps of another model after it has loaded the checkpoint."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=checkpoint_of(name), no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return train(model, RECIPES[name], optimizer=optimizer)


def resumed_elsewhere(rank: int) -> dict[str, list]:
    """By other numbers of ranks than have written it."""
    return {name: resume(shard(low_precision_all_gather(stack(RECIPES[name], seed=5))), name) for name in CHECKPOINTS}


def assigned(rank: int) -> bool:
    """A state dict that takes the place of the parameters' tensors."""
    recipe = RECIPES["mxfp8"]
    model, other = (shard(low_precision_all_gather(stack(recipe, seed=seed))) for seed in (1, 5))
    other.load_state_dict(model.state_dict(), assign=True)
    with counted() as found:
        results = [one(example()).detach() for one in (model, other)]
    return same(results[:1], results[1:]) and found["gathered"] < 300_000


def replicated_shards(rank: int) -> dict[str, bool]:
    """HSDP: two groups of two ranks."""
    mesh = init_device_mesh(kind(), (2, 2), mesh_dim_names=("replicate", "shard"))
    made = {}
    for name, recipe in RECIPES.items():
        model = stack(recipe)
        sharded = shard(low_precision_all_gather(copy.deepcopy(model)), mesh=mesh)
        made[name] = same(train(sharded, recipe, after=precompute_scales), train(model, recipe))
    return made


def beside_tensor_parallel(rank: int, names: Names = ("delayed", "current", "mxfp8", "nvfp4")) -> dict[str, tuple]:
    """Both gathers of weights that a plan has cut, against the plan alone; bytes saved and gathered; the reasons."""
    mesh, made = init_device_mesh(kind(), (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp")), {}

    def cut(seed: int = 1) -> nn.Sequential:
        model = stack(RECIPES[name], seed=seed)
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    for name in names:
        recipe, found = RECIPES[name], []
        for model in (cut(), shard(cut(), mesh=mesh["dp"]), shard(low_precision_all_gather(cut()), mesh=mesh["dp"])):
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)  # parameters of two meshes
            results = train(model, recipe, precompute_scales if len(found) == 2 else None, optimizer)
            with counted() as sent, mf.autocast(enabled=False):
                results.append(model(example().detach()).detach())
            with counted() as sent:
                saved = saved_bytes(model)
            mf.update_scaling(model)
            other = shard(low_precision_all_gather(cut(seed=5)), mesh=mesh["dp"]) if found else cut(seed=5)
            other.load_state_dict(model.state_dict())
            results.append(other(example().detach()).detach())
            found.append((results, saved, sent["gathered"], reasons(model)))
        (wanted, *_), (plain, saved, gathered, _), (low, _, codes, why) = found
        made[name] = same(plain, wanted), same(low, wanted), saved, codes / gathered, why
    return made


def fewer_ranks(rank: int) -> str:
    """A gather in codes of weights that FSDP2 would keep on two of four ranks after forward."""
    model = shard(low_precision_all_gather(stack(RECIPES["mxfp8"])), reshard_after_forward=2)
    try:
        model(example())
    except NotSupportedError as error:
        return str(error)
    return ""


def compiled(rank: int) -> dict[str, bool]:
    """Blocks that are compiled, whose Linears run in eager mode between graphs."""
    made = {}
    for name in CHECKPOINTS:
        recipe, sharded = RECIPES[name], shard(low_precision_all_gather(stack(RECIPES[name])))
        for block in sharded:
            block.compile(backend="aot_eager")
        made[name] = same(train(sharded, recipe), alone(name))
    return made


def compiled_beside_a_plan(
    rank: int,
    names: Names = CHECKPOINTS,
    gathers: tuple[bool, ...] = (False, True),
    backend: str = "aot_eager",
    blocks: int = 2,
) -> dict[tuple, bool]:
    """Blocks under tensor parallelism, sequence parallelism and FSDP2 together, compiled, against eager mode."""
    mesh, made = init_device_mesh(kind(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")), {}
    plan = {
        "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0)),
    }  # fmt: skip

    def cut(recipe: object, gathers_codes: bool) -> nn.Sequential:
        model = nn.Sequential(*list(stack(recipe, width=256, inner=512))[:blocks])
        for block in model:
            parallelize_module(block, mesh["tp"], plan)
        model = low_precision_all_gather(model) if gathers_codes else model
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        return model

    def steps(model: nn.Sequential, recipe: object) -> list[torch.Tensor]:
        found = []
        for step in range(2):
            x = torch.randn(128, 256, generator=torch.Generator(kind()).manual_seed(step + 2 * rank)).bfloat16()
            with mf.autocast(recipe=recipe):
                y = model(x.requires_grad_())
            y.float().square().mean().backward()
            found += [y.detach(), x.grad]
        return found + [whole(p.grad) for p in model.parameters()]

    for name in names:
        for gathers_codes in gathers[: mesh["dp"].size()]:  # one rank alone has no codes to gather
            eager, model = (cut(RECIPES[name], gathers_codes) for _ in range(2))
            for block in model:
                block.compile(backend=backend)
            made[name, gathers_codes] = same(steps(model, RECIPES[name]), steps(eager, RECIPES[name]))
    return made


def compiled_beside_a_plan_by_every_recipe(rank: int) -> dict[tuple, bool]:
    return compiled_beside_a_plan(rank, EVERY)


def kept_amaxes_of_a_plan(rank: int) -> dict[str, list]:
    """Amaxes that `precompute_scales` keeps of weights cut by a plan, whose largest value another rank has."""
    mesh, made = init_device_mesh(kind(), (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp")), {}
    for name in ("current", "nvfp4"):
        model = stack(RECIPES[name])
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        sharded = shard(low_precision_all_gather(model), mesh=mesh["dp"])
        sharded(example())  # tells the shards of their ranks
        sharded.reshard()
        with torch.no_grad():
            for value, layer in enumerate((sharded[0].up, sharded[0].down), 5):
                weight = layer.weight
                weight.mul_(0.5)
                if rank == dist.get_world_size() - 1:
                    weight.to_local()[-1, -1] = value
        with counted() as found:
            precompute_scales(sharded)
        layers = sharded[0].up, sharded[0].down
        made[name] = [found["reduced"], *(float(vars(layer)["_fsdp_state"].amax) for layer in layers)]
    return made


def fused_modules(rank: int) -> dict[str, list]:
    """Norms and activations fused with Linears, and three Linears as one product; both gathers."""
    made = {}
    for name in ("delayed", "current", "mxfp8", "nvfp4"):
        recipe, options = RECIPES[name], {"dtype": torch.bfloat16}
        torch.manual_seed(1)
        first = mf.LayerNormLinear(128, 256, split={"q": 128, "k": 64, "v": 64}, **options)
        mlp = mf.LayerNormMLP(256, 128, activation="swiglu", **options)
        block = nn.Sequential(first, mlp, mf.LayerNormLinear(256, 128, **options))
        model = nn.Sequential(block, copy.deepcopy(block))
        mf.convert(model, recipe)
        default, low = shard(copy.deepcopy(model)), shard(low_precision_all_gather(copy.deepcopy(model)))
        wanted = train(model, recipe)
        made[name] = [same(train(one, recipe), wanted) for one in (default, low)], reasons(low)
    return made


def returned_biases(rank: int) -> dict[str, list[bool]]:
    """Whether modules of which one part is wrapped alone return the bias of the module that is not wrapped, and its
    gradient is this rank's part of the mean over the ranks."""
    mesh, made, returned = init_device_mesh(kind(), (dist.get_world_size(),)), {}, mf.LayerOptions(return_bias=True)
    for child, make in {
        "down_proj": lambda: mf.LayerNormMLP(32, 64, options=returned, recipe="fp8_current"),
        "o_proj": lambda: mf.MultiheadAttention(32, 4, bias=True, options=returned, recipe="fp8_current"),
        "q": lambda: mf.LayerNormLinear(32, 8, split={"q": 4, "k": 4}, options=returned, recipe="fp8_current"),
    }.items():
        torch.manual_seed(1)
        whole, x = make(), torch.randn(2, 4, 32)
        sharded = copy.deepcopy(whole)
        fully_shard(getattr(sharded, child), mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        y, bias = sharded(x)
        made[child] = [torch.equal(bias, whole(x)[1])]
        (y + bias).sum().backward()
        gradient = getattr(sharded, child).bias.grad.to_local()
        made[child].append(bool((gradient == x[..., 0].numel()).all()))
    mesh = init_device_mesh(kind(), (dist.get_world_size(), 1), mesh_dim_names=("dp", "tp"))
    layer = mf.Linear(32, 32, return_bias=True, recipe="fp8_current")
    wanted = layer.bias.detach().clone()
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
    y, bias = layer(x)
    there = bias.untyped_storage().nbytes() > 0
    made["beside tensor parallelism"] = [there and torch.equal(bias, wanted)]
    if there:
        (y + bias).sum().backward()
        gradient = layer.bias.grad.to_local()
        made["beside tensor parallelism"].append(bool((gradient == x[..., 0].numel()).all()))
    return made


def stored_bytes(rank: int) -> dict[str, tuple[int, int]]:
    """Bytes gathered in a step with weights that exist as codes, and those of the shards; kept, and of the weights."""
    made = {}
    for name in ("current", "block", "mxfp8", "mxfp4", "nvfp4"):
        model = shard(quantized_cases.stored(name, **quantized_cases.sizes(name))[:1])
        own = sum(part.numel() * part.element_size() for part in quantized_cases.parts_of(model).values())
        x = torch.randn(8, model[0].in_features, dtype=torch.bfloat16, requires_grad=True)
        with counted() as found:
            model(x).sum().backward()
        made[name] = found["gathered"], 2 * own
    return made


CASES = (
    every_recipe, memory_between, beside_tensor_parallel, low_precision, the_codes, bytes_on_the_wire,
    ways_of_training, accumulation, high_precision_islands, nan_on_one_rank, no_rows_on_one_rank, uneven_shards,
    refusals, after_a_refusal, saved, assigned, compiled_beside_a_plan, stored_bytes, returned_biases,
    *quantized_cases.CASES, *joint_cases.CASES,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    path = str(tmp_path_factory.mktemp("fsdp"))
    with mock.patch.dict(os.environ, FSDP_TEST_FOLDER=path):  # which the processes have too
        yield path


# What `make test` takes of the recipes: a case of each way through FSDP2, which are a state (delayed), rows and tiles
# that shards cut (row, block), scales of blocks alone (mxfp8), two levels (nvfp4) and noise. `the_codes` gathers the
# codes of every format, and ways of training that are no matter of the recipe take the one with most state.
SOME = {
    every_recipe: {"names": ("delayed",)},
    memory_between: {"names": ("delayed", "mxfp8", "nvfp4")},
    low_precision: {"names": ("row", "block", "nvfp4")},
    ways_of_training: {"names": ("delayed",)},
    accumulation: {"names": ("delayed",)},
    no_rows_on_one_rank: {"names": ("delayed",)},
    saved: {"names": ("delayed",)},
    joint_cases.joint_scales: {"ways": ("each", "gathered", "columns")},
    quantized_cases.stored_weights: {"names": ("delayed", "row", "block", "noisy")},
    quantized_cases.stored_and_saved: {"names": ("delayed",)},
    quantized_cases.frozen_bases: {"names": ("nvfp4", "nvfp4 dequantized")},
}
# What `make test` leaves out: combinations of what the other cases check one by one.
LEFT = (
    compiled_beside_a_plan, beside_tensor_parallel, after_a_refusal, quantized_cases.stored_ways,
    quantized_cases.stored_unevenly, quantized_cases.fused_and_stored, quantized_cases.experts,
)  # fmt: skip


WAYS = [False, pytest.param(True, marks=pytest.mark.slow("further recipes across ranks"))]


# Tests of the cases that are left out.
def of_every_recipe(test):
    alone = pytest.mark.parametrize("ranks", [True], ids=["every recipe"], indirect=True)
    return pytest.mark.slow("further combinations across ranks")(alone(test))


@pytest.fixture(scope="module", params=WAYS, ids=["some recipes", "every recipe"])
def ranks(request, folder) -> list[dict]:
    some = [With(case, **SOME.get(case, {})) for case in CASES if case not in LEFT]
    cases = CASES if request.param else some
    return run_ranks(cases, f"{folder}/store of {len(RECIPES) if request.param else 'some'}")


def test_every_recipe_trains_as_in_one_process(ranks) -> None:
    for made in of(ranks, every_recipe):
        assert made.keys() >= set(SOME[every_recipe]["names"])
        assert set(made.values()) == {True}, made


def test_no_weight_is_kept_between_forward_and_backward(ranks) -> None:
    for made in of(ranks, memory_between):
        assert max(made.values()) - made["bf16"] < 4 * 32768 / 2 / 2  # half of the weights' operands in 4 bits


def test_gathered_codes_train_as_in_one_process(ranks) -> None:
    row = "fp8_row has a scale for each row, which shards cut when it is transposed"
    blocks = "shards of 64 rows are no whole blocks of 128 (fp8_128x128)"
    for made in of(ranks, low_precision):
        assert made.keys() >= set(SOME[low_precision]["names"])
        wanted = {name: (True, {""}) for name in RECIPES} | {"row": (True, {row}), "block": (True, {"", blocks})}
        assert made == {name: wanted[name] for name in made}


def test_gathered_codes_are_those_of_the_gathered_weight(ranks) -> None:
    for made in of(ranks, the_codes):
        assert set(made) == set(RECIPES) - {"row", "block"}
        assert all(found and all(found) for found in made.values())


def test_a_returned_bias_of_a_wrapped_part_is_there_when_its_call_has_ended(ranks) -> None:
    for made in of(ranks, returned_biases):
        assert set(made) == {"down_proj", "o_proj", "q", "beside tensor parallelism"}
        assert all(all(found) and len(found) == 2 for found in made.values()), made


def test_weights_of_several_shards_share_the_scale_that_is_served(ranks) -> None:
    for made in of(ranks, joint_cases.joint_scales):
        assert len(made) in (6, 10)  # ways of two configs
        assert not [way for way, is_same in made.items() if not is_same]


def test_a_sharded_trainer_gives_a_server_the_tensors_of_a_whole_one(ranks) -> None:
    assert of(ranks, joint_cases.refitted) == [True, True]


def test_bytes_of_the_gather(ranks) -> None:
    for made in of(ranks, bytes_on_the_wire):
        shares = {name: share for name, (share, *_) in made.items()}
        assert shares == pytest.approx({
            "current": 1 / 2, "delayed": 1 / 2, "block": 1 / 2 + 1 / 8192, "mxfp8": 33 / 64, "mxfp4": 17 / 64,
            "nvfp4": 1 / 4 + 1 / 512,
        })  # fmt: skip
        # One all-reduce for each weight and step, or one for all.
        counts = {name: (first, second) for name, (_, first, second) in made.items()}
        assert counts["current"] == counts["nvfp4"] == (2, (1, 0))
        assert counts["mxfp8"] == counts["block"] == (0, (0, 0))


def test_ways_of_training(ranks) -> None:
    for made in of(ranks, ways_of_training):
        assert len(made) in (4, 8)  # of each recipe
        assert not [way for way, is_same in made.items() if not is_same]


def test_gradient_accumulation(ranks) -> None:
    for made in of(ranks, accumulation):
        assert made
        assert set(made.values()) == {True}, made


def check_beside_tensor_parallel(ranks: list[dict], parts: int) -> None:
    for made in of(ranks, beside_tensor_parallel):
        for name, (default, low, saved, share, why) in made.items():
            assert (default, low, why) == (True, True, {""}), name
            assert saved < 2 * 4 * 32768 / parts / 2  # half of this rank's part of the weights
            assert share < 0.55


@of_every_recipe
def test_weights_that_a_plan_has_cut_are_gathered_in_either_precision(ranks) -> None:
    """features D4 and D6: a plan over groups of one rank, and FSDP2 over two."""
    check_beside_tensor_parallel(ranks, 1)


@of_every_recipe
def test_compiled_blocks_of_a_plan_and_shards(ranks) -> None:
    """features D4, D5 and D6"""
    for made in of(ranks, compiled_beside_a_plan):
        assert made
        assert all(made.values()), made


def test_shared_weights_stay_shared() -> None:
    embedding, head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
    model = nn.Sequential(embedding, head)
    head.weight = embedding.weight
    mf.convert(model, RECIPES["mxfp8"])
    low_precision_all_gather(model)
    assert model[1].weight is embedding.weight
    assert reasons(model) == {"other modules share it"}


def test_one_graph_over_gathered_weights_is_refused_in_words() -> None:
    layer = low_precision_all_gather(mf.Linear(32, 32, recipe=RECIPES["mxfp8"]))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="low_precision_all_gather gathers as codes"):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(2, 32))


def test_shards_on_fewer_ranks_after_forward_are_refused() -> None:
    """`reshard_after_forward=2` of four ranks, which FSDP2 does with values alone."""
    layer = low_precision_all_gather(mf.Linear(32, 32, recipe=RECIPES["mxfp8"]))
    owner = SimpleNamespace(
        post_forward_mesh_info=SimpleNamespace(shard_mesh_size=2), mesh_info=SimpleNamespace(shard_mesh_size=4)
    )
    layer.register_load_state_dict_post_hook(lambda *arguments: owner)
    with pytest.raises(NotSupportedError, match="reshard_after_forward: got 2 ranks"):
        layer.weight.fsdp_pre_all_gather(None, layer.weight.size(), layer.weight.stride(), layer, None)
    owner.post_forward_mesh_info = owner.mesh_info
    gathering.refuse_fewer_ranks(layer)


def test_other_reads_of_a_gathered_weight_gather_its_values(ranks) -> None:
    for made in of(ranks, high_precision_islands):
        assert all(made)


def test_nan_on_one_rank_shows_on_all(ranks) -> None:
    for made in of(ranks, nan_on_one_rank):
        assert all(made.values())


def test_a_rank_without_rows_takes_part_in_every_gather(ranks) -> None:
    for made in of(ranks, no_rows_on_one_rank):
        assert set(made.values()) == {True}, made


def test_uneven_shards_are_gathered_in_high_precision(ranks) -> None:
    for is_same, why in of(ranks, uneven_shards):
        assert is_same
        assert "shards of its 257 rows are uneven" in why


def test_refusals(ranks) -> None:
    for changed, not_sharded, sharded_before in of(ranks, refusals):
        assert "low_precision_all_gather: got another recipe for 0.up (NVFP4BlockScaling)" in changed
        assert "weight: got one that low_precision_all_gather has prepared" in not_sharded
        assert "(fully_shard came before low_precision_all_gather)" in sharded_before


@of_every_recipe
def test_a_model_goes_on_after_a_call_that_it_has_refused(ranks) -> None:
    for made in of(ranks, after_a_refusal):
        assert made == dict.fromkeys(made, True)
        assert len(made) == 5  # as plain layers, and each recipe gathered in either way


def test_a_model_without_a_weight_to_gather_as_codes_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    order = r"Call convert, low_precision_all_gather, fully_shard, in this order\."
    for one, why in (
        (model, "it has no Linear of microfloat"), (nn.ReLU(), "it has no Linear of microfloat"),
        (mf.Linear(32, 32), r"no recipe is pinned to it \(convert pins one\)"),
    ):  # fmt: skip
        with pytest.raises(InvalidValueError, match=rf"^model: got a {type(one).__name__} without .*{why}.*{order}"):
            low_precision_all_gather(one)
    mf.convert(model, RECIPES["mxfp8"])
    low_precision_all_gather(model)
    with mf.quantized_model_init(recipe=RECIPES["mxfp8"]):
        low_precision_all_gather(mf.Linear(32, 32))  # codes, which need no preparation


def test_checkpoints_hold_plain_tensors_and_resume_bit_for_bit(ranks) -> None:
    for made in of(ranks, saved):
        assert made
        for kinds, went_on, resumed in made.values():
            assert kinds == {"Tensor"}
            assert same(resumed, went_on)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_checkpoint_of_two_ranks_resumes_on_one(ranks, folder) -> None:
    """One process, whose gradients are the same, without any process group."""
    written = of(ranks, saved)[0]
    assert written
    for name in written:
        assert same(resume(stack(RECIPES[name], seed=5), name), written[name][1])


def test_an_assigned_state_dict_is_gathered_in_low_precision_too(ranks) -> None:
    assert of(ranks, assigned) == [True, True]


OF_CODES = [case for case in quantized_cases.CASES if case is not quantized_cases.stored_and_refused]


@pytest.mark.parametrize("case", [case for case in OF_CODES if case not in LEFT], ids=lambda case: case.__name__)
def test_weights_that_exist_as_codes_train_load_and_save_as_in_one_process(ranks, case) -> None:
    """features D6"""
    for made in of(ranks, case):
        assert made
        assert set(made.values()) == {True}, made


@of_every_recipe
@pytest.mark.parametrize("case", [case for case in OF_CODES if case in LEFT], ids=lambda case: case.__name__)
def test_further_ways_of_weights_that_exist_as_codes(ranks, case) -> None:
    test_weights_that_exist_as_codes_train_load_and_save_as_in_one_process(ranks, case)


def test_weights_that_exist_as_codes_are_gathered_as_codes(ranks) -> None:
    for made in of(ranks, stored_bytes):
        assert all(sent == own for sent, own in made.values()), made


def test_shards_of_codes_say_what_they_refuse(ranks) -> None:
    for made in of(ranks, quantized_cases.stored_and_refused):
        assert "parts of 64 rows of a quantized parameter (fp8_128x128)" in made["tiles"]
        assert "multiples of 128 rows, so that no tile is cut. Where fully_shard asked" in made["tiles"]
        assert "a shard whose ranks are not known yet" in made["unknown"]
        assert "a weight of shape (256, 128) that fully_shard has cut and that has one scale for" in made["steps"]
        assert "call low_precision_all_gather before fully_shard" in made["steps"]
        assert "give it foreach=False, and no fused=True" in made["foreach"]
        assert "16 of the 128 rows of a shard under one scale for all ranks" in made["part"]
        assert "Where full_tensor or a full state dict did: save shards" in made["whole"]


@pytest.mark.slow("starts seven more processes")
@pytest.mark.parametrize("ranks", [True], ids=["every recipe"], indirect=True)
def test_four_ranks(ranks, folder) -> None:
    """Two replicas of two shards; checkpoints of four ranks on two and on one; compiled blocks, and fused modules."""
    cases = (
        replicated_shards, beside_tensor_parallel, fewer_ranks, saved, kept_amaxes_of_a_plan,
        compiled_beside_a_plan_by_every_recipe,
    )  # fmt: skip
    four = run_ranks(cases, f"{folder}/four", world=4)
    for made in of(four, kept_amaxes_of_a_plan):
        # features D7: reduced once over the ranks of the shards, and once over those of the plan.
        assert made == {"current": [2, 5.0, 6.0], "nvfp4": [2, 5.0, 6.0]}
    for made in of(four, compiled_beside_a_plan_by_every_recipe):
        assert len(made) == 2 * len(RECIPES)
        assert all(made.values()), made
    check_beside_tensor_parallel(four, 2)
    for message in of(four, fewer_ranks):
        assert "reshard_after_forward: got 2 ranks for 0.up" in message
    for made in of(four, replicated_shards):
        assert made == dict.fromkeys(RECIPES, True)
    written = of(four, saved)[0]
    for world in (2, 1):
        others = run_ranks((resumed_elsewhere, compiled, fused_modules), f"{folder}/{world}", world=world)
        for made in of(others, resumed_elsewhere):
            assert all(same(made[name], written[name][1]) for name in CHECKPOINTS)
        assert of(others, compiled) == [dict.fromkeys(CHECKPOINTS, True)] * world
        for made in of(others, fused_modules):
            assert all(is_same == [True, True] for is_same, _ in made.values())
            assert world == 1 or made["mxfp8"][1] == {"", "it is one product with other weights"}


@pytest.mark.slow("starts seven more processes")
def test_four_ranks_with_weights_that_exist_as_codes(folder) -> None:
    """Two replicas of two shards; checkpoints of four ranks on two and on one; compiled layers."""
    cases = *quantized_cases.CASES, quantized_cases.replicas_of_shards
    four = run_ranks(cases, f"{folder}/four of codes", world=4)
    for case in {*cases} - {quantized_cases.stored_and_refused}:
        assert all(set(made.values()) == {True} for made in of(four, case)), case.__name__
    for made in of(four, quantized_cases.stored_and_refused):
        assert "reshard_after_forward: got 2 ranks" in made["fewer"]
    cases = quantized_cases.stored_and_resumed, quantized_cases.compiled_stored, quantized_cases.stored_weights
    for world in (2, 1):
        others = run_ranks(cases, f"{folder}/{world} of codes", world=world)
        for case in cases:
            assert all(set(made.values()) == {True} for made in of(others, case)), case.__name__


# Cases that run in processes of their own through NCCL, the most valuable first, and what checks their results: a rank
# that fails takes the rest of its group along, and no other one.
GPU_GROUPS = {
    "gathers": {
        every_recipe: test_every_recipe_trains_as_in_one_process,
        low_precision: test_gathered_codes_train_as_in_one_process,
        the_codes: test_gathered_codes_are_those_of_the_gathered_weight, bytes_on_the_wire: test_bytes_of_the_gather,
    },
    "stored": {
        quantized_cases.stored_weights: None, stored_bytes: test_weights_that_exist_as_codes_are_gathered_as_codes,
        quantized_cases.frozen_bases: None, quantized_cases.experts: None,
    },
    "stored_unevenly": {quantized_cases.stored_unevenly: None},
    "ways": {
        ways_of_training: test_ways_of_training, accumulation: test_gradient_accumulation,
        high_precision_islands: test_other_reads_of_a_gathered_weight_gather_its_values,
        uneven_shards: test_uneven_shards_are_gathered_in_high_precision,
    },
    "edges": {
        nan_on_one_rank: test_nan_on_one_rank_shows_on_all,
        no_rows_on_one_rank: test_a_rank_without_rows_takes_part_in_every_gather,
        after_a_refusal: test_a_model_goes_on_after_a_call_that_it_has_refused,
        saved: test_checkpoints_hold_plain_tensors_and_resume_bit_for_bit,
        assigned: test_an_assigned_state_dict_is_gathered_in_low_precision_too,
    },
    "stored_elsewhere": {
        quantized_cases.stored_ways: None, quantized_cases.stored_and_saved: None,
        quantized_cases.stored_from_values: None, quantized_cases.from_meta: None,
        quantized_cases.values_of_shards: None, quantized_cases.fused_and_stored: None,
        quantized_cases.stored_and_refused: test_shards_of_codes_say_what_they_refuse,
    },
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("group", GPU_GROUPS)
def test_ranks_on_gpus(folder, tmp_path, group) -> None:
    """The same through NCCL."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, sees {torch.cuda.device_count()}")
    cases = GPU_GROUPS[group]
    made = run_ranks((on_gpus, *cases), str(tmp_path / "store"), backend="nccl")
    for case, check in cases.items():
        if check is None:
            test_weights_that_exist_as_codes_train_load_and_save_as_in_one_process(made, case)
        else:
            check(made)


def test_groups_on_gpus_have_every_case_of_weights_that_exist_as_codes() -> None:
    grouped = [case for cases in GPU_GROUPS.values() for case in cases]
    assert len(grouped) == len(set(grouped))
    assert {*quantized_cases.CASES} <= {*grouped}


def test_q_and_k_are_one_product_under_fsdp1_too() -> None:
    """Which gives a call views of its flat parameter: each had a product, and a scale of the tensor, of its own."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    of_one = {"sharding_strategy": ShardingStrategy.NO_SHARD, "device_id": torch.device("cpu")}
    module = mf.LayerNormLinear(32, 48, split={"q": 32, "k": 16}, dtype=torch.bfloat16, recipe="fp8_current")
    with torch.no_grad():
        module.k.weight.mul_(3)
    x, made = torch.randn(16, 32, dtype=torch.bfloat16), []
    with world_of_one():
        for wraps in (False, True):
            own = copy.deepcopy(module)
            model = nn.Sequential(own)
            y = (FullyShardedDataParallel(model, use_orig_params=True, **of_one) if wraps else model)(x)
            y.float().square().sum().backward()
            made.append([y, *(parameter.grad for parameter in own.parameters())])
    for alone, sharded in zip(*made, strict=True):
        assert torch.equal(alone, sharded)
