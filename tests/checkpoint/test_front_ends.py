"""The same file gives NumPy, torch and JAX the same bytes (features K10 and J22)."""

import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import load
from tests.checkpoint.files import GOLDEN

NAMES = (
    "ct_nvfp4_16x128_bfloat16", "ct_mxfp6a16_16x128_bfloat16", "modelopt_mxfp8_16x128_bfloat16",
    "deepseek_fp8_block_200x144", "gptoss_mxfp4_down_proj", "ct_fp8_dynamic_16x128_float32",
)  # fmt: skip


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
