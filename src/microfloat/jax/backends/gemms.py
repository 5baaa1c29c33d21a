"""The GEMMs of two operands, through XLA's own dots, by the kinds of their routes (`microfloat.routes`).

* `fp8`: the FP8 codes go into one dot, tensor and row scales multiply its float32 result (sm_89 and newer); scales of
  whole tensors may go into the GEMM (`cuda.folds_scales`).
* `values`: codes and block scales are decoded to bfloat16, exactly, then one bfloat16 dot; tensor scales follow (any
  GPU).
* `block_scaled`: codes and scales go into `jax.nn.scaled_matmul` (sm_100 and newer; not yet run on the hardware).
* `stored`: a few rows in high precision by codes that a kernel decodes in registers (sm_80 and newer).
* everything else, and ``backend="reference"``: the reference GEMM.

Source: docs/numerics.md 8.2, docs/jax.md.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from microfloat.chips import Chip
from microfloat.errors import NotSupportedError
from microfloat.formats import ScaledFormat
from microfloat.jax.backends import cuda, kernels, reference
from microfloat.jax.backends.cuda import capability
from microfloat.jax.numerics.bits import FLOAT8, where
from microfloat.jax.numerics.scales import from_tiles, spread, to_tiles
from microfloat.routes import Route, route_between

__all__ = ["GemmPlan", "bf16_values", "capability", "gemm", "route_of_plan", "run_gemm"]

# cuBLASLt takes FP8 operands whose sizes are multiples of this; XLA falls back to a wider dot otherwise.
_MULTIPLE = 16


class GemmPlan(NamedTuple):
    """Everything static about one GEMM: kinds of both operands (None = high precision), accumulation, path, backend.

    `dtype` is the compute dtype: what a quantized operand beside one in high precision is dequantized to. `out` is that
    of the result, rounded once after scales and bias.
    """

    kind_a: reference.Kind | None
    kind_b: reference.Kind | None
    accumulate: str
    path: str
    backend: str
    dtype: np.dtype
    out: np.dtype = np.dtype(np.float32)


def route_of_plan(plan: GemmPlan, capability: tuple[int, int] | None, *, elsewhere: bool = False) -> Route:
    """The route of `plan` on a chip, None without a GPU; `elsewhere`: in a machine with one, which has all packages.

    Raises NotSupportedError for ``backend="native"`` where no unit of the format multiplies; two operands in high
    precision are no matter of a backend.
    """
    chip = None if capability is None or plan.backend == "reference" else Chip(capability)
    encodings = [None if kind is None else kind.encoding for kind in (plan.kind_a, plan.kind_b)]
    route = route_between(*encodings, chip, plan.accumulate, plan.path, "xla")
    if route.kind == "stored" and not elsewhere and (missing := kernels.why_not_local()):
        route = route_between(*encodings, None, plan.accumulate, plan.path, "xla")
        route = route._replace(reason=f"{route.reason}, since no kernel reads its codes: {missing}")
    if capability is None and not route.accelerated:
        route = route._replace(reason=f"no CUDA device: {route.reason}")
    if plan.backend == "native" and not route.accelerated:
        raise NotSupportedError(
            f"backend: got 'native', needed a GEMM that runs on units of its format. {route.reason}. "
            "Use backend='auto' to emulate it."
        )
    return route


def run_gemm(a: reference.Operand, b: reference.Operand, plan: GemmPlan, bias: Array | None = None) -> Array:
    """``a @ b.T + bias`` [M, N], summed in float32, in the plan's `out`."""
    if plan.accumulate == "exact":
        return reference.exact_gemm(a, b, plan.kind_a, plan.kind_b, plan.dtype, bias).astype(plan.out)
    route = route_of_plan(plan, capability())
    emulate = partial(reference.gemm, kind_a=plan.kind_a, kind_b=plan.kind_b, dtype=plan.dtype)
    if route.kind == "stored" and (product := _few_rows(cast(Array, a), b, plan, bias)) is not None:
        return product
    if route.kind not in ("fp8", "values", "block_scaled"):
        product = emulate(a, b)
    else:
        # These are kinds of two quantized operands.
        kind_a, kind_b = cast(reference.Kind, plan.kind_a), cast(reference.Kind, plan.kind_b)
        out = plan.out if bias is None else jnp.dtype(jnp.float32)
        on_gpu = partial(gemm, kind_a=kind_a, kind_b=kind_b, way=route.kind, accumulate=plan.accumulate, out=out)
        # A program may still be lowered for another platform than the default one.
        product = lax.platform_dependent(a, b, cuda=on_gpu, default=lambda a, b: emulate(a, b).astype(out))
    product = product if bias is None else product + bias.astype(jnp.float32)[None, :]
    return product.astype(plan.out)


