"""A process of its own for Triton's interpreter: whether kernels are interpreted is decided when triton is imported."""

import pytest

from tests.interpreter import interpreting


def _run(case):
    from tests.kernels import cases

    return cases.run(case, "cpu")


@pytest.fixture(scope="session")
def interpreted():
    """``interpreted(case)`` runs a case of `cases.py` in the interpreter; its exceptions are raised here."""
    pytest.importorskip("triton", reason="triton is not installed")
    return interpreting(_run)
