"""`microfloat inspect`: features O4."""

import json

import numpy as np
import pytest

from tests.cli.checkpoints import llama, nvfp4_file, write

pytest.importorskip("typer", reason="typer is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sharded bfloat16 checkpoint of two blocks."""
    return llama(tmp_path_factory.mktemp("model"))


def test_a_plain_checkpoint_is_tried_under_formats(microfloat, model):
    done = microfloat("inspect", model, "--json")
    assert done.code == 0
    document = done.json
    assert document["family"] == "plain"
    assert document["files"] == 2
    assert document["evidence"]
    assert document["bits"] == 16.0
    tensors = {row["name"]: row for row in document["tensors"]}
    assert tensors["model.layers.0.mlp.up_proj.weight"]["shape"] == [96, 64]
    layers = {row["name"]: row for row in document["sqnr"]}
    assert "model.norm.weight" not in layers
    for row in layers.values():
        assert row["mxfp4"] < row["nvfp4"] < row["mxfp6_e2m3"] < row["mxfp8"]
    summary = {row["format"]: row for row in document["formats"]}
    worst = min(layers.values(), key=lambda row: row["nvfp4"])
    assert (summary["nvfp4"]["worst_layer"], summary["nvfp4"]["worst_db"]) == (worst["name"], worst["nvfp4"])
    assert 4.5 < summary["nvfp4"]["bits"] < 16
    assert document["findings"] == []


def test_sqnr_is_that_of_the_metric_and_the_oracle(microfloat, model):
    from microfloat import checkpoint, metrics, reference

    name = "model.layers.1.self_attn.o_proj.weight"
    (row,) = microfloat("inspect", model, "--layers", name, "--format", "mxfp8", "--json").json["sqnr"]
    x = checkpoint.load(model)[name].dequantize()
    assert row["mxfp8"] == metrics.sqnr_db(x, reference.dequantize(reference.quantize(x, "mxfp8")))
    assert row["amax"] == np.abs(x).max()


def test_rows_are_sampled(microfloat, model):
    # Whole groups of 128 rows, the last one short.
    for wanted, rows in ((128, 128), (256, 192), (0, 320)):
        words = ("--layers", "embed_tokens", "--format", "mxfp8", "--json", "--sample-rows", wanted)
        (row,) = microfloat("inspect", model, *words).json["sqnr"]
        assert row["rows"] == rows


def test_what_a_conversion_keeps_is_not_measured(microfloat, model):
    names = {row["name"] for row in microfloat("inspect", model, "--json").json["sqnr"]}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert not {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} & names


def test_many_layers_are_shown_together_and_chosen_ones_apart(microfloat, model):
    text = microfloat("inspect", model).out
    assert "model.layers.*.mlp.up_proj.weight" in text
    assert "model.layers.0" not in text.split("If these layers")[0]
    text = microfloat("inspect", model, "--layers", "mlp.up", "--format", "nvfp4").out
    assert "model.layers.1.mlp.up_proj.weight" in text
    assert "self_attn" not in text


@pytest.mark.parametrize("columns", [40, 80])
def test_it_fits_the_terminal(microfloat, model, columns):
    text = microfloat("inspect", model, columns=columns).out
    assert max(map(len, text.splitlines())) <= columns
    if columns == 80:  # names break behind a dot
        assert "model.layers.*.mlp." in text.split()
        assert "down_proj.weight" in text.split()


def test_weights_that_are_not_finite_are_counted_and_nothing_hides_their_nan(microfloat, tmp_path):
    ones = np.ones((32, 64), np.float32)
    tensors = {f"layers.{index}.up.weight": ones.copy() for index in range(20)}
    tensors["layers.3.up.weight"][0, :2] = np.nan, np.inf
    write(tmp_path / "model.safetensors", tensors)
    words = ("inspect", tmp_path, "--format", "mxfp8")
    document = microfloat(*words, "--json").json
    assert {row["name"]: row["non_finite"] for row in document["sqnr"] if row["non_finite"]} == {
        "layers.3.up.weight": 2
    }
    (summary,) = document["formats"]
    assert (summary["worst_layer"], summary["worst_db"]) == ("layers.3.up.weight", "nan")
    (finding,) = document["findings"]
    assert (finding["id"], finding["severity"], finding["tensor"]) == ("nan-weight", "warn", "layers.3.up.weight")
    assert microfloat(*words).code == 0
    assert microfloat(*words, "--strict").code == 1
    (line,) = [line for line in microfloat(*words).out.splitlines() if "layers.*" in line and "nan" in line]
    assert line.split()[:2] == ["layers.*.up.weight", "20"]


@pytest.mark.slow("draws a picture of each kind of checkpoint")
def test_a_picture_of_each_kind_of_checkpoint(microfloat, model, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / "model.png"
    assert microfloat("inspect", model, "--format", "nvfp4", "--plot", path, "--json").json["plot"] == str(path)
    assert path.stat().st_size > 10_000
    assert microfloat("inspect", nvfp4_file(tmp_path), "--plot", tmp_path / "quantized.svg").code == 0


def test_a_quantized_file_is_known_and_sound(microfloat, tmp_path):
    document = microfloat("inspect", nvfp4_file(tmp_path), "--json").json
    assert document["family"] == "ct:nvfp4"
    assert document["format"] == "nvfp4"
    (row,) = document["tensors"]
    assert row["shape"] == [16, 64]
    assert row["bits"] == pytest.approx(4.5, abs=0.1)
    assert "sqnr" not in document
    assert document["findings"] == []


def test_an_integrity_error_exits_1(microfloat, tmp_path):
    path = nvfp4_file(tmp_path, leave_out="weight_global_scale")
    done = microfloat("inspect", path, "--json")
    assert done.code == 1
    found = [row for row in done.json["findings"] if row["severity"] == "error"]
    assert found[0]["id"] == "missing-scale"
    assert found[0]["remedy"]
    assert "missing-scale" in microfloat("inspect", path).out


def test_a_damaged_file_exits_1_with_all_findings(microfloat, model, tmp_path):
    source = next(model.glob("*.safetensors"))
    path = tmp_path / "cut.safetensors"
    path.write_bytes(source.read_bytes()[:-100])
    done = microfloat("inspect", path, "--json")
    assert done.code == 1
    assert done.json["findings"][0]["id"]
    assert "cut.safetensors" in done.err


def test_names_from_a_file_do_not_drive_the_terminal(microfloat, tmp_path):
    write(tmp_path / "a.safetensors", {"\x1b[31mred\u202e": np.ones((2, 2), np.float32)})
    text = microfloat("inspect", tmp_path / "a.safetensors").out
    assert "\\x1b[31mred\\u202e" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["nowhere"], "PATH: got nowhere"),
        (["owner/name"], "Add --hub"),
        (["EMPTY"], "a folder with *.safetensors files"),
        (["MODEL", "--format", "nvpf4"], "Did you mean 'nvfp4'"),
        (["MODEL", "--layers", "("], "a regular expression"),
        (["MODEL", "--layers", "nothere"], "matches the name of a tensor"),
        (["MODEL", "--plot", "x.gif"], "--plot"),
        (["MODEL", "--sample-rows", "-1"], "--sample-rows"),
    ],
)
def test_a_wrong_question_exits_2(microfloat, model, tmp_path, words, named):
    places = {"MODEL": model, "EMPTY": tmp_path}
    microfloat("inspect", *[places.get(word, word) for word in words]).refuses(named)


