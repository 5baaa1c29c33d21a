"""The reference backend: casts in integer bits and GEMMs on decoded operands; operand forms are matrices [R, C]."""

import math
import typing
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat import reference as oracle
from microfloat.formats import ScaledFormat, ScaleFormat
from microfloat.jax.backends import cuda
from microfloat.jax.numerics.bits import (
    as_code_dtype,
    as_float,
    bits_of,
    code_bytes,
    decode,
    encode,
    hadamard_inverse,
    hadamard_transform,
    multiply,
    multiply_code,
    rounded,
    where,
    widened,
)
from microfloat.jax.numerics.random import random_bytes
from microfloat.jax.numerics.scales import block_scales, eden_scales, from_tiles, spread, tensor_amax, to_tiles
from microfloat.jax.transformations import max_over
from microfloat.layout import folded_format, stored_length
from microfloat.recipes import Cast, Hadamard
from microfloat.routes import Encoding, is_outer


class Noise(NamedTuple):
    """The call seed's words uint32[2] and the counter of stochastic rounding. `origin`: the row and the column, a
    multiple of 16, at which this part of the whole operand form begins.
    """

    words: Array | np.ndarray
    stream: Array | int
    batch: Array | int = 0
    origin: tuple[Array | int, Array | int] = (0, 0)


class Decoded(NamedTuple):
    """An operand form in bfloat16, code times block scale, exact; `outer`: the scale () or [R, 1] for the epilogue."""

    values: Array
    outer: Array | None


class Matrix(NamedTuple):
    """A quantized operand form: `codes` in their dtype [R, stored], `scale` as a grid of blocks, `tensor_scale`."""

    codes: Array
    scale: Array
    tensor_scale: Array | None


def cast_matrix(
    x_RC: Array, cast: Cast, noise: Noise | None = None, *, amax: Array | None = None, scale_enc: Array | None = None,
    axes: frozenset[str] = frozenset(),
) -> Matrix:  # fmt: skip
    """Quantize an operand form, which `axes` cut; `amax` replaces the amax of the tensor, (), or of rows, [R, 1]."""
    x_RC = widened(x_RC)
    if cast.hadamard is not None:
        x_RC = hadamard_transform(x_RC, cast.hadamard)
    element, shape_RC = cast.format.element, (x_RC.shape[0], x_RC.shape[1])
    tiles = to_tiles(x_RC, cast.format.block)
    measures_tensor = cast.format.is_per_tensor or cast.tensor_scale == "tensor"
    if axes and amax is None and scale_enc is None and measures_tensor:
        amax = max_over(tensor_amax(x_RC), axes)
    scales = block_scales(tiles, cast, amax, scale_enc)
    if cast.is_gradient:
        scales = scales.for_product()
    noise_tiles = drawn = None
    if cast.is_stochastic and noise is not None:
        drawn = to_tiles(random_bytes(*shape_RC, *noise), cast.format.block)
        noise_tiles = drawn if cast.rounding == "stochastic" else None
    factor = spread(scales.encode)

    def integers(tiles: Array, factor: Array) -> Array:
        return encode(multiply(tiles, factor), element, noise_tiles)

    if noise_tiles is None and tiles.size and cuda.converts(element):
        by_chip = partial(cuda.converted, element=element)
        codes = lax.platform_dependent(tiles, factor, cuda=by_chip, default=integers)
    else:
        codes = integers(tiles, factor)
    byte = scales.stored
    if cast.rounding == "eden" and drawn is not None:
        byte = eden_scales(multiply(tiles, factor), codes, byte, cast, drawn)
    if scales.is_nan is not None:
        codes = where(spread(scales.is_nan), np.uint8(element.nan_code), codes)
    stored = as_code_dtype(from_tiles(codes, shape_RC), element)
    return Matrix(cuda.row_major(stored), byte, scales.tensor_scale)


def transposed(matrix: Matrix, fmt: ScaledFormat, cols: int) -> Matrix:
    """The quantization of the transposed operand, for a format whose blocks allow it; `cols`: columns of `matrix`."""
    codes = as_code_dtype(code_bytes(matrix.codes, fmt.element, cols).T, fmt.element)
    scale = matrix.scale if fmt.is_per_tensor else matrix.scale.T
    return Matrix(codes, scale, matrix.tensor_scale)


