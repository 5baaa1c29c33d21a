"""From the amax of a block to its stored scale and encode factor (docs/numerics.md, section 2).

An amax travels as the bits of |x| (int32): as integers they order like magnitudes, and NaN is the largest. Every function
returns ``(stored, factor)``: what is written for the block, and the float32 that its elements are multiplied by.
"""

import triton
import triton.language as tl

from microfloat.kernels._convert import bits_of, float_of

# Families of scale rules, as constants of a compiled kernel.
E8M0 = tl.constexpr(0)
FP32 = tl.constexpr(1)


@triton.jit
def e8m0_scale(amax_bits, EMAX: tl.constexpr, THRESHOLD: tl.constexpr):
    """MX: the byte ``E - emax + (M >= threshold)`` and ``2^(127 - byte)``; 255 and NaN for a NaN or Inf in the block.

    Adding 2^23 - threshold to the bits carries into the exponent exactly where the mantissa reaches the threshold.
    """
    bad = amax_bits >= 0x7F800000
    byte = tl.maximum(((amax_bits + (0x800000 - THRESHOLD)) >> 23) - EMAX, 0)
    stored = tl.where(bad, 255, byte)
    factor = float_of(tl.where(bad, 0x7FC00000, (254 - byte) << 23))
    return stored, factor


@triton.jit
def fp32_scale(amax_bits, epsilon, MAX: tl.constexpr, POW2: tl.constexpr):
    """FP32 scales: ``s = f32(max / A)``, stored ``f32(1 / s)``; A = 0 and A = Inf give 1. NaN is already dropped.

    With `POW2` s is rounded down to a power of two, which needs no division: max is 1.75 * 2^emax, and
    ``f32(1.75 / m) < 1`` exactly where the mantissa of A is above 1.75.
    """
    amax = tl.maximum(float_of(amax_bits), epsilon)
    plain = (amax == 0.0) | (amax == float("inf"))
    if POW2:
        EMAX: tl.constexpr = 8 if MAX == 448.0 else 15
        exponent = (bits_of(amax) + (0x800000 - 0x600001)) >> 23
        exponent = tl.maximum(exponent - EMAX, 1)  # that of A / max as a power of two, biased; at least 2^-126
        exponent = tl.where(plain, 127, exponent)
        return float_of(exponent << 23), float_of((254 - exponent) << 23)
    else:
        SMALLEST: tl.constexpr = MAX * 2.0**-126
        factor = tl.where(plain, 1.0, tl.div_rn(MAX, tl.maximum(amax, SMALLEST)))
        return tl.div_rn(1.0, factor), factor
