"""A few rows by a weight stored as codes: a Linear runs the kernel that decodes in registers, as `explain` says.

In Triton's interpreter; tests marked gpu run the shapes of models, with every division of a product.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import WeightOnly  # noqa: E402
from tests.interpreter import interpreting  # noqa: E402

FORMATS = ("nvfp4", "mxfp4", "mxfp6_e3m2", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128")


def distances(name, rows, shape, dtype, device):
    """Largest error of a Linear beside its bound, launches in words, and what explain says of it."""
    from microfloat.passes import products

    n, k = shape
    torch.manual_seed(k)
    model = torch.nn.Sequential(torch.nn.Linear(k, n, device=device, dtype=dtype)).requires_grad_(False)
    mf.quantize_(model, WeightOnly(name))
    made, original = [], products.decode_passes

    def watched(*arguments):
        made.append(original(*arguments))
        return made[-1]

    products.decode_passes = watched
    try:
        x = torch.randn(rows, k, device=device, dtype=dtype)
        y = model(x).double()
    finally:
        products.decode_passes = original
    w, bias = model[0].weight.dequantize(torch.float64), model[0].bias.double()
    exact, terms = x.double() @ w.T + bias, x.double().abs() @ w.abs().T + bias.abs()
    # One rounding of y, and float32 sums of K exact products (docs/numerics.md 8.2).
    bound = 2.0 ** (-8 if dtype == torch.bfloat16 else -11) * exact.abs() + k * 2.0**-23 * terms
    names = [one.kernel.__name__ for passes in made for one in passes.launches]
    return float(((y - exact).abs() / bound).max()), names, str(mf.explain(model))


def _interpreted(case):
    from microfloat.torch import backends

    name, rows, length, dtype = case
    with backends.pretend(chip="h200"):
        return distances(name, rows, (40, length), getattr(torch, dtype), "cpu")


@pytest.fixture(scope="module")
def linear():
    return interpreting(_interpreted)


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_of_a_few_rows_reads_the_stored_codes(linear, name):  # features I2
    worst, launches, text = linear((name, 3, 512, "bfloat16"))
    assert worst <= 1
    assert launches == ["decode_gemm"]
    assert "few rows of it read the weight's codes as they are stored" in text


@pytest.mark.parametrize("length", [512, 416], ids=["whole", "ragged"])
def test_more_rows_come_in_the_order_of_the_tensor_cores(linear, length):
    worst, launches, _ = linear(("nvfp4", 20, length, "bfloat16"))
    assert worst <= 1
    assert launches == ["decode_order", "decode_gemm"]


def _with_rounded_weight(length):
    """The bound of `distances` once each term errs by 2^-9 more: a weight that is rounded to bfloat16 first."""
    return 1 + 2.0**-9 / (length * 2.0**-23)


def test_many_rows_are_multiplied_by_the_vendor(linear):
    worst, launches, _ = linear(("mxfp8", 65, 512, "bfloat16"))
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


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_division_of_a_product(name, dtype):  # features I2
    for rows in (1, 3, 8, 9, 16, 20, 32, 50, 64):
        for shape in ((40, 256), (1000, 1120), (8192, 2048), (4096, 14336)):
            worst, launches, _ = distances(name, rows, shape, getattr(torch, dtype), "cuda")
            assert launches[:1] == ["decode_gemm"]
            assert worst <= 1, (rows, shape)
