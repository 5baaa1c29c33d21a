"""`save` and `convert`: every format that is written, fused groups, exact bytes, memory, interruption and errors."""

import contextlib
import json
import os
import re
import signal
import sys
import textwrap
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from microfloat import metrics, reference
from microfloat.checkpoint import Record, convert, load, save
from microfloat.checkpoint._conversion import check_unchanged
from microfloat.checkpoint._saving import SAVED
from microfloat.checkpoint.families import WRITTEN
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, MicrofloatError, PlacementError
from microfloat.formats import FORMATS, decode, encode
from microfloat.recipes import Cast, MXFP8BlockScaling, NVFP4BlockScaling, Placement, WeightActivation, WeightOnly
from tests import processes
from tests.checkpoint import files

# Golden files of static activations hold a weight alone, and modelopt:fp8 of plain weights has no scales of inputs.
pytestmark = pytest.mark.filterwarnings("ignore:.*announces activations:UserWarning")
BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {
    "model.embed_tokens": (48, 64),
    "model.layers.0.input_layernorm": (64,),
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.0.self_attn.k_proj": (32, 64),
    "model.layers.0.self_attn.v_proj": (32, 64),
    "model.layers.0.mlp.gate_proj": (144, 64),
    "model.layers.0.mlp.up_proj": (144, 64),
    "model.layers.0.mlp.down_proj": (64, 144),  # 144 is no multiple of 32
    "lm_head": (48, 64),
}


def placed(source, rules, to="ct:mixed", out="placed"):
    """The formats of weights that a conversion under these rules wrote, by module, and its report."""
    report = convert(source, source.parent / out, to=to, placement=Placement(rules))
    made = load(source.parent / out)
    return {name.removesuffix(".weight"): made[name].format and made[name].format.name for name in made}, report


def plain(name, shape, dtype=BF16, factor=1.0, seed=0):
    """A record of random numbers."""
    values = np.random.default_rng([seed, *name.encode()]).standard_normal(shape) * factor
    return Record(name, values.astype(dtype), logical_shape=tuple(shape))


def model(dtype=BF16, **more):
    """The records of a small model; `gate_proj` is larger than `up_proj`."""
    made = [plain(f"{name}.weight", shape, dtype, 3.0 if "gate" in name else 0.1) for name, shape in SHAPES.items()]
    return made + [plain(name, shape, dtype) for name, shape in more.items()]


@pytest.fixture
def source(tmp_path):
    save(model(), tmp_path / "source", format="plain", config={"model_type": "llama", "dtype": "bfloat16"})
    return tmp_path / "source"


def expected(record, cast, scale_dtype=None, amax=None):
    """The oracle's cast of one matrix, with scales rounded to `scale_dtype`."""
    q = reference.quantize(record.codes, cast, amax=amax)
    if scale_dtype is None or scale_dtype == np.float32:
        return reference.dequantize(q)
    scale = np.atleast_2d(q.scale.astype(scale_dtype).astype(np.float32))
    rows, columns = (size or length for size, length in zip(cast.format.block, q.shape, strict=True))
    every = np.repeat(np.repeat(scale, rows, 0), columns, 1)[: q.shape[0], : q.shape[1]]
    scaled = record.codes.astype(np.float32) * (np.float32(1) / every)
    return decode(encode(scaled, cast.format.element), cast.format.element) * every


@pytest.mark.parametrize("to", [name for name in WRITTEN if name != "gptoss:hf"])
def test_every_target_has_the_oracles_values(source, tmp_path, to):  # features K5, U14
    report = convert(source, tmp_path / "out", to=to)
    again, family, cast = load(tmp_path / "out"), WRITTEN[to][0], WRITTEN[to][1].cast
    assert again.detection.family == family.name
    assert again.detection.confidence == 1.0
    assert report.verified
    ragged = ["model.layers.0.mlp.down_proj"] if cast.format.block == (1, 32) else []
    assert {layer.name for layer in report.skipped} == {
        f"{name}.weight" for name in ("model.embed_tokens", "lm_head", *ragged)
    }
    records = {record.name: record for record in model()}
    groups = [
        [name for name in records if any(part in name for part in parts)]
        for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    ]
    for layer in report.layers:
        record = records[layer.name]
        if layer.action == "kept":
            assert again[layer.name].codes.tobytes() == record.codes.tobytes()
            continue
        amax = None
        if cast.format.tensor_scale == "tensor" or to == "modelopt:fp8":
            names = next((one for one in groups if layer.name in one), [layer.name])
            amax = np.float32(max(np.abs(records[name].codes.astype(np.float32)).max() for name in names))
        values = expected(record, cast, BF16 if family.model_scales else None, amax)
        # Two levels of scales may be multiplied in another order, and a divisor is a rounded reciprocal.
        tolerance = 3e-7 if cast.format.tensor_scale else 0
        np.testing.assert_allclose(again[layer.name].dequantize(), values, rtol=tolerance, err_msg=layer.name)
        sqnr = 10 * np.log10((record.codes.astype(np.float64) ** 2).sum() / ((values - record.codes) ** 2).sum())
        assert layer.sqnr_db == pytest.approx(sqnr, abs=1e-3)
    assert report.worst.sqnr_db == min(layer.sqnr_db for layer in report.layers if layer.sqnr_db is not None)


