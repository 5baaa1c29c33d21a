"""Norms whose programs find no statistics and measure the rows themselves; rows longer than are measured at once."""

from unittest import mock

import torch

from microfloat.recipes import Cast
from microfloat.torch.backends import triton
from microfloat.torch.backends.triton import _norms


def matrix_of(rows, columns, device):
    """Normal values on a slope, which means of parts of a row do not share."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    return (x + torch.linspace(-2, 5, columns)).to(torch.bfloat16).to(device)


def quantized(x, kind, **grid):
    """A norm under constants of the launch that are not the usual ones."""
    weight = torch.linspace(0.5, 2, x.shape[1]).to(x)
    usual = {"_AHEAD": _norms._AHEAD, "_MOST_COLUMNS": _norms._MOST_COLUMNS}
    with mock.patch.multiple(_norms, **(usual | grid)):
        return triton.norm_quantize(x, weight, weight, Cast("mxfp8"), Cast("mxfp8"), eps=1e-5, kind=kind)


def check(device):
    """The bytes do not depend on who measured; the statistics of long rows are right."""
    for rows, columns in ((70, 300), (128, 512)):
        x = matrix_of(rows, columns, device)
        for kind in ("rms", "layer"):
            usual = quantized(x, kind)
            alone = quantized(x, kind, _AHEAD=0)  # nobody measures a group before it is cast
            short = quantized(x, kind, _MOST_COLUMNS=256)
            for other in (alone, quantized(x, kind)):
                assert torch.equal(other.inverse, usual.inverse)
                for got, want in ((other.row, usual.row), (other.column, usual.column)):
                    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
                    assert torch.equal(got.scale.view(torch.uint8), want.scale.view(torch.uint8))
            values = x.double()
            if kind == "layer":
                values = values - values.mean(1, keepdim=True)
            want = 1 / (values.square().mean(1) + 1e-5).sqrt()
            for got in (usual, short):
                assert float(((got.inverse - want) / want).abs().max()) < 2.0**-20
                if kind == "layer":
                    assert float((got.mean - x.double().mean(1)).abs().max()) < 2.0**-18
