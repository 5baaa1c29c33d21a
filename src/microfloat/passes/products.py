"""A few rows of x times a weight stored as codes, as passes (`microfloat.kernels.gemm.decode`)."""

from microfloat.formats import ScaledFormat
from microfloat.kernels.constants import DecodeCodes, DecodeCut
from microfloat.kernels.device import convert
from microfloat.kernels.gemm import decode
from microfloat.layout import Part
from microfloat.passes import MOST_DECODED_ROWS
from microfloat.passes.conversions import SCALE_KINDS
from microfloat.passes.matrix import INT32_MAX, At, Buffer, Device, Pass, Passes, specialization
from microfloat.passes.tables import Warps
from microfloat.recipes import Hadamard

__all__ = ["BIAS", "CODES", "LEVEL", "SCALE", "cut_of", "decode_passes", "fits", "stored_codes"]

# Positions in the table, besides At.SOURCE = x.
CODES, SCALE, LEVEL, BIAS = 3, 4, 5, 6
_X_KINDS = {"bfloat16": convert.WORDS_BF16.value, "float16": convert.WORDS_F16.value}
_CHUNK_BITS = 1024  # of a row's codes, which four lanes take in two halves
_WARPS_THAT_ORDER = 4
_SCALES_OF_BYTES = SCALE_KINDS["E8M0"], SCALE_KINDS["E4M3"]


def stored_codes(fmt: ScaledFormat, hadamard: Hadamard | None, level: str | None, length: int) -> DecodeCodes | None:
    """The stored codes of a weight [N, `length`] as the kernel reads them; None where it does not."""
    element, (height, width), scale = fmt.element, fmt.block, SCALE_KINDS[fmt.scale.name]
    bits = 4 if element.codes_per_byte == 2 else 8
    read = {
        "FP32": bits == 8 and width in (None, 128),
        "E8M0": width == 32,
        "E4M3": bits == 4 and width == 16,
    }[fmt.scale.name]
    if not read or hadamard is not None or length * bits % 128:
        return None
    return DecodeCodes(element.mantissa_bits, element.bias, bits, scale, height or 1, width or 0, level is not None)


def decode_passes(
    codes: DecodeCodes, shape: tuple[int, int, int], dtypes: tuple[str, str, str | None],
    scale_strides: tuple[int, int], level_stride: int, device: Device,
) -> Passes:  # fmt: skip
    """The passes of y [M, N] from x [M, K] and codes [N, K]; `dtypes`: of x, of y and of a bias, None without one.

    `level_stride`: 1 for a tensor scale of each row, 0 for one or none.
    """
    (m, k, n), (x_dtype, dtype, bias) = shape, dtypes
    passes = Passes(1)
    out = passes.put(0, Part((m, n), (n, 1), dtype))
    cut = cut_of(codes, shape, scale_strides, bias is not None, device.multiprocessors)
    hardware, kind = device.number >= 0, _X_KINDS[x_dtype]
    about, x = (device.number, dtypes, codes, cut), At.SOURCE
    if cut.ORDERED:
        steps = 2 * cut.LENGTH_WARPS * -(-k * codes.BITS // (_CHUNK_BITS * cut.LENGTH_WARPS))  # halves of chunks
        items = steps * cut.TOKENS * (16 // codes.BITS)
        words = items * 128 * (1 if x_dtype == "bfloat16" else 2)
        x = passes.add(Buffer((words,), (1,), "int32"))
        scalars = (m, k // 8)
        passes.launches.append(Pass(
            decode.decode_order, (*about, *map(specialization, scalars[1:])), -(-items // _WARPS_THAT_ORDER),
            (At.SOURCE, x), scalars, (cut, codes.BITS, kind, hardware, _WARPS_THAT_ORDER), Warps(_WARPS_THAT_ORDER),
        ))  # fmt: skip
    inputs = SCALE, LEVEL if codes.LEVEL else At.NOTHING, At.NOTHING if bias is None else BIAS
    scalars = (m, n, k // 8, k * codes.BITS // 128, *scale_strides, level_stride)
    passes.launches.append(Pass(
        decode.decode_gemm, (*about, *map(specialization, scalars[1:])), -(-n // (16 * cut.TILES * cut.ROW_WARPS)),
        (x, CODES, *inputs, out), scalars, (codes, cut, kind, hardware, device.conversions),
        Warps(cut.ROW_WARPS * cut.LENGTH_WARPS),
    ))  # fmt: skip
    return passes


def cut_of(
    codes: DecodeCodes, shape: tuple[int, int, int], scale_strides: tuple[int, int], bias: bool, processors: int
) -> DecodeCut:
    """The division of a product of M, K, N among programs: chosen among a few dozen on an H200.

    Small programs, so that several of a multiprocessor wait at different times; more warps along K where rows of the
    weight are few, and more rows of a program where they are many and x is long.
    """
    m, k, n = shape
    tokens = 1 if m <= 8 else 2 if m <= 16 else 4 if m <= 32 else 8
    many, few = n >= 128 * processors, n < 48 * processors
    rows, length, tiles, stages, ahead = 1, 4, 1, 3, {1: 8, 2: 4, 4: 2, 8: 2}[tokens]
    if few and tokens in (2, 4):
        ahead *= 2
    elif tokens == 2 and many:
        length, tiles = 2, 2
    elif tokens == 8 and not few:
        rows, length, tiles, ahead = 2, 2, *((2, 1) if many else (1, 2))
    if n < 16 * processors:
        length = 8
    chunks = -(-k * codes.BITS // _CHUNK_BITS)
    while length > 1 and length > chunks:
        length //= 2
    even = k * codes.BITS % (_CHUNK_BITS * length) == 0
    stride_r, stride_k = scale_strides
    wide = codes.SCALE in _SCALES_OF_BYTES and stride_k == 1 and stride_r % 4 == 0
    return DecodeCut(rows, length, tiles, tokens, stages, ahead, bias, even, wide, tokens > 1)


def fits(codes: DecodeCodes, shape: tuple[int, int, int]) -> bool:
    """True where the kernel serves a product of M, K, N: few rows of x, and offsets of 32 bits."""
    m, k, n = shape
    return m <= MOST_DECODED_ROWS and n * k * codes.BITS // 32 <= INT32_MAX
