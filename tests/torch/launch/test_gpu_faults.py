"""Inputs of every kind and faults on a GPU: the bytes of the oracle, results of the plain case, or a named error."""

import contextlib
import copy
import gc
import threading

import numpy as np
import pytest
import torch

import microfloat.torch as mf
from microfloat import reference
from microfloat.recipes import RECIPES, Cast, MXFP8BlockScaling, NVFP4BlockScaling
from microfloat.torch.scaling import buffers as layer_state
from tests import processes

pytestmark = pytest.mark.gpu
CASTS = ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_2d")
M, K, N = 72, 96, 80


def quiet(name):
    """A recipe whose casts draw nothing, so that the CPU gives the same bytes."""
    return NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "nvfp4" else RECIPES[name]()


def layer_of(recipe, features=(K, N), dtype=torch.bfloat16, device="cuda", backend="auto"):
    torch.manual_seed(11)
    return mf.Linear(*features, dtype=dtype, recipe=recipe, backend=backend).to(device)


def step(layer, x, dy, seed=5):
    """(y, dx, dw, db) of one forward and backward."""
    leaf = x.detach().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(seed)
    y = layer(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]


def assert_same(got, want):
    for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
        assert torch.equal(a, b), f"{name} differs by {float((a.float() - b.float()).abs().max())}"


def check_bytes(x, cast, q):
    """Codes and scales of `q` are the oracle's for `x`."""
    want = reference.quantize(x.float().cpu().numpy(), cast, axis=q.axis - x.dim())
    assert np.array_equal(q.codes.view(torch.uint8).cpu().numpy(), want.codes)
    assert np.array_equal(q.scale.cpu().numpy(), want.scale)
    if want.tensor_scale is not None:
        assert np.array_equal(q.tensor_scale.cpu().numpy(), want.tensor_scale)


# ------------------------------------------------------------------------------------------------ strides, alignment


def odd_views(rows, columns):
    """Matrices of one shape that lie in memory in every way."""
    base = torch.randn(3 * rows + 1, 3 * columns + 1, device="cuda").bfloat16()
    flat = base.reshape(-1)
    return {
        "transposed": base[:columns, :rows].t(), "slice": base[1 : rows + 1, 3 : columns + 3],
        "every other column": base[:rows, : 2 * columns : 2], "every third row": base[: 3 * rows : 3, :columns],
        "misaligned by 2 bytes": flat[1 : rows * columns + 1].view(rows, columns),
        "misaligned by 8 bytes": flat[4 : rows * columns + 4].view(rows, columns),
        "one row repeated": base[:1, :columns].expand(rows, columns),
        "one column repeated": base[:rows, :1].expand(rows, columns),
        "flipped": base[:rows, :columns].flip(0, 1),
    }  # fmt: skip


@pytest.mark.parametrize("name", CASTS)
def test_views_have_the_bytes_of_their_values(name):
    for what, x in odd_views(40, 72).items():
        for axis in (-1, -2):
            q = mf.quantize(x, name, axis=axis)
            check_bytes(x, Cast(name), q)
            same = q.dequantize() == mf.quantize(x.contiguous(), name, axis=axis).dequantize()
            assert bool(same.all()), what


@pytest.mark.parametrize("name", RECIPES)
def test_linear_does_not_see_strides(name):
    for shape in ((M, K, N), (37, 75, 51)):
        views, upstream = odd_views(*shape[:2]), odd_views(shape[0], shape[2])
        for what in ("transposed", "every other column", "misaligned by 2 bytes", "one column repeated"):
            x, dy = views[what], upstream[what]
            recipe, plain = RECIPES[name](), torch.contiguous_format
            got = step(layer_of(recipe, shape[1:]), x, dy)
            want = step(layer_of(recipe, shape[1:]), x.clone(memory_format=plain), dy.clone(memory_format=plain))
            if name != "nvfp4":
                assert_same(got, want)
                continue
            for part, other in zip(got, want, strict=True):  # its bfloat16 products read the memory layout of x
                error = float((part - other).float().norm() / other.float().norm().clamp(min=1e-30))
                assert error <= 2.5e-3, what


