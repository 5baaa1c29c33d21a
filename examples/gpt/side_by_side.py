"""Runs side by side, each in a process of its own and on one core.

A run of a small model spends its time in many short operations, which a second core hardly speeds up and a busy one
slows down. Runs have nothing to do with each other, so they share the cores instead.
"""

import multiprocessing
import queue
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gpt import report
from gpt.data import load_corpus
from gpt.options import Options
from microfloat.errors import MicrofloatError

__all__ = ["train_side_by_side"]


class WorkerError(MicrofloatError, RuntimeError):
    """A process that trained a run came to an end that it did not explain."""


class _StopEvent:
    """Tells `Training.train` between two steps to stop, since only the parent hears signals."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def signal(self) -> int | None:
        return signal.SIGINT if self._event.is_set() else None


def train_side_by_side(
    train_run: Callable[..., report.Result], kind: Any, options: Options, files: Mapping[str, Path], stop: Any,
    show: Callable[[str, int, float | None], None], say: Callable[[str], None],
) -> dict[str, report.Result]:  # fmt: skip
    """Train every run, `options.jobs` at a time; returns the results of those that were begun.

    `train_run` as in gpt/training.py; ``kind.use_one_core()`` keeps the framework to one core in its process.
    ``show(name, step, loss)`` and ``say(text)`` are called here, for the display. Raises what a run raised.
    """
    context = multiprocessing.get_context("spawn")
    events, stopped, begun = context.Queue(), context.Event(), context.Value("i", 0)
    shared = train_run, kind, options, dict(files), events, stopped, begun
    workers = [context.Process(target=_work, args=shared, daemon=True) for _ in range(options.jobs)]
    for worker in workers:
        worker.start()
    results: dict[str, report.Result] = {}
    try:
        while True:
            if stop.signal is not None:
                stopped.set()
            alive = any(worker.is_alive() for worker in workers)  # asked before the queue, so that nothing is missed
            try:
                what, *details = events.get(timeout=0.2)
            except queue.Empty:
                if alive:
                    continue
                break
            if what == "step":
                show(*details)
            elif what == "say":
                say(*details)
            elif what == "done":
                results[details[0]] = details[1]
            else:
                raise details[0]
    finally:
        stopped.set()
        for worker in workers:
            worker.join(timeout=60)
            worker.kill()
    failed = [worker.exitcode for worker in workers if worker.exitcode]
    if failed:
        raise WorkerError(f"--jobs {options.jobs}: a training process ended with status {failed[0]}. Try --jobs 1.")
    return {run.name: results[run.name] for run in options.runs if run.name in results}


def _work(
    train_run: Callable[..., report.Result], kind: Any, options: Options, files: dict[str, Path], events: Any,
    stopped: Any, begun: Any,
) -> None:  # fmt: skip
    """Take one run after the other until none is left."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a terminal sends Ctrl-C to all of them; the parent passes it on
    try:
        kind.use_one_core()
        corpus = load_corpus(options.corpus_bytes)
        while not stopped.is_set():
            with begun.get_lock():
                begun.value += 1
                index = len(options.runs) - begun.value  # the last first: the baseline is short and fills the gaps
            if index < 0:
                return
            run = options.runs[index]

            def show(step: int, loss: float | None, name: str = run.name) -> None:
                events.put(("step", name, step, loss))

            result = train_run(
                kind, run, options, corpus, files[run.name], _StopEvent(stopped), show,
                lambda text: events.put(("say", text)),
            )  # fmt: skip
            events.put(("done", run.name, result))
    except MicrofloatError as error:
        events.put(("failed", error))
