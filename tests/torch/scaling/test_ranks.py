"""Several processes: amaxes of delayed scaling where ranks do different things, beside DDP, and noise of their own."""

import contextlib
import copy
import datetime
import gc
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as mfd  # noqa: E402
from microfloat.errors import InvalidValueError, NotSupportedError, RankError  # noqa: E402
from microfloat.recipes import Cast, DelayedScaling  # noqa: E402
from microfloat.torch.scaling import amax_reduction as reduction  # noqa: E402
from microfloat.torch.scaling import rank_errors as failures  # noqa: E402
from microfloat.torch.scaling import regions as scaling  # noqa: E402
from tests.torch.distributed.ranks import With, of, on_gpus, run_ranks  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=4)
WORLD = 2


def full(value: float, width: int = 8) -> torch.Tensor:
    return torch.full((2, width), float(value))


def region():
    return mf.autocast(recipe=RECIPE)


def ends_after(seconds: float, group: object) -> object:
    """The group, whose collectives end after so many seconds; ranks had the usual time to meet in making it."""
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), group)
    return group


def state(layer) -> dict[str, list]:
    return {name: buffer.tolist() for name, buffer in layer.named_buffers()}


def newest(layer, slot: str = "x") -> tuple[float, float]:
    """The newest amax that was rolled in, and the encode scale."""
    history = layer._buffers[f"scaling_{slot}_amax_history"]
    return float(history[-1]), float(layer._buffers[f"scaling_{slot}_scale"])


def on_one_gpu(rank: int) -> None:
    torch.set_default_device("cuda:0")


def without_a_region(rank: int):
    layer = mf.Linear(8, 8, recipe=RECIPE)
    for step in range(2):
        y = layer(full(rank + step + 1))
        y.backward(full(10 * rank + 1))
    mf.update_scaling(layer)
    return layer.scaling_x_amax_history.tolist(), layer.scaling_dy_amax_history.tolist()


def other_layers_on_other_ranks(rank: int):
    """a on both, b on rank 0 alone, c on rank 1 alone; then the same in another order; then a layer that is new."""
    a, b, c, d = (mf.Linear(8, 8) for _ in range(4))
    model = nn.ModuleList([a, b, c, d])
    seen = []
    for step, layers in enumerate([((a, b), (c, a)), ((b, a), (a, c)), ((a, d), (a,)), ((a,), (a,))]):
        with region():
            y = sum(layer(full((rank + 1) * 2**step)) for layer in layers[rank])
        seen.append([newest(layer) if layer._buffers else None for layer in model])
        y.backward(full(rank + 1))
    mf.update_scaling(model)
    return seen, {name: value.tolist() for name, value in model.named_buffers()}


def a_second_model(rank: int):
    """Layers that both ranks begin to use after they have agreed on others: amaxes of every step, and exchanges."""
    earlier = mf.Linear(8, 8)
    with region():
        y = earlier(full(1))
    y.sum().backward()
    mf.update_scaling(earlier)
    model, seen, exchanges = nn.Sequential(mf.Linear(8, 8), mf.Linear(8, 8)), [], []
    gather = dist.all_gather_object
    dist.all_gather_object = lambda told, *rest, **options: (exchanges.append(told), gather(told, *rest, **options))
    try:
        for step in range(3):
            with region():
                y = model[0](full((rank + 1) * 2**step))
            y.backward(full(rank + 3))
            mf.update_scaling(model)
            seen.append((newest(model[0]), newest(model[0], "dy")))
        with region():  # on one rank alone, which only an exchange tells the other
            sum(layer(full(rank + 5)) for layer in model[: 1 + rank])
        with region():
            model(full(rank + 7))
        seen.append(newest(model[1])[0] > 0)
    finally:
        dist.all_gather_object = gather
    return seen, len(exchanges)


