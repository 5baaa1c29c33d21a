"""Experts of a layer in files: some that are missing, too many, there twice, or without a usable scale."""

import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import Record, load, save
from microfloat.errors import CheckpointError

LAYER = "model.layers.{}.mlp.experts"


def plain(name, shape=(32, 64), seed=0):
    return Record(name, np.random.default_rng(seed).standard_normal(shape).astype(np.float32), logical_shape=shape)


def stored(folder, records, config=None, format="plain"):
    save(records, folder, format=format, config={"model_type": "qwen3_moe", **(config or {})})
    return folder


def numbered(layer, numbers, names=("gate_proj", "up_proj", "down_proj")):
    return [plain(f"{LAYER.format(layer)}.{number}.{name}.weight") for number in numbers for name in names]


def errors_of(path):
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize("config", [{"num_experts": 8}, {"text_config": {"n_routed_experts": 8}}, {}])
def test_all_experts_that_are_missing_or_too_many_are_named_at_once(tmp_path, config):
    records = numbered(0, [0, 2, 6, 7]) + numbered(1, [*range(8)]) + numbered(2, [*range(8), 9, 10, 11])
    records += [plain(f"{LAYER.format(0)}.1.down_proj.weight")]
    folder = stored(tmp_path / "a", records, config)
    text = errors_of(folder) if config else "\n".join(map(str, load(folder).findings))
    assert "gate_proj, up_proj of 1, 3 to 5" in text
    assert "down_proj of 3 to 5" in text
    assert f"{LAYER.format(1)}:" not in text
    if config:
        assert f"{LAYER.format(2)}: down_proj, gate_proj, up_proj of 9 to 11 are too many, of the 8" in text
    else:
        assert "down_proj, gate_proj, up_proj of 8 are missing, of 12 experts" in text


@pytest.mark.parametrize(
    ("numbers", "config"), [([0, 1, 2], {"num_experts": 3}), ([0, 1], {}), ([0, 1], {"num_experts": [4, 4]}),
    ([0, 1], {"num_experts": 4, "vision_config": {"num_experts": 6}})],
)  # fmt: skip
def test_experts_that_are_all_there_are_no_finding(tmp_path, numbers, config):
    assert load(stored(tmp_path / "a", numbered(0, numbers), config)).findings == []


def test_one_file_of_several_may_hold_a_part_of_the_experts(tmp_path):
    save(numbered(0, range(8)), tmp_path / "a", format="plain", max_shard_size="90KB")
    shards = sorted((tmp_path / "a").glob("*.safetensors"))
    assert len(shards) > 1
    assert "missing-expert" not in [one.id for one in load(shards[-1]).findings]
    assert load(tmp_path / "a", pattern="*.experts.3.*").findings == []


def test_two_layouts_of_one_layer_are_refused_and_those_of_a_model_named(tmp_path):
    joined = plain(f"{LAYER.format(0)}.gate_up_proj", (2, 64, 32))
    text = errors_of(stored(tmp_path / "twice", [*numbered(0, [0, 1]), joined]))
    assert "numbered and as one tensor (gate_up_proj)" in text
    [found] = load(stored(tmp_path / "mixed", [*numbered(1, [0, 1]), joined])).findings
    assert (found.id, found.severity) == ("two-layouts", "warn")
    assert LAYER.format(1) in found.message
    assert LAYER.format(0) in found.message


def quantized(name, fmt, spoil):
    """Three experts in one tensor, whose scales are spoiled."""
    made = [reference.quantize(plain(name, (32, 64), seed).codes, fmt) for seed in range(3)]
    codes = np.stack([one.codes for one in made])
    scale, level = np.stack([one.scale for one in made]), None
    if made[0].tensor_scale is not None:
        level = np.stack([one.tensor_scale for one in made]).reshape(3, 1, 1)
    spoil(scale := scale.reshape(3, 1, 1) if scale.ndim == 1 else scale, level)
    return Record(name, codes.view(np.uint8), scale, level, made[0].format, (3, 32, 64))


@pytest.mark.parametrize(
    ("fmt", "value", "words"),
    [
        ("nvfp4", 0.0, "down_proj_tensor_scale of experts 0, 2 is 0"), ("nvfp4", np.nan, "of experts 0, 2"),
        ("fp8_tensor", 0.0, "proj_scale of experts 0, 2 is 0, so"), ("fp8_tensor", np.nan, "are NaN of experts 0, 2"),
        ("fp8_tensor", np.inf, "are infinite of experts 0, 2"),
    ],
)  # fmt: skip
def test_experts_whose_scale_is_nan_or_zero_are_named(tmp_path, fmt, value, words):
    def spoil(scale, level):
        (scale if level is None else level)[[0, 2]] = value

    name = f"{LAYER.format(0)}.down_proj"
    text = errors_of(stored(tmp_path / "a", [quantized(name, fmt, spoil)], format="microfloat:native"))
    assert words in text
    assert name in text


def test_a_numbered_expert_whose_fp8_scale_is_zero_is_named_unless_it_is_all_zero(tmp_path):
    name = f"{LAYER.format(0)}.1.down_proj.weight"
    for number, codes in enumerate((np.full((16, 32), 0x38, np.uint8), np.zeros((16, 32), np.uint8))):
        fmt = reference.quantize(np.ones((2, 2), np.float32), "fp8_tensor").format
        records = [
            plain(f"{LAYER.format(0)}.0.down_proj.weight"),
            Record(name, codes, np.float32(0), None, fmt, (16, 32)),
        ]
        folder = stored(tmp_path / str(number), records, format="ct:fp8")
        if number == 0:
            assert f"the scale {name}_scale is 0, so every value is" in errors_of(folder)
            assert [one.severity for one in load(folder, nan="zero").scale_findings if one.id == "zero-global"] == [
                "warn"
            ]
        else:
            assert "zero-global" not in [one.id for one in load(folder).findings]
