"""Core-seconds of each test file, a plugin for `make test TESTS="-p tests.cpu_times"`.

Processor time of the test's process and of the processes it has started, so that others on the machine do not count; a
test counts with its set-up, and with what was left to be torn down of the one before.
Under pytest-xdist each process collects all files; their sum is the time that `make test` shares among the cores.
``--cpu-times=FILE`` also writes the seconds of every test as JSON.
"""

import contextlib
import glob
import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

TIMES = pytest.StashKey["Times"]()


def _processor_seconds():
    """Of this process and of all below it.

    Of its own threads only the first is asked for the processes that it has started: JAX has dozens of threads, to ask
    all of them takes longer than most tests, and what others start is counted when it has ended.
    """
    return sum(os.times()[:4]) + sum(map(_seconds_of, _children("self", os.getpid())))


def _children(process, thread="*"):
    """The processes that run as children of one; none where there is no /proc, until they have ended."""
    for path in glob.glob(f"/proc/{process}/task/{thread}/children"):
        with contextlib.suppress(OSError):
            yield from Path(path).read_text().split()


def _seconds_of(process):
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(_seconds_of, _children(process)))


class Times:
    """Seconds of tests by id, of imports by file, of whole processes; and when the last of them was taken."""

    def __init__(self):
        self.tests, self.imports, self.processes = defaultdict(float), defaultdict(float), []
        self.mark = 0.0

    def since_mark(self):
        """Seconds since the last call."""
        before, self.mark = self.mark, _processor_seconds()
        return self.mark - before


def pytest_addoption(parser):
    parser.addoption("--cpu-times", metavar="FILE", help="write the core-seconds of every test to FILE, as JSON")


def pytest_configure(config):
    config.stash[TIMES] = Times()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    start = _processor_seconds()
    report = yield
    if isinstance(collector, pytest.Module):
        collector.config.stash[TIMES].imports[collector.nodeid] += _processor_seconds() - start
    return report


def pytest_collection_finish(session):
    session.config.stash[TIMES].since_mark()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    # Of a set-up that passed, which may have made a module's fixtures, nothing else is told where tests are many.
    if report.when == "call" or not report.passed:
        report.core_seconds = item.config.stash[TIMES].since_mark()
    return report


class _Collect:
    def __init__(self, times):
        self.times = times

    def pytest_runtest_logreport(self, report):
        self.times.tests[report.nodeid] += getattr(report, "core_seconds", 0.0)


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session):
    session.config.pluginmanager.register(_Collect(session.config.stash[TIMES]))


def pytest_sessionfinish(session):
    times = session.config.stash[TIMES]
    row = [_processor_seconds(), dict(times.imports)]
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu times"] = row
    elif not getattr(session.config.option, "numprocesses", None):
        times.processes.append(row)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    row = getattr(node, "workeroutput", {}).get("cpu times")
    if row is not None:
        node.config.stash[TIMES].processes.append(row)


def pytest_terminal_summary(terminalreporter):
    times = terminalreporter.config.stash[TIMES]
    files, imports = defaultdict(float), defaultdict(float)
    for test, seconds in times.tests.items():
        files[test.split("::")[0]] += seconds
    for _, row in times.processes:
        for file, seconds in row.items():
            imports[file] += seconds
    total = sum(seconds for seconds, _ in times.processes)
    terminalreporter.section(
        f"core-seconds: {total:.0f} in {len(times.processes)} processes, "
        f"of which tests {sum(files.values()):.0f} and imports {sum(imports.values()):.0f}"
    )
    for file in sorted({*files, *imports}, key=lambda file: -files[file] - imports[file]):
        terminalreporter.line(f"{files[file]:8.1f} {imports[file]:6.1f}  {file}")
    path = terminalreporter.config.getoption("--cpu-times")
    if path:
        with open(path, "w") as stream:
            json.dump({"total": total, "tests": times.tests, "imports": imports}, stream)