# ------------------------------------------------------------------------------------------------- sizes and dtypes


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_small_and_ragged_sizes_agree_with_the_cpu(name, dtype):
    """Within the row "Hopper/Ada FP8, fast" of docs/numerics.md 8.3, which is the widest, folding included."""
    bound = {torch.bfloat16: 6e-3, torch.float16: 6e-3, torch.float32: 5e-3}[dtype]
    every = ((1, 1, 1), (1, 17, 1), (3, 1, 2), (5, 33, 130), (36, 75, 51), (M, K, N))
    for shape in every if dtype == torch.bfloat16 else every[3:5]:
        generator = torch.Generator().manual_seed(sum(shape))
        x, dy = (torch.randn(shape[0], size, generator=generator).to(dtype) for size in shape[1:])
        recipe = quiet(name)
        want = step(layer_of(recipe, shape[1:], dtype, "cpu", "reference"), x, dy)
        got = step(layer_of(recipe, shape[1:], dtype), x.cuda(), dy.cuda())
        for what, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            assert a.dtype == b.dtype
            error = float((a.cpu().double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
            assert error <= bound, f"{what} of {shape}: {error:.1e}"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("shape", [(0, K), (3, 0, K), (0, 4, K)], ids=str)
def test_empty_inputs_have_empty_results(name, shape):
    layer = layer_of(RECIPES[name]())
    got = step(layer, torch.zeros(shape, dtype=torch.bfloat16, device="cuda"), torch.zeros(
        *shape[:-1], N, dtype=torch.bfloat16, device="cuda"))  # fmt: skip
    assert got[0].shape == (*shape[:-1], N)
    assert got[1].shape == shape
    assert not got[2].any()
    assert not got[3].any()


@pytest.mark.parametrize("name", RECIPES)
def test_nan_inf_and_zero_blocks_go_where_they_go_on_a_cpu(name):
    generator = torch.Generator().manual_seed(2)
    x, dy = (torch.randn(M, size, generator=generator).bfloat16() for size in (K, N))
    x[:16, :32], dy[32:64] = 0.0, 0.0
    recipe = MXFP8BlockScaling(path="exact") if name == "mxfp8" else quiet(name)
    zero = step(layer_of(recipe), (x * 0).cuda(), (dy * 0).cuda())
    assert not any(bool(part.isnan().any()) for part in zero)
    assert not zero[1].any()
    assert not zero[2].any()
    for value in (float("nan"), float("inf")):
        x[5, 40], dy[7, 3] = value, -value
        want = step(layer_of(recipe, device="cpu", backend="reference"), x, dy)
        got = step(layer_of(recipe), x.cuda(), dy.cuda())
        for what, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            if what == "dw" and name in ("mxfp4", "mxfp6"):  # folded: a NaN makes NaN of its whole tile of x
                assert bool(a.isnan().cpu()[b.isnan()].all())
            else:
                assert torch.equal(a.isnan().cpu(), b.isnan()), f"{what}: other elements are NaN"


@pytest.mark.slow("tensors of more than 2^31 elements")
@pytest.mark.parametrize("name", ["mxfp8", "fp8_tensor", "nvfp4", "fp8_row"])
@pytest.mark.parametrize("shape", [(2**19 + 96, 4096), (1, 2**31 + 160), (2**31 + 160, 1)], ids=str)
def test_more_than_two_to_the_31_elements(name, shape):
    """The first and last rows or columns, and those around element 2^31, are cast as in small matrices."""
    rows, columns = shape
    if torch.cuda.mem_get_info()[0] < 10 * rows * columns:
        pytest.skip("needs 22 GB of free memory")
    if name in ("nvfp4", "fp8_row") and 1 in shape:
        pytest.skip("the other formats stand for it")
    x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for part in x.view(-1).split(1 << 28):
        part.normal_()
    x.view(-1)[-5] = 1000.0  # the amax is found at the far end
    whole = Cast(name)
    parts = [np.s_[:256], np.s_[-320:]] if rows > 1 else [np.s_[:, :256], np.s_[:, -320:]]
    parts += [np.s_[2**19 - 64 : 2**19 + 64]] if rows > 1 and columns > 1 else []
    for axis in (-1, -2):
        q = mf.quantize(x, whole, axis=axis)
        amax = {"amax": 1000.0} if name in ("fp8_tensor", "nvfp4") else {}
        values = q.dequantize(torch.bfloat16)
        for part in parts:
            if name == "fp8_row" and axis == -2:
                continue  # its scales are those of whole columns
            small = mf.quantize(x[part].contiguous(), whole, axis=axis, **amax)
            assert torch.equal(values[part], small.dequantize(torch.bfloat16)), f"axis {axis}, {part}"
        del q, values


def test_stochastic_bytes_of_far_rows():
    """Element (row, column) of a matrix of 2^31 elements draws the byte that it draws in a narrow one."""
    rows, columns = 2**19 + 64, 4096
    x = torch.full((rows, columns), 0.3, dtype=torch.bfloat16, device="cuda")
    cast = Cast("mxfp4", rounding="stochastic")
    got = mf.quantize(x, cast, seed=7, stream=4).codes[-64:, :16].cpu().numpy()
    narrow = np.full((rows, 32), float(x[0, 0]), np.float32)
    assert np.array_equal(got, reference.quantize(narrow, cast, seed=7, stream=4).codes[-64:])


# --------------------------------------------------------------------------------------- streams, graphs and threads


def test_streams_do_not_meet():
    """Casts whose programs meet in scratch memory, in flight on several streams and from several threads at once."""
    matrices = [torch.randn(2048, 1024, device="cuda").bfloat16() * 2.0**i for i in range(4)]
    names = ("fp8_tensor", "nvfp4", "fp8_row", "mxfp8")
    want = [[mf.quantize(x, name) for name in names] for x in matrices]
    streams = [torch.cuda.Stream() for _ in matrices]
    torch.cuda.synchronize()
    wrong = []

    def work(index):
        with torch.cuda.stream(streams[index]):
            for turn in range(40):
                name = names[(turn + index) % len(names)]
                q, other = mf.quantize(matrices[index], name), want[index][names.index(name)]
                same = torch.equal(q.codes.view(torch.uint8), other.codes.view(torch.uint8))
                if not (same and torch.equal(q.scale, other.scale)):
                    wrong.append((index, turn, name))

    for threads in (False, True):
        if threads:
            workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(matrices))]
            for worker in workers:
                worker.start()
            for worker in workers:
                processes.join(worker)
        else:  # all streams full before any is waited for
            made = []
            for turn in range(40):
                for index, x in enumerate(matrices):
                    with torch.cuda.stream(streams[index]):
                        name = names[(turn + index) % len(names)]
                        made.append((index, name, mf.quantize(x, name)))
            torch.cuda.synchronize()
            for index, name, q in made:
                other = want[index][names.index(name)]
                same = torch.equal(q.codes.view(torch.uint8), other.codes.view(torch.uint8))
                assert same, f"stream {index}, {name}"
                assert torch.equal(q.scale, other.scale)
    assert not wrong


