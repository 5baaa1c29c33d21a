"""Rows are judged against their targets and merged into files."""

import json
from argparse import Namespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from benchmarks import _report
from benchmarks._report import Report, Row, printable_command
from benchmarks._targets import TARGETS, Target
from microfloat.torch.timing import Times, in_turn, rotations


@pytest.mark.parametrize(
    ("ratio", "passed", "beyond"), [(1.69, False, False), (1.70, True, False), (1.71, True, False), (1.79, True, True)]
)
def test_a_ratio_is_judged(ratio, passed, beyond):
    row = Row("l.delayed", ratio=ratio).judge()
    assert (row.target, row.stretch, row.limit, row.ratio_of) == (1.70, 1.75, 1.72, "bf16")
    assert (row.passed, row.beyond_limit) == (passed, beyond)
    assert ("BEYOND THE LIMIT" in _report.line(row)) == beyond
    assert ("MISSED" in _report.line(row)) == (not passed)


@pytest.mark.parametrize(("ratio", "passed", "beyond"), [(2.6, False, False), (2.5, True, False), (0.9, True, True)])
def test_where_less_is_better(ratio, passed, beyond):
    row = Row("h.fwdbwd", ratio=ratio, value=500.0, unit="us").judge()
    assert (row.passed, row.beyond_limit) == (passed, beyond)


def test_a_count_is_judged_by_its_value():
    assert Row("h.launches", label="h.launches.delayed.forward", value=3).judge().passed is True
    assert Row("h.launches", label="h.launches.delayed.forward", value=4).judge().passed is False
    assert Row("g.compile", value=0).judge().passed is True
    assert Row("g.compile", value=1).judge().passed is False


def test_targets_are_below_stretch_and_limit():
    for name, target in TARGETS.items():
        assert isinstance(target, Target)
        sign = -1 if target.at_most else 1
        if target.stretch is not None:
            assert sign * target.stretch >= sign * target.target, name
        if target.limit is not None:
            assert sign * target.limit >= sign * target.target, name


def report_of(tmp_path, **options):
    return Report(Namespace(device="cpu", quick=False, only=[], json=str(tmp_path / "out.json"), **options), ["linear"])


def test_a_missed_target_stays_with_its_figure(tmp_path, capsys):
    report = report_of(tmp_path)
    report.add(Row("l.delayed", (2, 3, 4), "delayed").timed(Times(2.0, 1.9, 2.1), Times(3.0, 2.9, 3.1)))
    assert report.finish() == 0
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert (row["ratio"], row["base_ms"], row["passed"], row["target"]) == (1.5, 3.0, False, 1.70)
    assert "targets missed: l.delayed" in capsys.readouterr().out


def test_a_row_that_differs_has_no_time_and_fails_the_run(tmp_path):
    report = report_of(tmp_path)
    report.skip("q.amax", "differs from the reference: byte 0")
    assert report.finish() == 1
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert "median_ms" not in row


def test_a_failure_is_a_row(tmp_path, capsys):
    report = report_of(tmp_path)
    report.attempt("q.amax", lambda: 1 // 0)
    assert report.rows[0].skipped == "failed: ZeroDivisionError: integer division or modulo by zero"
    capsys.readouterr()


def test_rows_of_two_runs_stand_in_one_file(tmp_path):
    first, second = report_of(tmp_path), report_of(tmp_path)
    for name, milliseconds in (("delayed", 2.0), ("current", 2.5)):
        first.add(Row(f"l.{name}", (2, 3, 4), name).timed(Times(milliseconds, 1.9, 2.1)))
    first.finish()
    second.add(Row("l.current", (2, 3, 4), "current").timed(Times(2.25, 1.9, 2.1)))
    second.skip("l.delayed", "no", shape=(2, 3, 4), recipe="delayed")
    second.finish()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["id"], row["median_ms"]) for row in rows] == [("l.delayed", 2.0), ("l.current", 2.25)]
    _report.merge(tmp_path / "out.json", tmp_path / "new" / "other.json")
    assert json.loads((tmp_path / "new" / "other.json").read_text())["rows"] == rows


def test_a_run_cut_short_keeps_its_rows(tmp_path):
    report = report_of(tmp_path)
    report.add(Row("l.row", (1, 2, 3), ratio=1.5))
    report = report_of(tmp_path)
    report.add(Row("l.delayed", (1, 2, 3), ratio=1.7))
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["id"], row["ratio"]) for row in rows] == [("l.row", 1.5), ("l.delayed", 1.7)]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_geometric_mean_stands_for_the_shapes(tmp_path):
    report = report_of(tmp_path)
    for ratio in (0.80, 0.95, 0.99):
        report.add(Row("q.mxfp8.row", ratio=ratio))
    report.summarize("q.mxfp8.row")
    (summary,) = report.extra["summary"].values()
    assert summary["ratio"] == pytest.approx((0.80 * 0.95 * 0.99) ** (1 / 3))
    assert summary["passed"]
    report.rows[0].ratio = 0.76  # below 0.9 of the target of 0.85
    report.summarize("q.mxfp8.row")
    assert not report.extra["summary"]["q.mxfp8.row"]["passed"]


def test_only_takes_ids_and_what_they_begin_with():
    assert _report.wanted([], "l.delayed")
    assert _report.wanted(["l"], "l.delayed")
    assert _report.wanted(["l.delayed"], "l.delayed")
    assert not _report.wanted(["l.del"], "l.delayed")
    assert _report.wanted(["b.eager.current"], "b.eager", "b.eager.current")


def test_the_recorded_command_names_no_folder_of_a_machine():
    given = ["linear", "--json", "/some/where/linear.json", "--only", "l.delayed"]
    assert printable_command(given) == (
        "python -m benchmarks linear --json benchmarks/results/linear.json --only l.delayed"
    )


def test_percentiles_and_rotation():
    times = Times.of([float(i) for i in range(101, 0, -1)])
    assert (times.p10, times.median, times.p90) == (11.0, 51.0, 91.0)
    assert times.per(10).median == 5.1
    assert (rotations(1), rotations(64 << 20), rotations(1 << 30)) == (24, 4, 2)


def test_calls_take_turns():
    order = []
    found = in_turn({"a": lambda i: order.append(("a", i)), "b": lambda i: order.append(("b", i))}, "cpu")
    assert set(found) == {"a", "b"}
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
