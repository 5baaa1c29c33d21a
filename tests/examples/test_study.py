"""The pretraining study: paired seeds, runs that go on bit for bit, and intervals that cover what they say.

Features N14.
"""

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import study
import torch
from pretraining import verdicts
from pretraining.model import SIZES, Size
from pretraining.rows import AGAIN, BASELINE, MAIN, ROWS
from pretraining.run import Run
from pretraining.text import Text, order
from safetensors.torch import load_file

CPU, SMALL = torch.device("cpu"), SIZES["seconds"]


@pytest.fixture(scope="module")
def text():
    """Two kinds of text, with a structure that a model can learn."""
    draw = np.random.default_rng(0)
    streams = {kind: draw.integers(0, 64, 3000).cumsum().astype("<u2") % 64 for kind in ("code", "prose")}
    return Text(streams, {kind: stream[:600] for kind, stream in streams.items()}, 64, {"text": "random"})


def test_a_batch_has_its_share_of_each_kind_and_no_window_twice(text):
    batches = np.concatenate([text.batch(5, step, 4, 16) for step in range(150)])
    count = (3000 - 1) // 16
    prose = [int(np.flatnonzero((windows_of(text, "prose") == row).all(axis=1))[0]) for row in batches[3::4]]
    assert sorted(prose) == [*range(150)] or len({*prose}) == 150 < count
    code = [row.tobytes() for step in range(150) for row in batches[4 * step : 4 * step + 3]]
    first = code[:count]
    assert len({*first}) == count  # one pass over the code, then another in another order
    assert code[count : 2 * count] != first
    assert {*code[count : 2 * count]} == {*first}


def windows_of(text, kind, context=16):
    """All windows of a stream."""
    stream = text.train[kind]
    return np.stack([stream[i : i + context + 1] for i in range(0, len(stream) - context, context)])


def test_the_order_is_of_the_seed_alone():
    assert np.array_equal(order(1, "code", 0, 50), order.__wrapped__(1, "code", 0, 50))
    different = [order(1, "code", 0, 50), order(2, "code", 0, 50), order(1, "prose", 0, 50), order(1, "code", 1, 50)]
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(different, 2))


def test_rows_of_a_seed_share_weights_and_batches(text):
    runs = {row: Run(row, 4, SMALL, text, CPU) for row in (BASELINE, "nvfp4", AGAIN)}
    weights = {row: torch.cat([p.detach().flatten() for p in run.model.parameters()]) for row, run in runs.items()}
    assert torch.equal(weights[BASELINE], weights["nvfp4"])
    assert not torch.equal(weights[BASELINE], Run(BASELINE, 5, SMALL, text, CPU).model.embedding.weight.flatten())
    distance = (weights[AGAIN] / weights[BASELINE] - 1).abs().max()
    assert 2**-9 < distance <= 2**-8 * 1.001  # at most one rounding to bfloat16
    for row in (BASELINE, "nvfp4"):
        runs[row].train_step()
    assert torch.equal(runs[BASELINE].tokens, runs["nvfp4"].tokens)
    assert runs[BASELINE].loss != runs["nvfp4"].loss


WHOLE = pytest.mark.slow("one more recipe, one more place to stop")


@pytest.mark.parametrize(
    ("row", "stop"),
    [("nvfp4_late_bf16", 1), *(pytest.param(*case, marks=WHOLE) for case in [("nvfp4", 3), ("nvfp4_late_bf16", 2),
     ("nvfp4_late_bf16", 3), ("fp8_delayed", 2)])],
)  # fmt: skip
def test_a_stopped_run_goes_on_bit_for_bit(text, tmp_path, row, stop, monkeypatch):
    """Stochastic rounding goes on with its own numbers; a switch to bf16 comes after, at, or before the stop."""
    size = Size(16, 1, 1, 32, context=8, batch=2, tokens=8 * 2 * 4, lr=3e-3, evaluated=1)
    assert size.steps == 4
    monkeypatch.setattr("pretraining.run.EVALUATIONS", 2)
    monkeypatch.setattr("pretraining.run.FEW", 1)
    if ROWS[row].bf16_from < 1:
        monkeypatch.setitem(ROWS, row, ROWS[row]._replace(bf16_from=0.5))
    whole = Run(row, 1, size, text, CPU)
    assert whole.train()
    first = Run(row, 1, size, text, CPU)
    assert not first.train(lambda: first.step == stop)
    first.save(tmp_path / "run.pt")
    second = Run(row, 1, size, text, CPU)
    second.load(torch.load(tmp_path / "run.pt", weights_only=True))
    assert second.step == stop
    assert second.train()
    assert torch.equal(whole.losses, second.losses)
    assert whole.held_out == second.held_out
    ours, theirs = whole.model.state_dict(), second.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert whole.summary()["held_out"] == second.summary()["held_out"]


