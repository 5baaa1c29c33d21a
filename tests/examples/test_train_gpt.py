"""The main job: it trains, reports, and continues after an interruption with the same losses bit for bit."""

import contextlib
import errno
import io
import os
import pickle
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
import train_gpt  # noqa: E402
from gpt import report  # noqa: E402
from gpt.files import save_arrays  # noqa: E402
from gpt.runs import command_to_resume  # noqa: E402

from tests import processes  # noqa: E402
from tests.examples.small_run import arguments, losses, results, train, trainer_of  # noqa: E402


@pytest.fixture
def interrupt(monkeypatch):
    """Make Ctrl-C fall into the step after which `run` has done `steps` steps; once."""

    def arrange(run, steps):
        original = train_gpt.Trainer.train_step

        def step_and_interrupt(self):
            loss = original(self)
            if (self.name, self.step + 1) == (run, steps) and not self.options.resume:
                signal.raise_signal(signal.SIGINT)
            return loss

        monkeypatch.setattr(train_gpt.Trainer, "train_step", step_and_interrupt)

    return arrange


# --------------------------------------------------------------------------------- training and report


@pytest.mark.slow_cases("examples: runs with further settings", all_but=("nvfp4",))
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_the_loss_falls(tmp_path, recipe):
    assert train(tmp_path, f"--recipe {recipe} --steps 6 --lr 0.02") == 0
    for name in ("bf16", recipe):
        curve = results(tmp_path)["recipes"][name]["train_loss"]
        assert curve[-1] < curve[0] - 0.3