def read_later(rank: int):
    """As on a GPU: the host reads what was announced one all-reduce later."""
    at_once, reduction._is_read_later = reduction._is_read_later, lambda live: True
    try:
        return a_second_model(rank), other_layers_on_other_ranks(rank)
    finally:
        reduction._is_read_later = at_once


def recipes_in_another_order(rank: int):
    """Two recipes in one region, whose layers are called in another order on either rank."""
    first, second = mf.Linear(8, 8, recipe=RECIPE), mf.Linear(8, 8, recipe=DelayedScaling(margin=1, amax_history_len=2))
    with region():
        for layer in (first, second) if rank else (second, first):
            layer(full(1 + rank if layer is first else 16 + rank))
    return newest(first), newest(second)


def saving_and_evaluating_alone(rank: int):
    """On rank 0 alone, with updates pending: nobody waits for it, nor it for others."""
    model = nn.Sequential(mf.Linear(8, 8), mf.Linear(8, 8))
    for _ in range(2):
        with region():
            y = model(full(rank + 1))
        y.sum().backward()
        if rank == 0:
            model.state_dict()
            copy.deepcopy(model)
            with torch.no_grad(), region():
                model(full(100))
    mf.update_scaling(model)
    return state(model)


def one_backward_alone(rank: int):
    """Reentrant checkpoints roll x with dy: on rank 1 by what rank 0 says of a slot that never ran there."""
    a, b = mf.Linear(8, 8, recipe=RECIPE), mf.Linear(8, 8, recipe=RECIPE)
    with region():
        y = checkpoint(a, full(1).requires_grad_(), use_reentrant=True).sum()
        if rank == 0:
            y = y + checkpoint(b, full(4).requires_grad_(), use_reentrant=True).sum()
    y.backward()
    mf.update_scaling(nn.ModuleList([a, b]))
    alone = mf.Linear(8, 8, recipe=RECIPE)  # without a region, and with a backward on rank 0 only
    for _ in range(2):
        y = alone(full(rank + 1))
        if rank == 0:
            y.sum().backward()
    return newest(b), newest(b, "dy"), newest(alone), newest(alone, "dy")


def nothing_on_one_rank(rank: int):
    """Regions in which rank 1 calls nothing, gives its layer no rows, or has no backward; rank 0 evaluates alone."""
    layer = mf.Linear(8, 8)
    for step, how in enumerate(("no call", "no rows", "all", "no backward", "no call", "all", "all")):
        alone = rank == 1 and how
        with region():
            y = layer(full(2**step)[: 0 if alone == "no rows" else 2]) if alone != "no call" else full(0)
        if y.requires_grad and alone != "no backward":
            y.sum().backward()
        with torch.no_grad(), region():
            if rank == 0:
                layer(full(100))
        if rank == 0:
            with region(), torch.no_grad():
                layer(full(100))
    mf.update_scaling(layer)
    return state(layer)


def evaluation_and_a_nested_recipe(rank: int):
    """Rank 0 evaluates between two steps; in one a recipe that reduces nothing is nested, and rank 1 has no tokens."""
    layer, own = mf.Linear(8, 8), mf.Linear(8, 8)
    with region():
        y = layer(full(rank + 1))
    y.sum().backward()
    mf.update_scaling(layer)
    if rank == 0:
        with torch.no_grad(), region():
            layer(full(100))
    dist.barrier()
    with region():
        y = layer(full(4)) if rank == 0 else None
        with mf.autocast(recipe=DelayedScaling(amax_history_len=4, reduce_amax=False)):
            own(full(rank + 1))
    if y is not None:
        y.sum().backward()
    mf.update_scaling(layer)
    return newest(layer), newest(own)


def reentrant_checkpoint(rank: int):
    layer = mf.Linear(8, 8)
    layer.pin(RECIPE)
    for _ in range(2):
        with region():
            y = checkpoint(layer, full(rank + 1).requires_grad_(), use_reentrant=True)
        y.sum().backward()
    mf.update_scaling(layer)
    return newest(layer), newest(layer, "dy")


