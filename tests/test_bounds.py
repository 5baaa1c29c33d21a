"""A test that waits for ever ends with its process, and is named by a traceback."""

import sys

import pytest

from tests import bounds, processes


@pytest.fixture
def timers(monkeypatch):
    """Timers that a bound has begun and ended, in their order, and the clock."""
    made, clock = [], [0.0]
    monkeypatch.setattr(bounds.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        bounds.faulthandler, "dump_traceback_later", lambda seconds, exit, file: made.append((seconds, exit))
    )
    monkeypatch.setattr(bounds.faulthandler, "cancel_dump_traceback_later", lambda: made.append("ended"))
    return made, clock


def take(bound, following="another"):
    """One test that passes, between what the hook does before and after it."""
    running = bound.pytest_runtest_protocol(None, following)
    next(running)
    with pytest.raises(StopIteration):
        running.send(True)


def test_every_test_has_nine_tenths_of_the_time_at_least(timers):
    made, clock = timers
    bound = bounds.Bound()
    for clock[0] in (1000.0, 1001.0, 1029.0, 1031.0, 1032.0):
        take(bound)
    assert made == [(300, True)] * 2  # at 1000 and at 1031


def test_a_timer_begins_again_after_a_failure_and_ends_with_the_last_test(timers):
    made, _ = timers
    bound = bounds.Bound()
    take(bound)
    bound.pytest_exception_interact()  # pytest's own hook has ended the timer
    take(bound, following=None)
    assert made == [(300, True), "ended", (300, True), "ended"]


BLOCKED = """
import time
from tests import bounds

bounds.SECONDS = 0.3
running = bounds.Bound().pytest_runtest_protocol(None, None)
next(running)

def test_blocked():
    time.sleep(60)

test_blocked()
"""


def test_a_blocked_process_ends_and_names_the_test(repository):
    command = [sys.executable, "-c", BLOCKED]
    ended = processes.run(command, seconds=30, cwd=repository)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "in test_blocked" in ended.stderr
