"""Cases of tests/torch/distributed/test_fsdp.py whose parameters exist as codes only, before FSDP2 shards them."""

import copy
import functools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import microfloat.torch as mf
from microfloat import recipes
from microfloat.errors import MicrofloatError
from microfloat.recipes import Cast, Gemm, WeightOnly

STORED = {
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "row": recipes.Float8RowScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "noisy": recipes.CustomRecipe(
        Gemm(Cast("nvfp4"), Cast("nvfp4", rounding="stochastic")), Gemm(None, None), Gemm(None, None)
    ),
}
WIDTH, INNER = 128, 256
Named = dict[str, torch.Tensor]
Names = tuple[str, ...]


def stored(
    name: str, seed: int = 1, inner: int = INNER, width: int = WIDTH, dtype: torch.dtype = torch.bfloat16
) -> nn.Sequential:
    """Two Linears whose weights are codes from the start, with the same values on every rank.

    Those with one scale for all ranks are frozen, beside biases that train.
    """
    torch.manual_seed(seed)
    recipe = STORED[name]
    inner = max(inner, width) if name == "block" else inner
    with mf.quantized_model_init(recipe=recipe):
        return frozen(nn.Sequential(
            mf.Linear(width, inner, dtype=dtype, recipe=recipe), nn.ReLU(),
            mf.Linear(inner, width, dtype=dtype, recipe=recipe),
        ))  # fmt: skip


def frozen(model: nn.Module) -> nn.Module:
    """The model, whose weights under one scale for all ranks do not train."""
    for parameter in model.parameters():
        if isinstance(parameter, mf.QuantizedTensor) and parameter.upper.dim() == 0:
            parameter.requires_grad_(False)
    return model


def shard(model: nn.Module, **options: object) -> nn.Module:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def example(width: int = WIDTH) -> torch.Tensor:
    """The same values on every rank, so that the mean of all gradients is that of one."""
    return torch.randn(32, width, generator=torch.Generator(torch.get_default_device()).manual_seed(2)).bfloat16()


def train(model: nn.Module, name: str, make: object = torch.optim.AdamW, **options: object) -> list[torch.Tensor]:
    """Outputs of three steps. On GPUs torch's optimizers would take DTensors together (`foreach`)."""
    optimizer, made = make(model.parameters(), lr=0.01, foreach=False, **options), []
    torch.manual_seed(3)  # for noise
    for _ in range(3):
        with mf.autocast(recipe=STORED[name]):
            y = model(example(model[0].in_features))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        made.append(y.detach())
    return made


def parts_of(model: nn.Module) -> Named:
    """Bytes of every parameter; of this rank's shard, where there is one, with the rows that it has."""
    made = {}
    for key, value in model.named_parameters():
        local = getattr(value, "_local_tensor", value).detach()
        parts = local.parts() if isinstance(local, mf.QuantizedTensor) else {"": local}
        made |= {f"{key} {part}": tensor.clone() for part, tensor in parts.items()}
    return made


def rows_of(whole: Named, model: nn.Module, mesh: object = None) -> Named:
    """Those rows of a single process's parts that this rank's shard must hold."""
    made, expected = {}, parts_of(model)
    rank = dist.get_rank() if mesh is None else mesh.get_local_rank()
    ranks = dist.get_world_size() if mesh is None else mesh.size()
    for key, tensor in whole.items():
        chunks = tensor.chunk(ranks) if tensor.dim() else (tensor,) * ranks
        made[key] = chunks[rank] if rank < len(chunks) else tensor[:0]
        if tensor.dim() == 0 and not len(expected.get(key.replace("tensor_scale", "codes").replace("scale", "codes"))):
            made[key] = expected[key]  # nothing is under this scale
    return made


def same(one: Named, other: Named) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor

    return one.keys() == other.keys() and all(torch.equal(raw(one[key]), raw(other[key])) for key in one)


@functools.cache
def alone(name: str, **options: object) -> tuple[list[torch.Tensor], Named]:
    """What one process makes of it."""
    model = stored(name, **options)
    return train(model, name), parts_of(model)


