"""The same file gives NumPy, torch and JAX the same bytes (features K10 and J22)."""

import ml_dtypes
import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import Record, load, save
from microfloat.errors import MicrofloatError
from microfloat.formats import NVFP4, NVFP4_2D, FP8_128x128
from tests.checkpoint.files import GOLDEN, write
from tests.checkpoint.test_published import FOUR_OVER_SIX, four_over_six, fp_quant

NAMES = (
    "ct_nvfp4_16x128_bfloat16", "ct_mxfp6a16_16x128_bfloat16", "modelopt_mxfp8_16x128_bfloat16",
    "deepseek_fp8_block_200x144", "gptoss_mxfp4_down_proj", "ct_fp8_dynamic_16x128_float32",
)  # fmt: skip


@pytest.mark.slow_cases(
    "further JAX programs of a checked kind", all_but=("torch-*", "jax-ct_mxfp6a16*", "jax-ct_nvfp4*", "jax-gptoss*")
)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_front_ends_hold_the_bytes_of_the_file(name, framework):
    front = pytest.importorskip(f"microfloat.{framework}")
    records = [record for record in load(GOLDEN / f"{name}.safetensors").values() if record.format is not None]
    for record in records:
        made = (front.QuantizedTensor if framework == "torch" else front.QuantizedArray).from_record(record)
        oracle = record.to_quantized()
        np.testing.assert_array_equal(np.asarray(made.dequantize()), reference.dequantize(oracle))
        back = made.to_record(record.name)
        np.testing.assert_array_equal(back.codes, record.codes)
        np.testing.assert_array_equal(back.scale.reshape(-1), record.scale.reshape(-1))
        assert (back.format, back.logical_shape) == (record.format, record.logical_shape)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("torch-*", "jax-fp_quant"))
@pytest.mark.parametrize("dialect", ["fp_quant", "fouroversix"])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_codes_out_of_their_padding_are_taken(dialect, framework, tmp_path):
    front = pytest.importorskip(f"microfloat.{framework}")
    tensors, config = four_over_six(8, 96)[0], FOUR_OVER_SIX
    if dialect == "fp_quant":
        tensors, config, _ = fp_quant("nvfp4", 10, np.eye(16, dtype=ml_dtypes.bfloat16), padded=True)
    loaded = load(write(tmp_path / "model.safetensors", tensors, config=config).parent)
    (record,) = [one for one in loaded.values() if one.format is not None]
    made = (front.QuantizedTensor if framework == "torch" else front.QuantizedArray).from_record(record)
    np.testing.assert_array_equal(np.asarray(made.dequantize()), reference.dequantize(record.to_quantized()))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("torch",))
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_tensor_scale_for_each_row_goes_there_and_back(framework):
    front = pytest.importorskip(f"microfloat.{framework}")
    x = np.random.default_rng(0).standard_normal((2, 6, 32), dtype=np.float32)
    made = front.quantize(pytest.importorskip("torch").from_numpy(x) if framework == "torch" else x, "nvfp4_row")
    record = made.to_record("e")
    assert record.tensor_scale.shape == (2, 6, 1)
    np.testing.assert_allclose(record.narrow(1, 2).dequantize(), np.asarray(made.dequantize())[1:], rtol=2e-7)
    back = (front.QuantizedTensor if framework == "torch" else front.QuantizedArray).from_record(record)
    np.testing.assert_array_equal(np.asarray(back.dequantize()), np.asarray(made.dequantize()))


def fp8_experts(rows):
    """Experts in FP8 under 128x128 tiles, which may end inside of one."""
    rng = np.random.default_rng(rows)
    codes = rng.uniform(-400, 400, (3, rows, 160)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    scale = rng.uniform(0.5, 2, (3, -(-rows // 128), 2)).astype(np.float32)
    return Record("experts", codes, scale, format=FP8_128x128, logical_shape=codes.shape)


def nvfp4_experts(block):
    """Experts in NVFP4 with a tensor scale each."""
    rng = np.random.default_rng(7)
    codes = rng.integers(0, 256, (3, 32, 16), np.uint8)
    scale = rng.uniform(0.5, 2, (3, 32 // block[0], 2)).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    level = rng.uniform(0.5, 2, (3, 1, 1)).astype(np.float32)
    fmt = NVFP4 if block == NVFP4.block else NVFP4_2D
    return Record("experts", codes, scale, level, fmt, (3, 32, 32))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("torch-*", "jax-record0", "jax-record4"))
@pytest.mark.parametrize(
    "record", [fp8_experts(128), fp8_experts(160), fp8_experts(96), nvfp4_experts((1, 16)), nvfp4_experts((16, 16))]
)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_front_ends_hold_experts_whatever_their_tiles_and_scales(framework, record, tmp_path):
    front = pytest.importorskip(f"microfloat.{framework}")
    made = (front.QuantizedTensor if framework == "torch" else front.QuantizedArray).from_record(record)
    np.testing.assert_allclose(np.asarray(made.dequantize()), record.dequantize(), rtol=2e-7)
    np.testing.assert_array_equal(reference.dequantize(record.to_quantized()), np.asarray(made.dequantize()))
    save([back := made.to_record("experts")], tmp_path / "model", format="microfloat:native")
    np.testing.assert_array_equal(back.codes, record.codes)
    np.testing.assert_array_equal(load(tmp_path / "model")["experts"].dequantize(), record.dequantize())


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("torch",))
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_tiles_that_reach_over_several_matrices_are_no_record(framework):
    front = pytest.importorskip(f"microfloat.{framework}")
    x = np.ones((3, 40, 128), np.float32)
    made = front.quantize(pytest.importorskip("torch").from_numpy(x) if framework == "torch" else x, "fp8_128x128")
    with pytest.raises(MicrofloatError, match=r"reach over several matrices.*one by one"):
        made.to_record("experts")
