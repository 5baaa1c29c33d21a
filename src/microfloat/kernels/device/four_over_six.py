"""four_over_six: per block (or 16 x 16 tile) the better of mapping its maximum to 6 and to 4 (docs/numerics.md 2.6).

The order of the additions is part of the definition, and no multiplication may be contracted with an addition.
"""

import triton
import triton.language as tl

from microfloat.kernels.device.convert import encode_e4m3_scale, float_of
from microfloat.kernels.device.fp4 import nearest_value
from microfloat.kernels.device.scales import FOUR_OVER_SIX_MSE, e4m3_factor


@triton.jit
def candidate(amax_bits, level, K: tl.constexpr, HW: tl.constexpr):
    """(stored byte, encode factor, dec(byte)) of one candidate, K = 1 or 1.5."""
    base = tl.div_rn(float_of(amax_bits), 6.0) * level.encode
    stored = encode_e4m3_scale(tl.minimum(base * K, 448.0), HW)
    factor, value = e4m3_factor(stored, level.decode, False, HW)
    return stored, factor, value


@triton.jit
def row_error(block, factor, value, amax, CAST: tl.constexpr, HW: tl.constexpr):
    """The left-to-right sum of the 16 errors of a block."""
    total = 0.0  # 0 + error is error
    for i in tl.static_range(16):
        v = nearest_value(block[i] * factor, HW)
        d = tl.div_rn((v * value) * amax, CAST.CAPACITY) - block[i]
        if CAST.RULE == FOUR_OVER_SIX_MSE:
            error = d * d
        else:
            error = tl.abs(d)
        if i == 0:
            total = error
        else:
            total = total + error
    return total


@triton.jit
def sum_tree(t, N: tl.constexpr, M: tl.constexpr):
    """[16 * N, M] errors of rows -> [N, M] of tiles: t[i] + t[i+8], then +4, +2, +1."""
    t = tl.sum(tl.reshape(t, [N, 2, 8, M]), 1)
    t = tl.sum(tl.reshape(t, [N, 2, 4, M]), 1)
    t = tl.sum(tl.reshape(t, [N, 2, 2, M]), 1)
    return tl.sum(tl.reshape(t, [N, 2, M]), 1)
