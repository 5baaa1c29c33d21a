"""Expert parallelism, DDP and pipeline stages over two ranks, and what ranks say of each other.

# features D9, D11 and D12
"""

import copy
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as mfd  # noqa: E402
from microfloat.errors import InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, Cast, CustomRecipe, DelayedScaling, Gemm, from_name  # noqa: E402
from microfloat.torch.distributed.expert_parallel import _Route  # noqa: E402
from tests.docs.code_blocks import code_blocks  # noqa: E402
from tests.torch.distributed.ranks import With, of, on_gpus, run_ranks  # noqa: E402

PAGE = Path(__file__).parents[3] / "docs" / "distributed.md"
WORLD, EXPERTS, FEATURES = 2, 4, 160
# Rows for each of the four experts, by rank: ragged, and experts or ranks without any.
SIZES = {
    "ragged": ([3, 0, 40, 7], [33, 0, 1, 2]),
    "one rank sends nothing": ([0, 0, 0, 0], [5, 1, 0, 64]),
    "one rank receives nothing": ([9, 4, 0, 0], [0, 3, 0, 0]),
    "nothing at all": ([0, 0, 0, 0], [0, 0, 0, 0]),
}
STATELESS = [name for name in RECIPES if not from_name(name).is_delayed]
# Recipes whose scales are those of a row, or of a block in one.
OF_ROWS = [name for name in STATELESS if (lhs := from_name(name).fprop.lhs).format.block[0] and not lhs.tensor_scale]


def rows_of(rank: int, name: str) -> torch.Tensor:
    """Tokens in bfloat16 whose magnitudes differ by expert and by rank, sorted by expert."""
    draws = torch.Generator("cpu").manual_seed(10 * rank + len(name))
    parts = [
        torch.randn(size, FEATURES, generator=draws, device="cpu") * 4.0 ** (g - rank)
        for g, size in enumerate(SIZES[name][rank])
    ]
    return torch.cat(parts).bfloat16().to(torch.get_default_device())


def at_experts(rank: int, name: str, rows=rows_of) -> list[torch.Tensor]:
    """Rows of the experts of a rank: for each those of rank 0, then of rank 1."""
    split = [rows(source, name).split(SIZES[name][source]) for source in range(WORLD)]
    return [torch.cat([split[source][g] for source in range(WORLD)]) for g in range(2 * rank, 2 * rank + 2)]


def payloads(rank: int) -> dict:
    """The codes and scales that arrive, and those of the same rows cast after a bf16 all-to-all, expert by expert."""
    found = {}
    for name, sizes in SIZES.items():
        x, experts = rows_of(rank, name), at_experts(rank, name)
        route = _Route(sizes[rank], x.device, None)
        arrived = route.outward(x, None)
        found[name, "bf16"] = torch.equal(arrived, torch.cat(experts)) and route.group_sizes == [
            len(e) for e in experts
        ]
        for recipe in OF_ROWS:
            for gemm in ("fprop", "dgrad"):
                cast = from_name(recipe).cast(gemm, "lhs")
                if cast.is_stochastic:
                    continue
                got, same = route.outward_codes(x, cast), []
                for part, own in zip(
                    got.split(route.group_sizes) if sum(route.group_sizes) else (), experts, strict=False
                ):
                    q = mf.quantize(own, cast)
                    same.append(torch.equal(part.codes.view(torch.uint8), q.codes.view(torch.uint8)))
                    same.append(torch.equal(part.scale, q.scale) and part.tensor_scale is None)
                found[name, recipe, gemm] = all(same)
    return found


def experts_of(recipe, first: int, number: int) -> nn.ModuleList:
    """Two GroupedLinears with the values of experts `first` and following of one model."""
    draws, layers = torch.Generator().manual_seed(3), nn.ModuleList()
    for shape in ((64, FEATURES), (FEATURES, 64)):
        weight = torch.randn(EXPERTS, *shape, generator=draws).bfloat16() / 8
        layers.append(mf.GroupedLinear(number, *shape[::-1], recipe=recipe, dtype=torch.bfloat16))
        layers[-1].weight.data.copy_(weight[first : first + number])
    return layers


