"""Plain tensors between the layers of a plan: the bytes that DTensors would have given, and no DTensor made for it."""

import contextlib
import copy
import gc
import os
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard  # noqa: E402
from torch.distributed.tensor import parallel as theirs  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import microfloat.torch as mf  # noqa: E402
import microfloat.torch.distributed as ours  # noqa: E402
from microfloat.errors import NotSupportedError  # noqa: E402
from microfloat.torch.distributed import collectives  # noqa: E402
from microfloat.torch.distributed import tp_dtensor as placed  # noqa: E402
from microfloat.torch.distributed import tp_gather as gathering  # noqa: E402
from microfloat.torch.distributed import tp_schedule as sharded  # noqa: E402
from microfloat.torch.linear.schedule import SCHEDULES  # noqa: E402
from tests.torch.distributed.ranks import With, of, run_ranks  # noqa: E402

SIZE, TOKENS = 64, 32
OURS = "all_gather_together", "reduce_scatter"
HIGH_PRECISION = "rowwise_with_gw_hp"  # whose wgrad reads x and dy in high precision, as which they are gathered


def facts(tensor):
    """All that a caller sees of a tensor, but how it came to be."""
    if tensor is None:
        return None
    if isinstance(tensor, DTensor):
        local = tensor._local_tensor
        return (
            str(tensor.placements),
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            local.stride(),
            local.tolist(),
        )
    tensor = tensor.wait() if hasattr(tensor, "wait") else tensor
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.tolist()


def mesh_of_all():
    return init_device_mesh("cpu", (dist.get_world_size(),))


# --------------------------------------------------------------------------------------------------- the Function


def as_public_calls(rank: int):
    """(what, by our Functions, by torch's calls) of DTensors taken apart and put together, for every placement."""
    mesh, found = mesh_of_all(), {}
    for name, placement, gradient in (
        ("rows", Shard(0), Shard(0)), ("columns", Shard(1), Shard(1)), ("whole", Replicate(), Partial()),
        ("sums", Partial(), Replicate()),
    ):  # fmt: skip
        for fallback in (False, True):
            values, dy = torch.randn(4, 6, dtype=torch.bfloat16), torch.randn(4, 6, dtype=torch.bfloat16)
            shape = DTensor.from_local(values, mesh, [placement]).shape
            made = []
            for is_ours in (True, False):
                with pytest.MonkeyPatch.context() as patch:
                    if fallback and is_ours:  # a version of torch that has moved what it does not document
                        patch.setattr(placed, "DTensorSpec", None)
                    leaf = values.clone().requires_grad_()
                    of_y = placed.Placed(mesh, (placement,), shape)
                    of_dy = placed.Placed(mesh, placed.of_gradient((placement,)), shape)
                    y = placed.AsPlaced.apply(leaf, of_y, of_dy) if is_ours else DTensor.from_local(
                        leaf, mesh, [placement], run_check=False
                    )  # fmt: skip
                    y.retain_grad()
                    local = y.to_local(grad_placements=[gradient])
                    local.view(-1).view(4, 6).backward(dy)
                    with torch.no_grad():
                        silent = placed.AsPlaced.apply(leaf, of_y, of_dy)
                    made.append([facts(one) for one in (y, y.grad, local, leaf.grad)])
                    assert not silent.requires_grad
            found[name, fallback] = made
    return found


def uneven(rank: int):
    """DTensors whose rows and columns are no multiple of the ranks, and how their parts lie."""
    mesh, found = mesh_of_all(), []
    whole = torch.randn(5, 7)
    for dim in (0, 1):
        part = whole.chunk(dist.get_world_size(), dim)[rank].contiguous()
        made = placed.Placed(mesh, (Shard(dim),), whole.shape).wrap(part)
        found.append((made.shape == whole.shape, made.stride() == whole.stride(), made.placements,
                      torch.equal(made.full_tensor(), whole)))  # fmt: skip
    return found


# ------------------------------------------------------------------------------------------------------- a whole plan


def relative(a, b) -> float:
    a, b = torch.tensor(a), torch.tensor(b)
    return float((a - b).norm() / b.norm())


