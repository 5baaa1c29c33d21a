"""Processes that tests start: each has a bound of time and an error that names it, so that no run waits for ever."""

import contextlib
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
import unittest.mock
from concurrent.futures import ProcessPoolExecutor

SECONDS = 240  # less than the bound of a test (tests/bounds.py)


def run(command, *, seconds=SECONDS, **options):
    """``subprocess.run(command, capture_output=True, text=True, **options)``, ended with all that it has started."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    options = {**pipes, "text": True, **options}
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException as stopped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            if not isinstance(stopped, subprocess.TimeoutExpired):
                raise
            said = f"{(output or '')[-2000:]}\n{(errors or '')[-2000:]}"
            raise AssertionError(f"{command} was not done after {seconds} s; it had said:\n{said}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


@functools.cache
def _context():
    """New processes are copies of one that has imported torch, and nothing that imports triton.

    To import torch and the library is half of what such a process does otherwise. What is not installed is left out.
    """
    context = multiprocessing.get_context("forkserver")
    collectives = ("tensor", "fsdp", "checkpoint")
    distributed = [f"torch.distributed.{name}" for name in collectives]
    context.set_forkserver_preload(["microfloat.torch", *distributed, "tests.preloaded"])
    # What it imports comes from where this process has it, a checkout beside an installed one included: before Python
    # 3.14 the one that is copied knows nothing of this process's path (python/cpython#126631).
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with unittest.mock.patch.dict(os.environ, paths):
        multiprocessing.forkserver.ensure_running()
    return context


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)


def _enter(environment, first=None):
    """Take the environment of the process that asked for this one: the copied one has kept that of its own start.

    Ends with it, too: one that is killed, or leaves by `os._exit`, ends none of its own, which would wait for ever.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.clear()
    os.environ.update(environment)
    if first is not None:
        first()


def _enter_and_call(environment, function, arguments):
    _enter(environment)
    function(*arguments)


def process(function, *arguments):
    """A process that calls the function once it is started; a daemon."""
    return _context().Process(target=_enter_and_call, args=(dict(os.environ), function, arguments), daemon=True)


def process_queue():
    """A queue between this process and those of `process`."""
    return _context().Queue()


def once(function, *arguments, seconds=SECONDS):
    """``function(*arguments)`` in a new process that does nothing else; what it returns or raises comes back."""
    with ProcessPoolExecutor(1, mp_context=_context(), initializer=_enter, initargs=(dict(os.environ),)) as pool:
        future = pool.submit(function, *arguments)
        try:
            return future.result(seconds)
        except TimeoutError:
            if not future.done():
                for child in multiprocessing.active_children():
                    child.kill()
            raise


@functools.cache
def other_process(first=None):
    """``call(function, *arguments)`` in a new process that has called `first`; one for the rest of the run.

    What a function returns or raises comes back; it and its arguments are pickled.
    """
    pool = ProcessPoolExecutor(1, mp_context=_context(), initializer=_enter, initargs=(dict(os.environ), first))

    def call(function, *arguments, seconds=SECONDS):
        future = pool.submit(function, *arguments)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # its own
                raise
        for child in multiprocessing.active_children():
            child.kill()
        raise AssertionError(f"{function.__module__}.{function.__qualname__}{arguments} was not done after {seconds} s")

    return call


def join(*threads, seconds=SECONDS):
    """Wait until the threads have ended; they are to be daemons, which do not keep a process alive."""
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), f"{thread.name} was not done after {seconds} s"
