"""Faster ways of XLA on CUDA, to the same bits: FP8 conversions, scales inside the FP8 GEMM, transposes.

Chosen where a program is lowered for CUDA and `capability` names a chip; everywhere else the integers of
`microfloat.jax.numerics.bits` and float32 epilogues do the same. Source: docs/numerics.md 1.2 and 8.2, docs/jax.md.
"""

import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from microfloat.formats import ElementFormat
from microfloat.jax.numerics.bits import FLOAT8, bits_of, where
from microfloat.jax.transformations import batched_by

_LOGGER = logging.getLogger("microfloat")
_CONTRACT_LAST = (((1,), (1,)), ((), ()))
# Releases of jaxlib with which scales inside the GEMM were seen to stay float32, in the steps of both recipes that have
# them: another one may move the barrier that keeps XLA from rounding them to bfloat16.
_MEASURED_JAXLIB = ("0.11.",)
# XLA merges dots that share an operand if one of them moves less than 64 MiB.
_NEVER_MERGED = 1 << 27


def capability() -> tuple[int, int] | None:
    """(major, minor) compute capability of the first CUDA device that JAX sees, or None."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return None
    # JAX calls GPUs of other makers gpu too; theirs is a name, such as "gfx942".
    match = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(jax.devices()[0], "compute_capability", "")))
    return (int(match[1]), int(match[2])) if match else None


def converts(element: ElementFormat) -> bool:
    """True if the chip converts float32 to this element: FP8 from sm_89 on."""
    chip = capability()
    return element.name in FLOAT8 and chip is not None and chip >= (8, 9)


def converted(tiles: Array, factor: Array, element: ElementFormat) -> Array:
    """uint8 codes of ``clip(tiles * factor, -max, max)`` by the chip's conversion; the bytes are those of `encode`.
    `factor`: one per block, [.., 1, .., 1]. After the clip only the rounding is left, nearest even in both."""
    if factor.size == 1:
        # A factor that XLA knew to be constant would be merged with constant factors inside x, in another rounding.
        never = (bits_of(tiles[:1, :1, :1, :1]) >> 31) > np.uint32(1)
        factor = where(never, np.float32(1), factor)
    scaled, largest = tiles * factor, np.float32(element.max)
    rounded = lax.min(lax.max(scaled, -largest), largest).astype(FLOAT8[element.name])
    codes = where(scaled != scaled, np.uint8(element.nan_code), lax.bitcast_convert_type(rounded, jnp.uint8))
    # XLA may drop a narrowing conversion that is widened again at once: the selection above is between them. Codes of a
    # whole tensor go into a GEMM or a result, and are kept apart in any case.
    return lax.optimization_barrier(codes) if factor.size == 1 else codes


def row_major(x_RC: Array) -> Array:
    """`x_RC`, kept in rows by the compiler on CUDA; left alone where JAX partitions or batches programs."""
    # Otherwise a transposed use pulls its layout up to the input, which is then transposed in float32.
    if capability() is None or not is_alone():
        return x_RC
    return _row_major(x_RC)


@custom_vmap
def _row_major(x_RC: Array) -> Array:
    rows = Layout((0, 1))
    return lax.platform_dependent(x_RC, cuda=lambda x_RC: with_layout_constraint(x_RC, rows), default=lambda x_RC: x_RC)


_row_major.def_vmap(lambda _size, _batched, x_BRC: (x_BRC, True))


def turned(x_RC: Array) -> Array:
    """``x.T``, on CUDA written out in rows: maxima over blocks along the slow axis take longer than the copy."""
    return row_major(x_RC.T)


def is_alone() -> bool:
    """True for one device and no mesh: XLA partitions nothing, and a GEMM may round, as no partial products follow."""
    return jax.device_count() == 1 and not jax.sharding.get_abstract_mesh().axis_names


def scaled_product(a_MK: Array, b_NK: Array, scale_a: Array, scale_b: Array, precision: lax.Precision) -> Array:
    """``bf16((a @ b.T) * scale_a * scale_b)`` of FP8 codes under float32 scalars, rounded once, where `folds_scales`.

    Written as the product of dequantized bfloat16 operands, which XLA turns into its FP8 GEMM with both scales, as
    float32, inside. Both scales are multiplied first: their product must be a float32. Under vmap scales are no
    scalars: a dot and its float32 epilogue.
    """
    return _scaled_product(precision)(a_MK, b_NK, scale_a, scale_b)


@lru_cache(maxsize=4)
def _scaled_product(precision: lax.Precision) -> Callable[[Array, Array, Array, Array], Array]:
    def dot(a_MK: Array, b_NK: Array, dtype: DTypeLike) -> Array:
        return lax.dot_general(a_MK, b_NK, _CONTRACT_LAST, precision=precision, preferred_element_type=dtype)

    def epilogue(a_MK: Array, b_NK: Array, scale_a: Array, scale_b: Array) -> Array:
        return (dot(a_MK, b_NK, jnp.float32) * scale_a * scale_b).astype(jnp.bfloat16)

    @custom_vmap
    def product(a_MK: Array, b_NK: Array, scale_a: Array, scale_b: Array) -> Array:
        # Behind the barrier the scales are scalars, whose conversion XLA undoes when it takes them into the GEMM.
        # Without it the conversion moves in front of a reshape, where it stays, and rounds.
        scale_a, scale_b = lax.optimization_barrier((scale_a, scale_b))
        values_a, values_b = (
            codes.astype(jnp.bfloat16) * scale.astype(jnp.bfloat16)
            for codes, scale in ((a_MK, scale_a), (b_NK, scale_b))
        )
        return dot(values_a, values_b, jnp.bfloat16)

    product.def_vmap(batched_by(epilogue))
    return cast(Callable[[Array, Array, Array, Array], Array], product)


def folds_scales(rows: int, cols: int, length: int) -> bool:
    """True if XLA compiles `scaled_product` of [rows, length] and [cols, length] as it reads.

    With XLA's Triton GEMMs, its default, and for small dots that share an operand, which XLA merges, it would be a
    bfloat16 GEMM on scales rounded to bfloat16. So: FP8 tensor cores, one device, an XLA on which this was measured, a
    large product, and a probe in this process.
    """
    chip = capability()
    measured = version("jaxlib").startswith(_MEASURED_JAXLIB)
    large = 2 * (rows * length + cols * length + rows * cols) >= _NEVER_MERGED
    return large and measured and is_alone() and chip is not None and chip >= (8, 9) and _probed()


@lru_cache(maxsize=1)
def _probed() -> bool:
    """Compiles and runs small products, once per process: the outcome depends on XLA's flags."""
    try:
        # Another thread has no trace and no configuration of the caller's.
        with ThreadPoolExecutor(1) as executor:
            exact = all(executor.submit(_folds_exactly, *case).result() for case in _PROBED)
    except Exception as error:  # whatever XLA raises where it cannot compile one: then nothing is folded
        _LOGGER.info("FP8 GEMMs keep their scales in the epilogue: %s", error)
        return False
    if not exact:
        _LOGGER.info(
            "FP8 GEMMs keep their scales in the epilogue: XLA would round them to bfloat16. "
            "XLA_FLAGS=--xla_gpu_enable_triton_gemm=false lets it put them into the GEMM."
        )
    return exact


