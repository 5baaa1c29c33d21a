"""Lowering for CUDA: conversions, layouts, the FP8 GEMM with its scales; other platforms see none of them."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import microfloat.jax as mj
from microfloat import reference
from microfloat.formats import ELEMENTS
from microfloat.jax.backends import cuda, gemms
from microfloat.jax.backends import reference as reference_in_jax
from microfloat.jax.numerics.bits import encode, multiply
from microfloat.recipes import Float8CurrentScaling, MXFP8BlockScaling, NVFP4BlockScaling, as_cast
from tests.jax.compare import relative_error
from tests.logs import logged

DENSE = (((1,), (0,)), ((), ()))
LARGE = (16384, 4096, 4096)
HAS_GPU = cuda.capability() is not None


@pytest.mark.parametrize(
    ("compute_capability", "expected"), [("9.0", (9, 0)), ("10.3", (10, 3)), ("gfx942", None), (None, None), ("", None)]
)
def test_gpus_of_other_makers_have_no_compute_capability(monkeypatch, compute_capability, expected):
    class Device:
        pass

    Device.compute_capability = compute_capability
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    assert cuda.capability() == expected


@pytest.fixture
def hopper(monkeypatch):
    """A machine that sees one H200. Traces are cached by shape: every test has shapes of its own."""
    for module in (cuda, gemms):
        monkeypatch.setattr(module, "capability", lambda: (9, 0))
    monkeypatch.setattr(cuda, "is_alone", lambda: True)
    return monkeypatch


def lowered(recipe, shape, platform):
    """StableHLO of one layer, forward and backward."""
    rows, inputs, outputs = shape
    op = mj.dot_general(recipe)

    def step(x, w, dy):
        y, backward = jax.vjp(lambda x, w: op(x, w, DENSE), x, w)
        return y, *backward(dy)

    arguments = [
        jax.ShapeDtypeStruct(sizes, jnp.bfloat16) for sizes in ((rows, inputs), (inputs, outputs), (rows, outputs))
    ]
    return jax.jit(step).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def conversions(text):
    """Elements that float32 is converted to."""
    return re.findall(r"stablehlo.convert .*xf32>\) -> tensor<[0-9x]*x(f8\w+)>", text)


@functools.cache
def with_folded_scales():
    return lowered(Float8CurrentScaling(), (80, 144, 112), "cuda")


def test_scales_go_into_the_gemm(hopper):
    hopper.setattr(cuda, "folds_scales", lambda *_: True)
    text = with_folded_scales()
    assert conversions(text) == ["f8E4M3FN", "f8E4M3FN", "f8E5M2"], "x, w and dy are converted once each"
    dots = re.findall(r"dot_general.*: \((.*?)\) -> (\S+)", text)
    assert dots == [
        ("tensor<80x144xbf16>, tensor<112x144xbf16>", "tensor<80x112xbf16>"),
        ("tensor<80x112xbf16>, tensor<144x112xbf16>", "tensor<80x144xbf16>"),
        ("tensor<112x80xbf16>, tensor<144x80xbf16>", "tensor<112x144xbf16>"),
    ]
    widened = re.findall(r"stablehlo.convert .*\(tensor<(\S+)xf8(\w+)>\) -> tensor<\S+xbf16>", text)
    assert len(widened) == 6, "what XLA looks for: codes, converted, times a broadcast scalar"
    assert len(re.findall(r"stablehlo.convert .*\(tensor<f32>\) -> tensor<bf16>", text)) == 6


def test_scales_are_scalars_when_they_are_converted(hopper):
    """XLA undoes the conversion of a scale only if nothing stands between it and the GEMM."""
    hopper.setattr(cuda, "folds_scales", lambda *_: True)
    text = with_folded_scales()
    names = re.findall(r"(%\w+)(?:#\d)? = stablehlo.convert (%\w+)(?:#\d)? : \(tensor<f32>\) -> tensor<bf16>", text)
    barriers = set(
        re.findall(r"(%\w+):2 = stablehlo.optimization_barrier %\w+(?:#\d)?, %\w+(?:#\d)? : tensor<f32>", text)
    )
    assert len(names) == 6
    assert {source for _, source in names} <= barriers


def test_scales_stay_in_the_epilogue(hopper):
    hopper.setattr(cuda, "folds_scales", lambda *_: False)
    text = lowered(Float8CurrentScaling(), (80, 144, 128), "cuda")
    assert len(conversions(text)) == 3
    dots = re.findall(r"dot_general.*: \((.*?)\) -> (\S+)", text)
    assert [kinds.count("xf8") for kinds, _ in dots] == [2, 2, 2]
    assert all(out.endswith("xf32>") for _, out in dots)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("recipe0",))
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), MXFP8BlockScaling()])
def test_other_platforms_see_nothing_of_it(hopper, recipe):
    hopper.setattr(cuda, "folds_scales", lambda *_: True)
    text = lowered(recipe, (96, 160, 128), "cpu")
    assert not conversions(text)
    assert "LayoutConstraint" not in text


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is there")
def test_a_machine_without_a_gpu_traces_nothing_of_it():
    for platform in ("cpu", "cuda"):
        text = lowered(Float8CurrentScaling(), (96, 176, 128), platform)
        assert not conversions(text)
        assert "LayoutConstraint" not in text
    assert not cuda.folds_scales(*LARGE)


@pytest.mark.slow("further JAX programs of a checked kind")
def test_block_casts_along_rows(hopper):
    """MXFP8 converts all six operands, and writes out what it casts against the order in memory."""
    text = lowered(MXFP8BlockScaling(), (96, 192, 160), "cuda")
    assert len(conversions(text)) == 6
    turned = re.findall(r"@LayoutConstraint.*-> tensor<(\S+)xbf16>", text)
    assert sorted(turned) == sorted(["160x192", "192x96", "160x96"])
    dots = re.findall(r"dot_general.*: \((.*?)\) -> (\S+)", text)
    assert all(kinds.count("xbf16") == 2 and out.endswith("xbf16>") for kinds, out in dots), "rounded once, in the GEMM"


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
@pytest.mark.parametrize("scale", [1.0, 100.0, 1.7e-5, 3.1e20])
def test_conversion_has_the_bytes_of_the_integers(name, scale):
    """All bfloat16 values; a CPU flushes subnormal operands, which a GPU does not."""
    values = np.arange(1 << 16, dtype=np.uint32) << 16
    if not HAS_GPU:
        values = values[(values & 0x7F800000) != 0]
    tiles = jnp.asarray(values.view(np.float32)).reshape(1, 1, 1, -1)
    factor = jnp.full((1, 1, 1, 1), scale, jnp.float32)
    element = ELEMENTS[name]
    actual = jax.jit(lambda tiles, factor: cuda.converted(tiles, factor, element))(tiles, factor)
    expected = jax.jit(lambda tiles, factor: encode(multiply(tiles, factor), element))(tiles, factor)
    np.testing.assert_array_equal(actual, expected)


def test_batches_keep_the_epilogue():
    """Under vmap a scale is no scalar: the same product by a dot, and layouts are left alone."""
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.integers(-2, 3, (2, rows, 32)), jnp.float32) for rows in (16, 48))
    scales = jnp.asarray([0.75, 1.003], jnp.float32)

    def product(a, b, scale_a, scale_b):
        codes = [cuda._row_major(matrix.astype(jnp.float8_e4m3fn)) for matrix in (a, b)]
        return cuda.scaled_product(*codes, scale_a, scale_b, lax.Precision.HIGHEST).astype(jnp.float32)

    batched = jax.jit(jax.vmap(product, in_axes=(0, 0, 0, None)))
    text = batched.trace(a, b, scales, scales[1]).lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" not in text
    expected = np.einsum("bmk,bnk->bmn", a, b) * np.asarray(scales)[:, None, None] * np.float32(1.003)
    assert relative_error(batched(a, b, scales, scales[1]), expected) < 3e-3
    assert len(re.findall(r"dot_general.*f8E4M3FN.*f8E4M3FN.*xf32>", text)) == 1


def test_meshes_keep_the_epilogue(monkeypatch):
    monkeypatch.setattr(cuda, "capability", lambda: (9, 0))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert cuda.is_alone()
    seen = []

    def inside(x):
        seen.append((cuda.is_alone(), cuda.folds_scales(*LARGE)))
        return cuda.row_major(x)

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    spec = PartitionSpec("data")
    jaxpr = jax.make_jaxpr(jax.shard_map(inside, mesh=mesh, in_specs=spec, out_specs=spec))(np.ones((16, 16)))
    assert seen == [(False, False)]
    assert "layout_constraint" not in str(jaxpr)


def test_several_devices_keep_the_epilogue(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert not cuda.is_alone()
    assert not cuda.folds_scales(*LARGE)


def test_another_jaxlib_keeps_the_epilogue(hopper):
    hopper.setattr(cuda, "_probed", lambda: True)
    for version, known in (("0.10.2", False), ("0.12.0", False), ("0.11.2", True)):
        hopper.setattr(cuda, "version", lambda _, version=version: version)
        assert cuda.folds_scales(*LARGE) is known
    assert not cuda.folds_scales(1024, 1024, 1024), "XLA merges small dots"


@pytest.mark.skipif(HAS_GPU, reason="a CUDA device is there")
def test_the_probe_sees_rounded_scales(monkeypatch):
    """A CPU multiplies what is written: scales of bfloat16. So the probe says no, and why."""
    cuda._probed.cache_clear()
    with logged(logging.INFO) as messages:
        assert cuda._probed() is False
    assert "XLA would round them to bfloat16" in "\n".join(messages)
    cuda._probed.cache_clear()

    def exact(codes_a, codes_b, scale_a, scale_b, precision):
        wide = [codes.astype(jnp.float32) for codes in (codes_a, codes_b)]
        product = lax.dot_general(*wide, (((1,), (1,)), ((), ())), precision=precision)
        return (product * scale_a * scale_b).astype(jnp.bfloat16)

    monkeypatch.setattr(cuda, "scaled_product", exact)
    assert cuda._probed() is True
    cuda._probed.cache_clear()


def test_a_probe_that_fails_to_compile_is_an_answer(monkeypatch):
    def refuses(*_):
        raise RuntimeError("GEMM is not supported")

    monkeypatch.setattr(cuda, "_folds_exactly", refuses)
    cuda._probed.cache_clear()
    with logged(logging.INFO) as messages:
        assert cuda._probed() is False
    assert "in the epilogue: GEMM is not supported" in "\n".join(messages)
    cuda._probed.cache_clear()


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_tensor_e5m2", "fp8_row", "mxfp8", "fp8_1x128"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_bytes_on_a_gpu_beside_the_gemm(name, axis):
    """Codes that leave a program in which a GEMM and a dequantization read them too."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((256, 384)).astype(np.float32) * np.exp2(rng.integers(-20, 20, (256, 384))).astype(
        np.float32
    )
    x[3, 5], x[7, 40], x[9], x[10], x[12, :4] = np.nan, np.inf, 0, 1e-42, (-0.0, 3e38, -3e38, 1e-45)
    cast = as_cast(name)

    def step(x):
        q = mj.quantize(x, cast, axis=axis)
        return q, mj.scaled_matmul(q, q, out_dtype=jnp.bfloat16), mj.dequantize(q)

    q, _, values = jax.jit(step)(x)
    expected = reference.quantize(x, cast, axis=axis)
    np.testing.assert_array_equal(np.asarray(q.codes).view(np.uint8), np.asarray(expected.codes).view(np.uint8))
    np.testing.assert_array_equal(np.asarray(q.scale), np.asarray(expected.scale).reshape(q.scale.shape))
    np.testing.assert_array_equal(np.asarray(values), reference.dequantize(expected))


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
def test_large_products_on_a_gpu():
    """docs/numerics.md 8.3: Hopper split, plus one rounding; large enough for the scales to go into the GEMM."""
    rng = np.random.default_rng(7)
    x, w = (rng.integers(-8, 9, (rows, 544)).astype(np.float32) for rows in (8208, 8192))
    # The scales become 1 + 3 * 2^-10, which is between two bfloat16 numbers.
    x[0, 0], w[0, 0] = 57344 * (1 + 3 * 2.0**-10), 448 * (1 + 3 * 2.0**-10)

    def product(x, w):
        a, b = mj.quantize(x, "fp8_tensor_e5m2"), mj.quantize(w, "fp8_tensor")
        return mj.scaled_matmul(a, b, out_dtype=jnp.bfloat16)[1:65, 1:], a.dequantize()[1:65], b.dequantize()[1:]

    actual, a, b = (np.asarray(value).astype(np.float64) for value in jax.jit(product)(x, w))
    expected = a @ b.T
    assert relative_error(actual, expected) < 3e-3
    # Roundings of the result average out; a rounded scale would be off by 2.9e-3 everywhere.
    assert abs((actual * expected).sum() / (expected * expected).sum() - 1) < 2e-4


