"""Tensor and sequence parallel layers on gloo ranks: the bytes of one process, and what crosses the wire."""

import contextlib
import copy
import dataclasses
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor import parallel as theirs  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as ours  # noqa: E402
from microfloat import formats, recipes  # noqa: E402
from microfloat.errors import MicrofloatError  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch.distributed import collectives  # noqa: E402
from microfloat.torch.distributed import tp_linear as sharded_linear  # noqa: E402
from microfloat.torch.distributed import tp_schedule as sharded  # noqa: E402
from microfloat.torch.linear.schedule import SCHEDULES, CastStep  # noqa: E402
from tests.torch.distributed.ranks import With, of, on_gpus, run_ranks  # noqa: E402
from tests.torch.linear.scheduled.setting import block_gemms  # noqa: E402

NEAREST = {
    "fp8_current": recipes.Float8CurrentScaling(), "fp8_row": recipes.Float8RowScaling(),
    "fp8_block": recipes.Float8BlockScaling(), "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp6": recipes.MXFP6BlockScaling(), "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "rotated_1d": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
    "row_hp": recipes.from_name("rowwise_with_gw_hp"),
}  # fmt: skip


def of_one_format(fmt) -> recipes.CustomRecipe:
    return recipes.CustomRecipe(*(recipes.Gemm(fmt, fmt) for _ in range(3)))


# Scales of whole rows or tensors, alone, under another one, and with a NaN that they store; those of NVFP4 for rows of
# some operands only.
CROSSING = {
    "two of rows": of_one_format("nvfp4_row"),
    "one of rows": recipes.CustomRecipe(*(recipes.Gemm(*pair) for pair in (
        ("nvfp4_row", "nvfp4"), ("nvfp4", "nvfp4_row"), ("nvfp4", "nvfp4_row")))),
    "E8M0 rows": of_one_format(formats.ScaledFormat("e8m0_rows", formats.E4M3, formats.SCALE_E8M0, (1, None))),
    "E8M0": of_one_format(formats.ScaledFormat("e8m0_whole", formats.E4M3, formats.SCALE_E8M0, (None, None))),
    "E4M3 rows": of_one_format(formats.ScaledFormat("e4_rows", formats.E2M1, formats.SCALE_E4M3, (1, None), "tensor")),
}  # fmt: skip
K, N, M = 256, 256, 32
_AXES = {"x": (("M", "K"), ("K", "M")), "w": (("N", "K"), ("K", "N")), "dy": (("M", "N"), ("N", "M"))}


class Casts:
    """Records what every cast of a schedule makes."""

    def __init__(self, monkeypatch) -> None:
        self.made: dict[str, list] = {}
        self._of(monkeypatch, sharded.ShardedCast)

    def _of(self, monkeypatch, cls) -> None:
        call, casts = cls.__call__, self

        def recorded(step, x, stream, words, inputs):
            made = call(step, x, stream, words, inputs)
            column = made.column().column if callable(made.column) else made.column
            column = step.gathered(column, 1) if getattr(step, "gathers_late", False) else column
            whole = *made.row, *column
            tensor = next(entry.operand.tensor for entry in step.entries if entry is not None)
            casts.made[tensor] = [None if part is None else part.clone() for part in whole]
            return made

        monkeypatch.setattr(cls, "__call__", recorded)


