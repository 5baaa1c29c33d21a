"""Kernels between guard zones: what they write stays inside their outputs, and what lies beyond an input is not read.

Imported only where kernels run, as `cases.py` is. Every tensor that a program allocates lies in a larger buffer whose
other bytes must be as they were afterwards; every input lies among NaN, which no amax, sum or code would survive.
"""

import contextlib
from unittest import mock

import torch

from microfloat.recipes import Cast, Hadamard
from microfloat.torch import reference
from microfloat.torch.launch import program, triton
from microfloat.torch.launch.prologues import Activation, ActivationGradient, Norm
from tests.kernels import calls

ZONE, MARK = 512, 0xA5
INPUTS = (((1, 1), "float32"), ((37, 75), "float32"), ((40, 72), "bfloat16"))


@contextlib.contextmanager
def guard_zones():
    """While this is open programs allocate between zones; checks them at the end."""
    buffers = []

    def fast_empty(device):
        def empty(shape, strides, dtype):
            size = torch.Size(shape).numel() * dtype.itemsize
            buffer = torch.full((size + 2 * ZONE,), MARK, dtype=torch.uint8, device=device)
            buffers.append((buffer, size))
            return buffer[ZONE : ZONE + size].view(dtype).as_strided(shape, strides)

        return empty

    program.forget_programs()
    with mock.patch.object(program, "fast_empty", fast_empty):
        yield
    program.forget_programs()
    assert buffers, "nothing was allocated"
    for buffer, size in buffers:
        outside = torch.cat([buffer[:ZONE], buffer[ZONE + size :]])
        assert bool((outside == MARK).all()), f"bytes beyond {size} were written"


def among_nan(x):
    """A copy of `x` with NaN before and behind it."""
    filler = torch.full((ZONE,), float("nan"), dtype=x.dtype, device=x.device)
    return torch.cat([filler, x.reshape(-1), filler])[ZONE:-ZONE].view(x.shape)


def check(device):
    """All kernels on ragged and even shapes; the bytes are those of the reference."""
    from tests.kernels.cases import check_operand, check_values, matrix, seed_words

    casts = [Cast(name) for name in (
        "fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_row", "nvfp4_2d",
    )]  # fmt: skip
    casts.append(Cast("nvfp4", rounding="stochastic", hadamard=Hadamard()))
    for shape, dtype in INPUTS:
        plain = matrix(shape, dtype)
        x = among_nan(plain.to(device))
        for cast in casts:
            with guard_zones():
                made = triton.quantize_both(x, cast, cast, seed=seed_words(device))
                values = [triton.dequantize(operand, torch.float32) for operand in made]
            want = reference.quantize_both(plain, cast, cast, seed=seed_words("cpu"))
            for operand, value, other in zip(made, values, want, strict=True):
                check_operand(operand, other, f"{cast.format.name} {shape} {dtype}")
                if cast.hadamard is None:
                    check_values(value, reference.dequantize(other, torch.float32), cast.format.name)
        _forms_for_gemms(x)
        _producers(x)


def _forms_for_gemms(x):
    """Folded codes, values in bfloat16, swizzled scales: their bytes have cases of their own."""
    with guard_zones():
        calls.folded(x, Cast("mxfp8"), Cast("mxfp8"))
        if x.shape[0] % 4 == x.shape[1] % 4 == 0:
            triton.turned(triton.quantize(x, Cast("fp8_tensor")).codes)
        for tile in (False, True):
            calls.folded_codes(triton.quantize(x, Cast("mxfp8")), Cast("mxfp8"), tile=tile)
        for name in ("mxfp8", "nvfp4_2d"):
            calls.cast_to("values", x, Cast(name), Cast(name))
        triton.swizzle_scales(triton.quantize(x, Cast("mxfp6_e2m3")).scale)


def _producers(x):
    weight = among_nan(torch.ones_like(x[0]))
    cast, delayed = Cast("mxfp8"), Cast("fp8_tensor")
    swiglu, gradients = Activation(x, x, "silu"), ActivationGradient(x, x, x, "silu")
    with guard_zones():
        for row in (cast, Cast("mxfp4")):
            for producer in (swiglu, gradients, Norm(x, weight, weight, 1e-5, "layer")):
                calls.codes(producer, row, row)
        ((_, amax),), _ = triton.values(swiglu)
        calls.codes(swiglu, delayed, delayed, amax=amax)
        triton.values(gradients)
        triton.values(Norm(x, weight, None, 1e-5, "rms"))