def a_group_of_its_own(rank: int):
    """Each rank reduces over itself alone."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    layer = mf.Linear(8, 8)
    with mf.autocast(recipe=RECIPE, amax_reduction_group=groups[rank]):
        y = checkpoint(layer.pin(RECIPE), full(rank + 1).requires_grad_(), use_reentrant=True)
    y.sum().backward()
    mf.update_scaling(layer)
    return newest(layer)[0]


def shapes_that_differ(rank: int) -> tuple[str, float]:
    """A step with a layer whose shape differs, and one without it over the same group, which agrees again."""
    layer, group, message = mf.Linear(8 + 8 * rank, 8), dist.new_group([0, 1]), ""
    try:
        with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            layer(full(1, 8 + 8 * rank))
    except NotSupportedError as error:
        message = str(error)
    del layer
    other = mf.Linear(8, 8)
    with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
        other(full(rank + 1))
    return message, newest(other)[0]


def deleted_on_one_rank(rank: int) -> tuple[list[str], float, float]:
    """A layer whose dy waits for the next autocast ends on rank 0, as where a garbage collector comes earlier."""
    layer, other = mf.Linear(8, 8, recipe=RECIPE), mf.Linear(8, 8)
    layer(full(1)).sum().backward()
    if rank == 0:
        del layer
        gc.collect()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            with mf.autocast(recipe=RECIPE):
                y = other(full(rank + 2 * step + 1))
            y.sum().backward()
        mf.update_scaling(other)
    return [str(one.message) for one in told], newest(other)[0], newest(other, "dy")[0]


def a_region_of_its_own(rank: int) -> str:
    """Rank 0 enters a region alone: it meets rank 1 in the next one, and nobody in the last one."""
    layer, group = mf.Linear(8, 8), dist.new_group([0, 1])

    def step() -> None:
        with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            layer(full(1))

    step()
    ends_after(1, group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "GRACE", 0.1)
        if rank == 0:
            with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
                layer(full(1))
        message = ""
        try:
            step()
        except RankError as error:
            message = str(error)
    scaling.take_shared()
    dist.barrier()
    forget_failures()
    return message


def survived(rank: int) -> list[str]:
    """Rank 0 survives an error of its own; after a step of all ranks nobody quotes it any more."""
    layer, said = mf.Linear(8, 8), []

    def step(group: object) -> None:
        try:
            with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
                layer(full(1))
        except RankError as error:
            said.append(str(error))

    groups = [ends_after(seconds, dist.new_group([0, 1])) for seconds in (1, 30, 0.3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(failures, "GRACE", 0.1)
        for alone, group in zip((True, False, True), groups, strict=True):
            if rank == 0 and alone and group is groups[0]:
                with contextlib.suppress(ValueError), mfd.named_failures():
                    raise ValueError("met by this rank alone")
            elif rank or not alone:
                step(group)
            scaling.take_shared()
            dist.barrier()
    forget_failures()
    return said


def different_layers_without_a_region(rank: int) -> str:
    layers = [mf.Linear(8, 8, recipe=RECIPE) for _ in range(2)]
    try:
        layers[rank](full(1))
    except NotSupportedError as error:
        return str(error)
    return ""


def waiting_alone(rank: int) -> dict[str, str]:
    """What rank 0 meets where rank 1 does not come to a reduction; each has a group with a timeout of its own."""
    layer, said = mf.Linear(8, 8), {}

    def alone(group) -> None:
        with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            layer(full(1))

    def nested(group) -> None:
        with region(), mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            pass

    def nothing(group) -> None:
        """Where rank 1, if it did anything, would evaluate."""
        with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            pass

    for case in (alone, nested, nothing):
        group = ends_after(0.3, dist.new_group([0, 1]))
        if rank == 1 and case is nested:  # but for the inner autocast
            with region():
                pass
        if rank == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(failures, "GRACE", 0.1)
                try:
                    case(group)
                except RankError as error:
                    said[case.__name__] = str(error)
        dist.barrier()
    scaling.take_shared()  # of the regions that ended, on rank 1 alone
    forget_failures()
    groups = [ends_after(0.3, dist.new_group([0, 1])) for _ in range(2)]
    try:
        alone(groups[rank])
    except RankError as error:
        said["elsewhere"] = str(error)
    scaling.take_shared()
    dist.barrier()
    forget_failures()
    return said


def forget_failures() -> None:
    """What ranks have said of a failure that was meant."""
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    store.delete_key(f"microfloat/failed/{dist.get_rank()}")
    dist.barrier()


def different_points(rank: int) -> str:
    """Rank 0 comes to the end of a calibration where rank 1 comes to that of a region."""
    layer, group = mf.Linear(8, 8), dist.new_group([0, 1])

    def calibrate() -> None:
        with mf.autocast(enabled=False, calibrating=True, recipe=RECIPE, amax_reduction_group=group), torch.no_grad():
            layer(full(1))
        mf.update_scaling(layer)

    def train() -> None:
        with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
            layer(full(1))

    calibrate()
    train()
    try:
        train() if rank else calibrate()
    except NotSupportedError as error:
        return str(error)
    return ""


def after_a_group_is_gone(rank: int):
    """A backward, and an update, of a region whose group was destroyed meanwhile; and a new autocast over it."""
    layer, group = mf.Linear(8, 8), dist.new_group([0, 1])
    with mf.autocast(recipe=RECIPE, amax_reduction_group=group):
        y = layer(full(rank + 1))
    y.backward(full(rank + 1))
    dist.destroy_process_group(group)
    with torch.no_grad(), region():
        layer(full(1))
    mf.update_scaling(layer)
    try:
        mf.autocast(recipe=RECIPE, amax_reduction_group=group)
    except InvalidValueError as error:
        return newest(layer), newest(layer, "dy"), str(error)
    return newest(layer), newest(layer, "dy"), ""


class Model(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.inner(x) + 0 * self.norm(x)


def beside_ddp(rank: int):
    """Two microbatches in one region, the largest amax on rank 1 in the first; by where the state was made."""
    made = {}
    for name in ("convert(root)", "convert(child)", "buffers before", "pinned", "at first use"):
        torch.manual_seed(0)
        if name == "pinned":
            model = Model(mf.Linear(8, 8, recipe=RECIPE))
        else:
            model = Model((nn.Linear if "convert" in name else mf.Linear)(8, 8))
        if name == "convert(root)":
            mf.convert(model, RECIPE)
        elif name == "convert(child)":
            mf.convert(model.inner, RECIPE)
        elif name == "buffers before":
            with torch.no_grad(), region():
                model(torch.randn(2, 8))
        wrapped = DistributedDataParallel(model)
        for first, second in ((50, 2), (1, 1)):
            with region():
                wrapped(full(first if rank else 1)).sum().backward()
                wrapped(full(second)).sum().backward()
            made.setdefault(name, []).append(newest(model.inner[0]))
        model.norm.running_mean.fill_(float(rank))
        with region():
            wrapped(full(1))
        made[name].append(float(model.norm.running_mean[0]) < 0.5)  # other buffers are broadcast as ever
    return made


def under_fsdp1(rank: int):
    """A rank holds the flat first rows of the weight, or nothing of it, between calls."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(nn.Sequential(mf.Linear(8, 8)), use_orig_params=True, device_id=full(0).device)
    for value in (1, 3):
        with region():
            model(full(value + rank)).sum().backward()
    mf.update_scaling(model)
    return [newest(model.module[0], slot) for slot in ("x", "dy")]


