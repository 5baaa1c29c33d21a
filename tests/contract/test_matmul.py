"""Products of quantized operands, within the tolerances of docs/numerics.md 8.3."""

import numpy as np
import pytest

from microfloat import reference
from microfloat.formats import FORMATS
from microfloat.recipes import Cast, Hadamard
from tests import extent
from tests.contract.adapters import RUNNING, THOROUGH
from tests.contract.comparison import check_matmul, exact_values
from tests.jax.effort import cheaper_passes

every_adapter = pytest.mark.parametrize("adapter", RUNNING, ids=lambda adapter: adapter.name)
every_format = pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
MIXED = [("mxfp8", "mxfp8_e5m2"), ("mxfp8", "mxfp4"), ("mxfp6_e2m3", "mxfp6_e3m2"), ("nvfp4", "nvfp4_2d"),
         ("nvfp4_row", "nvfp4"), ("fp8_tensor", "fp8_row"), ("fp8_1x128", "fp8_128x128"),
         ("fp8_tensor", "fp8_tensor_e5m2"), ("nvfp4", "nvfp4_row")]  # fmt: skip
SHAPES = [(7, 40, 5), (70, 200, 33), (1, 1, 1), (64, 256, 128)]  # rows of a, contraction length, rows of b


OUT_DTYPES = ["float32", "bfloat16", "float16"]
AXES = [(-1, -1), (-2, -1), (-1, -2), (-2, -2)]


@pytest.fixture(autouse=True)
def compile_effort(request):
    """On a CPU, JAX's products compile with XLA's cheaper passes, as in tests/jax: sums are compared, not bytes."""
    adapter = request.node.callspec.params["adapter"]
    if adapter.name != "jax" or THOROUGH or not adapter.is_on_cpu():
        yield
        return
    with cheaper_passes():
        yield


def operands(adapter, casts, shape, scale=1.0, axes=(-1, -1)):
    rng = np.random.default_rng(7)
    quantized, handles = [], []
    for rows, cast, axis in zip((shape[0], shape[2]), casts, axes, strict=True):
        x = (rng.standard_normal((rows, shape[1])) * scale).astype(np.float32)
        x = x if axis == -1 else np.ascontiguousarray(x.T)
        quantized.append(reference.quantize(x, cast, axis=axis))
        handles.append(adapter.quantize(x, cast, axis=axis).handle)
    return *quantized, tuple(handles)


def where_shapes_compile(condition):
    """Leave a case to others where every shape is compiled and its parameters meet the condition."""
    return pytest.mark.left_to_others(
        "compiles every shape: takes a sample of products",
        lambda adapter, **params: adapter.compiles_every_shape and condition(**params),
    )


def number_of(fmt):
    return list(FORMATS.values()).index(fmt)


def has_another_turn(fmt, shape, out_dtype):
    """All but every other format, in a shape and a dtype that change from one to the next; more in `make test-all`."""
    number, shape, dtype = number_of(fmt), SHAPES.index(shape), OUT_DTYPES.index(out_dtype)
    if extent.is_quick():
        return number % 2 or (number // 2 % 4, number // 2 % 3) != (shape, dtype)
    return (shape + 2 * dtype + number) % 12


@every_adapter
@every_format
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@where_shapes_compile(has_another_turn)
def test_products(adapter, fmt, shape, out_dtype):
    a, b, handles = operands(adapter, (Cast(fmt), Cast(fmt)), shape)
    check_matmul(adapter, a, b, handles, out_dtype)


@every_adapter
@pytest.mark.parametrize("names", MIXED, ids="-".join)
@pytest.mark.parametrize("axes", AXES, ids=str)
@where_shapes_compile(lambda names, axes: (MIXED.index(names) - AXES.index(axes)) % 4)
def test_mixed_formats_and_axes(adapter, names, axes):
    a, b, handles = operands(adapter, tuple(map(Cast, names)), (70, 200, 33), axes=axes)
    check_matmul(adapter, a, b, handles, "float32")


@every_adapter
@pytest.mark.parametrize(
    "fmt", [fmt for fmt in FORMATS.values() if not fmt.is_per_tensor and fmt.tensor_scale != "row"], ids=str
)
@where_shapes_compile(lambda fmt: number_of(fmt) % 4)
def test_hadamard_operands_meet_in_the_transformed_domain(adapter, fmt):
    cast = Cast(fmt, hadamard=Hadamard())
    a, b, handles = operands(adapter, (cast, cast), (30, 90, 20))
    assert a.length == 96
    check_matmul(adapter, a, b, handles, "float32")


@every_adapter
@every_format
@pytest.mark.parametrize("scale", [1e-30, 1e-18, 1e15])
@where_shapes_compile(lambda fmt, scale: number_of(fmt) % (4 if extent.is_quick() else 2))
def test_magnitudes_far_from_one(adapter, fmt, scale):
    """Scales whose product leaves float32 although the result does not, or does so honestly."""
    a, b, handles = operands(adapter, (Cast(fmt), Cast(fmt)), (16, 64, 16), scale)
    expected = reference.scaled_matmul(a, b)
    product = adapter.scaled_matmul(*handles, "float32").astype(np.float64)
    magnitudes = np.abs(exact_values(a)) @ np.abs(exact_values(b)).T
    bound = 2.0**-23 * np.abs(expected) + adapter.tolerance(a, b).accumulation(a.length) * magnitudes + 2.0**-125
    assert (np.abs(product - expected) <= bound).all()


@every_adapter
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4", "nvfp4", "nvfp4_2d"])
@where_shapes_compile(lambda name: name not in ("mxfp8", "mxfp6_e2m3", "nvfp4"))
def test_a_nan_block_is_nan_in_its_rows_only(adapter, name):
    rng = np.random.default_rng(8)
    x, w = (rng.standard_normal((40, 64)).astype(np.float32) for _ in range(2))
    x[3, 40] = np.nan
    handles = [adapter.quantize(array, Cast(name)).handle for array in (x, w)]
    product = adapter.scaled_matmul(*handles, "float32")
    expected = reference.scaled_matmul(reference.quantize(x, name), reference.quantize(w, name))
    assert np.array_equal(np.isnan(product), np.isnan(expected))
    assert np.isnan(product[3]).all()
    assert not np.isnan(product[39]).any()


@every_adapter
@pytest.mark.parametrize("shape", [(0, 32, 4), (4, 0, 3), (4, 32, 0)], ids=str)
def test_empty_products(adapter, shape):
    _, _, handles = operands(adapter, (Cast("mxfp8"), Cast("mxfp8")), shape)
    product = adapter.scaled_matmul(*handles, "float32")
    assert product.shape == (shape[0], shape[2])
    assert not product.any()


@pytest.mark.parametrize("adapter", [a for a in RUNNING if "reference" in a.name], ids=lambda adapter: adapter.name)
@every_format
def test_exact_accumulation(adapter, fmt):
    """One rounding of the exact sum: at most half an ulp of float32 away, however long the sum."""
    a, b, handles = operands(adapter, (Cast(fmt), Cast(fmt)), (20, 3000, 10))
    expected = reference.scaled_matmul(a, b)
    product = adapter.scaled_matmul(*handles, "float32", "exact")
    assert (np.abs(product - expected) <= np.spacing(np.abs(product)) * (0.5 + 1e-6)).all()
