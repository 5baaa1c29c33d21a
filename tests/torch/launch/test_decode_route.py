"""A few rows by a weight stored as codes: a Linear runs the kernel that decodes in registers, as `explain` says.

So does a `GroupedLinear`, once for all its groups. In Triton's interpreter; tests marked gpu run the shapes of models,
with every division of a product.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import WeightOnly  # noqa: E402
from tests.interpreter import interpreting  # noqa: E402

FORMATS = ("nvfp4", "mxfp4", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128")


def watched_launches():
    """Names of the kernels that decoding launches from now on, and a function that ends the watch."""
    from microfloat.passes import products

    names, original = [], products.decode_passes

    def watched(*arguments):
        made = original(*arguments)
        names.extend(one.kernel.__name__ for one in made.launches)
        return made

    products.decode_passes = watched
    return names, lambda: setattr(products, "decode_passes", original)


def distances(name, rows, shape, dtype, device):
    """Largest error of a Linear beside its bound, launches in words, and what explain says of it."""
    n, k = shape
    torch.manual_seed(k)
    model = torch.nn.Sequential(torch.nn.Linear(k, n, device=device, dtype=dtype)).requires_grad_(False)
    mf.quantize_(model, WeightOnly(name))
    names, done = watched_launches()
    try:
        x = torch.randn(rows, k, device=device, dtype=dtype)
        y = model(x).double()
    finally:
        done()
    w, bias = model[0].weight.dequantize(torch.float64), model[0].bias.double()
    exact, terms = x.double() @ w.T + bias, x.double().abs() @ w.abs().T + bias.abs()
    # One rounding of y, and float32 sums of K exact products (docs/numerics.md 8.2).
    bound = 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * exact.abs() + k * 2.0**-23 * terms
    return float(((y - exact).abs() / bound).max()), names, str(mf.explain(model))


def _interpreted(case):
    from microfloat.torch import backends

    name, rows, length, dtype, *chip = case
    with backends.pretend(chip=chip[0] if chip else "h200"):
        return distances(name, rows, (40, length), getattr(torch, dtype), "cpu")


@pytest.fixture(scope="module")
def linear():
    return interpreting(_interpreted)


@pytest.mark.slow_cases("the same kernels, other formats", all_but=("nvfp4", "fp8_tensor"))
@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_of_a_few_rows_reads_the_stored_codes(linear, name):  # features I2
    worst, launches, text = linear((name, 3, 512, "bfloat16"))
    assert worst <= 1
    assert launches == ["decode_gemm"]
    assert "up to 64 rows of it read the weight's codes as stored" in text


@pytest.mark.slow_cases("the same kernels, other shapes", all_but=("ragged",))
@pytest.mark.parametrize("length", [512, 416], ids=["whole", "ragged"])
def test_more_rows_come_in_the_order_of_the_tensor_cores(linear, length):
    worst, launches, _ = linear(("nvfp4", 12, length, "bfloat16"))
    assert worst <= 1
    assert launches == ["decode_order", "decode_gemm"]


@pytest.mark.slow_cases("the same kernels, other formats", all_but=("nvfp4-*",))
@pytest.mark.parametrize(
    ("name", "rows", "kernels"),
    [
        ("nvfp4", 20, ["decode_order", "decode_gemm"]), ("mxfp8", 40, ["decode_order", "decode_gemm"]),
        ("fp8_row", 12, ["decode_order", "decode_gemm"]), ("fp8_row", 40, ["decode_order", "decode_gemm"]),
    ],
)  # fmt: skip
def test_a_hopper_takes_more_rows_by_what_is_faster(linear, name, rows, kernels):  # features I2
    worst, launches, _ = linear((name, rows, 416, "bfloat16"))
    assert worst <= 1
    assert launches[:2] == kernels


def _with_rounded_weight(length):
    """The bound of `distances` once each term errs by 2^-9 more: a weight that is rounded to bfloat16 first."""
    return 1 + 2.0**-9 / (length * 2.0**-23)


@pytest.mark.parametrize("name", ["nvfp4", "fp8_128x128"])
def test_more_than_64_rows_are_multiplied_by_the_vendor(linear, name):
    worst, launches, _ = linear((name, 65, 512, "bfloat16"))
    assert launches == []
    assert worst <= _with_rounded_weight(512)


@pytest.mark.parametrize(
    ("name", "length", "dtype"),
    [("nvfp4", 528, "bfloat16"), ("fp8_row", 520, "bfloat16"), ("mxfp8", 512, "float32")],
    ids=["FP4 of no multiple of 32", "bytes of no multiple of 16", "float32"],
)
def test_what_the_kernel_does_not_read_is_dequantized(linear, name, length, dtype):
    worst, launches, _ = linear((name, 3, length, dtype))
    assert launches == []
    assert worst <= _with_rounded_weight(length)


def experts(name, sizes, shape, dtype, device, behind=0):
    """Largest error of a GroupedLinear beside its bound, kernels, what its schedule and explain say of it.

    `behind`: rows of x behind the last group, whose sizes then stand on the device alone, and which give zeros.
    """
    from microfloat.passes import CastInputs
    from microfloat.torch.linear.grouped import Groups

    n, k = shape
    torch.manual_seed(k)
    layer = mf.GroupedLinear(len(sizes), k, n, bias=True, device=device, dtype=dtype).requires_grad_(False)
    model = torch.nn.Sequential(layer)
    mf.quantize_(model, WeightOnly(name))
    x = torch.randn(sum(sizes) + behind, k, device=device, dtype=dtype)
    schedule = layer.schedule(x)
    names, done = watched_launches()
    try:
        if behind:
            ends = torch.tensor(sizes, device=device).cumsum(0, dtype=torch.int32)
            inputs = CastInputs(groups=Groups(ends, len(x)))
            y = schedule.forward(x, layer.weight.detach(), layer.bias, inputs, inputs)[0].double()
        else:
            y = layer(x, sizes).double()
    finally:
        done()
    w, bias = layer.weight.dequantize(torch.float64), layer.bias.double()
    worst, begin = 0.0, 0
    for group, size in enumerate(sizes):
        rows, begin = slice(begin, begin + size), begin + size
        exact = x[rows].double() @ w[group].T + bias[group]
        terms = x[rows].double().abs() @ w[group].abs().T + bias[group].abs()
        # As in `distances`.
        bound = 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * exact.abs() + k * 2.0**-23 * terms
        if size:
            worst = max(worst, float(((y[rows] - exact).abs() / bound).max()))
    assert not y[begin:].any()
    return worst, names, schedule.reason, " ".join(str(mf.explain(model)).split())


def _interpreted_experts(case):
    from microfloat.torch import backends

    name, sizes, shape, dtype, behind = case
    with backends.pretend(chip="h200"):
        return experts(name, list(sizes), shape, getattr(torch, dtype), "cpu", behind)


@pytest.fixture(scope="module")
def grouped():
    return interpreting(_interpreted_experts)


RAGGED = (3, 0, 1, 0)


@pytest.mark.slow_cases("the same kernels, other formats", all_but=("nvfp4",))
@pytest.mark.parametrize("name", [*FORMATS, "nvfp4_row", "nvfp4_2d", "fp8_1x128"])
def test_experts_of_a_few_rows_read_their_stored_codes_in_one_launch(grouped, name):  # features I2, M7
    n = 128 if name == "fp8_128x128" else 48  # whole blocks of each expert
    worst, launches, reason, text = grouped((name, RAGGED, (n, 288), "bfloat16", 0))
    assert worst <= 1
    assert launches == ["decode_gemm"]
    assert reason == ""
    assert "up to 64 rows for each group on average, all groups in one launch" in text


@pytest.mark.slow_cases("the same kernels, other groups", all_but=("12, most of them without rows",))
@pytest.mark.parametrize(
    ("name", "sizes", "dtype", "behind", "launches"),
    [
        ("mxfp8", (5,), "float16", 0, 1), ("mxfp8", (1, 0, 20, 2, 0, 0, 9, 3), "bfloat16", 5, 2),
        ("nvfp4", (2, 1, *[0] * 8, 12, 1), "bfloat16", 3, 1), ("nvfp4", (11, 0, 30), "float16", 0, 2),
        ("nvfp4", (0, 0), "bfloat16", 2, 1),
    ],
    ids=["one expert", "8 of them and rows behind", "12, most of them without rows", "several tiles", "none with rows"],
)  # fmt: skip
def test_groups_of_every_kind(grouped, name, sizes, dtype, behind, launches):
    worst, names, reason, _ = grouped((name, sizes, (24, 160), dtype, behind))
    assert worst <= 1
    assert names == ["decode_order", "decode_gemm"][-launches:]
    assert reason == ""


@pytest.mark.parametrize(
    ("sizes", "shape", "dtype", "why"),
    [
        ((130, 0), (24, 256), "bfloat16", "more than 64 rows for each group"),
        ((3, 1), (24, 272), "bfloat16", "no kernel decodes nvfp4 of 272 in features"),
        ((3, 1), (24, 256), "float32", "takes x in bfloat16 or float16, not in torch.float32"),
    ],
)
def test_other_experts_go_one_by_one(grouped, sizes, shape, dtype, why):
    worst, _, reason, _ = grouped(("nvfp4", sizes, shape, dtype, 0))
    assert worst <= _with_rounded_weight(shape[1]) * (2.0**11 if dtype == "float32" else 1)
    assert why in reason


def _gradient_of_experts(case):
    """dx of a frozen layer, and the exact one."""
    from microfloat.torch import backends

    with backends.pretend(chip="h200"):
        torch.manual_seed(0)
        layer = mf.GroupedLinear(3, 64, 32, dtype=torch.bfloat16).requires_grad_(False)
        mf.quantize_(torch.nn.Sequential(layer), WeightOnly("nvfp4"))
        x = torch.randn(5, 64).bfloat16().requires_grad_()
        layer(x, [3, 0, 2]).backward(torch.ones(5, 32).bfloat16())
        w = layer.weight.dequantize(torch.float64)
        return x.grad.double(), torch.cat([w[0].sum(0).expand(3, 64), w[2].sum(0).expand(2, 64)])


def test_adapters_train_over_experts():
    gradient, exact = interpreting(_gradient_of_experts)(())
    assert torch.allclose(gradient, exact, rtol=2.0**-6, atol=2.0**-6)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_division_of_a_product(name, dtype):  # features I2
    for rows in (1, 3, 8, 9, 16, 20, 32, 50, 64, 65):
        for shape in ((40, 256), (1000, 1120), (8192, 2048), (4096, 14336), (17408, 1024)):
            worst, launches, _ = distances(name, rows, shape, getattr(torch, dtype), "cuda")
            assert launches or rows > 64
            assert set(launches[-1:]) <= {"decode_gemm"}
            assert worst <= (1 if launches else _with_rounded_weight(shape[1])), (rows, shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_experts_of_models(name):  # features I2, M7
    for sizes in ([1, 0, 2, 1, 3, 0, 0, 1], [8, 31, 0, 64, 2, 1, 100, 12], [1] * 64, [0] * 63 + [64], [5]):
        for shape in ((256, 1120), (2048, 7168)):
            worst, launches, reason, _ = experts(name, sizes, shape, torch.bfloat16, "cuda", behind=3)
            assert launches[-1:] in (["decode_gemm"], [])  # passes of as many rows may be known already
            assert reason == ""
            assert worst <= 1, (sizes, shape)


@pytest.mark.gpu
def test_experts_in_a_graph_follow_the_sizes_on_the_device():  # features I2, M7
    layer = mf.GroupedLinear(4, 512, 256, device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    mf.quantize_(torch.nn.Sequential(layer), WeightOnly("nvfp4"))
    x, sizes = torch.randn(20, 512, device="cuda").bfloat16(), torch.tensor([5, 5, 5, 5], device="cuda")
    with torch.no_grad():
        layer(x, sizes)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, sizes)
        for others in ([20, 0, 0, 0], [1, 0, 17, 2], [0, 0, 0, 7]):
            sizes.copy_(torch.tensor(others))
            graph.replay()
            expected = layer(x, sizes)
            assert torch.equal(y, expected), others
            assert not y[sum(others) :].any()
