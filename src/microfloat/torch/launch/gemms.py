"""Products: which GEMM multiplies two quantized operands, with its padding and epilogue; only tensors are open.

A product is a function ``(a, b, bias) -> [M, N]`` of the parts of both operands: each is codes or values, scales and
tensor scale (None where there is none), in the layouts of `microfloat.layout`; `b` is turned where `Route.turned` says
so. It is *direct* where a GEMM takes them as they are, and says why not otherwise.

* **fp8**, **blocks**: the vendor's GEMMs of Ada and Hopper take a K and N of multiples of 16, and of 8 rows where
  scales are 1x128; other operands are filled up with codes of zero. Large products with 1x128 scales run on a kernel of
  microfloat's (`launch.block_gemm`).
* **values**: bfloat16 products, float32 sums, tensor scales in an epilogue; exact operands (docs/numerics.md 8.2).
* **block_scaled**: Blackwell's GEMMs, written against the documented layouts (128x4 scale tiles, FP4 two per byte) and
  tested on the CPU down to what is passed; not yet run on the hardware.
* all others: plain torch operations.

Legend: M, N = rows of the operands, K = contraction length, R = rows of one operand.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from microfloat.chips import Chip
from microfloat.errors import NotSupportedError, invalid_value
from microfloat.formats import E5M2, ELEMENTS
from microfloat.layout import ALIGNMENT, stored_length
from microfloat.recipes import Gemm
from microfloat.routes import Encoding, Route, encoding_of, is_outer, route_between
from microfloat.torch import backends, reference
from microfloat.torch.backends.base import Operand, Parts, aligned, capturing, raw_stream
from microfloat.torch.launch import block_gemm
from microfloat.torch.launch.blackwell import block_scaled_arguments
from microfloat.torch.launch.block_gemm import own_block_matmul, own_gemm_serves
from microfloat.torch.launch.decode import DECODED_BESIDE, decoding_of
from microfloat.torch.reference._grid import ceil_to

Shape = tuple[int, int, int]
Tensor = torch.Tensor
Level = torch.Tensor | None  # of what an operand may lack, such as a tensor scale

# The vendor's GEMMs. The second is what F.scaled_mm calls, with less host time; a torch without it goes through that.
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
scaled_mm_v2: Any = getattr(torch, "_scaled_mm_v2", None)
_SIDE = 128
# Elements of a result below which the vendor's GEMM with a scale per tensor, and the scales of rows in a launch after
# it, beats its GEMM with scales of rows (an H200; benchmarks/results/served_h200.json).
_FEW_RESULTS = 1 << 21
# Elements of a float32 sum that awaits its scales and its rounding: larger products are made in parts of whole rows.
LARGEST_SUM, _ROWS = 1 << 28, 256


class Product(Protocol):
    """A GEMM whose tensors alone are still open; `reason`: why it is not direct."""

    direct: bool
    reason: str

    def __call__(self, a: Parts, b: Parts, bias: Level, /) -> torch.Tensor:
        """The product [M, N]."""
        ...


class _Bias(NamedTuple):
    """Dtype and address of a bias; `aligned`: it begins at a multiple of 16 bytes."""

    dtype: torch.dtype
    aligned: bool


class _Task(NamedTuple):
    """The description of a GEMM, from which its product is made."""

    lhs: Any  # Encoding, or None in high precision
    rhs: Any
    route: Route
    accumulate: str
    shape: Shape
    bias: _Bias | None
    out_dtype: torch.dtype
    device: torch.device

    @property
    def adds_bias(self) -> bool:
        """True where a GEMM may add the bias; one of another dtype than the result would be rounded to it first."""
        return self.bias is None or (self.bias.dtype == self.out_dtype and self.out_dtype != torch.float32)

    @property
    def length(self) -> int:
        """K, with the padding of a Hadamard transform."""
        return stored_length(self.shape[1], self.lhs.hadamard)


def product(
    gemm: Gemm, route: Route, shape: Shape, bias: torch.Tensor | None, out_dtype: torch.dtype, device: torch.device
) -> Product:
    """The product of a GEMM of M, K, N by its route; `bias`: an example.

    All tensors but the bias begin at multiples of 16 bytes. Products run on the current device, which is `device`.
    Raises InvalidValueError for a route that is refused.
    """
    lhs, rhs = encoding_of(gemm.lhs, route.lhs), encoding_of(gemm.rhs, route.rhs)
    looks = None if bias is None else _Bias(bias.dtype, bias.data_ptr() % ALIGNMENT == 0)
    return _made(_Task(lhs, rhs, route, gemm.accumulate, shape, looks, out_dtype, device))


def _made(task: _Task) -> Product:
    kind, (m, k, n) = task.route.kind, task.shape
    if kind == "refused" and task.lhs is None:
        return _as_product(functools.partial(_refuse, task.route.reason), "refused when it is asked for")
    if kind == "refused":
        needed = "'fast' or 'split' on the native backend"
        raise invalid_value("accumulate", "'exact'", needed, "Use backend='reference' for exact sums.")
    if not m * k * n:
        return _as_product(functools.partial(_empty, task), "nothing is multiplied")
    ways = {
        "fp8": _fp8, "blocks": _blocks, "values": _values, "block_scaled": _block_scaled, "plain": _plain,
        "stored": _stored, "fprop": _of_fprop, "fprop turned": _of_fprop,
    }  # fmt: skip
    return ways.get(kind, _decoded)(task)


def sum_product(gemm: Gemm, route: Route, shape: Shape, device: torch.device) -> Product:
    """``total + a @ b`` in float32, by a GEMM that adds where one does: (a, b, total) -> total, a new one for None."""
    multiply, work = product(gemm, route, shape, None, torch.float32, device), None
    left, right = (None if cast is None else cast.format.block for cast in (gemm.lhs, gemm.rhs))
    scales, tiles = block_gemm.SCALES_OF.get(left), right == (_SIDE, _SIDE) or route.rhs == "tiles"  # type: ignore[arg-type]
    # Scales of rows are read for whole tiles.
    fits = scales is None or (left == right and (left != (1, None) or shape[2] % _SIDE == 0))
    if fits and route.kind in ("fp8", "blocks") and block_gemm.own_gemm_adds(device, shape):
        fast = scales is not None and gemm.accumulate == "fast"
        work = block_gemm.GroupedWork(block_gemm.ADDED, 0, None, (shape[0], shape[2]), scales, fast)

    def added(a: Parts, b: Parts, total: Level) -> Tensor:
        if total is None:
            return multiply(a, b, None)
        if work is not None:
            return own_block_matmul(a.codes, a.scale, b.codes, b.scale, torch.float32, tiles, work, total)
        if route.kind == "plain" and total.is_cuda and a.codes.dtype == b.codes.dtype != torch.float32:
            return torch.addmm(total, a.codes, b.codes.t(), out_dtype=torch.float32, out=total)
        return total.add_(multiply(a, b, None))

    return _as_product(added, multiply.reason)


def _as_product(function: Callable[..., torch.Tensor], reason: str = "") -> Product:
    made: Any = function
    made.direct, made.reason = not reason, reason
    return made


def _refuse(reason: str, a: Parts, b: Parts, bias: Level) -> torch.Tensor:
    raise NotSupportedError(reason)


def _empty(task: _Task, a: Parts, b: Parts, bias: Level) -> torch.Tensor:
    """Sums of no products."""
    y = torch.zeros((task.shape[0], task.shape[2]), dtype=torch.float32, device=task.device)
    return (y if bias is None else y + bias.float()).to(task.out_dtype)


# FP8 tensor cores with a scale per tensor or row.


def _fp8(task: _Task) -> Product:
    (m, k, n), fast, dtype = task.shape, task.accumulate == "fast", task.out_dtype
    rows_of_a, rows_of_b = (one.format.block == (1, None) for one in (task.lhs, task.rhs))
    if rows_of_a != rows_of_b:
        return _with_repeated_scale(task, task.rhs if rows_of_b else task.lhs)
    sizes = (m, ceil_to(k, 16), ceil_to(n, 16))
    if sizes[1] != task.length or sizes[2] != n:
        return _filled_up(_fp8, task, sizes, axis=1 if rows_of_b else None)
    if rows_of_a and m * n < _FEW_RESULTS and is_hopper(task.device):
        return _scaled_afterwards(task, fast)
    if task.adds_bias:
        return _as_product(lambda a, b, bias: scaled_mm(a.codes, b.codes, a.scale, b.scale, bias, None, dtype, fast))
    sums = torch.float32, fast
    return _finished(task, lambda a, b: scaled_mm(a.codes, b.codes, a.scale, b.scale, None, None, *sums))


def is_hopper(device: torch.device) -> bool:
    """True for a GPU of compute capability 9.0."""
    return device.type == "cuda" and backends.chip_of(device).capability == (9, 0)


def _scaled_afterwards(task: _Task, fast: bool) -> Product:
    """Sums by the GEMM of scales per tensor, which the vendor divides along K, and the scales of rows on the sums."""
    (m, _, n), kept = task.shape, []
    finish = epilogue(m, n, ("row", "row"), task.bias, task.out_dtype, task.device)

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        one = kept[0] if kept else torch.ones((), device=task.device)
        if not (kept or capturing()):  # what a CUDA graph makes has no values before its first replay
            kept.append(one)
        sums = scaled_mm(a.codes, b.codes, one, one, None, None, torch.float32, fast)
        return finish(sums, a.scale, b.scale.t(), bias)

    return _as_product(multiplied)


def _finished(task: _Task, sums: Callable[[Parts, Parts], Tensor]) -> Product:
    """Float32 sums, rounded once after the bias."""
    finish = epilogue(task.shape[0], task.shape[2], (None, None), task.bias, task.out_dtype, task.device)
    return _as_product(lambda a, b, bias: finish(sums(a, b), None, None, bias))


def _with_repeated_scale(task: _Task, by_row: Encoding) -> Product:
    """The scale of a whole tensor, repeated for its rows beside an operand that has one for each."""
    multiply = _fp8(task._replace(lhs=by_row, rhs=by_row))
    m, _, n = task.shape

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        a_scale, b_scale = a.scale, b.scale
        a_scale = a_scale if a_scale.dim() else a_scale.expand(m, 1).contiguous()
        b_scale = b_scale if b_scale.dim() else b_scale.expand(1, n).contiguous()
        return multiply(a._replace(scale=a_scale), b._replace(scale=b_scale), bias)

    return _as_product(multiplied, "the scale of a tensor is repeated for its rows")


def _filled_up(make: Callable[[_Task], Product], task: _Task, sizes: Shape, axis: int | None) -> Product:
    """Operands filled up to the sizes that a GEMM takes, by code 0 and scale 1, which changes no value.

    `axis`: along which the scales of the rows of `b` lie, None where there are none.
    """
    (m, _, n), (rows, length, columns), bias = task.shape, sizes, task.bias
    lhs, rhs = (one._replace(hadamard=None) for one in (task.lhs, task.rhs))
    aligned = None if bias is None else bias._replace(aligned=bias.aligned or columns != n)
    multiply = make(task._replace(lhs=lhs, rhs=rhs, shape=sizes, bias=aligned))

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        (a_codes, a_scale, a_level), (b_codes, b_scale, b_level) = a, b
        a_codes, b_codes = _fill(a_codes, rows, length), _fill(b_codes.t(), columns, length).t()
        if rows != m:
            a_scale = F.pad(a_scale.t(), (0, rows - m), value=1.0).t()
        if columns != n:
            if axis == 1:
                b_scale = F.pad(b_scale, (0, columns - n), value=1.0)
            elif axis == 0:
                b_scale = F.pad(b_scale.t(), (0, columns - n), value=1.0).t()
            bias = None if bias is None else F.pad(bias, (0, columns - n))
        y = multiply(Parts(a_codes, a_scale, a_level), Parts(b_codes, b_scale, b_level), bias)
        return y if y.shape == (m, n) else y[:m, :n].contiguous()

    axes = (("M", m, rows, 8), ("K", task.length, length, 16), ("N", n, columns, 16))
    ragged = ", ".join(f"{name} = {size} is no multiple of {of}" for name, size, filled, of in axes if size != filled)
    return _as_product(multiplied, f"{ragged}: filled up with zeros")


def _fill(codes: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    more = (0, columns - codes.shape[1], 0, rows - codes.shape[0])
    return F.pad(codes.view(torch.uint8), more).view(codes.dtype) if any(more) else codes


# FP8 tensor cores with scales for 1x128 and 128x128.


def _blocks(task: _Task) -> Product:
    (m, k, n), dtype = task.shape, task.out_dtype
    tiles = task.rhs.format.block == (_SIDE, _SIDE)
    sizes = (ceil_to(m, 8), ceil_to(k, 16), ceil_to(n, 16))
    if sizes != (m, task.length, n):
        return _filled_up(_blocks, task, sizes, axis=None if tiles else 0)
    multiply = _block_multiplication(task, tiles, dtype if task.bias is None else torch.float32)
    # Rows of 128x128 scales are filled up to a multiple of four, as folded ones already are.
    more = (-k // _SIDE) % 4 if tiles and task.route.rhs == "codes" else 0
    dtype = dtype if task.bias is None else torch.float32

    def multiplied(a: Parts, b: Parts, bias: Level = None) -> Tensor:
        b_scale = F.pad(b.scale.t(), (0, more)).t() if more else b.scale
        return multiply(a.codes, a.scale, b.codes, b_scale, dtype)

    return _as_product(multiplied) if task.bias is None else _finished(task, multiplied)


_NONE: list[Tensor] = []


def _block_multiplication(task: _Task, tiles: bool, dtype: torch.dtype) -> Callable[..., Tensor]:
    """``(a, a_scale, b, b_scale, dtype) -> a @ b`` by the vendor's kernel or our own, asked once."""
    left = F.ScalingType.BlockWise1x128
    right = F.ScalingType.BlockWise128x128 if tiles else left
    lefts, rights = [left.value], [right.value]

    def vendor(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
        if scaled_mm_v2 is None:
            return F.scaled_mm(a, b, a_scale, left, b_scale, right, output_dtype=dtype)
        return scaled_mm_v2(a, b, [a_scale], lefts, _NONE, [b_scale], rights, _NONE, None, dtype)

    is_alone = E5M2 in (task.lhs.format.element, task.rhs.format.element)  # torch's takes E4M3 alone
    if not is_alone and not own_gemm_serves(task.device, task.shape, tiles, dtype):
        return vendor

    def own(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype) -> Tensor:
        a, left, right, scale = (aligned(t.contiguous()) for t in (a, a_scale.t(), b.t(), b_scale.t()))
        return own_block_matmul(a, left.t(), right.t(), scale.t(), dtype, tiles)

    return own


# Operands decoded to bfloat16.


def _values(task: _Task) -> Product:
    (m, _, n), device = task.shape, task.device
    operands = (task.lhs, task.route.lhs), (task.rhs, task.route.rhs)
    levels = tuple(
        one.level if form == "values" or not is_outer(one.format)
        else "row" if one.format.block == (1, None) else "tensor"
        for one, form in operands
    )  # fmt: skip
    multiply = _product_of_values(task, levels)
    if task.route.lhs == task.route.rhs == "values":
        return multiply
    decode_a = _decoder(task.lhs, m, task.length, device) if task.route.lhs != "values" else None
    decode_b = _decoder(task.rhs, n, task.length, device) if task.route.rhs != "values" else None

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        if decode_a is not None:
            a = decode_a(a)
        if decode_b is not None:
            values, _, level = decode_b(b)
            b = Parts(values.t(), None, level)
        return multiply(a, b, bias)

    return _as_product(multiplied, "codes are decoded to bfloat16 first")


def _decoder(one: Encoding, rows: int, length: int, device: torch.device) -> Callable[[Parts], Parts]:
    """A function from an operand to its bfloat16 values without the outer scale, exact where normal, and that scale."""
    dequantize, outer = _dequantizer(one, device), is_outer(one.format)

    def decode(parts: Parts) -> Parts:
        codes, scale, level = parts
        if outer:
            scale, level = torch.ones_like(scale), scale
        values = dequantize(Operand(codes, scale, None, one.format, rows, length, None), torch.bfloat16)
        return Parts(values, None, level)

    return decode


def _dequantizer(one: Encoding, device: torch.device) -> Callable[[Operand, torch.dtype], torch.Tensor]:
    """The function that decodes these codes on `device`: by a kernel where one exists, else the reference."""
    if device.type != "cuda" or one.format.element.name not in ELEMENTS or not backends.support("triton", device):
        return reference.dequantize
    from microfloat.torch.launch.triton import dequantize

    return dequantize


def _product_of_values(task: _Task, levels: tuple[str | None, ...]) -> Product:
    (m, _, n), bias, dtype = task.shape, task.bias, task.out_dtype
    unscaled = levels == (None, None)
    if unscaled and dtype == torch.bfloat16 and task.adds_bias:
        if bias is None:
            return _as_product(lambda a, b, bias: torch.mm(a.codes, b.codes))
        return _as_product(lambda a, b, bias: torch.addmm(bias, a.codes, b.codes))
    multiply = float32_product if task.device.type == "cuda" else float32_product_on_cpu
    if unscaled and bias is None and dtype == torch.float32:
        return _as_product(lambda a, b, bias: multiply(a.codes, b.codes))
    step = -(-m // (-(-m * n // LARGEST_SUM) * _ROWS)) * _ROWS
    if m <= step:
        finish = epilogue(m, n, levels, bias, dtype, task.device)
        return _as_product(lambda a, b, bias: finish(multiply(a.codes, b.codes), a.tensor_scale, b.tensor_scale, bias))
    parts = [slice(begin, min(begin + step, m)) for begin in range(0, m, step)]
    finishes = [epilogue(rows.stop - rows.start, n, levels, bias, dtype, task.device) for rows in parts]

    def in_parts(a: Parts, b: Parts, bias: Level) -> Tensor:
        (values, _, level), (b_values, _, b_level) = a, b
        y = torch.empty((m, n), dtype=dtype, device=values.device)
        for rows, finish in zip(parts, finishes, strict=True):
            own = level[rows] if level is not None and levels[0] == "row" else level
            finish(multiply(values[rows], b_values), own, b_level, bias, y[rows])
        return y

    return _as_product(in_parts)


def float32_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.mm(a, b, out_dtype=torch.float32)


def float32_product_on_cpu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.float() @ b.float()


def epilogue(
    rows: int, columns: int, levels: tuple[str | None, ...], bias: _Bias | None, dtype: torch.dtype,
    device: torch.device,
) -> Callable[..., torch.Tensor]:  # fmt: skip
    """``round(accumulator * f32(left * right) + f32(bias))`` of float32 [M, N], with one rounding, in one launch.

    A function of (accumulator, left, right, bias, result = a new one); `levels`: None, "tensor" or "row" for each.
    """
    from microfloat.kernels.gemm import epilogue as kernels
    from microfloat.torch.launch.program import INTERPRETED, fast_empty, kernel_of

    if device.type != "cuda" and not INTERPRETED:
        return functools.partial(_plain_epilogue, dtype)
    index = backends.device_index(device)
    kinds = {None: kernels.NONE.value, "tensor": kernels.ONE.value, "row": kernels.VECTOR.value}
    left, right = (kinds[level] for level in levels)
    constants = (left, right, bias is not None, dtype == torch.bfloat16, *_EPILOGUE_TILE)
    key = (constants, dtype, bias and bias.dtype, rows % 16 == 0, columns % 16 == 0, rows == 1, columns == 1, index)
    programs = -(-rows // _EPILOGUE_TILE[0]) * -(-columns // _EPILOGUE_TILE[1])
    aligned = (True, True, True, bias is None or bias.aligned, True)
    launch = kernel_of(kernels.scale_and_round).prepared(key, programs, (rows, columns), constants, aligned=aligned)
    empty, size, stride = fast_empty(device), (rows, columns), (columns, 1)

    def finish(accumulator: Tensor, left: Level, right: Level, bias: Level, out: Level = None) -> Tensor:
        if out is None:
            out = empty(size, stride, dtype)
        stream = 0 if index < 0 else raw_stream(index)
        launch(stream, accumulator, left, right, bias, out)
        return out

    return finish


_EPILOGUE_TILE = 8, 512  # rows and columns that one of its programs rounds


def _plain_epilogue(
    dtype: torch.dtype, accumulator: Tensor, left: Level, right: Level, bias: Level, out: Level = None
) -> torch.Tensor:
    """The function that `_epilogue` returns, by torch operations."""
    factors = [scale for scale in (left, right if right is None or not right.dim() else right.t()) if scale is not None]
    y = accumulator
    if factors:
        y = y * (factors[0] * factors[1] if len(factors) == 2 else factors[0])
    y = (y if bias is None else y + bias.float()).to(dtype)
    return y if out is None else out.copy_(y)


# Blackwell's block-scaled tensor cores.


def _block_scaled(task: _Task) -> Product:
    (m, k, n), dtype, has_mxfp4 = task.shape, task.out_dtype, backends.chip_of(task.device).has_mxfp4

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        left, right = _operand(task.lhs, m, k, a), _operand(task.rhs, n, k, b)
        y = F.scaled_mm(**block_scaled_arguments(left, right, dtype if bias is None else torch.float32, has_mxfp4))
        y = y if y.shape[1] == n else y[:, :n].contiguous()
        return y if bias is None else (y + bias.float()).to(dtype)

    return _as_product(multiplied, "torch operations fill up the codes and put the scales into tiles first")


def _operand(one: Encoding, rows: int, length: int, parts: Parts) -> Operand:
    return Operand(*parts, one.format, rows, length, one.hadamard, one.power_of_two)


# Plain torch operations.


def _decoded(task: _Task) -> Product:
    (m, k, n), lhs, rhs = task.shape, task.lhs, task.rhs
    options = {"out_dtype": task.out_dtype, "accumulate": task.accumulate}

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        left, right = _operand(lhs, m, k, a), _operand(rhs, n, k, b)
        return reference.scaled_matmul(left, right, bias=bias, **options)

    return _as_product(multiplied, f"operands are decoded to {task.route.kind}")


def _plain(task: _Task) -> Product:
    (m, k, n), lhs, rhs, dtype = task.shape, task.lhs, task.rhs, task.out_dtype
    if lhs is None and rhs is None:
        return _as_product(
            lambda a, b, bias: high_precision_product(a.codes, b.codes, bias, dtype),
            "torch multiplies in high precision",
        )
    dequantize = _dequantizer(rhs if lhs is None else lhs, task.device)

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        if lhs is None:
            return high_precision_product(a.codes, dequantize(_operand(rhs, n, k, b), a.codes.dtype), bias, dtype)
        return high_precision_product(dequantize(_operand(lhs, m, k, a), b.codes.dtype), b.codes, bias, dtype)

    return _as_product(multiplied, "the quantized operand is dequantized")


def _stored(task: _Task) -> Product:
    """Products of a few rows of x with stored codes; more rows, and codes without a kernel, are multiplied as values.

    x is in high precision, or FP8 with powers of two for scales, which bfloat16 holds exactly.
    """
    otherwise = _plain(task) if task.lhs is None else _values(task)
    decodes = decoding_of(task.rhs, task.shape, task.out_dtype, task.bias and task.bias.dtype, task.device)
    if isinstance(decodes, str):
        return otherwise

    (m, k, _), lhs = task.shape, task.lhs
    dequantize = None if lhs is None else _dequantizer(lhs, task.device)

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        x = a.codes if dequantize is None else dequantize(_operand(lhs, m, k, a), torch.bfloat16)  # type: ignore[arg-type]
        return decodes(x, b, bias) if x.dtype in DECODED_BESIDE else otherwise(a, b, bias)

    return _as_product(multiplied)


def _of_fprop(task: _Task) -> Product:
    """``a @ values``: values [K, N] of the operand of fprop in the form of the route, dequantized to a's dtype."""
    one, turned, (_, rows, length), dtype = task.rhs, task.route.kind == "fprop turned", task.shape, task.out_dtype
    dequantize, (block_rows, block_columns) = _dequantizer(one, task.device), one.format.block

    def multiplied(a: Parts, b: Parts, bias: Level) -> Tensor:
        dtype_of_a, (codes, b_scale, b_level) = a.codes.dtype, b
        if turned:
            codes = codes.t()
        if b_scale is None:
            values = codes.to(dtype_of_a) if b_level is None else (codes.float() * b_level).to(dtype_of_a)
        else:
            if turned and b_scale.dim() and one.format.block != (1, _SIDE):
                b_scale = b_scale.t()
            if block_columns is not None:  # the rows of 128x128 scales are filled up
                b_scale = b_scale[: -(-rows // (block_rows or 1)), : -(-length // block_columns)]
            values = dequantize(_operand(one, rows, length, Parts(codes, b_scale, b_level)), dtype_of_a)
        return high_precision_product(a.codes, values.t(), bias, dtype)

    return _as_product(multiplied, "the operand of fprop is dequantized")


def high_precision_product(
    a_MK: torch.Tensor, b_NK: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``a @ b.T (+ bias)`` in a's dtype, with float32 accumulation and one rounding to `out_dtype`."""
    if b_NK.dtype != a_MK.dtype:
        b_NK = b_NK.to(a_MK.dtype)
    if a_MK.device.type == "cpu":
        # Products of 16-bit floats are exact in float32, and CPUs without bf16 units multiply float32 3-5x faster.
        return F.linear(a_MK.float(), b_NK.float(), bias.float() if bias is not None else None).to(out_dtype)
    if out_dtype in (a_MK.dtype, torch.float16, torch.bfloat16):
        return F.linear(a_MK, b_NK, bias.to(a_MK.dtype) if bias is not None else None).to(out_dtype)
    y = torch.mm(a_MK, b_NK.t(), out_dtype=out_dtype)
    return y if bias is None else y + bias.to(out_dtype)


# Stored operands, which come without their casts.


def scaled_matmul(
    a: Operand, b: Operand, chip: Chip, *, bias: torch.Tensor | None, out_dtype: torch.dtype, accumulate: str
) -> torch.Tensor:
    """``round(a @ b.T + bias)`` on `chip`: [M, N] in `out_dtype`, one rounding; the product of both operands' parts."""
    device, shape = a.codes.device, (a.rows, a.length, b.rows)
    encodings = _encoding_of_stored(a, chip), _encoding_of_stored(b, chip)
    looks = None if bias is None else _Bias(bias.dtype, bias.data_ptr() % ALIGNMENT == 0)
    multiply, turned = stored_product(*encodings, chip, accumulate, shape, looks, out_dtype, device)
    parts = _parts(a, False), _parts(b, turned)
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return multiply(*parts, bias)
    return multiply(*parts, bias)


@functools.lru_cache(1024)
def stored_product(
    lhs: Encoding, rhs: Encoding, chip: Chip, accumulate: str, shape: Shape, bias: _Bias | None,
    out_dtype: torch.dtype, device: torch.device,
) -> tuple[Product, bool]:  # fmt: skip
    """The product of two stored operands, kept for the next ones like them; and True where it takes b turned."""
    route = route_between(lhs, rhs, chip, accumulate)._replace(lhs="codes", rhs="codes")
    return _made(_Task(lhs, rhs, route, accumulate, shape, bias, out_dtype, device)), route.turned


_SIGN_AND_MANTISSA = ~0x7F800000  # of a float32


def _encoding_of_stored(one: Operand, chip: Chip) -> Encoding:
    level = None if one.tensor_scale is None else "row" if one.tensor_scale.dim() else "tensor"
    fmt = one.format
    unknown = one.power_of_two is None and fmt.scale.name == "FP32" and fmt.block[1] is not None
    # Scales of unknown origin, such as a checkpoint's, may be powers of two: they are looked at where it matters.
    if unknown and not chip.has_fp8_blocks and not (one.codes.is_cuda and torch.cuda.is_current_stream_capturing()):
        one.power_of_two = not bool((one.scale.view(torch.int32) & _SIGN_AND_MANTISSA).any())
    return Encoding(fmt, one.hadamard, bool(one.power_of_two), level)


def _parts(one: Operand, turned: bool) -> Parts:
    """Codes, scale and tensor scale of an operand, in the layouts that products take."""
    codes, scale = one.codes, one.scale
    if not codes.is_contiguous():  # kernels write both as GEMMs read them, the reference as x lay
        codes, scale = codes.contiguous(), scale.contiguous()
    if one.format.block == (1, _SIDE) and scale.dtype == torch.float32:
        columns_first = scale.stride(0) == 1 and scale.stride(1) == scale.shape[0]
        scale = scale if columns_first else scale.t().contiguous().t()
    elif turned and scale.dim():
        scale = scale.t()
    return Parts(aligned(codes.t() if turned else codes), aligned(scale), aligned(one.tensor_scale))