def drawn(*shape: int, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return values.to(torch.get_default_device())


def seeded(*shape: int, seed: int) -> torch.Tensor:
    values = drawn(*shape, seed=seed)
    return (values * torch.logspace(-3, 2, shape[-1])).bfloat16()  # whose shards have other amaxes


def one_process(recipe, x, w, dy) -> dict[str, list]:
    """The six operands that one process casts, and y, dx, dw."""
    layer = mf.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    with pytest.MonkeyPatch.context() as patch:
        casts = Casts.__new__(Casts)
        casts.made = {}
        casts._of(patch, CastStep)
        x = x.clone().requires_grad_()
        y = layer(x)
        y.backward(dy)
    casts.made["results"] = [y.detach(), x.grad, layer.weight.grad]
    return casts.made


def shard_of(part, axes, block, letter, rank: int, world: int, per_byte: int = 1):
    """This rank's part of the codes or scales of a whole operand."""
    if part is None or letter is None or part.dim() < 2:
        return part
    dim = axes.index(letter)
    if part.shape[dim] == 1:  # a scale for each row, whose contraction is sharded
        return part
    return part.chunk(world, dim)[rank]


def bytes_of(part):
    return part.contiguous().reshape(-1).view(torch.uint8)


def differing(expected: dict, made: dict, letters: dict, rank: int, world: int) -> list[str]:
    """The parts that are not those of one process."""
    wrong = []
    for tensor, parts in made.items():
        for index, (part, whole) in enumerate(zip(parts, expected[tensor], strict=True)):
            axes = _AXES[tensor][index // 3]
            goal = shard_of(whole, axes, None, letters.get(tensor), rank, world)
            if (part is None) != (goal is None):
                wrong.append(f"{tensor}[{index}]: {part is None} {goal is None}")
            elif part is not None:
                same = part.shape == goal.shape and torch.equal(bytes_of(part), bytes_of(goal))
                if not same:
                    wrong.append(f"{tensor}[{index}] {tuple(part.shape)} {tuple(goal.shape)}")
    return wrong


# By name: the style, the dimension of the sequence, and along what the operands that GEMMs read are sharded.
LAYOUTS = {
    "column": ("colwise", None, {"w": "N", "dy": "N"}),
    "column, sequence": ("colwise", 1, {"w": "N", "dy": "N"}),
    "row": ("rowwise", None, {"x": "K", "w": "K"}),
    "row, sequence": ("rowwise", 1, {"x": "K", "w": "K"}),
}


def layer_on(mesh, kind: str, sequence, recipe, w, styles):
    layer = mf.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype, recipe=recipe)
    with torch.no_grad():
        layer.weight.copy_(w)
    layout = None if sequence is None else Shard(sequence)
    style = styles.ColwiseParallel(input_layouts=layout) if kind == "colwise" else styles.RowwiseParallel(
        output_layouts=layout
    )  # fmt: skip
    return theirs.parallelize_module(layer, mesh, style)


def bytes_of_one_process(
    rank: int, names: tuple[str, ...] = tuple(NEAREST), rows: int = M, whole: bool = False, spoils: bool = False
):
    """Every recipe, column and row parallel, with and without sequence parallelism, by our styles and torch's.

    `whole`: operands that a rank has a part of are left out. `spoils`: a NaN and an infinity are with one rank.
    """
    world, found = dist.get_world_size(), {}
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    size = 128 * world  # whole tiles on every rank
    x, w, dy = seeded(2, rows * world, size, seed=1), seeded(size, size, seed=2), seeded(2, rows * world, size, seed=3)
    if spoils:
        for tensor in (x, dy):
            tensor[0, 3, 5], tensor[1, 4, 6] = float("nan"), float("inf")
    for name, recipe in ((name, (NEAREST | CROSSING)[name]) for name in names):
        expected = one_process(recipe, x, w, dy)
        for layout, (kind, sequence, letters) in LAYOUTS.items():
            for styles in (ours, theirs):
                if styles is theirs and (sequence or name not in ("fp8_current", "nvfp4", "fp8_row")):
                    continue
                layer = layer_on(mesh, kind, sequence, recipe, w, styles)
                mine = [t.chunk(world, 1)[rank] if sequence else t for t in (x, dy)]
                x_rank = x.chunk(world, -1)[rank] if kind == "rowwise" else mine[0]
                dy_rank = dy.chunk(world, -1)[rank] if kind == "colwise" else mine[1]
                x_rank = x_rank.clone().requires_grad_()
                with pytest.MonkeyPatch.context() as patch:
                    casts = Casts(patch)
                    y = layer(x_rank)
                    y.backward(dy_rank)
                # On a GPU x and w are cast together, in forms of their own.
                made = {tensor: parts for tensor, parts in casts.made.items() if not (whole and tensor in letters)}
                wrong = [] if x.is_cuda else differing(expected, made, letters, rank, world)
                whole_y, whole_dx, whole_dw = expected["results"]
                goals = (
                    whole_y.chunk(world, -1)[rank] if kind == "colwise"
                    else whole_y.chunk(world, 1)[rank] if sequence else whole_y,
                    whole_dx.chunk(world, -1)[rank] if kind == "rowwise"
                    else whole_dx.chunk(world, 1)[rank] if sequence else whole_dx,
                    whole_dw.chunk(world, 0 if kind == "colwise" else 1)[rank],
                )  # fmt: skip
                errors = [
                    relative(a, b) for a, b in zip((y, x_rank.grad, layer.weight.grad.to_local()), goals, strict=True)
                ]
                found[name, layout, styles is ours] = wrong, errors
    return found


def scales_across_the_cut(rank: int):
    """The same of scales that every rank has parts of, where a NaN and an infinity are with one rank."""
    return bytes_of_one_process(rank, tuple(CROSSING), spoils=True)


def forms_of_a_hopper(rank: int):
    """The same in the forms that a Hopper's GEMMs read: folded scales of 128, and decoded values.

    Shards of two times 32 rows would cut blocks of 128, and two scales of 128 rows are filled up to four: those are
    gathered in high precision, and two times 256 rows as codes.
    """
    with backends.pretend(chip="h200", interpreted=False), block_gemms("cpu", []):
        found = bytes_of_one_process(rank, ("mxfp8", "nvfp4"), M, whole=True)
        for rows in (128, 256):
            made = bytes_of_one_process(rank, ("mxfp8",), rows, whole=True)
            found |= {(*key, rows): one for key, one in made.items()}
        return found


def decoded_operands(rank: int):
    """What two layers save that read one x, where GEMMs read decoded values: its addresses, of the weights and of more
    than scalars; and the order of casts of dy and products in backward."""
    world, saved, events = dist.get_world_size(), [], []
    mesh = init_device_mesh("cpu", (world,))
    with backends.pretend(chip="h200", interpreted=False):
        layers = [layer_on(mesh, "colwise", 1, NEAREST["nvfp4"], seeded(N, K, seed=i), ours) for i in range(2)]
        x = on_sequence(seeded(1, M * world, K, seed=1), mesh).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
            ys = [layer(x) for layer in layers]
        cast = CastStep.__call__

        def recorded(step, *arguments):
            events.append("cast " + " and ".join(".".join(one.operand.key) for one in step.entries if one is not None))
            return cast(step, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CastStep, "__call__", recorded)
            for case in SCHEDULES.values():
                for name, product in case.schedule.products.items():
                    patch.setitem(case.schedule.products, name, noted(events, name, product))
            ys[0].sum().backward()
    weights = {layer.weight.to_local().data_ptr() for layer in layers}
    return weights, {one.data_ptr() for one in saved if one.numel() > 1}, events


def decoded_and_gathered(rank: int):
    """dx and dw of a row-parallel layer in float32, whose decoded dy takes fewer bytes than its values and is gathered:
    how far they are from those of one process; and whether dy travelled as values."""
    world = dist.get_world_size()
    mesh, sizes = init_device_mesh("cpu", (world,)), (M * world, 128 * world)
    x, w, dy = (seeded(*shape, seed=i).float() for i, shape in enumerate((sizes, (N, sizes[1]), (sizes[0], N))))
    with backends.pretend(chip="h200", interpreted=False):
        _, dx, dw = one_process(NEAREST["nvfp4"], x, w, dy)["results"]
        layer = layer_on(mesh, "rowwise", 0, NEAREST["nvfp4"], w, ours)
        part = x.chunk(world, 1)[rank].clone().requires_grad_()
        layer(part).backward(dy.chunk(world, 0)[rank])
        note = layer.schedule(part).note
    made = part.grad, layer.weight.grad.to_local()
    return [relative(a, b.chunk(world, 1)[rank]) for a, b in zip(made, (dx, dw), strict=True)], note


def noted(events: list[str], name: str, call):
    def noting(*arguments):
        events.append(name)
        return call(*arguments)

    return noting


def relative(a, b) -> float:
    return float((a - b).detach().float().norm() / b.detach().float().norm())


def plan_of(sequence: bool) -> dict:
    """A plan for every Linear and norm of our modules, with or without sequence parallelism."""
    shard = Shard(1) if sequence else None
    column = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    column += ["up_proj", "gate_proj", "q_proj", "k_proj", "v_proj"]
    plan: dict = {name: ours.ColwiseParallel(input_layouts=shard) for name in column}
    row = ["self_attn.o_proj", "mlp.down_proj", "down_proj", "o_proj"]
    plan |= {
        name: ours.RowwiseParallel(output_layouts=shard, use_local_output=not sequence) for name in row
    }  # fmt: skip
    if sequence:
        norms = ["input_layernorm", "post_attention_layernorm", "norm"]
        plan |= {name: ours.SequenceParallel() for name in norms}
    return plan


MODULES = {
    "TransformerLayer": lambda: mf.TransformerLayer(64, 128, 4, activation="swiglu"),
    "LayerNormMLP": lambda: mf.LayerNormMLP(64, 128, activation="gelu"),
    "LayerNormLinear": lambda: mf.LayerNormLinear(64, 128, split={"q_proj": 64, "k_proj": 64}),
    "MultiheadAttention": lambda: mf.MultiheadAttention(64, 4),
}


def modules_take_part(rank: int):
    """Relative differences of y and of all gradients from those of one process; float32, whose sums differ by 2^-20.

    The Linears of the one process have hooks too, as those of a plan: they run one by one, each with its own scales.
    """
    world, found = dist.get_world_size(), {}
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    for name, make in MODULES.items():
        for sequence, recipe in ((False, "mxfp8"), (True, "fp8_current")):
            torch.manual_seed(1)
            whole = make()
            torch.manual_seed(1)
            module = make()
            plan = {key: style for key, style in plan_of(sequence).items() if has(module, key)}
            theirs.parallelize_module(module, mesh, plan)
            for key in plan:
                whole.get_submodule(key).register_forward_pre_hook(lambda *_: None)
            x = drawn(2, 32 * world, 64, seed=2)
            mine, reference = x.clone().requires_grad_(), x.clone().requires_grad_()
            with mf.autocast(recipe=recipe):
                y = module(on_sequence(mine, mesh) if sequence else mine)
                goal = whole(reference)
            if name == "LayerNormLinear":  # of whose parts every rank has its columns
                goal = torch.cat([part.chunk(world, -1)[rank] for part in goal.split(64, -1)], -1)
            dy = drawn(*goal.shape, seed=3)
            goal.backward(dy)
            y.backward(on_sequence(dy, mesh) if isinstance(y, DTensor) else dy)
            errors = {"y": relative(whole_of(y), goal)}
            if name != "LayerNormLinear":  # whose other columns have had no gradient
                if sequence:
                    dist.all_reduce(mine.grad)
                errors["x"] = relative(mine.grad, reference.grad)
                for (key, one), other in zip(module.named_parameters(), whole.parameters(), strict=True):
                    errors[key] = relative(whole_of(one.grad), other.grad)
            found[name, sequence, recipe] = max(errors.values())
    return found


def on_sequence(tensor, mesh):
    return DTensor.from_local(tensor.chunk(mesh.size(), 1)[mesh.get_local_rank()], mesh, [Shard(1)])


def whole_of(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def has(module, key: str) -> bool:
    try:
        module.get_submodule(key)
    except AttributeError:
        return False
    return True


# By name: the style, and how y lies, of whose columns, rows or everything a rank adds the bias to its part.
RETURNING = {
    "columns": lambda: ours.ColwiseParallel(),
    "columns, gathered": lambda: ours.ColwiseParallel(output_layouts=Replicate()),
    "columns, as a DTensor": lambda: ours.ColwiseParallel(use_local_output=False),
    "sums": lambda: ours.RowwiseParallel(),
    "sums, by rows": lambda: ours.RowwiseParallel(output_layouts=Shard(1)),
    "sums, by rows, as a DTensor": lambda: ours.RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    "sums, by columns": lambda: ours.RowwiseParallel(output_layouts=Shard(-1)),
}


def returned_biases(rank: int):
    """Relative differences of y and of the bias's gradient from those of one process that adds its bias; float32."""
    world, found = dist.get_world_size(), {}
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    x, dy = drawn(2, 8 * world, 64 * world, seed=1), drawn(2, 8 * world, 64 * world, seed=2)
    for name, style in RETURNING.items():
        for recipe in (None, "fp8_current"):
            torch.manual_seed(1)
            layer = mf.Linear(64 * world, 64 * world, return_bias=True, recipe=recipe)
            whole = copy.deepcopy(layer)
            made = style()
            theirs.parallelize_module(layer, mesh, made)
            y, bias = layer(x if name.startswith("columns") else x.chunk(world, -1)[rank])
            assert isinstance(y, DTensor) == isinstance(bias, DTensor) == ("DTensor" in name)
            if "DTensor" in name:
                local = dy.chunk(world, made.output_layouts[0].dim)[rank]
                (y + bias).backward(DTensor.from_local(local, mesh, made.output_layouts))
                y = (y + bias).full_tensor()
            else:
                dim = made.output_layouts[0].dim if isinstance(made.output_layouts[0], Shard) else None
                y = y + bias
                y.backward(dy if dim is None else dy.chunk(world, dim)[rank])
            goal = sum(whole(x))
            goal.backward(dy)
            part = goal if y.shape == goal.shape else goal.chunk(world, made.output_layouts[0].dim)[rank]
            errors = relative(y, part), relative(whole_of(layer.bias.grad), whole.bias.grad)
            found[name, recipe] = max(errors)
    for style in (None, ours.RowwiseParallel(output_layouts=Shard(1), use_local_output=False)):
        torch.manual_seed(1)
        mlp = mf.LayerNormMLP(64, 64 * world, options=mf.LayerOptions(return_bias=True), recipe="mxfp8")
        whole = copy.deepcopy(mlp)
        plan = {"up_proj": ours.ColwiseParallel(), "down_proj": style or ours.RowwiseParallel()}
        theirs.parallelize_module(mlp, mesh, plan)
        small = drawn(2, 4 * world, 64, seed=3)
        found["mlp", style is None] = relative(whole_of(sum(mlp(small))), sum(whole(small)))
    layer = mf.Linear(32, 32, return_bias=True, dtype=torch.bfloat16)
    torch.manual_seed(1)
    layer.reset_parameters()
    bias = layer.bias.detach().clone()
    fully_shard(layer, mesh=mesh)
    returned = layer(torch.ones(4, 32, dtype=torch.bfloat16))[1]  # the parameter has lost its memory by now
    returned.float().sum().backward()
    found["fully_shard"] = float(not torch.equal(returned, bias))
    found["fully_shard, gradient"] = float(not bool((layer.bias.grad.full_tensor() == 1).all()))
    return found


def delayed_state(rank: int):
    """Scaling state of a column and a row parallel layer after three regions, and that of one process."""
    world, found = dist.get_world_size(), {}
    mesh, recipe = init_device_mesh(torch.get_default_device().type, (world,)), NEAREST["delayed"]
    for kind in ("colwise", "rowwise"):
        for sequence in (None, 1):
            w = seeded(N, K, seed=2)
            layer, whole = layer_on(mesh, kind, sequence, recipe, w, ours), mf.Linear(K, N, False, dtype=w.dtype)
            with torch.no_grad():
                whole.pin(recipe).weight.copy_(w)
            for step in range(3):
                x, dy = (seeded(1, M * world, size, seed=4 + step) * 2**step for size in (K, N))
                mine = [t.chunk(world, 1)[rank] if sequence else t for t in (x, dy)]
                mine[kind == "colwise"] = (x, dy)[kind == "colwise"].chunk(world, -1)[rank]
                with mf.autocast(recipe=recipe):
                    y = layer(mine[0])
                y.backward(mine[1])
                with mf.autocast(recipe=recipe, amax_reduction_group=ALONE[0]):
                    whole(x).backward(dy)
            for one in (layer, whole):
                mf.update_scaling(one)
            state, (layer, read) = layer.state_dict(), (layer_on(mesh, kind, sequence, recipe, w, ours), layer)
            first = {name: value for name, value in layer.state_dict().items() if name.startswith("scaling_")}
            assert first
            assert not any(isinstance(value, DTensor) for value in first.values())
            wrapped = {name: DTensor.from_local(state[name], mesh, [Replicate()], run_check=False) for name in first}
            layer.load_state_dict({**state, **wrapped})  # before its first call; as torch's styles would have saved it
            assert str(layer.state_dict()) == str(read.state_dict())
            found[kind, sequence] = [dict((k, v.tolist()) for k, v in one.named_buffers()) for one in (layer, whole)]
    return found


ALONE: list = [None]


def groups_of_one(rank: int):
    """The group in which a rank is one process."""
    ALONE[0] = [dist.new_group([one]) for one in range(dist.get_world_size())][rank]


@contextlib.contextmanager
def counted(sent: list[int]):
    gather = collectives.all_gather_together

    def counting(received, parts, *arguments, **options):
        sent.extend(part.numel() for part in parts if part.dtype == torch.uint8)  # not values
        return gather(received, parts, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_together", counting)
        yield


def wire(rank: int):
    """Bytes that a rank sends for x of three layers that read one DTensor, and for dy; and what the schedules say."""
    world, found = dist.get_world_size(), {}
    mesh = init_device_mesh(torch.get_default_device().type, (world,))
    for name in ("fp8_current", "mxfp4", "nvfp4", "mxfp8"):
        layers = [layer_on(mesh, "colwise", 1, NEAREST[name], seeded(N, K, seed=i), ours) for i in range(3)]
        row = layer_on(mesh, "rowwise", 1, NEAREST[name], seeded(K, N, seed=9), ours)
        x = on_sequence(seeded(1, M * world, K, seed=1), mesh).requires_grad_()
        sent: list[int] = []
        with counted(sent):
            made = [layer(x) for layer in layers]
            forward = sum(sent)
            row(made[0] + made[1] + made[2]).sum().backward()
        found[name] = forward / (M * K), (sum(sent) - forward) / (M * K), str(layers[0].schedule(x))
    for name in ("mxfp8", "fp8_block"):
        for way in ("no_grad", "frozen", "high_precision", "dequantized"):
            recipe = NEAREST[name]
            if way in ("high_precision", "dequantized"):
                recipe = dataclasses.replace(recipe, backward=way)
            column = layer_on(mesh, "colwise", 1, recipe, seeded(K, K, seed=4), ours)
            row = layer_on(mesh, "rowwise", 1, recipe, seeded(K, K, seed=5), ours)
            for layer in (column, row):
                layer.weight.requires_grad_(way != "frozen")
            x, sent = on_sequence(seeded(1, 128 * world, K, seed=1), mesh).requires_grad_(), []
            with counted(sent), torch.set_grad_enabled(way != "no_grad"):
                y = row(column(x))
                forward = sum(sent)
                if way != "no_grad":
                    y.sum().backward()
            found[name, way] = forward / (128 * K), (sum(sent) - forward) / (128 * K)
    return found


def noise(rank: int):
    """Codes of dy under stochastic rounding: of a replica, and of a shard whose values all ranks have."""
    world, found = dist.get_world_size(), []
    mesh, recipe = init_device_mesh(torch.get_default_device().type, (world,)), recipes.NVFP4BlockScaling()
    for kind in ("rowwise", "colwise"):
        torch.manual_seed(11)
        layer = layer_on(mesh, kind, None, recipe, seeded(N, K, seed=2), ours)
        x, dy = seeded(2, M, K, seed=1), seeded(2, M, N, seed=3)
        x, dy = (x.chunk(world, -1)[0], dy) if kind == "rowwise" else (x, dy.chunk(world, -1)[0])
        with pytest.MonkeyPatch.context() as patch:
            casts = Casts(patch)
            layer(x.clone().requires_grad_()).backward(dy)
        found.append(casts.made["dy"][0].tolist())
    return found


def other_ways(rank: int, compiles: bool = True):
    """A compiled model, one without gradients, and explain."""
    world, dy = dist.get_world_size(), seeded(4, N, seed=3)
    x, w = seeded(4, K, seed=1), seeded(N, K, seed=2)
    expected = one_process(NEAREST["mxfp8"], x, w, dy)["results"]
    layer = layer_on(
        init_device_mesh(torch.get_default_device().type, (world,)), "colwise", None, NEAREST["mxfp8"], w, ours
    )
    model = nn.Sequential(layer, nn.Identity())
    y = (torch.compile(model, backend="eager") if compiles else model)(x)
    y.backward(dy.chunk(world, -1)[rank])
    sequence = layer_on(
        init_device_mesh(torch.get_default_device().type, (world,)), "colwise", 0, NEAREST["fp8_current"], w, ours
    )
    part = x.chunk(world)[rank].contiguous()
    with torch.inference_mode():
        inferred = sequence(part)
    same = torch.equal(inferred, sequence(part))
    return (
        torch.equal(y, expected[0].chunk(world, -1)[rank]),
        torch.equal(layer.weight.grad.full_tensor(), expected[2]),
        same,
        str(mf.explain(layer)),
    )


def refusals(rank: int):
    """The messages that bad input meets, on every rank."""
    world = dist.get_world_size()
    mesh, said = init_device_mesh(torch.get_default_device().type, (world,)), {}

    def attempt(name, call):
        try:
            call()
        except MicrofloatError as error:
            said[name] = f"{type(error).__name__}: {error}"

    odd = layer_on(mesh, "colwise", None, NEAREST["mxfp8"], seeded(48 * world, K, seed=1), ours)
    attempt("block", lambda: odd(seeded(4, K, seed=2).requires_grad_()))
    odd = layer_on(mesh, "rowwise", None, NEAREST["nvfp4"], seeded(N, 24 * world, seed=1), ours)
    attempt("contraction", lambda: odd(seeded(4, 24, seed=2)))
    turned = recipes.Cast("fp8_row", hadamard=recipes.Hadamard())
    recipe = recipes.CustomRecipe(recipes.Gemm(turned, turned), *(recipes.Gemm("fp8_row", "fp8_row") for _ in range(2)))
    turned = layer_on(mesh, "rowwise", None, recipe, seeded(N, 32 * world, seed=1), ours)
    attempt("turned rows", lambda: turned(seeded(4, 32, seed=2)))
    tiny = layer_on(mesh, "colwise", None, NEAREST["fp8_current"], seeded(1, K, seed=1), ours)
    attempt("empty", lambda: tiny(seeded(4, K, seed=2)))
    layer = layer_on(mesh, "colwise", None, NEAREST["fp8_current"], seeded(N, K, seed=1), ours)
    attempt("plain x", lambda: layer.forward(seeded(4, K, seed=2)))
    outside = mf.Linear(K, N, recipe="mxfp8", dtype=torch.bfloat16)
    attempt("outside", lambda: outside(DTensor.from_local(seeded(4, K, seed=2), mesh, [Shard(0)])))
    with mf.quantized_model_init(recipe="mxfp8"):
        stored = mf.Linear(K, N, bias=False, recipe="mxfp8")
    attempt("stored", lambda: theirs.parallelize_module(stored, mesh, ours.ColwiseParallel()))
    attempt("stored, rowwise", lambda: theirs.parallelize_module(stored, mesh, ours.RowwiseParallel()))
    stored.weight = nn.Parameter(DTensor.from_local(stored.weight.detach(), mesh, [Replicate()], run_check=False))
    served = nn.Sequential(mf.Linear(K, 64 * world))
    mf.quantize_(served, mf.WeightOnly("nvfp4"))
    attempt("served", lambda: theirs.parallelize_module(served, mesh, {"0": ours.ColwiseParallel()}))
    attempt("stored replicas", lambda: stored(DTensor.from_local(seeded(4, K, seed=2).float(), mesh, [Shard(0)])))
    other = layer_on(
        DeviceMesh(torch.get_default_device().type, list(reversed(range(world)))),
        "colwise",
        None,
        NEAREST["fp8_current"],
        seeded(N, K, seed=1),
        ours,
    )
    wide = init_device_mesh(torch.get_default_device().type, (1, world))
    w = DTensor.from_local(seeded(N // world, K, seed=1), wide, [Replicate(), Shard(0)], run_check=False)
    x = DTensor.from_local(seeded(4, K, seed=2), wide, [Replicate(), Replicate()], run_check=False)
    attempt("dimensions", lambda: mf.linear(x, w, recipe="mxfp8"))
    attempt("mesh", lambda: other.forward(DTensor.from_local(seeded(4, K, seed=2), mesh, [Shard(0)])))
    sums = layer_on(mesh, "colwise", None, NEAREST["mxfp8"], seeded(N, K, seed=1), ours)
    sums.fuse_wgrad_accumulation = True
    attempt("main_grad", lambda: sums(seeded(4, K, seed=2)))
    beside = mf.Linear(64, 64, return_bias=True, recipe="mxfp8")
    theirs.parallelize_module(beside, mesh, theirs.ColwiseParallel())
    attempt("return_bias", lambda: beside(torch.ones(2, 64)))
    beside = mf.Linear(64, 64, return_bias=True)
    theirs.parallelize_module(beside, mesh, ours.RowwiseParallel(output_layouts=Partial()))
    attempt("return_bias, sums", lambda: beside(torch.ones(2, 64 // world)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_linear, "apply", fail)
        try:
            layer(seeded(4, K, seed=2))
        except RuntimeError as error:
            said["of its own"] = str(error)
    with mf.autocast(enabled=False):  # torch's own operators
        said["high precision"] = list(odd(seeded(4, 24, seed=2)).shape)
    return said


def fail(*arguments):
    raise RuntimeError("an error of its own")


def recipes_differ(rank: int):
    """A recipe of its own on every rank, in the first sharded call of a group."""
    mesh = init_device_mesh(torch.get_default_device().type, (dist.get_world_size(),))
    layer = layer_on(mesh, "colwise", None, NEAREST["mxfp8" if rank else "fp8_current"], seeded(N, K, seed=1), ours)
    try:
        layer(seeded(4, K, seed=2))
    except MicrofloatError as error:
        return str(error)
    return ""


# A scale of a tensor, of rows and of tiles, those of blocks alone, two levels of either form, and a state: further
# formats of blocks, and a backward in high precision, are cut as these are. Four ranks take them all.
SOME = ("fp8_current", "fp8_row", "fp8_block", "mxfp8", "nvfp4", "delayed", "rotated_1d")
CASES = (
    recipes_differ, groups_of_one, With(bytes_of_one_process, names=SOME), scales_across_the_cut, modules_take_part,
    returned_biases, delayed_state, wire, noise, With(other_ways, compiles=False), refusals,
    forms_of_a_hopper, decoded_operands, decoded_and_gathered,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"))


def test_every_rank_makes_the_bytes_of_one_process(ranks) -> None:
    """features D2, D3, D4, D5, D12"""
    for found in of(ranks, bytes_of_one_process):
        assert {name for name, *_ in found} >= set(SOME)
        assert not {key: wrong for key, (wrong, _) in found.items() if wrong}
        # y and dx are sums of results on each rank, rounded to bfloat16 (2^-9) one by one and when they are added.
        assert max(max(errors) for _, errors in found.values()) < (2 * len(ranks) - 1) * 2.0**-9


def test_scales_that_every_rank_has_parts_of(ranks) -> None:
    """features D2: numerics.md 3.5"""
    for found in of(ranks, scales_across_the_cut):
        assert {name for name, *_ in found} == set(CROSSING)
        assert not {key: wrong for key, (wrong, _) in found.items() if wrong}


def test_forms_of_a_hopper_are_those_of_one_process(ranks) -> None:
    """features D2, D5"""
    for found in of(ranks, forms_of_a_hopper):
        assert not {key: wrong for key, (wrong, _) in found.items() if wrong}
        assert max(max(errors) for _, errors in found.values()) < (2 * len(ranks) - 1) * 2.0**-9


def test_decoded_operands_are_not_kept_twice(ranks) -> None:
    for weights, saved, events in of(ranks, decoded_operands):
        assert weights < saved
        assert len(saved) == len(weights) + 1  # and one x
        assert events == ["cast dgrad.lhs", "cast dgrad.rhs", "dgrad", "cast wgrad.lhs", "wgrad"]


def test_decoded_gradients_are_gathered_where_they_are_fewer_bytes(ranks) -> None:
    for errors, note in of(ranks, decoded_and_gathered):
        assert not note
        # Sums of at most 256 terms in another order, in float32.
        assert max(errors) < 2.0**-16


def test_modules_take_part(ranks) -> None:
    """features D2, D4"""
    for found in of(ranks, modules_take_part):
        # Sums of 128 terms in another order differ by less than 128 * 2^-24; codes that this moves are rare.
        assert max(found.values()) < 2.0**-16, found


def test_a_returned_bias_lies_as_the_output_does(ranks) -> None:
    """features D2, D4"""
    for found in of(ranks, returned_biases):
        assert max(found.values()) < 2.0**-16, found  # as above


def test_delayed_scaling_has_the_state_of_one_process(ranks) -> None:
    """features D1"""
    for found in of(ranks, delayed_state):
        for key, (mine, whole) in found.items():
            assert mine == whole, key
            assert max(mine["scaling_dy_amax_history"]) > 0


def test_codes_travel_once_for_all_readers(ranks) -> None:
    """features D5"""
    for found in of(ranks, wire):
        forward, backward, text = found["fp8_current"]
        assert (forward, backward) == (1.0, 1.0)  # bytes an element, of all three layers, and of dy
        assert "gather codes and scales" in text
        assert "x along M" in text
        # Of blocks the row operand of x in forward, its column operand in backward, for all layers, and both of dy.
        bytes_of = {"mxfp4": 0.5 + 1 / 32, "nvfp4": 0.5 + 1 / 16, "mxfp8": 1 + 1 / 32}
        for name, operand in bytes_of.items():
            assert found[name][:2] == (operand, 3 * operand), name
        # Of one operand, where nothing reads the other one.
        for name in ("mxfp8", "fp8_block"):
            assert found[name, "no_grad"] == found[name, "dequantized"] == (1 + 1 / 32, 0)
            assert found[name, "frozen"] == (1 + 1 / 32, 1 + 1 / 32)
            assert found[name, "high_precision"] == (0, 0)
        shares = {name: found[name][0] / 2 for name in ("fp8_current", *bytes_of)}
        said = "sent once ({fp8_current:.1f}x of bf16). With block formats they are two operands ({mxfp8:.2f}x each for"
        said += " MXFP8 and block FP8, {nvfp4:.2f}x for NVFP4, {mxfp4:.2f}x for MXFP4)"
        page = " ".join((Path(__file__).parents[3] / "docs" / "distributed.md").read_text().split())
        assert said.format(**shares) in page


def test_replicas_round_alike_and_shards_do_not(ranks) -> None:
    """features D2: numerics.md 5.3"""
    (replica, shard), (other_replica, other_shard) = of(ranks, noise)
    assert replica == other_replica
    assert shard != other_shard


@pytest.mark.slow("further programs across ranks")
def test_compiled_layers(tmp_path) -> None:
    """features D10: compiled code runs sharded layers between its graphs."""
    made = run_ranks((other_ways,), str(tmp_path / "store"))
    test_modules_functional_and_explained(made)


def test_modules_functional_and_explained(ranks) -> None:
    """features D4"""
    for result, gradient, functional, text in of(ranks, other_ways):
        assert result
        assert gradient
        assert functional
        words = " ".join(text.split())
        assert "overlap of collectives with GEMMs: not provided" in words
        assert "under torch.compile it runs in eager mode, between two graphs" in words


@pytest.mark.slow("four processes of torch")
def test_four_ranks_make_the_bytes_of_one_process(tmp_path) -> None:
    """features D2, D12"""
    cases = groups_of_one, bytes_of_one_process, delayed_state
    made = run_ranks(cases, str(tmp_path / "store"), world=4)
    test_every_rank_makes_the_bytes_of_one_process(made)
    test_delayed_scaling_has_the_state_of_one_process(made)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("block", "InvalidValueError: w, sharded along N (out_features): got 96 over 2 ranks, in parts of 48"),
        ("contraction", "sharded along K (in_features): got 48 over 2 ranks, in parts of 24, needed parts that are "
                        "multiples of 16"),
        ("turned rows", "x, sharded along K: got blocks of fp8_row turned by a Hadamard transform, which it"),
        ("empty", "dimension 0 of size 1 over 2 ranks, needed elements for every rank"),
        ("plain x", "InvalidTypeError: x: got a plain tensor, while the weight is on"),
        ("outside", "while the weight is a plain tensor"),
        ("stored", "ColwiseParallel: got a Linear whose weight is stored as codes (mxfp8), needed values"),
        ("stored, rowwise", "RowwiseParallel: got a Linear whose weight is stored as codes (mxfp8), needed values"),
        ("served", "let vLLM or SGLang shard it"),
        ("stored replicas", "weight: got a DTensor of stored codes (mxfp8), needed a DTensor of values"),
        ("mesh", "needed a DTensor on the mesh of the weight"),
        ("dimensions", "needed a mesh of one dimension. Shard layers over one dimension by its name"),
        ("main_grad", "fuse_wgrad_accumulation"),
        ("return_bias", "return_bias: got True for a layer that a parallel style of torch lays out"),
        ("return_bias, sums", "return_bias: got output_layouts=Partial()"),
        ("of its own", "an error of its own"),
    ],
)  # fmt: skip
def test_bad_input_is_named_on_every_rank(ranks, name, words) -> None:
    """features D3"""
    for said in of(ranks, refusals):
        assert words in said[name]
        assert said["high precision"] == [4, N]


def test_recipes_that_differ_are_named(ranks) -> None:
    for message in of(ranks, recipes_differ):
        assert "the first sharded layer: recipe is Float8CurrentScaling" in message
        assert " on rank 0 and MXFP8BlockScaling(" in message


@pytest.mark.gpu
def test_ranks_on_gpus(tmp_path) -> None:
    """The same through NCCL: results, state, gathered bytes and noise."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, sees {torch.cuda.device_count()}")
    cases = (
        on_gpus, recipes_differ, groups_of_one, bytes_of_one_process, modules_take_part, delayed_state, noise,
    )  # fmt: skip
    made = run_ranks(cases, str(tmp_path / "store"), backend="nccl")
    for found in of(made, bytes_of_one_process):
        assert max(max(errors) for _, errors in found.values()) < 3 * 2.0**-9
    test_delayed_scaling_has_the_state_of_one_process(made)
    test_recipes_that_differ_are_named(made)
