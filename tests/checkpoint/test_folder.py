"""Folders without an index: which files are one model, and which parts of it are missing."""

import json

import numpy as np
import pytest

from microfloat.checkpoint import convert, detect, load
from microfloat.errors import CheckpointError
from tests.checkpoint.files import write


def folder_of(tmp_path, names, index=None):
    """Files that hold one tensor each, of the name of the file."""
    for name in names:
        write(tmp_path / f"{name}.safetensors", {name: np.ones(4, np.float32)})
    if index:
        text = json.dumps({"weight_map": {name: f"{name}.safetensors" for name in index}})
        (tmp_path / "model.safetensors.index.json").write_text(text)
    return tmp_path


PARTS = [f"model-0000{i}-of-00003" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (["model", "consolidated", "adapter_model"], ["model"]),
        (["model", *PARTS], ["model"]),
        ([*PARTS, "consolidated"], PARTS),
        ([*PARTS, "model.fp16-00001-of-00001", "adapter_model"], PARTS),
        ([*PARTS, "mtp"], [*PARTS, "mtp"]),
        (
            ["consolidated-1-of-2", "consolidated-2-of-2", "pytorch_model"],
            ["consolidated-1-of-2", "consolidated-2-of-2"],
        ),
        (["llama_01-of-02", "llama_02-of-02", "adapter"], ["llama_01-of-02", "llama_02-of-02"]),
        (["consolidated", "pytorch_model"], ["consolidated"]),
        (["adapter_model"], ["adapter_model"]),
        (["a", "b"], ["a", "b"]),
    ],
)
def test_one_set_of_files_is_read_and_the_others_are_named(names, read, tmp_path):
    loaded = load(folder_of(tmp_path, names))
    assert sorted(loaded) == sorted(read)
    left = sorted(set(names) - set(read) - ({"adapter"} if "a" in names else set()))
    assert [(one.id, one.severity) for one in loaded.findings] == [("other-weights", "info")] * bool(left)
    assert all(f"{name}.safetensors" in loaded.findings[0].message for name in left)


@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (["model-00001-of-00002"], ["model-00002-of-00002"]),
        (PARTS[1:], PARTS[:1]),
        (["diffusion_pytorch_model-1-of-3"], ["diffusion_pytorch_model-2-of-3", "diffusion_pytorch_model-3-of-3"]),
        (["a_001-of-002", "b"], ["a_002-of-002"]),
    ],
)
def test_parts_without_their_index_and_the_other_parts_are_an_error(names, missing, tmp_path):
    with pytest.raises(CheckpointError, match="no index stands beside it") as caught:
        load(folder_of(tmp_path, names))
    assert all(f"{name}.safetensors" in str(caught.value) for name in missing)
    (finding,) = load(tmp_path / f"{names[0]}.safetensors").findings
    assert (finding.id, finding.severity) == ("part", "warn")
    assert missing[0] in finding.message


def test_an_index_decides(tmp_path):
    loaded = load(folder_of(tmp_path, [*PARTS[:2], "consolidated"], PARTS[:2]))
    assert (sorted(loaded), loaded.findings) == (PARTS[:2], [])


@pytest.mark.parametrize("names", [[], ["model"], ["a", "b"]])
def test_an_index_that_names_no_tensor_is_no_empty_model(names, tmp_path):
    folder_of(tmp_path, names)
    (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 0}, "weight_map": {}}')
    for read in (load, detect, lambda path: convert(path, tmp_path / "out", to="bf16")):
        with pytest.raises(CheckpointError, match=r"index\.json: weight_map must map .* one at least"):
            read(tmp_path)


@pytest.mark.parametrize("names", [PARTS, ["consolidated-1-of-2", "consolidated-2-of-2"]])
def test_a_part_that_the_index_leaves_out_is_named(names, tmp_path):
    (finding,) = load(folder_of(tmp_path, [*names, "adapter_model"], names[:-1])).findings
    assert (finding.id, finding.severity) == ("part", "warn")
    assert f"does not name {names[-1]}.safetensors" in finding.message


def test_the_index_of_a_variant_does_not_come_before_that_of_the_model(tmp_path):
    names = ["diffusion_pytorch_model", "diffusion_pytorch_model.fp16"]
    folder_of(tmp_path, names)
    for name in names:
        text = json.dumps({"weight_map": {name: f"{name}.safetensors"}})
        (tmp_path / f"{name}.safetensors.index.json").write_text(text)
    assert list(load(tmp_path)) == names[:1]