def equal(model: nn.Module, wanted: tuple[list[torch.Tensor], Named], outputs: list, mesh: object = None) -> bool:
    ys, whole = wanted
    ours, theirs = parts_of(model), rows_of(whole, model, mesh)
    return all(torch.equal(a, b) for a, b in zip(outputs, ys, strict=True)) and same(ours, theirs)


def sizes(name: str) -> dict[str, int]:
    """Rows that every rank has whole tiles of."""
    return {"width": 128 * dist.get_world_size()} if name == "block" else {}


def stored_weights(rank: int, names: Names = tuple(STORED)) -> dict[str, bool]:
    """Three steps of AdamW on codes, against one process, byte by byte."""
    made = {}
    for name in names:
        model = shard(stored(name, **sizes(name)))
        outputs = train(model, name)
        made[name] = equal(model, alone(name, **sizes(name)), outputs)
    return made


WAYS = ("kept after forward", "sgd")


def stored_ways(rank: int, names: Names = ("row", "mxfp8", "nvfp4"), ways: Names = WAYS) -> dict[str, bool]:
    """Options of FSDP2 and of optimizers, each against one process."""
    made = {}
    sgd = functools.partial(torch.optim.SGD, momentum=0.9, weight_decay=0.1)
    for name in names:
        for way, make, options in (
            ("kept after forward", torch.optim.AdamW, {"reshard_after_forward": False}), ("sgd", sgd, {}),
        ):  # fmt: skip
            if way not in ways:
                continue
            plain, model = stored(name), shard(stored(name), **options)
            wanted = train(plain, name, make), parts_of(plain)
            made[f"{name}: {way}"] = equal(model, wanted, train(model, name, make))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        master, results = stored(name, dtype=torch.float32), []
        for one in (copy.deepcopy(master).bfloat16(), shard(master, mp_policy=policy)):
            y = one(example())
            y.float().square().mean().backward()
            results.append([y, *(whole(p.grad).float() for p in one.parameters() if p.requires_grad)])
        made[f"{name}: policy"] = all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        recomputed = shard(stored(name))
        for layer in (recomputed[0], recomputed[2]):
            layer.forward = functools.partial(mf.checkpoint, layer.forward)
        made[f"{name}: recomputed"] = equal(recomputed, alone(name), train(recomputed, name))
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


UNEVEN = ("delayed", "current", "row", "mxfp8", "mxfp4", "nvfp4", "noisy")


def stored_unevenly(rank: int, names: Names = UNEVEN) -> dict[tuple, bool]:
    """Shards of which the last ones are short or empty."""
    made = {}
    ranks = dist.get_world_size()
    for name in names:
        for inner in (16 * ranks * 4 - 1, 1) if "nv" in name or name == "noisy" else (257, 1):
            model = shard(stored(name, inner=inner))
            made[name, inner] = equal(model, alone(name, inner=inner), train(model, name))
    torch.manual_seed(1)
    with mf.quantized_model_init(recipe="mxfp8"):  # whose shard is all that its gather has to send
        plain = nn.Sequential(mf.Linear(WIDTH, 2 * ranks - 1, bias=False, dtype=torch.bfloat16, recipe="mxfp8"))
    wanted = plain(example()).detach()
    made["alone"] = torch.equal(shard(plain)(example()).detach(), wanted)
    return made


def said(function: object) -> str:
    try:
        function()
    except MicrofloatError as error:
        return str(error)
    return ""


def stored_and_refused(rank: int) -> dict[str, str]:
    """What shards of codes cannot do says why, on every rank."""
    world = dist.get_world_size()
    model = shard(stored("current"))
    made = {
        "tiles": said(lambda: shard(stored("block", width=64 * world))),
        "unknown": said(lambda: model[0].weight.detach().zero_()),
        "steps": said(lambda: model[0].weight.detach().mul_(0.5)),
        "foreach": said(lambda: torch._foreach_mul_([shard(stored("mxfp8"))[0].weight.detach()], 0.5)),
    }
    model(example())
    model.reshard()
    made["part"] = said(lambda: model[0].weight.detach().to_local()[:16].zero_())
    made["whole"] = said(lambda: model[0].weight.full_tensor())
    if world > 2:
        made["fewer"] = said(lambda: shard(stored("mxfp8"), reshard_after_forward=2)(example()))
    return made


