"""Formats as the parameter of a test: `make test` takes those that differ most, `make test-all` every one."""

from collections.abc import Callable

import pytest

from microfloat.formats import FORMATS, ScaledFormat

# A scale of a tensor, of rows, of tiles and of blocks, six bits, and two levels of every kind. E5M2 is another table of
# values, and the remaining formats are blocks like these; the contract of all front ends takes every one.
MOST_DIFFERENT = ("fp8_tensor", "fp8_row", "fp8_128x128", "mxfp8", "mxfp6_e3m2", "nvfp4", "nvfp4_row", "nvfp4_2d")
_FURTHER = pytest.mark.slow("further formats of a checked operation")


def formats(fits: Callable[[ScaledFormat], bool] = lambda fmt: True) -> pytest.MarkDecorator:
    """The parameter `fmt` of a test that takes every format, or those for which `fits` is true."""
    params = [
        pytest.param(fmt, marks=[] if name in MOST_DIFFERENT else [_FURTHER])
        for name, fmt in FORMATS.items()
        if fits(fmt)
    ]
    return pytest.mark.parametrize("fmt", params, ids=str)


every_format = formats()
one_row_formats = formats(lambda fmt: not fmt.is_tile)