def _tiled(matrix: Matrix, fmt: ScaledFormat, length: int) -> tuple[Array, Array]:
    """(decoded codes [grid rows, block rows, grid columns, block columns], the grid of scales)."""
    tiles = to_tiles(decode(code_bytes(matrix.codes, fmt.element, length), fmt.element), fmt.block)
    return tiles, matrix.scale.reshape(1, 1) if fmt.is_per_tensor else matrix.scale


def _power_of_two(tiles: Array, grid: Array, scale: ScaleFormat) -> Array:
    """``tiles * 2^(byte - bias)``, NaN for its code. Two normal factors: 2^-127 alone would be flushed."""
    exponent = grid.astype(jnp.int32) + (scale.lowest - 127)
    half = exponent >> 1
    for part in (half, exponent - half):
        tiles = tiles * spread(as_float((part + 127).astype(jnp.uint32) << 23))
    return where(spread(grid >= scale.nan_code), np.float32(np.nan), tiles)


def dequantize_matrix(matrix: Matrix, fmt: ScaledFormat, hadamard: Hadamard | None, cols: int) -> Array:
    """float32 [R, cols] in the order of operations of docs/numerics.md 8.1; a Hadamard transform is undone."""
    length = stored_length(cols, hadamard)
    tiles, grid = _tiled(matrix, fmt, length)
    if fmt.scale.kind == "threshold":
        product, exponent = _power_of_two(tiles, grid, fmt.scale), grid.astype(jnp.int32) + fmt.scale.lowest
        significand = jnp.full(grid.shape, 1 << 23, jnp.uint32)
        exponent = where(grid >= fmt.scale.nan_code, np.int32(1 << 20), exponent)  # NaN is not small
    else:
        factor = decode(grid, fmt.scale.element) if fmt.scale.kind == "two_level" else grid
        if matrix.tensor_scale is not None:
            # The order is part of the definition; without the barrier XLA may multiply the codes first.
            factor = lax.optimization_barrier(factor * matrix.tensor_scale)
        product, bits = tiles * spread(factor), bits_of(factor)
        exponent = ((bits >> 23) & np.uint32(255)).astype(jnp.int32)
        # A scale of zero, Inf or NaN: the plain product is right.
        exponent = where((exponent == 0) | (exponent == 255), np.int32(1 << 20), exponent)
        significand = (bits & np.uint32(0x7FFFFF)) | np.uint32(1 << 23)
    tiles = multiply_code(tiles, spread(significand), spread(exponent), product)
    values = from_tiles(tiles, (matrix.codes.shape[0], length))
    return values if hadamard is None else hadamard_inverse(values, hadamard)[:, :cols]


def factored_values(matrix: Matrix, fmt: ScaledFormat, length: int) -> tuple[Array, Array | None]:
    """The operand [R, length] times its block scales, which is exact, and the scale () or [R, 1] that is left (8.2)."""
    tiles, grid = _tiled(matrix, fmt, length)
    outer = matrix.tensor_scale
    if fmt.scale.kind == "threshold":
        tiles = _power_of_two(tiles, grid, fmt.scale)
    elif fmt.scale.kind == "two_level":
        tiles = tiles * spread(decode(grid, fmt.scale.element))
    elif is_outer(fmt):
        outer = grid
    else:
        tiles = tiles * spread(grid)
    return from_tiles(tiles, (matrix.codes.shape[0], length)), outer


