"""Products of a few rows with stored codes: values of every format in the interpreter, and what compiles for GPUs."""

import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from microfloat.kernels.constants import DecodeCodes, DecodeCut  # noqa: E402
from tests.interpreter import interpreting  # noqa: E402
from tests.processes import other_process  # noqa: E402

pytestmark = pytest.mark.xdist_group("triton-interpreter")

_FURTHER = pytest.mark.slow("further cuts of the same kernel")
FORMATS = (
    "nvfp4", "nvfp4_row", "nvfp4_2d", "mxfp4", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp8", "mxfp8_e5m2", "fp8_tensor",
    "fp8_row", "fp8_1x128", "fp8_128x128",
)  # fmt: skip
# M, N, K, cut: whole chunks with a bias; ragged in every size, warps that share rows and K, of which some have no last
# chunk; with x in order; scales in whole words of rows that end within a chunk; more chunks than are loaded ahead.
CASES = {
    "whole": (3, 40, 512, DecodeCut(1, 2, 1, 1, 3, 8, True, True, True, False)),
    "ragged": (11, 33, 544, DecodeCut(2, 2, 2, 2, 1, 3, False, False, False, False)),
    "ordered": (11, 33, 416, DecodeCut(2, 2, 2, 2, 2, 3, False, False, False, True)),
    "words": (5, 24, 384, DecodeCut(1, 1, 1, 1, 3, 1, True, False, True, False)),
    "long": (2, 16, 1312, DecodeCut(1, 1, 1, 1, 2, 8, False, False, False, False)),
}


_KINDS = {torch.bfloat16: 1, torch.float16: 2}  # which is also the number of bfloat16 parts


def _codes_of(operand):
    fmt = operand.format
    scale = {"FP32": 0, "E8M0": 1, "E4M3": 2}[fmt.scale.name]
    element, block = fmt.element, fmt.block
    bits, level = 4 if element.bits == 4 else 8, operand.tensor_scale is not None
    return DecodeCodes(element.mantissa_bits, element.bias, bits, scale, block[0] or 1, block[1] or 0, level)


def _before_nan(scale):
    """The same scales, behind which NaN lie: none of those is to be read."""
    nan = float("nan") if scale.dtype.is_floating_point else 0xFF
    memory = torch.full((scale.numel() + 64,), nan, dtype=scale.dtype)
    memory[: scale.numel()] = scale.flatten()
    return memory[: scale.numel()].view(scale.shape)


def _at_the_least_scale(w, x, name):
    """Weights whose scales are byte 0, 2^-127, and x so large that products are seen beside a bias."""
    import microfloat.torch as mf

    w, x = w * 2.0 ** (-127 if name == "mxfp4" else -124), x * 2.0**122
    assert (mf.quantize(w, name).to_operand().scale == 0).float().mean() > 0.5
    return w, x


