"""`microfloat convert`: features O5."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.checkpoints import llama, write

pytest.importorskip("typer", reason="typer is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A sharded bfloat16 checkpoint of two blocks."""
    return llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def convert(monkeypatch):
    """Replace the conversion; what the command passes on stands in `calls`."""
    from microfloat import checkpoint

    def replace(run):
        calls = []

        def called(*arguments, **options):
            calls.append((arguments, options))
            run(options["progress"])

        monkeypatch.setattr(checkpoint, "convert", called)
        return calls

    return replace


def position(done, total=10, shard=2, shards=3):
    return SimpleNamespace(done=done, total=total, name="w", shard=shard, shards=shards)


def test_a_checkpoint_is_converted_and_verified(microfloat, model, tmp_path):
    from microfloat import checkpoint

    done = microfloat("convert", model, tmp_path / "out", "--to", "ct:nvfp4", "--max-shard-size", "100kB", "--json")
    assert done.code == 0
    document = done.json
    layers = {row["name"]: row for row in document["layers"]}
    assert layers["model.layers.0.mlp.up_proj.weight"]["action"] == "cast"
    assert layers["model.layers.0.mlp.up_proj.weight"]["sqnr_db"] > 18
    assert {row["name"] for row in document["skipped"]} >= {"lm_head.weight"}
    assert all(row["reason"] for row in document["skipped"])
    assert document["verified"]
    assert document["worst"]["name"] in layers
    assert len(document["shards"]) > 1
    assert checkpoint.load(tmp_path / "out").detection.family == "ct:nvfp4"
    assert microfloat("inspect", tmp_path / "out", "--strict").code == 0
    assert microfloat("diff", model, tmp_path / "out", "--threshold-db", 18).code == 0


@pytest.mark.parametrize("columns", [40, 80])
def test_the_summary_fits_the_terminal(microfloat, model, tmp_path, columns):
    done = microfloat("convert", model, tmp_path / "out", "--to", "modelopt:mxfp8", columns=columns)
    assert done.code == 0
    assert max(map(len, done.out.splitlines())) <= columns
    assert "Kept as they are" in done.out
    assert "read back from disk" in " ".join(done.out.split())
    assert done.err == ""  # progress is for terminals


def test_options_are_passed_on(microfloat, model, convert):
    def stop(progress):
        raise KeyboardInterrupt

    calls = convert(stop)
    microfloat(
        "convert", model, "out", "--to", "ct:nvfp4", "--scale-rule", "amax", "--ignore", "a", "--ignore", "re:b,c",
        "--fuse", "qkv,experts", "--four-over-six", "--no-verify", "--no-resume", "--max-shard-size", "1GB",
        "--placement", "plan.json",
    )  # fmt: skip
    ((source, target), options) = calls[0]
    assert (source, str(target)) == (model, "out")
    del options["progress"]
    assert options == {
        "to": "ct:nvfp4", "scale_rule": "amax", "ignore": ["a", "re:b,c"], "fuse": ["qkv", "experts"],
        "four_over_six": True, "verify": False, "resume": False, "max_shard_size": "1GB", "format": "auto",
        "placement": Path("plan.json"),
    }  # fmt: skip
    microfloat("convert", model, "out", "--to", "bf16", "--fuse", "none")
    options = calls[1][1]
    assert (options["fuse"], options["ignore"], options["resume"], options["verify"]) == ([], (), True, True)


def test_the_family_of_the_source_may_be_named(microfloat, model, tmp_path):
    """As the error about a configuration of another method asks for."""
    assert microfloat("convert", model, tmp_path / "nvfp4", "--to", "ct:nvfp4").code == 0
    (tmp_path / "nvfp4" / "config.json").write_text('{"quantization_config": {"quant_method": "auto-round"}}')
    words = ["convert", tmp_path / "nvfp4", tmp_path / "out", "--to", "bf16"]
    assert "auto-round" in microfloat(*words).err
    assert microfloat(*words, "--from", "ct:nvfp4").code == 0
    microfloat(*words[:2], tmp_path / "other", "--to", "bf16", "--from", "ct:nvfp5").refuses("--from: got 'ct:nvfp5'")


def test_nothing_to_convert_is_the_last_line_and_the_exit_status(microfloat, model, tmp_path):
    done = microfloat("convert", model, tmp_path / "same", "--to", "bf16")
    assert done.code == 1
    assert "Nothing was converted" in " ".join(done.out.split("\n\n")[-1].split())
    microfloat("convert", model, tmp_path / "out", "--to", "gptoss:hf").refuses("quantizes stacked experts alone")
    assert not (tmp_path / "out").exists()
    assert microfloat("convert", model, tmp_path / "f32", "--to", "f32").code == 0


def test_a_wrong_target_is_a_short_list(microfloat, model, tmp_path):
    done = microfloat("convert", model, tmp_path / "out", "--to", "x", columns=80)
    assert len(done.err.splitlines()) < 12
    assert "modelopt:{nvfp4, fp8, mxfp8}" in " ".join(done.err.split())


def test_the_stage_is_named_in_words():
    from microfloat.cli.convert import stage

    shown = [stage(position(1, shard=shard, shards=shards)) for shard, shards in ((0, 0), (2, 3), (4, 3))]
    assert shown == ["measuring", "writing file 2 of 3", "verifying"]


