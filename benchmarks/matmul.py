"""GEMMs of quantized operands against bfloat16: the rates that everything above is bounded by (m.*).

Operands are cast before the clock runs. Shapes M x K x N: y [M, N] = x [M, K] @ w [N, K].T. Buffers rotate.
"""

import argparse
import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from benchmarks._recipes import LARGEST_DIFFERENCE, difference, sqnr_db
from benchmarks._report import Report, Row
from benchmarks._timing import in_turn, rotations
from microfloat.passes import OperandSpec
from microfloat.recipes import Cast, Gemm
from microfloat.routes import Route, route_of
from microfloat.torch import backends, gemms, reference

SHAPES = ((8192, 8192, 8192), (16384, 4096, 14336), (16384, 14336, 4096), (16384, 4096, 4096), (4096, 4096, 4096))
SMALL = (256, 512, 384)

GEMMS = {
    "m.tensor.fast": Gemm(Cast("fp8_tensor"), Cast("fp8_tensor"), accumulate="fast"),
    "m.tensor.split": Gemm(Cast("fp8_tensor"), Cast("fp8_tensor")),
    "m.tensor.e5m2": Gemm(Cast("fp8_tensor_e5m2"), Cast("fp8_tensor")),
    "m.row.fast": Gemm(Cast("fp8_row"), Cast("fp8_row"), accumulate="fast"),
    "m.row.split": Gemm(Cast("fp8_row"), Cast("fp8_row")),
    "m.1x128.128x128": Gemm(Cast("fp8_1x128"), Cast("fp8_128x128")),
    "m.1x128.1x128": Gemm(Cast("fp8_1x128"), Cast("fp8_1x128")),
    "m.mxfp8.folded": Gemm(Cast("mxfp8"), Cast("mxfp8"), path="folded"),
    "m.mxfp8.exact": Gemm(Cast("mxfp8"), Cast("mxfp8"), path="exact"),
    "m.mxfp4.folded": Gemm(Cast("mxfp4"), Cast("mxfp4"), path="folded"),
    "m.nvfp4": Gemm(Cast("nvfp4"), Cast("nvfp4_2d")),
}


@dataclass(frozen=True)
class Maker:
    """How operands of one GEMM are made on a device, and multiplied."""

    gemm: Gemm
    device: str

    @property
    def backend(self) -> str:
        return "native" if self.device == "cuda" else "reference"

    def operands(self, x: torch.Tensor, w: torch.Tensor) -> tuple:
        """x and w as this GEMM reads them."""
        if self.backend == "reference":
            return reference.quantize(x, self.gemm.lhs), reference.quantize(w, self.gemm.rhs)  # type: ignore[arg-type]
        from microfloat.torch import program

        stream, words = torch.cuda.current_stream().cuda_stream, program.scratch(torch.cuda.current_device())
        made, turned = [], (False, self.route.turned)
        for matrix, cast, form, turn in zip((x, w), self.gemm.casts, self.route.forms, turned, strict=True):
            cast_once = program.cast_program(matrix, OperandSpec(cast, form, turn), None)  # type: ignore[arg-type]
            parts = cast_once.run(stream, (None, matrix, words, *[None] * 10))[:3]
            made.append(_Made(tuple(parts), matrix.shape[0], matrix.shape[1]))
        return tuple(made)

    @functools.cached_property
    def route(self) -> Route:
        """How the GEMM runs on the current GPU."""
        return route_of(self.gemm, backends.chip_of(torch.device("cuda", torch.cuda.current_device())))

    def multiply(self, a: Any, b: Any) -> torch.Tensor:
        if self.backend == "reference":
            return reference.scaled_matmul(a, b, out_dtype=torch.bfloat16, accumulate=self.gemm.accumulate)
        return _product(self.gemm, self.route, (a.rows, a.length, b.rows))(*a.parts, *b.parts, None)


class _Made(NamedTuple):
    """The parts of an operand of `rows` x `length`."""

    parts: tuple
    rows: int
    length: int


@functools.lru_cache(64)
def _product(gemm: Gemm, route: Route, shape: tuple[int, int, int]) -> Any:
    return gemms.product(gemm, route, shape, None, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))


def matrices(shape: tuple[int, int, int], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal x [M, K], and w [N, K] scaled by 1 / sqrt(K)."""
    m, k, n = shape
    x = torch.randn(m, k, device=device).bfloat16()
    return x, (torch.randn(n, k, device=device) / k**0.5).bfloat16()


def check(maker: Maker) -> float:
    """Relative difference to the exact product of the reference's operands."""
    x, w = matrices(SMALL, maker.device)
    a, b = reference.quantize(x, maker.gemm.lhs), reference.quantize(w, maker.gemm.rhs)  # type: ignore[arg-type]
    want = reference.scaled_matmul(a, b, out_dtype=torch.float32, accumulate="exact")
    return difference(maker.multiply(*maker.operands(x, w)), want)


def measure(report: Report, name: str, maker: Maker, shape: tuple[int, int, int], decibel: float) -> Row:
    """One GEMM against bfloat16's."""
    m, k, n = shape
    sets = 2 if report.options.quick else rotations(m * k + n * k)
    plain = [matrices(shape, maker.device) for _ in range(sets)]
    made = [maker.operands(x, w) for x, w in plain]
    calls = {
        "bf16": lambda i: torch.mm(plain[i % sets][0], plain[i % sets][1].t()),
        "ours": lambda i: maker.multiply(*made[i % sets]),
    }
    times = in_turn(calls, maker.device)
    row = Row(name, shape, backend=maker.backend, ratio_of="bf16", sqnr_db=decibel).timed(times["ours"], times["bf16"])
    flop = 2 * m * k * n
    row.tflops = flop / times["ours"].median / 1e9
    row.extra = {"bf16_tflops": round(flop / times["bf16"].median / 1e9, 1)}
    return report.add(row)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    shapes = ((64, 128, 96),) if options.quick else SHAPES
    for name, gemm in GEMMS.items():
        if not report.wants(name):
            continue
        if options.device == "cpu" and gemm.path != "auto":
            gemm = replace(gemm, path="auto")
        maker = Maker(gemm, options.device)
        differing = report.attempt(name, functools.partial(check, maker))
        if differing is None:
            continue
        if differing > LARGEST_DIFFERENCE:
            report.skip(name, f"differs from the reference by {differing:.1e}, at most {LARGEST_DIFFERENCE} expected")
            continue
        for shape in shapes:
            run = functools.partial(measure, report, name, maker, shape, sqnr_db(differing))
            report.attempt(name, run, shape=shape)
        report.summarize(name)
    return report.finish()
