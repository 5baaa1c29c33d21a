"""`QuantizedArray`, the JAX face of the oracle's `Quantized`, and the checks of arguments that are arrays."""

import math
import numbers
import typing
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from microfloat.arguments import as_float, check_sizes, check_unpacked, normalize_axis
from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import ScaledFormat
from microfloat.jax.backends import reference
from microfloat.jax.numerics.bits import FLOAT8, as_code_dtype, code_bytes, rounded, widened
from microfloat.jax.numerics.packing import pack_fp6, unpack_fp6
from microfloat.jax.transformations import divided, rows_apart, run_automatically, spec_of
from microfloat.layout import Part, Storage, array_layout, stored_length
from microfloat.recipes import Hadamard
from microfloat.recipes.cast import as_scaled_format


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "tensor_scale"],
    meta_fields=["format", "axis", "axis_size", "hadamard", "dtype", "added_axes"],
)
@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A quantized array: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    Arrays (pytree children), in operand form, contraction axis last: `codes`, float8_e4m3fn or float8_e5m2 for 8-bit
    elements, uint8 for 6-bit (one code per byte) and 4-bit (packed, element 2i in the low nibble); `scale`, uint8 bytes
    (E8M0, E4M3) or float32; `tensor_scale`, float32 of shape () or [R, 1], or None.

    Static metadata: `format`; `axis`, -1 or -2; `axis_size`, the contraction length of the original array; `hadamard`;
    `dtype`, which `dequantize` returns; `added_axes`, 1 for a 1-D and 2 for a 0-d input. `shape` follows from them and
    from `codes`, so slices made by vmap and scan stay valid. Source: docs/numerics.md 7.
    """

    codes: Array
    scale: Array
    tensor_scale: Array | None
    format: ScaledFormat
    axis: int
    axis_size: int
    hadamard: Hadamard | None
    dtype: np.dtype
    added_axes: int = 0

    @classmethod
    def from_parts(
        cls, codes: ArrayLike, scale: ArrayLike, tensor_scale: ArrayLike | None, format: ScaledFormat | str, *,
        axis: int = -1, shape: tuple[int, ...] | None = None, dtype: DTypeLike = jnp.float32,
        hadamard: Hadamard | None = None, packed: bool = False,
    ) -> "QuantizedArray":  # fmt: skip
        """Wrap codes and scales that exist already, for instance in a checkpoint or in torch.

        `codes`, `scale`, `tensor_scale`: as the attributes of that name; FP8 codes may come as uint8, their bytes.
        `format`: a ScaledFormat or its name. `shape` None is that of the codes (unpacked), which have their contraction
        axis last. `packed`: the codes are bytes as `packed_codes` gives them. Raises InvalidValueError for shapes that
        do not fit each other, InvalidTypeError for dtypes.
        """
        fmt = as_scaled_format(format)
        wide = check_dtype("dtype", dtype)
        if hadamard is not None and not isinstance(hadamard, Hadamard):
            raise invalid_type("hadamard", type(hadamard), "None or a Hadamard")
        if shape is not None:
            shape = check_sizes("shape", shape, "a tuple of sizes, such as (4, 32)", kinds=(int, np.integer))
        if packed and fmt.element.bits == 6:
            codes = _unpacked_fp6(codes, shape, axis, hadamard)
        stored = _stored_codes(codes, fmt)
        if shape is None:
            shape = (*stored.shape[:-1], stored.shape[-1] * fmt.element.codes_per_byte)
            shape = shape[::-1] if contraction_axis(axis, len(shape)) == -2 else shape
        axis = contraction_axis(axis, len(shape))
        storage = Storage.of(fmt, hadamard, None if tensor_scale is None else fmt.tensor_scale)
        layout = array_layout(storage, shape, axis % max(len(shape), 1))
        _check_shape("codes", stored, layout.codes, fmt)
        scales = _part("scale", scale, jnp.dtype(storage.scale_dtype))
        _check_shape("scale", scales, layout.scale, fmt)
        outer = None if tensor_scale is None else _part("tensor_scale", tensor_scale, jnp.float32)
        if outer is not None:
            _check_shape("tensor_scale", outer, layout.tensor_scale, fmt)
        size = shape[axis] if shape else 1
        return cls(stored, scales, outer, fmt, axis, size, hadamard, wide, max(2 - len(shape), 0))

    @classmethod
    def from_record(cls, record: typing.Any, *, dtype: DTypeLike = jnp.float32) -> "QuantizedArray":
        """The array of a quantized `checkpoint.Record`; CheckpointError for scales that do not fit."""
        codes, scale, level, fmt = record.parts()
        return cls.from_parts(
            codes, scale, level, fmt, axis=record.axis, shape=record.logical_shape, dtype=dtype, packed=True
        )

    def to_record(self, name: str) -> typing.Any:
        """The `microfloat.checkpoint.Record` of this array under `name`."""
        from microfloat.checkpoint import Record

        if self.hadamard is not None:
            raise invalid_value("hadamard", self.hadamard, "None, as no checkpoint holds a transform", "Dequantize.")
        level = None if self.tensor_scale is None else np.asarray(self.tensor_scale)
        codes, scale = np.asarray(self.packed_codes()), np.asarray(self.scale)
        if self.format.is_tile and codes.ndim > 2:
            if codes.shape[-2] % (self.format.block[0] or 1):
                got = f"{codes.shape[-2]} rows in tiles of {self.format.block[0]}, which reach over several matrices"
                raise invalid_value("array", got, "matrices of whole tiles", "Quantize them one by one.")
            scale = scale.reshape(*codes.shape[:-2], -1, scale.shape[-1])
        if level is not None and self.format.tensor_scale == "row":
            level = level.reshape(*codes.shape[:-1], 1)
        return Record(name, codes, scale, level, self.format, self.shape, axis=self.axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that was quantized."""
        leading = tuple(self.codes.shape[:-1])
        if self.added_axes:
            return (self.axis_size,) if self.added_axes == 1 else ()
        if self.axis == -2:
            return (*leading[:-1], self.axis_size, leading[-1])
        return (*leading, self.axis_size)

    @property
    def ndim(self) -> int:
        """Number of axes of `shape`."""
        return len(self.shape)

    @property
    def length(self) -> int:
        """Stored contraction length: `axis_size`, with whole groups of a Hadamard transform."""
        return stored_length(self.axis_size, self.hadamard)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def unpacked_codes(self) -> Array:
        """The codes of the operand form, one uint8 per element: [..., length]."""
        options = {"element": self.format.element, "length": self.length}
        return run_automatically(code_bytes, rows_apart, self.codes, **options)

    def packed_codes(self) -> Array:
        """The codes as uint8 bytes without gaps, operand form: FP6 four in three bytes, others as they are stored."""
        if self.format.element.bits == 6:
            return pack_fp6(self.codes)
        return jax.lax.bitcast_convert_type(self.codes, jnp.uint8)

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """The values in the original shape; see `microfloat.jax.dequantize`."""
        return dequantize(self, dtype)

    def __jax_array__(self) -> Array:
        """Always InvalidTypeError: nothing dequantizes in silence."""
        remedy = "Call .dequantize(), or microfloat.jax.scaled_matmul to multiply."
        raise invalid_type("array", "QuantizedArray", "a plain array", remedy)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        """Always InvalidTypeError, for NumPy."""
        return np.asarray(self.__jax_array__())

    def __repr__(self) -> str:
        transform = f", {self.hadamard}" if self.hadamard else ""
        codes, scale = (getattr(leaf, "dtype", leaf) for leaf in (self.codes, self.scale))
        try:
            shape = f"shape={self.shape}"
        except (AttributeError, TypeError):  # leaves may be placeholders while a tree is being transformed
            shape = f"axis_size={self.axis_size}"
        return f"QuantizedArray({self.format.name}, {shape}, axis={self.axis}, codes={codes}, scale={scale}{transform})"