@pytest.fixture
def own_products(hopper):
    """Products that microfloat's GEMM is asked for on a Hopper where it can be built: scales, and rows of both."""
    pytest.importorskip("triton", reason="triton is not installed")
    from microfloat.jax.backends import kernels, program

    asked = []

    def multiply(a, b, scales, out, capability, *, fast, is_turned):
        asked.append((f"{scales}, turned" if is_turned else scales, a.codes.shape, b.codes.shape))
        made = jnp.zeros((a.codes.shape[0], b.codes.shape[0]), out)
        return made.T if is_turned else made

    hopper.setattr(kernels, "why_no_gemm", lambda: "")
    hopper.setattr(program, "multiply_fp8", multiply)
    return asked


def traced_product(names, shape, path="auto", **options):
    """The product [M, N] of matrices under two casts, as it is traced."""
    m, k, n = shape
    bfloat16, used = jnp.dtype(jnp.bfloat16), [as_cast(name) for name in names]
    kinds = [reference_in_jax.kind_of(cast, k) for cast in used]
    plan = gemms.GemmPlan(*kinds, "split", path, "auto", bfloat16, bfloat16, **options)
    operands = [
        jax.eval_shape(lambda x, cast=cast: reference_in_jax.cast_matrix(x, cast), jax.ShapeDtypeStruct(size, bfloat16))
        for size, cast in zip(((m, k), (n, k)), used, strict=True)
    ]
    return jax.eval_shape(lambda a, b: gemms.run_gemm(a, b, plan), *operands)