def gemm(
    a: reference.Operand, b: reference.Operand, kind_a: reference.Kind, kind_b: reference.Kind, way: str,
    accumulate: str, out: DTypeLike = jnp.float32,
) -> Array:  # fmt: skip
    """``a @ b.T`` [M, N] by the way of one kind of route, summed in float32 and rounded once to `out`."""
    if way == "values":
        return _bf16(a, b, kind_a, kind_b, out).astype(out)
    codes_a, codes_b = cast(reference.Matrix, a), cast(reference.Matrix, b)  # decoded for the way above alone
    if way == "fp8":
        return _fp8(codes_a, codes_b, kind_a, kind_b, accumulate, out)
    return _mx(codes_a, codes_b, kind_a, kind_b).astype(out)


def _few_rows(x_MK: Array, w: reference.Operand, plan: GemmPlan, bias: Array | None) -> Array | None:
    """``x @ w.T + bias`` by the kernel that decodes stored codes in registers; None where it does not serve them.

    Elsewhere than on CUDA, for a batch of matrices, and in derivatives it is the product with the dequantized weight.
    """
    kind = cast(reference.Kind, plan.kind_b)
    (rows, length), columns = x_MK.shape, reference.rows_of(w)
    if not isinstance(w, reference.Matrix) or not rows or kernels.why_none_here((columns, length)):
        return None
    from microfloat.jax.backends import program

    codes = program.stored_codes_of(x_MK.dtype, w, kind, (rows, length, columns))
    if codes is None:
        return None

    def by_kernel(x_MK: Array, w: reference.Matrix, bias: Array | None) -> Array:
        return program.multiply_stored(x_MK, w, codes, bias, plan.out, cast(tuple[int, int], cuda.capability()))

    def by_xla(x_MK: Array, w: reference.Matrix, bias: Array | None) -> Array:
        product = reference.gemm(x_MK, w, None, kind, plan.dtype)
        return (product if bias is None else product + bias.astype(jnp.float32)[None, :]).astype(plan.out)

    either = jax.custom_jvp(kernels.on_either(by_kernel, by_xla))
    either.defjvp(lambda primals, tangents: (either(*primals), jax.jvp(by_xla, primals, tangents)[1]))
    return either(x_MK, w, bias)