class Block(nn.Module):
    """A norm, two layers that read it, and one that sums over ranks."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(SIZE)
        self.gate, self.up = (mf.Linear(SIZE, 2 * SIZE, bias=False, recipe=recipe) for _ in range(2))
        self.down = mf.Linear(2 * SIZE, SIZE, recipe=recipe)

    def forward(self, x):
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def block_on(mesh, recipe: str, styles, dtype=torch.float32, by_sequence: bool = True) -> Block:
    torch.manual_seed(1)
    block = Block(recipe).to(dtype)
    if not by_sequence:
        plan = {"gate": styles.ColwiseParallel(), "up": styles.ColwiseParallel(), "down": styles.RowwiseParallel()}
        return theirs.parallelize_module(block, mesh, plan)
    plan = {"norm": styles.SequenceParallel(sequence_dim=0), "down": styles.RowwiseParallel(output_layouts=Shard(0))}
    plan |= {name: styles.ColwiseParallel(input_layouts=Shard(0)) for name in ("gate", "up")}
    return theirs.parallelize_module(block, mesh, plan)


def stepped(block, x, dy, run=None):
    x = x.clone().requires_grad_()
    y = block(x) if run is None else run(x)
    y.backward(dy)
    made = [facts(y), facts(x.grad), *(facts(one.grad) for one in block.parameters())]
    block.zero_grad()
    return made


def inputs_of(rank: int):
    drawn = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(TOKENS * dist.get_world_size(), SIZE, generator=drawn) for _ in range(2))
    return [one.chunk(dist.get_world_size())[rank].contiguous() for one in (x, dy)]


@contextlib.contextmanager
def counted():
    """Calls by which torch makes and takes apart DTensors, and gathers of values."""
    calls: dict[str, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        of_torch = [(DTensor, name) for name in ("from_local", "to_local", "redistribute")]
        for owner, name in (*of_torch, *((collectives, name) for name in OURS)):
            call = getattr(owner, name)

            def counting(*arguments, _call=call, _name=name, **options):
                calls[_name] = calls.get(_name, 0) + 1
                return _call(*arguments, **options)

            patch.setattr(owner, name, staticmethod(counting) if name == "from_local" else counting)
        yield calls


def whole_plan(rank: int, compiles: bool = True):
    """Results and gradients of a block by our styles and by torch's, in every way to run it; and what was called."""
    mesh, found = mesh_of_all(), {}
    for recipe in ("fp8_current", "mxfp8", HIGH_PRECISION, "delayed"):
        dtype = torch.bfloat16 if recipe in ("mxfp8", HIGH_PRECISION) else torch.float32
        x, dy = (one.to(dtype) for one in inputs_of(rank))
        block = block_on(mesh, recipe, ours, dtype)
        first = stepped(block, x, dy)  # where schedules are made
        if recipe != "delayed":  # whose scales change by step
            goal = stepped(block_on(mesh, recipe, theirs, dtype), x, dy)
            ways = [stepped(block, x, dy, lambda x, block=block: checkpoint(block, x, use_reentrant=False))]
            if compiles:
                ways.append(stepped(block, x, dy, torch.compile(block, backend="eager")))
            ways.append(stepped(copy.deepcopy(block), x, dy))
            with torch.no_grad():
                silent = [facts(block(x))]
            with torch.inference_mode():
                silent.append(facts(block(x)))
            found[recipe] = first, goal, ways, silent
        with counted() as calls:
            stepped(block, x, dy)
        found["calls", recipe] = calls
    block, goal = (block_on(mesh, "fp8_current", styles, by_sequence=False) for styles in (ours, theirs))
    found["whole"] = stepped(block, x[:, :SIZE], dy), stepped(goal, x, dy)
    with counted() as calls:
        stepped(block, x, dy)
    found["calls", "whole"] = calls
    return found


