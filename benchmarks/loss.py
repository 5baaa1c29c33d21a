"""The head of a language model and its loss, forward and backward, against torch's linear and cross_entropy (loss.*).

8192 tokens of 4096 by a head of 128256 in bfloat16. Memory is the peak above what stands before a step: gradients of
x and of the weight count, x and the weight do not. Loss and gradients of a small head are first compared with the
reference backend.
"""

import argparse
import functools

import torch
import torch.nn.functional as F

import microfloat.torch as mf
from benchmarks._recipes import RECIPES, difference, sqnr_db
from benchmarks._report import Report, Row
from benchmarks.linear import backend_of
from microfloat.recipes import Recipe
from microfloat.torch.timing import in_turn

SHAPE, CHECKED, QUICK = (8192, 4096, 128256), (512, 256, 1536), (96, 64, 160)
NAMES = ("bf16", "current", "row", "block", "mxfp8.folded")
# Of dx and dw: a logit that is rounded to the other neighbour changes codes of dy, which have two bits of mantissa.
LARGEST_DIFFERENCE = 0.03
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def data(shape: tuple[int, int, int], device: str) -> Tensors:
    """x [T, K] and weight [N, K], which want gradients, and labels [T], of which some do not count."""
    tokens, k, n = shape
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, k, device=device).bfloat16(), torch.randn(n, k, device=device).bfloat16()
    labels = torch.randint(0, n, (tokens,), device=device)
    labels[::17] = -100
    return x.requires_grad_(), weight.mul_(k**-0.5).requires_grad_(), labels


def ours(recipe: Recipe | None, x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward and backward of `linear_cross_entropy`."""
    x.grad = weight.grad = None
    with mf.autocast(enabled=recipe is not None, recipe=recipe):
        loss = mf.linear_cross_entropy(x, weight, labels)
    loss.backward()
    return loss.detach()


def plain(x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward and backward by torch, with the softmax in float32, as models of transformers have it."""
    x.grad = weight.grad = None
    loss = F.cross_entropy(F.linear(x, weight).float(), labels)
    loss.backward()
    return loss.detach()


def check(recipe: Recipe | None, options: argparse.Namespace) -> float:
    """The largest relative difference of loss, dx and dw between two chunks here and the reference backend."""
    tensors, values = data(QUICK if options.quick else CHECKED, options.device), []
    for backend in (backend_of(options), "reference"):
        tensors[0].grad = tensors[1].grad = None
        with mf.autocast(enabled=recipe is not None, recipe=recipe, backend=backend):
            loss = mf.linear_cross_entropy(*tensors, chunk=tensors[0].shape[0] // 2)
        loss.backward()
        values.append((loss.detach(), tensors[0].grad, tensors[1].grad))
    return max(difference(one, other) for one, other in zip(*values, strict=True))


def peak_gib(step: functools.partial, tensors: Tensors) -> float:
    """The peak memory of a step above the memory of its tensors."""
    if not tensors[0].is_cuda:
        return 0.0
    step()
    tensors[0].grad = tensors[1].grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report = Report(options, arguments)
    shape = QUICK if options.quick else SHAPE
    tensors = data(shape, options.device)
    base = functools.partial(plain, *tensors)
    of_torch = peak_gib(base, tensors)
    for name in NAMES:
        row_id, recipe = f"loss.{name}", None if name == "bf16" else RECIPES[name]
        if not report.wants(row_id):
            continue
        largest = report.attempt(row_id, functools.partial(check, recipe, options))
        if largest is None or largest > LARGEST_DIFFERENCE:
            report.skip(row_id, f"differs from the reference by {largest}", shape=shape)
            continue
        step = functools.partial(ours, recipe, *tensors)
        row = Row(row_id, shape, name, sqnr_db=sqnr_db(largest), ratio_of="torch")
        row.extra = {"peak_gib": peak_gib(step, tensors), "peak_gib_of_torch": of_torch}
        times = in_turn({"torch": lambda _: base(), "ours": lambda _, step=step: step()}, options.device, 600.0)
        report.add(row.timed(times["ours"], times["torch"]))
    return report.finish()
