"""Operands in the memory order that their GEMMs read."""

from types import SimpleNamespace

import pytest
import torch

from microfloat.layout import Part
from microfloat.torch import reference
from microfloat.torch.backends.base import laid


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("by_columns", [False, True])
def test_codes_in_the_other_order_are_transposed_by_the_backend(dtype, by_columns):
    """Those of a byte; a copy by torch, element for element, takes ten times as long on a GPU."""
    asked = []

    def turned(codes):
        assert codes.is_contiguous()
        asked.append(tuple(codes.shape))
        return reference.turned(codes)

    x = torch.arange(24, dtype=torch.uint8).view(4, 6).to(dtype)
    x = x.t() if by_columns else x
    part = Part(tuple(x.shape), (x.shape[1], 1) if by_columns else (1, x.shape[0]), str(dtype).removeprefix("torch."))
    got = laid(x, part, SimpleNamespace(turned=turned))
    assert got.stride() == part.strides
    assert torch.equal(got.float(), x.float())
    assert asked == ([] if dtype is torch.float32 else [(4, 6)])
    assert laid(got, part) is got