def order_of(step) -> list[str]:
    """Collectives, casts and products in the order in which a step launches them."""
    events: list[str] = []

    def recording(call, name):
        def recorded(*arguments, **options):
            events.append(name)
            return call(*arguments, **options)

        return recorded

    def cast(step, x, *arguments):
        events.append(f"cast {next(entry.operand.tensor for entry in step.entries if entry is not None)}")
        return call(step, x, *arguments)

    call = sharded.ShardedCast.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded.ShardedCast, "__call__", cast)
        for name, words in (("all_gather_together", "gather"), ("reduce_scatter", "scatter")):
            patch.setattr(collectives, name, recording(getattr(collectives, name), words))
        for one in SCHEDULES.values():
            schedule = getattr(one, "schedule", one)
            for name, product in schedule.products.items():
                patch.setitem(schedule.products, name, recording(product, name))
        step()
    return events


def between_products(rank: int):
    """The order of a step's work, for codes of one operand and of two."""
    mesh, found = mesh_of_all(), {}
    for recipe in ("fp8_current", "mxfp8"):
        block, (x, dy) = block_on(mesh, recipe, ours), inputs_of(rank)
        stepped(block, x, dy)  # where schedules are made
        found[recipe] = order_of(lambda block=block, x=x, dy=dy: stepped(block, x, dy))
        run = block.gate.forward
        block.gate.forward = lambda x, run=run: checkpoint(run, x, use_reentrant=False)
        found[recipe, "recomputed"] = order_of(lambda block=block, x=x, dy=dy: stepped(block, x, dy))
    return found


def readers_one_by_one(rank: int):
    """Gradients of x by backwards of one reader, of the other, and of both, twice through one graph."""
    mesh, (x, _), found = mesh_of_all(), inputs_of(rank), {}
    for recipe in ("fp8_current", "mxfp8", HIGH_PRECISION):
        block, leaf = block_on(mesh, recipe, ours), x.clone().requires_grad_()
        h = block.norm(leaf)
        ys = [layer(h) for layer in (block.gate, block.up)]
        dys = [torch.randn(y.shape, generator=torch.Generator().manual_seed(rank)) for y in ys]
        both = [torch.autograd.grad(ys, leaf, dys, retain_graph=True)[0] for _ in range(2)]
        alone = [torch.autograd.grad(y, leaf, dy, retain_graph=True)[0] for y, dy in zip(ys, dys, strict=True)]
        with pytest.MonkeyPatch.context() as patch:  # an error between two readers
            patch.setattr(gathering.Readers, "add", interrupted(gathering.Readers.add))
            with contextlib.suppress(KeyError):
                torch.autograd.grad(ys, leaf, dys, retain_graph=True)
        weights = torch.autograd.grad(ys, [block.gate.weight, block.up.weight], dys, retain_graph=True)
        both.append(torch.autograd.grad(ys, leaf, dys)[0])
        found[recipe] = [one.tolist() for one in both], sum(alone).tolist(), len(weights)
    return found


def interrupted(call):
    left = [1]

    def one_only(*arguments):
        if not left[0]:
            raise KeyError("an error of its own")
        left[0] -= 1
        return call(*arguments)

    return one_only