_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def _fp8(
    a: reference.Matrix, b: reference.Matrix, kind_a: reference.Kind, kind_b: reference.Kind, accumulate: str,
    out: DTypeLike,
) -> Array:  # fmt: skip
    """FP8 codes into one dot. Precision HIGHEST makes XLA add partial sums in float32 ("split")."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    precision = lax.Precision.DEFAULT if accumulate == "fast" else lax.Precision.HIGHEST
    codes_a, codes_b = _padded(a.codes), _padded(b.codes)
    if _can_fold(kind_a, kind_b, out) and cuda.folds_scales(rows, cols, codes_a.shape[1]):
        product = cuda.scaled_product(codes_a, codes_b, a.scale.reshape(()), b.scale.reshape(()), precision)
        return product[:rows, :cols]
    product = lax.dot_general(codes_a, codes_b, _CONTRACT_LAST, precision=precision, preferred_element_type=jnp.float32)
    outer_a = a.scale if kind_a.format.is_per_tensor else a.scale[:, 0]
    outer_b = b.scale if kind_b.format.is_per_tensor else b.scale[:, 0]
    return reference.apply_outer(product[:rows, :cols], outer_a, outer_b).astype(out)


def _can_fold(kind_a: reference.Kind, kind_b: reference.Kind, out: DTypeLike) -> bool:
    """Both scales are scalars, and cuBLASLt has a GEMM of these elements."""
    per_tensor = kind_a.format.is_per_tensor and kind_b.format.is_per_tensor
    elements = {kind_a.format.element.name, kind_b.format.element.name}
    return per_tensor and "E4M3" in elements and out == jnp.bfloat16


def _padded(codes: Array) -> Array:
    """Codes of zero up to multiples of 16 in both axes; they change no sum."""
    missing = [-size % _MULTIPLE for size in codes.shape]
    if not any(missing):
        return codes
    return lax.pad(codes, jnp.zeros((), codes.dtype), [(0, extra, 0) for extra in missing])


def _bf16(
    a: reference.Operand, b: reference.Operand, kind_a: reference.Kind, kind_b: reference.Kind, out: DTypeLike
) -> Array:
    """Codes times block scales fit bfloat16 exactly (docs/numerics.md 8.2); the dot accumulates in float32."""
    values_a, outer_a = bf16_values(a, kind_a)
    values_b, outer_b = bf16_values(b, kind_b)
    # Without outer scales the GEMM's own rounding is the only one.
    last = out == jnp.bfloat16 and outer_a is None and outer_b is None and cuda.rounds_in_gemm()
    result = jnp.bfloat16 if last else jnp.float32
    product = lax.dot_general(values_a, values_b, _CONTRACT_LAST, preferred_element_type=result)
    return reference.apply_outer(product, outer_a, outer_b)


def bf16_values(operand: reference.Operand, kind: reference.Kind) -> tuple[Array, Array | None]:
    """Codes times block scales in bfloat16, exactly, and the outer scale that is left."""
    if isinstance(operand, reference.Decoded):
        return operand
    fmt, matrix = kind.format, cast(reference.Matrix, operand)
    if fmt.element.bits == 4 and not kernels.why_none_here((matrix.codes.shape[0], kind.length)):
        # XLA writes the unpacked codes to memory before it decodes them.
        return _decode_either(fmt, kind.length, cuda.capability())(matrix), matrix.tensor_scale
    return _decoded_by_xla(matrix, fmt, kind.length)


@lru_cache(maxsize=256)
def _decode_either(
    fmt: ScaledFormat, length: int, chip: tuple[int, int] | None
) -> Callable[[reference.Matrix], Array]:  # fmt: skip
    def by_kernel(matrix: reference.Matrix) -> Array:
        from microfloat.jax.backends import program

        return program.decode_by_kernel(matrix, fmt, length, cast(tuple[int, int], chip))

    return kernels.on_either(by_kernel, lambda matrix: _decoded_by_xla(matrix, fmt, length)[0])


def _decoded_by_xla(matrix: reference.Matrix, fmt: ScaledFormat, length: int) -> tuple[Array, Array | None]:
    if fmt.scale.name != "E8M0" or fmt.element.name not in FLOAT8:
        values, outer = reference.factored_values(matrix, fmt, length)
        return values.astype(jnp.bfloat16), outer
    # 2^(byte - 127) is a bfloat16, 2^-127 a subnormal one, which a GPU keeps.
    byte = matrix.scale.astype(jnp.uint16)
    bits = where(byte == 255, np.uint16(0x7FC0), where(byte == 0, np.uint16(0x40), byte << 7))
    tiles = to_tiles(matrix.codes, fmt.block).astype(jnp.bfloat16)
    scaled = tiles * spread(lax.bitcast_convert_type(bits, jnp.bfloat16))
    return from_tiles(scaled, (matrix.codes.shape[0], length)), None


def _mx(a: reference.Matrix, b: reference.Matrix, kind_a: reference.Kind, kind_b: reference.Kind) -> Array:
    """Codes and scales as `jax.nn.scaled_matmul` wants them: one batch axis, K last, one scale per row and block."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    data_a, scale_a = _mx_operand(a, kind_a)
    data_b, scale_b = _mx_operand(b, kind_b)
    product = jax.nn.scaled_matmul(data_a, data_b, scale_a, scale_b, preferred_element_type=jnp.float32)
    return reference.apply_outer(product[0, :rows, :cols], a.tensor_scale, b.tensor_scale)


def _mx_operand(matrix: reference.Matrix, kind: reference.Kind) -> tuple[Array, Array]:
    """(data [1, R, K], scales [1, R, K / block]) with K padded to whole blocks (codes 0, scale 1) and rows to 128."""
    fmt, block = kind.format, cast(int, kind.format.block[1])  # 32 or 16: see `microfloat.routes`
    codes = reference.code_bytes(matrix.codes, fmt.element, kind.length)
    scale = matrix.scale
    if fmt.is_tile:
        scale = jnp.repeat(scale, cast(int, fmt.block[0]), axis=0)[: codes.shape[0]]
    extra_rows, extra_cols = -codes.shape[0] % 128, -codes.shape[1] % (4 * block)
    codes = lax.pad(codes, np.uint8(0), ((0, extra_rows, 0), (0, extra_cols, 0)))
    one = np.uint8(127 if fmt.scale.name == "E8M0" else 0x38)
    missing = codes.shape[1] // block - scale.shape[1]
    scale = lax.pad(scale, one, ((0, extra_rows, 0), (0, missing, 0)))
    scale_dtype = jnp.float8_e8m0fnu if fmt.scale.name == "E8M0" else jnp.float8_e4m3fn
    data = reference.as_code_dtype(codes, fmt.element)
    if fmt.element.bits == 4:
        data = lax.bitcast_convert_type(data, jnp.float4_e2m1fn).reshape(codes.shape)
    return data[None], lax.bitcast_convert_type(scale, scale_dtype)[None]
