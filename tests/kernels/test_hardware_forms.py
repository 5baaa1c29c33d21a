"""The hardware forms of all kernels against the oracle without a GPU: in the interpreter, their PTX by a model of it.

`tests/ptx` says what the model is. Compiled kernels stay the judge of it, where there is a GPU (`test_kernels.py`): the
same cases run there. Not here: layouts of Triton's compiler, and whatever happens between threads that run at once.
"""

import pytest

from microfloat.formats import ELEMENTS
from tests.interpreter import interpreting
from tests.kernels.test_kernels import CASES, WORDS
from tests.ptx import interpreting as hardware

ONE_FORM = ("swizzled", "empty", "refusals")  # launch nothing that has two forms, or nothing of its own
HARDWARE = [what for what in CASES + WORDS if what.values[0][0] not in ONE_FORM]
# Of each family of kernels one case runs in every run.
KEPT = (
    "operands-mxfp8-(256,192)-bfloat16-special",
    "operands-nvfp4-(48,72)-*", "operands-nvfp4_2d-(128,128)-bfloat16-special", "gradients-fp8_tensor", "scale_orders",
    "folded-mxfp8-True", "values_in_bf16-mxfp4", "amaxes-*special",
    "activations-silu-bfloat16", "fused_casts-mxfp8", "fused_linears-triton-mxfp8",
    "special_words-mxfp8", "beside_nan-fp8_1x128",
)  # fmt: skip


def _run(case):
    from tests.kernels import cases, hardware_cases

    if case[0] in ("conversions", "narrower", "packed", "reciprocals"):
        return hardware_cases.run(case)
    hardware.choose_hardware()
    if case[0] == "prefetched":
        return hardware_cases.run(case)
    return cases.run(case, "cpu")


@pytest.fixture(scope="module")
def interpreted_hardware():
    """``interpreted_hardware(case)`` runs a case of `cases.py`, with hardware forms, in a process of its own."""
    reason = hardware.why_not()
    if reason:
        pytest.skip(reason)
    return interpreting(_run, hardware.begin)


@pytest.mark.slow_cases("hardware forms of every case of the kernels, interpreted", all_but=KEPT)
@pytest.mark.xdist_group("triton-interpreter-hardware")
@pytest.mark.parametrize("what", HARDWARE)
def test_hardware_forms(interpreted_hardware, what):
    assert interpreted_hardware(what) == "interpreted, hardware conversions"


@pytest.mark.xdist_group("triton-interpreter-hardware")
@pytest.mark.parametrize(
    "what",
    [
        *[("conversions", element, stochastic) for element in ELEMENTS for stochastic in (False, True)],
        *[("packed", element) for element in ELEMENTS],
        ("narrower",),
        ("reciprocals",),
    ],
    ids=lambda what: "-".join(map(str, what)),
)
def test_both_forms_agree(interpreted_hardware, what):
    interpreted_hardware(what)


@pytest.mark.slow_cases("hardware forms of every case of the kernels, interpreted", all_but=("fp8_1x128-*",))
@pytest.mark.xdist_group("triton-interpreter-hardware")
@pytest.mark.parametrize(
    ("name", "tile"), [("fp8_128x128", (128, 128)), ("fp8_1x128", (128, 128)), ("mxfp8", (256, 64))]
)
def test_what_is_prefetched(interpreted_hardware, name, tile):
    interpreted_hardware(("prefetched", name, (256, 384), tile))