def test_a_checkpoint_of_another_run_is_refused(text):
    state = Run(BASELINE, 1, SMALL, text, CPU).state()
    with pytest.raises(ValueError, match=r"seed: the checkpoint has 1, this run has 2"):
        Run(BASELINE, 2, SMALL, text, CPU).load(state)


def test_the_queue_skips_what_is_done_and_ends_seeds_in_turn(tmp_path, capsys):
    command = ["run", "--size", "seconds", "--out", str(tmp_path), "--rows", "bf16,bf16_again", "--seeds", "0,1"]
    options = study.parse([*command, "--more", "fp8_head"])
    queue = [("bf16", 0), ("bf16_again", 0), ("bf16", 1), ("bf16_again", 1), ("fp8_head", 0)]
    assert study.queue(options) == queue
    options.until = 0.0  # the time is up: nothing is begun
    assert not study.work(options)
    assert not [*tmp_path.iterdir()]
    for row, seed in queue[1:]:
        (tmp_path / f"{row}.{seed}.json").write_text("{}")
    assert study.main([*command, "--more", "fp8_head"]) == 0
    assert capsys.readouterr().out.startswith("bf16.0: code ")
    result = json.loads((tmp_path / "bf16.0.json").read_text())
    assert len(result["train"]) == SMALL.steps
    assert not [*tmp_path.glob("*.pt")]


@pytest.mark.slow("a tenth of the size for a CPU")
def test_the_size_for_a_cpu_learns(tmp_path):
    command = ["run", "--size", "cpu", "--tokens", "60000", "--rows", "bf16,nvfp4", "--seeds", "0"]
    assert study.main([*command, "--out", str(tmp_path)]) == 0
    bf16, nvfp4 = (json.loads((tmp_path / f"{row}.0.json").read_text()) for row in ("bf16", "nvfp4"))
    assert bf16["held_out"]["code"] < 3.6 < bf16["train"][0]  # five and a half nats are a uniform byte
    assert abs(nvfp4["held_out"]["code"] - bf16["held_out"]["code"]) < 0.1
    assert bf16["held_out_curve"][0][1]["code"] > bf16["held_out_curve"][-1][1]["code"]


