"""Results of every kernel, on any device: run in Triton's interpreter on a CPU, and compiled on a GPU.

Imported only where kernels run (see `conftest.py`): Triton decides at import whether it interprets.
"""

import contextlib
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as functional

import microfloat.torch as mf
from microfloat import reference as oracle
from microfloat.formats import E2M1, E2M3, E4M3, FORMATS, SCALE_E8M0, SCALE_FP32, ScaledFormat
from microfloat.kernels.casts import blocks
from microfloat.kernels.device import tiles
from microfloat.passes import CastInputs
from microfloat.passes import matrix as passes_matrix
from microfloat.passes import tables as casts
from microfloat.recipes import RECIPES, Cast, Delayed, Gemm, Hadamard, from_name
from microfloat.routes import entries_of, family_of, routes_of
from microfloat.torch import backends, reference
from microfloat.torch import timing as measure
from microfloat.torch.launch import program, triton
from microfloat.torch.launch.prologues import Activation, ActivationGradient, Norm
from microfloat.torch.linear import schedule
from microfloat.torch.linear.gathered_weight import Gather, Gathered
from microfloat.torch.linear.quantized_weight import GatheredCast
from microfloat.torch.nn import sdpa as attention
from tests.kernels import calls
from tests.torch.linear.scheduled.setting import block_gemms

SEED = 0x89ABCDEF01234567
CUSTOM = {
    "mx_32x32": ScaledFormat("mx_32x32", E4M3, SCALE_E8M0, (32, 32)),
    "mxfp4_32x32": ScaledFormat("mxfp4_32x32", E2M1, SCALE_E8M0, (32, 32)),
    "mx_1x16": ScaledFormat("mx_1x16", E2M3, SCALE_E8M0, (1, 16)),
    "fp8_1x64": ScaledFormat("fp8_1x64", E4M3, SCALE_FP32, (1, 64)),
}


def form(device):
    """The form of the conversions that a device runs."""
    index = -1 if device == "cpu" else torch.device(device).index or 0
    hardware = program.device_of(index).conversions
    how = "interpreted" if program.INTERPRETED else "compiled"
    return f"{how}, {'hardware' if hardware else 'integer'} conversions"


def seed_words(device):
    return torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32], device=device)


def matrix(shape, dtype, *, special=False, transposed=False, spread=8):
    """Values of many magnitudes; `special` adds NaN of either sign, Inf, -0 and zeros; `transposed`: column-major."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-spread, spread, shape, generator=generator).float())
    if special:
        x[1, 2], x[2, 1], x[-1, 3], x[3], x[:, 4] = float("nan"), -float("nan"), float("inf"), -0.0, 0.0
        x[8:24, 8:24] = 0.0
        x[4, :16] *= 2.0**-100
    x = x.to(getattr(torch, dtype))
    return x.t().contiguous().t() if transposed else x


def bytes_of(x):
    return x.detach().reshape(-1).contiguous().view(torch.uint8).cpu().numpy()


def check_operand(got, want, what):
    """One operand against one of the oracle or of the reference backend, byte for byte."""
    for field in ("codes", "scale", "tensor_scale"):
        a, b = getattr(got, field), getattr(want, field)
        if a is None or b is None:
            assert a is None, f"{what}: {field} is there"
            assert b is None, f"{what}: {field} is missing"
            continue
        assert tuple(a.shape) == tuple(b.shape), f"{what}: {field} {tuple(a.shape)}, needed {tuple(b.shape)}"
        theirs = bytes_of(b) if isinstance(b, torch.Tensor) else np.ascontiguousarray(b).reshape(-1).view(np.uint8)
        wrong = np.flatnonzero(bytes_of(a) != theirs)
        assert len(wrong) == 0, f"{what}: {len(wrong)} bytes of {field} differ, the first at {wrong[:1]}"


def check_values(got, want, what):
    """Equal bits, all NaN being one."""
    assert got.shape == want.shape, f"{what}: {tuple(got.shape)}, needed {tuple(want.shape)}"
    assert got.dtype == want.dtype, what
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    got, want = got.contiguous().cpu(), want.contiguous().cpu()
    wrong = ~((got.view(bits) == want.view(bits)) | (got.isnan() & want.isnan()))
    assert not bool(wrong.any()), (
        f"{what}: {int(wrong.sum())} values differ, the first at {wrong.nonzero()[0].tolist()}"
    )


def make_cast(name, options):
    options = dict(options)
    if options.pop("rht", False):
        options["hadamard"] = Hadamard()
    return Cast(CUSTOM.get(name, name), **options)


def operands(device, name, shape, dtype, options=(), **kind):
    """Row and column operand of one matrix against the NumPy oracle."""
    cast = make_cast(name, options)
    x = matrix(shape, dtype, **kind)
    both = triton.quantize_both(x.to(device), cast, cast, seed=seed_words(device), row_stream=2, column_stream=4)
    for got, axis, stream in zip(both, (-1, -2), (2, 4), strict=True):
        want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
        check_operand(got, want, f"{cast.format.name} {cast.scale_rule} axis {axis}")
        assert (got.rows, got.length) == (shape if axis == -1 else shape[::-1])


def row_alone(device, name, shape, dtype, options=(), **kind):
    """The row operand alone, whose rows one program each reads once."""
    cast, x = make_cast(name, options), matrix(shape, dtype, **kind)
    got = triton.quantize(x.to(device), cast)
    check_operand(got, oracle.quantize(x.float().numpy(), cast), name)


def sides(device, row, column):
    """Casts of their own for rows and columns, and programs with several tiles. NaN and zeros of both signs, but no
    Inf, so that stochastic casts multiply by powers of two beforehand."""
    x = matrix((400, 72), "bfloat16", special=True)
    x[x.isinf()] = 1.0
    x[80:112] *= torch.where(torch.arange(32)[:, None] % 3 == 0, -0.0, 0.0).to(x.dtype)
    both, enough = (make_cast("nvfp4", row), make_cast("nvfp4", column)), casts.ENOUGH_PROGRAMS
    try:
        casts.ENOUGH_PROGRAMS = 1
        program.forget_programs()
        made = triton.quantize_both(x.to(device), *both, seed=seed_words(device), row_stream=2, column_stream=4)
    finally:
        casts.ENOUGH_PROGRAMS = enough
        program.forget_programs()
    for got, cast, axis, stream in zip(made, both, (-1, -2), (2, 4), strict=True):
        want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
        check_operand(got, want, f"axis {axis}")


def one_orientation(device, name):
    """`quantize` gives the same operand as `quantize_both`, and `batch` enters the random stream."""
    cast = Cast(name, rounding="stochastic")
    x, seed = matrix((40, 72), "bfloat16").to(device), seed_words(device)
    for transposed in (False, True):
        got = triton.quantize(x, cast, transposed=transposed, seed=seed, stream=3, batch=2)
        want = reference.quantize(x.cpu(), cast, transposed=transposed, seed=seed.cpu(), stream=3, batch=2)
        check_operand(got, want, f"{name} transposed {transposed}")


def given_amax(device, name, options=()):
    """A given amax replaces the measured one, also where it is smaller than the data's."""
    cast = make_cast(name, options)
    x = matrix((40, 72), "bfloat16")
    for value in (0.0, 3.0, 1e30, float("inf")):
        amax = torch.tensor(value)
        got = triton.quantize(x.to(device), cast, amax=amax.to(device))
        check_operand(got, reference.quantize(x, cast, amax=amax), f"{name} amax {value}")