def eager_steps(module, recipe, inputs, dy):
    """Results of steps on several inputs, after three that warm up, in a thread of its own: what waits to be rolled
    waits per thread, and the capture must not meet it."""
    results = []

    def work():
        for turn, x in [(-1, inputs[0])] * 3 + list(enumerate(inputs)):
            leaf = x.clone().requires_grad_()
            module.zero_grad()
            torch.manual_seed(max(turn, 0))
            with mf.autocast(recipe=recipe):
                y = module(leaf)
            y.backward(dy)
            results.append([y.detach(), leaf.grad, module.weight.grad, module.bias.grad])

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    processes.join(worker)
    return results[3:]


@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_has_the_bits_of_an_eager_one(name):
    """Forward and backward in a CUDA graph, replayed on new inputs: results, seeds and scaling state."""
    recipe = RECIPES[name]()
    layer = layer_of(None, (128, 256))
    inputs = [torch.randn(128, 128, device="cuda").bfloat16() * 2.0**turn for turn in range(3)]
    dy = torch.randn(128, 256, device="cuda").bfloat16()
    twin = copy.deepcopy(layer)
    wanted = eager_steps(twin, recipe, inputs, dy)
    leaf = inputs[0].clone().requires_grad_()

    def run():
        with mf.autocast(recipe=recipe):
            y = layer(leaf)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what compiles and what is remembered between steps
            run()
    torch.cuda.current_stream().wait_stream(side)
    layer.zero_grad()
    leaf.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    for turn, (new, want) in enumerate(zip(inputs, wanted, strict=True)):
        with torch.no_grad():
            leaf.copy_(new)
        for made in (leaf, layer.weight, layer.bias):
            made.grad.zero_()
        torch.manual_seed(turn)
        graph.replay()
        assert_same((y, leaf.grad, layer.weight.grad, layer.bias.grad), want)
    for (key, mine), (_, theirs) in zip(layer.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(mine, theirs), key


# ------------------------------------------------------------------------------------------------------ out of memory


def _gaps_filled(limit: int) -> list[torch.Tensor]:
    """Tensors that take what the allocator may still give under a limit, in pieces of 2 MiB, then of 512 bytes."""
    total = torch.cuda.get_device_properties(0).total_memory
    pieces = []
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        for size in (2 << 20, 512):
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    pieces.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return pieces


@pytest.mark.parametrize("name", ["delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("caches", [False, True], ids=["", "weight cache"])
def test_memory_that_runs_out_leaves_the_state_as_it_was(name, caches):
    """A step fails at every place where it can; the next one that fits has the bits of a layer that never failed."""
    recipe = RECIPES[name]()
    layer = layer_of(None, (2048, 2048))
    twin = copy.deepcopy(layer)
    x, dy = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))
    first = True if caches else None

    def run(module, region):
        torch.manual_seed(3)
        leaf = x.detach().requires_grad_()
        module.zero_grad(set_to_none=True)
        with region:
            y = module(leaf, first)
        y.backward(dy)
        return [y.detach(), leaf.grad, module.weight.grad, module.bias.grad]

    for module in (layer, twin):  # compiles, and fills pools that a step keeps
        run(module, mf.autocast(recipe=recipe))
    failures = 0
    total = torch.cuda.get_device_properties(0).total_memory
    for room in range(0, 120 << 20, 2 << 20):
        layer.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        # Between tensors that are alive: a step that fits into them never fails. What the allocator counts against its
        # limit need not be what it reports as reserved, so the limit is the same before and after.
        limit = torch.cuda.memory_reserved()
        gaps = _gaps_filled(limit)
        torch.cuda.set_per_process_memory_fraction((limit + room) / total)
        try:
            run(layer, mf.autocast(recipe=recipe))
        except torch.OutOfMemoryError:
            failures += 1
        else:
            break
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            del gaps
    assert failures >= 3
    run(twin, mf.autocast(recipe=recipe))  # the step that fitted
    for _ in range(2):
        assert_same(run(layer, mf.autocast(recipe=recipe)), run(twin, mf.autocast(recipe=recipe)))
    if recipe.is_delayed:
        for module in (layer, twin):
            mf.update_scaling(module)
        for (key, mine), (_, theirs) in zip(layer.named_buffers(), twin.named_buffers(), strict=True):
            if key.endswith("scale"):
                assert torch.equal(mine, theirs), key
            assert bool(torch.isfinite(mine).all()), key
            assert float(mine.max()) == float(theirs.max()), key


# ----------------------------------------------------------------------------------------------------- other machines


def _as_ampere():
    """This process takes its GPU for one without FP8. Triton knows better, and compiles what the GPU can run."""
    from unittest import mock

    from microfloat.torch import backends
    from microfloat.torch.launch import program

    with mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)):
        program.device_of(0)
        for device in ("cuda", "cuda:0"):
            backends.chip_of(torch.device(device))