def test_the_hub_is_asked_only_with_hub(microfloat, model, monkeypatch):
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    asked = []

    def download(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(model)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert microfloat("inspect", "owner/name", "--hub", "--json").json["family"] == "plain"
    ((name, patterns),) = asked
    assert name == "owner/name"
    assert not any("bin" in pattern for pattern in patterns)  # nothing that holds pickles

    def offline(name, allow_patterns):
        raise hub.errors.OfflineModeIsEnabled("offline mode is on")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    done = microfloat("inspect", "owner/name", "--hub")
    assert done.code == 2
    assert "offline mode is on" in done.err


@pytest.mark.slow("a further command without any framework")
def test_it_needs_no_framework(repository, model):
    from tests.cli.test_manners import fresh

    done = fresh(repository, ["inspect", str(model), "--json"], ("torch", "jax", "triton", "matplotlib"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["formats"]


@pytest.fixture
def other_dialect(tmp_path):
    """The tensors of ct:nvfp4 under a method that is not read."""
    nvfp4_file(tmp_path)
    text = json.dumps({"quantization_config": {"quant_method": "auto-round", "bits": 4}})
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def test_a_method_that_is_not_read_is_named_with_the_option_that_helps(microfloat, other_dialect):
    done = microfloat("inspect", other_dialect)
    assert done.code == 1
    assert "'auto-round' is not read" in done.err
    assert "--from ct:nvfp4 reads them as such" in done.err
    assert "format=" not in done.err
    assert "--from" in microfloat("inspect", other_dialect, "--json").json["findings"][0]["remedy"]
    assert microfloat("inspect", other_dialect, "--from", "ct:nvfp4", "--json").json["family"] == "ct:nvfp4"
    file = other_dialect / "elsewhere"
    file.mkdir()
    nvfp4_file(file)
    assert microfloat("diff", other_dialect, file, "--from", "ct:nvfp4").code == 0
    microfloat("inspect", other_dialect, "--from", "ct:nvfp5").refuses("--from: got 'ct:nvfp5', needed one of")


def test_activations_that_are_announced_without_their_scale_exit_1(microfloat, tmp_path):
    nvfp4_file(tmp_path)
    inputs = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4}, "input_activations": inputs}}
    config = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    done = microfloat("inspect", tmp_path, "--json")
    assert done.code == 1
    (finding,) = [one for one in done.json["findings"] if one["severity"] == "error"]
    assert finding["id"] == "missing-input-scale"
    assert "no input_global_scale stands beside" in finding["message"]


