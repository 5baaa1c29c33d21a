"""The native backend: what is chosen for which chip, its GEMMs on this platform, and what is lowered for a GPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import Support, reference
from microfloat.chips import Chip
from microfloat.errors import InvalidTypeError
from microfloat.jax.backends import gemms
from microfloat.jax.backends import reference as emulation
from microfloat.jax.explain import dots_of
from microfloat.recipes import (
    RECIPES,
    Cast,
    Float8CurrentScaling,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    from_name,
)
from microfloat.routes import route_of
from tests.jax.compare import relative_error

RNG = np.random.default_rng(17)
X, W = RNG.standard_normal((40, 72)).astype(np.float32), RNG.standard_normal((24, 72)).astype(np.float32)
PLAIN = (((1,), (1,)), ((), ()))


@pytest.mark.parametrize(
    ("recipe", "chip", "way", "accelerated"),
    [
        ("fp8_current", None, "float32", False),
        ("fp8_current", (8, 0), "values", False),
        ("fp8_current", (8, 9), "fp8", True),
        ("fp8_row", (9, 0), "fp8", True),
        ("fp8_block", (9, 0), "values", False),
        ("mxfp8", (9, 0), "values", False),
        ("mxfp8", (10, 0), "block_scaled", True),
        ("mxfp6", (10, 0), "values", False),
        ("nvfp4", (9, 0), "values", False),
        ("nvfp4", (10, 0), "block_scaled", True),
    ],
)
def test_choice(recipe, chip, way, accelerated):
    route = route_of(from_name(recipe).fprop, chip and Chip(chip), library="xla")
    assert (route.kind, route.accelerated) == (way, accelerated)
    assert route.reason


def test_float32_block_scales_do_not_fit_bfloat16():
    cast = Cast("fp8_1x128", "amax")
    assert route_of(Gemm(cast, cast), Chip((9, 0)), library="xla").kind == "float32"


def quantized(name, x):
    q = mj.quantize(x, name)
    return mj.array.as_matrix(q), emulation.kind_of(Cast(name), x.shape[1])


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("fp8-fp8_tensor", "values-mxfp8"))
@pytest.mark.parametrize(
    ("way", "name"),
    [("fp8", "fp8_tensor"), ("fp8", "fp8_row"), ("values", "fp8_tensor"), ("values", "fp8_1x128"), ("values", "mxfp8"),
     ("values", "mxfp6_e2m3"), ("values", "nvfp4"), ("values", "nvfp4_2d")],
)  # fmt: skip
def test_gemms_of_every_way(way, name):
    """Each way multiplies the same values; only the order of sums may differ."""
    (a, kind_a), (b, kind_b) = quantized(name, X), quantized(name, W)
    expected = reference.scaled_matmul(reference.quantize(X, name), reference.quantize(W, name))
    # docs/numerics.md 8.3: CPU and bfloat16 dots, Hopper split and fast
    on_gpu = way == "fp8" and jax.default_backend() != "cpu"
    for accumulate, tolerance in (("split", 5e-4), ("fast", 5e-3)) if way == "fp8" else (("split", 1e-5),):
        actual = jax.jit(lambda a, b, mode=accumulate: gemms.gemm(a, b, kind_a, kind_b, way, mode))(a, b)
        assert relative_error(actual, expected) < (tolerance if on_gpu else 1e-5)


def test_mx_operands_are_whole_blocks():
    """The operands of jax.nn.scaled_matmul decode to the same values, padding to zero."""
    for name in ("mxfp8", "nvfp4_2d", "nvfp4"):
        matrix, kind = quantized(name, X)
        data, scale = jax.jit(lambda m, kind=kind: gemms._mx_operand(m, kind))(matrix)
        block = kind.format.block[1]
        factors = np.asarray(scale[0].astype(jnp.float32))
        values = np.asarray(data[0].astype(jnp.float32)) * np.repeat(factors, block, axis=1)
        expected = reference.dequantize(reference.quantize(X, name))
        if matrix.tensor_scale is not None:
            values = values * np.float32(matrix.tensor_scale)
        np.testing.assert_allclose(values[: X.shape[0], : X.shape[1]], expected, rtol=1e-6)
        assert not values[:, X.shape[1] :].any()
        assert data.shape[1] % 128 == 0
        assert scale.shape[2] % 4 == 0


def lowered_for_cuda(way, name):
    (a, kind_a), (b, kind_b) = quantized(name, X), quantized(name, W)
    run = jax.jit(lambda a, b: gemms.gemm(a, b, kind_a, kind_b, way, "fast"))
    return run.trace(a, b).lower(lowering_platforms=("cuda",)).as_text()


def test_lowering_for_a_gpu():
    """Features J16: No GPU is needed to see what XLA is given: FP8 operands in the dot, and the block-scaled call."""
    dot = re.search(r"dot_general.*: \((.*?)\) -> (\S+)", lowered_for_cuda("fp8", "fp8_tensor"))
    assert dot[1] == "tensor<48x80xf8E4M3FN>, tensor<32x80xf8E4M3FN>", "operands are padded to multiples of 16"
    assert dot[2] == "tensor<48x32xf32>"
    for name, element in (("mxfp8", "f8E4M3FN"), ("nvfp4", "f4E2M1FN")):
        text = lowered_for_cuda("block_scaled", name)
        assert element in text
        assert "block_scaled_dot" in text or "scaled" in text


def test_strict_mode_refuses_to_emulate():
    op = mj.dot_general(MXFP8BlockScaling(), backend="native")
    if gemms.capability() is not None and gemms.capability() >= (10, 0):
        pytest.skip("this chip has a native block-scaled dot")
    with pytest.raises(RuntimeError, match=r"backend: got 'native'.*Use backend='auto'"):
        jax.jit(op, static_argnums=2)(X, W, PLAIN)
    with pytest.raises(RuntimeError, match="backend: got 'native'"):
        mj.scaled_matmul(mj.quantize(X, "nvfp4"), mj.quantize(W, "nvfp4"), backend="native")
    same = [mj.dot_general(MXFP8BlockScaling(), backend=backend)(X, W, PLAIN) for backend in ("auto", "reference")]
    assert relative_error(*same) < 1e-5


@pytest.mark.skipif(gemms.capability() is not None, reason="a CUDA device is there")
def test_explain_without_a_gpu():
    table = mj.explain(NVFP4BlockScaling(), "cpu", (40, 72, 24))
    assert " ".join(str(table).split()).startswith(f"{NVFP4BlockScaling()!r} on cpu GEMM")
    assert [row.padding for row in table.rows] == ["72 -> 80", "24 -> 32", "40 -> 48"]
    assert not table.accelerated
    assert all(row.support and row.support.reason.startswith("emulated: ") for row in table.rows)
    absent = mj.explain("mxfp8", "cuda")
    assert not any(row.support.available for row in absent.rows)
    shaped = mj.explain("mxfp8", jax.ShapeDtypeStruct((4, 8, 40), jnp.float32), W[:, :40], (((2,), (1,)), ((), ())))
    assert [row.padding for row in shaped.rows] == ["40 -> 64", "24 -> 32", "none"]
    for query in (mj.is_fp8_available, mj.is_mxfp8_available, mj.is_nvfp4_available, mj.is_fp8_block_scaling_available):
        support = query()
        available, reason = support
        assert isinstance(support, Support)
        assert available
        assert not support.accelerated
        assert "emulated" in reason
        assert not query("cuda").available


@pytest.mark.skipif(gemms.capability() is not None, reason="a CUDA device is there")
def test_explain_an_einsum():
    op = mj.einsum("mxfp8")
    lhs, rhs = jax.ShapeDtypeStruct((4, 8, 40), jnp.float32), jax.ShapeDtypeStruct((40, 16), jnp.bfloat16)
    explained = mj.explain(op, "bmk,kn->nbm", lhs, rhs)
    assert repr(explained) == str(mj.explain("mxfp8", "cpu", (32, 40, 16)))
    assert str(mj.explain(op, "mk,nk", W, W)) == str(mj.explain(op, shape=(len(W), W.shape[1], len(W))))
    with pytest.raises(ValueError, match=r"arguments: got 2 of them, needed an equation, lhs and rhs"):
        mj.explain(op, lhs, rhs)
    with pytest.raises(ValueError, match="eqn: got 'mk,jn->mn'"):
        mj.explain(op, "mk,jn->mn", lhs, rhs)
    with pytest.raises(TypeError, match=r"arguments: got str, needed arrays.*lambda x: function"):
        mj.explain(lambda x, name: x, W, "a")


def test_explain_a_gpu_that_is_not_there():
    """By its name, generation or architecture, as torch's explain: complete there, whatever is installed here."""
    hopper = mj.explain("mxfp8", "h200", (8192, 4096, 4096))
    assert hopper.device == "h200 (Hopper, sm_90)"
    assert hopper.available
    assert [row.kernel for row in hopper.rows] == ["decode to bfloat16, bfloat16 dot"] * 3
    assert {row.kernel for row in hopper.casts} == {"kernels.blocks", "kernels.blocks (decoded to bfloat16)"}
    assert not any(row.reason for row in hopper.casts)
    assert [(row.gemm, row.tensor) for row in hopper.casts] == [
        ("fprop", "x"), ("fprop", "w"), ("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x"),
    ]  # fmt: skip
    assert mj.explain("fp8_current", "sm_90").accelerated
    assert mj.explain("mxfp8", "B200").accelerated
    assert not mj.explain("fp8_current", "a100").accelerated
    assert mj.is_mxfp8_available("blackwell").accelerated
    small = mj.explain("mxfp8", "hopper", (64, 64, 64))
    assert {row.reason for row in small.casts} == {"fewer than 65536 elements"}
    assert max(map(len, str(mj.explain("nvfp4", "h200")).splitlines())) <= 110
    assert hopper.to_dict()["casts"][0]["kernel"] == "kernels.blocks (decoded to bfloat16)"
    with pytest.raises(ValueError, match=r"device: got 'h2000'.*such as 'h200'"):
        mj.explain("mxfp8", "h2000")


