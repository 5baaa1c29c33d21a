"""One Linear, forward and backward, eager, weights cast in every step, against nn.Linear in bfloat16 (l.*).

The judged shape is 16384 x 4096 -> 14336; `l.square` is 16384 x 8192 -> 8192; `l.small` 4096 x 2048 -> 2048, eager and
as a CUDA graph. Every recipe is first compared with the reference backend: y, dx and dw of a small layer.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch

import microfloat.torch as mf
from benchmarks._limits import bare_gemms, limit_of_run
from benchmarks._recipes import LARGEST_DIFFERENCE, RECIPES, difference, sqnr_db
from benchmarks._report import Report, Row
from microfloat.recipes import Recipe
from microfloat.torch.timing import Times, copy_gbs, in_turn, rotations

Shape = tuple[int, int, int]
JUDGED, SQUARE, SMALL = (16384, 4096, 14336), (16384, 8192, 8192), (4096, 2048, 2048)
QUICK = (48, 32, 64)
WITH_OUTLIERS = ("current", "mxfp8.folded")  # measured on data with outlier channels too
IN_A_BLOCK = 10  # steps between two events of l.small, so that a step is as long as in a loop


def backend_of(options: argparse.Namespace) -> str:
    """native where there is a GPU: by name, so that no small problem falls back to bfloat16."""
    return "native" if options.device == "cuda" else "reference"


def make_layer(recipe: Recipe | None, shape: Shape, options: argparse.Namespace, backend: str = "") -> torch.nn.Linear:
    """nn.Linear without a recipe, else microfloat's."""
    _, k, n = shape
    place = {"bias": False, "device": options.device, "dtype": torch.bfloat16}
    if recipe is None:
        return torch.nn.Linear(k, n, **place)
    return mf.Linear(k, n, **place, recipe=recipe, backend=backend or backend_of(options))


