"""`save` and `convert` ended at each of their steps: no half result has its name, and a repeat goes on before that."""

import contextlib
import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from microfloat.checkpoint import Record, convert, load, save
from microfloat.errors import CheckpointError


class Killed(BaseException):
    """The end of the process, which nothing handles."""


@pytest.fixture
def source(tmp_path):
    names = [f"model.layers.{i}.mlp.{name}_proj.weight" for i in range(2) for name in ("up", "down")]
    rng = np.random.default_rng(0)
    records = [Record(name, rng.standard_normal((32, 64), np.float32), logical_shape=(32, 64)) for name in names]
    save(records, tmp_path / "source", format="plain", config={"model_type": "llama"})
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    return tmp_path / "source"


def contents(path):
    """The files beside the destination, those of its folder included; the hidden journal is no part of a checkpoint."""
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")
    }  # fmt: skip


def killing(monkeypatch, step):
    """Make the call number `step` to one of the functions that change names on the disk the last one; counts them."""
    calls = [0]

    def counted(function):
        def called(*arguments, **options):
            calls[0] += 1
            if calls[0] == step:
                raise Killed
            return function(*arguments, **options)

        return called

    for owner, name in ((os, "replace"), (os, "rename"), (Path, "unlink"), (Path, "rmdir"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))
    return calls


@pytest.mark.slow_cases("further conversions that are killed", all_but=("out.safetensors",))
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_a_conversion_killed_at_any_step_shows_all_or_nothing_and_is_finished_by_a_repeat(
    source, tmp_path, monkeypatch, name
):  # features K9
    def attempt(folder, step):
        with monkeypatch.context() as patch:
            calls = killing(patch, step)
            with contextlib.suppress(Killed):
                convert(source, tmp_path / folder / name, to="ct:mxfp8", max_shard_size=5000)
        return calls[0]

    steps = attempt("whole", 0)
    whole = contents(tmp_path / "whole")
    for step in range(1, steps + 1):
        attempt(f"{step}", step)
        if (tmp_path / f"{step}" / name).exists():
            assert contents(tmp_path / f"{step}") == whole, step
            continue  # it had ended, but for the journal
        attempt(f"{step}", 0)
        assert contents(tmp_path / f"{step}") == whole, step
    assert steps > 8


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_what_is_not_read_back_as_it_was_written_gets_no_name(source, tmp_path, monkeypatch, name):
    write = os.pwrite

    def wrong(file, data, start):
        return write(file, data if start == 0 else b"\xff" * len(data), start)  # the header stands at 0

    monkeypatch.setattr(os, "pwrite", wrong)
    with pytest.raises(CheckpointError):
        convert(source, tmp_path / name, to="deepseek:fp8")
    assert not (tmp_path / name).exists()


def test_a_save_killed_at_its_last_step_is_not_taken_for_one_of_other_weights(tmp_path, monkeypatch):
    def record(value):
        return Record("a.weight", np.full((4, 4), value, np.float32), logical_shape=(4, 4))

    def ended(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", ended)  # of the journal, after the folder has its name
        with pytest.raises(Killed):
            save([record(1)], tmp_path / "out", format="plain")
    assert (tmp_path / "out").exists()
    with pytest.raises(CheckpointError, match="exists already"):
        save([record(2)], tmp_path / "out", format="plain")
    assert load(tmp_path / "out")["a.weight"].codes[0, 0] == 1


def test_a_full_disk_gives_back_what_was_written(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        convert(source, tmp_path / "out", to="ct:mxfp8")
    assert not list((tmp_path / "out.partial").glob("*.tmp"))


def test_a_destination_that_cannot_be_written_is_found_before_the_source_is_read(source, tmp_path, monkeypatch):
    def never(progress):
        raise AssertionError(progress)

    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="cannot be written"):
        convert(source, tmp_path / "new" / "out", to="ct:nvfp4", progress=never)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    with pytest.raises(CheckpointError, match="disk is full"):
        convert(source, tmp_path / "new" / "out", to="ct:nvfp4", progress=never)
    assert not (tmp_path / "new").exists()
