"""The GEMMs of two operands, through XLA's own dots, by the kinds of their routes (`microfloat.routes`).

* `fp8`: one dot of FP8 codes; tensor and row scales multiply its float32 result, or go into it (`cuda.folds_scales`).
* `blocks`: microfloat's FP8 GEMM with 1x128 and 128x128 scales; it takes row scales too.
* `values`: one bfloat16 dot of codes times block scales, which are exact; tensor scales follow.
* `block_scaled`: `jax.nn.scaled_matmul` of codes and scales (not yet run on the hardware).
* `stored`: a few rows in high precision by codes that a kernel decodes in registers.
* everything else, and ``backend="reference"``: the reference GEMM. Source: docs/numerics.md 8.2.
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
from microfloat.jax.backends.reference import Decoded, Kind, Matrix, Operand
from microfloat.jax.numerics.bits import FLOAT8, where
from microfloat.jax.numerics.scales import from_tiles, spread, to_tiles
from microfloat.layout import FOLDED
from microfloat.routes import Route, route_between

# cuBLASLt takes FP8 operands whose sizes are multiples of this; XLA falls back to a wider dot otherwise.
_MULTIPLE = 16
# Products of elements from which a kernel is worth its compilation, and the scales of microfloat's GEMM by blocks.
_LEAST_PRODUCTS = 1 << 30
_OWN_SCALES = {((1, 128), (1, 128)): "lines", ((1, 128), (128, 128)): "tiles", ((1, None), (1, None)): "rows"}


class GemmPlan(NamedTuple):
    """Everything static about one GEMM: kinds of both operands (None = high precision), accumulation, path, backend.
    `dtype`: the compute dtype, to which an operand is dequantized beside one in high precision. `out`: the result's.
    `is_turned`: it is read as its transpose, which a kernel may write instead."""

    kind_a: Kind | None
    kind_b: Kind | None
    accumulate: str
    path: str
    backend: str
    dtype: np.dtype
    out: np.dtype = np.dtype(np.float32)
    is_turned: bool = False


def library(*, elsewhere: bool = False) -> str:
    """The library of routes: "jax" where microfloat's FP8 GEMM may run, as `elsewhere` it may if at all, else "xla"."""
    return "jax" if elsewhere or not kernels.why_no_gemm() else "xla"


def route_of_plan(plan: GemmPlan, capability: tuple[int, int] | None, *, elsewhere: bool = False) -> Route:
    """The route of `plan` on a chip, None without a GPU; `elsewhere`: a chip of another machine, with all packages.
    NotSupportedError for ``backend="native"`` where no unit of the format multiplies."""
    chip = None if capability is None or plan.backend == "reference" else Chip(capability)
    encodings = [None if kind is None else kind.encoding for kind in (plan.kind_a, plan.kind_b)]
    route = route_between(*encodings, chip, plan.accumulate, plan.path, library(elsewhere=elsewhere))
    missing = kernels.why_none_here() or ("" if kernels.is_local() else "jit cuts arrays over several devices")
    if route.kind == "stored" and not elsewhere and missing:
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


def run_gemm(a: Operand, b: Operand, plan: GemmPlan, bias: Array | None = None) -> Array:
    """``a @ b.T + bias`` [M, N], summed in float32, in the plan's `out`."""
    route = route_of_plan(plan, capability())
    if "folded" in route.forms:
        a, kind_a = reference.folded(a, cast(Kind, plan.kind_a), route.lhs)
        plan = plan._replace(kind_a=kind_a)
    if route.rhs in FOLDED:
        b, kind_b = reference.folded(b, cast(Kind, plan.kind_b), route.rhs)
        plan = plan._replace(kind_b=kind_b)
    if plan.accumulate == "exact":
        return reference.exact_gemm(a, b, plan.kind_a, plan.kind_b, plan.dtype, bias).astype(plan.out)
    emulate = partial(reference.gemm, kind_a=plan.kind_a, kind_b=plan.kind_b, dtype=plan.dtype)
    if route.kind == "stored" and (product := _few_rows(cast(Array, a), b, plan, bias)) is not None:
        return product
    if route.kind not in ("fp8", "blocks", "values", "block_scaled"):
        product = emulate(a, b)
    else:
        # These are kinds of two quantized operands.
        kind_a, kind_b = cast(Kind, plan.kind_a), cast(Kind, plan.kind_b)
        out = plan.out if bias is None else jnp.dtype(jnp.float32)
        on_gpu = partial(gemm, kind_a=kind_a, kind_b=kind_b, way=route.kind, accumulate=plan.accumulate, out=out)
        if route.kind in ("fp8", "blocks") and (own := _own_gemm(a, b, plan, out)):
            either = jax.custom_jvp(kernels.on_either(own, on_gpu))
            either.defjvp(lambda primals, tangents: (either(*primals), jax.jvp(on_gpu, primals, tangents)[1]))
            product = cast(Array, either(a, b))
        else:
            # A program may still be lowered for another platform than the default one.
            product = lax.platform_dependent(a, b, cuda=on_gpu, default=lambda a, b: emulate(a, b).astype(out))
    return _with_bias(product, bias).astype(plan.out)


