"""`benchmarks.peers`: whose turn it is, what a candidate's process answers, and rows of candidates that cannot run."""

import argparse
import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import peers
from benchmarks._report import Report


class Scripted:
    """A candidate without a process: it says what it was told to say, and remembers what it was asked."""

    def __init__(self, log, name, **answers):
        self.log, self.name, self.answers, self.asked = log, name, answers, []

    def send(self, **command):
        self.log.append((self.name, command["do"]))
        self.asked.append(command)

    def answer(self):
        return self.answers.get(self.asked[-1]["do"], {})


def report(tmp_path, *only):
    options = argparse.Namespace(quick=True, device="cpu", json=str(tmp_path / "rows.json"), only=list(only))
    return Report(options, ["peers"])


def test_turns_alternate_and_go_the_other_way_round_every_second_time():
    log = []
    candidates = {name: Scripted(log, name, time={"ms": ms}) for name, ms in (("a", 2.0), ("b", 3.0), ("c", 4.0))}
    times = peers.take_turns(candidates, rounds=3, steps=5)
    assert "".join(name for name, _ in log) == "abccbaabc"
    assert times == {"a": [2.0] * 3, "b": [3.0] * 3, "c": [4.0] * 3}
    assert {command["steps"] for one in candidates.values() for command in one.asked} == {5}


def test_candidates_get_ready_side_by_side_and_one_that_cannot_takes_no_turn(tmp_path):
    log, out = [], report(tmp_path)
    candidates = {
        "bf16": Scripted(log, "bf16", prepare={"sqnr_db": 200.0}, time={"ms": 6.0}),
        "row": Scripted(log, "row", prepare={"skipped": "differs: 0.4"}, time={"ms": 1.0}),
        "delayed": Scripted(log, "delayed", prepare={"sqnr_db": 28.0}, time={"ms": 4.0}),
        "block": Scripted(log, "block", prepare={"sqnr_db": 28.0}, time={"skipped": "out of memory"}),
    }
    peers.in_turns(out, candidates, "layer")
    assert [do for _, do in log[:3]] == ["prepare"] * 3
    assert ("row", "time") not in log
    found = {row["id"]: row for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert found["peers.layer.delayed"]["ratio"] == 1.5
    assert found["peers.layer.row"]["skipped"] == "differs: 0.4"
    assert "median_ms" not in found["peers.layer.row"]
    assert found["peers.layer.block"]["skipped"] == "failed when its turn came"
    assert log.count(("block", "time")) == 1


def test_models_run_one_by_one_and_are_compared_with_the_first_loss_of_bf16(tmp_path):
    extra = {"losses": [12.5, 12.1], "peak_gib": 64.0, "tokens_per_s_gpu": 32000}
    said = {"times": [600.0, 590.0, 610.0], "tflops": 500.0, "sqnr_db": 100.0, "extra": extra, "shape": [12, 2, 8192]}
    log, out = [], report(tmp_path)
    candidates = {name: Scripted(log, name, model=said) for name in ("bf16", "te.delayed", "current")}
    candidates["current"].answers = {"model": {**said, "times": [480.0, 470.0, 490.0]}}
    peers.one_by_one(out, candidates)
    assert [name for name, _ in log] == ["bf16", "current"], "transformers' model has no form of TransformerEngine's"
    assert [one.asked[0]["loss"] for one in (candidates["bf16"], candidates["current"])] == [None, 12.5]
    assert out.rows[1].ratio == 1.25
    assert out.rows[1].extra["peak_gib"] == 64.0


def test_a_failure_is_an_answer_and_the_next_command_is_served(capsys):
    class Fails:
        def prepare(self, work):
            raise ValueError(f"no {work}\nhere")

        def drop(self):
            return {"gone": True}

    said = []
    peers.serve(Fails(), ['{"do": "prepare", "work": "layer"}\n', '{"do": "drop"}\n'], said.append)
    assert json.loads(said[0]) == {"skipped": "failed: ValueError: no layer here"}
    assert json.loads(said[1]) == {"gone": True}
    assert all(line.endswith("\n") and line.count("\n") == 1 for line in said)
    assert "no layer" in capsys.readouterr().err


def test_a_work_forgets_the_shapes_that_the_one_before_compiled(monkeypatch):
    done = []
    monkeypatch.setattr(peers.torch.compiler, "reset", lambda: done.append("reset"))
    own = peers.Own("torchao.tensorwise", "cpu", True)
    own.step = lambda: None
    own.drop()
    assert done == ["reset"], "a layer of other sizes would be compiled for any size, which made torchao 10 % slower"
    assert own.step is None


def test_a_process_that_ends_is_named_by_its_status(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.sys, "executable", "false")
    gone = peers.Candidate("row", argparse.Namespace(device="cpu", quick=True))
    try:
        assert gone.answer() == {"skipped": "failed: ended with status 1"}
    finally:
        gone.end()


def test_rows_that_no_library_can_run_say_why(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda name, device: "" if name == "bf16" else f"{name} is not here")
    monkeypatch.setattr(peers, "Candidate", lambda name, options: Scripted([], name, prepare={"skipped": "a test"}))
    monkeypatch.setattr(Scripted, "end", lambda self: None, raising=False)
    only = ["peers.layer.te", "peers.layer.torchao"]
    options = argparse.Namespace(quick=True, device="cpu", json=str(tmp_path / "rows.json"), only=only)
    peers.main(options, ["peers"])
    found = {row["id"]: row["skipped"] for row in json.loads((tmp_path / "rows.json").read_text())["rows"]}
    assert set(found) == {f"peers.layer.{name}" for name in ("bf16", "torchao.tensorwise", "te.delayed", "te.current",
                                                            "te.block")}  # fmt: skip
    assert found["peers.layer.te.block"] == "te.block is not here"
