"""Norms of rows longer than are measured at once, and of whole tiles: statistics and what follows."""

from unittest import mock

import torch

from microfloat.passes import producers
from microfloat.recipes import Cast, Delayed
from microfloat.torch import reference
from microfloat.torch.launch import program
from microfloat.torch.launch.prologues import Norm
from tests.kernels import calls
from tests.kernels.cases import check_operand


def matrix_of(rows, columns, device):
    """Normal values on a slope, which means of parts of a row do not share."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    return (x + torch.linspace(-2, 5, columns)).to(torch.bfloat16).to(device)


def values_of(x, weight, normed):
    """Values of a norm's codes, by the statistics that came with them."""
    shift = 0.0 if normed.mean is None else normed.mean[:, None]
    bias = 0.0 if normed.mean is None else weight.float()
    return ((x.float() - shift) * normed.inverse[:, None] * weight.float() + bias).to(x.dtype)


def one(x, weight, name, kind, at_once):
    """A norm of rows of which `at_once` columns are measured at once."""
    delayed = name == "fp8_tensor"
    cast = Cast(name, scaling=Delayed()) if delayed else Cast(name)
    known, live = {}, torch.zeros(2, device=x.device)
    if delayed:
        known = {"scale_enc": torch.tensor(3.0, device=x.device)}
    recorded = {"record": live} if delayed else {}
    program.forget_programs()
    with mock.patch.multiple(producers, _MOST_COLUMNS=at_once):
        (both,), normed = calls.codes(Norm(x, weight, weight, 1e-5, kind), cast, cast, **known, **recorded)
    values = values_of(x, weight, normed)
    wanted = reference.quantize_both(values, cast, cast, **known)
    for got, want in zip(both, wanted, strict=True):
        check_operand(got, want, f"{kind} norm of {tuple(x.shape)}")
    if delayed:
        assert float(live[0]) == float(values.float().abs().max())
    values = x.double()
    if kind == "layer":
        values = values - values.mean(1, keepdim=True)
        assert float((normed.mean - x.double().mean(1)).abs().max()) < 2.0**-18
    want = 1 / (values.square().mean(1) + 1e-5).sqrt()
    assert float(((normed.inverse - want) / want).abs().max()) < 2.0**-20


# Rows and columns: in the interpreter; and compiled, short rows and long ones.
INTERPRETED = {
    ("rms", "mxfp8"): (64, 128), ("layer", "mxfp8"): (32, 256), ("rms", "fp8_tensor"): (64, 384),
    ("layer", "fp8_tensor"): (32, 384),
}  # fmt: skip
COMPILED = ((64, 1024), (64, 1280), (64, 14336))


def check(device, kind, name):
    """Statistics are those of float64 but for the last bits; codes are those of the values that these give."""
    shapes = (INTERPRETED[kind, name],) if program.INTERPRETED else COMPILED
    cases = [(rows, columns, 8192) for rows, columns in shapes]
    if name == "mxfp8":  # no whole tiles, and rows that are measured in two parts
        cases.append((70, 300, 256))
    for rows, columns, at_once in cases:
        x = matrix_of(rows, columns, device)
        one(x, torch.linspace(0.5, 2, columns).to(x), name, kind, at_once)
