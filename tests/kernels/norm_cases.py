"""Norms of rows longer than are measured at once, and of whole tiles: their statistics, and the codes that follow."""

from unittest import mock

import torch

from microfloat.recipes import Cast
from microfloat.torch.backends import reference, triton
from microfloat.torch.backends.triton import _norms
from tests.kernels.cases import check_operand


def matrix_of(rows, columns, device):
    """Normal values on a slope, which means of parts of a row do not share."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    return (x + torch.linspace(-2, 5, columns)).to(torch.bfloat16).to(device)


def values_of(x, weight, normed):
    """What a norm's codes stand for, by the statistics that came with them."""
    shift = 0.0 if normed.mean is None else normed.mean[:, None]
    bias = 0.0 if normed.mean is None else weight.float()
    return ((x.float() - shift) * normed.inverse[:, None] * weight.float() + bias).to(x.dtype)


def check(device):
    """Statistics are those of float64 but for the last bits; codes are those of the values that these give."""
    cast = Cast("mxfp8")
    for rows, columns, at_once in ((70, 300, 256), (128, 128, 8192)):
        x = matrix_of(rows, columns, device)
        weight = torch.linspace(0.5, 2, columns).to(x)
        for kind in ("rms", "layer"):
            with mock.patch.object(_norms, "_MOST_COLUMNS", at_once):
                normed = triton.norm_quantize(x, weight, weight, cast, cast, eps=1e-5, kind=kind)
            wanted = reference.quantize_both(values_of(x, weight, normed), cast, cast)
            for got, want in zip((normed.row, normed.column), wanted, strict=True):
                check_operand(got, want, f"{kind} norm")
            values = x.double()
            if kind == "layer":
                values = values - values.mean(1, keepdim=True)
                assert float((normed.mean - x.double().mean(1)).abs().max()) < 2.0**-18
            want = 1 / (values.square().mean(1) + 1e-5).sqrt()
            assert float(((normed.inverse - want) / want).abs().max()) < 2.0**-20