# ---- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fuse", "shared"), [(("qkv", "gate_up"), 2), (("gate_up",), 1), ((), 0), (("qkv", "gate_up", "experts"), 3)]
)
def test_fused_groups_share_one_tensor_scale(tmp_path, fuse, shared):  # features I5
    records = model() + [
        plain(f"model.layers.1.mlp.experts.{expert}.{name}.weight", (32, 64), factor=expert + 1.0)
        for expert in range(2)
        for name in ("w1", "w2", "w3")
    ]
    save(records, tmp_path / "source", format="plain")
    convert(tmp_path / "source", tmp_path / "out", to="ct:nvfp4", fuse=fuse)
    levels = {name: record.tensor_scale for name, record in load(tmp_path / "out").items() if record.format}

    def scales(*parts):
        return {float(level) for name, level in levels.items() if any(part in name for part in parts)}

    assert (len(scales("q_proj", "k_proj", "v_proj")) == 1) == ("qkv" in fuse)
    assert (len(scales("gate_proj", "up_proj")) == 1) == ("gate_up" in fuse)
    assert (len(scales("experts.0.w1", "experts.0.w3")) == 1) == ("gate_up" in fuse)
    assert (len(scales("w1", "w3")) == 1) == ("experts" in fuse)
    assert (len(scales("w2")) == 1) == ("experts" in fuse)
    assert shared == len(fuse)


