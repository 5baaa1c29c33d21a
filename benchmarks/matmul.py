"""GEMMs of quantized operands against bfloat16: the rates that everything above is bounded by (m.*).

Operands are cast before the clock runs. Shapes M x K x N: y [M, N] = x [M, K] @ w [N, K].T. Buffers rotate.
"""

import argparse
import functools
from dataclasses import replace

from benchmarks._recipes import LARGEST_DIFFERENCE, sqnr_db
from benchmarks._report import Report, Row
from microfloat.recipes import Cast, Gemm
from microfloat.torch.timing import Maker, rotations

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


def measure(report: Report, name: str, maker: Maker, shape: tuple[int, int, int], decibel: float) -> Row:
    """One GEMM against bfloat16's."""
    m, k, n = shape
    sets = 2 if report.options.quick else rotations(m * k + n * k)
    times = maker.times(shape, sets)
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
        differing = report.attempt(name, maker.difference)
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
