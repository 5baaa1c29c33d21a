"""Time of one Linear step by kernel, at 16384 x 4096 -> 14336; with --host, by Python function.

The kernels of one forward and backward, alone and cool, in the order in which they ran.
"""

import argparse
import cProfile
import pstats

import torch

from benchmarks._recipes import RECIPES
from benchmarks._report import Report, Row
from benchmarks.host import FWDBWD
from benchmarks.linear import JUDGED, QUICK, backend_of, data, make_layer, step


def kernels(report: Report, name: str) -> None:
    """The GPU kernels of one step."""
    layer = make_layer(RECIPES[name], JUDGED, report.options)
    x, dy = data(JUDGED, report.options)
    for _ in range(3):
        step(layer, x, dy)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        step(layer, x, dy)
        torch.cuda.synchronize()
    found = []
    for event in sorted(trace.events(), key=lambda event: event.time_range.start):
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.append({"us": round(event.time_range.elapsed_us(), 1), "kernel": event.name[:110]})
            print(f"{found[-1]['us']:9.1f} us  {found[-1]['kernel']}")
    row = Row("profile", JUDGED, name, value=sum(kernel["us"] for kernel in found), unit="us")
    row.extra = {"kernels": found}
    report.add(row)


def host(report: Report, name: str, count: int) -> None:
    """The Python functions of a small step, by their own time."""
    shape = QUICK if report.options.quick else FWDBWD
    layer = make_layer(RECIPES[name], shape, report.options)
    x, dy = data(shape, report.options)
    with torch.autograd.set_multithreading_enabled(False):
        for _ in range(min(count, 20)):
            step(layer, x, dy)
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            step(layer, x, dy)
        profiler.disable()
    print(f"==== {name}: host time of {count} steps {shape}, {backend_of(report.options)} backend")
    pstats.Stats(profiler).sort_stats("tottime").print_stats(22)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    for name in RECIPES:
        if not report.wants(name):
            continue
        if options.host:
            host(report, name, 2 if options.quick else 200)
        elif options.device != "cuda":
            report.skip("profile", "kernels are traced on a CUDA device", recipe=name)
        else:
            report.attempt("profile", lambda name=name: kernels(report, name), recipe=name)
    return report.finish()