@pytest.mark.parametrize(("to", "shares"), [("modelopt:fp8", True), ("ct:fp8", False)])
def test_groups_of_fp8_have_the_scales_of_their_producer(source, tmp_path, to, shares):  # features I5
    """ModelOpt gives q, k and v, and gate and up, the scale of their largest value; compressed-tensors does not."""
    original, fused = load(source), convert(source, tmp_path / "fused", to=to)
    apart = convert(source, tmp_path / "apart", to=to, fuse=())
    assert not fused.notes[1:]  # what is said of inputs alone
    for report, folder in ((fused, "fused"), (apart, "apart")):
        assert report.verified
        made = load(tmp_path / folder)
        for names in (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj")):
            full = [next(name for name in made if part in name) for part in names]
            amaxes = [np.abs(original[name].codes.astype(np.float32)).max() for name in full]
            wanted = [max(amaxes)] * len(full) if shares and folder == "fused" else amaxes
            assert len(set(amaxes)) > 1
            for name, amax in zip(full, wanted, strict=True):
                np.testing.assert_allclose(np.max(made[name].scale), amax / 448, rtol=2**-8)
    again = convert(tmp_path / "apart", tmp_path / "again", to=to)  # codes that are there already stay
    assert {layer.action for layer in again.layers} == {"carried", "kept"}


def test_carried_over_groups_with_scales_of_their_own_are_quantized_again(source, tmp_path):  # features I5
    convert(source, tmp_path / "apart", to="modelopt:nvfp4", fuse=())
    report = convert(tmp_path / "apart", tmp_path / "out", to="ct:nvfp4")
    actions = {layer.name.split(".")[-2]: layer.action for layer in report.layers}
    assert actions["q_proj"] == actions["up_proj"] == "cast"
    assert actions["down_proj"] == "carried"
    (note,) = report.notes  # one line for both groups
    assert "2 in all, such as model.layers.0.mlp.gate_up_proj" in note
    assert "q" in str(report) == repr(report)


def test_what_is_ignored_stays_as_it_is(source, tmp_path):
    ignore = ["*.mlp", "re:.*q_proj", "v_proj"]
    report = convert(source, tmp_path / "out", to="ct:mxfp8", ignore=ignore)
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons["model.layers.0.mlp.up_proj.weight"] == "ignored by '*.mlp'"
    assert [layer.name for layer in report.converted] == ["model.layers.0.self_attn.k_proj.weight"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert set(config["ignore"]) == {"lm_head", *(f"model.layers.0.mlp.{one}_proj" for one in ("up", "gate", "down")),
                                     *(f"model.layers.0.self_attn.{one}_proj" for one in "qv")}  # fmt: skip


# ---- bytes -------------------------------------------------------------------------------------------------------


def same(a, b):
    """The same bytes and names."""
    assert list(a) == list(b)
    for name in a:
        for part in ("codes", "scale", "tensor_scale"):
            one, other = getattr(a[name], part), getattr(b[name], part)
            assert (one is None) == (other is None)
            assert one is None or one.tobytes() == other.tobytes(), (name, part)


@pytest.mark.parametrize(
    ("first", "second"),
    [("modelopt:mxfp8", "ct:mxfp8"), ("deepseek:fp8", "hf:finegrained_fp8"), ("ct:fp8_block", "deepseek:fp8")],
)
def test_the_same_codes_are_carried_over(source, tmp_path, first, second):  # features K6
    convert(source, tmp_path / "first", to=first)
    report = convert(tmp_path / "first", tmp_path / "second", to=second)
    assert {layer.action for layer in report.layers} == {"carried", "kept"}
    back = convert(tmp_path / "second", tmp_path / "back", to=first)
    assert {layer.action for layer in back.layers} == {"carried", "kept"}
    same(load(tmp_path / "first"), load(tmp_path / "second"))
    same(load(tmp_path / "first"), load(tmp_path / "back"))


def test_only_the_reciprocal_of_a_global_scale_rounds(source, tmp_path):  # features K6
    convert(source, tmp_path / "mo", to="modelopt:nvfp4")
    convert(tmp_path / "mo", tmp_path / "ct", to="ct:nvfp4")
    convert(tmp_path / "ct", tmp_path / "again", to="ct:nvfp4")
    mo, ct = load(tmp_path / "mo"), load(tmp_path / "ct")
    same(ct, load(tmp_path / "again"))
    for name, record in mo.items():
        if record.format is not None:
            assert ct[name].codes.tobytes() == record.codes.tobytes()
            assert ct[name].scale.tobytes() == record.scale.tobytes()
            np.testing.assert_allclose(ct[name].tensor_scale, record.tensor_scale, rtol=1.2e-7)
            stored = ct.tensors[f"{name}_global_scale"]
            assert stored.shape == (1,)
            assert stored[0] == np.float32(1) / record.tensor_scale
            assert mo.tensors[f"{name}_scale_2"].shape == ()


def test_experts_are_cast_one_by_one(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    stack = plain(name, (3, 136, 160))
    stack = Record(
        name, stack.codes * np.float32([1, 10, 100]).reshape(3, 1, 1).astype(BF16), logical_shape=(3, 136, 160)
    )
    save([stack], tmp_path / "source", format="plain")
    for to in ("modelopt:nvfp4", "deepseek:fp8", "ct:fp8", "ct:fp8_dynamic", "modelopt:mxfp8", "microfloat:mxfp6_e3m2"):
        report = convert(tmp_path / "source", tmp_path / to, to=to)
        made, cast = load(tmp_path / to)[name].dequantize(), WRITTEN[to][1].cast
        for expert in range(3):
            one = Record(name, stack.codes[expert], logical_shape=(136, 160))
            values = expected(one, cast, BF16 if to.startswith("ct:fp8") else None)
            np.testing.assert_allclose(made[expert], values, rtol=3e-7 if cast.format.tensor_scale else 0)
        assert report.worst.sqnr_db > 18


def test_gpt_oss_experts_are_stored_transposed(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    stack = plain(name, (2, 64, 24))  # [E, K, N]
    save([stack, plain("model.layers.0.self_attn.q_proj.weight", (8, 64))], tmp_path / "source", format="plain",
         config={"model_type": "gpt_oss"})  # fmt: skip
    report = convert(tmp_path / "source", tmp_path / "out", to="gptoss:hf")
    assert [layer.name for layer in report.converted] == [name]
    record = load(tmp_path / "out")[name]
    assert record.logical_shape == (2, 24, 64)
    assert load(tmp_path / "out").tensors[f"{name}_blocks"].shape == (2, 24, 2, 16)
    values = reference.dequantize(reference.quantize(np.swapaxes(stack.codes, 1, 2), "mxfp4"))
    np.testing.assert_array_equal(record.dequantize(), values)
    convert(tmp_path / "out", tmp_path / "back", to="bf16")
    np.testing.assert_array_equal(load(tmp_path / "back")[name].codes, np.swapaxes(values, 1, 2).astype(BF16))


@pytest.mark.parametrize("to", ["bf16", "f32", "f16"])
def test_plain_targets_dequantize(source, tmp_path, to):
    convert(source, tmp_path / "low", to="ct:mxfp4")
    report = convert(tmp_path / "low", tmp_path / "out", to=to)
    low, out = load(tmp_path / "low"), load(tmp_path / "out")
    dtype = {"bf16": BF16, "f32": np.dtype(np.float32), "f16": np.dtype(np.float16)}[to]
    for name, record in low.items():
        assert out[name].codes.dtype == dtype
        np.testing.assert_array_equal(out[name].codes, record.dequantize().astype(dtype))
    assert out.detection.family == "plain"
    assert "quantization_config" not in out.config
    assert out.config["dtype"] == dtype.name
    assert report.worst.sqnr_db > 40


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (0, 4), (2, 0, 4)])
def test_plain_targets_of_scalars_and_of_no_elements(tmp_path, shape):
    """A checkpoint of one float32 scalar, a logit scale for instance, could not be written in bf16."""
    value = np.full(shape, 1.5, np.float32)
    save([Record("scale", value, logical_shape=shape)], tmp_path / "source", format="plain")
    convert(tmp_path / "source", tmp_path / "out", to="bf16")
    codes = load(tmp_path / "out")["scale"].codes
    assert (codes.shape, codes.dtype) == (shape, BF16)
    np.testing.assert_array_equal(codes.astype(np.float32), value)


def test_a_plain_checkpoint_passes_through_untouched(source, tmp_path):
    convert(source, tmp_path / "out", to="bf16")
    same(load(source), load(tmp_path / "out"))
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "weights.bin").write_text("a pickle")
    convert(source, tmp_path / "again", to="bf16")
    assert {path.name for path in (tmp_path / "again").iterdir()} == {
        "config.json", "tokenizer.json", "model.safetensors",
    }  # fmt: skip


def test_scale_rules(source, tmp_path):
    for rule in ("floor", "rceil", None):
        convert(source, tmp_path / f"{rule}", to="ct:mxfp4", scale_rule=rule)
        name = "model.layers.0.mlp.up_proj.weight"
        q = reference.quantize(load(source)[name].codes, Cast(FORMATS["mxfp4"], rule))
        assert load(tmp_path / f"{rule}")[name].scale.tobytes() == q.scale.tobytes()
    better = convert(source, tmp_path / "4o6", to="ct:nvfp4", four_over_six=True)
    plainly = convert(source, tmp_path / "two", to="ct:nvfp4")
    assert better.worst.sqnr_db > plainly.worst.sqnr_db


def test_plain_tensors_beside_a_weight_are_verified_where_they_are_read_as_its_extras(tmp_path):
    """Scales of a KV cache, masks of pruning and leftovers of a calibration stand beside plain weights too."""
    beside = Record("a.k_scale", np.ones((), np.float32)), Record("a.weight_mask", np.ones((64, 64), np.uint8))
    save([plain("a.weight", (64, 64)), *beside], tmp_path / "source", format="plain")
    for to in WRITTEN:
        if to == "gptoss:hf":  # which has no place for a matrix
            continue
        convert(tmp_path / "source", tmp_path / to, to=to)
        stored = load(tmp_path / to).tensors
        assert {"a.k_scale", "a.weight_mask"} <= set(stored)


def test_patterns_that_cover_nothing_are_noted(source, tmp_path):
    ignore = ["re:.*down_porj", "up_proj", "*.layers.7.*"]
    report = convert(source, tmp_path / "out", to="ct:mxfp8", ignore=ignore)
    assert report.notes == ["ignore: no parameter is covered by 're:.*down_porj', '*.layers.7.*'"]


UNREAD = {
    "b.qweight": Record("b.qweight", np.ones((64, 8), np.int32), logical_shape=(64, 8)),
    "b.codes": Record("b.codes", np.ones((64, 8), np.int8), logical_shape=(64, 8)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_codes_that_are_not_read_are_an_error_of_the_source_or_a_note(name, tmp_path):
    scales = Record("b.scales", np.ones((1, 64), np.float32), logical_shape=(1, 64))
    save([plain("a.weight", (64, 64)), UNREAD[name], scales], tmp_path / "source", format="plain")
    for to in ("ct:nvfp4", "hf:finegrained_fp8"):
        with pytest.raises(CheckpointError, match=rf"source: 1 problem found\.\s+error unread-codes: {name}") as caught:
            convert(tmp_path / "source", tmp_path / "out", to=to)
        assert caught.value.findings
        assert not (tmp_path / "out.partial").exists()
    report = convert(tmp_path / "source", tmp_path / "plain", to="f32")
    assert [note for note in report.notes if name in note and "these seem to be codes" in note]


def test_entries_of_the_source_that_are_not_read_are_noted(tmp_path):
    save([plain("a.weight", (64, 64))], tmp_path / "plain", format="plain")
    convert(tmp_path / "plain", tmp_path / "source", to="ct:mxfp8")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    config["quantization_config"]["rotation"] = "hadamard"
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    for to in ("bf16", "ct:nvfp4"):
        (note,) = convert(tmp_path / "source", tmp_path / to, to=to).notes
        assert note.startswith("of the source: 'rotation': hadamard is not read.")


def test_weights_of_zeros_give_zeros(tmp_path):
    save([Record("a.weight", np.zeros((32, 64), BF16), logical_shape=(32, 64))], tmp_path / "source", format="plain")
    for to in WRITTEN:
        if to != "gptoss:hf":
            report = convert(tmp_path / "source", tmp_path / to, to=to)
            assert not load(tmp_path / to)["a.weight"].dequantize().any()
            assert report.worst.sqnr_db == float("inf")


# ---- interruption and memory -------------------------------------------------------------------------------------

_CHILD = """
    import os, signal, sys
    from microfloat.checkpoint import convert
    source, destination, kill_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
    count = 0

    def progress(step):
        global count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    report = convert(source, destination, to="ct:nvfp4", max_shard_size=6000, progress=progress)
    print(report.resumed_shards, count)
"""


def run(*arguments):
    """The child, in a fresh process: what it printed, or None if it was killed."""
    done = processes.run([sys.executable, "-c", textwrap.dedent(_CHILD), *map(str, arguments)])
    if done.returncode == -signal.SIGKILL:
        return None
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.slow("conversions in processes that are killed")
def test_a_killed_conversion_is_resumed_to_the_same_bytes(source, tmp_path):  # features K9
    _, calls = run(source, tmp_path / "whole", 0)
    files = contents(tmp_path / "whole")
    assert sum(name.endswith(".safetensors") for name in files) > 3
    out = tmp_path / "out"
    # Six calls come from the measuring. The last attempt would start again if nothing were kept.
    for kill_at in (1, calls // 3, calls // 2, 8):
        assert run(source, out, kill_at) is None
        assert not out.exists()
    resumed, _ = run(source, out, 0)
    assert resumed > 0
    assert contents(out) == files
    assert not out.with_name("out.partial").exists()


def test_an_interrupted_folder_of_another_conversion_is_not_taken_over(source, tmp_path):
    out = tmp_path / "out"

    def stop(step):
        if step.shard > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(source, out, to="ct:nvfp4", max_shard_size=6000, progress=stop)
    assert not out.exists()
    report = convert(source, out, to="ct:nvfp4", max_shard_size=6000, scale_rule="two_level_17_16")
    assert report.resumed_shards == 0
    convert(source, tmp_path / "fresh", to="ct:nvfp4", max_shard_size=6000, scale_rule="two_level_17_16")
    assert contents(out) == contents(tmp_path / "fresh")


def test_an_interrupted_save_never_keeps_other_data(tmp_path):
    def stop(step):
        if step.shard > 2:
            raise KeyboardInterrupt

    first, second = model(), [plain(one.name, one.logical_shape, seed=1) for one in model()]
    with pytest.raises(KeyboardInterrupt):
        save(first, tmp_path / "out", format="plain", max_shard_size=9000, progress=stop)
    assert (tmp_path / "out.partial").exists()
    save(second, tmp_path / "out", format="plain", max_shard_size=9000)
    same(load(tmp_path / "out"), {one.name: one for one in second})


def test_a_tensor_is_never_held_whole(tmp_path):  # features K9
    size = (2048, 4096)
    names = (f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "gate_proj"))
    large = [Record(name, np.tile(plain(name, (64, size[1])).codes, (64, 1)), logical_shape=size) for name in names]
    save(large, tmp_path / "source", format="plain")
    save([plain("model.layers.0.mlp.up_proj.weight", (64, 64))], tmp_path / "small", format="plain")
    script = f"""
        from microfloat.checkpoint import convert
        for to in ("ct:nvfp4", "bf16"):
            convert({str(tmp_path / "small")!r}, {str(tmp_path)!r} + "/warm_" + to[:2], to=to)
        held = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) << 10
        for attempt in "abc":  # two bands whose memory is freed late are more than one tensor, at times
            report = convert({str(tmp_path / "source")!r}, {str(tmp_path / "out")!r} + attempt, to="ct:nvfp4")
            if report.peak_bytes - held < {2 * 2 * size[0] * size[1]}:
                break
        print(report.peak_bytes - held)
    """
    if not os.path.exists("/proc/self/status"):
        pytest.skip("needs /proc to know what the process holds")
    done = processes.run([sys.executable, "-c", textwrap.dedent(script)])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * 2 * size[0] * size[1]


# ---- what stands in the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["ct:nvfp4", "modelopt:mxfp8"])
def test_a_nan_in_a_weight_is_found_before_anything_is_written(tmp_path, to):
    records = model()
    for name, value in (("q_proj", np.nan), ("down_proj", np.inf), ("lm_head", np.nan)):  # the last one is not cast
        record = next(one for one in records if name in one.name)
        record.codes[3, 5] = value
    save(records, tmp_path / "source", format="plain")
    with pytest.raises(CheckpointError, match="1 of 4096 weights are NaN or infinite") as caught:
        convert(tmp_path / "source", tmp_path / "out", to=to)
    found = {finding.tensor.split(".")[-2] for finding in caught.value.findings}
    assert found == ({"q_proj", "down_proj"} if to == "ct:nvfp4" else {"q_proj"})  # 144 columns stay as they are
    assert {finding.id for finding in caught.value.findings} == {"nan-weight"}
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    report = convert(tmp_path / "source", tmp_path / "out", to=to, ignore=["q_proj", "down_proj"])
    assert report.verified


def test_static_scales_that_the_source_does_not_have_are_named(source, tmp_path):
    (note,) = convert(source, tmp_path / "out", to="modelopt:fp8").notes
    assert "announces static input scales" in note
    assert "ct:fp8_dynamic" in note
    assert not convert(source, tmp_path / "dynamic", to="ct:fp8_dynamic").notes


@pytest.mark.parametrize(
    ("dtype", "to", "is_noted"),
    [("float32", "ct:nvfp4", True), ("float16", "ct:mxfp8", True), ("float32", "ct:fp8_dynamic", False),
     ("float32", "modelopt:nvfp4", False), ("bfloat16", "ct:mxfp6", False)],
)  # fmt: skip
def test_blocks_that_transformers_does_not_multiply_beside_a_dtype_are_noted(tmp_path, dtype, to, is_noted):
    save(model(np.dtype(dtype)), tmp_path / "source", format="plain", config={"model_type": "llama", "dtype": dtype})
    notes = convert(tmp_path / "source", tmp_path / "out", to=to).notes
    assert is_noted == any("read with dtype=torch.bfloat16" in note for note in notes)


def test_a_tensor_scale_for_each_row_is_kept_in_the_native_container(source, tmp_path):
    convert(source, tmp_path / "rows", to="microfloat:nvfp4_row")
    stack = reference.quantize(np.random.default_rng(3).standard_normal((2, 5, 32), dtype=np.float32), "nvfp4_row")
    experts = Record("e", stack.codes, stack.scale, stack.tensor_scale.reshape(2, 5, 1), stack.format, (2, 5, 32))
    save([experts], tmp_path / "experts", format="microfloat:native")
    for path in ("rows", "experts"):
        checkpoint = load(tmp_path / path)
        assert not [finding for finding in checkpoint.findings if finding.severity != "info"]
        for record in checkpoint.values():
            if record.format is None:
                continue
            q = record.to_quantized()
            original = (
                stack
                if path == "experts"
                else reference.quantize(load(tmp_path / "source")[record.name].codes, q.format)
            )
            assert q.codes.tobytes() == original.codes.tobytes()
            assert q.tensor_scale.tobytes() == original.tensor_scale.tobytes()
            np.testing.assert_allclose(record.dequantize(), reference.dequantize(original), rtol=2e-7)
            part = record.narrow(1, 2)
            np.testing.assert_array_equal(part.dequantize(), record.dequantize()[1:2])


# ---- errors ------------------------------------------------------------------------------------------------------


def test_a_destination_that_exists_is_left_alone(source, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, out, to="ct:nvfp4")
    assert contents(out) == {"precious": b"x"}
    (out / "precious").unlink()
    convert(source, out, to="ct:nvfp4")  # an empty folder is no destination that exists
    with pytest.raises(CheckpointError, match="exists already"):
        save(model(), source / "model.safetensors", format="plain")


def test_a_partial_folder_of_somebody_else_is_left_alone(source, tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "precious").write_text("x")
    with pytest.raises(CheckpointError, match="not made by this library"):
        convert(source, tmp_path / "out", to="ct:nvfp4")
    assert contents(tmp_path / "out.partial") == {"precious": b"x"}


def test_a_full_disk_is_found_before_any_work(source, tmp_path, monkeypatch):
    usage = __import__("shutil").disk_usage(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"disk is full.*needed.*free"):
        convert(source, tmp_path / "out", to="ct:nvfp4")


def test_a_disk_that_fills_up_is_an_error_that_names_the_remedy(source, tmp_path, monkeypatch):
    write = os.pwrite

    def full(file, data, start):
        if start > 3000:
            raise OSError(28, "No space left on device")
        return write(file, data, start)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="repeat the call"):
        convert(source, tmp_path / "out", to="ct:nvfp4")
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    convert(source, tmp_path / "out", to="ct:nvfp4")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"to": 5}, "to: got int, needed a name, as a string"),
        ({"to": "native"}, "the container alone"),
        ({"to": "ct:nvfp5"}, "Did you mean 'ct:nvfp4'"),
        ({"to": "torchao"}, "to: got 'torchao', needed one of"),
        ({"to": "nvfp4"}, "Did you mean 'modelopt:nvfp4', 'ct:nvfp4' or 'microfloat:nvfp4'?"),
        ({"to": "nvfp4_row"}, "Did you mean 'microfloat:nvfp4_row'?"),
        ({"to": "microfloat:native"}, "the container alone; its targets name the format in it, such as microfloat:"),
        ({"to": "ct:nvfp4", "scale_rule": "floor"}, "a rule that writes E4M3 scales"),
        ({"to": "ct:nvfp4", "scale_rule": "one_level_e4m3"}, "a rule with a tensor scale"),
        ({"to": "bf16", "scale_rule": "floor"}, "bf16 has no scales"),
        ({"to": "ct:mxfp4", "four_over_six": True}, "a rule that writes E8M0 scales"),
        ({"to": "ct:nvfp4", "scale_rule": "two_level", "four_over_six": True}, "one of them"),
        ({"to": "ct:nvfp4", "fuse": ("qvk",)}, "Did you mean 'qkv'"),
        ({"to": "ct:nvfp4", "ignore": ["re:("]}, "a regular expression after 're:'"),
        ({"to": "ct:nvfp4", "max_shard_size": "5 parsecs"}, "a positive number of bytes"),
        ({"to": "ct:nvfp4", "max_shard_size": 0}, "a positive number of bytes"),
        ({"to": None}, "to: got NoneType, needed a name, as a string"),
        ({"to": "ct:nvfp4", "ignore": None}, "ignore: got NoneType, needed names of modules"),
        ({"to": "ct:nvfp4", "fuse": 3}, "fuse: got int, needed None, or names among qkv, gate_up, experts"),
        ({"to": "ct:nvfp4", "verify": "no"}, "verify: got str, needed True or False"),
        ({"to": "ct:nvfp4", "resume": 1}, "resume: got int, needed True or False"),
        ({"to": "ct:nvfp4", "four_over_six": "no"}, "four_over_six: got str, needed True or False"),
        ({"to": "ct:nvfp4", "progress": 3}, "progress: got int, needed a function of a Progress"),
    ],
)
def test_arguments(source, tmp_path, arguments, words):
    with pytest.raises((ValueError, InvalidTypeError), match=re.escape(words)):
        convert(source, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", [None, b"out", "", "a\0b"])
def test_what_is_no_destination_is_named(path):
    with pytest.raises(MicrofloatError, match=r"path: got .*, needed a str or a pathlib.Path, that of a folder"):
        save(model(), path, format="plain")


@pytest.mark.parametrize("path", [".", "..", "/"])
def test_folders_that_are_made_have_a_name(path):
    with pytest.raises(
        InvalidValueError, match=r"path: got .*, needed the name of a folder that is made. Such as .*model"
    ):
        save(model(), path, format="plain")


@pytest.mark.parametrize("kind", ["link", "mount point"])
def test_an_empty_folder_that_cannot_be_replaced_is_found_before_any_work(source, tmp_path, monkeypatch, kind):
    """The last step puts a folder in its place: a rename, which the system would refuse after hours."""
    (tmp_path / "empty").mkdir()
    target = tmp_path / ("out" if kind == "link" else "empty")
    if kind == "link":
        target.symlink_to("empty")
    monkeypatch.setattr(os.path, "ismount", lambda path: kind != "link")
    with pytest.raises(CheckpointError, match=rf"is a {kind}, in whose .* Choose a folder inside it, such as .*model"):
        convert(source, target, to="ct:nvfp4", progress=None)
    assert not list(tmp_path.glob("*.partial"))
    assert convert(source, target / "model", to="ct:nvfp4").verified


def test_a_file_in_place_of_the_partial_folder_is_named(source, tmp_path):
    (tmp_path / "out.partial").write_text("mine")
    with pytest.raises(CheckpointError, match="is in the way"):
        convert(source, tmp_path / "out", to="ct:nvfp4")
    assert (tmp_path / "out.partial").read_text() == "mine"
    (tmp_path / "other.partial").symlink_to("nowhere")
    with pytest.raises(CheckpointError, match="is in the way"):
        convert(source, tmp_path / "other", to="ct:nvfp4")


def test_a_source_that_is_written_to_meanwhile_is_not_converted(source, tmp_path):
    """In place, as by a download that goes on. One that is replaced by a rename is read as it was."""
    file = source / "model.safetensors"

    def write(progress):
        if progress.done == progress.total and progress.shard:
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            with open(file, "r+b") as opened:
                opened.write(data)
            os.utime(file, ns=(0, 0))  # clocks of file systems may be coarse

    with pytest.raises(CheckpointError, match=r"model.safetensors was written to while .* Convert it again"):
        convert(source, tmp_path / "out", to="ct:nvfp4", progress=write)
    assert not (tmp_path / "out").exists()

    def replace_by_another(progress):
        if progress.shard and file.stat().st_size > 1:
            (source / "new").write_bytes(b"0")
            os.replace(source / "new", file)

    assert convert(source, tmp_path / "out", to="ct:nvfp4", progress=replace_by_another).verified


@pytest.mark.parametrize(("moved", "is_written_to"), [(-1, False), (-3, True), (1, True)])
def test_a_time_that_is_rounded_down_is_no_change(tmp_path, moved, is_written_to):
    """Some file systems keep whole seconds, or two, and show more of them while a file is in memory."""
    (file := tmp_path / "model.safetensors").touch()
    before = file.stat()
    os.utime(file, ns=(0, before.st_mtime_ns + moved * 10**9))
    with pytest.raises(CheckpointError, match="was written to") if is_written_to else contextlib.nullcontext():
        check_unchanged({file: before})


def test_true_and_false_may_be_those_of_numpy(source, tmp_path):
    no, yes = np.bool_(False), np.bool_(True)
    report = convert(source, tmp_path / "out", to="ct:nvfp4", verify=no, resume=yes, four_over_six=no)
    assert report.verified is False
    assert load(tmp_path / "out", strict=yes).detection.family == "ct:nvfp4"


def test_whole_numbers_of_a_module_that_is_ignored_are_no_codes(tmp_path):
    """The family that was asked for would take them for FP4 codes without a scale."""
    plain_bytes = Record("count.weight", np.ones((32, 32), np.uint8), logical_shape=(32, 32))
    save([*model(), plain_bytes], tmp_path / "source", format="plain")
    convert(tmp_path / "source", tmp_path / "out", to="modelopt:nvfp4")
    assert load(tmp_path / "out")["count.weight"].format is None


@pytest.mark.filterwarnings("error")
def test_values_beyond_the_range_of_a_target_are_named_as_that(tmp_path):
    large = Record("a.weight", np.full((32, 32), 70000, np.float32), logical_shape=(32, 32))
    save([large], tmp_path / "source", format="plain")
    with pytest.raises(CheckpointError, match="1024 values that are NaN or infinite, beyond the range of the target"):
        convert(tmp_path / "source", tmp_path / "out", to="f16")


@pytest.mark.parametrize("to", ["bf16", "microfloat:fp8_row_e5m2"])
@pytest.mark.parametrize("value", [2.0**127, 2.0**-66, 3 * 2.0**-140])
def test_errors_of_large_and_of_tiny_weights_are_measured(tmp_path, value, to):
    """Their squares are none in float32, or those of their errors."""
    values = np.float32(value) * np.linspace(0.5, 1, 1024, dtype=np.float32).reshape(32, 32)
    save([Record("a.weight", values, logical_shape=(32, 32))], tmp_path / "source", format="plain")
    worst = convert(tmp_path / "source", tmp_path / "out", to=to).worst
    q = load(tmp_path / "out")["a.weight"].dequantize()
    expected = metrics.sqnr_db(values, q)
    assert worst.sqnr_db == pytest.approx(expected, rel=1e-6)


def test_a_configuration_that_consumers_read_otherwise_is_noted(tmp_path):
    """transformers leaves out every module whose name ends in one that is ignored, or has it as whole parts."""
    names = ("gate", "aggregate", "gate_proj")
    save([plain(f"{name}.weight", (128, 128)) for name in names], tmp_path / "a", format="plain")
    report = convert(tmp_path / "a", tmp_path / "out", to="deepseek:fp8")
    assert [note for note in report.notes if "config.json ignores 'aggregate' ('gate')" in note]
    assert not [note for note in report.notes if "gate_proj" in note]


def test_a_family_that_cannot_hold_a_format_names_those_that_can(source, tmp_path):
    convert(source, tmp_path / "mx", to="ct:mxfp4")
    with pytest.raises(
        ValueError, match=r"ct:nvfp4.*Families that can: ct:mxfp4, gptoss:hf, (\S+, )*microfloat:native, ct:mixed"
    ):
        save(load(tmp_path / "mx"), tmp_path / "out", format="ct:nvfp4")
    for records in (load(tmp_path / "mx"), []):
        with pytest.raises(ValueError, match="format: got 'torchao', needed one of"):
            save(records, tmp_path / "out", format="torchao")
    assert not (tmp_path / "out").exists()


# ---- save --------------------------------------------------------------------------------------------------------


def test_several_formats_in_one_checkpoint(source, tmp_path):
    for to in ("ct:nvfp4", "ct:mxfp8"):
        convert(source, tmp_path / to, to=to)
    nvfp4, mxfp8 = load(tmp_path / "ct:nvfp4"), load(tmp_path / "ct:mxfp8")
    mixed = {name: mxfp8[name] if "k_proj" in name or "down" in name else record for name, record in nvfp4.items()}
    save(mixed, tmp_path / "mixed", format="ct:mixed", config=nvfp4.config)
    config = load(tmp_path / "mixed").config["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"]: len(group["targets"]) for group in config["config_groups"].values()} == {
        "nvfp4-pack-quantized": 4, "mxfp8-quantized": 1,
    }  # fmt: skip
    again = load(tmp_path / "mixed")
    assert again.detection.family == "ct:mixed"
    same(again, mixed)
    assert not [finding for finding in again.findings if finding.severity == "error"]


