"""Element formats of a user's own, for the tests of every front end."""

import numpy as np

from microfloat.formats import ElementFormat


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
