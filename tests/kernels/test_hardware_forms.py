"""The hardware forms of all kernels against the oracle without a GPU: in the interpreter, their PTX by a model of it.

`tests/ptx` says what the model is. Compiled kernels stay the judge of it, where there is a GPU (`test_kernels.py`): the
same cases run there. Not here: clusters (`norm_clusters`), and whatever happens between threads that run at once.
"""

import pytest

from tests.interpreter import interpreting
from tests.kernels.test_kernels import CASES
from tests.ptx import interpreting as hardware


def _run(case):
    from tests.kernels import cases

    hardware.choose_hardware()
    return cases.run(case, "cpu")


@pytest.fixture(scope="module")
def interpreted_hardware():
    """``interpreted_hardware(case)`` runs a case of `cases.py`, with hardware forms, in a process of its own."""
    reason = hardware.why_not()
    if reason:
        pytest.skip(reason)
    with interpreting(_run, hardware.begin) as call:
        yield call


@pytest.mark.xdist_group("triton-interpreter-hardware")
@pytest.mark.parametrize("what", CASES)
def test_hardware_forms(interpreted_hardware, what):
    assert interpreted_hardware(what) == "interpreted, hardware conversions"