def checkpoint_of(name: str) -> str:
    return os.path.join(os.environ["FSDP_TEST_FOLDER"], f"stored {name}")


SAVED = ("delayed", "current", "mxfp8", "nvfp4")


def stored_and_saved(rank: int, names: Names = SAVED) -> dict[str, bool]:
    """A checkpoint of codes, written by these ranks and read again by them."""
    made = {}
    for name in names:
        model = shard(stored(name))
        train(model, name)
        mf.update_scaling(model)
        dcp.save({"model": model.state_dict()}, checkpoint_id=checkpoint_of(name))
        made[name] = bool(loaded(shard(stored(name, seed=5)), name)[0]) and same(
            parts_of(model), parts_of(loaded(shard(stored(name, seed=5)), name)[1])
        )
    return made


def loaded(model: nn.Module, name: str) -> tuple[bool, nn.Module]:
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=checkpoint_of(name), no_dist=not dist.is_initialized())
    model.load_state_dict(state["model"])
    return True, model


def stored_and_resumed(rank: int) -> dict[str, bool]:
    """The checkpoint of another number of ranks, against one process that has trained as those did."""
    made = {}
    for name in SAVED:
        _, model = loaded(shard(stored(name, seed=5)), name)
        made[name] = same(parts_of(model), rows_of(alone(name)[1], model))
    return made


def stored_from_values(rank: int) -> dict[str, bool]:
    """Weights in high precision, loaded into shards that have not been gathered yet; and back as values."""
    made = {}
    for name in ("current", "mxfp8", "nvfp4"):
        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)).bfloat16()
        one, model = stored(name), shard(stored(name, seed=5))
        one.load_state_dict(plain.state_dict())
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        made[name] = same(parts_of(model), rows_of(parts_of(one), model))
    return made


def values_of_shards(rank: int) -> dict[tuple, bool]:
    """A whole checkpoint in high precision, made of shards."""
    made = {}
    for name in ("current", "mxfp8", "nvfp4"):
        for inner in (INNER, INNER - 1):
            model, one = shard(stored(name, inner=inner)), stored(name, inner=inner)
            ours, theirs = mf.plain_state_dict(model), mf.plain_state_dict(one)
            made[name, inner] = all(torch.equal(whole(ours[key]), theirs[key]) for key in theirs)
    return made


def compiled_stored(rank: int) -> dict[str, bool]:
    """Layers that are compiled, between the gathers of FSDP2."""
    made = {}
    for name in ("current", "nvfp4"):
        model = shard(stored(name))
        for layer in (model[0], model[2]):
            layer.compile(backend="aot_eager")
        made[name] = equal(model, alone(name), train(model, name))
    return made


def trains_as_one_process(name: str, make, call) -> bool:
    """If two steps of the model that `make` gives, and of its shards, end with the same output and the same parts."""
    results = []
    for cuts in (False, True):
        torch.manual_seed(1)
        with mf.quantized_model_init(recipe=STORED[name]):
            model = frozen(make(dtype=torch.bfloat16, recipe=STORED[name]))
        if cuts:
            for module in model if isinstance(model, nn.Sequential) else ():
                fully_shard(module)
            model = fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
        for _ in range(2):
            with mf.autocast(recipe=STORED[name]):
                y = call(model)
            y.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((y.detach(), parts_of(model), model))
    (y, parts, _), (sharded, _, model) = results
    return torch.equal(y, sharded) and same(parts_of(model), rows_of(parts, model))


def fused_and_stored(rank: int, names: Names = ("delayed", "current", "mxfp8", "nvfp4")) -> dict[str, bool]:
    """Norms and activations fused with Linears whose weights are codes, three of them as one product."""

    def make(**options):
        return nn.Sequential(
            mf.LayerNormLinear(WIDTH, 256, split={"q": 128, "k": 64, "v": 64}, **options),
            mf.LayerNormMLP(256, WIDTH, activation="swiglu", **options),
        )

    return {name: trains_as_one_process(name, make, lambda model: model(example())) for name in names}