def dequantize(q: QuantizedArray, dtype: DTypeLike | None = None) -> Array:
    """The values of `q` in its original shape; `dtype=None` is the dtype of the input of `quantize`.

    FP32 and E8M0 scales: ``f32(dec(q) * scale)``; NVFP4: ``f32(dec(q) * f32(dec(sb) * tensor_scale))``; then one
    rounding to `dtype`. A Hadamard transform is undone in float32 (up to rounding). Source: docs/numerics.md 8.1.
    """
    check_quantized("q", q)
    target = check_dtype("dtype", q.dtype if dtype is None else dtype)
    return run_automatically(_dequantize, dequantized_spec, q, dtype=target)


def dequantized_spec(q: QuantizedArray, **_: typing.Any) -> PartitionSpec:
    """The partition of the dequantized array, which is the partition of its codes."""
    spec = spec_of(q.codes)
    spec = (spec[1], spec[0]) if q.axis == -2 else spec[q.added_axes :]
    return divided(spec, q.shape, q.codes)


@partial(jax.jit, static_argnames=("dtype",))
def _dequantize(q: QuantizedArray, *, dtype: np.dtype) -> Array:
    values = rounded(reference.dequantize_matrix(as_matrix(q), q.format, q.hadamard, q.axis_size), dtype)
    return jnp.swapaxes(values, -1, -2) if q.axis == -2 else values.reshape(q.shape)