def at_other_borders(rank: int):
    """Results where a neighbour of a layer is another's: promises of torch's collectives, DTensors, a plain layer."""
    mesh, (x, dy), found = mesh_of_all(), inputs_of(rank), {}
    for name, styles in (("ours", ours), ("theirs", theirs)):
        torch.manual_seed(3)
        first, second = (mf.Linear(SIZE, SIZE, bias=False, recipe="fp8_current") for _ in range(2))
        norm = nn.LayerNorm(SIZE)
        # torch's style returns a promise of its reduce-scatter, as a plain tensor.
        theirs.parallelize_module(first, mesh, theirs.RowwiseParallel(output_layouts=Shard(0)))
        theirs.parallelize_module(norm, mesh, styles.SequenceParallel(sequence_dim=0))
        theirs.parallelize_module(second, mesh, styles.ColwiseParallel(input_layouts=Shard(0), use_local_output=False))
        wide = x.repeat(dist.get_world_size(), 1)[:, : SIZE // dist.get_world_size()].clone().requires_grad_()
        y = second(norm(first(wide)))
        (y.to_local() ** 2).sum().backward()
        layers = (first, norm, second)
        found[name] = [facts(y), facts(wide.grad), *(facts(p.grad) for one in layers for p in one.parameters())]
        direct = first(wide)
        promise = mf.Linear(SIZE, SIZE, bias=False, recipe="fp8_current")
        with torch.no_grad():
            promise.weight.copy_(torch.eye(SIZE))
        theirs.parallelize_module(promise, mesh, styles.ColwiseParallel(input_layouts=Shard(0)))
        promise(direct).sum().backward()
        found[name] += [facts(first.weight.grad), facts(promise.weight.grad)]
    with mf.autocast(enabled=False):  # torch's own operators, which need DTensors
        block = block_on(mesh, "fp8_current", ours)
        plain = stepped(block, x, dy)
        goal = stepped(block_on(mesh, "fp8_current", theirs), x, dy)
    return found, plain, goal


class NoGradient(torch.autograd.Function):
    """A reader of a tensor that has no gradient for it."""

    @staticmethod
    def forward(ctx, x):
        return x.to_local().sum() if isinstance(x, DTensor) else x.sum()

    @staticmethod
    def backward(ctx, dy):
        return None


def without_gradients(rank: int):
    """The names of gradients, and the largest of them, before a reader that has none."""
    mesh, (x, _), found = mesh_of_all(), inputs_of(rank), []
    for way in ("norm", "gate", "down"):
        block, x = block_on(mesh, "fp8_current", ours), x.detach().clone().requires_grad_()
        h = block.norm(x)
        NoGradient.apply(h if way == "norm" else block.gate(h) if way == "gate" else block.down(block.up(h))).backward()
        given = {"x": x, **dict(block.named_parameters())}
        grads = {name: one.grad for name, one in given.items() if one.grad is not None}
        whole = [one.full_tensor() if isinstance(one, DTensor) else one for one in grads.values()]
        found.append((list(grads), max((float(one.abs().max()) for one in whole), default=0.0)))
    return found


def refusals(rank: int):
    """The message of a double backward; and a plain x that is not as the style has said."""
    mesh, (x, _) = mesh_of_all(), inputs_of(rank)
    block, said = block_on(mesh, "fp8_current", ours), []
    x = x.clone().requires_grad_()
    for call in (
        lambda: torch.autograd.grad(block(x).sum(), x, create_graph=True), lambda: block.gate(x[:, :32]),
    ):  # fmt: skip
        try:
            call()
        except (NotSupportedError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def ends(rank: int):
    """Tensors that live on behind a step of layers that share a leaf, by recipe."""
    mesh, found = mesh_of_all(), {}
    for recipe in ("fp8_current", "mxfp8"):
        block = block_on(mesh, recipe, ours, torch.bfloat16)
        x = DTensor.from_local(torch.randn(TOKENS, SIZE, dtype=torch.bfloat16), mesh, [Shard(0)]).requires_grad_()
        local = weakref.ref(x._local_tensor)
        (block.gate(x) + block.up(x)).sum().backward()
        shared = [name for name in vars(x) if name.startswith("_gath")]
        del x
        gc.collect()
        found[recipe] = local() is None, shared
    return found


def after_a_write(rank: int):
    """By recipe: if a leaf that is written after a layer has read it is gathered anew for the next one."""
    mesh, found = mesh_of_all(), {}
    for recipe in ("fp8_current", "mxfp8"):
        block = block_on(mesh, recipe, ours, torch.bfloat16)
        x = DTensor.from_local(torch.randn(TOKENS, SIZE, dtype=torch.bfloat16), mesh, [Shard(0)])
        with torch.no_grad():
            before = block.gate(x)
            x.mul_(-2)
            after, goal = block.gate(x), block.gate(x.clone())
        found[recipe] = torch.equal(after, goal), not torch.equal(before, after)
    return found


def converted_late(rank: int):
    """By recipe: results and gradients of a block that is converted before and after its plan."""
    mesh, found = mesh_of_all(), {}
    x, dy = inputs_of(rank)
    for recipe in ("fp8_current", "mxfp8"):
        ways = []
        for is_late in (False, True):
            torch.manual_seed(1)
            model = torch.nn.Sequential(torch.nn.Linear(SIZE, SIZE), torch.nn.Linear(SIZE, SIZE))
            plan = {
                "0": ours.ColwiseParallel(input_layouts=Shard(0)),
                "1": ours.RowwiseParallel(output_layouts=Shard(0)),
            }
            if not is_late:
                mf.convert(model, recipe)
            theirs.parallelize_module(model, mesh, plan)
            if is_late:
                mf.convert(model, recipe)
            read = x.clone().requires_grad_()
            y = model(read)
            y.backward(dy[:, :SIZE])
            ways.append([y, read.grad, *(one.grad.full_tensor() for one in model.parameters())])
        # The gradient of a bias is a sum over rows, of each rank or of all at once.
        found[recipe] = [torch.equal(a, b) for a, b in zip(*(way[:-1] for way in ways), strict=True)]
        found[recipe].append(relative(ways[0][-1].tolist(), ways[1][-1].tolist()) < 2.0**-20)
    return found


def gpus_that_it_sees(rank):
    return os.environ["CUDA_VISIBLE_DEVICES"], torch.cuda.device_count()


CASES = (
    gpus_that_it_sees, as_public_calls, uneven, With(whole_plan, compiles=False), at_other_borders, without_gradients,
    refusals, ends, after_a_write, converted_late, between_products, readers_one_by_one,
)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> list[dict]:
    return run_ranks(CASES, str(tmp_path_factory.mktemp("ranks") / "store"))


def test_ranks_on_the_cpu_take_no_gpu(ranks) -> None:
    """Of which a machine may have fewer than ranks: FSDP2 and others would divide the first among them."""
    assert of(ranks, gpus_that_it_sees) == [("", 0)] * 2


def test_functions_do_what_the_public_calls_do(ranks) -> None:
    """features D4"""
    for found in of(ranks, as_public_calls):
        for key, (mine, goal) in found.items():
            assert mine == goal, key


def test_gradients_of_uneven_parts_are_of_the_whole(ranks) -> None:
    for found in of(ranks, uneven):
        assert [one[:2] for one in found] == [(True, True)] * 2
        assert [one[2] for one in found] == [(Shard(0),), (Shard(1),)]
        assert all(one[3] for one in found)


def test_plain_tensors_between_layers_give_the_bytes_of_dtensors(ranks) -> None:
    """features D4, D5, D10"""
    for found in of(ranks, whole_plan):
        for recipe in ("fp8_current", "mxfp8", HIGH_PRECISION):
            first, goal, ways, silent = found[recipe]
            bias = "Replicate()" if recipe == HIGH_PRECISION else "Partial(sum)"  # dy is gathered first, or scattered
            placements = ["Partial(sum)", "Shard(dim=0)", "Shard(dim=0)", "Shard(dim=1)", bias]
            assert [one[0] for one in first[2:]] == [f"({one},)" for one in placements]
            assert silent == [first[0]] * 2
            assert first[0] == goal[0]
            # Of two layers that read one x gradients are added before ranks are: another rounding of the sum.
            for mine, other in zip(first[1:6], goal[1:6], strict=True):
                assert mine[:-1] == other[:-1]  # placements, shapes, strides, dtypes
                assert relative(mine[-1], other[-1]) < (2.0**-20 if recipe == "fp8_current" else 2.0**-7)
            for way in ways:
                assert way == first
        assert found["whole"][0] == found["whole"][1]


@pytest.mark.slow("the same layers under torch.compile")
def test_compiled_blocks_give_the_bytes_of_eager_ones(tmp_path) -> None:
    made = run_ranks((whole_plan,), str(tmp_path / "store"))
    test_plain_tensors_between_layers_give_the_bytes_of_dtensors(made)
    for found in of(made, whole_plan):
        assert all(len(found[recipe][2]) == 3 for recipe in ("fp8_current", "mxfp8", HIGH_PRECISION))


def test_a_step_makes_dtensors_around_the_norm_alone(ranks) -> None:
    """The block made 14 DTensors by public calls, took 13 apart and redistributed 3 in a step."""
    of_norm = {"from_local": 1, "to_local": 1}  # the style of the norm is torch's
    for found in of(ranks, whole_plan):
        for recipe in ("fp8_current", "delayed"):
            # Under delayed scaling layers have scales of their own, and codes of x of their own.
            gathers = 2 + (recipe == "delayed")
            calls = {"reduce_scatter": 2, "all_gather_together": gathers} | of_norm
            assert found["calls", recipe] == calls, recipe
        assert not found["calls", "whole"]  # without a sequence that is sharded
        # Both layers share one gather of each operand of x, codes and scales together; as many are those of dy.
        assert found["calls", "mxfp8"] == {"reduce_scatter": 2, "all_gather_together": 4} | of_norm
        assert found["calls", HIGH_PRECISION] == {"reduce_scatter": 2, "all_gather_together": 2} | of_norm


_LAST_READER = ["cast dy", "dgrad", "scatter", "wgrad"]
ORDERS = {
    "fp8_current": [
        "cast x", "gather", "cast w", "fprop", "cast w", "fprop",  # gate, up
        "cast x", "cast w", "fprop", "scatter",
        "cast dy", "gather", "dgrad", "wgrad",
        "cast dy", "dgrad", "wgrad", *_LAST_READER,
    ],
    "mxfp8": [
        "cast x", "gather", "cast w", "fprop", "cast w", "fprop",
        "cast x", "cast w", "fprop", "scatter",
        "cast dy", "gather", "gather", "dgrad", "wgrad",
        "cast dy", "gather", "dgrad", "wgrad", *_LAST_READER,
    ],
}  # fmt: skip


@pytest.mark.parametrize("recipe", ORDERS)
def test_collectives_come_where_their_bytes_are_read(ranks, recipe) -> None:
    for found in of(ranks, between_products):
        assert found[recipe] == ORDERS[recipe]
        assert found[recipe, "recomputed"][-3:] == _LAST_READER[1:]  # fprop is run again before dgrad


def test_readers_of_one_x_may_have_backwards_of_their_own(ranks) -> None:
    for found in of(ranks, readers_one_by_one):
        for recipe, (both, alone, weights) in found.items():
            assert both[0] == both[1] == both[2], recipe
            # Sums of as many terms in another order, in float32.
            assert relative(both[0], alone) < 2.0**-20, recipe
            assert weights == 2


def test_neighbours_of_other_styles(ranks) -> None:
    """features D4"""
    for found, plain, goal in of(ranks, at_other_borders):
        assert found["ours"] == found["theirs"]
        assert plain == goal


def test_readers_without_gradients(ranks) -> None:
    """A layer has zeros then, as in one process, and a norm nothing."""
    for found in of(ranks, without_gradients):
        layers = [["x", "norm.weight", "gate.weight"], ["x", "norm.weight", "up.weight", "down.weight", "down.bias"]]
        assert found == [([], 0.0), (layers[0], 0.0), (layers[1], 0.0)]


def test_double_backward_and_bad_inputs_are_refused_as_before(ranks) -> None:
    """features D4"""
    for said in of(ranks, refusals):
        assert said[0].startswith("NotSupportedError: backward: got create_graph=True (a double backward)")
        assert said[1].startswith("InvalidValueError: ")
        assert "(In the layer 'gate'.)" in said[1] or "64" in said[1]


def test_a_leaf_that_layers_share_is_freed(ranks) -> None:
    """It and the gather of it kept each other: the graph of the gather holds the leaf, which held the gather."""
    for found in of(ranks, ends):
        assert found == {"fp8_current": (True, []), "mxfp8": (True, [])}


def test_a_leaf_that_was_written_is_gathered_again(ranks) -> None:
    for found in of(ranks, after_a_write):
        assert found == {"fp8_current": (True, True), "mxfp8": (True, True)}


def test_layers_are_converted_before_or_after_their_plan(ranks) -> None:
    """features D4"""
    for found in of(ranks, converted_late):
        assert found == {name: [True] * 6 for name in ("fp8_current", "mxfp8")}