def folded(operand: "Operand", kind: "Kind", form: str) -> "tuple[Matrix, Kind]":
    """An MX or NVFP4 operand as FP8 under a power of two for each group of `form`, and its tensor scale. One that was
    folded as it was cast, known by its float32 scales, has the tensor scale in them."""
    matrix, fmt, source = typing.cast(Matrix, operand), folded_format(kind.format, form), kind.format
    if matrix.scale.dtype == jnp.float32:
        return matrix, Kind(fmt, kind.hadamard, kind.cols, power_of_two=True)
    shape_RC, (rows, columns) = (matrix.codes.shape[0], kind.length), source.block
    scale = jnp.repeat(matrix.scale, typing.cast(int, rows), axis=0)[: shape_RC[0]] if source.is_tile else matrix.scale
    blocks = None if fmt.block[1] is None else fmt.block[1] // typing.cast(int, columns)
    byte = to_tiles(scale, (fmt.block[0], blocks)).astype(jnp.int32)
    if source.scale.name == "E8M0":
        largest = jnp.max(byte, axis=(1, 3), initial=0)
        headroom = math.floor(math.log2(fmt.element.max / source.element.max))
        exponent, is_nan = jnp.maximum(largest - headroom, 1) - 127, largest == 255
        # A factor below 2^-126 would be flushed, and leaves no code either.
        factor = _power(jnp.maximum(byte - 127 - spread(exponent), -126))
        factor = where(spread(is_nan), np.float32(np.nan), factor)
        up = where(is_nan, np.float32(np.nan), _power(exponent))
    else:
        magnitude = byte & 0x7F
        largest = jnp.max(where(magnitude == 0x7F, np.int32(0), magnitude), axis=(1, 3), initial=0)
        exponent = jnp.maximum((largest + 6) >> 3, 4) - 13
        factor = decode(byte.astype(jnp.uint8), source.scale.element) * spread(_power(-exponent))
        up = _power(exponent)
    factors = from_tiles(factor, (scale.shape[0], scale.shape[1]))
    codes = decode(code_bytes(matrix.codes, source.element, kind.length), source.element)
    tiles = to_tiles(codes, (1, columns)) * spread(factors)
    folded_codes = from_tiles(encode(tiles, fmt.element, None), shape_RC)
    level, made = matrix.tensor_scale, Kind(fmt, kind.hadamard, kind.cols, power_of_two=form != "rows")
    if form == "rows" and level is not None:  # which are outer scales of FP8, as its tensor scale is
        up, level = up * level, None
    return Matrix(as_code_dtype(folded_codes, fmt.element), up, level), made


def with_level(matrix: Matrix) -> Matrix:
    """A folded operand whose tensor scale is part of its float32 scales (docs/numerics.md 9.4)."""
    scale, level = matrix.scale, matrix.tensor_scale
    return matrix if level is None else Matrix(matrix.codes, scale * level, None)


def in_powers(matrix: Matrix) -> Matrix:
    """The reverse for powers of two: beside them the significand that a tensor scale gave all scales of a row."""
    if matrix.tensor_scale is not None:
        return matrix
    bits, is_number = bits_of(matrix.scale), matrix.scale > 0
    significand = where(is_number, as_float((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)), np.float32(1))
    power = where(is_number, as_float(bits & np.uint32(0x7F800000)), matrix.scale)
    axis = 1 if len(matrix.scale) == len(matrix.codes) else None  # tiles have one tensor scale
    return Matrix(matrix.codes, power, jnp.max(significand, axis=axis, keepdims=True, initial=1))


def _power(exponent: Array) -> Array:
    """``2^exponent`` in float32, of exponents from -126 to 127."""
    return as_float((exponent + 127).astype(jnp.uint32) << 23)


def matmul(a_MK: Array, b_NK: Array, outer_a: Array | None, outer_b: Array | None) -> Array:
    """``(a @ b.T) * outer_a * outer_b.T`` in float32 [M, N]; outer scales are (), [1, 1] or [R, 1], or None."""
    common = jnp.promote_types(a_MK.dtype, b_NK.dtype)
    operands = a_MK.astype(common), b_NK.astype(common)
    product = lax.dot_general(*operands, (((1,), (1,)), ((), ())), lax.Precision.HIGHEST, jnp.float32)
    return apply_outer(product, outer_a, outer_b)


def apply_outer(product: Array, outer_a: Array | None, outer_b: Array | None) -> Array:
    """The float32 accumulator times the outer scales, one after the other: their own product may leave float32."""
    if outer_a is not None:
        product = product * outer_a.reshape(-1, 1)
    return product if outer_b is None else product * outer_b.reshape(1, -1)


class Kind(NamedTuple):
    """The static part of a quantized operand form; `power_of_two`: its rule makes float32 scales powers of two."""

    format: ScaledFormat
    hadamard: Hadamard | None
    cols: int
    power_of_two: bool = False

    @property
    def encoding(self) -> Encoding:
        """The part that the route of a GEMM depends on."""
        return Encoding(self.format, self.hadamard, self.power_of_two)

    @property
    def length(self) -> int:
        """Contraction length as stored."""
        return stored_length(self.cols, self.hadamard)


Operand = Matrix | Decoded | Array