def noise(rank: int, compiles: bool = True):
    """The seeds and gradients that ranks of one `manual_seed` draw."""
    layer, x = mf.Linear(64, 64, recipe="nvfp4"), torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    dy = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        layer.weight.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(5)))

    def gradient(run):
        torch.manual_seed(7)
        layer.zero_grad()
        run(x.clone().requires_grad_()).backward(dy)
        return layer.weight.grad.tolist()

    forms = {
        "eager": layer,
        "reentrant": lambda x: checkpoint(layer, x, use_reentrant=True),
        "later": lambda x: checkpoint(layer, x, use_reentrant=False),
        "ours": lambda x: mf.checkpoint(layer, x),
    }  # fmt: skip
    if compiles:
        forms["compiled"] = torch.compile(layer, backend="eager")
    made = {name: gradient(run) for name, run in forms.items()}
    mf.set_seed_rank(0)
    made["as one"] = gradient(layer)
    mf.set_seed_rank(1 - rank)
    made["swapped"] = gradient(layer)
    mf.set_seed_rank(None)
    torch.manual_seed(7)
    q = mf.quantize(x, Cast("mxfp4", rounding="stochastic"))
    made["quantize"] = q.codes.tolist()
    torch.manual_seed(7)
    stored = mf.quantize(x, Cast("mxfp4", rounding="stochastic"), seed=1)
    stored.copy_(x)  # a parameter's step, which replicas take alike
    made["stored"] = stored.codes.tolist()
    return made