@pytest.mark.usefixtures("curves")
def test_results_json(tmp_path):
    assert train(tmp_path, "--recipe mxfp8,nvfp4 --steps 3") == 0
    written = results(tmp_path)
    assert list(written["recipes"]) == ["bf16", "mxfp8", "nvfp4"]
    baseline = written["recipes"]["bf16"]
    for entry in written["recipes"].values():
        assert set(entry) == {"train_loss", "final_train", "final_heldout", "gap_to_bf16", "underflow", "seconds"}
        assert len(entry["train_loss"]) == 3
        assert entry["final_train"] == entry["train_loss"][-1]
        assert entry["gap_to_bf16"] == entry["final_heldout"] - baseline["final_heldout"]
        assert set(entry["underflow"]) == {"x", "w", "dy"}
        assert all(0 <= share < 1 for share in entry["underflow"].values())
        assert entry["seconds"] > 0
    assert baseline["gap_to_bf16"] == 0
    # Four bits flush some of every operand; bf16 has float32's range.
    assert all(share > 0 for share in written["recipes"]["nvfp4"]["underflow"].values())
    assert set(baseline["underflow"].values()) == {0.0}
    assert written["complete"] is True
    assert written["config"]["steps"] == 3
    assert written["versions"]["torch"] == torch.__version__
    assert written["machine"]["device"] == "cpu"
    assert (tmp_path / "small" / "loss_curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_trained_weights_are_a_sharded_checkpoint(tmp_path, monkeypatch):
    from microfloat import checkpoint

    weights, original = {}, train_gpt.Trainer.weights
    monkeypatch.setattr(train_gpt.Trainer, "weights", lambda self: weights.update(original(self)) or weights)
    assert train(tmp_path, f"--recipe delayed --steps 1 --export-model {tmp_path / 'model'}") == 0
    found = checkpoint.load(tmp_path / "model")
    assert len(found.files) > 1
    assert found.config["layers"] > 0
    assert set(found) == set(weights)  # parameters, and no state of delayed scaling
    for name, record in found.items():
        np.testing.assert_array_equal(record.codes, weights[name].astype(record.codes.dtype))


@pytest.mark.slow("examples: runs with further settings")
def test_runs_share_seed_and_batches_and_differ_by_the_recipe_alone(tmp_path):
    assert train(tmp_path, "--recipe mxfp8,nvfp4 --steps 2") == 0
    first = [entry["train_loss"][0] for entry in results(tmp_path)["recipes"].values()]
    assert len(set(first)) == 3
    assert max(first) - min(first) < 0.05
    assert train(tmp_path / "again", "--recipe nvfp4 --steps 2") == 0
    assert losses(tmp_path / "again", "nvfp4") == losses(tmp_path, "nvfp4")


def test_the_baseline_again_shows_chance(tmp_path):
    assert train(tmp_path, "--recipe bf16_again --steps 3") == 0
    entries = results(tmp_path)["recipes"]
    assert 0 < abs(entries["bf16_again"]["gap_to_bf16"]) < 0.02


@pytest.mark.slow("examples: runs with further settings")
def test_measuring_underflow_changes_nothing(tmp_path, monkeypatch):
    assert train(tmp_path / "measured", "--recipe nvfp4 --steps 3") == 0
    monkeypatch.setattr(report, "underflow", lambda layers, recipe: {})
    monkeypatch.setattr(train_gpt.Trainer, "operands", lambda self, rows: {})
    assert train(tmp_path / "not", "--recipe nvfp4 --steps 3") == 0
    measured, unmeasured = losses(tmp_path / "measured", "nvfp4"), losses(tmp_path / "not", "nvfp4")
    assert measured.pop("underflow") != unmeasured.pop("underflow")
    assert measured == unmeasured


def test_a_loss_that_is_no_number_is_null(tmp_path):
    assert train(tmp_path, "--recipe bf16 --steps 3 --lr 1e30") == 0
    assert results(tmp_path)["recipes"]["bf16"]["final_heldout"] is None


# ------------------------------------------------------------------------------------- recipe variants


@pytest.mark.slow("examples: runs with further settings")
def test_ablations_are_extra_runs(tmp_path):
    assert train(tmp_path, "--recipe nvfp4 --ablate rht,sr,2d --steps 3") == 0
    entries = results(tmp_path)["recipes"]
    assert list(entries) == ["bf16", "nvfp4", "nvfp4-no-rht", "nvfp4-no-sr", "nvfp4-no-2d"]
    assert len({tuple(entry["train_loss"]) for entry in entries.values()}) == len(entries)


def recipes_by_step(monkeypatch):
    """Layers that are quantized at each step of each run: {run name: [set of layer names, ...]}."""
    import microfloat.torch as mf

    seen = {}
    original = train_gpt.Trainer.train_step

    def note(self):
        quantized = {name for name, layer in self.model.named_modules() if isinstance(layer, mf.Linear)}
        seen.setdefault(self.name, []).append(quantized)
        return original(self)

    monkeypatch.setattr(train_gpt.Trainer, "train_step", note)
    return seen


def test_the_last_steps_in_bf16(tmp_path, monkeypatch):
    seen = recipes_by_step(monkeypatch)
    assert train(tmp_path, "--recipe mxfp4 --steps 4 --last-fraction-bf16 0.5") == 0
    assert [bool(layers) for layers in seen["mxfp4"]] == [True, True, False, False]
    assert results(tmp_path)["recipes"]["mxfp4"]["underflow"]["x"] > 0


@pytest.mark.slow("examples: runs with further settings")
def test_the_last_blocks_in_bf16(tmp_path):
    common = "--recipe mxfp4 --layers 2 --steps 2 --last-in blocks --last-fraction-bf16"
    assert train(tmp_path / "none", f"{common} 0") == 0
    assert train(tmp_path / "half", f"{common} 0.5") == 0
    assert train(tmp_path / "all", f"{common} 0.9") == 0
    none, half, every = (losses(tmp_path / name, "mxfp4") for name in ("none", "half", "all"))
    assert every["train_loss"] == losses(tmp_path / "all", "bf16")["train_loss"]
    assert len({tuple(entry["train_loss"]) for entry in (none, half, every)}) == 3


def test_lm_head_and_embedding_stay_in_high_precision(tmp_path, monkeypatch):
    seen = recipes_by_step(monkeypatch)
    assert train(tmp_path, "--recipe mxfp8 --steps 1") == 0
    layers = ("qkv", "out", "gate_up", "down")
    assert seen == {"bf16": [set()], "mxfp8": [{f"blocks.0.{layer}" for layer in layers}]}


# -------------------------------------------------------------------------------- interrupt and resume


@pytest.mark.slow_cases("examples: runs with further settings", all_but=("nvfp4-",))
@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("nvfp4", ""),
        ("delayed", ""),
        ("nvfp4", "--last-fraction-bf16 0.4"),  # bf16 from step 3: interrupted just before the switch
        ("delayed", "--last-fraction-bf16 0.7"),  # bf16 from step 1: interrupted after it
        ("delayed", "--last-fraction-bf16 0.15"),  # bf16 from step 5: interrupted before it
        ("nvfp4", "--last-fraction-bf16 0.5 --last-in blocks --layers 2"),
    ],
)
def test_an_interrupted_run_ends_with_the_same_losses(tmp_path, interrupt, recipe, more):
    common = f"--recipe {recipe} --steps 6 {more}"
    assert train(tmp_path / "whole", common) == 0
    interrupt(recipe, 3)
    assert train(tmp_path / "halves", common) == 128 + signal.SIGINT
    partial = results(tmp_path / "halves")
    assert partial["complete"] is False
    assert len(partial["recipes"][recipe]["train_loss"]) == 3
    assert partial["recipes"][recipe]["final_heldout"] is None
    assert train(tmp_path / "halves", f"{common} --resume") == 0
    for name in ("bf16", recipe):
        assert losses(tmp_path / "halves", name) == losses(tmp_path / "whole", name)