def as_matrix(q: QuantizedArray | Array) -> typing.Any:
    """The operand form of `q` as a backend reads it: two axes, one scale grid."""
    if not isinstance(q, QuantizedArray):
        return q.reshape(math.prod(q.shape[:-1]), q.shape[-1])
    rows = math.prod(q.codes.shape[:-1])
    scale = q.scale
    if not (q.format.is_per_tensor or q.format.is_tile):
        scale = scale.reshape(rows, scale.shape[-1])
    return reference.Matrix(q.codes.reshape(rows, q.codes.shape[-1]), scale, q.tensor_scale)


def check_quantized(argument: str, value: object) -> QuantizedArray:
    """`value` itself if it is a QuantizedArray, else InvalidTypeError."""
    if not isinstance(value, QuantizedArray):
        raise invalid_type(argument, type(value), "a QuantizedArray", "Call microfloat.jax.quantize(x, cast) first.")
    storage = Storage.of(value.format, value.hadamard, None)
    kinds = FLOAT8.get(value.format.element.name, jnp.uint8), storage.scale_dtype
    needed = [jnp.dtype(kind) for kind in kinds]
    got = [getattr(leaf, "dtype", type(leaf).__name__) for leaf in (value.codes, value.scale)]
    if got != needed:
        expected = f"{needed[0]} and {needed[1]} for {value.format}"
        remedy = "A function that maps over the arrays of a tree maps over codes and scales: dequantize first."
        raise invalid_type(argument, f"codes of {got[0]} and scales of {got[1]}", expected, remedy)
    return value


def _stored_codes(codes: ArrayLike, fmt: ScaledFormat) -> Array:
    """The codes in the dtype of the attribute; FP8 also from its bytes."""
    own = FLOAT8.get(fmt.element.name)
    if own is not None and getattr(codes, "dtype", None) == own:
        array = jnp.asarray(codes)
    else:
        array = _part("codes", codes, jnp.uint8)
        if fmt.element.bits not in (4, 8) and array.size and not isinstance(array, Tracer):
            check_unpacked(int(array.max()), fmt.element.bits, fmt.name, "microfloat.jax.unpack_fp6")
        array = array if own is None else as_code_dtype(array, fmt.element)
    if array.ndim < 2:
        raise invalid_value("codes", f"shape {array.shape}", "at least two axes, the contraction axis last")
    return array