def test_findings_for_information_are_one_line_for_each_kind(microfloat, tmp_path):
    """Every layer of a model may end in part of a tile; JSON has them all."""
    from tests.cli.checkpoints import llama

    (tmp_path / "model").mkdir()
    assert microfloat("convert", llama(tmp_path / "model"), tmp_path / "tiles", "--to", "deepseek:fp8").code == 0
    shown = " ".join(microfloat("inspect", tmp_path / "tiles").out.split())
    assert shown.count("ragged-tile") == 1
    assert "and 13 more" in shown
    found = microfloat("inspect", tmp_path / "tiles", "--json").json["findings"]
    assert [one["id"] for one in found] == ["ragged-tile"] * 14


def test_it_says_who_reads_a_quantized_file(microfloat, model, tmp_path):
    from microfloat.checkpoint import convert

    convert(model, tmp_path / "low", to="quark:mxfp6_e3m2")
    rows = {row["reader"].split()[0]: row for row in microfloat("inspect", tmp_path / "low", "--json").json["readers"]}
    assert (rows["vLLM"]["does"], rows["SGLang"]["does"]) == ("reads", "refuses")
    assert rows["transformers"]["what"] == "without the package amd-quark 0.12"
    done = microfloat("inspect", tmp_path / "low")
    assert "Who reads it" in done.out
    assert microfloat("inspect", model, "--json").json["readers"] == []
    convert(model, tmp_path / "blocks", to="ct:mxfp8")
    for dtype, does in (("float16", "refuses"), ("bfloat16", "reads")):
        config = json.loads((tmp_path / "blocks" / "config.json").read_text())
        (tmp_path / "blocks" / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
        rows = microfloat("inspect", tmp_path / "blocks", "--json").json["readers"]
        assert {row["does"] for row in rows if row["reader"].startswith("transformers")} == {does}