IN_A_LONG_CALL = """
import hashlib, os, sys, threading, time
sys.path.insert(0, {examples!r})
from rich.console import Console
from gpt.stopping import noted

def interrupt():
    for _ in range(2):
        time.sleep(0.2)
        os.kill(os.getpid(), {number})

threading.Thread(target=interrupt, daemon=True).start()
with noted(Console(), {patience}) as caught:
    # A call of half a minute that no handler of Python interrupts.
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**8) if {blocks} else time.sleep(0.8)
print("caught", caught)
"""


@pytest.mark.slow_cases("examples: the same signals once more", all_but=("0.0-True-2",))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("patience", "blocks"), [(0.0, True), (30.0, False)])
def test_a_second_signal_ends_a_step_at_once(number, patience, blocks):
    """A step of minutes did not end before it was over, whatever came."""
    examples = os.path.dirname(train_gpt.__file__)
    script = IN_A_LONG_CALL.format(examples=examples, number=int(number), patience=patience, blocks=blocks)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("Stopping after this step, with a checkpoint. A second Ctrl-C or SIGTERM ends it")
    assert ("Aborted. The last checkpoint" in done.stdout) is blocks
    assert done.returncode == (128 + number if blocks else 0), done.stderr
    assert blocks or f"caught [{int(number)}]" in done.stdout


@pytest.mark.slow("examples: runs with further settings")
def test_an_interrupted_first_run_keeps_the_others_for_later(tmp_path, interrupt):
    interrupt("bf16", 2)
    assert train(tmp_path, "--recipe mxfp8 --steps 3") == 128 + signal.SIGINT
    assert list(results(tmp_path)["recipes"]) == ["bf16"]
    assert train(tmp_path, "--recipe mxfp8 --steps 3 --resume") == 0
    assert list(results(tmp_path)["recipes"]) == ["bf16", "mxfp8"]