def _without_fp8():
    from microfloat.torch.launch import program
    from tests.contract.cases import EVERY_CAST

    assert not program.device_of(0).conversions
    for cast in EVERY_CAST[::9]:
        x = (torch.randn(37, 75) * 3).bfloat16()
        seed = {"seed": 9, "stream": 4} if cast.is_stochastic else {}
        want = reference.quantize(x.float().numpy(), cast, **seed)
        q = mf.quantize(x.cuda(), cast, **seed)
        assert np.array_equal(q.codes.view(torch.uint8).cpu().numpy(), want.codes), cast
        assert np.array_equal(q.scale.cpu().numpy(), want.scale), cast
    told = {}
    for name in RECIPES:
        recipe = quiet(name)
        explanation = mf.explain(recipe, "cuda")
        told[name] = (explanation.accelerated, " ".join(row.kernel for row in explanation.rows))
        x, dy = torch.randn(M, K).bfloat16(), torch.randn(M, N).bfloat16()
        want = step(layer_of(recipe, device="cpu", backend="reference"), x, dy)
        got = step(layer_of(recipe), x.cuda(), dy.cuda())
        for what, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            error = float((a.cpu().double() - b.double()).norm() / b.double().norm())
            assert error <= 2.5e-3, f"{name} {what}: {error:.1e}"  # the row of emulation in docs/numerics.md 8.3
    return told


