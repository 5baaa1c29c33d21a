"""Element formats of a user's own, for the tests of every front end."""

import numpy as np

from microfloat.formats import E2M1, E2M3, SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat, ScaleFormat
from microfloat.recipes import Cast
from microfloat.scale_rules import ScaleRule, TwoLevel


def every_element():
    """Every split of 4 to 8 bits, with the biases at both ends and one between, and what its highest codes may be."""
    for bits in range(4, 9):
        for mantissa_bits in range(1, bits - 1):
            exponent_bits = bits - 1 - mantissa_bits
            top, last = (1 << exponent_bits) - 1, (1 << mantissa_bits) - 1
            whole = 1 << mantissa_bits
            for largest_exponent in (2, 7, 59):
                bias = top - largest_exponent
                if 1 - bias - mantissa_bits < -60:
                    continue
                all_codes = (whole + last) * 2.0 ** (largest_exponent - mantissa_bits)
                yield ElementFormat("mine", exponent_bits, mantissa_bits, bias, all_codes, False, False)
                below = all_codes - 2.0 ** (largest_exponent - mantissa_bits)
                yield ElementFormat("mine", exponent_bits, mantissa_bits, bias, below, False, True)
                if top > 1 and largest_exponent > 2:
                    yield ElementFormat("mine", exponent_bits, mantissa_bits, bias, all_codes / 2, True, True)


def wild_matrix() -> np.ndarray:
    """[6, 45] float32 with zeros, NaN, an infinity, and rows near both ends of float32."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((6, 45)) * np.exp(rng.standard_normal((6, 45)) * 3)).astype(np.float32)
    x[0] *= np.float32(1e30)
    x[1] *= np.float32(1e-36)
    x[2] *= np.float32(1e-10)
    x[3] = 0
    x[0, 0], x[4, 5], x[5, 6] = 3.4e38, np.nan, np.inf
    return x


INT4 = ElementFormat("INT4", 1, 2, bias=-1, max=7.0, has_inf=False, has_nan=False)
INT8 = ElementFormat("INT8", 1, 6, bias=-5, max=127.0, has_inf=False, has_nan=False)
E3M0 = ElementFormat("E3M0", 3, 0, bias=3, max=16.0, has_inf=False, has_nan=False)
UE5M3 = ScaleFormat("UE5M3", exponent_bits=5, mantissa_bits=3, bias=15)
UE3M2 = ScaleFormat("UE3M2", exponent_bits=3, mantissa_bits=2, bias=2)
E5M0 = ScaleFormat("E5M0", exponent_bits=5, mantissa_bits=0, bias=15)


def own_casts():
    """Casts whose scale format, scale rule or element is a user's own, of each kind of scale."""
    reach = UE5M3.element.max
    halved = ScaleRule("halved", UE5M3, two_level=TwoLevel.of(E2M1, UE5M3, headroom=0.5))
    by_error = TwoLevel(6 * reach, None, 0.0, reach, 6 * reach * 2.0**-109, True, "mse")
    searching = ScaleRule("searches", UE5M3, two_level=by_error)
    return {
        "one level": Cast(ScaledFormat("mine", E2M1, UE5M3, (1, 16))),
        "two levels": Cast(ScaledFormat("mine", INT4, UE5M3, (1, 16), "tensor")),
        "two levels of rows": Cast(ScaledFormat("mine", E2M3, SCALE_E4M3, (1, 32), "row"), rounding="stochastic"),
        "tiles": Cast(ScaledFormat("mine", INT8, UE3M2, (4, 8), "tensor"), rounding="stochastic"),
        "of the tensor": Cast(ScaledFormat("mine", E3M0, UE3M2, (None, None))),
        "headroom": Cast(ScaledFormat("mine", E2M1, UE5M3, (1, 16), "tensor"), halved),
        "searches": Cast(ScaledFormat("mine", E2M1, UE5M3, (2, 8), "tensor"), searching),
        "short powers": Cast(ScaledFormat("mine", E3M0, E5M0, (1, 16))),
        "threshold": Cast(ScaledFormat("mine", INT4, E5M0, (3, 5)), ScaleRule("t", E5M0, thresholds=0x300000)),
        "stock powers": Cast("mxfp8", ScaleRule("t", SCALE_E8M0, thresholds={"E4M3": 0x123456})),
        "ratio": Cast(ScaledFormat("mine", INT8, SCALE_FP32, (1, 32)), ScaleRule("r", SCALE_FP32, kind="ratio")),
    }  # fmt: skip
