"""The 1x128-scaled GEMM: what compiles for Hopper here, without a GPU, and its values on one.

Gluon has no interpreter, so there is nothing of it that a CPU could run.
"""

import ast
import inspect
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
triton = pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from microfloat import formats  # noqa: E402
from microfloat.chips import Chip  # noqa: E402
from microfloat.passes.matrix import Device  # noqa: E402
from microfloat.recipes import Cast, Gemm  # noqa: E402
from microfloat.routes import route_of  # noqa: E402
from microfloat.torch import backends, reference  # noqa: E402
from microfloat.torch.backends.base import Parts  # noqa: E402
from microfloat.torch.launch import block_gemm as own_gemm  # noqa: E402
from microfloat.torch.launch import gemms  # noqa: E402
from microfloat.torch.launch import program as programs  # noqa: E402
from microfloat.torch.launch.block_gemm import OWN_GEMMS, own_gemm_is_faster  # noqa: E402
from tests.contract.adapters import HOPPER_SPLIT  # noqa: E402
from tests.contract.comparison import SUBNORMAL_OUT, UNIT_OUT  # noqa: E402
from tests.processes import other_process  # noqa: E402

HOPPER = Chip((9, 0))
needs_kernel = pytest.mark.skipif(not own_gemm.own_gemm_is_there(), reason="needs Triton 3.6 with a new assembler")


def _compile(tiles, dtype, scales=None, fast=False, adds=False):
    """Instructions of the kernel as launched; the version of Triton's assembler afterwards. `scales`: of groups."""
    from triton import knobs
    from triton.runtime import driver

    from microfloat.kernels.gemm import block_gemm
    from tests.kernels.compiling import NamedTarget, instructions_of

    driver.set_active(NamedTarget(90))
    compiled = []

    class Compiler:
        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled.append(
                block_gemm.block_gemm.run(*arguments, **options, grid=grid, warmup=True)
            )

    class Anywhere:
        def __init__(self, device):
            pass

        __enter__ = __exit__ = lambda self, *exception: None

    a, b = (torch.zeros(1024, 1024).to(torch.float8_e4m3fn) for _ in range(2))
    scale, tile_scale = torch.zeros(8, 1024).t(), torch.zeros(8, 8).t()
    start = own_gemm.start
    with pytest.MonkeyPatch.context() as patch:  # the process serves other tests afterwards
        patch.setitem(programs.DEVICES, -1, programs.device_of(-1)._replace(multiprocessors=132))
        patch.setattr(torch.cuda, "device", Anywhere)
        patch.setattr(own_gemm, "start", lambda function, *rest: start(Compiler(), *rest))
        work, second = None, tile_scale if tiles else scale
        if scales is not None:
            table = torch.zeros(64, dtype=torch.int32)
            work, scale = own_gemm.GroupedWork(2, 8, table, (1024, 1024), scales, fast), torch.zeros(1024)
            a, second = a.float().to(torch.float8_e5m2), scale
        total = torch.zeros(1024, 1024) if adds else None
        work = work._replace(kind=own_gemm.ADDED) if work and adds else work
        own_gemm.own_block_matmul(a, scale, b.t(), second, dtype, tiles, work, total)
    return instructions_of(compiled[0].asm["cubin"]), knobs.nvidia.ptxas.version


@pytest.fixture(scope="module", params=[False, True], ids=["1x128", "128x128"])
def program(request):
    return request.param, other_process()(_compile, request.param, torch.bfloat16)


@pytest.mark.slow("machine code of further kernels for Hopper")
@needs_kernel
@pytest.mark.xdist_group("triton-interpreter")
def test_products_are_the_tensor_cores_and_sums_stay_in_registers(program):
    tiles, (instructions, _) = program
    words = [line.split() for line in instructions]
    operations = [line[line[0][0] == "@"].split(".")[0] for line in words]
    shape = OWN_GEMMS[tiles]
    chunks = shape.warpgroups * shape.parts
    assert operations.count("QGMMA") == 4 * chunks  # 32 of K each
    # An element of a partial sum takes one multiply-add for the row's factor and one for its column's.
    assert operations.count("FFMA") == chunks * 64 * (1 if tiles else 2)
    # None of the sums goes to memory inside a loop: what is stored there is a few addresses.
    assert sum(operation in ("STL", "LDL") for operation in operations) <= 16


