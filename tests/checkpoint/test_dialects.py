"""A new dialect of checkpoints is one file, and its name in a list: that of docs/checkpoints.md is added to a copy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from microfloat.checkpoint.families import DIALECTS, FAMILIES, dialect_of
from tests.docs.code_blocks import code_blocks

ROOT = Path(__file__).parents[2]
# Plain weights to the new dialect and back, between it and another one, and the lists that messages are made of.
SCRIPT = """
import json
from pathlib import Path

import numpy as np

from microfloat.checkpoint import Record, convert, detect, load, save
from microfloat.cli import main
from microfloat.errors import CheckpointError, InvalidValueError

weight = np.random.default_rng(0).standard_normal((64, 128), np.float32)
names = ["model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight", "lm_head.weight"]
records = [Record(name, weight, logical_shape=weight.shape) for name in names]
save(records, "plain", format="plain", config={"model_type": "llama"})
report = convert("plain", "made", to="acme:mxfp4")
loaded = load("made")
convert("plain", "other", to="ct:mxfp4", scale_rule="even")
convert("other", "carried", to="acme:mxfp4")
convert("made", "back", to="ct:mxfp4")
convert("made", "values", to="f32")
save(loaded, "saved", format="acme:mxfp4")
folders = ("made", "other", "carried", "back", "values", "saved")


def said(call, **changed):
    path = Path("saved/config.json")
    config = json.loads(Path("made/config.json").read_text())["quantization_config"]
    path.write_text(json.dumps({"quantization_config": {**config, **changed}}))
    try:
        call()
    except (CheckpointError, InvalidValueError) as error:
        return str(error)


print(json.dumps({
    "verified": report.verified, "family": detect("made").family,
    "actions": {layer.name: layer.action for layer in report.layers}, "confidence": loaded.detection.confidence,
    "findings": [str(one) for one in loaded.findings], "activation": loaded[names[0]].activation["scheme"],
    "values": len({load(folder)[names[0]].dequantize().tobytes() for folder in folders}),
    "errors": [
        said(lambda: load("saved"), quant_method="unheard-of"),
        said(lambda: convert("plain", "never", to="acme:nvfp4")),
        said(lambda: load("saved"), global_quant_config={"weight": {"dtype": "int4"}}),
    ],
}), flush=True)
raise SystemExit(main(["inspect", "made"]))
"""


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """The outcome of the script in a copy of the library with the dialect of the page."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "src" / "microfloat"
    unused = shutil.ignore_patterns("torch", "jax", "kernels", "passes", "__pycache__")
    shutil.copytree(ROOT / "src" / "microfloat", package, ignore=unused)
    (source,) = [
        block.source
        for block in code_blocks(ROOT / "docs" / "checkpoints.md", "python")
        if "DIALECT = " in block.source
    ]
    families = package / "checkpoint" / "families"
    (families / "acme.py").write_text(source)
    listed = (families / "__init__.py").read_text()
    changed = listed.replace("modelopt,", "modelopt, acme,", 1)
    changed = changed.replace("torchao, microfloat)", "torchao, microfloat, acme)", 1)
    assert len(changed) == len(listed) + 2 * len(", acme")
    (families / "__init__.py").write_text(changed)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=folder, env={"PYTHONPATH": str(folder / "src"), "NO_COLOR": "1"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result, _, inspected = done.stdout.partition("\n")
    return {**json.loads(result), "inspected": inspected}


def test_a_dialect_of_one_file_is_written_verified_and_read(outcome):
    assert outcome["verified"]
    layers = [f"model.layers.0.mlp.{name}.weight" for name in ("up_proj", "down_proj")]
    assert outcome["actions"] == {**dict.fromkeys(layers, "cast"), "lm_head.weight": "kept"}
    assert (outcome["family"], outcome["confidence"], outcome["findings"]) == ("acme:mxfp4", 1.0, [])
    assert outcome["activation"] == "dynamic"


def test_codes_pass_between_it_and_another_dialect(outcome):
    assert outcome["values"] == 1


def test_inspect_shows_it_and_messages_list_it(outcome):
    assert "acme:mxfp4" in outcome["inspected"]
    unknown, target, refused = outcome["errors"]
    methods = [one for dialect in DIALECTS for one in dialect.methods if "*" not in one]
    assert f"read are {', '.join(map(repr, [*methods, 'acme']))}." in unknown
    assert "acme:{mxfp4}" in target
    assert "'dtype': 'int4'" in refused


def test_every_row_is_of_one_dialect_that_writes_it():
    for family in FAMILIES:
        dialect = dialect_of(family.name)
        assert family in dialect.families
        assert not family.writes or dialect.write is not None or dialect.metadata is not None
    assert dialect_of("plain").families == ()
