"""Layers that read one gathered x, and what is left of it, in a world of one rank."""

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.distributed.tensor.parallel import parallelize_module  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.torch.distributed import ColwiseParallel  # noqa: E402
from microfloat.torch.distributed import tp_gather as gathering  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

SIZE = 32
# Codes of one operand, of two, and values, which are gathered in high precision.
RECIPES = "fp8_current", "mxfp8", "rowwise_with_gw_hp"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    with world_of_one():
        yield init_device_mesh("cpu", (1,))


def layers_on(mesh: DeviceMesh, recipe: str) -> list:
    torch.manual_seed(0)
    layers = [mf.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16, recipe=recipe) for _ in range(2)]
    return [parallelize_module(layer, mesh, ColwiseParallel(input_layouts=Shard(0))) for layer in layers]


def leaf_on(mesh: DeviceMesh) -> DTensor:
    x = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)).bfloat16()
    return DTensor.from_local(x, mesh, [Shard(0)]).requires_grad_()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_inside_of_another_has_a_sum_of_its_own(mesh, recipe) -> None:
    """It ran between two layers that read x, and the outer one lost the dx of the first."""
    x, inner = leaf_on(mesh), []
    first, second = ys = [layer(x) for layer in layers_on(mesh, recipe)]
    options = {"grad_outputs": [torch.ones_like(y) for y in ys], "retain_graph": True}
    (goal,) = torch.autograd.grad(ys, x, **options)

    def nested(dy: torch.Tensor) -> None:  # `second` has had its backward, `first` has not
        if not inner:
            inner.append(None)
            inner[:] = torch.autograd.grad(second, x, torch.ones_like(second), retain_graph=True)

    first.register_hook(nested)
    (outer,) = torch.autograd.grad(ys, x, **options)
    (alone,) = torch.autograd.grad(second, x, torch.ones_like(second))
    assert torch.equal(outer.to_local(), goal.to_local())
    assert torch.equal(inner[0].to_local(), alone.to_local())
    assert not torch.equal(alone.to_local(), goal.to_local())


def test_a_backward_that_fails_leaves_no_sum(mesh) -> None:
    x = leaf_on(mesh)
    first, second = (layer(x) for layer in layers_on(mesh, "fp8_current"))
    readers = vars(x)["_gathered_codes"].made().readers
    sums: list[int] = []

    def failing(dy: torch.Tensor) -> None:
        sums.append(len(readers._backwards))
        raise KeyError("an error of its own")

    first.register_hook(failing)
    with pytest.raises(KeyError, match="an error of its own"):
        torch.autograd.backward([first, second], [torch.ones_like(first), torch.ones_like(second)])
    assert sums == [1]
    assert not readers._backwards


def test_layers_without_gradients_share_one_gather(mesh, monkeypatch) -> None:
    gathers = gathers_of(monkeypatch)
    first, second = layers_on(mesh, "fp8_current")
    x = leaf_on(mesh)
    with torch.no_grad():
        first(x), second(x)
    assert len(gathers) == 1


@pytest.mark.slow_cases("further recipes of a checked kind", all_but=("mxfp8", "fp8_current"))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_backward_frees_what_was_gathered(mesh, recipe, monkeypatch) -> None:
    """As soon as x has its gradient, though outputs are still there, and torch has the sums until the backward ends."""
    gathers = gathers_of(monkeypatch)
    first, second = layers_on(mesh, recipe)
    x, left = leaf_on(mesh), []
    ys = [first(x), second(x)]
    x.register_hook(lambda _: left.extend(one for one in gc.get_objects() if type(one).__name__ == "_Backward"))
    torch.autograd.backward(ys, [torch.ones_like(y) for y in ys])
    assert len(left) == 1
    assert left[0].dx is None
    assert left[0].part is None
    assert not left[0].columns
    assert gathers[0]() is None


@pytest.mark.slow_cases("further recipes of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_leaf_without_a_backward_is_freed(mesh, recipe) -> None:
    """The graph of what was gathered of it held it, and it held what was gathered."""
    first, second = layers_on(mesh, recipe)
    x = leaf_on(mesh)
    with pytest.MonkeyPatch.context() as patch:
        gathers = gathers_of(patch)
        ys = [first(x), second(x)]
    assert len(gathers) == 1  # a layer that has read it holds it for the next
    local, made = weakref.ref(x._local_tensor), gathers[0]
    del x, ys
    gc.collect()
    assert local() is None
    assert made() is None


def gathers_of(patch: pytest.MonkeyPatch) -> list[weakref.ref]:
    """A list to which what is gathered from now on is added."""
    found: list[weakref.ref] = []

    def counted(call):
        def counting(*arguments):
            made = call(*arguments)
            found.append(weakref.ref(made))
            return made

        return counting

    patch.setattr(gathering._Gathered, "apply", counted(gathering._Gathered.apply))
    return found


def test_a_copy_has_nothing_of_what_was_gathered_of_the_leaf(mesh) -> None:
    first, second = layers_on(mesh, "fp8_current")
    x = leaf_on(mesh)
    y, copied = first(x), copy.deepcopy(x)
    (y.sum() + second(copied).sum()).backward()
    alone = leaf_on(mesh)
    second(alone).sum().backward()
    assert torch.equal(copied.grad.to_local(), alone.grad.to_local())
