"""`quantize` and `dequantize` of NumPy arrays, by compiled kernels where there is one and by the oracle elsewhere."""

import functools
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from microfloat import reference
from microfloat.arguments import check_int
from microfloat.errors import install_hint, invalid_type
from microfloat.formats import E4M3, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat, decode
from microfloat.recipes import Cast, Current, as_cast
from microfloat.recipes.usages import CastLike, Usage, usages_of
from microfloat.reference import Quantized, unpack_fp4, unpack_fp6
from microfloat.reference._operand import as_float_array, operand_form
from microfloat.reference._quantize import Seed, check_quantized, checked_scales, in_shape
from microfloat.reference._scales import encode_factor, tensor_level
from microfloat.reference._values import scale_grid
from microfloat.scale_rules import KINDS, e8m0_threshold, unknown_kind
from microfloat.support import Support

_BAND = 1 << 21  # elements that one call of a kernel casts
_F32 = np.float32
# The dtypes of values that kernels read, and the words by which they tell them apart.
_WORDS = {np.dtype(_F32): np.dtype(_F32), np.dtype(ml_dtypes.bfloat16): np.dtype(np.uint16),
          np.dtype(np.float16): np.dtype(np.int16)}  # fmt: skip


def support(cast: CastLike) -> Support:
    """The Support of a cast: `accelerated` by the compiled kernels or computed by the oracle, with the reason."""
    resolved = as_cast(cast)
    reason = _refusal(resolved)
    if resolved.rule.kind not in KINDS:
        return Support(False, False, str(reason))
    return Support(True, reason is None, f"NumPy oracle: {reason}" if reason else "compiled kernels (numba)")


def quantize(
    x: np.ndarray, cast: Any, *, axis: int | tuple[int, int] = -1, seed: Seed = None, stream: Any = 0, amax: Any = None,
    scale_enc: Any = None, threads: int | None = None,
) -> Any:  # fmt: skip
    """A Quantized, or a pair of them, with the bytes of `microfloat.reference.quantize`; its arguments are these.

    `threads`: cores to use at most; None is all that the process may run on. `support` says which casts are compiled.
    """
    workers = _workers(threads)
    array = as_float_array(x)
    made = [
        _quantized(array, usage, seed, workers) for usage in usages_of(cast, axis, array.ndim, stream, amax, scale_enc)
    ]
    return made[0] if len(made) == 1 else (made[0], made[1])


def dequantize(q: Quantized, dtype: Any = np.float32, *, threads: int | None = None) -> np.ndarray:
    """The array that `q` stands for: the values of `microfloat.reference.dequantize`, rounded once to `dtype`."""
    check_quantized("q", q)
    target = _float_dtype(dtype)
    if q.hadamard is not None:
        return reference.dequantize(q).astype(target, copy=False)
    out = np.empty((q.rows, q.length), target)
    codes = q.codes.reshape(q.rows, q.codes.shape[-1])
    decode_into(Matrix(codes, q.length, q.format, scale_grid(q), q.tensor_scale), out, threads)
    transposed = len(q.shape) == 2 and q.axis == 0
    return np.ascontiguousarray(out.T) if transposed else out.reshape(q.shape)


def _float_dtype(dtype: Any) -> np.dtype:
    """A dtype of values; integers, whose values would be cut off, and codes of 8 bits are refused."""
    try:
        named = np.dtype(dtype)
    except TypeError:
        named = None
    if named is None or named not in (*_WORDS, np.dtype(np.float64)):
        raise invalid_type("dtype", dtype, "float32, bfloat16 (ml_dtypes), float16 or float64")
    return named


# ---- what is compiled --------------------------------------------------------------------------------------------


@functools.cache
def _kernels() -> ModuleType | str:
    """The module of the kernels, or why there is none."""
    try:
        from numba.core import config

        from microfloat.cpu import _kernels
    except ImportError as error:
        return f"numba cannot be imported ({error}); install it with: {install_hint('cpu')}"
    return "numba compiles nothing under NUMBA_DISABLE_JIT" if getattr(config, "DISABLE_JIT", 0) else _kernels


def _refusal(cast: Cast) -> str | None:
    """The reason why no kernel computes a cast, or None."""
    if cast.rule.kind not in KINDS:
        return f"neither kernels nor oracle compute {unknown_kind(cast.rule)}"
    if cast.is_stochastic:
        return "there is no kernel for stochastic rounding"
    if cast.hadamard is not None:
        return "there is no kernel for the Hadamard transform"
    rows, columns = cast.format.block
    if (columns or 0) % 16:
        return f"the kernels have blocks of multiples of 16 columns, not of {columns}"
    if columns is None and (rows not in (1, None) or cast.format.scale is not SCALE_FP32):
        return "the kernels give a whole row or tensor one float32 scale, and several rows or bytes none"
    kernels = _kernels()
    return kernels if isinstance(kernels, str) else None