def _with_bias(product: Array, bias: Array | None) -> Array:
    return product if bias is None else product + bias.astype(jnp.float32)[None, :]


def gemm(
    a: Operand, b: Operand, kind_a: Kind, kind_b: Kind, way: str, accumulate: str, out: DTypeLike = jnp.float32,
) -> Array:  # fmt: skip
    """``a @ b.T`` [M, N] by a route of the kind `way`, summed in float32 and rounded once to `out`."""
    if way == "blocks" and kind_a.power_of_two and kind_b.power_of_two:
        a, b = (reference.in_powers(cast(Matrix, one)) for one in (a, b))
        way = "values"
    if way == "values":
        return _bf16(a, b, kind_a, kind_b, out).astype(out)
    if way == "blocks":
        return reference.gemm(a, b, kind_a, kind_b, np.dtype(np.float32)).astype(out)
    codes_a, codes_b = cast(Matrix, a), cast(Matrix, b)  # decoded for the way above alone
    if way == "fp8":
        return _fp8(codes_a, codes_b, kind_a, kind_b, accumulate, out)
    return _mx(codes_a, codes_b, kind_a, kind_b).astype(out)


def _few_rows(x_MK: Array, w: Operand, plan: GemmPlan, bias: Array | None) -> Array | None:
    """``x @ w.T + bias`` by the kernel that decodes codes in registers; None where the kernel does not serve them. Off
    CUDA, for a batch and in derivatives it is the product with the dequantized weight.
    """
    kind = cast(Kind, plan.kind_b)
    (rows, length), columns = x_MK.shape, reference.rows_of(w)
    if not isinstance(w, Matrix) or not rows or kernels.why_none_here((columns, length)):
        return None
    from microfloat.jax.backends import program

    codes = program.stored_codes_of(x_MK.dtype, w, kind, (rows, length, columns))
    if codes is None:
        return None

    def by_kernel(x_MK: Array, w: Matrix, bias: Array | None) -> Array:
        return program.multiply_stored(x_MK, w, codes, bias, plan.out, cast(tuple[int, int], cuda.capability()))

    def by_xla(x_MK: Array, w: Matrix, bias: Array | None) -> Array:
        return _with_bias(reference.gemm(x_MK, w, None, kind, plan.dtype), bias).astype(plan.out)

    either = jax.custom_jvp(kernels.on_either(by_kernel, by_xla))
    either.defjvp(lambda primals, tangents: (either(*primals), jax.jvp(by_xla, primals, tangents)[1]))
    return either(x_MK, w, bias)


_CONTRACT_LAST = (((1,), (1,)), ((), ()))


def _fp8(a: Matrix, b: Matrix, kind_a: Kind, kind_b: Kind, accumulate: str, out: DTypeLike) -> Array:
    """FP8 codes into one dot. Precision HIGHEST makes XLA add partial sums in float32 ("split")."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    precision = lax.Precision.DEFAULT if accumulate == "fast" else lax.Precision.HIGHEST
    codes_a, codes_b = _padded(a.codes), _padded(b.codes)
    # Both scales are scalars, and cuBLASLt has a GEMM of these elements.
    can_fold = kind_a.format.is_per_tensor and kind_b.format.is_per_tensor and out == jnp.bfloat16
    can_fold = can_fold and "E4M3" in (kind_a.format.element.name, kind_b.format.element.name)
    if can_fold and cuda.folds_scales(rows, cols, codes_a.shape[1]):
        product = cuda.scaled_product(codes_a, codes_b, a.scale.reshape(()), b.scale.reshape(()), precision)
        return product[:rows, :cols]
    product = lax.dot_general(codes_a, codes_b, _CONTRACT_LAST, precision=precision, preferred_element_type=jnp.float32)
    return reference.apply_outer(product[:rows, :cols], a.scale, b.scale).astype(out)


def _own_gemm(a: Operand, b: Operand, plan: GemmPlan, out: np.dtype) -> Callable[[Matrix, Matrix], Array] | None:
    """microfloat's GEMM of FP8 codes with such scales; None where it does not take them, or their sizes."""
    kind_a, kind_b = cast(Kind, plan.kind_a), cast(Kind, plan.kind_b)
    scales = _OWN_SCALES.get((kind_a.format.block, kind_b.format.block))
    (m, k), n = cast(Matrix, a).codes.shape, reference.rows_of(b)
    is_odd = m % (8 if plan.is_turned else 4) or (k | n) % 16 or (scales == "rows" and n % 128)
    if scales is None or out != jnp.bfloat16 or is_odd or m * k * n < _LEAST_PRODUCTS or kernels.why_no_gemm():
        return None
    from microfloat.jax.backends import program

    fast, chip = plan.accumulate == "fast" and scales == "rows", cast(tuple[int, int], cuda.capability())

    def multiply(a: Matrix, b: Matrix) -> Array:
        a, b = map(reference.with_level, (a, b))
        made = program.multiply_fp8(a, b, scales, out, chip, fast=fast, is_turned=plan.is_turned)
        return made.T if plan.is_turned else made

    return multiply