@pytest.mark.parametrize(
    ("names", "shape", "scales"),
    [
        (("fp8_1x128", "fp8_128x128"), (1536, 1024, 1152), ["tiles"]),
        (("fp8_1x128", "fp8_1x128"), (1532, 1040, 1168), ["lines"]),
        (("fp8_row", "fp8_row_e5m2"), (1536, 1024, 1152), ["rows"]),
        (("fp8_row", "fp8_row"), (1536, 1024, 1168), []),  # columns that are no whole tiles
        (("fp8_1x128", "fp8_128x128"), (1534, 1024, 1152), []),  # no multiple of 4 rows
        (("fp8_1x128", "fp8_128x128"), (64, 128, 256), []),  # less than a kernel is compiled for
        (("fp8_row", "fp8_tensor"), (1536, 1024, 1152), []),
        (("mxfp8", "mxfp8"), (1536, 1024, 1152), []),
    ],
)  # fmt: skip
def test_fp8_blocks_and_rows_go_into_the_gemm_of_microfloat(own_products, names, shape, scales):
    m, k, n = shape
    assert traced_product(names, shape).shape == (m, n)
    assert own_products == [(kind, (m, k), (n, k)) for kind in scales]


@pytest.mark.parametrize(
    ("names", "m", "asked"),
    [(("fp8_row", "fp8_row_e5m2"), 1536, ["rows"]), (("fp8_1x128", "fp8_1x128"), 1160, ["lines"]),
     (("fp8_1x128", "fp8_128x128"), 1552, ["tiles"]),
     (("fp8_1x128", "fp8_128x128"), 1548, [])],  # rows of 8 bytes and no multiple of 16
)  # fmt: skip
def test_a_product_that_is_read_as_its_transpose_is_written_so(own_products, names, m, asked):
    k, n = 1024, 1280
    assert traced_product(names, (m, k, n), is_turned=True).shape == (m, n)
    assert own_products == [(f"{kind}, turned", (m, k), (n, k)) for kind in asked]


