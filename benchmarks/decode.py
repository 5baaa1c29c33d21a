"""Rows of bfloat16 times a weight stored as codes, against F.linear in bfloat16, inside CUDA graphs (d.*).

Calls of a graph take turns over as many weights as the L2 cache cannot hold, as the layers of a model do. Each shape is
first compared with the product of the dequantized weight in float64. Experts (d.experts*) are multiplied by groups of
rows that a router of even hands has chosen, other ones in each call, against torch's grouped matmul in bfloat16. A
prompt of many rows (d.prompt*) is quantized too: its product is compared with that of the quantized values. Many rows
by a weight that is dequantized once (d.kept*) are multiplied by layers that have made it before, beside layers that
read codes. Batches of served tokens (d.served.*) are multiplied by layers as `quantize_` makes them without further
options: weight-only ones, which may keep a copy for many rows, and FP8 activations by weights of four bits
(d.served.a8.*).
"""

import argparse
import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import microfloat.torch as mf
from benchmarks._recipes import difference, sqnr_db
from benchmarks._report import Report, Row
from microfloat.recipes import Cast, WeightActivation, WeightOnly
from microfloat.torch.timing import in_turn

# N, K: two square and the up and down projections of models of 8 and 70 billion parameters.
SHAPES, QUICK = ((8192, 8192), (28672, 8192), (4096, 14336)), ((64, 256),)
TOKENS, TOKENS_OF_EXPERTS = (1, 4, 16, 32, 64, 128, 256), (1, 4, 16, 32, 64)
WEIGHTS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "row": "fp8_row", "block": "fp8_128x128"}
PREFILL = 4096
KEPT, ROWS_OF_KEPT = ("nvfp4", "row"), (65, 128, 256, PREFILL)
# A prompt on FP8 tensor cores: the config, what rows are quantized to, and the weight too where it is quantized again.
PROMPTS = {
    "row": (WeightActivation("fp8_row"), "fp8_row", None), "mxfp8": (WeightActivation("mxfp8"), "mxfp8", None),
    "nvfp4": (WeightOnly("nvfp4", prefill="folded"), "fp8_1x128", "fp8_128x128"),
}  # fmt: skip
ROWS_SERVED = (1, 16, 32, 64, 128, 256, 1024, PREFILL)
SERVED = {
    **{name: WeightOnly(name) for name in ("nvfp4", "mxfp4", "fp8_tensor", "fp8_128x128")},
    **{f"a8.{name}": WeightActivation(name, activation="fp8_row") for name in ("nvfp4", "mxfp4")},
}
CALLS, _CACHE_BYTES = 16, 240e6  # products in a graph
# One rounding of y to bfloat16, and a float32 sum of K terms: 2^-9 of the largest magnitude, far above the mean.
_LARGEST_DIFFERENCE = 2.0**-8
_LARGEST_RELATIVE = 6e-3  # of the norm, for FP8 on a Hopper with fast sums: docs/numerics.md 8.3


class Experts(NamedTuple):
    """Experts N x K of a mixture, and how many of them a token goes to."""

    number: int
    n: int
    k: int
    chosen: int


EXPERTS = {"experts8": Experts(8, 14336, 4096, 2), "experts64": Experts(64, 2048, 7168, 8)}


def layers_of(
    config: WeightActivation | WeightOnly | None, shape: tuple[int, int], options: argparse.Namespace
) -> list[nn.Linear]:
    """As many layers with weights of their own as the cache cannot hold; `config` None: in bfloat16."""
    n, k = shape
    one = nn.Linear(k, n, bias=False, device=options.device, dtype=torch.bfloat16).requires_grad_(False)
    size = 2.0 * n * k
    if config is not None:
        model = nn.Sequential(one)
        mf.quantize_(model, config)
        one, size = model[0], float(sum(part.numel() * part.element_size() for part in _parts(model[0].weight)))
    count = 2 if options.quick else max(2, int(_CACHE_BYTES / size) + 1)
    return [one, *(copy.deepcopy(one) for _ in range(count - 1))]


def _parts(q: Any) -> list[torch.Tensor]:
    return [part for part in (q.codes, q.scale, q.tensor_scale) if part is not None]


def graph_of(layers: list[nn.Linear], x: torch.Tensor) -> Callable[[int], object]:
    """Replays calls of all layers in turn; on a CPU, calls one of them."""
    return replaying([functools.partial(layer, x) for layer in layers], x.is_cuda)


def replaying(calls: Sequence[Callable[[], object]], on_gpu: bool) -> Callable[[int], object]:
    """Replays `CALLS` of the calls in turn; on a CPU, makes one."""
    if not on_gpu:
        return lambda i: calls[i % len(calls)]()
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(CALLS):
            calls[i % len(calls)]()
    return lambda i: graph.replay()