def test_explain_a_program():
    """Features J15."""
    explained = mj.explain(lambda x, w: mj.dot_general(Float8CurrentScaling())(x, w, PLAIN), X, W)
    if jax.default_backend() == "cpu":
        assert not explained.calls_fp8
        assert repr(explained).startswith("No Fp8 call!")
    else:
        assert explained.calls_fp8
    assert explained.rows


_PROGRAM = """HloModule jit_f
%fused (p.1: f8e4m3fn[16,32], p.2: f8e5m2[64,32]) -> f32[16,64] {
  %p.1 = f8e4m3fn[16,32]{1,0} parameter(0)
  %p.2 = f8e5m2[64,32]{1,0} parameter(1)
  ROOT %dot.5 = f32[16,64]{1,0} dot(%p.1, %p.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
ENTRY %main (a: bf16[16,32]) -> bf16[16,64] {
  %codes = f8e4m3fn[16,32]{1,0} fusion(%a), kind=kLoop, calls=%cast
  %other.1 = f8e4m3fn[64,32]{1,0} fusion(%b), kind=kLoop, calls=%cast
  %one = f32[] constant(1)
  %wide = bf16[64,32]{1,0} parameter(1)
  %call.1 = (bf16[16,64]{1,0}, s8[4]{0}) custom-call(%codes, %other.1, %one), custom_call_target="__cublas$lt$matmul$f8"
  %call.2 = (bf16[16,64]{1,0}, s8[4]{0}) custom-call(%a, %wide), custom_call_target="__cublas$gemm"
  ROOT %call.3 = f32[16,64]{1,0} custom-call(f8e4m3fn[16,32] %codes, f8e5m2[64,32] %x), custom_call_target="__cublas$lt$matmul$f8"
}"""  # noqa: E501