@pytest.mark.slow("examples: runs with further settings")
def test_resuming_a_finished_run_only_reports(tmp_path, monkeypatch):
    assert train(tmp_path, "--recipe mxfp8 --steps 2") == 0
    before = results(tmp_path)
    monkeypatch.setattr(train_gpt.Trainer, "train_step", lambda self: pytest.fail("trained again"))
    assert train(tmp_path, "--recipe mxfp8 --steps 2 --resume") == 0
    assert results(tmp_path)["recipes"] == before["recipes"]


def test_starting_over_sets_the_earlier_checkpoints_aside(tmp_path):
    assert train(tmp_path, "--recipe mxfp8 --steps 2") == 0
    assert train(tmp_path, "--recipe bf16 --steps 3") == 0
    names = {path.parent.name + "/" + path.name for path in (tmp_path / "small").glob("*/*.zip")}
    assert names == {"checkpoints/bf16.zip", "checkpoints.previous/bf16.zip", "checkpoints.previous/mxfp8.zip"}
    # so that a later --resume meets no checkpoint of other settings
    assert train(tmp_path, "--recipe mxfp8 --steps 3 --resume") == 0


def test_checkpoints_are_also_written_on_the_way(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(train_gpt.Trainer, "save", lambda self: saved.append((self.name, self.step)))
    assert train(tmp_path, "--recipe bf16 --steps 5 --checkpoint-every 2") == 0
    assert saved == [("bf16", 2), ("bf16", 4), ("bf16", 5), ("bf16", 5)]


@pytest.mark.slow("Ctrl-C in processes of their own")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_in_a_real_process(tmp_path, repository, jobs):
    """SIGINT while it trains: status 130, partial results, and a checkpoint that a Trainer continues from."""
    script = repository / "examples" / "train_gpt.py"
    flags = arguments(tmp_path, f"--recipe mxfp8 --steps 100000 --jobs {jobs}")
    command = [sys.executable, "-W", "error", str(script), *flags]
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    checkpoint = tmp_path / "small" / "checkpoints" / "bf16.zip"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert errors == ""
    again = next(line for line in output.splitlines() if line.startswith("Stopped."))
    assert shlex.split(again.split(": ", 1)[1]) == [sys.executable, *command[3:], "--resume"]
    assert results(tmp_path)["complete"] is False

    trainer = trainer_of(tmp_path, "--recipe mxfp8 --steps 100000", "bf16")
    trainer.restore()
    assert trainer.step == len(results(tmp_path)["recipes"]["bf16"]["train_loss"]) > 0


@pytest.mark.slow("examples: runs with further settings")
def test_runs_that_are_done_are_shown_as_done(tmp_path, monkeypatch):
    shown = []
    assert train(tmp_path, "--recipe mxfp8 --steps 2") == 0
    monkeypatch.setattr(report.Display, "show", lambda self, step: shown.append(step))
    assert train(tmp_path, "--recipe mxfp8 --steps 2 --resume") == 0
    assert [(name, count) for name, count, _ in shown] == [("bf16", 2), ("mxfp8", 2)]
    assert all(loss > 0 for _, _, loss in shown)


@pytest.mark.slow_cases("examples: runs with further settings", all_but=("rich",))
@pytest.mark.parametrize("package", ["safetensors", "rich", "matplotlib"])
def test_without_a_package_the_example_names_the_extra(repository, package):
    code = f"import sys; sys.modules[{package!r}] = None; sys.path.insert(0, 'examples'); import gpt"
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    done = processes.run([sys.executable, "-c", code], cwd=repository, env=environment)
    assert done.returncode == 1
    assert f"This example needs the package {package}, which is not installed" in done.stderr
    assert 'pip install ".[examples]"' in done.stderr


@pytest.mark.slow("several whole trainings")
def test_runs_side_by_side_end_with_the_losses_of_runs_in_turn(tmp_path, monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert train(tmp_path / "turn", "--recipe nvfp4,delayed --steps 4 --jobs 1") == 0
    finally:
        torch.set_num_threads(threads)
    assert train(tmp_path / "beside", "--recipe nvfp4,delayed --steps 4 --jobs 2") == 0
    for name in ("bf16", "nvfp4", "delayed"):
        assert losses(tmp_path / "beside", name) == losses(tmp_path / "turn", name)
    assert list(results(tmp_path / "beside")["recipes"]) == ["bf16", "nvfp4", "delayed"]
    assert results(tmp_path / "beside")["machine"]["runs_at_a_time"] == 2


@pytest.mark.slow("examples: runs with further settings")
def test_what_goes_wrong_in_a_run_side_by_side_is_one_message(tmp_path, capsys):
    """Weights of another size, which only the process that makes the model can see."""
    file = tmp_path / "weights.safetensors"
    save_arrays(file, {"lm_head.weight": np.zeros((2, 2), np.float32)})
    assert train(tmp_path, f"--recipe bf16_again --steps 1 --jobs 2 --initial-weights {file}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("train_gpt.py: --initial-weights: got")


# ------------------------------------------------------------------------------------------- bad input


def test_a_corrupted_checkpoint_is_one_message(tmp_path, capsys):
    assert train(tmp_path, "--recipe bf16 --steps 2") == 0
    checkpoint = tmp_path / "small" / "checkpoints" / "bf16.zip"
    checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    assert train(tmp_path, "--recipe bf16 --steps 2 --resume") == 2
    errors = capsys.readouterr().err
    assert f"cannot read the checkpoint {checkpoint}" in errors
    assert "Delete that file" in errors
    assert "Traceback" not in errors


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    torch.save({"model": Payload()}, buffer := io.BytesIO())
    with pytest.raises(pickle.UnpicklingError):
        trainer_of(tmp_path, "--recipe bf16").load(buffer.getvalue())
    assert not (tmp_path / "ran").exists()


def test_resuming_with_other_settings_is_refused(tmp_path, capsys):
    assert train(tmp_path, "--recipe bf16 --steps 2") == 0
    assert train(tmp_path, "--recipe bf16 --steps 3 --lr 0.5 --resume") == 2
    errors = capsys.readouterr().err
    assert "other settings: steps 2 (now 3), lr 0.0012 (now 0.5)" in errors


def test_an_unknown_recipe_is_one_message(tmp_path, capsys):
    assert train(tmp_path, "--recipe nvfp5") == 2
    errors = capsys.readouterr().err
    assert "Did you mean 'nvfp4'?" in errors
    assert "Traceback" not in errors


def test_the_command_to_resume_names_the_interpreter_as_seen_from_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    script = ["examples/train_gpt.py", "--name", "a b"]
    assert command_to_resume(script, False) == ".venv/bin/python examples/train_gpt.py --name 'a b' --resume"
    assert command_to_resume([*script, "--resume"], True).count("--resume") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--out FILE", "--out: got .*file/small/results.json, needed a file .*: .*Not a directory"),
        ("--out FILE/below", "--out: got .*file/below/small/results.json, needed .*Not a directory"),
        ("--export-weights FOLDER", "--export-weights: got .*folder, needed a file .*: it is a folder"),
        ("--export-weights FILE/w.safetensors", "--export-weights: got .*, needed a file .*file'"),
        ("--export-model FOLDER", "--export-model: got .*folder, needed a folder that does not exist yet"),
        ("--record FOLDER", "--record: got .*folder, needed .*: it is a folder"),
    ],
)
def test_outputs_that_cannot_be_written_are_found_before_the_first_step(tmp_path, capsys, monkeypatch, flags, message):
    monkeypatch.setattr(train_gpt.Trainer, "train_step", lambda trainer: pytest.fail("it trains"))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    flags = flags.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path / "folder"))
    assert train(tmp_path, f"--recipe bf16 {flags}") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(f"train_gpt.py: {message}", line), line


