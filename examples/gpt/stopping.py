"""Ctrl-C and SIGTERM: the first is granted between two steps, the second ends the process at once."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

from rich.console import Console

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def noted(console: Console, patience: float) -> Iterator[list[int]]:
    """A list that gets the first signal. Another one, `patience` seconds later or after that, ends the process.

    Python's own handlers wait for the end of a call such as a backward, so a thread hears the signals too, from the
    file that the system's handler writes them to.
    """
    caught: list[int] = []
    ends, hears = os.pipe()[::-1]
    os.set_blocking(ends, False)
    previous = {number: signal.signal(number, lambda number, _: caught or caught.append(number)) for number in SIGNALS}
    earlier = signal.set_wakeup_fd(ends)
    listener = threading.Thread(target=_listen, args=(hears, console, patience), daemon=True)
    listener.start()
    try:
        yield caught
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(ends)
        listener.join()
        os.close(hears)


def _listen(hears: int, console: Console, patience: float) -> None:
    """Say what the first signal does, and end the process at the second one."""
    since = None
    while number := os.read(hears, 1):
        if number[0] not in SIGNALS:
            continue
        if since is None:
            since = time.monotonic()
            console.print("Stopping after this step, with a checkpoint. A second Ctrl-C or SIGTERM ends it at once.")
        elif time.monotonic() - since >= patience:
            console.print("Aborted. The last checkpoint that was written is whole.")
            console.show_cursor()
            for process in multiprocessing.active_children():  # which ignore both
                process.kill()
            os._exit(128 + number[0])