def test_dots_of_a_gpu_program():
    assert dots_of(_PROGRAM) == (
        ("dot.5", "f8e4m3fn x f8e5m2", True),
        ("call.1", "f8e4m3fn x f8e4m3fn", True),
        ("call.2", "? x bf16", False),
        ("call.3", "f8e4m3fn x f8e5m2", True),
    )


def test_explain_covers_every_recipe():
    for name in RECIPES:
        table = mj.explain(name)
        assert [row.gemm for row in table.rows] == ["fprop", "dgrad", "wgrad"]
    with pytest.raises(TypeError, match="recipe: got int"):
        mj.explain(3)
    with pytest.raises(ValueError, match="device: got 'npu'"):
        mj.explain("mxfp8", "npu")
    with pytest.raises(ValueError, match=r"shape: got \(1, 2\)"):
        mj.explain("mxfp8", shape=(1, 2))


@pytest.mark.parametrize("op", [mj.dot_general, mj.einsum])
def test_an_op_is_explained_as_its_recipe_and_backend(op):
    assert mj.explain(op("mxfp8"), "h200") == mj.explain("mxfp8", "h200")
    assert mj.explain(op("mxfp8", backend="reference"), "h200") == mj.explain("mxfp8", "h200", backend="reference")
    with pytest.raises(InvalidTypeError, match="recipe: got NoneType"):
        mj.explain(op(), "h200")


def test_a_product_of_an_op_is_explained_as_that_of_its_recipe():
    operands = np.ones((4, 64), np.float32), np.ones((64, 8), np.float32), (((1,), (0,)), ((), ()))
    assert mj.explain(mj.dot_general("mxfp8"), *operands) == mj.explain("mxfp8", *operands)