def saturated(device):
    """Tiles encoded once for both operands, of a matrix with Inf and elements far above the amax given."""
    cast, x = Cast("nvfp4_2d"), matrix((64, 64), "bfloat16")
    x[5, 7], x[9, 30] = float("inf"), torch.finfo(torch.bfloat16).max
    for value in (3.0, torch.finfo(torch.float32).max):
        amax = torch.tensor(value)
        made = triton.quantize_both(x.to(device), cast, cast, amax=amax.to(device))
        for got, want in zip(made, reference.quantize_both(x, cast, cast, amax=amax), strict=True):
            check_operand(got, want, f"amax {value}")


def delayed(device):
    """Codes under a given scale; the live amax is recorded in the same pass, a non-finite one is not."""
    cast = Cast("fp8_tensor", scaling=Delayed())
    history, scale_enc = torch.zeros(4, device=device), torch.tensor(0.3)
    largest = 0.0
    for shape, special in (((40, 72), False), ((136, 264), False), ((33, 50), True)):
        x = matrix(shape, "bfloat16", special=special)
        both = triton.quantize_both(x.to(device), cast, cast, scale_enc=scale_enc.to(device), record=history)
        for got, transposed in zip(both, (False, True), strict=True):
            want = reference.quantize(x, cast, transposed=transposed, scale_enc=scale_enc)
            check_operand(got, want, f"delayed {shape}")
        largest = largest if special else max(largest, float(x.float().abs().max()))
        assert history.tolist() == [largest, 0.0, 0.0, 0.0]
    index = torch.zeros(1, device=device).get_device()
    assert not program.scratch(index).any(), "scratch words were left behind"


