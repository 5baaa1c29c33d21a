"""Stored forms that no golden file has: mixed configurations, FP8 tiles on four axes, extras, parts of experts."""

import ml_dtypes
import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import convert, detect, load, save
from microfloat.errors import CheckpointError, InvalidTypeError
from microfloat.formats import E4M3, decode
from tests.checkpoint.files import nvfp4, write

NAMES = {
    "modelopt": {"codes": "weight", "scale": "weight_scale", "global": "weight_scale_2"},
    "ct": {"codes": "weight_packed", "scale": "weight_scale", "global": "weight_global_scale"},
}


def layer(name, dialect="modelopt", **more):
    """The tensors of an NVFP4 layer, and others beside them."""
    parts = {NAMES[dialect][role]: array for role, array in nvfp4(seed=len(name)).items()}
    return {f"{name}.{last}": array for last, array in {**parts, **more}.items()}


def fp8(*shape, seed=1):
    return np.random.default_rng(seed).integers(0, 0x70, shape, np.uint8).view(ml_dtypes.float8_e4m3fn)


def test_what_is_no_path_is_named():
    for call in (load, detect):
        for path in (None, 3, {"weight": np.ones((4, 32))}):
            with pytest.raises(InvalidTypeError, match=r"path: got .*, needed a str or a pathlib.Path"):
                call(path)


def test_mixed_precision_of_modelopt(tmp_path):
    mx = {"b.weight": fp8(4, 64), "b.weight_scale": np.full((4, 2), 126, np.uint8)}
    table = {"a": {"quant_algo": "W4A16_NVFP4", "group_size": 16}, "b": {"quant_algo": "MXFP8", "group_size": 32},
             "c": {"quant_algo": "FP8"}}  # fmt: skip
    tensors = {**layer("a"), **mx, "c.weight": fp8(4, 32), "c.weight_scale": np.float32(0.5),
               "c.input_scale": np.float32(2), "lm_head.weight": np.ones((4, 32), np.float32)}  # fmt: skip
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": table,
              "ignore": ["lm_head"]}  # fmt: skip
    checkpoint = load(write(tmp_path / "model.safetensors", tensors, config=config))
    assert checkpoint.detection.family == "modelopt:mixed"
    assert checkpoint.detection.confidence == 1.0
    formats = {name: record.format.name for name, record in checkpoint.items() if record.format}
    assert formats == {"a.weight": "nvfp4", "b.weight": "mxfp8", "c.weight": "fp8_tensor"}
    assert [checkpoint[f"{name}.weight"].activation["scheme"] for name in "abc"] == ["none", "dynamic", "static"]
    values = decode(mx["b.weight"].view(np.uint8), E4M3) / 2
    np.testing.assert_array_equal(checkpoint["b.weight"].dequantize(), values)
    assert not [finding for finding in checkpoint.findings if finding.severity != "info"]
    table["b"]["group_size"] = 16  # against the tensors
    findings = load(write(tmp_path / "model.safetensors", tensors, config=config)).findings
    assert [(one.id, one.tensor) for one in findings if one.severity != "info"] == [("config-disagrees", "b.weight")]


def test_mixed_groups_of_compressed_tensors(tmp_path):
    tensors = {**layer("m.a", "ct"), "m.b.weight": fp8(4, 64), "m.b.weight_scale": np.full((4, 2), 130, np.uint8),
               "m.c.weight": fp8(4, 32), "m.c.weight_scale": np.full((4, 1), 2, ml_dtypes.bfloat16)}  # fmt: skip
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    groups = {
        "group_0": {"targets": ["re:.*a$"], "format": "nvfp4-pack-quantized", "weights": {"group_size": 16}},
        "group_1": {"targets": ["m.b"], "format": "mxfp8-quantized", "weights": {"group_size": 32}},
        "group_2": {"targets": ["Linear"], "format": "float-quantized", "weights": weights,
                    "input_activations": {"strategy": "token", "dynamic": True}},
    }  # fmt: skip
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups, "ignore": []}
    checkpoint = load(write(tmp_path / "model.safetensors", tensors, config=config))
    assert checkpoint.detection.family == "ct:mixed"
    formats = {name: record.format.name for name, record in checkpoint.items()}
    assert formats == {"m.a.weight": "nvfp4", "m.b.weight": "mxfp8", "m.c.weight": "fp8_row"}
    assert checkpoint["m.c.weight"].activation["format"].name == "fp8_row"
    np.testing.assert_array_equal(
        checkpoint["m.c.weight"].dequantize(), decode(tensors["m.c.weight"].view(np.uint8), E4M3) * 2
    )
    assert not [finding for finding in checkpoint.findings if finding.severity != "info"]