def run(experts: nn.ModuleList, x: torch.Tensor, sizes) -> torch.Tensor:
    return experts[1](torch.relu(experts[0](x, sizes)), sizes)


def gradients_of(rank: int, name: str) -> torch.Tensor:
    return -rows_of(rank, name).roll(1, 1)


MIXTURES = {name: from_name(name) for name in OF_ROWS}
# Who sends rows to whom is no matter of the recipe, and `payloads` sends every format by every table of sizes: blocks
# meet all tables here, the others the ragged one.
EVERY_SIZE = ("plain", "mxfp8")


def mixtures(rank: int, names: tuple[str, ...] = ("plain", *MIXTURES)) -> dict:
    """y, dx and dw of experts on two ranks beside those of one process that has all tokens and all experts."""
    found = {}
    for label, recipe in ((name, MIXTURES.get(name)) for name in names):
        for name, sizes in SIZES.items() if label in EVERY_SIZE else [("ragged", SIZES["ragged"])]:
            total = [sum(column) for column in zip(*sizes, strict=True)]
            whole = experts_of(recipe, 0, EXPERTS)
            every = [torch.cat([at for source in range(WORLD) for at in at_experts(source, name, rows)])
                     for rows in (rows_of, gradients_of)]  # fmt: skip
            x = every[0].requires_grad_()
            y = run(whole, x, total)
            y.backward(every[1])
            for payload in (None, recipe) if recipe is not None else (None,):
                if payload is not None:  # from the values that arrive
                    for index, gemm in enumerate(("fprop", "dgrad")):
                        cast = recipe.cast(gemm, "lhs")
                        parts = (mf.quantize(part, cast).dequantize() for part in every[index].detach().split(total))
                        every[index] = torch.cat(tuple(parts))
                    whole.zero_grad()
                    run(whole, every[0], total).backward(every[1])
                local, own = experts_of(recipe, 2 * rank, 2), rows_of(rank, name).requires_grad_()
                sent = mfd.dispatch(own, sizes[rank], recipe=payload)
                result = sent.combine(run(local, sent.x, sent.group_sizes))
                result.backward(gradients_of(rank, name))
                expected = [part.grad[2 * rank : 2 * rank + 2] for part in whole.parameters()]
                dw = all(
                    torch.equal(part.grad, other) for part, other in zip(local.parameters(), expected, strict=True)
                )
                same = torch.equal(result, share(y, rank, name)), torch.equal(own.grad, share(x.grad, rank, name)), dw
                found[label, name, payload is not None] = same
    return found


def share(sorted_by_expert: torch.Tensor, rank: int, name: str) -> torch.Tensor:
    """The rows of one rank of a matrix that has those of all ranks, expert by expert."""
    sizes = [size for pair in zip(*SIZES[name], strict=True) for size in pair]
    return torch.cat(sorted_by_expert.split(sizes)[rank::WORLD])


def bad_dispatches(rank: int) -> list[str]:
    x, said = torch.randn(5, 32).bfloat16(), []
    tiles = CustomRecipe(*[Gemm(Cast("fp8_128x128"), Cast("fp8_128x128"))] * 3)
    for arguments, options in (
        ((x, [1, 2, 2]), {}), ((x, [1, 2, 2, 1]), {}), ((x[None], [5, 0]), {}), ((x, [5, 0]), {"recipe": "delayed"}),
        ((x, [5, 0]), {"recipe": tiles}), ((x, [5, 0]), {"recipe": "fp8_current"}), ((x, [5, 0]), {"recipe": "nvfp4"}),
    ):  # fmt: skip
        try:
            mfd.dispatch(*arguments, **options)
        except (InvalidValueError, NotSupportedError) as error:
            said.append(str(error))
    sent = mfd.dispatch(x, [5, 0] if rank == 0 else [0, 5])
    try:
        sent.combine(torch.zeros(7, 4))
    except InvalidValueError as error:
        said.append(str(error))
    return said


