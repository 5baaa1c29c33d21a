"""A process of its own for Triton's interpreter: whether kernels are interpreted is decided when triton is imported."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest


def _begin():
    """First thing in the new process, before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"


def _run(case):
    from tests.kernels import cases

    return cases.run(case, "cpu")


@pytest.fixture(scope="session")
def interpreted():
    """``interpreted(case)`` runs a case of `cases.py` in the interpreter; its exceptions are raised here."""
    pytest.importorskip("triton", reason="triton is not installed")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin) as pool:
        yield lambda case: pool.submit(_run, case).result()