def test_a_disk_with_too_little_room_is_found_before_the_first_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_gpt.Trainer, "train_step", lambda trainer: pytest.fail("it trains"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=300_000))
    assert train(tmp_path, "--recipe bf16") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"train_gpt.py: --out: got '.*small' \(0.3 MB are free there\), needed about .* MB .*", line)


def test_a_disk_that_fills_up_is_one_message(tmp_path, capsys, monkeypatch):
    def save(archive, name, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", save)
    assert train(tmp_path, "--recipe bf16 --steps 1") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"train_gpt.py: cannot write .*bf16.zip .*No space left.*\.", line), line
    assert not [*(tmp_path / "small" / "checkpoints").iterdir()]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_on_cuda_an_interrupted_run_ends_with_the_same_losses(tmp_path, interrupt, capsys, recipe):
    common = f"--recipe {recipe} --steps 6 --device cuda"
    try:
        assert train(tmp_path / "whole", common) == 0
        assert "deterministic algorithms are on" in capsys.readouterr().out
        interrupt(recipe, 3)
        assert train(tmp_path / "halves", common) == 128 + signal.SIGINT
        assert train(tmp_path / "halves", f"{common} --resume") == 0
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses(tmp_path / "halves", recipe) == losses(tmp_path / "whole", recipe)


