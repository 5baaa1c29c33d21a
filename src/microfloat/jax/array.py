"""`QuantizedArray`: codes and scales as one pytree leaf group, the JAX face of the oracle's `Quantized`."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_type
from microfloat.formats import ScaledFormat
from microfloat.jax.numerics.bits import code_bytes
from microfloat.jax.numerics.hadamard import stored_length
from microfloat.recipes import Hadamard

__all__ = ["QuantizedArray"]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["codes", "scale", "tensor_scale"],
    meta_fields=["format", "axis", "axis_size", "hadamard", "dtype", "added_axes"],
)
@dataclass(frozen=True, eq=False)
class QuantizedArray:
    """A quantized array: ``value = decode(codes) * scale * tensor_scale``, blocks along the contraction axis.

    Arrays (pytree children), in operand form, contraction axis last:

    * `codes`: float8_e4m3fn / float8_e5m2 for 8-bit elements; uint8 for 6-bit (one code per byte) and 4-bit
      (packed, element 2i in the low nibble).
    * `scale`: uint8 bytes (E8M0, E4M3) or float32; `tensor_scale`: float32 of shape () or [R, 1], or None.

    Static (hashable) metadata: `format`; `axis`, -1 or -2; `axis_size`, the contraction length of the original
    array; `hadamard`; `dtype`, what `dequantize` returns; `added_axes`, 1 for a 1-D and 2 for a 0-d input. `shape`
    follows from them and from `codes`, so slices made by vmap and scan stay valid. Source: docs/numerics.md 7.
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
        hadamard: Hadamard | None = None,
    ) -> "QuantizedArray":  # fmt: skip
        """Wrap codes and scales that exist already, for instance those of a checkpoint or of torch.

        `codes`, `scale`, `tensor_scale`: as the attributes of that name; FP8 codes may come as uint8, their bytes.
        `format`: a ScaledFormat or its name. `shape` None is that of the codes (unpacked), which have their contraction
        axis last. Raises InvalidValueError for shapes that do not fit each other, InvalidTypeError for dtypes.
        """
        from microfloat.jax._parts import checked_parts

        return checked_parts(codes, scale, tensor_scale, format, axis, shape, dtype, hadamard)

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
        """Stored contraction length: `axis_size`, rounded up to 16 under a Hadamard transform."""
        return stored_length(self.axis_size, self.hadamard)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return sum(int(leaf.size) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def unpacked_codes(self) -> Array:
        """The codes of the operand form, one uint8 per element: [..., length]."""
        return code_bytes(self.codes, self.format.element, self.length)

    def dequantize(self, dtype: DTypeLike | None = None) -> Array:
        """The array that this stands for; see `microfloat.jax.dequantize`."""
        from microfloat.jax.ops import dequantize

        return dequantize(self, dtype)

    def __jax_array__(self) -> Array:
        """Always InvalidTypeError: nothing dequantizes in silence."""
        remedy = "Call .dequantize(), or microfloat.jax.scaled_matmul to multiply."
        raise invalid_type("array", "QuantizedArray", "a plain array", remedy)

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        """The same for NumPy."""
        return np.asarray(self.__jax_array__())

    def __repr__(self) -> str:
        transform = f", {self.hadamard}" if self.hadamard else ""
        codes, scale = (getattr(leaf, "dtype", leaf) for leaf in (self.codes, self.scale))
        try:
            shape = f"shape={self.shape}"
        except (AttributeError, TypeError):  # leaves may be placeholders while a tree is being transformed
            shape = f"axis_size={self.axis_size}"
        return f"QuantizedArray({self.format.name}, {shape}, axis={self.axis}, codes={codes}, scale={scale}{transform})"


def check_quantized(argument: str, value: object) -> QuantizedArray:
    """`value` itself if it is a QuantizedArray, else InvalidTypeError."""
    if not isinstance(value, QuantizedArray):
        raise invalid_type(argument, type(value), "a QuantizedArray", "Call microfloat.jax.quantize(x, cast) first.")
    return value
