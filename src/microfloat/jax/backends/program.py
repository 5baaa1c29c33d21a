"""Passes bound to JAX: casts of a matrix and decoded operands, by kernels that an XLA program starts.

An operand of x_RC is codes and scales, or "values": bfloat16 in the layout of x, which a GEMM reads in any orientation.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from microfloat.formats import ELEMENTS, ScaledFormat
from microfloat.jax.backends.kernels import SCRATCH, Output, call
from microfloat.jax.backends.reference import Decoded, Kind, Matrix, Operand
from microfloat.jax.numerics.scales import tensor_amax
from microfloat.jax.transformations import max_over
from microfloat.kernels.constants import OWN_GEMMS, DecodeCodes
from microfloat.layout import Part
from microfloat.passes import CastInputs, OperandSpec, products
from microfloat.passes import matrix as passes_of
from microfloat.passes.casts import cast_passes
from microfloat.passes.conversions import SCALE, dequantize_passes
from microfloat.passes.matrix import At, Buffer, Device, Pass, Passes

_MOST = 1 << 30  # multiprocessors, of a GPU that XLA alone knows: no pass is cut for them


def _device(capability: tuple[int, int], multiprocessors: int = _MOST) -> Device:
    return Device(0, multiprocessors, capability >= (8, 9), measures=False, orders_scales=False)


def cast_by_kernel(
    x_RC: Array, row: OperandSpec | None, column: OperandSpec | None, inputs: CastInputs, axes: frozenset[str],
    records: bool, capability: tuple[int, int],
) -> tuple[Operand | None, Operand | None, Array | None]:  # fmt: skip
    """The row and the column operand of a matrix, each if it is asked for, and the live amax if it is recorded."""
    rows, columns = x_RC.shape
    matrix = passes_of.Matrix(rows, columns, columns, 1, x_RC.dtype.name, 16, _device(capability))
    passes = cast_passes(matrix, row, column, records=records, given_amax=inputs.amax is not None)
    table = {At.SOURCE: x_RC, At.SCALE_ENC: inputs.scale_enc, At.SEED: inputs.seed, At.AMAX: inputs.amax}
    run = _Run(passes, table, axes, capability)
    results = run.results()

    def operand(spec: OperandSpec | None, at: int) -> Operand | None:
        codes, scale, outer = results[at : at + 3]
        if spec is None or spec.form == "values":
            return spec and Decoded(codes, outer)
        if spec.form == "tiles":
            scale = scale[:, : -(-codes.shape[1] // 128)]
        return Matrix(codes, scale.reshape(1, 1) if scale.ndim == 0 else scale, outer)

    return operand(row, 0), operand(column, 3), run.table.get(At.RECORD)


def decode_by_kernel(matrix: Matrix, fmt: ScaledFormat, length: int, capability: tuple[int, int]) -> Array:
    """Code times block scale in bfloat16 [R, length] of an operand form with E8M0 or E4M3 scales, one per block."""
    rows, strides = matrix.codes.shape[0], (matrix.scale.shape[1], 1)
    passes = dequantize_passes(fmt, rows, length, strides, None, "bfloat16", _device(capability))
    table = {At.SOURCE: matrix.codes, SCALE: matrix.scale}
    return _Run(passes, table, frozenset(), capability).results()[0]


def stored_codes_of(x_dtype: np.dtype, matrix: Matrix, kind: Kind, shape: tuple[int, int, int]) -> DecodeCodes | None:
    """The stored codes of a weight as `multiply_stored` reads them for a product of M, K, N; None where it does not."""
    level = None if matrix.tensor_scale is None else "row" if matrix.tensor_scale.ndim else "tensor"
    if x_dtype not in (jnp.bfloat16, jnp.float16) or kind.format.element.name not in ELEMENTS:
        return None
    codes = products.stored_codes(kind.format, kind.hadamard, level, shape[1])
    return codes if codes is not None and products.fits(codes, shape) else None


def multiply_stored(
    x_MK: Array, matrix: Matrix, codes: DecodeCodes, bias: Array | None, out: np.dtype, capability: tuple[int, int]
) -> Array:
    """``x @ w.T + bias`` [M, N] in `out`, a few rows by a weight whose codes are decoded in registers."""
    shape = x_MK.shape[0], x_MK.shape[1], matrix.codes.shape[0]
    scale, level = matrix.scale, matrix.tensor_scale
    dtypes = x_MK.dtype.name, jnp.dtype(out).name, None if bias is None else bias.dtype.name
    strides = (scale.shape[1], 1) if scale.size > 1 else (0, 0)
    stride = int(level is not None and level.ndim > 0)
    device = _device(capability, getattr(jax.devices()[0], "core_count", _MOST))
    passes = products.decode_passes(codes, shape, dtypes, strides, stride, device)
    table = {At.SOURCE: x_MK, products.CODES: matrix.codes, products.SCALE: scale}
    table |= {products.LEVEL: level, products.BIAS: bias}
    return _Run(passes, table, frozenset(), capability).results()[0]


def multiply_fp8(
    a: Matrix, b: Matrix, scales: str, out: np.dtype, capability: tuple[int, int], *, fast: bool = False,
    is_turned: bool = False,
) -> Array:  # fmt: skip
    """``a @ b.T`` [M, N] in `out`, or its transpose [N, M], by `kernels.gemm.block_gemm`; `scales`: "lines", "tiles" or
    "rows" of b."""
    from triton.experimental.gluon import language as gl

    from microfloat.kernels.gemm import block_gemm as kernels

    (m, k), n = a.codes.shape, b.codes.shape[0]
    cut, processors = OWN_GEMMS[scales != "lines"], getattr(jax.devices()[0], "core_count", _MOST)
    height, width = cut.tile
    types = {jnp.dtype(jnp.float8_e4m3fn): gl.float8e4nv, jnp.dtype(jnp.float8_e5m2): gl.float8e5}
    a_scale = a.scale if scales == "rows" else a.scale.T
    b_scale = b.scale.T if scales == "lines" else b.scale
    kind = {"lines": kernels.LINES, "tiles": kernels.TILES, "rows": kernels.ROWS}[scales].value
    arguments = {
        "a_ptr": a.codes, "b_ptr": b.codes, "a_scale_ptr": a_scale, "b_scale_ptr": b_scale,
        "c_ptr": Output((n, m) if is_turned else (m, n), out), "scratch_ptr": SCRATCH,
        "scale_stride": b.scale.shape[1], "M": m, "N": n, "K": k, "A_TYPE": types[a.codes.dtype],
        "B_TYPE": types[b.codes.dtype], "WARPGROUPS": cut.warpgroups, "PARTS": cut.parts, "STAGES": cut.stages,
        "GROUP": cut.group, "SCALES": kind, "FAST": fast, "REGISTERS": cut.registers,
        "KIND": (kernels.TURNED if is_turned else kernels.ALONE).value,
    }  # fmt: skip
    programs = min(processors, -(-m // height) * -(-n // width))
    return call(kernels.block_gemm_of_pointers, programs, capability, arguments, (4, None))["c_ptr"]


class _Run:
    """Passes that start one after the other; `table` holds their inputs by position, and later their records."""

    def __init__(self, passes: Passes, table: dict, axes: frozenset[str], capability: tuple[int, int]) -> None:
        self.table, self._given = table, frozenset(table)
        self._passes, self._axes, self._capability = passes, axes, capability
        self._made: dict[tuple[int, int], Array] = {}  # by buffer and offset, as they lie in memory
        for launch in passes.launches:
            self._start(launch)

    def results(self) -> list[Any]:
        """The results of the passes, each seen as its layout says."""
        found: list[Any] = []
        layouts = self._passes.layouts
        for at, part in enumerate(layouts):
            made = self._made.get((at, 0))
            found.append(made if made is None or part is None or _in_rows(part) else made.T)
        for at, original in self._passes.shared:
            made = found[original]
            found[at] = made if layouts[at] == layouts[original] else made.T
        return found

    def _start(self, launch: Pass) -> None:
        waits = launch.cooperative or launch.dependent
        assert not waits, "XLA starts kernels in no such way, so the device of these passes has none"
        names = launch.kernel.arg_names
        arguments: dict[str, Any] = {}
        written: dict[str, tuple[int, int] | None] = {}
        for name, at in zip(names, launch.tensors, strict=False):
            arguments[name] = value = self._argument(at)
            if isinstance(value, Output):
                written[name] = self._key(at)
        arguments |= zip(names[len(launch.tensors) :], (*launch.scalars, *launch.constants), strict=True)
        done = call(launch.kernel, launch.programs, self._capability, arguments, launch.warps)
        for name, key in written.items():
            if key is None:
                if launch.tensors[names.index(name)] == At.RECORD:
                    self.table[At.RECORD] = done[name]
                continue
            buffer = self._passes.buffers[key[0]]
            assert buffer is not None
            self._made.setdefault(key, max_over(done[name], self._axes) if buffer.spans_mesh else done[name])

    def _key(self, at: int) -> tuple[int, int] | None:
        """The buffer and the offset that a position names; None for positions up to MADE."""
        if at < 0:
            return self._passes.slices[~at][:2]
        return (at - At.MADE, 0) if at >= At.MADE else None

    def _argument(self, at: int) -> Array | Output | None:
        """The argument of a launch at a position: an input, or an Output that it writes."""
        if at == At.NOTHING:
            return None
        if at == At.WORDS:  # int64 words with which the programs of a launch synchronise, zero when it starts
            return Output((16,), jnp.uint32, zeroed=True, pointer="*i64")
        if at in (At.FOLDED, At.TILES):  # counts of changed elements, two of int64, which nobody reads here
            return Output((4,), jnp.uint32, pointer="*i64")
        if at == At.RECORD and at not in self._given:
            return Output((), jnp.float32, zeroed=True)
        if at == At.AMAX and self.table[At.AMAX] is None:
            self.table[At.AMAX] = max_over(tensor_amax(self.table[At.SOURCE]), self._axes)
        key = self._key(at)
        if key is None:
            return self.table[at]
        if key in self._made:
            return self._made[key]
        buffer = self._passes.buffers[key[0]]
        assert buffer is not None
        if at < 0:
            part = self._passes.slices[~at]
            if (part.buffer, 0) in self._made and part.dtype is None:
                return self._made[part.buffer, 0][part.offset : part.offset + part.length]
            pointer = "*i32" if part.dtype == "int32" else ""
            return Output((part.length,), jnp.dtype(buffer.dtype), buffer.cleared, pointer)
        shape = buffer.shape if _in_rows(buffer) else buffer.shape[::-1]
        return Output(shape, jnp.dtype(buffer.dtype), buffer.cleared)


def _in_rows(part: Part | Buffer) -> bool:
    """True for a part stored row by row, False for one that is the transpose of its memory."""
    return part.strides == ((*part.shape[1:], 1) if part.shape else ())