def test_a_report_holds_every_run_and_no_path(tmp_path, capsys):
    facts = {"size": {}, "steps": 1, "steps_of_a_mean": 1, "text": {}, "environment": {"device": "none"}}
    for row, seed in itertools.product(("bf16", "bf16_again", "mxfp8"), (0, 1, 2)):
        loss = 3.0 + 0.1 * seed + {"bf16": 0.0, "bf16_again": 0.001 * (seed - 1), "mxfp8": 0.05}[row]
        one = {"row": row, "seed": seed, "held_out": {"code": loss, "prose": loss + 1}, "train": [loss], **facts}
        (tmp_path / f"{row}.{seed}.json").write_text(json.dumps(one))
    assert study.main(["report", "--out", str(tmp_path), "--json", str(tmp_path / "all")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "bf16_again"
    assert lines[0].endswith("within chance")
    assert lines[1].split()[:2] == ["mxfp8", "+0.0500"]
    assert lines[1].endswith("costs")
    merged = json.loads((tmp_path / "all").read_text())
    assert len(merged["runs"]) == 9
    assert str(tmp_path) not in json.dumps(merged)


def test_a_run_made_anew_joins_an_earlier_report(tmp_path):
    facts = {"size": {}, "steps": 1, "steps_of_a_mean": 1, "text": {}, "environment": {"device": "d", "torch": "t"}}

    def of(row, loss, **other):
        return {"row": row, "seed": 0, "held_out": {"code": loss}, "train": [loss], **facts, **other}

    before, after = tmp_path / "before", tmp_path / "after"
    for folder, runs in ((before, [of("bf16", 1.0), of("fp8_delayed", 4.0)]), (after, [of("fp8_delayed", 1.1)])):
        folder.mkdir()
        for run in runs:
            (folder / f"{run['row']}.0.json").write_text(json.dumps(run))
    file, joined = tmp_path / "all", tmp_path / "joined"
    assert study.main(["report", "--out", str(before), "--json", str(file)]) == 0
    command = ["report", "--out", str(after), "--json", str(joined), "--onto", str(file)]
    assert study.main([*command, "--command-line", "run --rows fp8_delayed"]) == 0
    merged = json.loads(joined.read_text())
    assert [(run["row"], run["held_out"]["code"]) for run in merged["runs"]] == [("bf16", 1.0), ("fp8_delayed", 1.1)]
    assert [run["held_out"]["code"] for run in merged["replaced"]] == [4.0]
    assert merged["runs"][1]["command"] == "python examples/study.py run --rows fp8_delayed"
    for changed in ({"steps": 2}, {"environment": {"device": "d", "torch": "u"}}, {"text": {"sha256": "1"}}):
        (after / "fp8_delayed.0.json").write_text(json.dumps(of("fp8_delayed", 1.1, **changed)))
        assert study.main(command) == 2


@pytest.mark.slow("examples: runs with further settings")
def test_weights_are_kept_of_the_rows_that_are_named(tmp_path):
    command = ["run", "--size", "seconds", "--out", str(tmp_path), "--rows", "bf16,bf16_again", "--seeds", "0"]
    assert study.main([*command, "--keep", "bf16"]) == 0
    weights = load_file(tmp_path / "bf16.0.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.bfloat16}
    assert len(weights) == len([*Run(BASELINE, 0, SMALL, study.load_text(None), CPU).model.parameters()])
    assert not (tmp_path / "bf16_again.0.safetensors").exists()


def test_the_interval_covers_the_truth_as_often_as_it_says():
    draw = np.random.default_rng(3)
    for count in (2, 3, 7):
        samples = draw.normal(0.3, 2.0, (40_000, count))
        half = verdicts.half_width([1.0, *[-1.0] * (count - 1)]) / np.std([1.0, *[-1.0] * (count - 1)], ddof=1)
        covered = np.abs(samples.mean(axis=1) - 0.3) <= half * samples.std(axis=1, ddof=1)
        assert covered.mean() == pytest.approx(0.95, abs=0.004)
    assert verdicts.half_width([1.0]) is None


def test_verdicts_need_an_interval_and_more_than_chance():
    def gap(*values):
        return verdicts.Gap("row", dict(enumerate(values)), float(np.mean(values)), verdicts.half_width(values))

    assert verdicts.verdict(gap(0.05, 0.051, 0.049), 0.002) == "costs"
    assert verdicts.verdict(gap(-0.05, -0.051, -0.049), 0.002) == "gains"
    assert verdicts.verdict(gap(0.001, 0.0011, 0.0012), 0.002) == "within chance"
    assert verdicts.verdict(gap(0.05, 0.2, -0.1), 0.002) == "undecided"
    assert verdicts.verdict(gap(3.7), 0.002) == verdicts.verdict(gap(3.7, 3.8), 0.002) == "did not train"
    assert verdicts.verdict(gap(0.05), 0.002) == "one seed: no verdict"


def test_every_row_of_the_study_has_its_recipe():
    assert [*MAIN] == [*ROWS][: len(MAIN)]
    assert [name for name, row in ROWS.items() if row.recipe is None] == ["bf16", "bf16_again", "fp8_head"]
    recipes = [row.recipe for row in ROWS.values() if row.recipe is not None and row.bf16_from == 1.0]
    assert len({*recipes}) == len(recipes)
    for name, row in ROWS.items():  # products are of the formats, not of what a chip makes of them
        gemms = [gemm for gemm in (row.recipe.fprop, row.recipe.dgrad, row.recipe.wgrad)] if row.recipe else []
        if name.startswith(("mx", "nvfp4")):
            assert {gemm.path for gemm in gemms if gemm.lhs} == {"folded" if name.endswith("folded") else "exact"}