@functools.cache
def _codec(element: ElementFormat) -> Any:
    """The numbers of an element, as the kernels take them."""
    from microfloat.cpu._kernels import Codec

    def bits(value: float) -> int:
        return int(_F32(value).view(np.int32))

    shift = 23 - element.mantissa_bits
    return Codec(*map(np.int32, (
        bits(element.max), bits(element.min_normal), shift << 23, shift, 32 - element.bits, element.sign_code,
        element.nan_code, bits(element.max) if element.has_nan else bits(np.inf),
        bits(2 * 2.0**element.emax) if element.has_inf else -1,
    )))  # fmt: skip


@functools.cache
def _rule(cast: Cast) -> tuple[Any, Any]:
    """The blocks of a cast and the numbers of its rule, as the kernels take them."""
    from microfloat.cpu import _kernels as kernels

    rule, element = cast.rule, cast.format.element
    two = rule.two_level
    if two is not None:
        kind = kernels.DIVIDING if two.inverse_six is None else kernels.INVERSE_SIX
        kind = kind if two.four_over_six is None else kernels.FOUR_OVER_SIX
    else:
        kind = kernels.RATIO if rule.thresholds is None else kernels.E8M0
    threshold = 0 if rule.thresholds is None else e8m0_threshold(rule, element)
    rows, columns = cast.format.block
    grid = kernels.Grid(
        rows or 1, columns or 0, kind, element.emax, threshold, int(rule.power_of_two),
        int(two is not None and two.four_over_six == "mse"),
    )  # fmt: skip
    epsilon = cast.scaling.amax_epsilon if isinstance(cast.scaling, Current) else 0.0
    levels = (two.inverse_six or 0, two.smallest_scale, two.largest_scale, two.capacity) if two else (0, 0, 0, 0)
    largest = _F32(element.max)
    return grid, kernels.Constants(*map(_F32, (largest, np.ldexp(largest, -126), epsilon, *levels)))


# ---- quantize ----------------------------------------------------------------------------------------------------