def test_ctrl_c_while_the_result_is_verified(microfloat, model, convert):
    def stop(progress):
        progress(position(4, shard=2, shards=1))
        raise KeyboardInterrupt

    convert(stop)
    done = microfloat("convert", model, "out", "--to", "bf16")
    assert "stopped: while the result was verified. Its files stay in out.partial. To go on:" in done.err


def test_ctrl_c_tells_how_to_go_on(microfloat, model, convert, monkeypatch):
    def stop(progress):
        progress(position(4))
        raise KeyboardInterrupt

    convert(stop)
    monkeypatch.setattr(sys, "argv", ["microfloat", "convert", "a b", "out", "--to", "ct:nvfp4"])
    done = microfloat("convert", model, "out", "--to", "ct:nvfp4", "--json")
    assert done.code == 130
    assert "stopped: at 40%, file 2 of 3. Complete files stay in out.partial" in done.err
    assert "\n    microfloat convert 'a b' out --to ct:nvfp4\n" in done.err
    assert "at 40%" in done.json["error"]


def test_ctrl_c_in_the_only_file_promises_no_complete_one(microfloat, model, convert):
    def stop(progress):
        progress(position(4, shard=1, shards=1))
        raise KeyboardInterrupt

    convert(stop)
    said = microfloat("convert", model, "out.safetensors", "--to", "bf16").err
    assert "at 40%, file 1 of 1, which is not complete. To start again:" in said


def test_ctrl_c_while_the_weights_are_measured(microfloat, model, convert):
    def stop(progress):
        progress(position(4, shard=0, shards=0))
        raise KeyboardInterrupt

    convert(stop)
    assert "stopped: before writing" in microfloat("convert", model, "out", "--to", "ct:nvfp4").err


def test_no_space_is_the_environments_fault_and_a_bad_result_a_finding(microfloat, model, convert):
    from microfloat.errors import CheckpointError

    def fails(done):
        def run(progress):
            progress(position(done))
            raise CheckpointError("the disk is full" if done < 10 else "1 parameters were not written well")

        return run

    convert(fails(5))
    done = microfloat("convert", model, "out", "--to", "ct:nvfp4")
    assert (done.code, "the disk is full" in done.err) == (2, True)
    convert(fails(10))
    assert microfloat("convert", model, "out", "--to", "ct:nvfp4").code == 1


def test_a_damaged_source_exits_1(microfloat, model, tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(next(model.glob("*.safetensors")).read_bytes()[:-100])
    done = microfloat("convert", path, tmp_path / "out", "--to", "ct:nvfp4", "--json")
    assert done.code == 1
    assert done.json["findings"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["MODEL", "OUT", "--to", "ct:nvfp5"], "Did you mean 'ct:nvfp4'"),
        (["nowhere", "OUT", "--to", "bf16"], "SRC: got nowhere"),
        (["MODEL", "MODEL", "--to", "bf16"], "exists"),
        (["MODEL", "OUT", "--to", "ct:nvfp4", "--fuse", "kqv"], "Did you mean 'qkv'"),
        (["MODEL", "OUT", "--to", "ct:nvfp4", "--max-shard-size", "big"], "--max-shard-size: got 'big'"),
        (["MODEL", "OUT", "--to", "nvfp4"], "--to: got 'nvfp4'"),
        (["MODEL", "OUT", "--to", "ct:nvfp4", "--scale-rule", "foo"], "--scale-rule: got 'foo'"),
        (["MODEL", "OUT"], "--to"),
        (["MODEL", ".", "--to", "bf16"], "DST: got ., needed the name of a folder"),
    ],
)
def test_a_wrong_question_exits_2(microfloat, model, tmp_path, words, named):
    places = {"MODEL": model, "OUT": tmp_path / "out"}
    microfloat("convert", *[places.get(word, word) for word in words]).refuses(named)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow("a further command without any framework")
def test_it_needs_no_framework(repository, tmp_path):
    import numpy as np

    from tests.cli.test_manners import fresh

    write(tmp_path / "a.safetensors", {"w.weight": np.ones((32, 64), np.float32)})
    words = ["convert", str(tmp_path / "a.safetensors"), str(tmp_path / "b.safetensors"), "--to", "ct:mxfp8", "--json"]
    done = fresh(repository, words, ("torch", "jax", "triton", "matplotlib", "huggingface_hub"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verified"]
    done = fresh(repository, ["diff", words[1], words[2], "--json"], ("torch", "jax", "triton", "matplotlib"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--to", "ct:nvfp4", "--method", "gptq"), "--calibrate: got None, needed a file of text"),
        (("--to", "ct:nvfp4", "--method", "gptq", "--calibrate", "nowhere.txt"), "--calibrate: got nowhere.txt"),
        (("--to", "bf16", "--method", "gptq"), "--method: got 'gptq', needed a target of codes"),
        (("--to", "ct:mxfp4", "--method", "gptq", "--scale-rule", "even"), "no --scale-rule"),
        (("--to", "nvfp", "--method", "gptq"), "--to: got 'nvfp'"),
        (("--to", "ct:nvfp4", "--method", "awq"), "--method: got 'awq', needed one of 'nearest', 'gptq'"),
    ],
)
def test_gptq_says_what_it_lacks(microfloat, model, tmp_path, words, named):
    microfloat("convert", model, tmp_path / "out", *words).refuses(named)


def test_gptq_refuses_a_destination_that_exists_before_any_work(microfloat, model, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("words")
    words = ("--to", "ct:nvfp4", "--method", "gptq", "--calibrate", text)
    microfloat("convert", model, tmp_path, *words).refuses("DST: got")
