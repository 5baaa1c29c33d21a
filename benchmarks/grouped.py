"""Experts over rows of one input, forward and backward, against torch's grouped matmul in bfloat16 (l.grouped.*).

Three mixtures: 8 experts of 7168 -> 2048 over 32768 rows (judged; equal groups, and ragged ones of which one is empty),
64 such experts over 65536 rows, 8 of 4096 -> 14336 over 32768.
Every recipe is first compared with the reference backend: y, dx and dw of a small layer.
"""

import argparse
import functools

import torch
import torch.nn.functional as F

import microfloat.torch as mf
from benchmarks._recipes import LARGEST_DIFFERENCE, RECIPES, difference, sqnr_db
from benchmarks._report import Report, Row
from benchmarks.linear import backend_of
from microfloat.recipes import Recipe
from microfloat.torch.timing import in_turn

Shape = tuple[int, int, int]
CHECKED, QUICK, EXPERTS = (1024, 512, 384), (96, 256, 128), 8
# Part of the row's name -> experts, rows, K, N.
MIXTURES = {"": (8, 32768, 7168, 2048), "64.": (64, 65536, 7168, 2048), "wide.": (8, 32768, 4096, 14336)}


def sizes_of(rows: int, ragged: bool, experts: int = EXPERTS) -> list[int]:
    """Group sizes that add up to `rows`; of ragged ones, of 8 experts, the third is empty."""
    if not ragged:
        return [rows // experts] * experts
    shares = [19, 12, 0, 30, 10, 24, 13]
    sizes = [rows * share // 128 for share in shares]
    return [*sizes, rows - sum(sizes)]


def layer_of(
    recipe: Recipe, shape: Shape, options: argparse.Namespace, backend: str, experts: int = EXPERTS
) -> mf.GroupedLinear:
    """The experts, in bfloat16."""
    place = {"device": options.device, "dtype": torch.bfloat16}
    return mf.GroupedLinear(experts, shape[1], shape[2], **place, recipe=recipe, backend=backend)


def data(shape: Shape, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, K], which wants a gradient, and dy [T, N]."""
    rows, k, n = shape
    x = torch.randn(rows, k, device=options.device).bfloat16().requires_grad_()
    return x, torch.randn(rows, n, device=options.device).bfloat16()


def check(recipe: Recipe, options: argparse.Namespace) -> dict[str, float]:
    """Relative differences of y, dx, dw between the backend that is timed and the reference."""
    shape = QUICK if options.quick else CHECKED
    values = []
    for backend in (backend_of(options), "reference"):
        torch.manual_seed(1)
        layer, (x, dy) = layer_of(recipe, shape, options, backend), data(shape, options)
        torch.manual_seed(2)  # of stochastic rounding
        y = layer(x, sizes_of(shape[0], ragged=True))
        y.backward(dy)
        values.append((y.detach(), x.grad, layer.weight.grad))
    return {name: difference(a, b) for name, a, b in zip(("y", "dx", "dw"), *values, strict=True)}


def plain_step(weight: torch.Tensor, x: torch.Tensor, dy: torch.Tensor, sizes: torch.Tensor) -> None:
    """torch's grouped matmul, forward and backward; on a CPU, which lacks it, a loop."""
    x.grad = weight.grad = None
    if x.is_cuda:
        y = F.grouped_mm(x, weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))
    else:
        y = mf.grouped_matmul(x, weight, sizes)
    y.backward(dy)


def step(layer: mf.GroupedLinear, x: torch.Tensor, dy: torch.Tensor, sizes: torch.Tensor) -> None:
    """Forward and backward from cleared gradients."""
    x.grad = layer.weight.grad = None
    layer(x, sizes).backward(dy)


def measure(report: Report, name: str, decibel: float, mixture: str) -> None:
    """A row for equal groups, and of the judged mixture one for ragged ones."""
    options, (experts, *sizes) = report.options, MIXTURES[mixture]
    shape: Shape = tuple(sizes)  # type: ignore[assignment]
    if options.quick:
        experts, shape = EXPERTS, QUICK
    x, dy = data(shape, options)
    layer = layer_of(RECIPES[name], shape, options, backend_of(options), experts)
    weight = layer.weight.detach().clone().requires_grad_()
    for ragged in (False,) if mixture else (False, True):
        sizes = torch.tensor(sizes_of(shape[0], ragged, experts), device=options.device)
        calls = {
            "bf16": lambda i, sizes=sizes: plain_step(weight, x, dy, sizes),
            "ours": lambda i, sizes=sizes: step(layer, x, dy, sizes),
        }  # fmt: skip
        times = in_turn(calls, options.device, 150, least=12)
        row = Row(
            f"l.grouped.{mixture}{name}", shape, name, backend=backend_of(options), sqnr_db=decibel, ratio_of="bf16"
        )
        row.variant = "ragged" if ragged else None
        row.timed(times["ours"], times["bf16"]).tflops = 6 * shape[0] * shape[1] * shape[2] / times["ours"].median / 1e9
        reason = layer.schedule(x).reason
        row.extra = {"experts": experts, "one_by_one": reason} if reason else {"experts": experts}
        report.add(row)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    for name, recipe in RECIPES.items():
        row_id, wanted = f"l.grouped.{name}", []
        for mixture in MIXTURES:
            if report.wants(f"l.grouped.{mixture}{name}"):
                wanted.append(mixture)
        if not wanted:
            continue
        differences = report.attempt(row_id, functools.partial(check, recipe, options), recipe=name)
        if differences is None:
            continue
        if max(differences.values()) > LARGEST_DIFFERENCE:
            report.skip(row_id, f"differs from the reference: {differences}", recipe=name)
            continue
        decibel = sqnr_db(max(differences.values()))
        for mixture in wanted:
            report.attempt(row_id, functools.partial(measure, report, name, decibel, mixture), recipe=name)
    return report.finish()
