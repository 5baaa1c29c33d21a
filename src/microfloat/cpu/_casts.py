"""`quantize` and `dequantize` of NumPy arrays, by compiled kernels where there is one and by the oracle elsewhere."""

import functools
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np

from microfloat import reference
from microfloat.arguments import check_int
from microfloat.formats import E4M3, SCALE_E8M0, ElementFormat, decode
from microfloat.recipes import Cast, Current, as_cast
from microfloat.recipes.core import CastLike, Usage, usages_of
from microfloat.reference import Quantized
from microfloat.reference._operand import as_float_array, operand_form
from microfloat.reference._quantize import Seed, check_quantized, checked_scales, in_shape
from microfloat.reference._scales import encode_factor, tensor_level
from microfloat.reference._values import scale_grid
from microfloat.scale_rules import KINDS, e8m0_threshold, unknown_kind
from microfloat.support import Support

_BAND = 1 << 20  # elements that one call of a kernel casts
_F32 = np.float32
_SOURCES = {np.dtype(dtype): number for number, dtype in enumerate((np.float32, ml_dtypes.bfloat16, np.float16))}


def support(cast: CastLike) -> Support:
    """Where a cast is computed: `accelerated` by the compiled kernels, or by the oracle, and why."""
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
    workers, kernels = _workers(threads), _kernels()
    check_quantized("q", q)
    wanted = np.dtype(dtype)
    if isinstance(kernels, str) or q.hadamard is not None or not q.codes.size:
        return reference.dequantize(q).astype(wanted, copy=False)
    return _dequantized(q, wanted, workers, kernels)


# ---- what is compiled --------------------------------------------------------------------------------------------


@functools.cache
def _kernels() -> ModuleType | str:
    """The module of the kernels, or why there is none."""
    try:
        from numba.core import config

        from microfloat.cpu import _kernels
    except ImportError as error:
        return f'numba cannot be imported ({error}); install it with: pip install "microfloat[cpu]"'
    return "numba compiles nothing under NUMBA_DISABLE_JIT" if getattr(config, "DISABLE_JIT", 0) else _kernels


