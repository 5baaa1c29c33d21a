"""Casts by kernels as JAX starts them: on a GPU inside a program, elsewhere interpreted in place of XLA's call."""

import inspect
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import torch
import triton.language as tl

from microfloat import reference as oracle
from microfloat.jax.backends import casts, kernels, program
from microfloat.passes import CastInputs, OperandSpec
from microfloat.recipes import Delayed
from tests.kernels.cases import SEED, make_cast, matrix

POINTERS = {
    "*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32, "*i32": torch.int32, "*u32": torch.uint32,
    "*i64": torch.int64, "*u8": torch.uint8,
}  # fmt: skip


class _Interpreted:
    """An interpreted kernel with the attributes of a compiled one that `kernels.call` reads."""

    def __init__(self, kernel):
        self.kernel, self.arg_names, self.__name__ = kernel, tuple(kernel.arg_names), kernel.__name__
        declared = inspect.signature(kernel.fn).parameters.values()
        self.params = [
            SimpleNamespace(is_constexpr=one.annotation is tl.constexpr, do_not_specialize=False) for one in declared
        ]


def _memory(array, pointer):
    return torch.frombuffer(bytearray(array.tobytes()), dtype=POINTERS[pointer])


def _start(kernel, programs, signature, operands, shapes):
    """The arrays that an interpreted kernel writes, from the parameters that jaxlib would be given."""
    inputs = iter(operands)
    made = iter([np.full(one.size * one.dtype.itemsize, 0xA5, np.uint8) for one in shapes])
    arguments, outputs = [], []
    for name, part in zip(kernel.arg_names, signature, strict=True):
        if part.kind == "in":
            arguments.append(_memory(np.asarray(next(inputs)), part.type))
        elif part.kind == "out":
            memory = next(made)
            assert memory.size, f"{kernel.__name__} writes to {name}, which is given no memory"
            memory[: part.value] = 0
            outputs.append(_memory(memory, part.type))
            arguments.append(outputs[-1])
        else:
            arguments.append(part.value)
    kernel.kernel[(programs,)](*arguments)
    written = (memory.view(torch.uint8).numpy().tobytes() for memory in outputs)
    arrays = zip(written, shapes, strict=True)
    return [jnp.asarray(np.frombuffer(one, shape.dtype).reshape(shape.shape)) for one, shape in arrays]


def _interpreted(x, row, column, inputs, records):
    """Both operands by the kernels of JAX's passes."""
    started = []

    def message_to(kernel, programs, capability, signature, warps):
        started.append((kernel, programs, signature))
        return b"", 0

    def ffi_call(target, shapes):
        return lambda *operands, **_: _start(*started[-1], operands, shapes)

    def call(kernel, *arguments):
        return kernels.call(_Interpreted(kernel), *arguments)

    with (
        mock.patch.object(kernels, "message_to", message_to), mock.patch.object(jax.ffi, "ffi_call", ffi_call),
        mock.patch.object(program, "call", call),
    ):  # fmt: skip
        return program.cast_by_kernel(x, row, column, inputs, frozenset(), records, (8, 0))


def _compiled(x, row, column, inputs, records):
    given = casts.CastInputs(inputs.seed, scale_enc=inputs.scale_enc)
    cast = jax.jit(lambda x, given: casts.cast_both(x, row, column, given, records=records))
    with mock.patch.object(kernels, "SMALLEST", 1):
        assert "triton_kernel_call" in cast.lower(x, given).as_text()
        return cast(x, given)


def check(device, name, forms, options, shape, kind):
    """The forms of the row and the column operand against the oracle, and the amax that delayed scaling records."""
    cast, is_delayed = make_cast(name, options), dict(options).get("scaling") == Delayed()
    x = matrix(shape, "bfloat16", **kind)
    words = jnp.asarray([SEED & 0xFFFFFFFF, SEED >> 32], jnp.uint32) if cast.is_stochastic else None
    inputs = CastInputs(jnp.float32(3) if is_delayed else None, words)
    row, column = (OperandSpec(cast, form, stream=2 + side) for side, form in enumerate(forms))
    run = _compiled if device == "cuda" else _interpreted
    *both, amax = run(jnp.asarray(x.float().numpy(), jnp.bfloat16), row, column, inputs, is_delayed)
    known = {"scale_enc": np.float32(3)} if is_delayed else {}
    for got, axis, form, stream in zip(both, (-1, -2), forms, (2, 3), strict=True):
        want = oracle.quantize(x.float().numpy(), cast, axis=axis, seed=SEED, stream=stream, **known)
        if form != "codes":
            want, _ = oracle.fold(want, (1, 128) if form == "folded" else (128, 128))
            assert got.scale.shape == want.scale.shape
            assert got.tensor_scale is None
        for part in ("codes", "scale", "tensor_scale"):
            ours, theirs = getattr(got, part), getattr(want, part)
            assert (ours is None) == (theirs is None), part
            if theirs is not None:
                ours, theirs = (np.ascontiguousarray(one).reshape(-1).view(np.uint8) for one in (ours, theirs))
                wrong = np.flatnonzero(ours != theirs)
                assert not wrong.size, f"{name} {form} axis {axis}: {wrong.size} bytes of {part} differ"
    if is_delayed:
        assert amax == x.float().abs().max().item()