def test_a_graphed_step_copies_its_batch_and_its_rates(monkeypatch):
    """The graph of torch is played: what it captures runs where it is replayed, from tensors that stay."""

    class Graph:
        def replay(self):
            replayed.append((trainer.optimizer.param_groups[0]["lr"].item(), graphed.tokens_BT.sum().item()))

    class Trainer:
        options = SimpleNamespace(device="cpu")
        optimizer = SimpleNamespace(param_groups=[{"lr": torch.tensor(0.0)}])

        def batch(self):
            return np.zeros((2, 3), np.int64)

        def update(self, tokens_BT):
            updated.append(tokens_BT.data_ptr())
            return tokens_BT.sum().float()

    trainer, updated, replayed = Trainer(), [], []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in (("CUDAGraph", Graph), ("graph", lambda graph: contextlib.nullcontext()),
                        ("Stream", lambda: stream), ("current_stream", lambda: stream),
                        ("stream", lambda stream: contextlib.nullcontext())):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    graphed = train_gpt.GraphedStep(trainer)
    for step in range(6):
        trainer.optimizer.param_groups[0]["lr"] = torch.tensor(float(step))
        graphed(np.full((2, 3), step))
    assert len(updated) == 4  # three steps, and the capture
    assert set(updated) == {graphed.tokens_BT.data_ptr()}
    assert replayed == [(3.0, 18.0), (4.0, 24.0), (5.0, 30.0)]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["delayed", "fp8_current", "fp8_row", "mxfp8"])
def test_on_cuda_replayed_steps_have_the_losses_of_eager_ones(tmp_path, recipe):
    common = f"--recipe {recipe} --steps 8 --device cuda"
    eager, graphed = (trainer_of(tmp_path, f"{common} {more}") for more in ("", "--cuda-graph"))
    found = []
    for trainer in (eager, graphed):
        found.append([])
        while trainer.step < 8:
            found[-1].append(trainer.train_step())
            trainer.step += 1
    assert found[1] == pytest.approx(found[0], rel=1e-4)  # AdamW reads its rate from the device, in float32
    assert graphed.graph.steps == 8


def test_the_gap_of_losses_names_its_smoothing():
    from microfloat.pictures.style import new_figure

    axes = new_figure(4, 3).subplots()
    report.loss_gap(axes, {"bf16": [3.0, 2.0, 1.0, 0.5], "nvfp4": [3.0, 2.5, 1.5]}, "bf16", window=2)
    gap, zero = axes.lines
    np.testing.assert_allclose(gap.get_xydata(), [[1.5, 0.25], [2.5, 0.5]])
    assert (gap.get_label(), zero.get_label()) == ("nvfp4", "bf16")
    assert axes.get_legend().get_title().get_text() == "mean over 2 steps"