def test_one_file_and_its_configuration(source, tmp_path):
    convert(source, tmp_path / "files" / "a.safetensors", to="ct:mxfp8")
    convert(source, tmp_path / "files" / "b.safetensors", to="ct:mxfp8")
    assert sorted(contents(tmp_path / "files")) == ["a.safetensors", "b.safetensors", "config.json"]
    assert load(tmp_path / "files" / "a.safetensors").detection.confidence == 1.0
    with pytest.raises(CheckpointError, match="config=False"):
        convert(source, tmp_path / "files" / "c.safetensors", to="ct:mxfp4")


# Beside their tensors the golden files hold inputs and expected outputs, which are no part of a checkpoint.
GOLDEN = [name for name in files.QUANTIZED if files.family_of(name) in SAVED]
PART = r"re:(?!in\.|out\.|ref\.|ct_converted\.).*"


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_files_are_written_as_they_were(tmp_path, name):  # features K5, K8
    """Every tensor has the same name, dtype, shape and bytes, and the configurations say the same."""
    source = load(files.as_checkpoint(name, tmp_path), pattern=PART)
    save(source, tmp_path / "out", format=files.family_of(name))
    again = load(tmp_path / "out")
    assert set(again.tensors) == {one for one in source.tensors if re.match(PART[3:], one)}
    for one, array in again.tensors.items():
        stored = source.tensors[one]
        assert (array.dtype, array.shape, array.tobytes()) == (stored.dtype, stored.shape, stored.tobytes()), one

    def without_producer(configs):
        return [
            {key: value for key, value in document.items() if key != "producer"}
            for document in (configs["config.json"]["quantization_config"], configs.get("hf_quant_config.json", {}))
        ]

    assert without_producer(again.configs) == without_producer(source.configs)
    producer = again.configs["config.json"]["quantization_config"].get("producer", {"name": "microfloat"})
    assert producer["name"] == "microfloat"


