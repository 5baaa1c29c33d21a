"""Linears that read one activation cast it once: the same bits, never a stale code, and no memory kept."""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import RECIPES, Float8CurrentScaling  # noqa: E402
from microfloat.torch.backends import reference, shared  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_remembered():
    shared.forget()
    yield
    shared.forget()


@pytest.fixture
def x_casts(monkeypatch) -> list:
    """The matrices of 8 rows that are cast."""
    seen, quantize_both = [], reference.quantize_both

    def spy(tensor, *casts, **options):
        if tensor.shape[0] == 8:
            seen.append(tensor)
        return quantize_both(tensor, *casts, **options)

    monkeypatch.setattr(reference, "quantize_both", spy)
    return seen


def pair(recipe) -> tuple[mf.Linear, mf.Linear]:
    torch.manual_seed(0)
    return mf.Linear(32, 48, recipe=recipe), mf.Linear(32, 16, recipe=recipe)


def activation() -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(8, 32, requires_grad=True) * 1.5


@pytest.mark.parametrize("name", ["fp8_current", "fp8_row", "fp8_block", "mxfp8"])
def test_one_cast_serves_both_with_the_same_bits(name: str, x_casts: list) -> None:
    first, second = pair(RECIPES[name]())
    x = activation()
    ys = first(x), second(x)
    assert len(x_casts) == 1
    sum(y.sum() for y in ys).backward(retain_graph=True)
    twins = pair(RECIPES[name]())
    expected = []
    for twin in twins:
        shared.forget()
        expected.append(twin(x))
    assert len([t for t in x_casts if t.shape == (8, 32)]) == 3
    sum(y.sum() for y in expected).backward()
    for ours, theirs, y, want in zip((first, second), twins, ys, expected, strict=True):
        assert torch.equal(y, want)
        assert torch.equal(ours.weight.grad, theirs.weight.grad)


@pytest.mark.parametrize("name", ["delayed", "nvfp4"])
def test_scales_of_a_layer_and_noise_are_nobody_elses(name: str, x_casts: list) -> None:
    first, second = pair(RECIPES[name]())
    x = activation()
    first(x)
    second(x)
    assert len(x_casts) == 2
    assert not shared._LATEST


def test_changes_in_place_are_seen(x_casts: list) -> None:
    first, second = pair(Float8CurrentScaling())
    x = activation()
    first(x)
    with torch.no_grad():
        x.mul_(2)
    y = second(x)
    assert len(x_casts) == 2
    shared.forget()
    assert torch.equal(y, second(x))


def test_other_casts_and_other_tensors_are_cast(x_casts: list) -> None:
    first, second = pair(Float8CurrentScaling())
    x = activation()
    first(x)
    second.pin("fp8_row")
    second(x)
    second.pin("fp8_current")
    second(x * 1)
    assert len(x_casts) == 3
    second.weight.requires_grad_(False)  # no transposed codes
    first(x)
    second(x)
    assert len(x_casts) == 5


def test_tensors_without_a_recorded_history_take_no_part(x_casts: list) -> None:
    first, second = pair(Float8CurrentScaling())
    leaf = torch.randn(8, 32, requires_grad=True)
    first(leaf)
    second(leaf)
    with torch.no_grad():
        x = activation()
        first(x)
        second(x)
    assert len(x_casts) == 4
    assert not shared._LATEST


def test_codes_go_with_their_tensor_and_with_backward() -> None:
    first, second = pair(Float8CurrentScaling())
    x = activation()
    y = first(x)
    (entry,) = shared._LATEST.values()
    codes = weakref.ref(entry.value[0].codes)
    del entry
    assert codes() is not None
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None, "the entry keeps its tensor alive"
    assert codes() is None
    assert not shared._LATEST
    x = activation()
    y = y.sum() + second(x).sum()
    assert shared._LATEST
    y.backward()
    assert not shared._LATEST
