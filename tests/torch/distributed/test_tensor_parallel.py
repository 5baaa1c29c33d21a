"""Tensor and sequence parallel layers on gloo ranks: the bytes of one process, and what crosses the wire."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor import parallel as theirs  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as ours  # noqa: E402
from microfloat import recipes  # noqa: E402
from microfloat.torch.distributed import schedule as sharded  # noqa: E402
from microfloat.torch.schedule import CastStep  # noqa: E402
from tests.torch.distributed.ranks import of, run_ranks  # noqa: E402

pytestmark = pytest.mark.xdist_group("ranks")

NEAREST = {
    "fp8_current": recipes.Float8CurrentScaling(), "fp8_row": recipes.Float8RowScaling(),
    "fp8_block": recipes.Float8BlockScaling(), "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp6": recipes.MXFP6BlockScaling(), "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "rotated_1d": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True, disable_2d_quantization=True),
    "row_hp": recipes.from_name("rowwise_with_gw_hp"),
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
            tensor = next(entry.operand.tensor for entry in step.entries if entry is not None)
            casts.made[tensor] = [None if part is None else part.clone() for part in made[:6]]
            return made

        monkeypatch.setattr(cls, "__call__", recorded)


def seeded(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float32)
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


def bytes_of_one_process(rank: int):
    """Every recipe, column and row parallel, with and without sequence parallelism, by our styles and torch's."""
    world, found = dist.get_world_size(), {}
    mesh = init_device_mesh("cpu", (world,))
    x, w, dy = seeded(2, M * world, K, seed=1), seeded(N, K, seed=2), seeded(2, M * world, N, seed=3)
    for name, recipe in NEAREST.items():
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
                wrong = differing(expected, casts.made, letters, rank, world)
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


def relative(a, b) -> float:
    return float((a.detach().float() - b.detach().float()).norm() / b.float().norm())


CASES = (bytes_of_one_process,)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"))


def test_every_rank_makes_the_bytes_of_one_process(ranks) -> None:
    """features D2, D3, D4, D5, D12"""
    for found in of(ranks, bytes_of_one_process):
        assert not {key: wrong for key, (wrong, _) in found.items() if wrong}
        # y and dx are sums of `world` results, each rounded to bfloat16: 2^-9 each, and the sum's.
        assert max(max(errors) for _, errors in found.values()) < 3 * 2.0**-9