# Pairs of elements, and precisions; E5M2 x E5M2 is no GEMM of cuBLASLt.
_PROBED = (
    ("E4M3", "E4M3", lax.Precision.DEFAULT), ("E4M3", "E4M3", lax.Precision.HIGHEST),
    ("E5M2", "E4M3", lax.Precision.HIGHEST), ("E4M3", "E5M2", lax.Precision.DEFAULT),
)  # fmt: skip


def _folds_exactly(name_a: str, name_b: str, precision: lax.Precision) -> bool:
    """True if a product of small integers under a scale between two bfloat16 numbers is rounded once."""
    rng = np.random.default_rng(0)
    # Sums of 64 such integers are exact in bfloat16; a scale rounded to bfloat16 would become 1.
    a, b, scale = rng.integers(0, 3, (256, 64)), rng.integers(0, 2, (128, 64)), np.float32(1 + 3 * 2.0**-10)
    device = jax.local_devices()[0]
    arguments = [jax.device_put(np.float32(value), device) for value in (a, b, 1 / scale)]

    def product(values_a: Array, values_b: Array, factor: Array) -> Array:
        # Made as a cast makes it: the reciprocal of a factor, on a grid of one block.
        scale = (np.float32(1) / factor.reshape(1, 1)).reshape(())
        codes = (values_a.astype(FLOAT8[name_a]), values_b.astype(FLOAT8[name_b]))
        codes_a, codes_b = lax.optimization_barrier(codes)
        return scaled_product(codes_a, codes_b, scale, scale, precision)

    result = np.asarray(jax.jit(product)(*arguments)).astype(np.float64)
    exact = (a @ b.T) * float(scale) ** 2
    return bool(np.all(np.abs(result - exact) <= 2.0**-8 * np.abs(exact)))