@pytest.mark.parametrize("four_axes", [True, False])
def test_tiles_of_modelopt_stand_on_four_axes(four_axes, tmp_path):
    """FP8_PB_WO: [rows, 1, columns, 1]; short tiles at the edges."""
    scale = np.array([[1, 2], [4, 8]], np.float32)
    tensors = {"x.weight": fp8(200, 144), "x.weight_scale": scale[:, None, :, None] if four_axes else scale}
    config = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    record = load(write(tmp_path / "model.safetensors", tensors, config=config))["x.weight"]
    assert (record.format.name, record.scale.shape) == ("fp8_128x128", (2, 2))
    each = np.repeat(np.repeat(scale, 128, 0), 128, 1)[:200, :144]
    np.testing.assert_array_equal(record.dequantize(), decode(tensors["x.weight"].view(np.uint8), E4M3) * each)
    np.testing.assert_array_equal(record.narrow(128, 200).dequantize(), record.dequantize()[128:])


EXTRAS = {
    "pre_quant_scale": np.linspace(0.5, 2, 32).astype(np.float32),
    "svdquant_lora_a": np.ones((2, 32), np.float32), "svdquant_lora_b": np.ones((4, 2), np.float32),
}  # fmt: skip


@pytest.mark.parametrize(("algorithm", "names"), [("NVFP4_AWQ", ["pre_quant_scale"]), ("NVFP4_SVD", list(EXTRAS))])
def test_what_awq_and_svd_keep_beside_a_weight_arrives(algorithm, names, tmp_path):  # features I7
    extras, of_input = {name: EXTRAS[name] for name in names}, {"input_scale": np.float32(2)}
    tensors = {**layer("x", **of_input, **extras), **layer("x.k_proj", **of_input, k_scale=np.float32(0.5))}
    config = {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    checkpoint = load(write(tmp_path / "model.safetensors", tensors, config=config))
    record = checkpoint["x.weight"]
    assert {name: array.tolist() for name, array in record.extras.items()} == {
        name: array.tolist() for name, array in extras.items()
    }
    assert checkpoint["x.k_proj.weight"].extras["k_scale"] == 0.5
    assert set(checkpoint) == {"x.weight", "x.k_proj.weight"}
    save(checkpoint, tmp_path / "again", format="modelopt:nvfp4")
    again = load(tmp_path / "again").tensors
    assert {name: array.tobytes() for name, array in again.items()} == {
        name: np.asarray(array).tobytes() for name, array in tensors.items()
    }
    if algorithm == "NVFP4_SVD":
        with pytest.raises(CheckpointError, match="low-rank branch"):
            convert(tmp_path / "model.safetensors", tmp_path / "out", to="bf16")
        return
    for to in ("f32", "ct:nvfp4"):  # the scale of the input is folded into the weight
        convert(tmp_path / "model.safetensors", tmp_path / to, to=to)
        values, folded = load(tmp_path / to)["x.weight"].dequantize(), record.dequantize() * EXTRAS["pre_quant_scale"]
        expected = folded if to == "f32" else reference.dequantize(reference.quantize(folded, "nvfp4"))
        np.testing.assert_allclose(values, expected, rtol=0 if to == "f32" else 3e-7)


def test_a_model_refuses_weights_that_need_more_than_a_layer_does(tmp_path):
    torch, mf = pytest.importorskip("torch"), pytest.importorskip("microfloat.torch")
    tensors = layer("x", pre_quant_scale=EXTRAS["pre_quant_scale"])
    model = torch.nn.ModuleDict({"x": torch.nn.Linear(32, 4, bias=False)})
    with pytest.raises(CheckpointError, match=r"x.weight has pre_quant_scale, which no layer applies"):
        mf.load_quantized(write(tmp_path / "model.safetensors", tensors), model)


@pytest.mark.parametrize("dialect", list(NAMES))
def test_parts_of_experts_keep_their_own_divisor(dialect, tmp_path):
    parts = {
        role: np.stack([nvfp4(seed=i)[role] for i in range(3)]) for role in ("codes", "scale")
    } | {"global": np.array([0.3, 3, 7], np.float32)}  # fmt: skip
    tensors = {f"experts.{NAMES[dialect][role]}": array for role, array in parts.items()}
    record = load(write(tmp_path / "model.safetensors", tensors))["experts.weight"]
    assert bool(record.source.divisors) == (dialect == "ct")
    whole = record.dequantize()
    for start, stop in ((0, 1), (1, 3), (2, 3)):
        part = record.narrow(start, stop)
        np.testing.assert_array_equal(part.dequantize(), whole[start:stop])
        np.testing.assert_array_equal(part.tensor_scale, record.tensor_scale[start:stop])
        save([part], tmp_path / f"{start}{stop}", format="ct:nvfp4" if dialect == "ct" else "modelopt:nvfp4")
        stored = load(tmp_path / f"{start}{stop}").tensors[f"experts.{NAMES[dialect]['global']}"]
        np.testing.assert_array_equal(stored.reshape(-1), parts["global"][start:stop])
