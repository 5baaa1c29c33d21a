"""Runs over several processes of pytest-xdist: they end whatever happens to one of the processes, and say less."""

import faulthandler
import math
import os
import time

import pytest
from _pytest.runner import runtestprotocol
from xdist.scheduler import LoadGroupScheduling

SILENCE = 900  # seconds; a test that blocks ends before (tests/bounds.py), as do collecting and set-up


class Groups(LoadGroupScheduling):
    """`--dist loadgroup` whose run ends when a process was replaced.

    pytest-xdist 3.8 gives a process one group at a time and comes back when that has run a test. After a crash it may
    give it a group of which every test has run already, or of which a single one is left (a process starts a test when
    it knows the next): either waits for ever.
    """

    def _reschedule(self, node) -> None:
        while not node.shutting_down and self._pending_of(self.assigned_work[node]) <= 2:
            super()._reschedule(node)  # one group more, or the end when there is none


def imports_from_the_end(config) -> bool:
    """True in every other process: with its test files from the last to the first, it meets another one half-way.

    In a fresh checkout nothing of ours has byte code. Processes that import in one order make all of it at the same
    time; these find from there on what the other has made. Not where parts of files are asked for, which may be given
    in any order.
    """
    worker = getattr(config, "workerinput", {}).get("workerid", "gw0")
    return int(worker.removeprefix("gw")) % 2 == 1 and not any("::" in argument for argument in config.args)


class FromTheEnd:
    """Collects folders and files from the last to the first, and reports the tests in the order of all processes."""

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self, collector):
        report = yield
        if isinstance(collector, (pytest.Session, pytest.Directory)):
            report.result = report.result[::-1]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items) -> None:
        files = {}
        for item in items:
            files.setdefault(item.path, []).append(item)
        items[:] = [item for of_file in reversed(files.values()) for item in of_file]


class Watch:
    """Ends a run of which nothing is heard for `SILENCE` seconds, with a traceback of where it waits."""

    def __init__(self) -> None:
        self._errors = os.dup(2)  # while pytest does not capture it
        self._begun = -math.inf

    def _begin_again(self) -> None:
        """Once in a part of the bound: each time a thread ends and another begins, which costs more than a report."""
        now = time.monotonic()
        if now - self._begun > SILENCE / 100:
            self._begun = now
            faulthandler.dump_traceback_later(SILENCE, exit=True, file=self._errors)

    def pytest_sessionstart(self) -> None:
        self._begin_again()

    def pytest_runtest_logreport(self) -> None:
        self._begin_again()

    def pytest_unconfigure(self) -> None:
        faulthandler.cancel_dump_traceback_later()


class Brief:
    """Tells the process that shows results of tests, and of what went wrong around them, in two thirds of the time.

    That set-up and tear-down of a test passed is shown by nobody, but makes two of three reports.
    """

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            if report.when == "call" or not report.passed:
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True
