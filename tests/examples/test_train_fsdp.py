"""The training over several ranks: the losses of one process, flags, interruption, another number of ranks."""

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
import train_fsdp  # noqa: E402
from gpt.files import load_checkpoint, save_checkpoint  # noqa: E402
from gpt.report import describe_changes  # noqa: E402
from torch.distributed.tensor import DTensor, Replicate, Shard  # noqa: E402

from microfloat.errors import RankError  # noqa: E402
from tests.examples.small_run import arguments, losses, results, train  # noqa: E402
from tests.torch.distributed.ranks import of, run_ranks  # noqa: E402

ROOT = Path(__file__).parents[2]
WHY_SLOW = "examples: training over several processes"


def command(out: Path, more: str, ranks: int) -> list[str]:
    """The command line of a small run over so many ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*launcher, str(ROOT / "examples" / "train_fsdp.py"), *arguments(out, more)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}


def launch(out: Path, more: str, ranks: int = 2) -> subprocess.CompletedProcess:
    """Run it to its end."""
    return subprocess.run(
        command(out, more, ranks), env=environment(), capture_output=True, text=True, timeout=240, check=False
    )


def test_a_world_of_one_trains_without_torchrun(tmp_path):
    """features D9 and D12: bf16 is train_gpt.py's to the bit; a recipe's first loss too, then dw is in bfloat16."""
    flags = "--recipe mxfp8 --steps 3"
    assert train(tmp_path / "ranks", f"{flags} --low-precision-gather", "train_fsdp") == 0
    assert train(tmp_path / "one", flags) == 0
    for name in ("bf16", "mxfp8"):
        ours, theirs = losses(tmp_path / "ranks", name), losses(tmp_path / "one", name)
        assert ours["train_loss"][0] == theirs["train_loss"][0]
        assert ours["final_heldout"] == pytest.approx(theirs["final_heldout"], abs=1e-3)
    assert not torch.distributed.is_initialized()
    files = sorted(path.name for path in (tmp_path / "ranks" / "small" / "checkpoints").iterdir())
    assert files == ["bf16.step3", "bf16.zip", "mxfp8.step3", "mxfp8.zip"]
    generate = importlib.import_module("generate")
    model, _ = generate.load(tmp_path / "ranks" / "small" / "checkpoints" / "mxfp8.zip")
    first, _ = generate.load(tmp_path / "one" / "small" / "checkpoints" / "mxfp8.zip")
    for name, weight in model.state_dict().items():
        assert torch.allclose(weight, first.state_dict()[name], atol=0.02), name


@pytest.mark.slow("examples: runs with further settings")
def test_an_abort_while_shards_are_written_leaves_the_last_checkpoint(tmp_path, monkeypatch):
    """A second Ctrl-C falls into the save of step 4; the run goes on from step 2 and ends with the same losses."""
    flags = "--recipe delayed --steps 6 --checkpoint-every 2"
    assert train(tmp_path / "whole", flags, "train_fsdp") == 0
    saved, folders = train_fsdp.dcp.save, []

    def aborted(state, *, checkpoint_id):
        saved(state, checkpoint_id=checkpoint_id)
        folders.append(checkpoint_id)
        if checkpoint_id.name == "delayed.step4":
            (checkpoint_id / ".metadata").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(train_fsdp.dcp, "save", aborted)
    assert train(tmp_path / "cut", flags, "train_fsdp") == 128 + signal.SIGINT
    monkeypatch.setattr(train_fsdp.dcp, "save", saved)
    assert train(tmp_path / "cut", f"{flags} --resume", "train_fsdp") == 0
    assert losses(tmp_path / "cut", "delayed") == losses(tmp_path / "whole", "delayed")
    assert len(folders) == 5  # once for each step that is saved: three of bf16, and two


def test_shards_that_are_gone_are_named(tmp_path, capsys):
    flags = "--recipe bf16 --steps 2"
    assert train(tmp_path, flags, "train_fsdp") == 0
    file = tmp_path / "small" / "checkpoints" / "bf16.zip"
    facts, state = load_checkpoint(file)
    save_checkpoint(file, {**facts, "result": {**facts["result"], "final_heldout": None}}, state)
    shutil.rmtree(file.with_name("bf16.step2"))
    assert train(tmp_path, f"{flags} --resume", "train_fsdp") == 2
    assert "bf16.step2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "world", "message"),
    [
        ("--tp 3", 4, "--tp: got 3, needed a divisor of the number of ranks, 4"),
        ("--dp 3 --tp 2", 4, "--dp: got 3, needed 2: --dp times --tp is the number of ranks, 4"),
        ("--batch 3", 2, "--batch: got 3, needed a multiple of --dp, 2"),
        ("--watch 2", 1, "--watch: got 2, needed nothing. train_gpt.py has it, on one device."),
        ("--last-fraction-bf16 0.5", 1, "--last-in: got steps, needed --last-in blocks"),
        ("--jobs 2", 1, "--jobs: got 2, needed 1"),
    ],
)
def test_flags_that_do_not_fit_are_named(tmp_path, capsys, monkeypatch, flags, world, message):
    monkeypatch.setattr(train_fsdp, "WORLD", world)
    assert train(tmp_path, flags, "train_fsdp") == 2
    assert message in capsys.readouterr().err


def test_an_error_of_all_ranks_is_told_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_fsdp, "LOCAL_RANK", 1)
    monkeypatch.setattr(train_fsdp.time, "sleep", lambda _: None)
    assert train(tmp_path, "--tp 3", "train_fsdp") == 2
    assert capsys.readouterr().err == ""
    assert train_fsdp.Trainer.tells(RankError("rank 0 died"))


def test_changes_of_the_machine_are_named():
    """Triton is imported after the first of them is asked."""
    first = {"machine": {"cores": 2, "ranks": "2 x 1"}, "versions": {"torch": "2.11", "triton": "3.6"}}
    second = {"machine": {"cores": 2, "ranks": "1 x 2"}, "versions": {"torch": "2.13"}}
    assert describe_changes(first, second) == "ranks 2 x 1 (now 1 x 2), torch 2.11 (now 2.13)"
    assert describe_changes(first, {**first, "versions": {"torch": "2.11"}}) == ""


def clipped(rank: int) -> list[float]:
    """Factors by which gradients shrink: of one cut along both axes, one replicated by a plan, one of the other."""
    mesh = train_fsdp.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    placed = [(mesh, [Shard(0), Shard(0)]), (mesh, [Shard(0), Replicate()]), (mesh["dp"], [Shard(0)])]
    grads = [DTensor.from_local(torch.full((4,), 2.0), on, placements, run_check=False) for on, placements in placed]
    parameters = [SimpleNamespace(grad=grad) for grad in grads]
    trainer = SimpleNamespace(mesh=mesh, model=SimpleNamespace(parameters=lambda: parameters))
    train_fsdp.Trainer.clip_gradients(trainer)
    return [float(grad.to_local()[0]) / 2 for grad in grads]


@pytest.mark.slow(WHY_SLOW)
def test_gradients_are_clipped_by_the_norm_of_all(tmp_path):
    """8 values of the cut one, 4 of each other one."""
    for factors in of(run_ranks((clipped,), str(tmp_path / "store")), clipped):
        assert factors == pytest.approx([1 / (16 * 4) ** 0.5] * 3)


@pytest.mark.slow(WHY_SLOW)
def test_two_ranks_train_as_one_in_either_gather(tmp_path):
    """The first loss is the mean of both halves of the batch; what is gathered in codes changes no bit."""
    flags = "--recipe mxfp8,delayed,nvfp4 --dim 64 --hidden 64 --batch 4 --steps 4"  # halves of whole blocks
    assert train(tmp_path / "one", flags, "train_fsdp") == 0
    for name, more in (("two", ""), ("low", "--low-precision-gather"), ("tensor", "--tp 2")):
        assert launch(tmp_path / name, f"{flags} {more}").returncode == 0
    for recipe in ("bf16", "mxfp8", "delayed", "nvfp4"):
        one, two = losses(tmp_path / "one", recipe), losses(tmp_path / "two", recipe)
        assert losses(tmp_path / "low", recipe) == two
        for other in (two, losses(tmp_path / "tensor", recipe)):
            assert other["train_loss"][0] == pytest.approx(
                one["train_loss"][0], abs=1e-2 if recipe == "nvfp4" else 1e-3
            )
            assert other["final_heldout"] == pytest.approx(one["final_heldout"], abs=2e-2)


@pytest.mark.slow(WHY_SLOW)
def test_ctrl_c_leaves_a_checkpoint_that_another_number_of_ranks_continues(tmp_path):
    """From two ranks to one, through the shards of torch.distributed.checkpoint."""
    flags = "--recipe delayed --batch 4 --steps 1000 --checkpoint-every 250"
    process = subprocess.Popen(
        command(tmp_path, flags, 2), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "small" / "checkpoints" / "bf16.zip").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert "To continue with the same losses: torchrun --nproc-per-node 2" in output, output
    done = len(results(tmp_path)["recipes"]["bf16"]["train_loss"])
    assert 250 <= done < 1000
    resumed = launch(tmp_path, f"{flags} --resume", ranks=1)
    assert resumed.returncode == 0, resumed.stderr
    assert results(tmp_path)["complete"]
    assert re.search(r"delayed +\d", resumed.stdout)


@pytest.mark.slow(WHY_SLOW)
def test_a_rank_that_dies_is_named(tmp_path):
    """Killed from outside in the middle of a run; the other rank's message names it."""
    process = subprocess.Popen(
        command(tmp_path, "--recipe bf16 --batch 4 --steps 100000 --checkpoint-every 20", 2), env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "small" / "checkpoints" / "bf16.zip").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        if not children.exists():
            pytest.skip("this system does not list the children of a process")
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        output = process.communicate(timeout=90)[0]
    finally:
        process.kill()
    assert process.returncode != 0
    assert "exitcode  : -9" in output or "Signal 9" in output, output