def _refusal(cast: Cast) -> str | None:
    """Why no kernel computes a cast."""
    if cast.rule.kind not in KINDS:
        return f"neither kernels nor oracle compute {unknown_kind(cast.rule)}"
    if cast.is_stochastic:
        return "there is no kernel for stochastic rounding"
    if cast.hadamard is not None:
        return "there is no kernel for the Hadamard transform"
    if (cast.format.block[1] or 0) % 16:
        return f"the kernels have blocks of multiples of 16 columns, not of {cast.format.block[1]}"
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
        element.nan_code,
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
        height = max(_BAND // columns // block_rows, 1) * block_rows
        self.bands = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
        self.kernels: Any = _kernels()

    def run(self, work: Callable[[slice], None]) -> None:
        """Do `work` for every band."""
        _spread(work, self.bands, self.workers)

    def source(self, band: slice) -> tuple[Any, ...]:
        """A band as the kernels take it: float32, or words of 16 bits, which of them, and the columns."""
        part = np.ascontiguousarray(self.x_RC[band])
        if part.dtype not in _SOURCES:
            part = part.astype(_F32)
        number = _SOURCES[part.dtype]
        nothing = np.empty((0, 0), np.uint16 if number == 0 else _F32)
        pair = (part, nothing) if number == 0 else (nothing, part.view(np.uint16))
        return *pair, number, self.x_RC.shape[1]

    def amaxes(self, per_row: bool) -> np.ndarray:
        """The amax of the tensor, or [R, 1] of its rows; NaN is ignored."""
        out, kernel = np.empty(self.x_RC.shape[0], np.int32), self.kernels.compiled(self.kernels.row_amax)
        self.run(lambda band: kernel(*self.source(band), out[band]))
        return out.view(_F32).reshape(-1, 1) if per_row else out.max().view(_F32).reshape(())

    def cast_rows(self, cast: Cast, factor: np.ndarray, codes: np.ndarray) -> None:
        """Fill `codes`; `factor` is [1, 1] or [R, 1]."""
        kernel, factors = self.kernels.compiled(self.kernels.cast_rows), factor.ravel()
        element, packed = _codec(cast.format.element), cast.format.element.codes_per_byte - 1
        of_rows = (lambda band: factors[band]) if factors.size > 1 else (lambda band: factors)
        self.run(lambda band: kernel(*self.source(band), element, of_rows(band), codes[band], packed))

    def cast_blocks(self, cast: Cast, levels: np.ndarray, codes: np.ndarray) -> np.ndarray:
        """Fill `codes` and return the grid of stored scales; `levels` is [1, 3] or [R, 3]."""
        kernel, (grid, rule) = self.kernels.compiled(self.kernels.cast_blocks), _rule(cast)
        element, packed = _codec(cast.format.element), cast.format.element.codes_per_byte - 1
        rows, columns = self.x_RC.shape
        stored = np.empty((-(-rows // grid.rows), -(-columns // grid.columns)), cast.format.scale.dtype)
        bytes_, floats = np.empty((0, 0), np.uint8), np.empty((0, 0), _F32)

        def work(band: slice) -> None:
            part = stored[band.start // grid.rows : -(-band.stop // grid.rows)]
            scales = (part, floats) if stored.dtype == np.uint8 else (bytes_, part)
            kernel(
                *self.source(band), grid, rule, element, _codec(E4M3), levels[band] if len(levels) > 1 else levels,
                codes[band], packed, *scales,
            )  # fmt: skip

        self.run(work)
        return stored


# ---- dequantize --------------------------------------------------------------------------------------------------


@functools.cache
def _scale_values(name: str) -> np.ndarray:
    """The float32 value of every byte of E8M0 or E4M3 scales."""
    bytes_ = np.arange(256)
    if name != SCALE_E8M0.name:
        return decode(bytes_, E4M3)
    return np.where(bytes_ == 255, _F32(np.nan), np.ldexp(_F32(1), np.minimum(bytes_, 254) - 127).astype(_F32))


def _dequantized(q: Quantized, wanted: np.dtype, workers: int, kernels: Any) -> np.ndarray:
    rows, columns = q.rows, q.length
    codes, grid = np.ascontiguousarray(q.codes.reshape(rows, q.codes.shape[-1])), scale_grid(q)
    table = np.zeros(256, _F32)
    values = decode(np.arange(1 << q.format.element.bits), q.format.element)
    table[: values.size] = values
    block_rows, width = (size or extent for size, extent in zip(q.format.block, (rows, columns), strict=True))
    narrow = wanted == ml_dtypes.bfloat16
    out = np.empty((rows, columns), wanted)
    kernel, nothing = kernels.compiled(kernels.decode), (np.empty((0, 0), _F32), np.empty((0, 0), np.uint16))
    height = rows if block_rows == rows else max(_BAND // columns // block_rows, 1) * block_rows

    def work(band: slice) -> None:
        scales = grid[band.start // block_rows : -(-band.stop // block_rows)]
        if grid.dtype == np.uint8:
            scales = _scale_values(q.format.scale.name)[scales]
        if q.tensor_scale is not None:
            scales = scales * (q.tensor_scale[band] if q.tensor_scale.size > 1 else q.tensor_scale)
        scales = np.array(scales, _F32, order="C")  # a mapped file's may be read-only, or lie at any address
        direct = (
            out[band] if wanted == _F32 else nothing[0] if narrow else np.empty((band.stop - band.start, columns), _F32)
        )
        words = out[band].view(np.uint16) if narrow else nothing[1]
        kernel(
            codes[band], q.format.element.codes_per_byte - 1, columns, table, scales, block_rows, width, direct, words
        )
        if not narrow and wanted != _F32:
            out[band] = direct

    with np.errstate(all="ignore"):
        _spread(work, [slice(start, min(start + height, rows)) for start in range(0, rows, height)], workers)
    transposed = len(q.shape) == 2 and q.axis == 0
    return np.ascontiguousarray(out.T) if transposed else out.reshape(q.shape)


# ---- threads -----------------------------------------------------------------------------------------------------


def _workers(threads: int | None) -> int:
    """How many threads may work at a time."""
    if threads is not None:
        return check_int("threads", threads, 1, 1 << 16)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _spread(work: Callable[[slice], None], bands: Iterable[slice], workers: int) -> None:
    """Do `work` for every band, several at a time; kernels let go of the interpreter."""
    bands = list(bands)
    if min(workers, len(bands)) < 2:
        for band in bands:
            work(band)
        return
    with ThreadPoolExecutor(min(workers, len(bands))) as pool:
        for _ in pool.map(work, bands):
            pass
