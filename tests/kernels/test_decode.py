"""Products of a few rows with stored codes: values of every format in the interpreter, and what compiles for GPUs."""

import itertools
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


@pytest.mark.slow_cases("codes that are read as those of another format are", cases=("mxfp8",))
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxfp8"])
def test_nan_blocks_give_nan(product, name):
    y, exact, _ = product((name, "ragged", "bfloat16", "nan"))
    assert np.isnan(exact[:, 1]).all()
    assert (np.isnan(y) == np.isnan(exact)).all()


def _groups(warps, tokens, bias, **further):
    return DecodeCut(warps, 1, 1, tokens, 0, 1, bias, True, True, True, WARPGROUPS=True, **further)


# M, N, K, x's dtype, cut of `decode_warpgroups`: rows of the weight and of x that are no whole tiles, with a bias;
# float16 by two warpgroups, in parts of K, of which the last has nothing; and parts of bfloat16, with a bias.
GROUPS = {
    "groups": (40, 100, 512, "bfloat16", _groups(4, 8, True)),
    "halves": (20, 130, 768, "float16", _groups(8, 4, False, SPLITS=4)),
    "parts of K": (33, 70, 768, "bfloat16", _groups(4, 8, True, SPLITS=2)),
}  # fmt: skip


def _wide_product(case):
    """As `_product`, by the passes that a Linear would run."""
    import microfloat.torch as mf
    from microfloat.passes import products
    from microfloat.passes.matrix import At
    from microfloat.routes import encoding_of
    from microfloat.torch.launch.program import Program, device_of

    name, kind, special = case
    m, n, k, dtype, cut = GROUPS[kind]
    generator = torch.Generator().manual_seed(len(name) + k)
    w, x = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator).to(getattr(torch, dtype))
    if special == "tiny":
        w, x = _at_the_least_scale(w, x, name)
    elif special == "nan":
        w[1, 3] = float("nan")
    weight = mf.quantize(w, name)
    operand, rhs = weight.to_operand(), encoding_of(weight.cast)
    bias = torch.randn(n, generator=generator) if cut.BIAS else None
    codes = products.stored_codes(rhs.format, rhs.hadamard, rhs.level, k)
    strides = tuple(operand.scale.stride()) if operand.scale.dim() == 2 else (0, 0)
    cut = products.fitted(cut, codes, k, strides, cut.BIAS)
    dtypes = dtype, dtype, None if bias is None else "float32"
    level_stride = int(rhs.level == "row")
    passes = products.decode_passes(codes, (m, k, n), dtypes, strides, level_stride, device_of(-1), None, cut)
    table = (None, x, None, operand.codes, operand.scale, operand.tensor_scale, bias)
    y = Program(passes, x.device).run(0, (*table, *(None,) * (At.MADE - len(table))))[0]
    values = weight.dequantize(torch.float64)
    exact, terms = x.double() @ values.T, x.double().abs() @ values.abs().T
    if bias is not None:
        exact, terms = exact + bias.double(), terms + bias.double().abs()
    return y.double().numpy(), exact.numpy(), terms.numpy(), [one.kernel.__name__ for one in passes.launches]


@pytest.fixture(scope="module")
def wide_product():
    return interpreting(_wide_product)


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


@pytest.mark.slow_cases(
    "further forms of the same kernel",
    cases=(
        "groups-*-nvfp4_*", "groups-*-mxfp4", "halves-*-nvfp4*", "halves-*-nvfp4_*", "parts*-nvfp4_*", "groups--*fp8*",
        "halves-*fp8*", "parts*", "*mxfp6*", "halves--mxfp4", "groups-nan-mxfp8", "groups-nan-fp8_tensor*",
    ),
)  # fmt: skip
@pytest.mark.parametrize(
    "name", ["nvfp4", "nvfp4_row", "nvfp4_2d", "mxfp4", "mxfp8", "mxfp6_e3m2", "fp8_row", "fp8_tensor_e5m2"]
)
@pytest.mark.parametrize(("kind", "special"), [("groups", ""), ("groups", "nan"), ("halves", ""), ("parts of K", "")])
def test_values_with_x_in_shared_memory(wide_product, name, kind, special):  # features I2
    y, exact, terms, names = wide_product((name, kind, special))
    _, _, k, dtype, cut = GROUPS[kind]
    bound = 2.0 ** (-8 if dtype == "bfloat16" else -11) * np.abs(exact) + k * 2.0**-23 * terms
    finite = np.isfinite(exact)
    assert (np.isnan(y) == ~finite).all()
    assert finite.all() is np.bool_(special != "nan")
    assert (np.abs(y - exact) <= bound)[finite].all()
    assert names == ["decode_order", "decode_warpgroups", "sum_parts"][: 3 if cut.SPLITS > 1 else 2]


