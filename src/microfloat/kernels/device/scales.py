"""Amax of a block -> stored scale and encode factor, inside a kernel, on int32 bits (docs/numerics.md, section 2).

An amax is passed as the bits of |x| (int32), which order like magnitudes; NaN is the largest. Functions return
``(stored, factor)``: the scale to write, and the float32 by which elements are multiplied.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from microfloat.kernels.device.convert import bits_of, encode_e4m3_scale, float_of

# Families of scale rules, as constants of a compiled kernel.
E8M0 = tl.constexpr(0)
FP32 = tl.constexpr(1)


@triton.jit
def e8m0_scale(amax_bits, BIAS: tl.constexpr, THRESHOLD: tl.constexpr):
    """MX scale: byte ``E - emax + (M >= threshold)`` and factor ``2^(127 - byte)``; 255 and NaN for a NaN or Inf.

    Adding 2^23 - threshold to the bits carries into the exponent exactly if the mantissa reaches the threshold.
    """
    EMAX: tl.constexpr = BIAS + (0 if BIAS == 15 else 1)
    bad = amax_bits >= 0x7F800000
    byte = tl.maximum(((amax_bits + (0x800000 - THRESHOLD)) >> 23) - EMAX, 0)
    stored = tl.where(bad, 255, byte)
    factor = float_of(tl.where(bad, 0x7FC00000, (254 - byte) << 23))
    return stored, factor


@triton.jit
def unless_infinite(scale, amax, GRADIENT: tl.constexpr):
    """Scale for a product: that of a GRADIENT is NaN where the amax is infinite, so that overflow shows."""
    if GRADIENT:
        return tl.where(amax == float("inf"), float("nan"), scale)
    else:
        return scale


@triton.jit
def fp32_scale(amax_bits, epsilon, CAST: tl.constexpr):
    """FP32 scale: factor ``s = f32(max / A)``, stored ``f32(1 / s)``; A = 0 and A = Inf give 1, and A is never NaN.

    A gradient stores NaN for A = Inf (docs/numerics.md 8.4). Under RULE 1 s is rounded down to a power of two without a
    division: max is 1.75 * 2^emax, and ``f32(1.75 / m) < 1`` exactly where the mantissa of A is above 1.75.
    """
    MAX: tl.constexpr = 448.0 if CAST.MB == 3 else 57344.0
    amax = tl.maximum(float_of(amax_bits), epsilon)
    plain = (amax == 0.0) | (amax == float("inf"))
    if CAST.RULE == 1:
        EMAX: tl.constexpr = 8 if MAX == 448.0 else 15
        exponent = (bits_of(amax) + (0x800000 - 0x600001)) >> 23
        exponent = tl.maximum(exponent - EMAX, 1)  # that of A / max as a power of two, biased; at least 2^-126
        exponent = tl.where(plain, 127, exponent)
        return unless_infinite(float_of(exponent << 23), amax, CAST.GRADIENT), float_of((254 - exponent) << 23)
    else:
        SMALLEST: tl.constexpr = MAX * 2.0**-126
        factor = tl.where(plain, 1.0, tl.div_rn(MAX, tl.maximum(amax, SMALLEST)))
        return unless_infinite(tl.div_rn(1.0, factor), amax, CAST.GRADIENT), factor


# Rules for the block scales of NVFP4, as constants of a compiled kernel.
TWO_LEVEL = tl.constexpr(0)  # a * f32(S * inverse_max)
TWO_LEVEL_DIVIDED = tl.constexpr(1)  # f32(a / 6) / tensor_scale, at least 2^-6
ONE_LEVEL = tl.constexpr(2)  # a / 6, at least 2^-6; no tensor scale
FOUR_OVER_SIX_MAE = tl.constexpr(3)
FOUR_OVER_SIX_MSE = tl.constexpr(4)


@triton.jit
def reciprocal(x, HW: tl.constexpr):
    """f32(1 / x), correctly rounded."""
    if HW:
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return tl.div_rn(1.0, x)


@triton.jit
def reciprocal_of_normal(x):
    """f32(1 / x), correctly rounded, for 2^-126 <= x < 2^126; NaN for 0."""
    PTX: tl.constexpr = (
        "{ .reg .f32 r, e; rcp.approx.ftz.f32 r, $1; neg.f32 e, $1; fma.rn.f32 e, e, r, 0f3F800000; "
        "fma.rn.f32 $0, r, e, r; }"
    )
    return tl.inline_asm_elementwise(PTX, "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


class Level(NamedTuple):
    """First-level scale of NVFP4: the clamped amax A, S = CAPACITY / A, f32(1 / S), A / CAPACITY, the stored scale."""

    amax: tl.tensor
    encode: tl.tensor
    decode: tl.tensor
    tensor_scale: tl.tensor
    stored: tl.tensor


@triton.jit
def tensor_level(amax, CAST: tl.constexpr):
    """First-level scale from the amax of a tensor or row."""
    CLAMP: tl.constexpr = (2688.0 if CAST.RULE < 3 else CAST.CAPACITY) * 2.0**-117
    plain = (amax == 0.0) | (amax == float("inf"))
    used = tl.where(plain, CAST.CAPACITY, tl.maximum(amax, CLAMP))
    encode = tl.div_rn(CAST.CAPACITY, used)
    tensor_scale = tl.div_rn(used, CAST.CAPACITY)
    decode, stored = tl.div_rn(1.0, encode), unless_infinite(tensor_scale, amax, CAST.GRADIENT)
    return Level(used, encode, decode, tensor_scale, stored)


@triton.jit
def fold_scales(a, b, TILE: tl.constexpr):
    """``2^-E`` and ``2^E`` of groups from the bytes of their blocks in two tensors, along axis 0 or (TILE) over all.

    ``E = max((B + 6) >> 3, 4) - 13`` of the largest byte B that is no NaN, which is 0x7F (docs/numerics.md 9.4).
    """
    largest = tl.max(tl.maximum((a + 1) & 0x7F, (b + 1) & 0x7F), 0)  # B + 1, 0 for NaN
    largest = tl.max(largest, 0) if TILE else largest[None, :]
    field = tl.maximum((largest + 5) >> 3, 4)
    return float_of((140 - field) << 23), float_of((114 + field) << 23)


@triton.jit
def e4m3_factor(stored, decode_level, LOWERED: tl.constexpr, HW: tl.constexpr):
    """Encode factor ``min(f32(1 / f32(dec(sb) * Sd)), FMAX)`` and dec(sb).

    LOWERED: the factor times 2^-14. A is at most 2^110 then, so the factor and its reciprocal are normal.
    """
    value = float_of(stored << 20) * 2.0**120
    if LOWERED:
        factor = reciprocal_of_normal(value * (decode_level * 2.0**14))
        return tl.minimum(factor, 3.4028234663852886e38 * 2.0**-14), value
    factor = reciprocal(value * decode_level, HW)
    return tl.minimum(factor, 3.4028234663852886e38), value


@triton.jit
def e4m3_scale(amax_bits, level, CAST: tl.constexpr, LOWERED: tl.constexpr, HW: tl.constexpr):
    """Block scale of NVFP4: stored byte, encode factor and dec(byte).

    A block with a NaN gives 0x7F and NaN, except that a LOWERED factor is unspecified. The byte of a GRADIENT without a
    first level is also 0x7F for a block with an infinity.
    """
    a = float_of(amax_bits)
    bad = amax_bits > 0x7F800000
    nan = float_of(tl.zeros_like(amax_bits) + 0x7FC00000)
    if CAST.RULE == TWO_LEVEL:
        t = a * (level.encode * CAST.INVERSE_SIX)
        if not LOWERED:
            t = tl.minimum(t, 3.4028234663852886e38)
        stored = encode_e4m3_scale(t, HW)
        factor, value = e4m3_factor(stored, level.decode, LOWERED, HW)
        if LOWERED:  # the conversion saturates, and makes 0x7F of a NaN, by itself
            return stored, factor, tl.where(bad, nan, value)
    else:
        t = tl.div_rn(a, 6.0)
        if CAST.RULE == TWO_LEVEL_DIVIDED:
            t = tl.div_rn(t, level.tensor_scale)
        stored = encode_e4m3_scale(tl.minimum(tl.maximum(t, 0.015625), 448.0), HW)
        value = float_of(stored << 20) * 2.0**120
        if CAST.RULE == TWO_LEVEL_DIVIDED:
            factor = tl.div_rn(tl.div_rn(1.0, level.tensor_scale), value)
        else:
            factor = tl.div_rn(1.0, value)
        if LOWERED:
            factor = factor * 2.0**-14
    factor = tl.where(bad, nan, factor)
    if CAST.GRADIENT and CAST.RULE == ONE_LEVEL:
        bad = amax_bits >= 0x7F800000
    return tl.where(bad, 0x7F, stored), factor, tl.where(bad, nan, value)
