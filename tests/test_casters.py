"""Casts of NumPy arrays by a front end have the bytes of the oracle, whichever front end is loaded."""

import importlib

import ml_dtypes
import numpy as np
import pytest

from microfloat import Cast, reference
from microfloat.formats import FORMATS
from microfloat.reference import casters

X = np.random.default_rng(5).standard_normal((40, 208), dtype=np.float32)
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def assert_same(ours, theirs):
    assert (ours.format, ours.axis, ours.shape) == (theirs.format, theirs.axis, theirs.shape)
    for name in ("codes", "scale", "tensor_scale"):
        got, wanted = getattr(ours, name), getattr(theirs, name)
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
            assert got.tobytes() == wanted.tobytes(), name


def casts():
    """Every format under its default rule, and the rules that writers of checkpoints ask for."""
    yield from (Cast(fmt) for fmt in FORMATS)
    yield from (Cast(fmt, "amax") for fmt in ("fp8_tensor", "fp8_row", "fp8_128x128"))
    yield from (Cast("nvfp4", "four_over_six"), Cast("mxfp4", "rceil"), Cast("nvfp4", "two_level_torchao"))


@pytest.fixture(params=["torch", pytest.param("jax", marks=pytest.mark.slow("one compilation of XLA for each cast"))])
def quantize(request):
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    if request.param == "jax":
        return importlib.import_module("microfloat.jax.ops").quantize_numpy
    return importlib.import_module("microfloat.torch.reference.array_casts").quantize


def test_the_bytes_are_those_of_the_oracle(quantize):
    for number, cast in enumerate(casts()):
        x = X.astype(list(DTYPES.values())[number % 3])
        x[3, 5], x[4] = np.nan, 0
        assert_same(quantize(x, cast, None), reference.quantize(x, cast))


def test_a_given_amax_and_memory_that_cannot_be_written(quantize):
    x = X[::2].astype(ml_dtypes.bfloat16)
    x.setflags(write=False)
    for name, amax in (("nvfp4", np.float32(9)), ("fp8_tensor", np.float32(0.5))):
        assert_same(quantize(x, Cast(name), np.asarray(amax)), reference.quantize(x, name, amax=amax))


def test_a_loaded_front_end_is_preferred_to_the_oracle(monkeypatch):
    monkeypatch.setattr(casters, "_REGISTERED", {"numpy": casters._REGISTERED["numpy"]})
    assert casters.loaded() == "numpy"
    assert_same(casters.quantize(X, Cast("mxfp8")), reference.quantize(X, "mxfp8"))
    for name in ("jax", "torch"):
        casters.register(name, lambda x, cast, amax, name=name: name)
        assert casters.loaded() == name
        assert casters.quantize(X, Cast("mxfp8")) == name


def test_threads_of_torch_are_one_while_calls_run_side_by_side():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    importlib.import_module("microfloat.torch")
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    with casters.side_by_side():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)
