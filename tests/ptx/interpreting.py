"""Triton's interpreter running the hardware forms of the kernels (`HW` = True), their PTX evaluated by `program`.

What the interpreter does otherwise than a GPU, and only the hardware forms notice, is mended on the way: casts to
bfloat16 truncate, a fused multiply-add rounds twice, NaN wins `maximum` and `minimum`, a NaN that x86 makes has a sign,
and a reduction by a function of the kernels goes element by element. Only Triton 3.6 is known well enough for that.
"""

import numpy as np

from tests import interpreter as plain
from tests.kernels.launchers import answer

KNOWN = "3.6."


def why_not():
    """Reason why the hardware forms cannot be interpreted here, or None."""
    try:
        import triton
    except ModuleNotFoundError:
        return "triton is not installed"
    if not triton.__version__.startswith(KNOWN):
        return f"the interpreter of triton {triton.__version__} is another one than that of {KNOWN}x"
    return None


def begin():
    """First thing in a process that interprets hardware forms."""
    plain.begin()
    _evaluate_inline_assembly()
    _compute_as_a_gpu_does()


def choose_hardware():
    """Launchers choose the hardware forms.

    Kernels prefetch the next tile instead of one so far ahead that small matrices have none.
    """
    import triton.language as tl

    from microfloat.kernels.device import tiles

    program = answer()
    program.DEVICES[-1] = program.device_of(-1)._replace(conversions=True)
    tiles.PREFETCH_AHEAD = tl.constexpr(1)


# ----------------------------------------------------------------------------------------------------- inline assembly


def _evaluate_inline_assembly():
    from triton.runtime.interpreter import InterpreterBuilder

    InterpreterBuilder.create_inline_asm = _inline_assembly


class _Results:
    def __init__(self, handles):
        self._handles = handles

    def get_result(self, index):
        return self._handles[index]


def _inline_assembly(self, text, constraints, values, types, is_pure, pack):
    """``tl.inline_asm_elementwise``: `pack` neighbours to a thread, elements below 32 bits packed to words."""
    from triton.runtime.interpreter import TensorHandle, _get_np_dtype

    from tests.ptx.program import assemble

    program = assemble(text, constraints)
    shape = values[0].data.shape
    registers = [register for value in values for register in _to_registers(value.data, pack)]
    outputs, handles = iter(program(registers)), []
    for kind in types:
        dtype = _get_np_dtype(kind)
        taken = [next(outputs) for _ in range(max(1, pack * dtype.itemsize // 4) if dtype.itemsize < 4 else pack)]
        handles.append(TensorHandle(_from_registers(taken, dtype, shape), kind.scalar))
    assert next(outputs, None) is None, "more outputs than results"
    return _Results(handles)


def _to_registers(data, pack):
    """The registers that hold `pack` neighbours of every group; what no element fills holds ones."""
    flat = np.ascontiguousarray(data).reshape(-1)
    assert flat.size % pack == 0 or flat.size == 1, "groups of neighbours"
    groups = np.broadcast_to(flat, (pack,)).reshape(1, pack) if flat.size < pack else flat.reshape(-1, pack)
    if data.itemsize >= 4:
        unsigned = np.uint32 if data.itemsize == 4 else np.uint64
        return [np.ascontiguousarray(groups[:, i]).view(unsigned) for i in range(pack)]
    count = max(1, pack * data.itemsize // 4)
    filled = np.full((len(groups), count * 4), 0xFF, dtype=np.uint8)
    filled[:, : pack * data.itemsize] = np.ascontiguousarray(groups).view(np.uint8).reshape(len(groups), -1)
    words = filled.view(np.uint32)
    return [np.ascontiguousarray(words[:, i]) for i in range(count)]


def _from_registers(registers, dtype, shape):
    """Elements of a result from its registers."""
    stacked = np.ascontiguousarray(np.stack(registers, axis=-1)).view(dtype)
    per_group = len(registers) * max(1, registers[0].itemsize // dtype.itemsize)
    stacked = stacked.reshape(-1, per_group)
    wanted = int(np.prod(shape))
    pack = max(1, wanted // len(stacked))
    return np.ascontiguousarray(stacked[:, :pack]).reshape(-1)[:wanted].reshape(shape)


# ------------------------------------------------------------------------------------------------- arithmetic of a GPU


def _compute_as_a_gpu_does():
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from tests.ptx.instructions import NAN_32, fused, to_bf16

    convert = InterpreterBuilder.cast_impl

    def cast_impl(self, src, dst_type):
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            return TensorHandle(to_bf16(np.ascontiguousarray(src.data)), dst_type.scalar)
        return convert(self, src, dst_type)

    def canonical(result, kind):
        if result.dtype == np.float32:
            nan = np.isnan(result)
            if nan.any():
                result = np.where(nan, NAN_32.view(np.float32), result)
        return TensorHandle(result, kind)

    def arithmetic(operation):
        return lambda self, a, b: canonical(operation(a.data, b.data), a.dtype.scalar)

    def fma(self, x, y, z):
        assert z.data.dtype == np.float32
        return canonical(fused(x.data, y.data, z.data).astype(np.float32), z.dtype.scalar)

    def number(larger):
        pick = np.fmax if larger else np.fmin

        def extremum(a, b):
            result = pick(a, b)
            zeros = (a == 0) & (b == 0)  # of two zeros the maximum is the positive one
            if zeros.any():
                minus = (np.signbit(a) & np.signbit(b)) if larger else (np.signbit(a) | np.signbit(b))
                result = np.where(zeros, np.where(minus, result.dtype.type(-0.0), result.dtype.type(0.0)), result)
            return result

        return arithmetic(extremum)

    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fma = fma
    InterpreterBuilder.create_maxnumf, InterpreterBuilder.create_minnumf = number(True), number(False)
    for name, operation in (
        ("create_fadd", np.add), ("create_fsub", np.subtract), ("create_fmul", np.multiply), ("create_fdiv", np.divide),
        ("create_precise_divf", np.divide), ("create_maximumf", np.maximum), ("create_minimumf", np.minimum),
    ):  # fmt: skip
        setattr(InterpreterBuilder, name, arithmetic(operation))