class Adapted(nn.Module):
    """A frozen Linear beside two trainable factors."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, outputs, bias=False)
        self.down, self.up = nn.Linear(width, 8, bias=False), nn.Linear(8, outputs, bias=False)
        self.base.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def frozen_bases(
    rank: int, names: Names = ("nvfp4", "nvfp4 dequantized", "mxfp4", "mxfp8", "fp8_tensor")
) -> dict[str, bool]:
    """Adapters trained around frozen weights of four bits, whose bytes stay; also under `prefill`."""
    made = {}
    for fmt in names:
        torch.manual_seed(1)
        plain = nn.Sequential(Adapted(WIDTH, INNER), nn.ReLU(), Adapted(INNER, WIDTH)).bfloat16()
        name, prefill, *_ = *fmt.split(), None
        config = WeightOnly(name, prefill=prefill, prefill_rows=8)
        mf.quantize_(plain, config, filter=lambda name, module: name.endswith("base"))
        model, results = copy.deepcopy(plain), []
        for block in (model[0], model[2]):
            fully_shard(block)
        fully_shard(model)
        before = parts_of(model)
        for one in (plain, model):
            optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=0.01)
            for _ in range(2):
                y = one(example())
                y.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                results.append(y.detach())
        after = parts_of(model)
        kept = {key: value for key, value in after.items() if "base" in key}
        made[fmt] = torch.equal(results[1], results[3]) and same(kept, {key: before[key] for key in kept})
    return made


def experts(rank: int) -> dict[str, bool]:
    """Experts are cut between experts, each of which has a scale of its own."""
    groups = 2 * dist.get_world_size()
    make = functools.partial(mf.GroupedLinear, groups, 64, 96)

    def call(model):
        return model(example()[:, :64].repeat(groups // 2, 1), [16] * groups)

    return {name: trains_as_one_process(name, make, call) for name in ("current", "mxfp8")}


def from_meta(rank: int) -> dict[str, bool]:
    """Sharded without memory, then filled by a checkpoint of values or by drawing."""
    made = {}
    for name in ("current", "nvfp4"):
        model = shard(stored_on("meta", name))
        model.to_empty(device=torch.get_default_device().type)
        torch.manual_seed(7)
        plain = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)).bfloat16()
        set_model_state_dict(model, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        one = stored(name)
        one.load_state_dict(plain.state_dict())
        made[name] = same(parts_of(model), rows_of(parts_of(one), model)) and torch.equal(
            model(example()), one(example())
        )
    made["drawn"] = keeps_what_shards_draw()
    return made


def keeps_what_shards_draw() -> bool:
    """Master weights can begin at the values of a shard before they were quantized."""
    with mf.quantized_model_init(recipe="mxfp8", preserve_high_precision_init_val=True), torch.device("meta"):
        model = shard(nn.Sequential(mf.Linear(WIDTH, INNER, bias=False)))
    model.to_empty(device=torch.get_default_device().type)
    model[0].reset_parameters()
    own = model[0].weight.to_local()
    drawn = own.get_high_precision_init_val()
    values = own.detach().dequantize()
    model(example())
    kept = model[0].weight.to_local().get_high_precision_init_val() is drawn
    model[0].weight.to_local().clear_high_precision_init_val()
    is_free = own.get_high_precision_init_val() is None
    return kept and is_free and torch.equal(values, mf.quantize(drawn, own.cast).dequantize())


def stored_on(device: str, name: str) -> nn.Sequential:
    with torch.device(device):
        return stored(name)


def replicas_of_shards(rank: int) -> dict[str, bool]:
    """HSDP: two groups of two ranks."""
    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("replicate", "shard"))
    made = {}
    for name in STORED:
        wide = {"width": 256} if name == "block" else {}
        model = shard(stored(name, **wide), mesh=mesh)
        outputs = train(model, name)
        made[name] = equal(model, alone(name, **wide), outputs, mesh["shard"])
    return made


CASES = (
    stored_weights, stored_ways, stored_unevenly, stored_and_refused, stored_and_saved, stored_from_values,
    frozen_bases, experts, from_meta, values_of_shards, fused_and_stored,
)  # fmt: skip