def _unpacked_fp6(codes: ArrayLike, shape: tuple[int, ...] | None, axis: int, hadamard: Hadamard | None) -> Array:
    data = _part("codes", codes, jnp.uint8)
    if not data.ndim:
        raise invalid_value("codes", "a 0-d array", "packed bytes, the contraction axis last")
    size = shape[contraction_axis(axis, len(shape))] if shape else None
    return unpack_fp6(data, data.shape[-1] // 3 * 4 if size is None else stored_length(size, hadamard))


def _part(argument: str, value: ArrayLike, dtype: DTypeLike) -> Array:
    got = getattr(value, "dtype", None) if isinstance(value, jax.Array | np.ndarray | np.generic) else None
    if got is None or got != jnp.dtype(dtype):
        raise invalid_type(argument, got or type(value), f"an array of {jnp.dtype(dtype)}", "View its bytes so.")
    return jnp.asarray(value)


def _check_shape(argument: str, array: Array, part: Part | None, fmt: ScaledFormat) -> None:
    if part is None:
        raise invalid_value(argument, "an array", f"None: {fmt.name} has none")
    if array.shape != part.shape:
        raise invalid_value(argument, f"shape {array.shape}", f"{part.shape} for {fmt.name} of this shape")


# Arguments

_WIDE_DTYPES = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def check_array(argument: str, x: object) -> Array:
    """A float32, bfloat16 or float16 array (Python numbers become float32); InvalidTypeError for anything else."""
    if isinstance(x, float) and not isinstance(x, np.generic):
        return jnp.asarray(x, jnp.float32)
    if isinstance(x, QuantizedArray):
        remedy = "Dequantize it first, or multiply with scaled_matmul."
        raise invalid_type(argument, "a QuantizedArray", "a plain array", remedy)
    if not isinstance(x, jax.Array | np.ndarray) and callable(getattr(x, "__jax_array__", None)):
        x = typing.cast(typing.Any, x).__jax_array__()
    dtype = getattr(x, "dtype", None)
    if not isinstance(x, jax.Array | np.ndarray | np.generic):
        needed = "an array of float32, bfloat16 or float16"
        raise invalid_type(argument, type(x), needed, "Use jax.numpy.asarray first.")
    if dtype not in _WIDE_DTYPES:
        is_narrow = str(dtype).startswith(("float8", "float6_", "float4"))
        remedy = "Dequantize it first." if is_narrow else f"Convert {argument} with .astype first."
        raise invalid_type(argument, dtype, "float32, bfloat16 or float16", remedy)
    return jnp.asarray(x)


def as_dtype(argument: str, dtype: object, needed: str) -> np.dtype:
    """A dtype, its name or its scalar type as a dtype; InvalidTypeError for anything else."""
    is_dtype = isinstance(dtype, str | type | np.dtype) or (callable(dtype) and hasattr(dtype, "dtype"))
    try:
        return jnp.dtype(dtype if is_dtype else "none")  # type: ignore[arg-type]
    except TypeError:
        raise invalid_type(argument, repr(dtype) if isinstance(dtype, str) else type(dtype), needed) from None


def check_dtype(argument: str, dtype: object) -> np.dtype:
    """float32, bfloat16 or float16 as a dtype; InvalidTypeError for anything else."""
    found = as_dtype(argument, dtype, "float32, bfloat16 or float16")
    if found not in _WIDE_DTYPES:
        raise invalid_type(argument, found, "float32, bfloat16 or float16")
    return found


def contraction_axis(axis: int, ndim: int) -> int:
    """The contraction axis as QuantizedArray has it: -1, or -2 for the first of exactly two; else InvalidValueError."""
    return normalize_axis(axis, ndim) - max(ndim, 1)


def real_array(argument: str, value: ArrayLike) -> Array:
    """A real number, or a floating-point array, as float32."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        return jnp.asarray(as_float(argument, value), jnp.float32)
    if not isinstance(value, jax.Array | np.ndarray | np.generic) or not jnp.issubdtype(value.dtype, jnp.floating):
        got = getattr(value, "dtype", None) or type(value)
        raise invalid_type(argument, got, "a float32 number or array")
    array = jnp.asarray(value)
    return widened(array) if array.dtype.itemsize <= 4 else array.astype(jnp.float32)