@pytest.mark.slow("machine code of further kernels for Hopper")
@needs_kernel
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize(("scales", "fast"), [(2, False), (3, False), (3, True)], ids=["rows", "matrix", "fast"])
def test_scales_of_groups_multiply_whole_sums(scales, fast):  # features M7
    """Split sums take one addition an element of a partial sum, fast ones none; E5M2 gradients meet E4M3 weights."""
    instructions, _ = other_process()(_compile, False, torch.bfloat16, scales, fast)
    operations = [line.split()[line.startswith("@")].split(".")[0] for line in instructions]
    assert all("E5M2.E4M3" in line for line in instructions if "QGMMA" in line)
    chunks = OWN_GEMMS[False].warpgroups * OWN_GEMMS[False].parts
    assert operations.count("QGMMA") == 4 * chunks
    assert operations.count("FADD") == (0 if fast else chunks * 64)
    assert operations.count("FFMA") == 0
    assert not {"STL", "LDL"} & set(operations)  # sums stay in registers


@pytest.mark.slow("machine code of further kernels for Hopper")
@needs_kernel
@pytest.mark.xdist_group("triton-interpreter")
def test_memory_adds_a_product_to_what_is_there():
    instructions, _ = other_process()(_compile, False, torch.float32, 3, True, True)
    operations = [line.split()[line.startswith("@")].split(".")[0] for line in instructions]
    assert "UTMAREDG" in operations
    assert "UTMASTG" not in operations


def test_factors_of_partial_sums_multiply_in_operations_that_are_fused_by_name():
    """Neither library lets the compiler fuse, and between a product and a sum ptxas lets no other warp in."""
    from microfloat.kernels.gemm import block_gemm

    nodes = list(ast.walk(ast.parse(inspect.getsource(block_gemm))))
    waits = [
        node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "warpgroup_mma_wait"
    ]
    assert len(waits) > 4
    assert not [node for wait in waits for node in ast.walk(wait) if isinstance(node, ast.Mult)]