@pytest.mark.parametrize("name", ["ct_mxfp4_16x128_bfloat16", "ct_mxfp6a16_16x128_bfloat16"])
def test_the_rule_even_has_the_bytes_of_compressed_tensors(tmp_path, name):  # traps 1, 2 and 6
    golden = load(files.as_checkpoint(name, tmp_path))
    record = replace(golden["in.weight"], name="weight")
    save([record], tmp_path / "plain", format="plain")
    convert(tmp_path / "plain", tmp_path / "out", to=files.family_of(name), scale_rule="even")
    made, theirs = load(tmp_path / "out")["weight"], golden["weight"]
    blocks = np.abs(record.codes.astype(np.float32)).reshape(len(record.codes), -1, 32).max(-1)
    np.testing.assert_array_equal(made.scale[blocks > 0], theirs.scale[blocks > 0])
    np.testing.assert_array_equal(made.dequantize(), theirs.dequantize())


# ---- placements --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["ct:mixed", "modelopt:mixed", "microfloat:native"])
def test_a_placement_says_the_format_of_each_layer(source, to):
    """issue 39: a plan leads to a checkpoint, and each weight has the bytes that its format alone would give it."""
    rules = [("*.gate_proj", None), ("*.mlp.*", "mxfp8"), ("*.self_attn.*", NVFP4BlockScaling(True))]
    found, report = placed(source, rules, to)
    attention, mlp = "model.layers.0.self_attn.", "model.layers.0.mlp."
    assert {name: fmt for name, fmt in found.items() if fmt} == {
        **dict.fromkeys((f"{attention}{name}_proj" for name in "qkv"), "nvfp4"), f"{mlp}up_proj": "mxfp8",
    }  # fmt: skip
    reasons = {layer.name: layer.reason for layer in report.skipped}
    assert reasons[f"{mlp}gate_proj.weight"] == "the placement leaves it as it is"
    assert "no multiple of 32" in reasons[f"{mlp}down_proj.weight"]
    convert(source, source.parent / "one", to=to.replace("mixed", "nvfp4").replace("native", "nvfp4"))
    mixed, one = (load(source.parent / name)[f"{attention}k_proj.weight"] for name in ("placed", "one"))
    assert mixed.codes.tobytes() == one.codes.tobytes()
    assert np.array_equal(mixed.tensor_scale, one.tensor_scale)  # that of q, k and v together