def told_of_overflow(want, x, transposed):
    """An operand of the reference as a product is handed it for a gradient: NaN where a scope's amax is infinite."""
    magnitude = (x.t() if transposed else x).float().abs().nan_to_num(nan=0.0, posinf=float("inf"))
    level = "scale" if want.tensor_scale is None else "tensor_scale"
    scale = getattr(want, level)
    height, width = magnitude.shape
    if scale.dim():
        block = want.format.block if level == "scale" else (1, None)
        height, width = (size or whole for size, whole in zip(block, magnitude.shape, strict=True))
    padded = torch.zeros([-(-size // unit) * unit for size, unit in zip(magnitude.shape, (height, width), strict=True)])
    padded[: magnitude.shape[0], : magnitude.shape[1]] = magnitude
    amax = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).amax((1, 3)).reshape(scale.shape)
    if want.format.scale.name == "E8M0":  # which tells of it by itself
        return want
    if scale.dtype == torch.uint8:  # one level
        return replace(want, scale=scale.masked_fill(amax.isinf(), 0x7F))
    return replace(want, **{level: scale.masked_fill(amax.isinf(), float("nan"))})


def gradients(device, name, options=(), shape=(37, 75), dtype="float32"):
    """Casts of a gradient: the codes of any other tensor, and a NaN scale for what holds an infinity; for no more."""
    cast = make_cast(name, options)
    seed = seed_words(device)
    for infinite in (True, False):
        x = matrix(shape, dtype, special=True)
        if not infinite:
            x[x.isinf()] = 3.0
        streams = {"row_stream": 2, "column_stream": 4}
        both = triton.quantize_both(x.to(device), cast.of_gradient, cast.of_gradient, seed=seed, **streams)
        for got, transposed, stream in zip(both, (False, True), (2, 4), strict=True):
            plain = reference.quantize(x, cast, transposed=transposed, seed=seed.cpu(), stream=stream)
            want = told_of_overflow(plain, x, transposed)
            assert (infinite and name != "mxfp8") is any(
                bytes_of(getattr(want, field)).tobytes() != bytes_of(getattr(plain, field)).tobytes()
                for field in ("scale", "tensor_scale") if getattr(want, field) is not None
            )  # fmt: skip
            check_operand(got, want, f"{name} transposed {transposed}, infinite {infinite}")
            theirs = reference.quantize(x, cast.of_gradient, transposed=transposed, seed=seed.cpu(), stream=stream)
            check_operand(theirs, want, f"reference, {name} transposed {transposed}, infinite {infinite}")


def delayed_gradients(device):
    """Under a given scale the amax tells of infinities, whether it is recorded or not; and of nothing else."""
    cast, known = Cast("fp8_tensor_e5m2", scaling=Delayed()), torch.tensor(0.3)
    for special in (True, False):
        for shape, dtype in (((33, 50), "float32"), ((512, 256), "bfloat16")):
            x = matrix(shape, dtype, special=special)
            for row, column in ((True, True), (True, False), (False, True)):
                for history in (torch.zeros(2, device=device), None):
                    both = triton.quantize_both(
                        x.to(device), cast.of_gradient if row else None, cast.of_gradient if column else None,
                        scale_enc=known.to(device), record=history,
                    )  # fmt: skip
                    for got, transposed in zip(both, (False, True), strict=True):
                        if got is not None:
                            want = reference.quantize(x, cast, transposed=transposed, scale_enc=known)
                            check_operand(got, told_of_overflow(want, x, transposed), f"{shape} {special} {transposed}")
                    if history is not None:
                        assert float(history[0]) == (0.0 if special else float(x.float().abs().max()))
    index = torch.zeros(1, device=device).get_device()
    assert not program.scratch(index).any(), "scratch words were left behind"


def converted_once(device):
    """Codes of whole tiles of large matrices, each element converted once for both operands."""
    history, known, enough = torch.zeros(2, device=device), torch.tensor(0.3), casts.ENOUGH_PROGRAMS
    try:
        casts.ENOUGH_PROGRAMS = 1
        program.forget_programs()
        for shape, dtype in (((512, 256), "bfloat16"), ((256, 128), "float16"), ((256, 128), "float32")):
            x = matrix(shape, dtype, special=True)
            for name in ("fp8_tensor", "fp8_tensor_e5m2"):
                both = triton.quantize_both(x.to(device), Cast(name), Cast(name))
                for got, transposed in zip(both, (False, True), strict=True):
                    check_operand(got, reference.quantize(x, Cast(name), transposed=transposed), f"{name} {shape}")
            x[x.isinf()] = 1.0
            cast = Cast("fp8_tensor", scaling=Delayed())
            both = triton.quantize_both(x.to(device), cast, cast, scale_enc=known.to(device), record=history)
            for got, transposed in zip(both, (False, True), strict=True):
                want = reference.quantize(x, cast, transposed=transposed, scale_enc=known)
                check_operand(got, want, f"delayed {shape}")
            assert float(history[0]) >= float(x[~x.isnan()].float().abs().max())
    finally:
        casts.ENOUGH_PROGRAMS = enough
        program.forget_programs()


def amaxes(device, shape, dtype, **kind):
    """The amax of a matrix: NaN ignored, Inf counted, any strides."""
    x = matrix(shape, dtype, **kind)
    values = x.float().abs()
    want = values[~values.isnan()].max()
    assert float(triton.amax(x.to(device))) == float(want)
    sliced = x[::2, 1::3]
    if sliced.numel():
        values = sliced.float().abs()
        assert float(triton.amax(x.to(device)[::2, 1::3])) == float(values[~values.isnan()].max())


def hidden_by_nan(device, name, options=()):
    """NaN in every other element, so that one half of all words holds no magnitude: it does not hide the other."""
    cast = make_cast(name, options)
    for first in (0, 1):
        x = matrix((128, 128), "bfloat16")
        x[:, first::2] = float("nan")
        assert float(triton.amax(x.to(device))) == float(x[:, 1 - first :: 2].float().abs().max())
        both = triton.quantize_both(x.to(device), cast, cast, seed=seed_words(device), row_stream=2, column_stream=4)
        for got, axis, stream in zip(both, (-1, -2), (2, 4), strict=True):
            want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
            check_operand(got, want, f"{name} axis {axis}, NaN from {first} on")


def beside_nan(device, name, row=(), column=(), dtype="bfloat16"):
    """The amax of all, of a row and of a column, next to NaN in the same blocks and in the same halves of words."""
    casts_, x = (make_cast(name, row), make_cast(name, column)), matrix((128, 128), dtype)
    x[5, 18], x[5, 16], x[9, 18] = 6e4, float("nan"), float("nan")
    both = triton.quantize_both(x.to(device), *casts_, seed=seed_words(device), row_stream=2, column_stream=4)
    for got, cast, axis, stream in zip(both, casts_, (-1, -2), (2, 4), strict=True):
        want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
        check_operand(got, want, f"{name} axis {axis}")


# Bits of halves of words, without their sign: zero, the smallest and largest subnormal, the smallest normal number,
# one, what lies between codes, the largest finite one; Inf; NaN, quiet and signalling.
_FINITE = {
    "bfloat16": (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x3FC8, 0x7F7F),
    "float16": (0x0000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x3E40, 0x7BFF),
}
_NOT_FINITE = {
    "bfloat16": {"Inf": (0x7F80,), "NaN": (0x7FC0, 0x7F81)},
    "float16": {"Inf": (0x7C00,), "NaN": (0x7E00, 0x7C01)},
}


def matrix_of_words(dtype, which):
    """(256, 128): every pair of such halves, of both signs, in one word, scattered; and blocks that hold nothing else.

    `which`: the finite ones alone, or "Inf" or "NaN" with them.
    """
    halves = _FINITE[dtype] + _NOT_FINITE[dtype].get(which, ())
    halves = torch.tensor([*halves, *(half | 0x8000 for half in halves)]).to(torch.int16)
    x = matrix((256, 128), dtype)
    bits = x.view(torch.int16)
    for i, half in enumerate(halves):  # 16 x 16 tiles of one pattern, and with one element of another size in each
        row, column = 16 * (i % 8), 16 * (i // 8)
        bits[row : row + 16, column : column + 16] = half
        bits[128 + row : 144 + row, column : column + 16] = half
        x[128 + row + i % 16, column + (5 * i) % 16] = 1.5
    if which != "finite":  # blocks of 32 rows, and of 128 columns, of nothing else
        bits[128:160, 64:96] = halves[-1]
        bits[200:202] = halves[-1]
    pairs = torch.cartesian_prod(halves, halves)
    at = (torch.arange(len(pairs)) * 61) % (256 * 64)  # words in the order of rows, an odd distance apart
    bits.view(-1, 2)[at] = pairs
    return x


def special_words(device, name, options=(), dtype="bfloat16"):
    """Words of two special halves, in whole tiles."""
    cast = make_cast(name, options)
    for which in ("finite", "Inf", "NaN"):
        x = matrix_of_words(dtype, which)
        both = triton.quantize_both(x.to(device), cast, cast, seed=seed_words(device), row_stream=2, column_stream=4)
        for got, axis, stream in zip(both, (-1, -2), (2, 4), strict=True):
            want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream)
            check_operand(got, want, f"{name} axis {axis}, words of {which}")
        if cast.format.is_per_tensor:
            assert float(triton.amax(x.to(device))) == float(x[~x.isnan()].float().abs().max())


def special_words_folded(device, name, tile):
    """The same words folded to 1 x 128 or 128 x 128 blocks."""
    cast = make_cast(name, ())
    for which in ("finite", "Inf", "NaN"):
        x = matrix_of_words("bfloat16", which)
        *both, lossy = calls.folded(x.to(device), cast, cast, tile=tile)
        for got, axis, count in zip(both, (-1, -2), lossy.tolist(), strict=True):
            quantized = oracle.quantize(x.float().numpy(), cast, axis=axis)
            want, number = oracle.fold(quantized, (128, 128) if tile else (1, 128))
            check_operand(got, want, f"folded {name} axis {axis}, words of {which}")
            assert count == number, f"folded {name} axis {axis}: {count} lossy elements, oracle {number}"


def amax_in_pieces(device):
    """Programs that take piece after piece of a matrix, from its end on: all of it is read, once."""
    usual = casts.AMAX_PIECES
    try:
        for block, unroll, at_once in ((64, 2, 3), (64, 1, 2)):
            casts.AMAX_PIECES = block, unroll, at_once, casts.Warps(1)
            program.forget_programs()
            for count in (1, 2, 63, 64, 127, 128, 130, 640, 1000, 1023):
                for dtype in ("bfloat16", "float32"):
                    x = torch.ones(count, 1, dtype=getattr(torch, dtype))
                    for at in {0, count // 2, count - 1}:
                        x[at] = -3.0 - at
                        got = triton.amax(x.to(device))
                        assert float(got) == float(x.float().abs().max()), (block, unroll, count, dtype, at)
    finally:
        casts.AMAX_PIECES = usual
        program.forget_programs()


def values_in_bf16(device, name, options=()):
    """Decoded values of both operands, without codes in between; those of 16 x 16 tiles once for both."""
    cast = make_cast(name, options)
    for shape, kind in (((33, 47), {"special": True}), ((64, 48), {}), ((40, 24), {"transposed": True})):
        x = matrix(shape, "bfloat16", **kind)
        seed = seed_words(device)
        *both, _ = calls.cast_to("values", x.to(device), cast, cast, seed=seed, row_stream=1, column_stream=1)
        for (values, _, level), transposed in zip(both, (False, True), strict=True):
            operand = reference.quantize(x, cast, transposed=transposed, seed=seed.cpu(), stream=1)
            bare = replace(operand, tensor_scale=None, hadamard=None, length=operand.stored_length)
            check_values(values, reference.dequantize(bare, torch.bfloat16), f"{name} transposed {transposed}")
            assert (level is None) == (operand.tensor_scale is None)
            if operand.tensor_scale is not None:
                check_values(level, operand.tensor_scale, name)
        assert (both[0][0].data_ptr() == both[1][0].data_ptr()) is cast.format.is_tile


def folded(device, name, tile, options=()):
    """Folding from high precision is the oracle's quantize and fold, counter included."""
    cast = make_cast(name, options)
    seed = seed_words(device)
    for shape, kind in (
        ((70, 140), {"special": True}), ((33, 47), {"spread": 20}), ((40, 24), {"transposed": True}),
        ((256, 128), {"special": True}), ((128, 256), {"spread": 4}),
    ):  # fmt: skip
        x = matrix(shape, "bfloat16", **kind)
        if shape == (128, 256):  # blocks a few to many binades below others of their group
            for k in range(8):
                x[:, 32 * k : 32 * k + 32] *= 2.0 ** (-3 * k)
            x[32:64] *= 2.0**-9
        *both, lossy = calls.folded(x.to(device), cast, cast, tile=tile, seed=seed)
        for got, axis, count in zip(both, (-1, -2), lossy.tolist(), strict=True):
            quantized = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED)
            want, number = oracle.fold(quantized, (128, 128) if tile else (1, 128))
            check_operand(got, want, f"folded {name} axis {axis}")
            assert count == number, f"folded {name} axis {axis}: {count} lossy elements, oracle {number}"
            codes = reference.quantize(x, cast, transposed=axis == -2, seed=seed_words("cpu"))
            moved = replace(codes, codes=codes.codes.to(device), scale=codes.scale.to(device))
            if codes.tensor_scale is not None:
                moved.tensor_scale = codes.tensor_scale.to(device)
            got = calls.folded_codes(moved, cast, tile=tile)
            across = want.scale.shape[1]
            assert not got.scale[:, across:].any()
            check_operand(replace(got, scale=got.scale[:, :across]), want, f"{name} folded from codes, axis {axis}")


def cast_in_jax(device, name, forms, options=(), shape=(70, 140), **kind):
    """Both operands in these forms, as JAX starts the kernels (tests/kernels/jax_cases.py)."""
    pytest.importorskip("jax", reason="jax is not installed")
    from tests.kernels import jax_cases

    jax_cases.check(device, name, forms, options, shape, kind)


def dequantized(device, name):
    """Codes back to values in three dtypes, aligned and ragged."""
    options = [()] if name != "nvfp4" else [(), (("rht", True),)]
    for option in options:
        cast = make_cast(name, option)
        for shape in ((64, 128), (21, 75)):
            for transposed in (False, True):
                operand = reference.quantize(matrix(shape, "float32", special=True), cast, transposed=transposed)
                moved = replace(
                    operand, codes=operand.codes.to(device), scale=operand.scale.to(device),
                    tensor_scale=None if operand.tensor_scale is None else operand.tensor_scale.to(device),
                )  # fmt: skip
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    want = reference.dequantize(operand, dtype)
                    check_values(triton.dequantize(moved, dtype), want, f"{name} {shape} {dtype}")


def turned_codes(device):
    """The transpose of codes: whole tiles, edges, and sizes that no kernel takes."""
    for shape in ((256, 128), (36, 140), (132, 4), (4, 260), (33, 64), (16, 30)):
        codes = torch.arange(shape[0] * shape[1], dtype=torch.int64).mul(37).remainder(251).to(torch.uint8).view(shape)
        for dtype in (torch.uint8, torch.float8_e4m3fn):
            got = triton.turned(codes.view(dtype).to(device))
            assert got.is_contiguous(), shape
            assert torch.equal(got.view(torch.uint8).cpu(), codes.t()), f"{shape} {dtype}"


def odd_alignments(device):
    """Matrices that begin anywhere, with rows of any length, and operands whose codes do."""
    storage = matrix((1, 6000), "bfloat16").reshape(-1)
    for offset, shape, stride in ((0, (40, 66), 66), (2, (40, 64), 68), (4, (33, 48), 70), (1, (40, 72), 72)):
        x = storage[offset:].as_strided(shape, (stride, 1))
        given = storage.to(device)[offset:].as_strided(shape, (stride, 1))
        for name in ("mxfp8", "nvfp4", "fp8_tensor"):
            both = triton.quantize_both(given, Cast(name), Cast(name))
            for got, transposed in zip(both, (False, True), strict=True):
                want = reference.quantize(x, Cast(name), transposed=transposed)
                check_operand(got, want, f"{name} at {offset}")
        operand = reference.quantize(x, Cast("mxfp8"))
        shifted = torch.empty(operand.codes.numel() + 1, dtype=torch.uint8, device=device)[1:].view(shape)
        shifted.copy_(operand.codes.view(torch.uint8).to(device))
        moved = replace(operand, codes=shifted.view(operand.codes.dtype), scale=operand.scale.to(device))
        check_values(triton.dequantize(moved, torch.bfloat16), reference.dequantize(operand, torch.bfloat16), "shifted")


def wide_offsets(device):
    """The form for matrices beyond 2^31 elements: offsets of 64 bits, here forced on small ones."""
    narrow = passes_matrix.INT32_MAX
    try:
        passes_matrix.INT32_MAX = 100
        program.forget_programs()
        for name in ("fp8_tensor", "fp8_row", "fp8_1x128", "mxfp4", "nvfp4"):
            operands(device, name, (37, 75), "float32", **{"special": True})
            operands(device, name, (64, 128), "bfloat16")
        noisy = (("rounding", "stochastic"),)
        for name in ("fp8_tensor", "mxfp8", "nvfp4"):
            operands(device, name, (37, 75), "float32", noisy)
        operands(device, "nvfp4", (48, 72), "bfloat16", (("rht", True), *noisy))
        values_in_bf16(device, "nvfp4", (("rht", True),))
        values_in_bf16(device, "mxfp4")
        dequantized(device, "nvfp4")
        fused_casts(device, "delayed")
        fused_casts(device, "mxfp8")
        folded(device, "mxfp8", False)
        x = matrix((37, 75), "bfloat16")
        assert program.matrix_of(x).index64
        assert float(triton.amax(x.to(device))) == float(x.float().abs().max())
    finally:
        passes_matrix.INT32_MAX = narrow
        program.forget_programs()


def swizzled(device):
    """Scales in 128 x 4 tiles, read as words and byte by byte."""
    for shape in ((128, 4), (200, 36), (130, 7), (1, 1), (40, 200)):
        scale = torch.randint(0, 256, shape, dtype=torch.uint8)
        for given in (scale, scale.t().contiguous().t()):
            got = triton.swizzle_scales(given.to(device))
            want = torch.from_numpy(oracle.swizzle_scales(scale.numpy()))
            assert torch.equal(got.cpu(), want), f"swizzled {shape} strides {given.stride()}"


def empty(device):
    """Matrices without elements give the shapes and unit scales of docs/numerics.md 7.1."""
    for name in FORMATS:
        for shape in ((0, 5), (5, 0), (0, 0)):
            x = torch.empty(shape)
            for got, transposed in zip(
                triton.quantize_both(x.to(device), Cast(name), Cast(name)), (False, True), strict=True
            ):
                check_operand(got, reference.quantize(x, Cast(name), transposed=transposed), f"{name} {shape}")


def activations(device, activation, dtype):
    """Fused values are torch's own within rounding; fused codes are exactly those of the fused values."""
    dtype = getattr(torch, dtype)
    plain = {
        "silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        "qgelu": lambda t: (lambda w: (w * torch.sigmoid(1.702 * w)).to(t.dtype))(t.float()),
        "srelu": lambda t: functional.relu(t) ** 2,
        "sigmoid": lambda t: torch.sigmoid(t.float()).to(t.dtype),  # torch's own gradient reads the rounded value
    }[activation]  # fmt: skip
    generator = torch.Generator().manual_seed(7)
    gate, up, grad = (torch.randn(37, 74, generator=generator).to(dtype).to(device) for _ in range(3))
    leaf, other = gate.clone().requires_grad_(), up.clone().requires_grad_()
    (plain(leaf) * other).backward(grad)
    alone = gate.clone().requires_grad_()
    plain(alone).backward(grad)
    ((product, product_amax),), _ = triton.values(Activation(gate, up, activation))
    ((single, _),), _ = triton.values(Activation(gate, None, activation))
    (first, second), _ = triton.values(ActivationGradient(grad, gate, up, activation))
    (only,), _ = triton.values(ActivationGradient(grad, gate, None, activation))
    # One unit of the last place of the dtype, relative to the largest value: order of operations, approximate exp.
    unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-20
    for got, want in (
        (product, plain(gate) * up), (single, plain(gate)), (first[0], leaf.grad), (second[0], other.grad),
        (only[0], alone.grad),
    ):  # fmt: skip
        assert got.dtype == want.dtype
        assert float((got.float() - want.float()).abs().max()) <= unit * float(want.float().abs().max())
    halves = torch.cat([gate, up], 1).chunk(2, 1)  # which lie alike, but not as the gradient does
    for producer, wanted in (
        (ActivationGradient(grad, *halves, activation), (first[0], second[0])),
        (ActivationGradient(grad, gate, halves[1], activation), (first[0], second[0])),
        (Activation(halves[0], up, activation), (product,)),
    ):
        for got, want in zip(triton.values(producer)[0], wanted, strict=True):
            assert torch.equal(got.value, want)
    assert float(product_amax) == float(product.float().abs().max())
    assert float(first[1]) == float(first[0].float().abs().max())
    assert float(second[1]) == float(second[0].float().abs().max())


def rotary(device, dtype, interleaved):
    """Rotated heads are those of torch operations, forward and backward; v is copied."""
    dtype = getattr(torch, dtype)
    # The interpreter drops the bits that do not fit into bfloat16 where hardware rounds: one unit of the last place.
    unit = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-20
    for heads, kv, size, rotated in ((4, 2, 16, 16), (3, 3, 24, 8), (5, 1, 20, 12)):
        generator = torch.Generator().manual_seed(9)
        joint = torch.randn(2, 7, heads + 2 * kv, size, generator=generator).to(dtype).to(device)
        grad = torch.randn(joint.shape, generator=generator).to(dtype).to(device)
        angles = torch.rand(2, 7, rotated, generator=generator).to(device)
        cos, sin, split = angles.cos(), angles.sin(), [heads, kv, kv]
        leaf = joint.clone().requires_grad_()
        parts = leaf.split(split, 2)
        want = torch.cat([*(attention.rotated_by_torch(x, cos, sin, interleaved) for x in parts[:2]), parts[2]], 2)
        want.backward(grad)
        for inputs, inverse, wanted in ((joint, False, want.detach()), (grad, True, leaf.grad)):
            outputs = inputs.new_empty(inputs.shape)
            triton.rotate(
                inputs.split(split, 2), outputs.split(split, 2), cos, sin, inverse=inverse, interleaved=interleaved
            )
            far = (outputs.float() - wanted.float()).abs() > unit * wanted.float().abs().clamp_min(2.0**-6)
            assert not far.any(), f"{heads} heads of {size}, {rotated} rotated, inverse {inverse}"
            assert torch.equal(outputs.split(split, 2)[2], inputs.split(split, 2)[2])
        # The same through autograd, from one tensor and from three.
        with contextlib.nullcontext() if device == "cuda" else backends.pretend(chip="h200"):
            for is_joint in (True, False):
                again = joint.clone().requires_grad_()
                made = [again] if is_joint else list(again.split(split, 2))
                y = attention.rotate_heads(made, split if is_joint else None, cos, sin.double(), interleaved)
                assert type(y[0].grad_fn).__name__ == "_RotateBackward"
                torch.cat(y, 2).backward(grad)
                for got, wanted in ((torch.cat(y, 2).detach(), want.detach()), (again.grad, leaf.grad)):
                    bound = unit * wanted.float().abs().clamp_min(2.0**-6)
                    assert not ((got.float() - wanted.float()).abs() > bound).any()


def losses(device, dtype):
    """Losses of rows, and gradients over their logits, are those of torch's softmax; rows of one block and of some."""
    dtype, saved = getattr(torch, dtype), triton.LOSS_BLOCK
    try:
        for columns, triton.LOSS_BLOCK in ((200, saved), (200, 64), (129, 128), (1, saved)):
            generator = torch.Generator().manual_seed(columns)
            logits = (5 * torch.randn(5, columns, generator=generator)).to(dtype).to(device)
            labels = torch.randint(0, columns, (5,), generator=generator).to(device)
            s = torch.tensor([0.25, 0.0, -1.5, 1.0, 1.0], device=device)
            if columns > 1:
                logits[3, : columns - 1] = -torch.inf  # a first block without a finite logit
                logits[4, 1], labels[4] = torch.inf, 0
                labels[3] = columns - 1
            wide = logits.double().requires_grad_()
            want = functional.cross_entropy(wide, labels, reduction="none")
            (dy,) = torch.autograd.grad(want, wide, s.double())
            of_label, found = logits.gather(1, labels[:, None]), [torch.empty(5, device=device) for _ in range(2)]
            triton.cross_entropy_(logits, of_label, labels, None, found[0])
            triton.cross_entropy_(logits, of_label, labels, s, found[1])
            assert torch.equal(*(one.nan_to_num(-1.0) for one in found))
            torch.testing.assert_close(found[0].double(), want.detach(), rtol=2e-6, atol=2e-6, equal_nan=True)
            unit = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-18
            torch.testing.assert_close(logits.double(), dy, rtol=unit, atol=1e-7, equal_nan=True)
    finally:
        triton.LOSS_BLOCK = saved


def loss_of_a_head(device, name, backend):
    """The loss in chunks and its gradients are those of the reference backend."""
    torch.manual_seed(0)
    x, weight = torch.randn(70, 64).bfloat16().to(device), torch.randn(144, 64).div(4).bfloat16().to(device)
    labels = torch.randint(0, 144, (70,)).to(device)
    labels[::7], found = -100, []
    around = contextlib.nullcontext() if device == "cuda" else backends.pretend(chip="h200")
    with around, block_gemms(device, []):
        for one in ("reference", backend):
            leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
            torch.manual_seed(1)
            with mf.autocast(recipe=name, backend=one):
                loss = mf.linear_cross_entropy(*leaves, labels, chunk=32)
            found.append((loss.detach(), *torch.autograd.grad(loss, leaves)))
    for one, other in zip(*found, strict=True):
        assert float((one.float() - other.float()).norm()) <= 0.02 * float(one.float().norm())


def fused_casts(device, name):
    """Codes written by activations, their gradients and norms are those of the values that they would have written."""
    is_delayed, noisy = name == "delayed", name.endswith(" stochastic")
    cast = Cast("fp8_tensor_e5m2", scaling=Delayed()) if is_delayed else Cast(name.split()[0])
    cast = replace(cast, rounding="stochastic") if noisy else cast
    words, other_words = seed_words(device), seed_words(device).flip(0)
    streams = {"row_stream": 2, "column_stream": 4} if noisy else {}
    noise = {"seed": words, **streams} if noisy else {}
    generator = torch.Generator().manual_seed(8)
    gate, up, grad = (torch.randn(40, 92, generator=generator).to(torch.bfloat16).to(device) for _ in range(3))
    weight, bias = (torch.randn(92, generator=generator).to(torch.bfloat16).to(device) for _ in range(2))
    scale_enc = torch.tensor(3.0, device=device)
    live, live2 = torch.zeros(2, device=device), torch.zeros(2, device=device)

    def check(both, values, seed=words):
        options = {"scale_enc": scale_enc} if is_delayed else {}
        options |= {"seed": seed, **streams} if noisy else {}
        for got, want in zip(both, reference.quantize_both(values, cast, cast, **options), strict=True):
            check_operand(got, want, f"fused {name}")

    def known(values):
        amax = values.float().abs().max()
        if is_delayed:
            live.zero_()
            return {"scale_enc": scale_enc, "record": live}
        return {"amax": amax} if cast.format.is_per_tensor else {}

    swiglu = Activation(gate, up, "silu")
    ((product, _),), _ = triton.values(swiglu)
    (both,), _ = calls.codes(swiglu, cast, cast, **known(product), **noise)
    check(both, product)
    if is_delayed:
        assert float(live[0]) == float(product.float().abs().max())
    gradients_ = ActivationGradient(grad, gate, up, "silu")
    ((first, first_amax), (second, second_amax)), _ = triton.values(gradients_)
    options, others = {}, {}
    if is_delayed:
        live.zero_()
        options, others = {"scale_enc": scale_enc, "record": live}, {"scale_enc": scale_enc, "record": live2}
    elif cast.format.is_per_tensor:
        options, others = {"amax": first_amax}, {"amax": second_amax}
    if noisy:  # the gradients belong to two layers, each with a seed of its own
        options, others = {"seed": words, **streams}, {"seed": other_words}
    (both, both2), _ = calls.codes(gradients_, cast, cast, **options, second=others)
    check(both, first)
    check(both2, second, other_words)
    if is_delayed:
        assert (float(live[0]), float(live2[0])) == (float(first_amax), float(second_amax))
    for kind in ("rms", "layer"):
        norm = Norm(gate, weight, bias, 1e-5, kind)
        ((values, _),), _ = triton.values(norm)
        (both,), normed = calls.codes(norm, cast, cast, **known(values), **noise)
        # Sums of another order may give another last bit of the statistics: the codes are those of the ones returned.
        rows = gate.float()
        if kind == "layer":
            again = (rows - normed.mean[:, None]) * normed.inverse[:, None] * weight.float() + bias.float()
            plain = functional.layer_norm(gate.float(), (92,), weight.float(), bias.float(), 1e-5)
        else:
            again = rows * normed.inverse[:, None] * weight.float()
            plain = functional.rms_norm(gate.float(), (92,), weight.float(), 1e-5)
        again = again.to(torch.bfloat16)
        check(both, again)
        for got in (values, again):
            assert float((got.float() - plain).abs().max()) <= 2.0**-8 * float(plain.abs().max())


def scale_orders(device):
    """Squares write scales in rows and in columns."""
    cast, x = Cast("mxfp8"), matrix((256, 128), "bfloat16", special=True).to(device)
    numbers, source = passes_matrix.kernel_cast(cast), program.matrix_of(x)
    wanted = reference.quantize_both(x.cpu(), cast, cast)
    rows, columns, warps = casts.TILES["squares"]
    for order in (tiles.SCALE_ROW_MAJOR, tiles.SCALE_COLUMN_MAJOR):
        constant = numbers.block_cast(0, order.value)
        codes = [torch.empty(shape, dtype=torch.uint8, device=device) for shape in ((256, 128), (128, 256))]
        scales = [torch.full((1024,), 77, dtype=torch.uint8, device=device) for _ in range(2)]
        constants = (constant, constant, source.how(rows, columns, units=True))
        launch = program.kernel_of(blocks.quantize_blocks).prepared(
            (source.key, constants), source.tiles(rows, columns), (0, 0, 0, 0.0, 0.0, *source.sizes), constants, warps
        )
        stream = torch.cuda.current_stream().cuda_stream if x.is_cuda else 0
        launch(stream, x, codes[0], scales[0], codes[1], scales[1], None, None, None)
        for got, scale, want in zip(codes, scales, wanted, strict=True):
            assert torch.equal(got.cpu(), want.codes.view(torch.uint8))
            laid_out = want.scale if order == tiles.SCALE_ROW_MAJOR else want.scale.t()
            assert torch.equal(scale.cpu(), laid_out.reshape(-1)), order
    row, column = triton.quantize_both(x, cast, cast)
    assert (row.scale.stride(), column.scale.stride()) == ((1, 256), (1, 128))
    assert triton.quantize(x, cast).scale.is_contiguous()


def fused_gradients(device, name):
    """The gradients of a gate, cast where they are computed: a scale tells of an infinity in its own gradient alone."""
    cast = Cast("fp8_tensor_e5m2", scaling=Delayed()) if name == "delayed" else Cast(name)
    gate, up, grad = (matrix((40, 136), "bfloat16", spread=1) for _ in range(3))
    for infinite in (True, False):
        if infinite:
            gate[7, 9], up[7, 9], grad[7, 9] = 0.0, 1.0, float("inf")  # that of up is Inf * silu(0), which is NaN
        else:
            grad[7, 9] = 1.0
        producer = ActivationGradient(*(tensor.to(device) for tensor in (grad, gate, up)), "silu")
        first, second = (one.value.cpu() for one in triton.values(producer)[0])
        assert (bool(first.isinf().any()), bool(second.isinf().any())) == (infinite, False)
        options, others = {}, {}
        if name == "delayed":
            others = {"scale_enc": torch.tensor(0.3, device=device)}
            options = {**others, "record": torch.zeros(2, device=device)}
        made, _ = calls.codes(producer, cast.of_gradient, cast.of_gradient, **options, second=others)
        for both, values in zip(made, (first, second), strict=True):
            for got, transposed in zip(both, (False, True), strict=True):
                scale_enc = torch.tensor(0.3) if name == "delayed" else None
                want = reference.quantize(values, cast, transposed=transposed, scale_enc=scale_enc)
                check_operand(got, told_of_overflow(want, values, transposed), f"{name} {transposed} {infinite}")


def fused_squares(device):
    """Codes that an activation and the gradients of a gate write in whole tiles are those of their values."""
    cast, generator = Cast("mxfp8"), torch.Generator().manual_seed(9)
    gate, up, grad = (torch.randn(256, 128, generator=generator).to(torch.bfloat16).to(device) for _ in range(3))
    gate[3, 5], up[40, 7], up[64:96, 32:64] = float("nan"), float("inf"), 0.0
    for producer in (Activation(gate, up, "silu"), ActivationGradient(grad, gate, up, "silu")):
        written, _ = calls.codes(producer, cast, cast)
        for both, (value, _) in zip(written, triton.values(producer)[0], strict=True):
            for got, want in zip(both, reference.quantize_both(value, cast, cast), strict=True):
                check_operand(got, want, "fused mxfp8")


def norms_alone(device, kind, name):
    """Norms of long rows and of whole tiles (tests/kernels/norm_cases.py)."""
    from tests.kernels import norm_cases

    norm_cases.check(device, kind, name)


def programs(device):
    """Programs for every cast, form, stride and alignment (tests/kernels/program_cases.py)."""
    from tests.kernels import program_cases

    program_cases.check(device)


def guard_zones(device):
    """Nothing is written beside outputs, nothing read beside inputs (tests/kernels/guarded.py)."""
    from tests.kernels import guarded

    guarded.check(device)


def refusals(device):
    """Casts without a kernel are refused by name, before anything runs."""
    from microfloat.errors import NotSupportedError

    x = matrix((40, 72), "bfloat16").to(device)
    odd = Cast(ScaledFormat("mx_1x24", E4M3, SCALE_E8M0, (1, 24)))
    assert "1x24" in family_of(odd)[1]
    assert family_of(Cast("mxfp8"))[1] == ""
    for call in (
        lambda: triton.quantize(x, odd),
        lambda: calls.folded(x, Cast("fp8_1x128"), None),
        lambda: calls.codes(Activation(x, None, "silu"), Cast("nvfp4"), None),
        lambda: calls.codes(Activation(x, None, "silu"), Cast("fp8_tensor"), None),
    ):
        with pytest.raises(NotSupportedError):
            call()


def fused_linears(device, backend, name, **options):
    """Linears fused with a norm and an activation have the bits of their parts (tests/torch/fused_cases.py)."""
    from tests.torch.nn import fused_cases

    with fused_cases.on_cpu_too() if device == "cpu" else contextlib.nullcontext():
        fused_cases.check(device, backend, name, **options)


def forms_of_gathered_weights(device, names):
    """A weight that was gathered as codes, in the form that a Hopper's GEMMs read, against the casts into that form."""

    class Source:
        def operand(self, gather, transposed):
            casts = [None, None]
            casts[transposed] = gather.casts[transposed]
            return backend.quantize_both(w, *casts)[transposed]

    with backends.pretend(chip="h200"):
        w = torch.randn(160, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
        w *= torch.exp2(torch.arange(-20, 20).float()).repeat_interleave(4)[:, None]
        backend = backends.choose("auto", w.device)
        for name in names:
            recipe = from_name(name)
            gather = Gather((recipe.fprop.rhs, recipe.dgrad.rhs), w.dtype, Source())
            routes = routes_of(recipe, backend.chip_of(w.device))
            for row in (True, False):
                entries = entries_of(recipe, routes, "w", row, not row)
                wanted = schedule.CastStep(backend, w, entries)(w, 0, program.scratch(-1), CastInputs())
                step = GatheredCast(backend, w.shape, entries, w.dtype, schedule.CastStep)
                made = step(Gathered(gather, w.shape, w.device), 0, None, CastInputs())
                for ours, theirs in zip(made.flat(), wanted.flat(), strict=True):
                    assert (ours is None) == (theirs is None), (name, row)
                    if ours is not None:
                        assert ours.stride() == theirs.stride(), (name, row)
                        ours, theirs = (part.reshape(-1).view(torch.uint8) for part in (ours, theirs))
                        assert torch.equal(ours, theirs), (name, row)


def measured_products(device, names):
    """Operands as `microfloat bench` makes them, and their product: that of the reference."""
    around = contextlib.nullcontext() if device == "cuda" else backends.pretend(chip="h200")
    with around, block_gemms(device, []):
        for name in names:
            fprop = from_name(name).fprop if name in RECIPES else Gemm(Cast(name), Cast(name))
            casts = [Cast(cast.format, cast.scale_rule, hadamard=cast.hadamard) for cast in fprop.casts]
            maker = measure.Maker(Gemm(*casts), device)
            assert maker.backend == "native"
            assert maker.difference((64, 128, 96)) < 4e-3, name


def routed_rows(device, tokens, many, features, dtype, live):
    """Sums of rows of experts are those of plain torch operations to the bit, and so is what is spread to them."""
    from microfloat.torch.launch import triton

    generator = torch.Generator().manual_seed(many)
    x = torch.randn(tokens, features, generator=generator).to(dtype)
    rows = torch.randn(tokens * many, features, generator=generator).to(dtype)
    weights = torch.rand(tokens, many, generator=generator)
    place = torch.randperm(tokens * many, generator=generator).view(tokens, many)
    ends = torch.tensor([1, 1, live], dtype=torch.int32)
    rows[live:] = float("nan")  # rows of no expert here
    weights[place >= live] = float("inf")
    on = [one.to(device) for one in (x, rows, weights, place, ends)]
    for scale in (None, weights):
        own = None if scale is None else on[2]
        (want,) = torch.ops.microfloat.route_rows(rows, place, ends, scale, None, torch.float32, False)
        got = torch.empty_like(want, device=device)
        triton.route_rows(False, on[1], on[3], on[4], own, None, None, got)
        assert torch.equal(got.cpu(), want)
        want, dots = torch.ops.microfloat.route_rows(x, place, ends, scale, rows, dtype, True)
        got, measured = torch.empty_like(on[1]), torch.empty(tokens, many, device=device)
        triton.route_rows(True, on[0], on[3], on[4], own, on[1], measured, got)
        assert torch.equal(got.cpu(), want)
        torch.testing.assert_close(measured.cpu(), dots, rtol=1e-4, atol=1e-4)
        triton.route_rows(True, on[0], on[3], on[4], own, None, None, got.zero_())
        assert torch.equal(got.cpu(), want)


def gates_of_rows(device, rows, columns, dtype, activation):
    """A gate of rows that hold its two inputs, and the gradient of these rows, are those of torch's operations."""
    from microfloat.torch.launch import triton
    from microfloat.torch.launch.prologues import Activation, ActivationGradient

    generator = torch.Generator().manual_seed(columns)
    h, grad = (torch.randn(rows, n * columns, generator=generator).to(dtype).to(device) for n in (2, 1))
    gate, up = h.chunk(2, -1)
    (value,), _ = Activation(gate, up, activation).by_torch()
    gradients, _ = ActivationGradient(grad, gate, up, activation).by_torch()
    steps = 2.0 ** -{torch.bfloat16: 7, torch.float16: 10, torch.float32: 18}[dtype]  # of the last bit
    for got, want in (
        (triton.gated_halves(h, None, activation), value),
        (triton.gated_halves(h, grad, activation), torch.cat(gradients, -1)),
    ):
        assert got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=2 * steps, atol=steps / 2)


def run(case, device):
    """Run ``(function name, arguments, keyword arguments)`` on a device; returns which form of the conversions ran."""
    name, arguments, options = case
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        # The interpreter computes with NumPy, which remarks on the NaN, Inf and wrapping integers that tests are about.
        warnings.simplefilter("ignore", RuntimeWarning)
        globals()[name](device, *arguments, **options)
    return form(device)