@pytest.mark.parametrize(("recipe", "kind"), [("fp8_block", "lines"), ("fp8_row", "rows")])
def test_gradients_of_weights_are_written_in_the_order_of_the_weight(own_products, recipe, kind):
    m, k, n = 1536, 1024, 1280

    def of_weight(shape, axis):
        def loss(x, w):
            return mj.dot_general(recipe)(x, w, (((1,), (axis,)), ((), ()))).astype(jnp.float32).sum()

        arrays = [jax.ShapeDtypeStruct(one, jnp.bfloat16) for one in ((m, k), shape)]
        own_products.clear()
        assert jax.eval_shape(jax.grad(loss, argnums=1), *arrays).shape == shape
        return own_products[-1]

    assert of_weight((k, n), 0) == (f"{kind}, turned", (n, m), (k, m))
    assert of_weight((n, k), 1) == (kind, (n, m), (k, m))


FOLDING = [MXFP8BlockScaling(path="folded"), NVFP4BlockScaling(path="folded")]


@pytest.mark.parametrize("recipe", ["fp8_block", "fp8_row", *FOLDING], ids=str)
def test_explain_names_the_gemm_of_microfloat(recipe):
    """Of an H200 that this machine lacks; a Blackwell has none."""
    text = str(mj.explain(recipe, "h200"))
    assert "microfloat's FP8 GEMM" in text
    assert "bfloat16 dot" not in text
    assert "microfloat's FP8 GEMM" not in str(mj.explain(recipe, "b200"))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "nvfp4", "nvfp4_row"])