def test_a_gpu_without_fp8_gives_the_same_bytes_and_bfloat16_products():
    told = processes.other_process(_as_ampere)(_without_fp8)
    for name, (accelerated, kernels) in told.items():
        assert not accelerated, name
        assert "FP8 GEMM" not in kernels, name


@pytest.mark.parametrize("name", RECIPES)
def test_a_second_gpu_gives_what_the_first_gives(name):
    """Tensors on a device that is not the current one: results there, the same bits, state of its own."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, sees {torch.cuda.device_count()}")
    recipe = RECIPES[name]()
    x, dy = (torch.randn(128, size).bfloat16() for size in (128, 256))
    results = []
    for device in ("cuda:0", "cuda:1"):
        layer = layer_of(None, (128, 256), device=device)
        for _ in range(2):
            leaf = x.to(device).requires_grad_()
            layer.zero_grad()
            torch.cuda.manual_seed_all(4)
            with mf.autocast(recipe=recipe):
                y = layer(leaf, True)
            y.backward(dy.to(device))
        made = [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad, *layer.buffers()]
        assert {str(part.device) for part in made} == {device}
        assert torch.cuda.current_device() == 0
        for cast in CASTS:
            q = mf.quantize(x.to(device), cast)
            check_bytes(x, Cast(cast), q)
            assert str(q.dequantize().device) == device
        results.append([part.cpu() for part in made])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
    moved = layer_of(recipe, (128, 256)).to("cuda:1")
    with torch.cuda.device(1):
        got = step(moved, x.cuda(), dy.cuda())
    assert all(part.device.index == 1 for part in got)
    with pytest.raises(ValueError, match="where the weight is"):
        moved(x.to("cuda:0"))
    assert layer_state.has_buffers(moved) == recipe.is_delayed


def test_two_gpus_at_once():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs two GPUs, sees {torch.cuda.device_count()}")
    x = torch.randn(512, 768).bfloat16()
    made = [(name, mf.quantize(x.to(device), name)) for name in CASTS * 3 for device in ("cuda:0", "cuda:1")]
    for name, q in made:
        check_bytes(x, Cast(name), q)