def gemm(a: Operand, b: Operand, kind_a: Kind | None, kind_b: Kind | None, dtype: np.dtype) -> Array:
    """``a @ b.T`` in float32 [M, N]; beside an array (its kind is None) an operand is dequantized to `dtype`."""
    if kind_a is None or kind_b is None:
        return matmul(_in_high_precision(a, kind_a, dtype), _in_high_precision(b, kind_b, dtype), None, None)
    is_mx = kind_a.format.scale.name == kind_b.format.scale.name == "E8M0"
    if is_mx and isinstance(a, Matrix) and isinstance(b, Matrix):
        return _centred_gemm(a, b, kind_a, kind_b)
    (values_a, outer_a), (values_b, outer_b) = (
        (operand.values.astype(jnp.float32), operand.outer)
        if isinstance(operand, Decoded)
        else factored_values(typing.cast(Matrix, operand), kind.format, kind.length)
        for operand, kind in ((a, kind_a), (b, kind_b))
    )
    return matmul(values_a, values_b, outer_a, outer_b)


def _centred_gemm(a: Matrix, b: Matrix, kind_a: Kind, kind_b: Kind) -> Array:
    """The product of two MX operands, each first brought to a largest scale of 1: subnormal values would be flushed."""
    values, exponent = [], jnp.int32(0)
    for matrix, kind in ((a, kind_a), (b, kind_b)):
        byte = matrix.scale.astype(jnp.int32)
        largest = jnp.max(where(byte == 255, np.int32(0), byte), initial=0)
        centred = where(byte == 255, byte, jnp.maximum(byte - largest + 127, 0)).astype(jnp.uint8)
        values.append(factored_values(Matrix(matrix.codes, centred, None), kind.format, kind.length)[0])
        exponent = exponent + (largest - 127)
    product, half = matmul(values[0], values[1], None, None), exponent >> 1
    for part in (half, exponent - half):  # each is the exponent of a normal number, their sum need not be
        product = product * as_float((part + 127).astype(jnp.uint32) << 23)
    return product


def _in_high_precision(operand: Operand, kind: Kind | None, dtype: np.dtype) -> Array:
    if kind is None:
        return typing.cast(Array, operand)
    return rounded(dequantize_matrix(typing.cast(Matrix, operand), kind.format, kind.hadamard, kind.cols), dtype)


def exact_gemm(
    a: Operand, b: Operand, kind_a: Kind | None, kind_b: Kind | None, dtype: np.dtype, bias: Array | None = None
) -> Array:
    """The float64 sum of the NumPy oracle, plus bias, rounded once to float32; on the host by a callback, for tests."""
    if kind_a is None or kind_b is None:
        a, b = _in_high_precision(a, kind_a, dtype), _in_high_precision(b, kind_b, dtype)
        kind_a = kind_b = None
    shape = jax.ShapeDtypeStruct((rows_of(a), rows_of(b)), jnp.float32)
    call = partial(_exact_on_host, kind_a, kind_b)
    return jax.pure_callback(call, shape, a, b, bias, vmap_method="sequential")


def kind_of(cast: Cast | None, cols: int) -> Kind | None:
    """The kind of an operand quantized by `cast`; None stays None."""
    return None if cast is None else Kind(cast.format, cast.hadamard, cols, cast.rule.power_of_two)


def rows_of(operand: Operand) -> int:
    """R of an operand form."""
    if isinstance(operand, Decoded):
        return operand.values.shape[0]
    return (operand.codes if isinstance(operand, Matrix) else operand).shape[0]


def _exact_on_host(kind_a: Kind | None, kind_b: Kind | None, a: Operand, b: Operand, bias: object) -> np.ndarray:
    total = oracle.scaled_matmul(_for_oracle(a, kind_a), _for_oracle(b, kind_b))
    if bias is not None:
        total = total + np.asarray(bias).astype(np.float64)
    with np.errstate(all="ignore"):
        return total.astype(np.float32)


def _for_oracle(operand: Operand, kind: Kind | None) -> "oracle.Quantized | np.ndarray":
    if kind is None:
        return np.asarray(operand)
    matrix = typing.cast(Matrix, operand)
    codes = np.ascontiguousarray(np.asarray(matrix.codes)).view(np.uint8)
    scale = np.asarray(matrix.scale)
    tensor_scale = None if matrix.tensor_scale is None else np.asarray(matrix.tensor_scale)
    if kind.format.tensor_scale is None and tensor_scale is not None:  # folded
        scale, tensor_scale = scale * tensor_scale, None
    shape = (codes.shape[0], kind.cols)
    return oracle.Quantized(codes, scale, tensor_scale, kind.format, 1, shape, kind.hadamard)
