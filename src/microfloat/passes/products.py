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
_CHUNK_BITS = 512  # of a row's codes, which four lanes take at once
_TOGETHER = 512  # elements of y that a program of `decode_finish` sums


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
    cut = cut_of(codes, shape, bias is not None, device.multiprocessors)
    hardware = device.number >= 0
    sums = out if cut.SPLIT == 1 else passes.add(Buffer((cut.SPLIT, m, n), (m * n, n, 1), "float32"))
    about = (device.number, dtypes, codes, cut)
    inputs = SCALE, LEVEL if codes.LEVEL else At.NOTHING, At.NOTHING if bias is None else BIAS
    scalars = (m, n, k // 8, k * codes.BITS // 128, *scale_strides, level_stride)
    constants = (codes, cut, _X_KINDS[x_dtype], hardware, device.conversions)
    passes.launch(Pass(
        decode.decode_gemm, (*about, *map(specialization, scalars[1:])),
        -(-n // (16 * cut.TILES * cut.ROW_WARPS)) * cut.SPLIT, (At.SOURCE, CODES, *inputs, sums), scalars, constants,
        Warps(cut.ROW_WARPS * cut.LENGTH_WARPS),
    ))  # fmt: skip
    if cut.SPLIT > 1:
        scalars = (m, n, scale_strides[0], level_stride)
        passes.launch(Pass(
            decode.decode_finish, (*about, *map(specialization, scalars[1:])), m * -(-n // _TOGETHER),
            (sums, *inputs, out), scalars, (codes, cut, hardware, _TOGETHER),
        ))  # fmt: skip
    return passes


def cut_of(codes: DecodeCodes, shape: tuple[int, int, int], bias: bool, processors: int) -> DecodeCut:
    """The division of a product of M, K, N among programs: chosen among a few dozen on an H200.

    Few rows of x wait for the weight alone: small programs, and more warps along K where rows are few. More rows have
    x read again by every program, so programs take more rows of the weight and share K instead.
    """
    m, k, n = shape
    tokens = 1 if m <= 8 else 2 if m <= 16 else 4 if m <= 32 else 8
    tiles, split, stages = 1, 1, 2
    if tokens == 1:
        rows, length = 2, 4
        if n < 32 * 4 * processors:
            rows, length = (2, 8) if n >= 48 * processors else (1, 8 if codes.BITS == 4 else 16)
    elif tokens == 2:
        tiles, split = 2 if codes.BITS == 4 else 1, 4
        rows, length = 4, 1 if n * split >= 64 * tiles * 3 * processors // 2 else 2
    else:
        tiles, split, stages = 2, 8, 1
        rows, length = 4, 1
    chunks = -(-k * codes.BITS // _CHUNK_BITS)
    while split > 1 and split * length * stages > chunks:
        split //= 2
    while length > 1 and split * length * stages > chunks:
        length //= 2
    even = k * codes.BITS % (_CHUNK_BITS * split * length * stages) == 0
    return DecodeCut(rows, length, tiles, tokens, split, stages, bias, even)


def fits(codes: DecodeCodes, shape: tuple[int, int, int]) -> bool:
    """True where the kernel serves a product of M, K, N: few rows of x, and offsets of 32 bits."""
    m, k, n = shape
    return m <= MOST_DECODED_ROWS and n * k * codes.BITS // 32 <= INT32_MAX