def measure(report: Report, name: str, shape: tuple[int, int], is_kept: bool = False) -> None:
    """A row for each number of tokens, and one for a prompt; `is_kept`: of weights that are dequantized once."""
    options, (n, k) = report.options, shape
    config = WeightOnly(WEIGHTS[name], prefill="dequantized" if is_kept else None)
    plain, stored = layers_of(None, shape, options), layers_of(config, shape, options)
    exact = stored[0].weight.detach().dequantize(torch.float64)
    calls = 1 if options.device == "cpu" else CALLS
    tokens = ROWS_OF_KEPT if is_kept else (*TOKENS, PREFILL)
    for m in tokens if not options.quick else (80 if is_kept else 3,):
        row_id = f"d.{name}.prefill" if m == PREFILL else f"d.{name}.m{m}"
        row_id = f"d.kept.{name}.m{m}" if is_kept else row_id
        if not report.wants(row_id):
            continue
        x = torch.randn(m, k, device=options.device).bfloat16()
        worst = difference(stored[0](x), x.double() @ exact.T)
        if worst > _LARGEST_DIFFERENCE:
            report.skip(row_id, f"differs from the dequantized product: {worst:.1e}")
            continue
        contenders = {"bf16": graph_of(plain, x), "ours": graph_of(stored, x)}
        if is_kept:
            contenders["codes"] = graph_of(layers_of(WeightOnly(WEIGHTS[name]), shape, options), x)
        times = in_turn(contenders, options.device, 40, least=8)
        row = Row(row_id, (m, k, n), WEIGHTS[name], mode="graph", sqnr_db=sqnr_db(worst), ratio_of="bf16")
        row.timed(times["ours"].per(calls), times["bf16"].per(calls))
        row.extra = {"ratio_by_codes": times["bf16"].median / times["codes"].median} if is_kept else {}
        read = [stored[0].weight] if is_kept else _parts(stored[0].weight)  # whose dtype is that of the kept one
        row.gbs = sum(part.numel() * part.element_size() for part in read) / row.median_ms / 1e6
        report.add(row)


def measure_prompt(report: Report, name: str, shape: tuple[int, int]) -> None:
    """A row for a prompt whose rows are quantized as they come."""
    options, (n, k), (config, of_rows, of_weight) = report.options, shape, PROMPTS[name]
    plain, stored = layers_of(None, shape, options), layers_of(config, shape, options)
    calls = 1 if options.device == "cpu" else CALLS
    m, weight = PREFILL if not options.quick else 128, stored[0].weight.detach()
    x = torch.randn(m, k, device=options.device).bfloat16()
    if of_weight is not None:
        weight = mf.quantize(weight.dequantize(), of_weight)
    exact = mf.quantize(x, of_rows).dequantize(torch.float64) @ weight.dequantize(torch.float64).T
    worst = float((stored[0](x).double() - exact).norm() / exact.norm())
    if worst > _LARGEST_RELATIVE:
        report.skip(f"d.prompt.{name}", f"differs from the product of the quantized values: {worst:.1e}")
        return
    del exact
    times = in_turn({"bf16": graph_of(plain, x), "ours": graph_of(stored, x)}, options.device, 40, least=8)
    row = Row(f"d.prompt.{name}", (m, k, n), of_rows, mode="graph", sqnr_db=sqnr_db(worst), ratio_of="bf16")
    row.timed(times["ours"].per(calls), times["bf16"].per(calls))
    row.extra = {"weight": WEIGHTS.get(name, name), "read_as": of_weight or of_rows}
    report.add(row)


def measure_served(report: Report, shape: tuple[int, int]) -> None:
    """A row for each config and number of tokens, all contenders of a number in turn."""
    options, (n, k) = report.options, shape
    plain = layers_of(None, shape, options)
    stored = {name: layers_of(config, shape, options) for name, config in SERVED.items()}
    calls = 1 if options.device == "cpu" else CALLS
    for m in ROWS_SERVED if not options.quick else (3, 80):
        x = torch.randn(m, k, device=options.device).bfloat16()
        contenders, worst = {"bf16": graph_of(plain, x)}, {}
        for name, layers in stored.items():
            weight, a = layers[0].weight.detach(), x.double()
            if name.startswith("a8"):
                a = mf.quantize(x, "fp8_row").dequantize(torch.float64)
                if m > 16:
                    weight = folded_to_rows(layers[0], x)
            exact = a @ weight.dequantize(torch.float64).T
            worst[name] = float((layers[0](x).double() - exact).norm() / exact.norm())
            if worst[name] > _LARGEST_RELATIVE:
                report.skip(f"d.served.{name}.m{m}", f"differs from the exact product: {worst[name]:.1e}")
            else:
                contenders[name] = graph_of(layers, x)
            del exact
        times = in_turn(contenders, options.device, 40, least=8)
        for name in contenders:
            row = Row(f"d.served.{name}.m{m}", (m, k, n), name, mode="graph", ratio_of="bf16")
            if name != "bf16" and report.wants(row.id):
                row.sqnr_db = sqnr_db(worst[name])
                row.timed(times[name].per(calls), times["bf16"].per(calls))
                row.extra = {"layer": repr(stored[name][0])}
                report.add(row)


