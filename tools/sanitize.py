"""compute-sanitizer over the kernel tests, on a machine with an NVIDIA GPU and the CUDA toolkit.

    python tools/sanitize.py                       # memcheck, racecheck, initcheck and synccheck
    python tools/sanitize.py memcheck --jobs 8     # one of them, in 8 processes
    python tools/sanitize.py memcheck -k nvfp4     # only cases with this in their name

Runs the cases of tests/kernels/test_kernels.py (compiled, against the oracle), and products of a few rows with stored
codes, under each tool and exits with 1 if a tool reports anything or a case fails; before that, memcheck and initcheck
must see a fault that is there on purpose. torch's caching allocator is switched off, so that every tensor is an
allocation of its own and one byte beyond it is seen. Cases that call GEMMs of other libraries, or `torch.compile`, are
left out: they launch the kernels of the other cases.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
LEFT_OUT = ("fused_linears", "traced", "refusals")
PLANTED = ("memcheck", "initcheck")
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (.*)")


# Rows of x, of which each number has other kernels, and weights of few, some and many rows, with a K of one chunk of
# codes or of less, ragged, and of several.
ROWS = (1, 8, 16, 20, 33, 64, 128, 200)
WEIGHTS = ((40, 256), (130, 1120), (1000, 128), (6400, 1024), (17408, 512))
STORED = ("nvfp4", "mxfp4", "mxfp8", "fp8_row", "fp8_128x128")
GROUPS = ([1, 0, 2], [8, 31, 0, 64])


def run_product(name: str, rows: int, shape: tuple[int, int]) -> None:
    """A Linear with stored codes; raises AssertionError where y is out of its bound."""
    import torch

    from tests.torch.launch.test_decode_route import distances

    worst, launches, _ = distances(name, rows, shape, torch.bfloat16, "cuda")
    assert launches
    assert worst <= 1


def run_experts(name: str, sizes: list[int], shape: tuple[int, int]) -> None:
    """The same of a GroupedLinear, with rows behind the last group."""
    import torch

    from tests.torch.launch.test_decode_route import experts

    worst, _, reason, _ = experts(name, sizes, shape, torch.bfloat16, "cuda", 3)
    assert reason == ""
    assert worst <= 1


def cases_by_name() -> list[tuple[str, Callable[[], object]]]:
    """Every case: its name, and what runs it."""
    from tests.kernels import cases
    from tests.kernels.test_kernels import CASES

    found = [
        (str(case.id), partial(cases.run, case.values[0], "cuda"))
        for case in CASES
        if not str(case.id).startswith(LEFT_OUT)
    ]
    for name, shape in product(STORED, WEIGHTS):
        found += [(f"product-{name}-{rows}x{shape}", partial(run_product, name, rows, shape)) for rows in ROWS]
        if name == "fp8_128x128" and shape[0] % 128:  # tiles do not hold rows of two experts
            continue
        found += [
            (f"product-experts-{name}-{sizes}x{shape}", partial(run_experts, name, sizes, shape)) for sizes in GROUPS
        ]
    return found


def run_cases(numbers: list[int]) -> None:
    """Run cases in this process (the one that a tool watches); raises what they raise."""
    every = cases_by_name()
    for number in numbers:
        name, run = every[number]
        run()
        print("ran", name, flush=True)


def plant(tool: str) -> None:
    """A fault for a tool to find: a row read beyond an allocation, or a matrix read that nobody has written."""
    import torch

    from microfloat.passes import OperandSpec
    from microfloat.passes.casts import cast_passes
    from microfloat.passes.matrix import At
    from microfloat.recipes import Cast
    from microfloat.torch.launch.program import Program, matrix_of, scratch

    x = torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
    matrix = matrix_of(x)
    if tool == "memcheck":
        x.zero_()
        matrix = replace(matrix, rows=65)
    program = Program(cast_passes(matrix, OperandSpec(Cast("mxfp8")), None), x.device)
    table = (None, x, scratch(0), *(None,) * (At.MADE - 3))
    program.run(torch.cuda.current_stream().cuda_stream, table)
    torch.cuda.synchronize()


def watched(tool: str, numbers: list[int] | str) -> tuple[bool, str]:
    """(whether nothing was found, what was said) of one process under a tool; `numbers`: of cases, or "planted"."""
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ["--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    if tool == "memcheck":
        options += ["--padding", "4096"]  # allocations lie side by side: beyond one of them is another
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        environment = {
            **os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        }  # fmt: skip
        command = [
            sanitizer, *options, "--log-file", str(log), sys.executable, __file__, tool, "--cases",
            numbers if isinstance(numbers, str) else ",".join(map(str, numbers)),
        ]  # fmt: skip
        process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        text = log.read_text() if log.exists() else ""
    clean = process.returncode == 0 and process.stdout.count("ran ") == len(numbers) and bool(SUMMARY.search(text))
    return clean, text if clean else "\n".join([text, process.stdout[-3000:], process.stderr[-3000:]])


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("tools", nargs="*", default=[], metavar="TOOL", help=f"of {', '.join(TOOLS)}; all of them")
    parser.add_argument("-k", default="", dest="pattern", help="part of a case's name")
    parser.add_argument("--jobs", type=int, default=4, help="processes at a time")
    parser.add_argument("--cases", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path[:0] = [str(ROOT / "src"), str(ROOT)]
    if arguments.cases == "planted":
        plant(arguments.tools[0])
        return 0
    if arguments.cases:
        run_cases([int(number) for number in arguments.cases.split(",")])
        return 0
    unknown = set(arguments.tools) - set(TOOLS)
    if unknown:
        parser.error(f"unknown tool {', '.join(sorted(unknown))}; known: {', '.join(TOOLS)}")
    numbers = [number for number, (name, _) in enumerate(cases_by_name()) if arguments.pattern in name]
    parts = [numbers[start :: arguments.jobs] for start in range(arguments.jobs) if numbers[start :: arguments.jobs]]
    failed = False
    for tool in arguments.tools or TOOLS:
        if tool in PLANTED:
            found = not re.search(r"SUMMARY: 0 errors", watched(tool, "planted")[1])
            failed |= not found
            print(f"{tool}: the planted fault is {'seen' if found else 'NOT SEEN'}", flush=True)
        with ThreadPoolExecutor(max_workers=arguments.jobs) as pool:
            for clean, text in pool.map(lambda part, tool=tool: watched(tool, part), parts):
                failed |= not clean
                print(f"{tool}: {'clean' if clean else 'FOUND'}: {' '.join(SUMMARY.findall(text))}", flush=True)
                if not clean:
                    print(text, flush=True)
        print(f"{tool}: {len(numbers)} cases in {len(parts)} processes", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
