"""Devices that schedules with kernels run on, and the comparison of their results with casts by torch operations."""

import contextlib
import ctypes
import dataclasses
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F

import microfloat.torch as mf
from microfloat import reference
from microfloat.recipes import RECIPES
from microfloat.torch import backends
from microfloat.torch import reference as torch_reference
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import Operands, Parts, record_amax_
from microfloat.torch.launch import gemms, program
from microfloat.torch.linear import schedule

M, K, N = 32, 48, 64


@contextlib.contextmanager
def native_on(device: str):
    """The native backend of a Hopper: as it is on a GPU; on the CPU in Triton's interpreter."""
    schedule.forget()
    with contextlib.nullcontext() if device == "cuda" else backends.pretend(chip="h200"):
        yield


@contextlib.contextmanager
def by_torch():
    """Every operand is made by plain torch operations, one by one, folded by the oracle, laid as its layout says."""
    with (
        mock.patch.object(schedule.CastStep, "__call__", _cast_by_torch),
        mock.patch.object(schedule.Schedule, "pair_programs", return_value=(None, None)),
    ):
        schedule.forget()
        yield
    schedule.forget()


def _cast_by_torch(step, x, stream, words, inputs):
    x = x.reshape(-1, x.shape[-1])
    if inputs.record is not None:
        record_amax_(inputs.record, torch_reference.amax(x))
    layouts = layouts_of(_Native, step.entries, *x.shape)
    made = [Parts(), Parts()]
    if any(entry is not None and entry.form == "folded" for entry in step.entries):
        inputs = inputs._replace(tiles=inputs.folded)  # of one launch, whose operands are counted together
    for form, counts in (("folded", inputs.folded), ("tiles", inputs.tiles)):
        if counts is not None and any(entry is not None and entry.form == form for entry in step.entries):
            counts.zero_()  # a launch counts both operands, the one that it does not make too
    for index, (entry, layout) in enumerate(zip(step.entries, layouts, strict=True)):
        if entry is not None:
            matrix = x.t() if index else x
            made[index] = Parts(matrix) if entry.cast is None else _parts(entry, layout, matrix, inputs, index)
    return Operands(*made)


class _Native:
    programs = None


def _parts(entry, layout, matrix, inputs, index):
    """Codes (or values), scale and tensor scale of one operand."""
    options = {"seed": inputs.seed if entry.cast.is_stochastic else None, "stream": entry.operand.stream}
    if entry.cast.is_delayed:
        options["scale_enc"] = inputs.scale_enc
        if inputs.record is not None:
            options["amax"] = torch_reference.amax(matrix)
    made = torch_reference.quantize(matrix, entry.cast, **options)
    codes, scale, level = made.codes, made.scale, made.tensor_scale
    if entry.form in ("folded", "tiles"):
        parts = (
            codes.view(torch.uint8).cpu().numpy(),
            scale.cpu().numpy(),
            None if level is None else level.cpu().numpy(),
        )
        quantized = reference.Quantized(*parts, entry.cast.format, 1, tuple(matrix.shape), entry.cast.hadamard)
        level = None
        folded, lossy = reference.fold(quantized, (1, 128) if entry.form == "folded" else (128, 128))
        place = inputs.folded if entry.form == "folded" else inputs.tiles
        if place is not None:
            place[index] = int(np.sum(lossy))
        codes, scale = (torch.from_numpy(part) for part in (folded.codes, folded.scale))
        codes = codes.view(getattr(torch, layout.codes.dtype))
    elif entry.form == "values":
        bare = dataclasses.replace(made, tensor_scale=None, length=made.stored_length, hadamard=None)
        codes, scale = torch_reference.dequantize(bare, torch.bfloat16), None
    codes = _laid(codes, layout.codes, matrix.device, entry, is_scale=False)
    if scale is not None:
        scale = _laid(scale, layout.scale, matrix.device, entry, is_scale=True)
    return Parts(codes, scale, level)


def _laid(tensor, part, device, entry, is_scale):
    """A part in the memory order of its layout, turned where its operand is, filled up with scales of one."""
    block = {"codes": entry.cast.format.block, "folded": (1, 128)}.get(entry.form)
    turns = entry.turned and tensor.dim() == 2 and not (is_scale and block == (1, 128))
    source = tensor.t() if turns else tensor
    result = torch.empty_strided(part.shape, part.strides, dtype=source.dtype, device=device)
    if part.shape != tuple(source.shape):  # rows of tiles are filled up for their GEMM
        result.fill_(1)
    result[tuple(slice(size) for size in source.shape)].copy_(source)
    return result


