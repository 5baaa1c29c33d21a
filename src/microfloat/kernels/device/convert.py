"""Encoding and decoding of elements, by integer arithmetic or by inline PTX with the same bits (docs/numerics.md 1.2).

`HW` = False uses integer arithmetic alone: Triton's interpreter runs it (its own casts do not round), and so do GPUs
without FP8 conversions. `HW` = True uses hardware conversions (compute capability 8.9 and newer) for 8-bit elements,
and float additions that round at the right bit for 6-bit and 4-bit ones. tests/kernels/selfcheck.py compares both forms
exhaustively on a GPU.

An element is given by its mantissa width `MB` and its exponent `BIAS`. Its sign bit is ``(BIAS + 1) << (MB + 1)``;
above its largest finite code E4M3 has one code (NaN), E5M2 four (Inf and NaN), others none. A *word* is an int32 of two
neighbouring 16-bit inputs, the first in the low half.
"""

import triton
import triton.language as tl


@triton.constexpr_function
def element_bits(mb, bias):
    """Number of bits of a code: sign, exponent (of bias 2^(e - 1) - 1) and mantissa."""
    return 1 + (bias + 1).bit_length() + mb


@triton.constexpr_function
def fp8_text(text, mb):
    """PTX for an FP8 element: `text` with the element's name in place of FP8."""
    return text.replace("FP8", "e4m3" if mb == 3 else "e5m2")


# Inputs are read one element at a time (any dtype, any strides), or as words of two bf16 or fp16 elements.
ELEMENTWISE = tl.constexpr(0)
WORDS_BF16 = tl.constexpr(1)
WORDS_F16 = tl.constexpr(2)


@triton.jit
def bits_of(x):
    """The 32 bits of a float32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """The float32 with these 32 bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def low_half(word, KIND: tl.constexpr):
    """The first element of a word as float32 (exact)."""
    if KIND == WORDS_F16:
        return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return float_of(word << 16)


@triton.jit
def high_half(word, KIND: tl.constexpr):
    """The second element of a word as float32 (exact)."""
    if KIND == WORDS_F16:
        return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return float_of(word & -65536)


