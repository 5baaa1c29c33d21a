"""Both forms of functions of the kernels on the same values, hardware forms in the interpreter (tests/ptx).

A GPU compares them on all float32 (`selfcheck`); here on those around every boundary of the formats, and random ones.
"""

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from microfloat.formats import ELEMENTS
from microfloat.kernels.device import convert, scales
from microfloat.kernels.device import packed as packed_words
from microfloat.recipes import Cast
from microfloat.torch.launch import triton as backend
from tests.ptx import instructions, program

COUNT = 1 << 17
KINDS = {np.dtype(np.int32): tl.int32, np.dtype(np.float32): tl.float32}


def tensor(values):
    """An array as the kernels' functions take it."""
    kind = KINDS[values.dtype]
    return tl.tensor(TensorHandle(values, kind), tl.block_type(kind, list(values.shape)))


def values_of(x):
    return x.handle.data


def floats(element):
    """float32 around the middles between neighbouring codes, among them the codes; of every binade; random ones."""
    bits = np.arange(1 << 16, dtype=np.int64) << 16  # every bfloat16
    middles = np.arange(0, 1 << 32, 1 << (22 - element.mantissa_bits))
    near = np.concatenate([middles - 1, middles, middles + 1])
    rest = np.random.default_rng(3).integers(0, 1 << 32, COUNT - len(bits) - len(near))
    patterns = (np.concatenate([bits, near, rest]) & 0xFFFFFFFF).astype(np.uint32)
    if element.bias < 7:  # for formats without NaN one has no sign, as products of the hardware have none
        patterns = np.where((patterns & 0x7FFFFFFF) > 0x7F800000, patterns & 0x7FFFFFFF, patterns)
    return patterns.view(np.float32)


def conversions(name, stochastic):
    """Codes of pairs and quads and their values: `cvt`, additions that round, products toward zero."""
    element = ELEMENTS[name]
    form = (element.mantissa_bits, element.bias, stochastic)
    rng = np.random.default_rng(4)
    x = floats(element)
    inputs = [tensor(v) for v in (x, np.roll(x, 1), np.roll(x, 1000), -x if element.bias >= 7 else np.roll(x, 77))]
    random = tensor(rng.integers(-(1 << 31), 1 << 31, COUNT).astype(np.int32))
    for function, arguments in ((convert.encode_pair, inputs[:2]), (convert.encode_quad, inputs)):
        got, want = (values_of(function(*arguments, random, *form, HW)) for HW in (True, False))
        compare(got, want, x)
    values = [convert.quantized_pair(*inputs[:2], random, random, *form, HW) for HW in (True, False)]
    for got, want in zip(*values, strict=True):
        compare(values_of(got).view(np.int32), values_of(want).view(np.int32), x, values_of(want))


def narrower():
    """bfloat16, its words, and the E4M3 scales of NVFP4."""
    x = floats(ELEMENTS["E4M3"])
    low, high = tensor(x), tensor(np.roll(x, 1))
    numbers = ~np.isnan(x) & ~np.isnan(np.roll(x, 1))
    for function, arguments in ((convert.bf16_bits, [low]), (convert.bf16_word, [low, high])):
        got, want = (values_of(function(*arguments, HW))[numbers] for HW in (True, False))
        compare(got, want, x[numbers])
    magnitude = tensor(np.abs(x))
    got, want = (values_of(convert.encode_e4m3_scale(magnitude, HW)) for HW in (True, False))
    compare(got, want, x)


def packed(name):
    """MX's codes of words of bfloat16, all of them in either half, in rows and in columns."""
    element = ELEMENTS[name]
    form = (element.mantissa_bits, element.bias)
    pattern = np.arange(1 << 16, dtype=np.int64)
    word = (pattern | (((pattern * 40503 + 12345) & 0xFFFF) << 16)).astype(np.uint32).view(np.int32).reshape(-1, 4)
    words = [packed_words.scale_word(tensor(word ^ np.int32(k * 0x20002000)), 0x3F803F80) for k in range(4)]
    halves = [[half(w, convert.WORDS_BF16) for w in words] for half in (convert.low_half, convert.high_half)]
    want = convert.encode_pair(halves[0][0], halves[1][0], 0, *form, False, False)
    compare(values_of(packed_words.packed_pairs(words[0], *form)), values_of(want), word)
    for got, column in zip(packed_words.packed_quads(*words, *form), halves, strict=True):
        want = convert.encode_quad(*column, 0, *form, False, False)
        compare(values_of(got), values_of(want), word)


def reciprocals():
    """`reciprocal_of_normal` is rounded correctly, though the approximation that it begins with errs by a unit.

    But for the largest significand, 2 - 2^-23: next to a middle between two floats, its reciprocal comes out right from
    an approximation that is not below it. That of a GPU is not (`count_reciprocal_differences` looks at all).
    """
    ends = np.arange(1 << 12)
    significands = np.concatenate([np.arange(0, 1 << 23, 37), ends, (1 << 23) - 1 - ends])
    significands = np.resize(significands, 1 << 18)  # a power of two
    usual = instructions.RECIPROCAL_ERROR
    try:
        for exponent in (1, 126, 127, 252):
            x = ((exponent << 23) | significands).astype(np.int32).view(np.float32)
            want = (np.float32(1) / x).view(np.int32)
            for error in (-1, 0, 1):
                instructions.RECIPROCAL_ERROR = error
                got = values_of(scales.reciprocal_of_normal(tensor(x))).view(np.int32)
                asked = slice(None) if error >= 0 else significands != (1 << 23) - 1
                compare(got[asked], want[asked], x[asked])
    finally:
        instructions.RECIPROCAL_ERROR = usual


def prefetched(name, shape, tile):
    """All lines of all tiles but the first are asked for, each once, and nothing outside the matrix."""
    x = torch.randn(shape).bfloat16()
    program.PREFETCHED.clear()
    backend.quantize_both(x, Cast(name), Cast(name))
    offsets = np.array(program.PREFETCHED) - x.data_ptr()
    rows, columns = offsets // (2 * shape[1]), offsets % (2 * shape[1]) // 2
    lines = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
    assert lines == [
        (row, column) for row in range(shape[0]) for column in range(0, shape[1], 64)
        if row >= tile[0] or column >= tile[1]
    ]  # fmt: skip


def compare(got, want, inputs, values=None):
    """Equal bits; where `values` are given, all NaN are one."""
    wrong = got != want
    if values is not None:
        wrong &= ~(np.isnan(got.view(np.float32)) & np.isnan(values))
    at = np.flatnonzero(wrong)
    assert got.dtype == want.dtype, (got.dtype, want.dtype)
    assert len(at) == 0, f"{len(at)} differ, the first of {inputs.reshape(-1)[at[0]]!r} (number {at[0]})"


def run(case):
    """Run ``(function name, arguments)``."""
    name, *arguments = case
    with np.errstate(all="ignore"):
        globals()[name](*arguments)
