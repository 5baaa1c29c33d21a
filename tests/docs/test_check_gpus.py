"""tools/check_gpus.py: its steps exist, each ends in its time, and what has passed is not run again."""

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import ROOT


@pytest.fixture
def check_gpus(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("check_gpus")


def test_steps_name_tests_and_rows_that_exist(check_gpus, tmp_path, capsys):
    every, groups = check_gpus.steps(tmp_path), set()
    for name, step in every.items():
        for part in step.command:
            file, _, test = part.partition("::")
            assert not file.endswith(".py") or str(tmp_path) in file or (ROOT / file).is_file(), name
            groups |= set(re.findall(r"test_ranks_on_gpus\[(\w+)\]", test))
        assert step.seconds <= 600
    pytest.importorskip("torch", reason="torch is not installed")
    assert groups == set(importlib.import_module("tests.torch.distributed.test_fsdp").GPU_GROUPS)
    benchmark = importlib.import_module("benchmarks.fsdp")
    rows = {f"fsdp.{name}" for name in benchmark.RECIPES} | {"tp"}
    assert {row for step in every.values() for row in step.command if row.startswith(("fsdp.", "tp"))} <= rows
    assert check_gpus.main(["--list", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("\n") == len(every)


def test_steps_end_in_time_and_are_not_repeated(check_gpus, tmp_path, monkeypatch, capsys):
    def wait(seconds: int, code: str):
        return check_gpus.Step(seconds, ("-c", code))

    steps = {
        "quick": wait(60, "print('well')"), "slow": wait(1, "import time; print('here', flush=True); time.sleep(60)"),
        "wrong": wait(60, "raise ValueError('a shape')"),
    }  # fmt: skip
    monkeypatch.setattr(check_gpus, "steps", lambda out: steps)
    assert check_gpus.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "check_gpus.json").read_text())["steps"]
    assert {name: one["outcome"] for name, one in found.items()} == {
        "quick": "passed", "slow": "ended after 1 seconds", "wrong": "failed with status 1",
    }  # fmt: skip
    assert "ValueError: a shape" in found["wrong"]["end"]
    assert "well" in Path(tmp_path / "quick.log").read_text()
    steps["slow"] = wait(60, "print('again')")
    capsys.readouterr()
    assert check_gpus.main(["--out", str(tmp_path), "--only", "quick", "slow"]) == 0
    assert capsys.readouterr().out.startswith("slow: passed")
    assert check_gpus.main(["--out", str(tmp_path / "new"), "--minutes", "0"]) == 1
    assert "left out" in (tmp_path / "new" / "check_gpus.json").read_text()
    steps["timed"] = check_gpus.Step(60, ("-c", "print('timed')"), times=True)
    assert (
        check_gpus.main(["--out", str(tmp_path / "together"), "--together", "2", "--only", "quick", "slow", "timed"])
        == 0
    )
    assert capsys.readouterr().out.split("\n")[2].startswith("timed: passed")
    with pytest.raises(SystemExit):
        check_gpus.main(["--only", "nothing"])