def data(shape: Shape, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K], which wants a gradient, and dy [M, N]."""
    m, k, n = shape
    x = torch.randn(m, k, device=options.device).bfloat16().requires_grad_()
    return x, torch.randn(m, n, device=options.device).bfloat16()


def with_outliers(x: torch.Tensor) -> torch.Tensor:
    """The same data with eight channels fifty times as large, as activations of a trained model have."""
    scale = torch.ones(x.shape[1], device=x.device, dtype=x.dtype)
    scale[:: max(1, x.shape[1] // 8)] = 50
    return (x.detach() * scale).requires_grad_()


def check(recipe: Recipe, options: argparse.Namespace) -> dict[str, float]:
    """Relative differences of y, dx, dw between the backend that is timed and the reference."""
    shape = QUICK if options.quick else (384, 512, 768)
    values = []
    for backend in (backend_of(options), "reference"):
        torch.manual_seed(1)
        layer = make_layer(recipe, shape, options, backend)
        x, dy = data(shape, options)
        torch.manual_seed(2)  # of stochastic rounding
        y = layer(x)
        y.backward(dy)
        values.append((y.detach(), x.grad, layer.weight.grad))
    return {name: difference(a, b) for name, a, b in zip(("y", "dx", "dw"), *values, strict=True)}


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> None:
    """Forward and backward from cleared gradients."""
    x.grad = None
    for parameter in layer.parameters():
        parameter.grad = None
    layer(x).backward(dy)


def large(report: Report, label: str, name: str, shape: Shape, decibel: float, copy: float) -> None:
    """A row of a large shape, where both sides are bound by the GPU; `label`: "judged", "square" or "outliers".

    The three GEMMs alone take turns with both, for the limit of this run.
    """
    options, recipe = report.options, RECIPES[name]
    x, dy = data(shape, options)
    x = with_outliers(x) if label == "outliers" else x
    plain, layer = make_layer(None, shape, options), make_layer(recipe, shape, options)
    calls = {
        "bf16": lambda i: step(plain, x, dy), "ours": lambda i: step(layer, x, dy),
        "gemms": bare_gemms(recipe, shape, options.device),
    }  # fmt: skip
    times = in_turn(calls, options.device, 150, least=12)
    row = Row(f"l.square.{name}" if label == "square" else f"l.{name}", shape, name, backend=backend_of(options))
    row.variant = label if label == "outliers" else None
    row.sqnr_db, row.ratio_of = decibel, "bf16"
    row.timed(times["ours"], times["bf16"]).tflops = 6 * shape[0] * shape[1] * shape[2] / times["ours"].median / 1e9
    gemms = times["gemms"].median
    allowed = limit_of_run(name, shape, times["bf16"].median, gemms, copy)
    row.extra = {"gemms_ms": round(gemms, 4), "limit_of_run": None if allowed is None else round(allowed, 3)}
    report.add(row)


def forward_only(report: Report, decibel: float) -> None:
    """l.fwd.fp8: no gradients, so only the row layouts are cast."""
    options, shape = report.options, QUICK if report.options.quick else JUDGED
    x, _ = data(shape, options)
    plain, layer = make_layer(None, shape, options), make_layer(RECIPES["current"], shape, options)
    with torch.no_grad():
        times = in_turn({"bf16": lambda i: plain(x), "ours": lambda i: layer(x)}, options.device, 150, least=12)
    row = Row("l.fwd.fp8", shape, "current", mode="eager", backend=backend_of(options), sqnr_db=decibel)
    report.add(row.timed(times["ours"], times["bf16"]))


def small(report: Report, decibel: float) -> None:
    """l.small: eager in blocks of steps, as a loop runs them, and captured into a CUDA graph."""
    options = report.options
    shape = QUICK if options.quick else SMALL
    m, k, n = shape
    sets = 2 if options.quick else rotations(4 * m * (k + n) + 4 * k * n)
    feeds = [data(shape, options) for _ in range(sets)]
    layers = {"bf16": make_layer(None, shape, options), "ours": make_layer(RECIPES["current"], shape, options)}

    def block(layer: torch.nn.Module, _: int) -> None:
        for i in range(IN_A_BLOCK):
            step(layer, *feeds[i % sets])

    times = in_turn({name: functools.partial(block, layer) for name, layer in layers.items()}, options.device)
    graphs = None
    if options.device == "cuda":
        graphs = {name: captured(layer, feeds) for name, layer in layers.items()}
    for mode, found, count in (("eager", times, IN_A_BLOCK), ("graph", graphs and in_turn(graphs, "cuda"), sets)):
        row = Row("l.small", shape, "current", mode=mode, backend=backend_of(options), label=f"l.small.{mode}")
        if found is None:
            row.skipped = "a CUDA graph needs a CUDA device"
        else:
            per_step: dict[str, Times] = {name: value.per(count) for name, value in found.items()}
            row.timed(per_step["ours"], per_step["bf16"]).sqnr_db = decibel
        report.add(row)


def captured(layer: torch.nn.Module, feeds: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[int], None]:
    """A step on each pair of `feeds` as one CUDA graph."""
    (weight,) = layer.parameters()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            for x, dy in feeds:
                torch.autograd.grad(layer(x), (x, weight), dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    kept = []
    with torch.cuda.graph(graph):
        for x, dy in feeds:
            kept.append(torch.autograd.grad(layer(x), (x, weight), dy))
    return lambda i: graph.replay()


def peers(report: Report) -> None:
    """nn.Linear converted by torchao, where it is installed: eager and compiled, against bfloat16 in the same mode."""
    from benchmarks import _torchao

    shape = QUICK if report.options.quick else JUDGED
    for recipe in ("tensorwise", "rowwise"):
        for mode in ("eager", "compiled"):
            if not report.wants(f"l.torchao.{recipe}"):
                continue
            fields = {"shape": shape, "mode": mode, "backend": "torchao", "recipe": recipe}
            report.attempt("l.torchao", functools.partial(_peer, report, _torchao, fields), **fields)


def _peer(report: Report, torchao: Any, fields: dict[str, Any]) -> None:
    options, shape = report.options, fields["shape"]
    why = torchao.missing_training(options.device)
    if why:
        report.skip("l.torchao", why, **fields)
        return
    x, dy = data(shape, options)
    plain = make_layer(None, shape, options)
    layer = torchao.float8_training(make_layer(None, shape, options), fields["recipe"])
    if fields["mode"] == "compiled":
        torch._dynamo.reset()
        plain, layer = torch.compile(plain), torch.compile(layer)
    times = in_turn({"bf16": lambda i: step(plain, x, dy), "ao": lambda i: step(layer, x, dy)}, options.device, 150, 12)
    report.add(Row("l.torchao", **fields, ratio_of="bf16").timed(times["ao"], times["bf16"]))


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    shapes = {"judged": JUDGED, "square": SQUARE, "outliers": JUDGED}
    shapes = {"judged": QUICK, "outliers": QUICK} if options.quick else shapes
    copy = copy_gbs(1 << 10 if options.quick else 1 << 30, options.device)
    for name, recipe in RECIPES.items():
        extra = {"current": ("l.small", "l.fwd.fp8")}.get(name, ())
        if not report.wants(f"l.{name}", f"l.square.{name}", *extra):
            continue
        differences = report.attempt(f"l.{name}", functools.partial(check, recipe, options), recipe=name)
        if differences is None:
            continue
        decibel = sqnr_db(max(differences.values()))
        if max(differences.values()) > LARGEST_DIFFERENCE:
            report.skip(f"l.{name}", f"differs from the reference: {differences}", recipe=name)
            continue
        for label, shape in shapes.items():
            if label == "outliers" and name not in WITH_OUTLIERS:
                continue
            if report.wants(f"l.square.{name}" if label == "square" else f"l.{name}"):
                run = functools.partial(large, report, label, name, shape, decibel, copy)
                report.attempt(f"l.{name}", run, recipe=name, shape=shape)
        for row_id, measure in (("l.fwd.fp8", forward_only), ("l.small", small)):
            if row_id in extra and report.wants(row_id):
                report.attempt(row_id, functools.partial(measure, report, decibel))
    peers(report)
    return report.finish()