@triton.jit
def packed_abs(word, KIND: tl.constexpr):
    """Halfwise magnitude of a word."""
    PTX: tl.constexpr = "abs.f16x2 $0, $1;" if KIND == WORDS_F16 else "abs.bf16x2 $0, $1;"
    return tl.inline_asm_elementwise(PTX, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.constexpr_function
def max_text(kind, ignore_nan, sign_and_abs=""):
    """PTX of a halfwise maximum of two words, of magnitudes with `sign_and_abs` ".xorsign.abs"."""
    nan = "" if ignore_nan else ".NaN"
    return f"max{nan}{sign_and_abs}.{'f16x2' if kind == WORDS_F16 else 'bf16x2'} $0, $1, $2;"


@triton.jit
def packed_max(a, b, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise maximum of two words; NaN wins, or loses with IGNORE_NAN."""
    PTX: tl.constexpr = max_text(KIND, IGNORE_NAN)
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def packed_max_abs(a, b, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise maximum of the magnitudes of two words; the signs of the result are meaningless."""
    PTX: tl.constexpr = max_text(KIND, IGNORE_NAN, ".xorsign.abs")
    return tl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


# Reductions take functions of two arguments.


@triton.jit
def max_bf16x2_nan(a, b):
    """Halfwise maximum, NaN wins."""
    return packed_max(a, b, WORDS_BF16, False)


@triton.jit
def max_bf16x2(a, b):
    """Halfwise maximum, NaN loses."""
    return packed_max(a, b, WORDS_BF16, True)


@triton.jit
def max_f16x2_nan(a, b):
    """Halfwise maximum, NaN wins."""
    return packed_max(a, b, WORDS_F16, False)


@triton.jit
def max_f16x2(a, b):
    """Halfwise maximum, NaN loses."""
    return packed_max(a, b, WORDS_F16, True)


@triton.jit
def largest_of_four(rows, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise largest magnitude of the words of four rows, each given as (word, first, second)."""
    m = packed_max(packed_abs(rows[0][0], KIND), packed_abs(rows[1][0], KIND), KIND, IGNORE_NAN)
    n = packed_max(packed_abs(rows[2][0], KIND), packed_abs(rows[3][0], KIND), KIND, IGNORE_NAN)
    return packed_max(m, n, KIND, IGNORE_NAN)


@triton.jit
def packed_reduce(words, AXIS: tl.constexpr, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Halfwise maximum along an axis."""
    if KIND == WORDS_F16:
        if IGNORE_NAN:
            return tl.reduce(words, AXIS, max_f16x2)
        else:
            return tl.reduce(words, AXIS, max_f16x2_nan)
    elif IGNORE_NAN:
        return tl.reduce(words, AXIS, max_bf16x2)
    else:
        return tl.reduce(words, AXIS, max_bf16x2_nan)


@triton.jit
def drop_nan(magnitude_bits):
    """Bits of a magnitude, with NaN replaced by zero."""
    return tl.where(magnitude_bits > 0x7F800000, 0, magnitude_bits)


@triton.jit
def magnitude_bits(x, IGNORE_NAN: tl.constexpr):
    """Bits of |x|, which order like the magnitudes; NaN is above Inf, or zero with IGNORE_NAN."""
    a = bits_of(x) & 0x7FFFFFFF
    if IGNORE_NAN:
        a = drop_nan(a)
    return a


@triton.jit
def larger_half(words, KIND: tl.constexpr, IGNORE_NAN: tl.constexpr):
    """Bits of the larger half of words of magnitudes; with IGNORE_NAN a half that is NaN counts as zero."""
    low, high = bits_of(low_half(words, KIND)), bits_of(high_half(words, KIND))
    if IGNORE_NAN:
        low, high = drop_nan(low), drop_nan(high)
    return tl.maximum(low, high)


@triton.jit
def bf16_bits(x, HW: tl.constexpr):
    """Bits of a float32 rounded to bfloat16 (nearest even, NaN quiet), in the low half of an int32."""
    if HW:
        return x.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    else:
        b = bits_of(x)
        rounded = ((b + 0x7FFF + ((b >> 16) & 1)) >> 16) & 0xFFFF
        return tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def round_bf16(x, HW: tl.constexpr):
    """The float32 value of x rounded to bfloat16."""
    if HW:
        return x.to(tl.bfloat16).to(tl.float32)
    else:
        return float_of(bf16_bits(x, HW) << 16)


@triton.jit
def stored(x, dtype: tl.constexpr, HW: tl.constexpr):
    """float32 values rounded to the dtype in which they are stored, nearest even."""
    if dtype == tl.bfloat16:
        x = round_bf16(x, HW)
    return x.to(dtype)


@triton.jit
def bf16_word(low, high, HW: tl.constexpr):
    """Two float32 values as one word of bfloat16."""
    if HW:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        return bf16_bits(low, HW) | (bf16_bits(high, HW) << 16)


@triton.jit
def encode_integer(y, random, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """Code of y by integer arithmetic: nearest even, or STOCHASTIC: up if ``floor(256 * fraction) + random >= 256``."""
    SIGN: tl.constexpr = (BIAS + 1) << (MB + 1)
    MAX_CODE: tl.constexpr = SIGN - 1 - (1 if BIAS == 7 else (4 if BIAS == 15 else 0))
    b = bits_of(y)
    a = b & 0x7FFFFFFF
    field = a >> 23
    significand = (a & 0x7FFFFF) | tl.where(field > 0, 0x800000, 0)
    exponent = tl.maximum(field, 1) - 127
    local = tl.maximum(exponent, 1 - BIAS)
    shift = 23 - MB + (local - exponent)
    if STOCHASTIC:
        # A shift of 32 or more leaves neither integer nor fraction; clamping the shift would leave both (numerics 5.4).
        small = tl.minimum(shift, 31)
        fraction = (significand & ((1 << small) - 1)) >> (small - 8)
        count = (significand >> small) + tl.where(fraction + random >= 256, 1, 0)
        count = tl.where(shift >= 32, 0, count)
    else:
        small = tl.minimum(shift, 25)
        count = (significand + (1 << (small - 1)) - 1 + ((significand >> small) & 1)) >> small
    code = tl.where(count < (1 << MB), count, ((local + BIAS - 1) << MB) + count)
    code = tl.where(a >= 0x7F800000, MAX_CODE, tl.minimum(code, MAX_CODE))
    code = code | tl.where(b < 0, SIGN, 0)
    return tl.where(a > 0x7F800000, SIGN - 1, code)


@triton.jit
def encode_by_addition(y, MB: tl.constexpr, BIAS: tl.constexpr):
    """Nearest-even code of a 6-bit or 4-bit element: adding 2^(23 - MB) local steps rounds to a whole step.

    A NaN becomes the largest code. Its sign bit must be clear, as it is in results of hardware multiplications.
    """
    SIGN: tl.constexpr = (BIAS + 1) << (MB + 1)
    MAX: tl.constexpr = (2.0 - 1.0 / (1 << MB)) * (2 << BIAS)
    MIN_NORMAL: tl.constexpr = 2.0 / (1 << BIAS)
    magnitude = tl.minimum(tl.abs(y), MAX)
    binade = bits_of(tl.maximum(magnitude, MIN_NORMAL)) & 0x7F800000
    unit = binade + ((23 - MB) << 23)
    count = bits_of(magnitude + float_of(unit)) - unit
    code = count + (binade >> (23 - MB)) - ((128 - BIAS) << MB)
    return code | ((bits_of(y) >> 31) & SIGN)


@triton.jit
def multiply_toward_zero(x, y):
    """x * y rounded toward zero, also where the product is subnormal."""
    return tl.inline_asm_elementwise("mul.rz.f32 $0, $1, $2;", "=r,r,r", [x, y], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def encode_stochastic_hw(y, random, MB: tl.constexpr, BIAS: tl.constexpr):
    """Stochastic code of y: the bits of ``|y| * 2^(BIAS - 127)`` are the code with 23 - MB fraction bits behind it."""
    SIGN: tl.constexpr = (BIAS + 1) << (MB + 1)
    MAX_CODE: tl.constexpr = SIGN - 1 - (1 if BIAS == 7 else (4 if BIAS == 15 else 0))
    FACTOR: tl.constexpr = 2.0 ** (BIAS - 127)
    scaled = bits_of(multiply_toward_zero(tl.abs(y), FACTOR))
    code = tl.minimum((scaled + (random << (15 - MB))) >> (23 - MB), MAX_CODE)
    code = code | ((bits_of(y) >> 31) & SIGN)
    return tl.where(scaled > 0x7F800000, SIGN - 1, code)


@triton.jit
def encode(y, random, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """Code of y as int32, for conversions that do not take two or four elements at once."""
    if HW and STOCHASTIC:
        return encode_stochastic_hw(y, random, MB, BIAS)
    elif HW and BIAS < 7:
        return encode_by_addition(y, MB, BIAS)
    else:
        return encode_integer(y, random, MB, BIAS, STOCHASTIC)


@triton.jit
def cvt_pair(low, high, MB: tl.constexpr):
    """Two FP8 codes of two floats as int16, by hardware."""
    PTX: tl.constexpr = fp8_text(
        "{ .reg .b16 a, b; cvt.rn.satfinite.FP8x2.f32 a, $3, $1; cvt.rn.satfinite.FP8x2.f32 b, $4, $2; "
        "mov.b32 $0, {a, b}; }",
        MB,
    )
    return tl.inline_asm_elementwise(PTX, "=r,r,r,r,r", [low, high], dtype=tl.int16, is_pure=True, pack=2)


@triton.jit
def cvt_quad(a, b, c, d, MB: tl.constexpr):
    """Four FP8 codes of four floats as int32, by hardware."""
    PTX: tl.constexpr = fp8_text(
        "{ .reg .b16 p, q; cvt.rn.satfinite.FP8x2.f32 p, $2, $1; cvt.rn.satfinite.FP8x2.f32 q, $4, $3; "
        "mov.b32 $0, {p, q}; }",
        MB,
    )
    return tl.inline_asm_elementwise(PTX, "=r,r,r,r,r", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def encode_pair(low, high, random, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """Stored codes of two neighbours along the contraction axis: int16 of two bytes, or int8 of two nibbles (4 bit).

    `random` holds a random byte for `low` in bits 0..7, for `high` in bits 8..15.
    """
    if HW and not STOCHASTIC and BIAS >= 7:
        return cvt_pair(low, high, MB)
    else:
        a = encode(low, random & 0xFF, MB, BIAS, STOCHASTIC, HW)
        b = encode(high, (random >> 8) & 0xFF, MB, BIAS, STOCHASTIC, HW)
        if element_bits(MB, BIAS) == 4:
            return (a | (b << 4)).to(tl.int8)
        else:
            return (a | (b << 8)).to(tl.int16)


@triton.jit
def encode_quad(a, b, c, d, random, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, HW: tl.constexpr):
    """Stored codes of four neighbours along the contraction axis: int32 of bytes, or int16 of nibbles (4 bit).

    `random` holds four random bytes, the first in bits 0..7.
    """
    if HW and not STOCHASTIC and BIAS >= 7:
        return cvt_quad(a, b, c, d, MB)
    else:
        p = encode(a, random & 0xFF, MB, BIAS, STOCHASTIC, HW)
        q = encode(b, (random >> 8) & 0xFF, MB, BIAS, STOCHASTIC, HW)
        r = encode(c, (random >> 16) & 0xFF, MB, BIAS, STOCHASTIC, HW)
        s = encode(d, (random >> 24) & 0xFF, MB, BIAS, STOCHASTIC, HW)
        if element_bits(MB, BIAS) == 4:
            return (p | (q << 4) | (r << 8) | (s << 12)).to(tl.int16)
        else:
            return p | (q << 8) | (r << 16) | (s << 24)


@triton.jit
def decode(code, MB: tl.constexpr, BIAS: tl.constexpr):
    """Exact float32 value of one code (int32): the shifted bits of a code are its value times 2^(BIAS - 127)."""
    SIGN: tl.constexpr = (BIAS + 1) << (MB + 1)
    magnitude = code & (SIGN - 1)
    FACTOR: tl.constexpr = 2.0 ** (127 - BIAS)
    value = float_of(magnitude << (23 - MB)) * FACTOR
    if BIAS == 7:
        value = tl.where(magnitude == 0x7F, float("nan"), value)
    if BIAS == 15:
        value = tl.where(magnitude == 0x7C, float("inf"), tl.where(magnitude > 0x7C, float("nan"), value))
    SHIFT: tl.constexpr = 32 - element_bits(MB, BIAS)
    return float_of(bits_of(value) | ((code & SIGN) << SHIFT))  # a minus sign would turn -0 into 0 - 0


@triton.jit
def encode_e4m3_scale(value, HW: tl.constexpr):
    """E4M3 byte (int32) of a non-negative float32, saturating, for block scales of NVFP4."""
    if HW:
        PTX: tl.constexpr = "{ .reg .b16 p; cvt.rn.satfinite.e4m3x2.f32 p, 0f00000000, $1; mov.b32 $0, {p, 0}; }"
        return tl.inline_asm_elementwise(PTX, "=r,r", [value], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return encode_integer(value, 0, 3, 7, False)


@triton.jit
def round_by_addition(y, MB: tl.constexpr, BIAS: tl.constexpr):
    """``decode(encode_by_addition(y))`` without forming the code."""
    MAX: tl.constexpr = (2.0 - 1.0 / (1 << MB)) * (2 << BIAS)
    MIN_NORMAL: tl.constexpr = 2.0 / (1 << BIAS)
    magnitude = tl.minimum(tl.abs(y), MAX)
    binade = bits_of(tl.maximum(magnitude, MIN_NORMAL)) & 0x7F800000
    unit = float_of(binade + ((23 - MB) << 23))
    value = (magnitude + unit) - unit
    return float_of(bits_of(value) | (bits_of(y) & -2147483648))


@triton.jit
def cvt_values(low, high, MB: tl.constexpr):
    """Two floats rounded to FP8 and decoded, by hardware."""
    PTX: tl.constexpr = fp8_text(
        "{ .reg .b16 p, a, b; .reg .b32 h; cvt.rn.satfinite.FP8x2.f32 p, $3, $2; cvt.rn.f16x2.FP8x2 h, p; "
        "mov.b32 {a, b}, h; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
        MB,
    )
    return tl.inline_asm_elementwise(
        PTX, "=r,=r,r,r", [low, high], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
    )


@triton.jit
def quantized_pair(
    low, high, random_low, random_high, MB: tl.constexpr, BIAS: tl.constexpr, STOCHASTIC: tl.constexpr, HW: tl.constexpr
):
    """Values of the codes of two floats; `random_low` and `random_high` hold a random byte each in bits 0..7."""
    if HW and not STOCHASTIC and BIAS >= 7:
        return cvt_values(low, high, MB)
    elif HW and not STOCHASTIC:
        return round_by_addition(low, MB, BIAS), round_by_addition(high, MB, BIAS)
    else:
        a = encode(low, random_low & 0xFF, MB, BIAS, STOCHASTIC, HW)
        b = encode(high, random_high & 0xFF, MB, BIAS, STOCHASTIC, HW)
        return decode(a, MB, BIAS), decode(b, MB, BIAS)