def _quantized(array: np.ndarray, usage: Usage, seed: Seed, workers: int) -> Quantized:
    """One usage of an array."""
    cast, axis = usage.cast, usage.axis
    if _refusal(cast) is not None or not array.size:
        return reference.quantize(
            array, cast, axis=axis, seed=seed, stream=usage.stream, amax=usage.amax, scale_enc=usage.scale_enc
        )
    x_RC = operand_form(array, axis)
    amax, scale_enc = checked_scales(usage, x_RC.shape[0])
    fmt, two = cast.format, cast.rule.two_level
    packed = fmt.element.codes_per_byte
    codes = np.empty((x_RC.shape[0], -(-x_RC.shape[1] // packed)), np.uint8)
    bands = _Bands(x_RC, fmt.block[0] or 1, workers)
    with np.errstate(all="ignore"):
        if two is not None:
            needs_amax = two.tensor_scale and amax is None
            per_row = fmt.tensor_scale == "row"
            found = bands.amaxes(per_row) if needs_amax else np.ones((), _F32) if amax is None else amax
            level = tensor_level(found, two)
            levels = np.stack(
                [level.amax, level.encode * np.ones_like(level.amax), level.stored * np.ones_like(level.amax)], -1
            )
            stored = bands.cast_blocks(cast, levels.reshape(-1, 3), codes)
            return in_shape(codes, stored, level.stored if two.tensor_scale else None, cast, axis, array.shape)
        if fmt.block[1] is not None:
            stored = bands.cast_blocks(cast, np.zeros((1, 3), _F32), codes)
        else:
            if scale_enc is not None:
                factor = np.full((1, 1), scale_enc, _F32)
            else:
                found = bands.amaxes(fmt.block[0] is not None) if amax is None else amax
                factor = encode_factor(found.reshape(-1, 1), cast)
            bands.cast_rows(cast, factor, codes)
            stored = _F32(1) / factor
    return in_shape(codes, stored, None, cast, axis, array.shape)


class _Bands:
    """The operand form of an array, cut into rows of about _BAND elements that threads work on."""

    def __init__(self, x_RC: np.ndarray, block_rows: int, workers: int) -> None:
        self.x_RC, self.block_rows, self.workers = x_RC, block_rows, workers
        rows, columns = x_RC.shape
        height = max(_BAND // max(columns, 1) // block_rows, 1) * block_rows
        self.bands = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
        self.kernels: Any = _kernels()

    def call(self, kernel: Callable, arguments: Callable[[slice], tuple[Any, ...]]) -> None:
        """Call a kernel for every band of values, with the further arguments of the band."""
        words = _WORDS.get(self.x_RC.dtype, np.dtype(_F32))
        ready = self.kernels.compiled(kernel, words)

        def work(band: slice) -> None:
            part = np.ascontiguousarray(self.x_RC[band])
            values = part if part.dtype in _WORDS else part.astype(_F32)
            ready(values.view(words), *arguments(band))

        _spread(work, self.bands, self.workers)

    def amaxes(self, per_row: bool) -> np.ndarray:
        """The amax of the tensor, or [R, 1] of its rows; NaN is ignored."""
        out = np.empty(self.x_RC.shape[0], np.int32)
        self.call(self.kernels.row_amax, lambda band: (out[band],))
        return out.view(_F32).reshape(-1, 1) if per_row else out.max().view(_F32).reshape(())

    def cast_rows(self, cast: Cast, factor: np.ndarray, codes: np.ndarray) -> None:
        """Fill `codes`; `factor` is [1, 1] or [R, 1]."""
        element, packed, factors = _codec(cast.format.element), cast.format.element.codes_per_byte - 1, factor.ravel()
        of_rows = (lambda band: factors[band]) if factors.size > 1 else (lambda band: factors)
        self.call(self.kernels.cast_rows, lambda band: (element, of_rows(band), codes[band], packed))

    def cast_blocks(self, cast: Cast, levels: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Fill `codes` and return the grid of stored scales; `levels` is [1, 3] or [R, 3]."""
        grid, rule = _rule(cast)
        element, packed = _codec(cast.format.element), cast.format.element.codes_per_byte - 1
        rows, columns = self.x_RC.shape
        stored = np.empty((-(-rows // grid.rows), -(-columns // grid.columns)), cast.format.scale.dtype)
        bytes_, floats = np.empty((0, 0), np.uint8), np.empty((0, 0), _F32)

        def arguments(band: slice) -> tuple[Any, ...]:
            part = stored[band.start // grid.rows : -(-band.stop // grid.rows)]
            scales = (part, floats) if stored.dtype == np.uint8 else (bytes_, part)
            target = self.kernels.Target(codes[band], packed, *scales)
            return grid, rule, element, _codec(E4M3), levels[band] if len(levels) > 1 else levels, target

        self.call(self.kernels.cast_blocks, arguments)
        return stored


# ---- dequantize --------------------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    """A matrix [R, C] as it is stored: ``value = dec(code) * (scale * inner) * outer``, every product rounded.

    * `codes`: [R, bytes], FP4 packed, FP6 packed or a byte each. `length`: C. `format`: element, scale and block.
    * `scale`: [G, H] of the blocks, bytes or float32. `inner`: float32, () or [R, 1], or None.
    * `outer`: likewise. With `divides` the value is divided by it.
    """

    codes: np.ndarray
    length: int
    format: ScaledFormat
    scale: np.ndarray
    inner: np.ndarray | None = None
    outer: np.ndarray | None = None
    divides: bool = False


@functools.cache
def _scale_table(name: str) -> np.ndarray:
    """The float32 value of every byte of E8M0 or E4M3 scales."""
    if name != SCALE_E8M0.name:
        return decode(np.arange(256), E4M3)
    return np.append(np.ldexp(_F32(1), np.arange(255) - 127), np.nan).astype(_F32)


def scale_values(scale: np.ndarray, fmt: ScaledFormat) -> np.ndarray:
    """Stored scales as float32."""
    return scale if fmt.scale.bits == 32 else _scale_table(fmt.scale.name)[scale]


def scale_in_place(values_RC: np.ndarray, scale_GH: np.ndarray, block: tuple[int | None, int | None]) -> None:
    """Multiply every block of `values_RC` by its scale; blocks at the edges are short."""
    (rows, length), (block_rows, block_cols) = values_RC.shape, block
    if block_cols is None:
        values_RC *= scale_GH
    elif block_rows == 1:
        whole = length // block_cols
        blocks = values_RC[:, : whole * block_cols].reshape(rows, whole, block_cols)
        blocks *= scale_GH[:, :whole, None]
        if length % block_cols:
            values_RC[:, whole * block_cols :] *= scale_GH[:, whole:]
    else:
        assert block_rows is not None
        for index, scale_H in enumerate(scale_GH):
            values_RC[index * block_rows : (index + 1) * block_rows] *= np.repeat(scale_H, block_cols)[:length]


def decode_into(matrix: Matrix, out: np.ndarray, threads: int | None = None) -> None:
    """Put the values of a stored matrix into `out` [R, C], each rounded to float32 and from there to its dtype."""
    rows, columns = out.shape
    fmt, element = matrix.format, matrix.format.element
    kernels = "blocks of such widths have no kernel" if (fmt.block[1] or 0) % 16 else _kernels()
    bits = 8 if element.bits == 6 and matrix.codes.shape[1] == columns else element.bits
    tile = (fmt.block[0] or rows or 1, fmt.block[1] or columns or 1)
    outer = np.ones((1, 1), _F32) if matrix.outer is None else np.array(matrix.outer, _F32).reshape(-1, 1)

    def work(band: slice) -> None:
        tiles = slice(None) if fmt.block[0] is None else slice(band.start // tile[0], -(-band.stop // tile[0]))
        scales = scale_values(matrix.scale[tiles], fmt)
        if matrix.inner is not None:
            scales = scales * (matrix.inner[band] if matrix.inner.size > 1 else matrix.inner)
        codes, target, level = matrix.codes[band], out[band], outer[band] if len(outer) > 1 else outer
        with np.errstate(all="ignore"):
            if isinstance(kernels, str):
                values = decode(_unpacked(codes, bits, columns), element)
                scale_in_place(values, scales, fmt.block)
                target[...] = (np.divide if matrix.divides else np.multiply)(values, level, values)
                return
            direct = target if out.dtype in (_F32, ml_dtypes.bfloat16) else np.empty(target.shape, _F32)
            words = _WORDS[direct.dtype]
            kernels.compiled(kernels.decode, words)(
                np.ascontiguousarray(codes), bits, _codec(element), np.array(scales, _F32, order="C"),
                kernels.Tile(*tile, int(matrix.divides)), level.ravel(), direct.view(words),
            )  # fmt: skip
            if direct is not target:
                target[...] = direct

    step = fmt.block[0] or 1
    height = max(_BAND // max(columns, 1) // step, 1) * step
    _spread(work, [slice(start, min(start + height, rows)) for start in range(0, rows, height)], _workers(threads))


def _unpacked(codes: np.ndarray, bits: int, length: int) -> np.ndarray:
    """Codes, one in each byte."""
    return {4: unpack_fp4, 6: unpack_fp6}.get(bits, lambda data, _: data)(codes, length)


def energies(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Sums of x * x and of (y - x) * (y - x) over the finite elements of x [R, C]; y is float32."""
    kernels, sums = _kernels(), np.zeros((len(x), 2))
    if not isinstance(kernels, str):
        bands = _Bands(x, 1, _workers(None))
        bands.call(kernels.energies, lambda band: (np.ascontiguousarray(y[band]), sums[band]))
        signal, noise = (float(total) for total in sums.sum(0))
        # They square in float32: large numbers to infinity, errors below 2^-63 (2^-24 of 2^-39) to subnormals or zero.
        if x.size * 2.0**-78 < signal < np.inf and noise < np.inf:
            return signal, noise
    with np.errstate(all="ignore"):
        x_32 = x.astype(_F32)
        finite = np.isfinite(x_32)
        x_32, error = x_32[finite], y[finite] - x_32[finite]
        return float(np.square(x_32, dtype=np.float64).sum()), float(np.square(error, dtype=np.float64).sum())


# ---- threads -----------------------------------------------------------------------------------------------------


def _workers(threads: int | None) -> int:
    """Number of threads that may work at a time."""
    if threads is not None:
        return check_int("threads", threads, 1, 1 << 16)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spread(work: Callable[[slice], None], bands: Iterable[slice], workers: int) -> None:
    """Do `work` for every band, several at a time, in this thread and others; kernels let go of the interpreter."""
    left = deque(bands)

    def drain() -> None:
        while left:
            try:
                band = left.popleft()
            except IndexError:  # another thread took it
                return
            work(band)

    helpers = [_pool(os.getpid()).submit(drain) for _ in range(min(workers, len(left)) - 1)]
    try:
        drain()
    finally:
        for helper in helpers:  # one that has not begun, as other calls keep the threads busy, has nothing left to do
            if not helper.cancel():
                helper.result()


@functools.cache
def _pool(_process: int) -> ThreadPoolExecutor:
    """Threads that stay, as starting one for every call is a twentieth of a cast; a forked process has its own."""
    return ThreadPoolExecutor(os.cpu_count() or 1, "microfloat.cpu")