def _product(case):
    """y of the kernel, the exact product, and the sum of the magnitudes of its terms; all float64."""
    import microfloat.torch as mf
    from microfloat.kernels.gemm import decode

    name, kind, dtype, special = case
    (m, n, k, cut), dtype = CASES[kind], getattr(torch, dtype)
    generator = torch.Generator().manual_seed(len(name) + k)
    w, x = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator).to(dtype)
    if special == "tiny":
        w, x = _at_the_least_scale(w, x, name)
    elif special == "nan":
        w[1, 3] = float("nan")
    weight = mf.quantize(w, name)
    operand, bias = weight.to_operand(), torch.randn(n, generator=generator) if cut.BIAS else None
    scale, level, codes = operand.scale, operand.tensor_scale, _codes_of(operand)
    stride_r, stride_k = scale.stride() if scale.dim() == 2 else (0, 0)
    stride = level.stride(0) if level is not None and level.dim() else 0
    y = torch.full((m, n), float("inf"), dtype=dtype)
    rows, stored, kind = 16 * cut.TILES * cut.ROW_WARPS, operand.codes.view(torch.uint8), _KINDS[dtype]
    scale = _before_nan(scale)
    words = x
    if cut.ORDERED:
        chunks = cut.LENGTH_WARPS * -(-stored.shape[1] // (128 * cut.LENGTH_WARPS))
        items = 2 * chunks * cut.TOKENS * (16 // codes.BITS)
        words = torch.full((items, kind, 32, 4), 2**31 - 1, dtype=torch.int32)
        decode.decode_order[(items,)](x, None, words, m, k // 8, items, cut, codes.BITS, kind, False, 1)
    wide = cut._replace(WIDE=cut.WIDE and codes.SCALE != 0)
    decode.decode_gemm[(-(-n // rows),)](
        words, stored, scale, level, bias, None, y, m, n, k // 8, stored.shape[1] // 16, stride_r, stride_k, stride, 0,
        0, 1, codes, wide, kind, False, False,
    )  # fmt: skip
    values = weight.dequantize(torch.float64)
    exact = x.double() @ values.T
    terms = x.double().abs() @ values.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    return y.double().numpy(), exact.numpy(), terms.numpy()


@pytest.fixture(scope="module")
def product():
    return interpreting(_product)


@pytest.mark.slow_cases(
    "codes that are read as those of another format are",
    cases=(
        "long-*-nvfp4_*",
        "long-*-mxfp6_*",
        "long-*-mxfp8*",
        "long-*-fp8_tensor",
        "long-*-fp8_row",
        "long-*-fp8_1x128",
        "ragged-*-nvfp4_2d",
        "ragged-*-mxfp6_e3m2",
        "ragged-*-mxfp8_e5m2",
        "ragged-*-mxfp6*",
        "ragged-*-mxfp4",
        "ragged-*-fp8_1x128",
        "long-*-fp8_128x128",
        "ragged-*-fp8_128x128",
        "ragged-*-nvfp4_row",
        "long-*-mxfp4",
    ),
)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("ragged", "bfloat16"), ("long", "bfloat16"), pytest.param("whole", "float16", marks=_FURTHER)]
    + [pytest.param("ordered", "float16", marks=_FURTHER), pytest.param("words", "bfloat16", marks=_FURTHER)],
)
def test_values_of_every_format(product, name, kind, dtype):  # features I2
    y, exact, terms = product((name, kind, dtype, ""))
    # One rounding of y, and float32 sums of K exact products (docs/numerics.md 8.2).
    bound = 2.0 ** (-8 if dtype == "bfloat16" else -11) * np.abs(exact) + CASES[kind][2] * 2.0**-23 * terms
    assert (np.abs(y - exact) <= bound).all()


@pytest.mark.slow_cases("codes that are read as those of another format are", cases=("mxfp8",))
@pytest.mark.parametrize("name", ["mxfp4", "mxfp8"])
def test_small_scales_lose_nothing(product, name):
    y, exact, terms = product((name, "ragged", "bfloat16", "tiny"))
    assert (np.abs(exact) > 0).all()
    assert (np.abs(y - exact) <= 2.0**-8 * np.abs(exact) + CASES["ragged"][2] * 2.0**-23 * terms).all()


@pytest.mark.slow_cases("codes that are read as those of another format are", all_but=("mxfp4",))
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_nan_blocks_give_nan(product, name):
    y, exact, _ = product((name, "ragged", "bfloat16", "nan"))
    assert np.isnan(exact[:, 1]).all()
    assert (np.isnan(y) == np.isnan(exact)).all()


def _reads_behind(name):
    """Places behind codes and scales that a product reads, of as many chunks as warps along K, but loaded ahead."""
    from unittest import mock

    from triton.runtime import interpreter

    import microfloat.torch as mf
    from microfloat.passes import products
    from microfloat.passes.matrix import At
    from microfloat.routes import encoding_of
    from microfloat.torch.launch.program import Program, device_of

    n, cut = 16, DecodeCut(1, 2, 1, 1, 2, 2, False, False, False, False)
    k = 2 * (256 if "4" in name else 128)
    weight = mf.quantize(torch.randn(n, k), name)
    operand, rhs = weight.to_operand(), encoding_of(weight.cast)
    codes = products.stored_codes(rhs.format, rhs.hadamard, rhs.level, k)
    strides = tuple(operand.scale.stride()) if operand.scale.dim() == 2 else (0, 0)
    passes = products.decode_passes(
        codes, (3, k, n), ("bfloat16", "bfloat16", None), strides, int(rhs.level == "row"), device_of(-1), None,
        products.fitted(cut, codes, k, strides, False),
    )  # fmt: skip
    alone, walls = [], []
    for tensor in (operand.codes, operand.scale):
        with_wall = torch.zeros(tensor.numel() + 4096, dtype=tensor.dtype)
        with_wall[: tensor.numel()] = tensor.as_strided((tensor.numel(),), (1,))
        alone.append(with_wall.as_strided(tensor.shape, tensor.stride()))
        end = with_wall.data_ptr() + tensor.numel() * tensor.element_size()
        walls.append((end, end + 4096))
    found, load = [], interpreter._interpreter.load

    def watched(places, mask, *others):
        at = places[mask]
        found.extend(int(((at >= begin) & (at < end)).sum()) for begin, end in walls)
        return load(places, mask, *others)

    table = (None, torch.randn(3, k).bfloat16(), None, *alone, operand.tensor_scale)
    with mock.patch.object(interpreter._interpreter, "load", watched):
        Program(passes, torch.device("cpu")).run(0, (*table, *(None,) * (At.MADE - len(table))))
    return len(found) > 0, sum(found)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_128x128"])
def test_nothing_is_read_behind_the_weight(name):
    """Where K is shorter than what is loaded ahead; an allocator may have given the memory behind to nobody."""
    assert interpreting(_reads_behind)(name) == (True, 0)


def _compile(capability):
    """The layouts of what the tensor cores multiply, of an NVFP4 and an MXFP8 weight, and of experts; spilled
    registers."""
    from triton.runtime import driver

    from microfloat.kernels.gemm import decode
    from tests.kernels.compiling import NamedTarget, instructions_of

    driver.set_active(NamedTarget(capability))
    x, codes, one = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.uint8), torch.zeros(16)
    layouts, spilled = set(), []
    for kind, is_grouped in (
        (DecodeCodes(1, 1, 4, 2, 1, 16, True), False), (DecodeCodes(3, 7, 8, 1, 1, 32, False), False),
        (DecodeCodes(1, 1, 4, 2, 1, 16, True), True),
    ):  # fmt: skip
        cut = DecodeCut(2, 4, 2, 1, 3, 8, False, True, True, False, is_grouped)
        plan = torch.zeros(16, dtype=torch.int32) if is_grouped else None
        compiled = decode.decode_gemm.run(
            x, codes, codes, one, None, plan, x, 8, 8192, 1024, 64 * kind.BITS, 8192 // kind.WIDTH, 1, 0, 0, 0, 1, kind,
            cut, 1, True, capability >= 89, num_warps=8, enable_fp_fusion=False, grid=(1,), warmup=True,
        )  # fmt: skip
        text = compiled.asm["ttgir"]
        used = set(re.findall(r"mma\.sync[^\n]*tensor<256x[a-z0-9]+, (#\w+)>", text))
        layouts |= {line.split("<", 1)[1] for line in text.splitlines() if line.split(" ")[0] in used}
        spilled += [line for line in instructions_of(compiled.asm["cubin"]) if "STL" in line]
    return layouts, spilled


@pytest.mark.slow("machine code for four chips")
@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_lanes_hold_what_the_tensor_cores_read(capability):
    """Another layout would be a wrong product without a message: the instruction mixes what lanes of a warp hold."""
    layouts, spilled = other_process()(_compile, capability)
    one_per_lane = "{sizePerThread = [1], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>"
    assert layouts == {one_per_lane}
    assert not spilled


def _compile_shared(kind, tokens):
    """The loop's reads and copies of codes in shared memory, in their order, by their distance from a lane's place;
    what else it loads of codes; and spilled registers."""
    from triton.runtime import driver

    from microfloat.kernels.gemm import decode
    from tests.kernels.compiling import NamedTarget, instructions_of

    driver.set_active(NamedTarget(90))
    x, codes, one = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.uint8), torch.zeros(16)
    cut = DecodeCut(2, 4, 1, tokens, 0, 8, False, True, True, tokens > 1, False, True)
    compiled = decode.decode_gemm.run(
        x, codes, codes, one, None, None, x, 8, 8192, 1024, 256, 8192 // kind.WIDTH, 1, 0, 0, 0, 1, kind, cut, 1, True,
        True, num_warps=8, enable_fp_fusion=False, grid=(1,), launch_pdl=True, warmup=True,
    )  # fmt: skip
    lines = [line.split("*/", 1)[-1].strip() for line in instructions_of(compiled.asm["cubin"])]
    lines = [re.sub(r"^@!?U?P\d+ ", "", line) for line in lines]
    first = next(i for i, line in enumerate(lines) if line.startswith("LDS"))  # what is before copies the first chunk
    spilled = [line for line in lines if line.startswith(("STL", "LDL"))]
    seen = []
    for line in lines[first:]:
        if line.startswith(("LDS.128", "LDGSTS.E.BYPASS.128")):
            place = re.search(r"\[R\d+(?:\+(0x[0-9a-f]+))?\]", line)
            seen.append((line.split(".")[0], int(place[1] or "0", 16)))
    return seen, [line for line in lines[first:] if line.startswith("LDG.E.NA.128")], spilled


@pytest.mark.slow("machine code of two kernels and two numbers of rows")
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(
    "kind", [DecodeCodes(1, 1, 4, 2, 1, 16, True), DecodeCodes(1, 1, 4, 1, 1, 32, False)], ids=["nvfp4", "mxfp4"]
)
def test_shared_memory_is_read_before_it_is_copied_to(kind, tokens):
    """Of each lane's four places: two rows, two halves. The copy of the next chunk would take the place of this one."""
    seen, others, spilled = other_process()(_compile_shared, kind, tokens)
    reads, copies = ([at for what, at in seen if what == name] for name in ("LDS", "LDGSTS"))
    assert sorted(reads) == sorted(copies)
    assert len(set(copies)) == 4
    for at in copies:
        assert seen.index(("LDS", at)) < seen.index(("LDGSTS", at))
    assert not others
    assert not spilled