def test_folded_operands_go_into_the_gemm_of_microfloat(own_products, name):
    m, k, n = 1536, 1024, 1152
    names = name, "nvfp4_2d" if name == "nvfp4" else name
    assert traced_product(names, (m, k, n), "folded").shape == (m, n)
    assert own_products == [("lines" if name == "nvfp4_row" else "tiles", (m, k), (n, k))]


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("pair0", "pair1"))
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_2d"), ("nvfp4_row", "nvfp4"), ("mxfp8", "mxfp8")])
def test_the_gemm_of_microfloat_gets_the_values_of_folds(own_products, hopper, pair):
    """Tensor scales are part of the scales that it takes (docs/numerics.md 9.4)."""
    from microfloat.jax.backends import kernels, program

    def multiply(a, b, scales, out, capability, **_):
        assert a.tensor_scale is b.tensor_scale is None
        values = [
            q.codes.astype(jnp.float32)
            * jnp.repeat(jnp.repeat(q.scale, len(q.codes) // len(q.scale), 0), 128, 1)
            for q in (a, b)
        ]  # fmt: skip
        return (values[0] @ values[1].T).astype(out)

    hopper.setattr(program, "multiply_fp8", multiply)
    hopper.setattr(kernels, "on_either", lambda own, other: own)
    hopper.setattr(gemms, "_LEAST_PRODUCTS", 1)
    rng, (m, k, n), bfloat16 = np.random.default_rng(4), (128, 256, 128), jnp.dtype(jnp.bfloat16)
    stored = [reference.quantize((rng.standard_normal((rows, k)) * 1e3).astype(np.float32), name)
              for rows, name in zip((m, n), pair, strict=True)]  # fmt: skip
    right = (1, 128) if pair[0] == "nvfp4_row" else (128, 128)
    folds = [reference.fold(q, block)[0] for q, block in zip(stored, ((1, 128), right), strict=True)]
    kinds = [reference_in_jax.kind_of(as_cast(name), k) for name in pair]
    plan = gemms.GemmPlan(*kinds, "split", "folded", "auto", bfloat16, bfloat16)
    matrices = [
        reference_in_jax.Matrix(jnp.asarray(q.codes), jnp.asarray(q.scale),
                                None if q.tensor_scale is None else jnp.asarray(q.tensor_scale))
        for q in stored
    ]  # fmt: skip
    actual = np.asarray(gemms.run_gemm(*matrices, plan)).astype(np.float64)
    assert relative_error(actual, reference.scaled_matmul(*folds)) < 3e-3


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("pair1",))
@pytest.mark.parametrize("pair", [("nvfp4", "nvfp4_2d"), ("nvfp4_row", "nvfp4_row"), ("mxfp8", "mxfp8")])
def test_operands_that_a_kernel_folded_multiply_in_bfloat16(pair):
    """Where microfloat's GEMM does not take them: powers of two, beside the significand of the tensor scale."""
    rng, (m, k, n) = np.random.default_rng(6), (130, 300, 140)
    form = "folded" if pair[0] == "nvfp4_row" else "tiles"
    stored, matrices, kinds = [], [], []
    for rows, name, one in zip((m, n), pair, ("folded", form), strict=True):
        x = (rng.standard_normal((rows, k)) * 1e3).astype(np.float32)
        x[5], x[7, 3] = 0, np.nan if one == "folded" else 0
        q = reference.quantize(x, name)
        stored.append(reference.fold(q, (1, 128) if one == "folded" else (128, 128))[0])
        kind = reference_in_jax.kind_of(as_cast(name), k)
        level = None if q.tensor_scale is None else jnp.asarray(q.tensor_scale)
        made = reference_in_jax.Matrix(jnp.asarray(q.codes), jnp.asarray(q.scale), level)
        matrix = reference_in_jax.with_level(reference_in_jax.folded(made, kind, one)[0])
        again, kind = reference_in_jax.folded(matrix, kind, one)
        assert again is matrix
        powers = reference_in_jax.in_powers(matrix)
        np.testing.assert_array_equal(np.frexp(powers.scale)[0][np.isfinite(powers.scale)], 0.5)
        matrices.append(matrix)
        kinds.append(kind)
    actual = np.asarray(gemms.gemm(*matrices, *kinds, "blocks", "split"))
    expected = reference.scaled_matmul(*stored)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    assert relative_error(np.nan_to_num(actual), np.nan_to_num(expected)) < 1e-5


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("pair", [("fp8_1x128", "fp8_128x128"), ("fp8_1x128", "fp8_1x128"), ("fp8_row", "fp8_row")])
@pytest.mark.parametrize("shape", [(1000, 1040, 1152), (2048, 1536, 1024)])
def test_products_of_the_gemm_on_a_gpu(pair, shape):
    """Ragged tiles of every kind of scales; tolerances of docs/numerics.md 8.3."""
    (m, k, n), rng = shape, np.random.default_rng(11)
    x, w = (rng.standard_normal((rows, k)).astype(np.float32) for rows in (m, n))

    def product(x, w):
        a, b = mj.quantize(x, pair[0]), mj.quantize(w, pair[1])
        return mj.scaled_matmul(a, b, out_dtype=jnp.bfloat16), a.dequantize(), b.dequantize()

    actual, a, b = (np.asarray(value).astype(np.float64) for value in jax.jit(product)(x, w))
    assert relative_error(actual, a @ b.T) < 3e-3


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("pair", [("mxfp8", "mxfp8"), ("mxfp4", "mxfp4"), ("nvfp4", "nvfp4_2d")])
def test_folded_products_on_a_gpu(pair):
    """The product of operands that are folded is that of the oracle's folds; tolerances of docs/numerics.md 8.3."""
    (m, k, n), rng, bfloat16 = (1000, 1040, 1152), np.random.default_rng(12), jnp.dtype(jnp.bfloat16)
    stored = [reference.quantize(rng.standard_normal((rows, k)).astype(np.float32), name)
              for rows, name in zip((m, n), pair, strict=True)]  # fmt: skip
    folds = [reference.fold(q, block)[0] for q, block in zip(stored, ((1, 128), (128, 128)), strict=True)]
    kinds = [reference_in_jax.kind_of(as_cast(name), k) for name in pair]
    plan = gemms.GemmPlan(*kinds, "split", "folded", "auto", bfloat16, bfloat16)
    assert gemms.route_of_plan(plan, (9, 0)).kind == "blocks"
    matrices = [
        reference_in_jax.Matrix(jnp.asarray(q.codes), jnp.asarray(q.scale),
                                None if q.tensor_scale is None else jnp.asarray(q.tensor_scale))
        for q in stored
    ]  # fmt: skip
    actual = jax.jit(lambda a, b: gemms.run_gemm(a, b, plan))(*matrices)
    assert relative_error(np.asarray(actual).astype(np.float64), reference.scaled_matmul(*folds)) < 3e-3
