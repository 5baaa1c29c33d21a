"""Host time, GPU launches and recompilations of small layers (h.*, g.*)."""

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Mapping

import torch

import microfloat.torch as mf
from benchmarks._recipes import RECIPES
from benchmarks._report import Report, Row
from benchmarks.linear import backend_of, make_layer, step
from microfloat.recipes import Recipe

FWDBWD, FORWARD = (64, 1024, 1024), (16, 256, 256)
# Rows of every batch size hold two blocks of 128 or more, so that no size of 1 is what gets compiled.
COMPILED = (256, 1024, 1024)
QUICK = (16, 32, 32)


def host_us(calls: Mapping[str, Callable[[], object]], device: str, count: int = 2000) -> dict[str, float]:
    """Microseconds of host time of a call: medians of 5 blocks of `count` calls that are queued without waiting.

    The calls take turns block by block. Where the GPU falls behind, the host waits for room in the queue: keep what a
    call launches shorter than its host time.
    """
    blocks: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(6):
        for name, call in calls.items():
            if device != "cpu":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            if turn:  # the first is the warm-up
                blocks[name].append((time.perf_counter() - begin) / count * 1e6)
    return {name: statistics.median(values) for name, values in blocks.items()}


def inputs(shape: tuple[int, int, int], options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy of a small layer."""
    m, k, n = shape
    x = torch.randn(m, k, device=options.device).bfloat16().requires_grad_()
    return x, torch.randn(m, n, device=options.device).bfloat16()


def forward_backward(report: Report, row_id: str, name: str, count: int) -> None:
    """A recipe in turn with nn.Linear; then again with backward on the calling thread for both.

    h.fwdbwd: the recipe pinned to the layer. h.region: as users write it, ``with mf.autocast(recipe=recipe):`` around
    the forward of every step.
    """
    options, shape = report.options, QUICK if report.options.quick else FWDBWD
    x, dy = inputs(shape, options)
    layer = make_layer(RECIPES[name], shape, options)
    calls = {"nn.Linear": functools.partial(step, make_layer(None, shape, options), x, dy)}
    calls[name] = functools.partial(step, layer, x, dy)
    if row_id == "h.region":
        calls[name] = functools.partial(region_step, layer.unpin(), RECIPES[name], x, dy)  # type: ignore[operator]
    add_rows(report, row_id, shape, host_us(calls, options.device, count))
    with torch.autograd.set_multithreading_enabled(False):
        add_rows(report, row_id, shape, host_us(calls, options.device, count), "one thread")


def region_step(layer: torch.nn.Module, recipe: Recipe, x: torch.Tensor, dy: torch.Tensor) -> None:
    """`step` with an autocast around its forward."""
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    with mf.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)


def add_rows(
    report: Report, row_id: str, shape: tuple[int, ...], found: dict[str, float], variant: str | None = None
) -> None:
    """A row per recipe, as a multiple of nn.Linear's time."""
    for name, microseconds in found.items():
        if name == "nn.Linear":
            continue
        row = Row(row_id, shape, name, variant, backend=backend_of(report.options), value=microseconds, unit="us")
        row.ratio, row.ratio_of = microseconds / found["nn.Linear"], "nn.Linear"
        row.extra = {"nn_linear_us": round(found["nn.Linear"], 1)}
        report.add(row)


def forward(report: Report, count: int) -> None:
    """h.fwd: forward with gradients enabled, the weight's codes kept from the first microbatch, in one autocast."""
    options, shape = report.options, QUICK if report.options.quick else FORWARD
    x, _ = inputs(shape, options)
    x.requires_grad_(False)
    plain = make_layer(None, shape, options)
    calls: dict[str, Callable[[], object]] = {"nn.Linear": lambda: plain(x)}
    with mf.autocast():
        for name in ("delayed", "current"):
            layer = make_layer(RECIPES[name], shape, options)
            layer(x, is_first_microbatch=True)
            calls[name] = functools.partial(layer, x, is_first_microbatch=False)
        found = host_us(calls, options.device, count)
    add_rows(report, "h.fwd", shape, found)


def launches(report: Report, name: str) -> None:
    """h.launches: what one forward and one backward start on the GPU, inside an autocast."""
    options = report.options
    if options.device != "cuda":
        report.skip("h.launches", "launches are counted on a CUDA device", recipe=name)
        return
    x, dy = inputs(FWDBWD, options)
    layer = make_layer(RECIPES[name], FWDBWD, options)
    parts = {}
    with mf.autocast():
        for _ in range(3):
            step(layer, x, dy)
        x.grad = layer.weight.grad = None
        kept: list[torch.Tensor] = []
        parts["forward"] = launched(lambda: kept.append(layer(x)))
        parts["backward"] = launched(lambda: kept[0].backward(dy))
        layer(x, is_first_microbatch=True)
        parts["cached"] = launched(lambda: layer(x, is_first_microbatch=False))
    for variant, kernels in parts.items():
        row = Row("h.launches", FWDBWD, name, variant, label=f"h.launches.{name}.{variant}")
        row.value, row.unit, row.extra = len(kernels), "launches", {"kernels": kernels}
        report.add(row)


def launched(call: Callable[[], object]) -> list[str]:
    """The names of the kernels, copies and fills that a call starts."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    return [event.name[:80] for event in sorted(events, key=lambda event: event.time_range.start)]


def autocast(report: Report, count: int) -> None:
    """h.autocast: entering and leaving."""

    def enter_and_leave() -> None:
        with mf.autocast():
            pass

    found = host_us({"autocast": enter_and_leave}, report.options.device, count)
    report.add(Row("h.autocast", backend="any", value=found["autocast"], unit="us"))


def recompilations(report: Report) -> None:
    """g.compile: graphs compiled after step 2 of 20, three batch sizes, dynamic=True."""
    from torch._dynamo.testing import CompileCounterWithBackend

    options, shape = report.options, (256, 32, 48) if report.options.quick else COMPILED
    for name in ("current", "delayed", "mxfp8.folded", "nvfp4"):
        if not report.wants(f"g.compile.{name}", "g.compile"):
            continue
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("inductor" if options.device == "cuda" else "aot_eager")
        layers = make_model(shape, options)
        mf.convert(layers, RECIPES[name])
        model = torch.compile(layers, fullgraph=True, dynamic=True, backend=counter)
        after_two = 0
        for number in range(20):
            rows = shape[0] * (1, 2, 3)[number % 3]
            x = torch.randn(rows, shape[1], device=options.device).bfloat16()
            with mf.autocast():
                model(x).sum().backward()
            after_two = counter.frame_count if number == 1 else after_two
        row = Row("g.compile", shape, name, mode="compiled", backend=backend_of(options))
        row.value, row.unit = counter.frame_count - after_two, "recompilations"
        row.extra = {"compiled_until_step_2": after_two}
        report.add(row)


def make_model(shape: tuple[int, int, int], options: argparse.Namespace) -> torch.nn.Module:
    """Two Linears, to be converted."""
    _, k, n = shape
    place = {"bias": False, "device": options.device, "dtype": torch.bfloat16}
    return torch.nn.Sequential(torch.nn.Linear(k, n, **place), torch.nn.ReLU(), torch.nn.Linear(n, k, **place))


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    count = 3 if options.quick else 2000
    for name in RECIPES:
        for row_id in ("h.fwdbwd", "h.region"):
            if report.wants(f"{row_id}.{name}", row_id):
                measure = functools.partial(forward_backward, report, row_id, name, min(count, 200))
                report.attempt(row_id, measure, recipe=name)
    if report.wants("h.fwd"):
        report.attempt("h.fwd", lambda: forward(report, count))
    for name in ("delayed", "current"):
        if report.wants(f"h.launches.{name}", "h.launches"):
            report.attempt("h.launches", functools.partial(launches, report, name), recipe=name)
    if report.wants("h.autocast"):
        report.attempt("h.autocast", lambda: autocast(report, count))
    report.attempt("g.compile", lambda: recompilations(report))
    return report.finish()