@pytest.mark.parametrize("name", ["mxfp4"])
def test_small_scales_lose_nothing_by_warpgroups(wide_product, name):
    y, exact, terms, _ = wide_product((name, "groups", "tiny"))
    assert (np.abs(exact) > 0).all()
    bias = np.abs(exact) * 0 + 512 * 2.0**-23 * terms
    assert (np.abs(y - exact) <= 2.0**-8 * np.abs(exact) + bias).all()


def _written_too_early(instructions):
    """Instructions that write registers which a `wgmma` under way reads, or touch its sums."""
    under_way, wrong = [], []
    for line in instructions:
        registers = [int(number) for number in re.findall(r"\bR(\d+)\b", line)]
        if "HGMMA" in line:
            sums, left, *_ = registers
            under_way.append((range(left, left + 4), range(sums, sums + int(re.search(r"x(\d+)x16", line)[1]) // 2)))
        elif waited := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", line):
            under_way = under_way[-int(waited[1], 16) :] if int(waited[1], 16) else []
        elif registers:
            operation = line.lstrip("@!UPT0123456789 ").split(" ")[0]
            wide = 4 if ".128" in operation else 2 if ".64" in operation or ".WIDE" in operation else 1
            stores = operation.startswith(("ST", "LDGSTS", "ISETP", "R2UR", "WARPSYNC"))
            written = set() if stores else set(range(registers[0], registers[0] + wide))
            for read, sums in under_way:
                if written & set(read) or not {*registers, *written}.isdisjoint(sums):
                    wrong.append(line)
    return wrong


def _ordered_for_warpgroups(tokens, length):
    """Places of x in memory as `decode_order` writes them, each by its number in x [8 * tokens, length]."""
    from microfloat.kernels.gemm import decode

    cut = DecodeCut(4, 1, 1, tokens, 0, 1, False, True, True, True, WARPGROUPS=True)
    x = torch.arange(8 * tokens * length, dtype=torch.int16).view(torch.bfloat16).reshape(8 * tokens, length)
    items = 2 * (length // 256) * tokens * 4
    words = torch.zeros(items * 128, dtype=torch.int32)
    decode.decode_order[(items,)](x, None, words, 8 * tokens, length // 8, items, cut, 4, 1, False, 1)
    return words.view(torch.int16).numpy()


def test_the_matrix_descriptor_finds_x_where_it_is_written():
    """By the PTX ISA: core matrices of 8 tokens and 16 bytes without a swizzle, the next along K and along the tokens
    at two distances of the descriptor, in units of 16 bytes; and A's registers have k = 2t, 2t + 1, 2t + 8, 2t + 9.
    """
    from microfloat.kernels.gemm import warpgroups

    tokens, length = 4, 512
    memory = interpreting(_ordered_for_warpgroups)(tokens, length)
    text = warpgroups.text_of_products.fn(tokens, 8)
    along, across = (
        int(re.search(pattern, text)[1]) for pattern in (r"or\.b32 lo, lo, (\d+);", r"mov\.b32 hi, (\d+);")
    )
    assert re.search(r"and\.b32 lo, \$\d+, 0x3FFFF; shr\.u32 lo, lo, 4;", text)  # 14 bits
    (of_k16,) = {int(units) for units in re.findall(r"add\.u32 lo, lo, (\d+);", text)}
    assert f"m64n{8 * tokens}k16" in text
    for half, k16, token in itertools.product(range(length // 128), range(8), range(8 * tokens)):
        for k in range(16):
            units = half * 2048 * tokens // 16 + k16 * of_k16 + k // 8 * (along >> 16) + token // 8 * across
            found = int(memory[units * 8 + token % 8 * 8 + k % 8])
            t, code = k % 8 // 2, k % 2 * 4 + k // 8 + 2 * (k16 % 2)  # pairs of an element and the fourth behind it
            element = half * 128 + t * 32 + k16 // 2 * 8 + code
            assert found == token * length + element


def _compile_groups(kind, warps, tokens, splits):
    """The machine code of `decode_warpgroups`, and the shared memory that Triton itself would ask for."""
    from triton.runtime import driver

    from microfloat.kernels.gemm import warpgroups
    from microfloat.passes import products
    from tests.kernels.compiling import NamedTarget, instructions_of

    driver.set_active(NamedTarget(90))
    x, codes, one = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.uint8), torch.zeros(16)
    stride = 8192 // kind.WIDTH if kind.WIDTH else 1
    units = 8192 * kind.BITS // 128
    cut = products.by_warpgroups(warps, tokens, splits)
    cut = products.of_kernel(products.fitted(cut, kind, 8192, (stride, 1), False))
    compiled = warpgroups.decode_warpgroups.run(
        x.int(), codes, codes if kind.WIDTH else one, one if kind.LEVEL else None, None, one if splits > 1 else x, 64,
        8192, units, stride, 0, splits, kind, cut, 1, True, True, num_warps=warps, enable_fp_fusion=False, grid=(1,),
        launch_pdl=True, warmup=True,
    )  # fmt: skip
    return instructions_of(compiled.asm["cubin"]), compiled.metadata.shared


@pytest.mark.slow("machine code of twelve kernels")
@pytest.mark.parametrize(("warps", "tokens", "splits"), [(4, 8, 1), (8, 4, 2), (8, 16, 2)])
@pytest.mark.parametrize(
    "kind",
    [
        DecodeCodes(1, 1, 4, 2, 1, 16, True), DecodeCodes(1, 1, 4, 1, 1, 32, False),
        DecodeCodes(3, 7, 8, 1, 1, 32, False), DecodeCodes(3, 7, 8, 0, 1, 0, False),
    ],
    ids=["nvfp4", "mxfp4", "mxfp8", "fp8_row"],
)  # fmt: skip
def test_products_of_half_a_chunk_end_before_its_memory_is_used_again(kind, warps, tokens, splits):
    """The next copy of x waits for all warps, products wait for their own copy, and end before the warp says so; codes
    are read from shared memory before the next are copied there; neither is copied before earlier launches have ended;
    no register is written that products under way read; nothing is spilled; and Triton has no shared memory of its own,
    which would lie where x does."""
    compiled, of_triton = other_process()(_compile_groups, kind, warps, tokens, splits)
    assert of_triton == 0
    lines = [line.split("*/", 1)[-1].strip() for line in compiled]
    assert not [line for line in lines if re.search(r"\b(STL|LDL)\b", line)]
    assert not _written_too_early(lines)
    named = {
        "HGMMA": "multiply", "WARPGROUP.DEPBAR.LE gsb0, 0x0": "end", "SYNCS.ARRIVE.TRANS64.A1T0": "say",
        "SYNCS.PHASECHK": "wait", "UBLKCP": "copy",
    }  # fmt: skip
    (ended,) = (i for i, line in enumerate(lines) if "ACQBULK" in line)
    assert ended < min(i for i, line in enumerate(lines) if re.search(r"LDGSTS|UBLKCP|LDG\b", line))
    events, copies = [], [i for i, line in enumerate(lines) if "UBLKCP" in line]
    assert len(copies) == 4 + 2  # all stages at first, then one in each half
    for line in lines[copies[3] + 1 :]:
        if name := next((name for text, name in named.items() if text in line), None):
            barrier = re.search(r"\[U?R\d+(?:\+URZ)?(?:\+(0x[0-9a-f]+))?\]", line) if name in ("say", "wait") else None
            events.append((name, int(barrier[1] or "0", 16)) if barrier else name)
    # Barriers of copies come first.
    half = [("wait", 32), "copy", ("wait", 0), *["multiply"] * (32 // kind.BITS), "end", ("say", 32)]
    assert events[: 2 * len(half)] == half * 2
    assert {name for name, _ in events[2 * len(half) :]} == {"wait"}  # where one was in vain
    assert {re.search(r"HGMMA\.64x(\d+)x16", line)[1] for line in lines if "HGMMA" in line} == {str(8 * tokens)}
    first = next(i for i, line in enumerate(lines) if line.startswith("LDS.128"))  # what is before copies a first chunk
    named = {"LDS.128": "read", "LDGSTS.E.BYPASS.128": "copy"}
    events = [name for line in lines[first:] for text, name in named.items() if text in line]
    assert events == ["read", "read", "copy", "copy"] * 2


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


@pytest.mark.slow("machine code for three chips")
@pytest.mark.parametrize("capability", [80, 90, 120])
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
