"""What this library logs, for tests that read it."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def logged(level: int) -> Iterator[list[str]]:
    """The messages of the logger "microfloat" from this level on, as they come."""
    messages: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, listener = logging.getLogger("microfloat"), Listener()
    before = logger.level
    logger.addHandler(listener)
    logger.setLevel(level)
    try:
        yield messages
    finally:
        logger.removeHandler(listener)
        logger.setLevel(before)
