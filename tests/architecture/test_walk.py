"""A walk through one NVFP4 Linear, forward and backward: how many files and functions of the host a reader passes.

The walk runs on the native backend of an H200, with its kernels in Triton's interpreter. Frames of the kernels do not
count, and neither do comprehensions, which are no functions of their own in newer versions of Python.
"""

import importlib
import os
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.interpreter import begin, interpreting

SOURCES = Path(__file__).parents[2] / "src" / "microfloat"
_COMPREHENSIONS = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")
_BACKEND = "microfloat.torch.launch.native"


class Bound(NamedTuple):
    """Limits of the design, and the last measurement: a walk may become shorter, and the number then falls."""

    design: int
    measured: int


FIRST = {"files": Bound(7, 12), "functions": Bound(60, 99)}
LATER = {"files": Bound(5, 5), "functions": Bound(28, 26)}


def walk(_case):
    """(file, function) of every host function that runs, in the first call and in the third."""
    import torch

    import microfloat.torch as mf
    from microfloat.recipes import NVFP4BlockScaling
    from microfloat.torch import backends

    importlib.import_module(_BACKEND)  # what modules do when they are imported is no part of a call
    with backends.pretend(chip="h200"):
        layer = mf.Linear(64, 32, dtype=torch.bfloat16, recipe=NVFP4BlockScaling())
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
        dy = torch.randn(32, 32, dtype=torch.bfloat16)
        walks = [functions_of(lambda: layer(x).backward(dy)) for _ in range(3)]
    return walks[0], walks[2]


def functions_of(call):
    """The host functions of the library that `call` enters, in order, each once."""
    entered = {}  # in order

    def note(frame, event, _):
        if event == "call":
            entered[frame.f_code] = None

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    of_library = [code for code in entered if code.co_filename.startswith(f"{SOURCES}{os.sep}")]
    named = [
        (Path(code.co_filename).relative_to(SOURCES).as_posix(), f"{code.co_qualname}:{code.co_firstlineno}")
        for code in of_library if code.co_name not in _COMPREHENSIONS
    ]  # fmt: skip
    return [one for one in named if not one[0].startswith("kernels/")]


def begin_anew():
    """`begin` of a process that no other test shares: what one has called is no first call."""
    begin()


@pytest.fixture(scope="module")
def walks():
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("triton", reason="triton is not installed")
    first, later = interpreting(walk, begin_anew)(None)
    return {"first": first, "later": later}


@pytest.mark.slow("a process of Triton's interpreter more")
@pytest.mark.parametrize(("which", "bounds"), [("first", FIRST), ("later", LATER)])
def test_a_walk_does_not_become_longer(walks, which, bounds):
    """Whoever shortens a walk lowers the measured number here, until it is that of the design."""
    functions = walks[which]
    assert functions, f"no function of {SOURCES} ran: the other process has imported another copy of the library"
    counts = {"files": len({file for file, _ in functions}), "functions": len(functions)}
    listed = "\n".join(f"{file}  {name}" for file, name in functions)
    for what, bound in bounds.items():
        print(f"{which} call: {counts[what]} {what}; the design asks for {bound.design} at most")
        assert counts[what] <= max(bound.measured, bound.design), f"{counts[what]} {what}:\n{listed}"


@pytest.mark.slow("a process of Triton's interpreter more")
def test_a_later_call_decides_nothing(walks):
    """No pass, no route, no layout and no schedule is made again."""
    files = {file for file, _ in walks["later"]}
    assert not {file for file in files if file.startswith("passes/")} | (files & {"routes.py", "layout.py"})
    assert not any(name.startswith("Schedule.__init__") for _, name in walks["later"])


def test_the_page_tells_the_measured_numbers(repository):
    page = (repository / "docs" / "architecture.md").read_text()
    for name, bounds in (("first", FIRST), ("later", LATER)):
        files, functions = bounds["files"], bounds["functions"]
        design = f"{files.design} files, {functions.design} functions"
        assert f"| {name} | {files.measured} | {functions.measured} | {design} |" in page