CASES = (
    without_a_region, other_layers_on_other_ranks, a_second_model, read_later, recipes_in_another_order,
    saving_and_evaluating_alone,
    one_backward_alone, nothing_on_one_rank, evaluation_and_a_nested_recipe,
    reentrant_checkpoint, a_group_of_its_own, beside_ddp, With(noise, compiles=False), different_points,
    after_a_group_is_gone, waiting_alone, a_region_of_its_own, survived, different_layers_without_a_region,
    under_fsdp1, deleted_on_one_rank, shapes_that_differ,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"), WORLD)


def scale(amax: float, largest: float = 448) -> float:
    return float(torch.tensor(largest) / torch.tensor(amax))


def test_layers_without_a_region_share_their_amaxes(ranks) -> None:
    first, second = of(ranks, without_a_region)
    assert first == second == ([0.0, 0.0, 2.0, 3.0], [0.0, 0.0, 11.0, 11.0])


def test_a_layer_that_was_deleted_on_one_rank_does_not_part_the_ranks(ranks) -> None:
    for told, x, dy in of(ranks, deleted_on_one_rank):
        assert told == []
        assert (x, dy) == (4.0, 1.0)


def test_ranks_that_call_different_layers_agree(ranks) -> None:
    (steps, end), (others, other_end) = of(ranks, other_layers_on_other_ranks)
    assert end == other_end
    assert steps == others
    # Each layer's newest x: the largest that any rank has seen, and nothing where no rank has called it.
    amaxes = [[None if layer is None else layer[0] for layer in step] for step in steps]
    assert amaxes == [[2, 1, 2, None], [4, 2, 4, None], [8, 2, 4, 4], [16, 2, 4, 4]]
    assert steps[3][1][1] == scale(2)


def check_a_second_model(made) -> None:
    for seen, exchanges in made:
        x, dy = ([step[i][0] for step in seen[:3]] for i in (0, 1))
        assert x == [2.0, 4.0, 8.0]
        assert dy == [4.0, 4.0, 4.0]
        assert seen[3]
        assert exchanges == 3  # one at either point, and one for the layer that one rank alone had called


def test_layers_that_all_ranks_begin_to_use_count_at_once(ranks) -> None:
    check_a_second_model(of(ranks, a_second_model))


def test_what_is_announced_may_be_read_one_reduction_later(ranks) -> None:
    made = of(ranks, read_later)
    check_a_second_model([second for second, _ in made])
    ends = [end for _, (_, end) in made]
    assert ends[0] == ends[1]
    assert ends[0]["0.scaling_x_amax_history"][-1] == 16.0
    assert ends[0]["3.scaling_x_amax_history"] == [0.0, 0.0, 0.0, 4.0]  # of the one layer that rank 0 alone has called


def test_recipes_that_ranks_meet_in_another_order(ranks) -> None:
    first, second = of(ranks, recipes_in_another_order)
    assert first == second == ((2.0, 224.0), (17.0, scale(17) / 2))


def test_a_rank_that_saves_or_evaluates_alone_waits_for_nobody(ranks) -> None:
    first, second = of(ranks, saving_and_evaluating_alone)
    assert first == second
    assert first["0.scaling_x_amax_history"] == [0.0, 0.0, 2.0, 2.0]


def test_a_backward_on_one_rank_alone_counts_on_all(ranks) -> None:
    first, second = of(ranks, one_backward_alone)
    assert first == ((4.0, 112.0), (1.0, 57344.0), (2.0, 224.0), (1.0, 57344.0))
    assert second == first


def test_a_rank_that_records_nothing_waits_for_nobody(ranks) -> None:
    first, second = of(ranks, nothing_on_one_rank)
    assert first == second
    assert first["scaling_x_amax_history"] == [0.0, 16.0, 32.0, 64.0]


def test_one_rank_evaluates_and_a_nested_recipe_keeps_its_amaxes(ranks) -> None:
    first, second = of(ranks, evaluation_and_a_nested_recipe)
    assert first[0] == second[0]
    assert (first[0][0], first[1][0], second[1][0]) == (4.0, 1.0, 2.0)


def test_reentrant_checkpoints_reduce_too(ranks) -> None:
    first, second = of(ranks, reentrant_checkpoint)
    assert first == second == ((2.0, 224.0), (1.0, 57344.0))


def test_layers_under_fsdp1_share_their_amaxes(ranks) -> None:
    assert of(ranks, under_fsdp1) == [[(4.0, 112.0), (1.0, 57344.0)]] * WORLD


def test_a_recomputation_reduces_over_the_group_of_its_first_pass(ranks) -> None:
    assert of(ranks, a_group_of_its_own) == [1.0, 2.0]


def test_shapes_that_differ_are_named_on_every_rank(ranks) -> None:
    for message, newest_amax in of(ranks, shapes_that_differ):
        assert newest_amax == 2.0
        assert "amax_reduction_group" in message
        assert "(8, 8) on rank 0 and (8, 16) on rank 1" in message


def test_a_region_of_one_rank_alone_is_named_after_the_timeout(ranks) -> None:
    message, none = of(ranks, a_region_of_its_own)
    assert not none
    assert "the maximum of amaxes under delayed scaling, at the entry of an autocast" in message
    assert "rank 1 died, or did not come to it within the timeout" in message


def test_an_error_that_was_survived_is_quoted_no_more(ranks) -> None:
    first, second = of(ranks, survived)
    assert not first
    assert "rank 0 raised ValueError: met by this rank alone" in second[0]
    assert "rank 0 died, or did not come to it" in second[1]
    assert "ValueError" not in second[1]


def test_different_layers_without_a_region_are_named_on_every_rank(ranks) -> None:
    for message in of(ranks, different_layers_without_a_region):
        assert "Put the step inside `with microfloat.torch.autocast():`" in message


def test_ranks_at_different_points_are_named(ranks) -> None:
    for message in of(ranks, different_points):
        assert (
            "got one rank at the exit of an autocast and another one at update_scaling after a calibration" in message
        )


def test_a_group_that_is_gone_is_waited_for_no_more(ranks) -> None:
    for rank, (x, dy, message) in enumerate(of(ranks, after_a_group_is_gone)):
        assert (x[0], dy[0]) == (2.0, rank + 1)
        assert "amax_reduction_group: got a process group that was destroyed" in message


def test_a_world_that_has_ended_is_waited_for_no_more() -> None:
    """Of several ranks, which left a region; the next world would not know that this rank waits."""
    with world_of_one():
        shared = {None: DelayedScaling()}
        scaling.leave_shared(shared)
        assert scaling.take_shared() is shared
        scaling.leave_shared(shared)
    assert scaling.take_shared() == {}
    assert scaling.take_shared() == {}


def test_a_rank_that_waits_alone_names_the_others_within_the_timeout(ranks) -> None:
    first, second = of(ranks, waiting_alone)
    assert (sorted(first), sorted(second)) == (["alone", "elsewhere", "nested", "nothing"], ["elsewhere"])
    for rank, made in enumerate((first, second)):
        message = made.pop("elsewhere")
        assert f"ranks did not come to the same point: rank {1 - rank} waited in the maximum of amaxes" in message
    for message in first.values():
        assert "the maximum of amaxes under delayed scaling, at the exit of an autocast of group " in message
        assert "rank 1 died, or did not come to it within the timeout" in message


@pytest.mark.parametrize("name", ["convert(root)", "convert(child)", "buffers before", "pinned", "at first use"])
def test_ddp_leaves_live_amaxes_alone(ranks, name) -> None:
    for made in of(ranks, beside_ddp):
        assert made[name] == [(50.0, scale(50)), (1.0, scale(50)), True]


def test_ranks_of_one_seed_draw_noise_of_their_own(ranks) -> None:
    first, second = of(ranks, noise)
    forms = {"compiled", "reentrant", "later", "ours"} & first.keys()
    for name in ("eager", *forms, "quantize"):
        assert first[name] != second[name], name
    for name in (*forms, "as one"):
        assert first[name] == first["eager"], name  # rank 0 draws what a single process does
    for name in forms:
        assert second[name] == second["eager"], name
    assert second["as one"] == first["eager"]
    assert first["swapped"] == second["eager"]
    assert second["swapped"] == first["eager"]
    assert first["stored"] == second["stored"]


@pytest.mark.slow("further ways of training across ranks")
def test_compiled_ranks_of_one_seed_draw_noise_of_their_own(tmp_path) -> None:
    made = run_ranks((noise,), str(tmp_path / "store"), WORLD)
    assert all("compiled" in found for found in of(made, noise))
    test_ranks_of_one_seed_draw_noise_of_their_own(made)


@pytest.mark.gpu
def test_ranks_agree_on_one_gpu(tmp_path) -> None:
    """As on two, over gloo: what the host reads one all-reduce later."""
    cases = on_one_gpu, a_second_model, recipes_in_another_order
    made = run_ranks(cases, str(tmp_path / "store"), WORLD, takes_gpus=True)
    check_a_second_model(of(made, a_second_model))
    test_recipes_that_ranks_meet_in_another_order(made)


@pytest.mark.gpu
def test_ranks_agree_on_gpus(tmp_path) -> None:
    """The same through NCCL, where the host reads what was announced one all-reduce later."""
    if torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, sees {torch.cuda.device_count()}")
    cases = (
        on_gpus, without_a_region, other_layers_on_other_ranks, a_second_model, recipes_in_another_order,
        saving_and_evaluating_alone,
        reentrant_checkpoint, beside_ddp,
    )  # fmt: skip
    made = run_ranks(cases, str(tmp_path / "store"), WORLD, backend="nccl")
    check_a_second_model(of(made, a_second_model))
    ends = [end for _, end in of(made, other_layers_on_other_ranks)]
    assert ends[0] == ends[1]
    assert ends[0]["0.scaling_x_amax_history"][-1] == 16.0
    assert ends[0]["3.scaling_x_amax_history"] == [0.0, 0.0, 0.0, 4.0]
    for case in cases:
        first, second = of(made, case)
        assert first == second or case is other_layers_on_other_ranks, case.__name__
    assert of(made, reentrant_checkpoint)[0] == ((2.0, 224.0), (1.0, 57344.0))
    assert of(made, beside_ddp)[0]["pinned"] == [(50.0, scale(50)), (1.0, scale(50)), True]
