"""Every golden file of another library is read to the values that its formula gives (features K4, K8 and U14)."""

import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import detect, load
from microfloat.formats import E4M3, decode
from tests.checkpoint.files import GOLDEN, NAMES, QUANTIZED, as_checkpoint, family_of

TORCHAO = "torchao_safetensors_flat"
# Files of static activations that hold a weight alone: load says so.
pytestmark = pytest.mark.filterwarnings("ignore:.*announces activations:UserWarning")


def reference_of(checkpoint, name):
    """The tensor `ref.*` of a golden file for one of its records."""
    names = [other for other in checkpoint if other.startswith("ref.")]
    assert len(names) == 1
    return checkpoint[names[0]].codes


@pytest.mark.parametrize("name", [name for name in QUANTIZED if name != TORCHAO])
def test_values_are_the_formula_exactly(name, tmp_path):
    checkpoint = load(as_checkpoint(name, tmp_path))
    records = [record for record in checkpoint.values() if record.format is not None]
    assert records
    for record in records:
        values, expected = record.dequantize(np.float32), reference_of(checkpoint, record.name)
        assert values.dtype == np.float32
        assert values.shape == expected.shape == record.logical_shape
        if record.name.startswith("ct_converted."):  # its divisor was rounded on the way: by 2.4e-8
            np.testing.assert_allclose(values, expected, rtol=2e-7)
        else:
            np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(record.dequantize("bfloat16"), values.astype("bfloat16"))


def test_torchao_values_are_what_torchao_dequantizes():
    checkpoint, expected = load(GOLDEN / f"{TORCHAO}.safetensors"), load(GOLDEN / f"{TORCHAO}_expected.safetensors")
    names = [name for name in checkpoint if checkpoint[name].format is not None]
    assert len(names) == 6
    assert "g.plain.weight" in checkpoint
    for name in names:
        values, wanted = checkpoint[name].dequantize(), expected[f"out.{name}"].codes
        np.testing.assert_array_equal(np.isnan(values), np.isnan(wanted))
        np.testing.assert_allclose(values, wanted, rtol=2e-7)
    swizzled, plain = checkpoint["b.nvfp4_swizzled.weight"], checkpoint["a.nvfp4.weight"]
    np.testing.assert_array_equal(swizzled.scale, plain.scale)
    assert checkpoint["c.nvfp4_one_level.weight"].tensor_scale is None


@pytest.mark.parametrize("name", QUANTIZED)
def test_detect_names_the_family_with_evidence(name, tmp_path):
    found = detect(as_checkpoint(name, tmp_path))
    assert found.family == family_of(name)
    assert found.evidence
    assert all(isinstance(line, str) for line in found.evidence)
    has_config = (tmp_path / "config.json").exists()
    assert found.evidence[0].startswith("config.json" if has_config else ("metadata", "tensors"))
    if has_config and not name.startswith("modelopt_nvfp4"):  # which also holds what a converter made of it
        assert found.confidence == 1.0


@pytest.mark.parametrize("name", QUANTIZED)
def test_tensors_alone_leave_the_family_among_the_candidates(name):
    found = detect(GOLDEN / f"{name}.safetensors")
    assert family_of(name) in found.candidates
    assert found.family == found.candidates[0]


@pytest.mark.parametrize("name", NAMES)
def test_no_golden_file_has_an_error_but_the_scales_that_were_not_written(name, tmp_path):
    findings = load(as_checkpoint(name, tmp_path)).findings
    lacks = name.startswith(("ct_fp8_16x128", "ct_nvfp4_16x128"))
    assert [one.id for one in findings if one.severity == "error"] == ["missing-input-scale"] * lacks


@pytest.mark.parametrize("name", QUANTIZED)
def test_codes_are_views_of_the_file(name, tmp_path):
    folder = as_checkpoint(name, tmp_path)
    for record in load(folder).values():
        base = record.codes
        while isinstance(base.base, np.ndarray):
            base = base.base
        assert base.base is not None
        assert not base.flags.owndata
        assert not record.codes.flags.writeable


@pytest.mark.parametrize("name", ["modelopt_nvfp4_16x128_float32", "ct_nvfp4_16x128_float32"])
def test_a_record_rounds_once_and_a_tensor_multiplies_the_scales_first(name, tmp_path):
    """The two definitions of docs/checkpoints.md, to the bit."""
    checkpoint = load(as_checkpoint(name, tmp_path))
    record = next(one for one in checkpoint.values() if one.format is not None and one.name.count(".") < 2)
    divisor = record.source.divisors.get("tensor_scale")
    q = record.to_quantized()
    scales = np.repeat(decode(record.scale, E4M3), 16, axis=-1)
    exact = decode(q.unpacked_codes(), record.format.element).astype(np.float64) * scales
    once = exact * record.tensor_scale.astype(np.float64) if divisor is None else exact / divisor.astype(np.float64)
    np.testing.assert_array_equal(record.dequantize(), once.astype(np.float32))
    of_tensor = decode(q.unpacked_codes(), record.format.element) * (scales * record.tensor_scale)
    np.testing.assert_array_equal(reference.dequantize(q), of_tensor)
    np.testing.assert_allclose(of_tensor, record.dequantize(), rtol=3 * 2.0**-24)
    assert (of_tensor != record.dequantize()).any()