class Named(nn.Module):
    """Two layers of one shape, whose order differs by rank."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(32, 32))


def disagreements(rank: int) -> dict[str, str]:
    """Message where ranks differ; every case has a group of its own, whose first collective it is."""
    said = {}

    def note(name, function, *arguments, **options):
        try:
            function(*arguments, **options)
        except NotSupportedError as error:
            said[name] = str(error)

    x = torch.zeros(2, 32).bfloat16()
    note("payloads", mfd.dispatch, x, [1, 1], group=dist.new_group([0, 1]), recipe="mxfp8" if rank else "mxfp4")
    note("features", mfd.dispatch, x[:, : 16 + 16 * rank], [1, 1], group=dist.new_group([0, 1]))
    models = {name: Named("up", "down") for name in ("recipe", "equal")} | {
        "order": Named(*("up", "down")[:: 1 - 2 * rank])
    }
    for name, model in models.items():
        mf.convert(model, "nvfp4" if rank and name == "recipe" else "mxfp8")
        note(name, mfd.check_ranks, model)
    state, stored, width = (nn.Sequential(nn.Linear(32, 32)).requires_grad_(False) for _ in range(3))
    mf.convert(state, "mxfp8" if rank else "delayed")
    note("state", mfd.check_ranks, state)
    note("stored", mfd.check_ranks, mf.quantize_(stored, mf.WeightOnly("nvfp4" if rank else "mxfp4")) and stored)
    note("width", mfd.check_ranks, width.bfloat16() if rank else width)
    used = mf.Linear(32, 32)
    with mf.autocast(enabled=bool(rank), recipe=DelayedScaling(reduce_amax=False)):
        used(torch.ones(2, 32))
    note("buffers", mfd.check_ranks, used)
    own = CustomRecipe(*[Gemm("mxfp8", "mxfp8")] * 2, Gemm("mxfp4" if rank else "mxfp8", "mxfp8"))
    note("custom", mfd.check_ranks, mf_converted(nn.Sequential(nn.Linear(32, 32)), own))
    note("delayed", delayed_step, 32, DelayedScaling(margin=rank))
    note("length", delayed_step, 32, DelayedScaling(amax_history_len=4 + rank))
    note("elements", delayed_step, 32, DelayedScaling(fp8_format="E4M3" if rank else "HYBRID"))
    for _ in range(1 + rank):  # at another address on either rank

        def largest(history: torch.Tensor) -> torch.Tensor:
            return history.max()

        unused.append(largest)
    note("equal", delayed_step, 32, DelayedScaling(amax_compute_algo=unused[-1]))
    note("equal", mfd.check_ranks, mf_converted(make_mlp("mxfp8"), DelayedScaling(amax_compute_algo=unused[-1])))
    return said


unused: list = []


def gathered(rank: int) -> dict[str, str]:
    """Message of the first forward where ranks hold other weights under `fully_shard`, by what differs."""
    said, mesh = {}, init_device_mesh("cpu", (WORLD,))
    cases: dict[str, tuple] = {
        "recipe": (("fp8_current", "mxfp8"), None), "delayed": (("delayed", "nvfp4"), None),
        "stored": (None, ("mxfp4", "nvfp4")), "rows": (None, ("fp8_row", "mxfp8")), "equal": (["mxfp8"] * 2, None),
    }  # fmt: skip
    for name, (recipes, stored) in cases.items():
        model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(stored is None)
        if recipes:
            mf.convert(model, recipes[rank])
            mfd.low_precision_all_gather(model)
        else:
            mf.quantize_(model, mf.WeightOnly(stored[rank]))
        fully_shard(model, mesh=mesh)
        try:
            model(torch.ones(2, 64))
        except NotSupportedError as error:
            said[name] = str(error)
    return said


def delayed_step(size: int, recipe) -> None:
    layer = mf.Linear(size, size)
    with mf.autocast(recipe=recipe, amax_reduction_group=dist.new_group([0, 1])):
        y = layer(torch.ones(2, size))
    y.sum().backward()
    mf.update_scaling(layer)


def make_mlp(recipe) -> nn.Sequential:
    torch.manual_seed(0)
    return mf_converted(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), recipe)


def mf_converted(model: nn.Sequential, recipe) -> nn.Sequential:
    mf.convert(model, recipe)
    return model


def microbatch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(7 * number + rank)) * (1 + rank + number)


def beside_no_sync(rank: int) -> dict:
    """Three steps of two microbatches; the first beside one process that has the microbatches of both ranks."""
    recipe = DelayedScaling(amax_history_len=3)
    parallel, alone = (
        DistributedDataParallel(make_mlp(recipe)),
        make_mlp(DelayedScaling(amax_history_len=3, reduce_amax=False)),
    )
    optimizer, found = torch.optim.SGD(parallel.parameters(), 0.1), {}
    for step in range(3):
        with mf.autocast(recipe=recipe):
            with parallel.no_sync():
                parallel(microbatch(rank, 2 * step)).square().mean().backward()
            parallel(microbatch(rank, 2 * step + 1)).square().mean().backward()
        if step == 0:
            with mf.autocast(recipe=recipe):
                for source in range(WORLD):
                    for number in range(2):
                        alone(microbatch(source, number)).square().mean().backward()
            for model in (parallel.module, alone):
                mf.update_scaling(model)
            found["first step"] = states(parallel.module) == states(alone)
            found["gradients"] = all(
                torch.allclose(ours.grad, theirs.grad / WORLD, rtol=1e-5, atol=1e-6)
                for ours, theirs in zip(parallel.parameters(), alone.parameters(), strict=True)
            )
        optimizer.step()
        optimizer.zero_grad()
    mf.update_scaling(parallel.module)
    return {**found, "state": states(parallel.module), "weights": [p.tolist() for p in parallel.parameters()]}


def states(model: nn.Module) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in model.named_buffers()}


def with_nan(rank: int) -> dict:
    """Rank 1 reads a NaN: if every gradient of this rank has NaN, and if all delayed state is finite."""
    found = {}
    for name in RECIPES:
        model = make_mlp(name)
        parallel, x = DistributedDataParallel(model), microbatch(rank, 0)
        x[0, 3] = float("nan") if rank else 0.0
        with mf.autocast(recipe=name):
            parallel(x).square().mean().backward()
        mf.update_scaling(model)
        spoilt = all(bool(parameter.grad.isnan().any()) for parameter in model.parameters())
        found[name] = spoilt, all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    return found


class Stage(nn.Module):
    """A part of a model that enters an autocast of its own, or (None) follows that of its caller."""

    def __init__(self, recipe) -> None:
        super().__init__()
        self.layers, self.recipe = nn.Sequential(mf.Linear(32, 64), nn.ReLU(), mf.Linear(64, 32)), recipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recipe is None:
            return self.layers(x)
        with mf.autocast(recipe=self.recipe):
            return self.layers(x)


STAGES = ("mxfp4", None)  # the recipe of each stage; that of the second is around the schedule
AROUND = DelayedScaling(amax_history_len=2, reduce_amax=False)


def pipelines(rank: int) -> dict:
    """Gradients and state of a stage after two steps of four microbatches, beside the stages in one process."""
    found = {}
    torch.manual_seed(5)
    stages = [Stage(recipe) for recipe in STAGES]
    x, target = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    for kind in (ScheduleGPipe, Schedule1F1B):
        alone, own = copy.deepcopy(stages), copy.deepcopy(stages[rank])
        # Without examples torch would first run the stages on memory that it has not filled, which would be recorded.
        example = (
            torch.empty(4, 32, device="meta", requires_grad=rank == 1),
            torch.empty(4, 32, device="meta", requires_grad=True),
        )
        stage = PipelineStage(own, rank, WORLD, torch.device("cpu"), input_args=example[0], output_args=example[1])
        schedule = kind(stage, 4, loss_fn=nn.functional.mse_loss, scale_grads=False)
        recipe = "nvfp4" if rank == 0 else AROUND  # rank 0's would show if stages shared anything
        for step in range(2):
            with mf.autocast(recipe=recipe):
                schedule.step(*([x[step]] if rank == 0 else []), **({} if rank == 0 else {"target": target[step]}))
            with mf.autocast(recipe=AROUND):
                for own_x, own_target in zip(x[step].chunk(4), target[step].chunk(4), strict=True):
                    middle = alone[0](own_x).detach().requires_grad_()
                    nn.functional.mse_loss(alone[1](middle), own_target).backward()
                    alone[0](own_x).backward(middle.grad)
        for model in (own, alone[rank]):
            mf.update_scaling(model)
        same = [
            torch.equal(ours.grad, theirs.grad)
            for ours, theirs in zip(own.parameters(), alone[rank].parameters(), strict=True)
        ]
        found[kind.__name__] = all(same), states(own) == states(alone[rank]), len(states(own))
    return found


def the_page(rank: int) -> None:
    """The blocks of docs/distributed.md, in a world of two."""
    namespace = {"__name__": "__main__"}
    for block in code_blocks(PAGE, "python"):
        exec(compile(block.padded, str(PAGE), "exec"), namespace)


def gathers(rank: int) -> dict[str, object]:
    """Rows of every rank below each other, by the collective that compiled code calls."""
    functional, group = torch.ops._c10d_functional, torch.distributed.group.WORLD.group_name
    found: dict[str, object] = {}
    values = torch.randn(256, 3, FEATURES, generator=torch.Generator().manual_seed(3)).bfloat16()
    for name in ("mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4_row", "fp8_row", "fp8_1x128", "fp8_128x128", "fp8_tensor"):
        whole = mf.quantize(values, name)
        try:
            made = functional.all_gather_into_tensor(whole.chunk(WORLD)[rank], WORLD, group)
            found[name] = torch.equal(functional.wait_tensor(made), whole)
        except NotSupportedError as error:
            found[name] = str(error)
    return found


# Every format travels in `payloads` too.
SOME = ("plain", "mxfp8", "fp8_block")
CASES = (
    payloads, gathers, With(mixtures, names=SOME), bad_dispatches, disagreements, gathered, beside_no_sync, with_nan,
    pipelines,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"), WORLD, seconds=30)


def test_rows_that_are_gathered_are_those_of_the_whole(ranks) -> None:  # features D5
    for found in of(ranks, gathers):
        assert "all_gather_into_tensor: got a QuantizedTensor (fp8_tensor)" in found.pop("fp8_tensor")
        assert found == dict.fromkeys(found, True)


def test_codes_that_arrive_are_those_of_a_cast_after_a_bf16_all_to_all(ranks) -> None:
    for found in of(ranks, payloads):
        assert len(found) > 4 * len(OF_ROWS)
        assert not [key for key, same in found.items() if not same]


def test_experts_on_two_ranks_give_the_bits_of_one_process(ranks) -> None:
    """y, dx and dw; under a payload dw is that of the values which arrive."""
    for found in of(ranks, mixtures):
        recipes = {label for label, *_ in found}
        assert recipes >= set(SOME)
        assert len(found) == 4 + 8 + 2 * (len(recipes) - 2)
        assert not {key: same for key, same in found.items() if same != (True, True, True)}


@pytest.mark.slow("further recipes across ranks")
def test_experts_on_two_ranks_give_the_bits_of_one_process_under_every_recipe(tmp_path) -> None:
    made = run_ranks((mixtures,), str(tmp_path / "store"), WORLD, seconds=30)
    test_experts_on_two_ranks_give_the_bits_of_one_process(made)
    assert {label for label, *_ in made[0]["mixtures"]} == {"plain", *MIXTURES}


def test_what_cannot_be_dispatched_is_named(ranks) -> None:
    for said in of(ranks, bad_dispatches):
        words = (
            f"group_sizes: got 3 sizes, needed a multiple of {WORLD}: one for each expert",
            "add up to 6",
            "shape (1, 5, 32)",
            "layer's state",
            "scales of 128 rows, axis 0",
            "fp8_tensor for fprop.lhs, which has a scale of the whole tensor",
            "nvfp4 for fprop.lhs, which has a scale of the whole tensor",
            "shape (7, 4)",
        )
        assert len(said) == len(words)
        assert all(word in text for word, text in zip(words, said, strict=True)), said


def test_ranks_that_differ_are_named_at_the_first_collective(ranks) -> None:
    for said in of(ranks, disagreements):
        assert sorted(said) == [
            "buffers", "custom", "delayed", "elements", "features", "length", "order", "payloads", "recipe", "state",
            "stored", "width",
        ]  # fmt: skip
        assert "recipe is MXFP4BlockScaling" in said["payloads"]
        assert "on rank 0 and MXFP8BlockScaling" in said["payloads"]
        assert "features is 16 on rank 0 and 32 on rank 1" in said["features"]
        assert "'up' (" in said["order"]
        assert "and 'down' (" in said["order"]
        assert "'up', is MXFP8BlockScaling(" in said["recipe"]
        assert "on rank 0 and NVFP4BlockScaling(" in said["recipe"]
        assert "wgrad" in said["custom"]  # the row in which they differ
        assert "mxfp4" in said["custom"]
        assert all(len(text.splitlines()) == 1 and len(text) < 500 for text in said.values()), said
        assert "margin=1" in said["delayed"]
        assert "amax_history_len=4" in said["length"]
        assert "amax_history_len=5" in said["length"]
        assert "dy up to 57344 on rank 0 and 'Linear' under" in said["elements"]
        assert "the recipe of layer 1, '0', is DelayedScaling(" in said["state"]
        assert "the buffer 'scaling_x_scale' of layer 0, '', is nothing on rank 0 and torch.float32" in said["buffers"]
        assert "{'weight': 'mxfp4 (32, 32)'" in said["stored"]
        assert "torch.float32 (32, 32)" in said["width"]


def test_ranks_whose_weights_differ_are_named_before_the_first_gather(ranks) -> None:
    for said in of(ranks, gathered):
        assert sorted(said) == ["delayed", "recipe", "rows", "stored"]
        assert all(text.startswith("fully_shard: ") and len(text) < 600 for text in said.values()), said
        assert "the recipe of '0' is Float8CurrentScaling(" in said["recipe"]
        assert "on rank 0 and MXFP8BlockScaling(" in said["recipe"]
        assert "the recipe of '0' is DelayedScaling(" in said["delayed"]
        assert "mxfp4" in said["stored"].lower()
        assert "on rank 1" in said["rows"]


def test_ddp_accumulates_and_keeps_one_state(ranks) -> None:
    first, second = of(ranks, beside_no_sync)
    assert first == second
    assert first["first step"]
    assert first["gradients"]


def test_nan_on_one_rank_shows_on_all(ranks) -> None:
    for found in of(ranks, with_nan):
        assert set(found.values()) == {(True, True)}


def test_stages_of_a_pipeline_share_no_recipe(ranks) -> None:
    first, second = of(ranks, pipelines)
    for kind in ("ScheduleGPipe", "Schedule1F1B"):
        assert first[kind] == (True, True, 0)
        assert second[kind] == (True, True, 12)


@pytest.mark.slow("pages on two ranks")
def test_the_page_runs_on_two_ranks(tmp_path) -> None:
    of(run_ranks((the_page,), str(tmp_path / "store"), WORLD), the_page)


@pytest.mark.gpu
def test_ranks_on_gpus(tmp_path) -> None:
    """Codes that travel, and ranks that differ, through NCCL."""
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, sees {torch.cuda.device_count()}")
    made = run_ranks((on_gpus, payloads, bad_dispatches, disagreements), str(tmp_path / "store"), WORLD, "nccl")
    test_codes_that_arrive_are_those_of_a_cast_after_a_bf16_all_to_all(made)
    test_what_cannot_be_dispatched_is_named(made)
    test_ranks_that_differ_are_named_at_the_first_collective(made)