def _at(address, like):
    """The tensor at an address, laid out as another."""
    span = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True)) + 1
    memory = (ctypes.c_uint8 * (span * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).as_strided(like.shape, like.stride())


@contextlib.contextmanager
def by_addresses():
    """In the interpreter, launches after the first are given addresses alone, as compiled kernels are."""

    def compile_interpreted(self, key, programs, tensors, scalars, constants, warps):
        likes = [program.as_bytes(tensor) for tensor in tensors]
        self.function[(programs,)](*likes, *scalars, *constants)
        aligned = [like is None or like.data_ptr() % 16 == 0 for like in likes]
        likes = [None if like is None else torch.empty_like(like) for like in likes]

        def bind(programs, rest):
            def start(stream, *addresses):
                assert [address is None for address in addresses] == [like is None for like in likes]
                assert [(address or 0) % 16 == 0 for address in addresses] == aligned
                pairs = zip(addresses, likes, strict=True)
                self.function[(programs,)](*[None if like is None else _at(at, like) for at, like in pairs], *rest)

            return start

        self.compiled[key] = bind
        return bind

    saved = program.Kernel.compile, program.INTERPRETED
    program.Kernel.compile, program.INTERPRETED = compile_interpreted, False
    schedule.forget()
    try:
        with mock.patch.dict(program.DEVICES, clear=True):  # which say whether they interpret
            yield
    finally:
        program.Kernel.compile, program.INTERPRETED = saved
        schedule.forget()


def make(recipe, device, *, bias=False, dtype=torch.bfloat16, features=(K, N)):
    """A layer with weights from a fixed seed."""
    torch.manual_seed(0)
    return mf.Linear(*features, bias=bias, dtype=dtype, recipe=recipe).to(device)


def inputs(device, shape=(M, K), out=N, dtype=torch.bfloat16, seed=1):
    """x, which requires a gradient, and dy."""
    torch.manual_seed(seed)
    x = torch.randn(shape, dtype=dtype).to(device).requires_grad_()
    return x, torch.randn((*shape[:-1], out), dtype=dtype).to(device)


def results(layer, steps, *, run=None):
    """Everything that a number of steps leaves behind."""
    kept = []
    for x, dy in steps:
        x.grad = None
        layer.zero_grad()
        y = (run or layer)(x)
        y.backward(dy)
        kept += [y.detach(), x.grad, *[parameter.grad for parameter in layer.parameters()]]
        kept += [buffer.clone() for buffer in layer.buffers()]
    mf.update_scaling(layer)
    return [None if t is None else t.clone() for t in [*kept, *layer.buffers()]]


def assert_same(first, second, what=""):
    """Bit for bit."""
    assert len(first) == len(second)
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        assert (a is None) == (b is None), (what, index)
        if a is not None and b is not None:
            assert a.dtype == b.dtype, (what, index)
            assert a.shape == b.shape, (what, index)
            assert torch.equal(a, b), (what, index)


@contextlib.contextmanager
def block_gemms(device, seen):
    """On the CPU, which has no block-scaled GEMM: one in float32, which keeps what it was given."""
    if device == "cuda":
        yield
        return

    def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
        kinds = F.ScalingType
        assert a_kind == kinds.BlockWise1x128
        seen.append([(t.shape, t.stride(), t.dtype) for t in (a, b, a_scale, b_scale)] + [b_kind, output_dtype])
        left = a.float() * a_scale.repeat_interleave(128, 1)[:, : a.shape[1]]
        if b_kind == kinds.BlockWise128x128:
            spread = b_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
            right = b.float() * spread[: b.shape[0], : b.shape[1]]
        else:
            right = b.float() * b_scale.t().repeat_interleave(128, 0)[: b.shape[0]]
        return (left @ right).to(output_dtype)

    def scaled_mm_v2(a, b, a_scales, a_kinds, a_swizzles, b_scales, b_kinds, b_swizzles, bias, dtype):
        assert bias is None
        assert a_swizzles == b_swizzles == []
        kinds = [F.ScalingType(kind) for kind in (*a_kinds, *b_kinds)]
        return scaled_mm(a, b, *a_scales, kinds[0], *b_scales, kinds[1], output_dtype=dtype)

    def own(a, a_scale, b, b_scale, dtype, tiles):
        left, kind = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        return scaled_mm(a, b, a_scale, left, b_scale, kind if tiles else left, output_dtype=dtype)

    saved = F.scaled_mm, gemms.scaled_mm_v2, gemms.own_block_matmul
    F.scaled_mm, gemms.scaled_mm_v2, gemms.own_block_matmul = scaled_mm, scaled_mm_v2, own
    try:
        yield
    finally:
        F.scaled_mm, gemms.scaled_mm_v2, gemms.own_block_matmul = saved


def compare(device, recipe, steps, *, run=None, guard=contextlib.nullcontext, **options):
    """The same steps by launches and by torch operations, bit for bit, block GEMMs with the same arguments."""
    outcomes, arguments = [], []
    with native_on(device):
        for around in (guard, by_torch):
            seen: list = []
            layer = make(recipe, device, **options)
            torch.manual_seed(5)  # the call seeds of stochastic rounding
            with block_gemms(device, seen), around():
                outcomes.append(results(layer, steps, run=run and run(layer)))
            arguments.append(seen)
    assert_same(*outcomes)
    assert arguments[0] == arguments[1]


def recipe_of(name):
    """The recipe of a name, "mxfp8 dequantized" being one with another backward."""
    name, *backward = name.split()
    options = {"backward": backward[0]} if backward else {}
    if name in ("mxfp8_exact", "nvfp4_folded"):  # a name and its path
        name, options["path"] = name.split("_")
    if name == "mxfp8_hybrid":
        name, options["fp8_format"] = "mxfp8", "HYBRID"
    return RECIPES[name](**options)
