"""The time that a test may take: one that waits for ever fails by its name instead of using up the whole run."""

import faulthandler
import math
import os
import time

import pytest

SECONDS = 300  # then the process ends with a traceback of all its threads, and under pytest-xdist another goes on


class Bound:
    """Ends a process whose test takes `SECONDS`, or up to a tenth less.

    pytest's own `faulthandler_timeout` has a thread begin and end for each test, which is more than many tests take.
    """

    def __init__(self) -> None:
        self._errors = os.dup(2)  # while pytest does not capture it
        self._begun = -math.inf

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item, nextitem):
        now = time.monotonic()
        if now - self._begun > SECONDS / 10:
            self._begun = now
            faulthandler.dump_traceback_later(SECONDS, exit=True, file=self._errors)
        try:
            return (yield)
        finally:
            if nextitem is None:
                self._end()

    def pytest_exception_interact(self) -> None:
        """A test has failed, at which pytest ends the timer: a debugger may be about to ask."""
        self._end()

    def _end(self) -> None:
        self._begun = -math.inf
        faulthandler.cancel_dump_traceback_later()