def _padded(codes: Array) -> Array:
    """Codes of zero up to multiples of 16 in both axes; they change no sum."""
    missing = [(0, -size % _MULTIPLE, 0) for size in codes.shape]
    return lax.pad(codes, jnp.zeros((), codes.dtype), missing) if any(extra for _, extra, _ in missing) else codes


def _bf16(a: Operand, b: Operand, kind_a: Kind, kind_b: Kind, out: DTypeLike) -> Array:
    """Codes times block scales fit bfloat16 exactly (docs/numerics.md 8.2); the dot accumulates in float32."""
    values_a, outer_a = bf16_values(a, kind_a)
    values_b, outer_b = bf16_values(b, kind_b)
    # Without outer scales the GEMM's own rounding is the only one.
    last = out == jnp.bfloat16 and outer_a is None and outer_b is None and cuda.is_alone()
    result = jnp.bfloat16 if last else jnp.float32
    product = lax.dot_general(values_a, values_b, _CONTRACT_LAST, preferred_element_type=result)
    return reference.apply_outer(product, outer_a, outer_b)


def bf16_values(operand: Operand, kind: Kind) -> tuple[Array, Array | None]:
    """Codes times block scales in bfloat16, exactly, and the outer scale that is left."""
    if isinstance(operand, Decoded):
        return operand
    fmt, matrix = kind.format, cast(Matrix, operand)
    if fmt.element.bits == 4 and not kernels.why_none_here((matrix.codes.shape[0], kind.length)):
        # XLA writes the unpacked codes to memory before it decodes them.
        return _decode_either(fmt, kind.length, cuda.capability())(matrix), matrix.tensor_scale
    return _decoded_by_xla(matrix, fmt, kind.length)


@lru_cache(maxsize=256)
def _decode_either(fmt: ScaledFormat, length: int, chip: tuple[int, int] | None) -> Callable[..., Array]:
    def by_kernel(matrix: Matrix) -> Array:
        from microfloat.jax.backends import program

        return program.decode_by_kernel(matrix, fmt, length, cast(tuple[int, int], chip))

    return kernels.on_either(by_kernel, lambda matrix: _decoded_by_xla(matrix, fmt, length)[0])


def _decoded_by_xla(matrix: Matrix, fmt: ScaledFormat, length: int) -> tuple[Array, Array | None]:
    if fmt.scale.name != "E8M0" or fmt.element.name not in FLOAT8:
        values, outer = reference.factored_values(matrix, fmt, length)
        return values.astype(jnp.bfloat16), outer
    # 2^(byte - 127) is a bfloat16, 2^-127 a subnormal one, which a GPU keeps.
    byte = matrix.scale.astype(jnp.uint16)
    bits = where(byte == 255, np.uint16(0x7FC0), where(byte == 0, np.uint16(0x40), byte << 7))
    tiles = to_tiles(matrix.codes, fmt.block).astype(jnp.bfloat16)
    scaled = tiles * spread(lax.bitcast_convert_type(bits, jnp.bfloat16))
    return from_tiles(scaled, (matrix.codes.shape[0], length)), None


def _mx(a: Matrix, b: Matrix, kind_a: Kind, kind_b: Kind) -> Array:
    """Codes and scales as `jax.nn.scaled_matmul` wants them: one batch axis, K last, one scale per row and block."""
    rows, cols = a.codes.shape[0], b.codes.shape[0]
    data_a, scale_a = _mx_operand(a, kind_a)
    data_b, scale_b = _mx_operand(b, kind_b)
    product = jax.nn.scaled_matmul(data_a, data_b, scale_a, scale_b, preferred_element_type=jnp.float32)
    return reference.apply_outer(product[0, :rows, :cols], a.tensor_scale, b.tensor_scale)


def _mx_operand(matrix: Matrix, kind: Kind) -> tuple[Array, Array]:
    """(data [1, R, K], scales [1, R, K / block]) with K padded to whole blocks (codes 0, scale 1) and rows to 128."""
    fmt, block = kind.format, cast(int, kind.format.block[1])  # 32 or 16: see `microfloat.routes`
    codes = reference.code_bytes(matrix.codes, fmt.element, kind.length)
    scale = matrix.scale
    if fmt.is_tile:
        scale = jnp.repeat(scale, cast(int, fmt.block[0]), axis=0)[: codes.shape[0]]
    extra_rows, extra_cols = -codes.shape[0] % 128, -codes.shape[1] % (4 * block)
    codes = lax.pad(codes, np.uint8(0), ((0, extra_rows, 0), (0, extra_cols, 0)))
    one, scale_dtype = (127, jnp.float8_e8m0fnu) if fmt.scale.name == "E8M0" else (0x38, jnp.float8_e4m3fn)
    missing = codes.shape[1] // block - scale.shape[1]
    scale = lax.pad(scale, np.uint8(one), ((0, extra_rows, 0), (0, missing, 0)))
    data = reference.as_code_dtype(codes, fmt.element)
    if fmt.element.bits == 4:
        data = lax.bitcast_convert_type(data, jnp.float4_e2m1fn).reshape(codes.shape)
    return data[None], lax.bitcast_convert_type(scale, scale_dtype)[None]