@pytest.mark.parametrize(
    ("names", "indexed", "read"),
    [
        (["model", "consolidated"], ["model", "consolidated"], "model"),
        (["model.fp8", "model.bf16"], ["model.bf16", "model.fp8"], "model.fp8"),
        (["model", "adapter_model"], ["adapter_model"], "model"),
        (["consolidated", "optimizer"], ["optimizer", "consolidated"], "consolidated"),
    ],
)
def test_other_indices_are_named_and_those_of_adapters_are_none_of_the_model(names, indexed, read, tmp_path):
    folder_of(tmp_path, names)
    for name in indexed:
        text = json.dumps({"weight_map": {name: f"{name}.safetensors"}})
        (tmp_path / f"{name}.safetensors.index.json").write_text(text)
    loaded = load(tmp_path)
    assert list(loaded) == [read]
    named = " ".join(one.message for one in loaded.findings if one.id == "other-weights")
    left = [name for name in names if name not in (read, "optimizer", "adapter_model")]
    assert all(f"{name}.safetensors.index.json" in named for name in left)
    assert {one.severity for one in loaded.findings} <= {"info"}


def test_a_link_out_of_the_checkpoint_is_not_copied_into_another(tmp_path):
    """A folder of somebody else may link to any file of the reader, who would publish it with the result."""
    (tmp_path / "secret").write_text("mine")
    folder = tmp_path / "model"
    folder.mkdir()
    folder_of(folder, ["model"])
    (folder / "real.json").write_text("{}")
    for name, target in {"tokenizer.json": "../secret", "same.json": "real.json", "gone.json": "nowhere"}.items():
        (folder / name).symlink_to(target)
    report = convert(folder, tmp_path / "out", to="f16")
    assert report.notes == ["a file is not copied, as it is a link out of the checkpoint: tokenizer.json"]
    assert {"real.json", "same.json"} == {path.name for path in (tmp_path / "out").iterdir()} - {
        "config.json", "model.safetensors",
    }  # fmt: skip
    assert not (tmp_path / "out" / "same.json").is_symlink()


@pytest.mark.parametrize("names", [["model-Q4_K_M.gguf"], ["pytorch_model.bin", "model.onnx"], []])
def test_files_of_other_kinds_are_named(names, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="stands in it") as caught:
        load(tmp_path)
    assert all(name in str(caught.value) for name in names)


@pytest.mark.parametrize("word", ["Infinity", "-Infinity", "NaN"])
def test_a_configuration_has_the_numbers_that_python_writes(word, tmp_path):
    """transformers 4 wrote ``"time_step_limit": [0.0, Infinity]`` for every model with Mamba 2 layers."""
    text = json.dumps({"model_type": "nemotron_h", "time_step_limit": [0.0, float(word)]})
    (folder_of(tmp_path, ["model"]) / "config.json").write_text(text)
    assert repr(load(tmp_path).config["time_step_limit"][1]) == repr(float(word))
    convert(tmp_path, tmp_path / "out", to="f16")
    assert word in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("text", ['"\\ud800"', '"a.\\uDFFF.weight"', '"\\ud83d\\ud83d"'])
@pytest.mark.parametrize("place", ["header", "index", "config"])
def test_halves_of_characters_are_refused_where_they_are_read(text, place, tmp_path):
    """They are JSON, but no file name, no terminal and no other safetensors reader can hold them."""
    name = json.loads(text) if place == "header" else "a"
    write(
        tmp_path / "model.safetensors",
        {name: np.ones(4, np.float32)},
        config={"ignore": [json.loads(text)]} if place == "config" else None,
    )
    if place == "index":
        (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{{text}: "model.safetensors"}}}}')
    with pytest.raises(CheckpointError, match="one half of a character") as caught:
        load(tmp_path)
    str(caught.value).encode()
    assert {one.id for one in caught.value.findings} == {"json"}


def test_whole_characters_are_read_however_they_are_written(tmp_path):
    write(tmp_path / "model.safetensors", {"\U0001f600\\ud800": np.ones(4, np.float32)})
    assert list(load(tmp_path)) == ["\U0001f600\\ud800"]