def folded_to_rows(layer: nn.Linear, x: torch.Tensor) -> mf.QuantizedTensor:
    """The weight of a layer as the FP8 that its calls of many rows multiply by, folded by plain operations."""
    from microfloat.layout import layout_of
    from microfloat.torch import reference

    weight: Any = layer.weight.detach()
    made = reference.fold_codes(weight.to_operand(), "rows", layout_of(weight.cast, *weight.shape, "rows").scale)
    cast, shape = Cast("fp8_row"), weight.shape
    return mf.QuantizedTensor(made.codes, made.scale, None, cast, axis=1, shape=shape, dtype=x.dtype)


def grouped_in_bfloat16(x: torch.Tensor, weight: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """torch's grouped matmul; on a CPU, which lacks it, a loop."""
    if not x.is_cuda:
        return mf.grouped_matmul(x, weight, sizes)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=sizes.cumsum(0, dtype=torch.int32))


def measure_experts(report: Report, name: str, kind: str) -> None:
    """A row for each number of tokens, each of which goes to several experts."""
    options, experts = report.options, Experts(4, 64, 256, 2) if report.options.quick else EXPERTS[kind]
    number, n, k, chosen = experts
    layer = mf.GroupedLinear(number, k, n, device=options.device, dtype=torch.bfloat16).requires_grad_(False)
    weight, model = layer.weight.detach().clone(), nn.Sequential(layer)
    mf.quantize_(model, WeightOnly(WEIGHTS[name]))
    stored: Any = layer.weight
    calls = 1 if options.device == "cpu" else CALLS
    for m in TOKENS_OF_EXPERTS if not options.quick else (3,):
        x = torch.randn(m * chosen, k, device=options.device).bfloat16()
        routed = [torch.rand(m, number, device=options.device).topk(chosen).indices.flatten() for _ in range(CALLS)]
        sizes = [torch.bincount(one, minlength=number).int() for one in routed]
        y, ends = layer(x, sizes[0]), [0, *sizes[0].cumsum(0).tolist()]
        exact = torch.cat([
            x[begin:end].double() @ stored[e].dequantize(torch.float64).T
            for e, (begin, end) in enumerate(itertools.pairwise(ends))
        ])  # fmt: skip
        worst, row_id = difference(y, exact), f"d.{kind}.{name}.m{m}"
        if worst > _LARGEST_DIFFERENCE:
            report.skip(row_id, f"differs from the dequantized product: {worst:.1e}")
            continue
        times = in_turn(
            {
                "bf16": replaying([functools.partial(grouped_in_bfloat16, x, weight, one) for one in sizes], x.is_cuda),
                "ours": replaying([functools.partial(layer, x, one) for one in sizes], x.is_cuda),
            },
            options.device, 40, least=8,
        )  # fmt: skip
        row = Row(row_id, (m * chosen, k, n), WEIGHTS[name], mode="graph", sqnr_db=sqnr_db(worst), ratio_of="bf16")
        row.timed(times["ours"].per(calls), times["bf16"].per(calls))
        row.extra = {"experts": number, "experts_of_a_token": chosen, "one_by_one": layer.schedule(x).reason}
        report.add(row)


@torch.no_grad()
def main(options: argparse.Namespace, arguments: list[str]) -> int:
    if options.cuts or options.compile:
        from benchmarks import decode_cuts

        return decode_cuts.main(options, arguments)
    report = Report(options, arguments)
    torch.manual_seed(0)
    for name in WEIGHTS:
        if report.wants_some(f"d.{name}"):
            for shape in QUICK if options.quick else SHAPES:
                report.attempt(f"d.{name}", functools.partial(measure, report, name, shape))
        for kind in EXPERTS:
            if report.wants(f"d.{kind}.{name}"):
                report.attempt(f"d.{kind}.{name}", functools.partial(measure_experts, report, name, kind))
    for name in KEPT:
        if report.wants_some(f"d.kept.{name}"):
            for shape in QUICK if options.quick else SHAPES:
                report.attempt(f"d.kept.{name}", functools.partial(measure, report, name, shape, is_kept=True))
    if report.wants_some("d.served"):
        for shape in QUICK if options.quick else SHAPES:
            report.attempt("d.served", functools.partial(measure_served, report, shape))
    for name in PROMPTS:
        if report.wants(f"d.prompt.{name}"):
            for shape in QUICK if options.quick else SHAPES:
                report.attempt(f"d.prompt.{name}", functools.partial(measure_prompt, report, name, shape))
    return report.finish()