def test_recipes_of_a_placement_that_say_more_than_a_format(source):
    searched = WeightOnly("nvfp4", scale_search="four_over_six")
    rules = [("*.q_proj", WeightOnly("mxfp8")), ("*.k_proj", MXFP8BlockScaling(enable_2d_quantization=True)),
             ("*.v_proj", searched), ("lm_head", WeightActivation("fp8_row"))]  # fmt: skip
    found, _ = placed(source, rules)
    names = {name.rpartition(".")[2]: fmt for name, fmt in found.items() if fmt}
    assert names == {"q_proj": "mxfp8", "k_proj": "mxfp8", "v_proj": "nvfp4", "lm_head": "fp8_row"}
    made = load(source.parent / "placed")
    schemes = {name: made[f"{name}.weight"].activation["scheme"] for name, fmt in found.items() if fmt}
    assert {name.rpartition(".")[2]: scheme for name, scheme in schemes.items()} == {
        "q_proj": "none", "k_proj": "dynamic", "v_proj": "none", "lm_head": "dynamic",
    }  # fmt: skip
    plain = load(source)["model.layers.0.self_attn.v_proj.weight"].codes.astype(np.float32)
    best = reference.quantize(plain, Cast("nvfp4", "four_over_six"))
    assert np.array_equal(made["model.layers.0.self_attn.v_proj.weight"].codes, best.codes)


