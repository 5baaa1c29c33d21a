"""The JAX training: it trains, reports and continues like the torch one."""

import signal

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
import train_gpt_jax
from gpt.files import load_checkpoint

from tests.examples import small_run
from tests.examples.small_run import losses, results
from tests.jax.effort import cheaper_passes

pytestmark = pytest.mark.xdist_group("train_gpt_jax")  # which share compiled programs


@pytest.fixture(autouse=True)
def compile_effort():
    """Runs are compared with runs that were compiled alike."""
    with cheaper_passes():
        yield


def train(out, more):
    return small_run.train(out, more, "train_gpt_jax")


def trainer_of(out, more):
    return small_run.trainer_of(out, more, script="train_gpt_jax")


@pytest.fixture
def interrupt(monkeypatch):
    """Make Ctrl-C fall into the step after which `run` has done `steps` steps; once."""

    def arrange(run, steps):
        original = train_gpt_jax.Trainer.train_step

        def step_and_interrupt(self):
            loss = original(self)
            if (self.name, self.step + 1) == (run, steps) and not self.options.resume:
                signal.raise_signal(signal.SIGINT)
            return loss

        monkeypatch.setattr(train_gpt_jax.Trainer, "train_step", step_and_interrupt)

    return arrange


@pytest.mark.slow("a further run of the JAX example")  # the first step is that of test_twins.py
@pytest.mark.usefixtures("curves")
def test_it_trains_and_reports(tmp_path):
    assert train(tmp_path, "--recipe mxfp4 --steps 6 --lr 0.02") == 0
    written = results(tmp_path)
    assert list(written["recipes"]) == ["bf16", "mxfp4"]
    for entry in written["recipes"].values():
        assert entry["train_loss"][-1] < entry["train_loss"][0] - 0.3
        assert set(entry["underflow"]) == {"x", "w", "dy"}
    assert len({entry["train_loss"][0] for entry in written["recipes"].values()}) == 2
    assert set(written["recipes"]["bf16"]["underflow"].values()) == {0.0}
    assert all(0 < share < 0.5 for share in written["recipes"]["mxfp4"]["underflow"].values())
    assert written["complete"] is True
    assert {"jax", "flax", "numpy"} <= set(written["versions"])
    assert (tmp_path / "small" / "loss_curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow("examples: runs with further settings")
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("delayed", ""),
        ("nvfp4", ""),
        ("delayed", "--last-fraction-bf16 0.4"),  # bf16 from step 3: interrupted just before the switch
    ],
)
def test_an_interrupted_run_ends_with_the_same_losses(tmp_path, interrupt, recipe, more):
    common = f"--recipe {recipe} --steps 6 {more}"
    assert train(tmp_path / "whole", common) == 0
    interrupt(recipe, 3)
    assert train(tmp_path / "halves", common) == 128 + signal.SIGINT
    assert len(results(tmp_path / "halves")["recipes"][recipe]["train_loss"]) == 3
    assert train(tmp_path / "halves", f"{common} --resume") == 0
    for name in ("bf16", recipe):
        assert losses(tmp_path / "halves", name) == losses(tmp_path / "whole", name)


@pytest.mark.slow("a further run of the JAX example")
def test_delayed_state_moves_and_is_in_the_checkpoint(tmp_path):
    assert train(tmp_path, "--recipe delayed --steps 6") == 0
    trainer = trainer_of(tmp_path, "--recipe delayed --steps 6")
    _, state = load_checkpoint(trainer.file)
    trainer.result.final_heldout = 0.0  # a finished run keeps no moments
    trainer.load(state)
    flat = train_gpt_jax.nnx.to_flat_state(train_gpt_jax.nnx.state(trainer.model))
    histories = {path: np.asarray(one.get_value()) for path, one in flat if str(path[-1]).endswith("amax_history")}
    assert len(histories) == 12
    assert all((history > 0).sum() == 6 for history in histories.values())


@pytest.mark.slow("a further run of the JAX example")
def test_where_the_recipe_goes(tmp_path):
    import microfloat.jax.nnx as mnnx

    flags = "--recipe mxfp8 --layers 2 --steps 4 --last-fraction-bf16 0.5 --last-in blocks"
    trainer = trainer_of(tmp_path, flags)

    def quantized():
        modules = train_gpt_jax.nnx.iter_modules(trainer.model)
        return {".".join(map(str, path)) for path, one in modules if isinstance(one, mnnx.DotGeneral)}

    layers = ["qkv", "out", "gate_up", "down"]
    assert quantized() == {f"blocks.0.{layer}.dot_general" for layer in layers}
    assert set(trainer.operands(1)) == {f"blocks.0.{layer}" for layer in layers}


def test_a_corrupted_checkpoint_is_one_message(tmp_path, capsys):
    checkpoint = tmp_path / "small" / "checkpoints" / "bf16.zip"
    trainer_of(tmp_path, "--recipe bf16 --steps 2").save()
    content = bytearray(checkpoint.read_bytes())
    content[len(content) // 2] ^= 1
    checkpoint.write_bytes(content)
    assert train(tmp_path, "--recipe bf16 --steps 2 --resume") == 2
    errors = capsys.readouterr().err
    assert f"cannot read the checkpoint {checkpoint}" in errors
    assert "Delete that file" in errors
    checkpoint.write_bytes(b"")
    assert train(tmp_path, "--recipe bf16 --steps 2 --resume") == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [("--out FILE", "--out: got"), ("--export-weights FOLDER", "--export-weights: got"), ("--dim 33", "--dim, --heads"),
     ("--corpus-bytes 200000", "--corpus-bytes: got 200000")],
)  # fmt: skip
def test_what_cannot_be_is_one_line(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(train_gpt_jax.Trainer, "train_step", lambda trainer: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    flags = flags.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path))
    assert train(tmp_path, f"--recipe bf16 {flags}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train_gpt_jax.py: {message}")


@pytest.mark.parametrize("name", ["quantum", "meta", "cpu:99", "cpu:x"])
def test_a_device_that_is_not_there_is_refused(tmp_path, capsys, name):
    assert train(tmp_path, f"--device {name}") == 2
    assert f"--device: got '{name}'" in capsys.readouterr().err


def test_weights_of_another_size_are_refused(tmp_path, capsys):
    file = tmp_path / "weights.safetensors"
    trainer_of(tmp_path, f"--recipe bf16 --export-weights {file}")
    assert train(tmp_path, f"--recipe bf16 --steps 1 --initial-weights {file} --dim 64") == 2
    assert "needed the model's" in capsys.readouterr().err
    file.write_bytes(b"no safetensors")
    assert train(tmp_path, f"--recipe bf16 --steps 1 --initial-weights {file}") == 2
    assert "--initial-weights: got" in capsys.readouterr().err


@pytest.mark.slow("a training step is compiled twice")
def test_watched_steps_train_alike(tmp_path):
    """--watch writes its records and pictures, and changes no loss."""
    flags = "--recipe nvfp4 --steps 3"
    assert train(tmp_path / "plain", flags) == train(tmp_path / "watched", f"{flags} --watch 2") == 0
    assert losses(tmp_path / "watched", "nvfp4") == losses(tmp_path / "plain", "nvfp4")
    (records,) = (tmp_path / "watched").rglob("nvfp4_watch.csv")
    rows = [line.split(",") for line in records.read_text().splitlines()]
    assert {row[0] for row in rows[1:]} == {"0", "2"}
    assert {row[1] for row in rows[1:]} >= {"blocks.0.qkv", "blocks.0.gate_up"}
    assert records.with_suffix(".png").stat().st_size > 10_000