@needs_kernel
@pytest.mark.xdist_group("triton-interpreter")
def test_a_product_imports_nothing():
    """The host has microseconds for a product; what needs Triton is imported by the first one, once."""
    nodes = ast.walk(ast.parse(inspect.getsource(own_gemm.own_block_matmul)))
    assert not [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


@pytest.mark.slow("machine code of further kernels for Hopper")
def test_the_assembler_is_swapped_for_this_kernel_alone(program):
    from triton import knobs

    assert program[1][1] == knobs.nvidia.ptxas.version


@pytest.mark.parametrize(
    ("lhs", "rhs", "shape", "own"),
    [("fp8_tensor_e5m2", "fp8_tensor", (48, 32, 40), True), ("fp8_row", "fp8_row", (48, 32, 128), True),
     ("fp8_row", "fp8_row", (48, 32, 40), False), ("fp8_1x128", "fp8_1x128", (48, 160, 40), True),
     ("fp8_row", "fp8_tensor", (48, 32, 128), False), (None, None, (48, 32, 40), False)],
)  # fmt: skip
@pytest.mark.parametrize("accumulate", ["fast", "split"])
def test_a_product_that_is_added(monkeypatch, lhs, rhs, shape, own, accumulate):
    """The kernel adds to the total where it serves; else the product is made and added, with the same values."""
    works = []

    def added(a, a_scale, b, b_scale, dtype, tiles, work, total):
        works.append(work)
        return total.add_(plain(Parts(a, a_scale), Parts(b, b_scale), None))

    monkeypatch.setattr(own_gemm, "own_gemm_adds", lambda device, shape: True)
    monkeypatch.setattr(gemms, "own_block_matmul", added)
    monkeypatch.setattr(gemms, "scaled_mm_v2", None)
    by_blocks = lambda a, b, a_scale, _, b_scale, *__, output_dtype: _as_documented(  # noqa: E731
        a, a_scale, b, b_scale, output_dtype, False
    )
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", by_blocks)
    gemm = Gemm(*(one and Cast(one) for one in (lhs, rhs)), accumulate=accumulate)
    route, device = route_of(gemm, HOPPER), torch.device("cpu")
    plain = gemms.product(gemm, route, shape, None, torch.float32, device)
    multiply, (m, k, n) = gemms.sum_product(gemm, route, shape, device), shape
    torch.manual_seed(0)
    a, b = torch.randn(m, k), torch.randn(n, k)
    if lhs is None:
        parts = Parts(a), Parts(b)
    else:
        made = reference.quantize(a, gemm.lhs), reference.quantize(b, gemm.rhs)
        scales = [one.scale.t().contiguous().t() if one.scale.dim() else one.scale for one in made]
        turned = scales[1].t() if rhs == "fp8_row" else scales[1]
        parts = Parts(made[0].codes, scales[0]), Parts(made[1].codes.t(), turned)
    total = torch.ones(m, n)
    first, second = multiply(*parts, None), multiply(*parts, total)
    assert second is total
    assert torch.equal(first, plain(*parts, None))
    torch.testing.assert_close(total, 1 + first)
    kinds = {"fp8_row": 2, "fp8_tensor_e5m2": 3}
    wanted = own_gemm.GroupedWork(
        own_gemm.ADDED, 0, None, (m, n), kinds.get(lhs), accumulate == "fast" and lhs in kinds
    )
    assert works == ([wanted] if own else [])


class TestChoice:
    @pytest.fixture(autouse=True)
    def _products_are_made_anew(self):
        gemms.stored_product.cache_clear()

    def test_large_products_on_hopper(self):
        large = (16384, 4096, 14336)
        assert own_gemm_is_faster(large, False, HOPPER)
        for chip in (Chip((8, 9)), Chip((9, 4)), Chip((10, 0)), Chip((12, 0))):
            assert not own_gemm_is_faster(large, False, chip)
        for shape in ((1024, 1024, 1024), (16383, 4096, 14336), (16384, 4100, 14336), (16384, 4096, 14340)):
            assert not own_gemm_is_faster(shape, False, HOPPER)

    def test_rounds_that_are_nearly_empty_do_not_pay(self):
        rows, columns = OWN_GEMMS[False].tile
        whole = rows * 12, 2**20, columns * 11  # 132 tiles
        assert own_gemm_is_faster(whole, False, HOPPER)
        assert not own_gemm_is_faster((rows * 13, *whole[1:]), False, HOPPER)
        assert not own_gemm_is_faster(whole, False, HOPPER, processors=114)

    def test_only_where_the_kernel_can_be_built_and_gives_bfloat16(self, monkeypatch):
        large, device = (16384, 8192, 14336), torch.device("cuda:0")
        monkeypatch.setattr(backends, "chip_of", lambda device: HOPPER)
        monkeypatch.setitem(programs.DEVICES, 0, Device(0, 132, conversions=True))
        for is_there in (False, True):
            monkeypatch.setattr(own_gemm, "own_gemm_is_there", lambda is_there=is_there: is_there)
            assert own_gemm.own_gemm_serves(device, large, False, torch.bfloat16) is is_there
            for dtype in (torch.float16, torch.float32):
                assert not own_gemm.own_gemm_serves(device, large, False, dtype)
            assert not own_gemm.own_gemm_serves(torch.device("cpu"), large, False, torch.bfloat16)

    @pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
    @pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
    def test_stored_operands_are_handed_over_as_the_kernel_reads_them(self, monkeypatch, tiles, bias):
        monkeypatch.setattr(gemms, "own_gemm_serves", lambda *arguments: True)
        monkeypatch.setattr(gemms, "own_block_matmul", _as_documented)
        a, b = _operands(40, 144, 400, ("e4m3", "e4m3"), tiles)
        added = torch.randn(144) if bias else None
        y = gemms.scaled_matmul(a, b, HOPPER, bias=added, out_dtype=torch.float32, accumulate="split")
        torch.testing.assert_close(y, reference.scaled_matmul(a, b, bias=added, out_dtype=torch.float32))

    @pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
    @pytest.mark.parametrize("elements", [("e5m2", "e4m3"), ("e4m3", "e5m2")], ids=str)
    def test_e5m2_of_any_size_is_its_own(self, monkeypatch, elements, tiles):
        """Also of operands that are views, and of sizes that are filled up."""
        monkeypatch.setattr(gemms, "own_block_matmul", _as_documented)
        a, b = _operands(41, 140, 400, elements, tiles)
        whole = torch.empty(41, 800, dtype=a.codes.dtype)
        whole[:, ::2] = a.codes
        a = replace(a, codes=whole[:, ::2])
        y = gemms.scaled_matmul(a, b, HOPPER, bias=None, out_dtype=torch.float32, accumulate="split")
        torch.testing.assert_close(y, reference.scaled_matmul(a, b, bias=None, out_dtype=torch.float32))

    @pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
    def test_products_ask_once(self, monkeypatch, tiles):
        asked = []
        monkeypatch.setattr(own_gemm, "own_gemm_is_there", lambda: True)
        monkeypatch.setattr(gemms, "own_block_matmul", _as_documented)
        monkeypatch.setattr(backends, "chip_of", lambda device: HOPPER)
        monkeypatch.setitem(programs.DEVICES, 0, Device(0, 132, conversions=True))
        monkeypatch.setattr(
            own_gemm, "own_gemm_is_faster", lambda *question: asked.append(question) or own_gemm_is_faster(*question)
        )
        large, device = (16384, 8192, 14336), torch.device("cuda:0")
        y = self._product(large, device, tiles)
        assert asked == [(large, tiles, HOPPER, 132)]  # with the processors that are there
        torch.testing.assert_close(*y)

    @pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
    def test_products_do_without_a_private_function_of_torch(self, monkeypatch, tiles):
        def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
            kinds = torch.nn.functional.ScalingType
            assert (a_kind, b_kind) == (kinds.BlockWise1x128, kinds.BlockWise128x128 if tiles else a_kind)
            return _as_documented(a, a_scale, b, b_scale, output_dtype, tiles)

        monkeypatch.setattr(gemms, "scaled_mm_v2", None)
        monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
        torch.testing.assert_close(*self._product((40, 512, 144), torch.device("cpu"), tiles))

    @staticmethod
    def _product(shape, device, tiles):
        """The result of a product for this shape, on other operands, and the one of the reference."""
        gemm = Gemm(Cast("fp8_1x128"), Cast("fp8_128x128" if tiles else "fp8_1x128"))
        multiply = gemms.product(gemm, route_of(gemm, HOPPER), shape, None, torch.bfloat16, device)
        assert multiply.direct
        a, b = _operands(40, 144, 512, ("e4m3", "e4m3"), tiles)
        b_scale = b.scale.t() if tiles else b.scale.t().contiguous().t()
        y = multiply(Parts(a.codes, a.scale.t().contiguous().t()), Parts(b.codes.t(), b_scale), None)
        return y, reference.scaled_matmul(a, b, out_dtype=torch.bfloat16)


def _as_documented(a, a_scale, b, b_scale, dtype, tiles):
    """The product by what the GEMM expects of layouts, read from memory as the kernel does."""
    (m, k), n, steps = a.shape, b.shape[1], -(-a.shape[1] // 128)
    left = a_scale.as_strided((steps, m), (m, 1)).repeat_interleave(128, 0)[:k].t()
    if tiles:
        right = b_scale.as_strided((-(-n // 128), steps), (b_scale.stride(1), 1)).repeat_interleave(128, 0)[:n]
        right = right.repeat_interleave(128, 1)[:, :k]
    else:
        right = b_scale.as_strided((steps, n), (n, 1)).repeat_interleave(128, 0)[:k].t()
    values = a.float().as_strided((m, k), (k, 1)) * left, b.t().float().as_strided((n, k), (k, 1)) * right
    return (values[0] @ values[1].t()).to(dtype)


def _operands(rows, columns, length, elements, tiles):
    """Two operands with 1x128 scales, the second with 128x128 ones if `tiles`, that differ a lot from row to row."""
    torch.manual_seed(rows + columns + length)
    kinds = {
        "e4m3": (formats.FP8_1x128, formats.FP8_128x128),
        "e5m2": (formats.FP8_1x128_E5M2, formats.FP8_128x128_E5M2),
    }
    made = []
    for size, element, tile in ((rows, elements[0], False), (columns, elements[1], tiles)):
        x = torch.randn(size, length) * torch.exp(2 * torch.randn(size, 1))
        made.append(reference.quantize(x, Cast(kinds[element][tile])))
    return made


def _values(operand):
    return reference.dequantize(operand, torch.float32).double()


def _check(a, b, dtype, tiles):
    """Within both bounds of the row "Hopper/Ada FP8, split" of docs/numerics.md 8.3, and the same bits every time."""
    exact, magnitudes = _values(a) @ _values(b).T, _values(a).abs() @ _values(b).abs().T
    arguments = [tensor.cuda() for tensor in (a.codes, a.scale.t().contiguous(), b.codes)]
    arguments.append((b.scale if tiles else b.scale.t().contiguous()).cuda().t())
    codes, scale, right, right_scale = arguments
    torch.full((a.rows, b.rows), float("nan"), dtype=dtype, device="cuda")  # what an unwritten element would show
    runs = [own_gemm.own_block_matmul(codes, scale.t(), right.t(), right_scale, dtype, tiles).cpu() for _ in range(3)]
    assert all(torch.equal(run, runs[0]) for run in runs)
    error = (runs[0].double() - exact).abs()
    name = str(dtype).removeprefix("torch.")
    assert error.norm() <= HOPPER_SPLIT.relative[name] * exact.norm()
    bound = UNIT_OUT[name] * exact.abs() + HOPPER_SPLIT.accumulation(a.length) * magnitudes + SUBNORMAL_OUT[name]
    assert (error <= bound).all()


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1024, 768, 2048), (1000, 528, 1040), (72, 144, 144), (4, 16, 16)], ids=str)
def test_values(shape, dtype, tiles):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    m, n, k = shape
    a, b = _operands(m, n, k, ("e4m3", "e4m3"), tiles)
    if dtype == torch.float16:  # rows differ so much that some products would overflow
        a.scale.mul_(2.0**-8)
    _check(a, b, dtype, tiles)


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("tiles", [False, True], ids=["1x128", "128x128"])
@pytest.mark.parametrize("elements", [("e4m3", "e5m2"), ("e5m2", "e4m3")], ids=str)
def test_mixed_elements(elements, tiles):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    _check(*_operands(256, 384, 512, elements, tiles), torch.float32, tiles)


@pytest.mark.gpu
@needs_kernel
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_1x128"])
@pytest.mark.parametrize("shape", [(1024, 2048, 768), (1000, 528, 1024), (68, 16, 128)], ids=str)
def test_sums_in_memory(shape, name):
    """Two products added to a total are those that torch adds."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    first = name if name == "fp8_1x128" else f"{name}_e5m2"  # torch multiplies blocks of E4M3 alone
    gemm, device = Gemm(Cast(first), Cast(name)), torch.device("cuda", torch.cuda.current_device())
    route, (m, k, n) = route_of(gemm, HOPPER), shape
    multiply = gemms.sum_product(gemm, route, shape, device)
    plain = gemms.product(gemm, route, shape, None, torch.float32, device)
    torch.manual_seed(0)
    made = reference.quantize(torch.randn(m, k), gemm.lhs), reference.quantize(torch.randn(n, k), gemm.rhs)
    codes, right = (one.codes.cuda() for one in made)
    scale, right_scale = (
        one.scale.cuda().t().contiguous().t() if one.scale.dim() else one.scale.cuda() for one in made
    )
    parts = Parts(codes, scale), Parts(right.t(), right_scale.t() if name == "fp8_row" else right_scale)
    total = torch.full((m, n), 3.0, device=device)
    for _ in range(2):
        assert multiply(*parts, total) is total
    torch.testing.assert_close(total, 3 + 2 * plain(*parts, None), rtol=1e-4, atol=1e-2)