def test_none_keeps_a_layer_as_it_is_stored(source):
    convert(source, source.parent / "nvfp4", to="ct:nvfp4")
    found, report = placed(source.parent / "nvfp4", [("*.k_proj", "mxfp8"), ("*.q_proj", None)])
    assert found["model.layers.0.self_attn.k_proj"] == "mxfp8"
    before, after = load(source.parent / "nvfp4"), load(source.parent / "placed")
    for name in ("q_proj", "v_proj"):  # no pattern matches the second
        name = f"model.layers.0.self_attn.{name}.weight"
        assert before[name].codes.tobytes() == after[name].codes.tobytes()
        assert next(one for one in report.layers if one.name == name).action == "carried"
    found, report = placed(source.parent / "nvfp4", [("*.k_proj", "mxfp8")], "quark:mixed", "quark")
    kept = next(one for one in report.layers if one.name.endswith("q_proj.weight"))
    assert (kept.action, kept.reason) == ("dequantized", "quark:mixed has no place for nvfp4")


@pytest.mark.parametrize(
    ("rules", "options", "message"),
    [
        ([["*.experts.*", None], ["*", "mxfp8"]], {},
         r"plan\.json: got patterns that match no layer: '\*\.experts\.\*' \(rules\[0\]\); .* names: lm_head, model"),
        ([["*", "mxfp6"]], {}, r"plan\.json: '\*' got mxfp6_e3m2, needed a format that ct:mixed holds: nvfp4, mxfp4"),
        ([["*", "mxfp8"]], {"to": "ct:nvfp4"}, r"to: got 'ct:nvfp4', needed one of .*ct:\{mixed\}"),
        ([["*", "mxfp8"]], {"to": "bf16"}, r"to: got 'bf16', .*A placement says the format of each layer"),
        ([["*", "mxfp8"]], {"scale_rule": "floor"}, r"scale_rule: got floor, needed None beside a placement"),
        ([["*", "mxfp9"]], {}, r"plan\.json: rules\[0\]\[1\]: got 'mxfp9', .*Did you mean"),
        ([["*", {"recipe": "WeightOnly", "fields": {"format": "nvfp4", "scale_search": "mse"}}]], {},
         r"plan\.json: '\*' got scale_search='mse', which microfloat\.torch\.quantize_ carries out"),
        (None, {}, r"placement: got .*plan\.json, needed a JSON file"),
    ],
)  # fmt: skip
def test_a_placement_that_does_not_fit_is_told_by_file_and_field(source, rules, options, message):
    path = source.parent / "plan.json"
    if rules is not None:
        path.write_text(json.dumps({"rules": rules}))
    with pytest.raises(MicrofloatError, match=message):
        convert(source, source.parent / "made", placement=path, **{"to": "ct:mixed", **options})
    assert not (source.parent / "made").exists()


def test_a_target_of_several_formats_takes_a_placement(source):
    with pytest.raises(InvalidValueError, match=r"to: got 'ct:mixed', .*It takes a placement"):
        convert(source, source.parent / "made", to="ct:mixed")
    with pytest.raises(PlacementError, match="placement: got patterns"):
        convert(source, source.parent / "made", to="ct:mixed", placement=Placement([("nothing", "mxfp8")]))
