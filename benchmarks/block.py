"""A block of an 8B decoder without the attention arithmetic, forward + backward, against bfloat16 (b.*).

x: 16384 tokens x 4096. x1 = x + out(qkv(norm1(x))[:, :4096]); h = norm2(x1); y = x1 + down(silu(gate(h)) * up(h)), with
Linears 4096 -> 6144, 4096 -> 4096, 4096 -> 14336 twice and 14336 -> 4096, RMSNorm, no bias. A step clears all gradients
and runs forward and backward: 21.44 TFLOP. `microfloat.torch.convert` swaps the five Linears and changes nothing else;
the variant "fused" calls the functions of `microfloat.torch.fused`, on the same parameters. Peak memory is that of a
step alone, everything resident included, after three warm-up steps.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import microfloat.torch as mf
from benchmarks import _torchao
from benchmarks._recipes import RECIPES, difference, sqnr_db
from benchmarks._report import Report, Row
from benchmarks.linear import backend_of
from microfloat.torch.nn import functional as fused
from microfloat.torch.timing import in_turn

TOKENS, SIZES = 16384, {"width": 4096, "qkv": 6144, "hidden": 14336}
QUICK_TOKENS, QUICK_SIZES = 64, {"width": 64, "qkv": 96, "hidden": 128}
CHECKED_TOKENS = 512
# Recipe -> id in eager and in compiled mode.
IDS = {
    "delayed": ("b.eager", "b.delayed"), "current": ("b.eager", "b.compile"), "row": ("b.eager.row", "b.row"),
    "block": ("b.eager.block", "b.block"), "mxfp8.folded": ("b.eager.mxfp8.folded", "b.mxfp8.folded"),
    "mxfp8.exact": ("b.eager.mxfp8.exact", "b.mxfp8.exact"), "nvfp4": ("b.nvfp4", "b.nvfp4.compiled"),
    "nvfp4.folded": ("b.nvfp4.folded", "b.nvfp4.folded.compiled"),
}  # fmt: skip


class Block(nn.Module):
    """The block; weights of torch's default initialisation."""

    def __init__(self, width: int, qkv: int, hidden: int) -> None:
        super().__init__()
        self.width = width
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, qkv, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x1 = x + self.out(self.qkv(self.norm1(x))[:, : self.width])
        h = self.norm2(x1)
        return x1 + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class FusedBlock(Block):
    """The block on the functions of `microfloat.torch.fused`: norms and SwiGLU are cast as they are computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = fused.norm_linear(x, self.norm1, self.qkv)  # type: ignore[arg-type]
        x1 = x + self.out(qkv[:, : self.width])
        return x1 + fused.norm_mlp(x1, self.norm2, self.gate, self.down, up=self.up)  # type: ignore[arg-type]


class Bench:
    """Inputs and parameters of all variants, and how one is built."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.sizes = QUICK_SIZES if options.quick else SIZES
        tokens = QUICK_TOKENS if options.quick else TOKENS
        torch.manual_seed(0)
        self.parameters = Block(**self.sizes).bfloat16().state_dict()
        place = {"device": options.device, "dtype": torch.bfloat16}
        self.x = torch.randn(tokens, self.sizes["width"], **place, requires_grad=True)
        self.g = torch.randn(tokens, self.sizes["width"], **place)

    @property
    def flop(self) -> int:
        """Of a step."""
        width, qkv, hidden = self.sizes.values()
        return 6 * (width * qkv + width * width + 3 * width * hidden) * self.x.shape[0]

    def build(self, recipe: str | None, variant: str = "plain", backend: str = "") -> nn.Module:
        """A block with the common parameters; `recipe` None: bfloat16; "torchao.NAME": torchao's."""
        block: nn.Module = (FusedBlock if variant == "fused" else Block)(**self.sizes)
        block = block.to(self.options.device, torch.bfloat16)
        block.load_state_dict(self.parameters)
        if recipe is not None and recipe.startswith("torchao."):
            return _torchao.float8_training(block, recipe.removeprefix("torchao."))
        if recipe is not None:
            mf.convert(block, RECIPES[recipe])
            for module in block.modules():
                if isinstance(module, mf.Linear):
                    module.backend = backend or backend_of(self.options)
        return block

    def compiled(self, block: nn.Module) -> Any:
        """By Inductor on a GPU; on a CPU, where nothing is measured, without its C++ compiler."""
        return torch.compile(block, backend="inductor" if self.options.device == "cuda" else "aot_eager")

    def step(self, block: nn.Module) -> None:
        """One step, gradients cleared first."""
        run(block, self.x, self.g)

    def peak_gib(self, block: nn.Module) -> float | None:
        """The highest point of a step."""
        for _ in range(3):
            self.step(block)
        if self.options.device != "cuda":
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self.step(block)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() / 2**30

    def clear(self, *blocks: nn.Module) -> None:
        """Give back gradients and cached memory."""
        for tensor in (self.x, *(parameter for block in blocks for parameter in block.parameters())):
            tensor.grad = None
        if self.options.device == "cuda":
            torch.cuda.empty_cache()

    def check(self, recipe: str, variant: str) -> tuple[float, float]:
        """Largest relative difference of y and gradients on few tokens: to the reference, and of that to bfloat16."""
        rows = min(CHECKED_TOKENS, self.x.shape[0])
        results = []
        for block in (
            self.build(recipe, variant), self.build(recipe, backend="reference"), self.build(None)
        ):  # fmt: skip
            x = self.x[:rows].detach().clone().requires_grad_()
            torch.manual_seed(1)
            y = run(block, x, self.g[:rows])
            results.append((y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())))
            self.clear(block)
        ours, reference, plain = results
        return _largest(ours, reference), _largest(plain, reference)


def _largest(got: Any, want: Any) -> float:
    return max(difference(a, b) for a, b in zip(got, want, strict=True))


def run(block: nn.Module, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Forward and backward; one autocast, since its exit is where delayed scaling updates."""
    for parameter in block.parameters():
        parameter.grad = None
    x.grad = None
    with mf.autocast():
        y = block(x)
    y.backward(g)
    return y


def measure(report: Report, bench: Bench, recipe: str, variant: str, mode: str, peak: float | None) -> None:
    """Time and memory of one variant, against bfloat16 in the same mode."""
    if mode == "compiled":
        torch._dynamo.reset()  # a dozen blocks share one forward: none may meet the limit of recompilations
    decibel = None
    if not recipe.startswith("torchao."):
        differing, own_error = bench.check(recipe, variant)
        decibel = sqnr_db(differing)
        # A last bit that differs turns into a code that differs further on, so the bound is the recipe's own error.
        if differing > own_error:
            report.skip(
                "b", f"differs from the reference by {differing:.1e}", recipe=recipe, variant=variant, mode=mode
            )
            return
    prepare: Callable[[nn.Module], Any] = bench.compiled if mode == "compiled" else lambda block: block
    block = prepare(bench.build(recipe, variant))
    begin = time.perf_counter()
    bench.step(block)
    first_step = time.perf_counter() - begin
    used = bench.peak_gib(block)
    plain = prepare(bench.build(None))
    calls = {"bf16": lambda i: bench.step(plain), "ours": lambda i: bench.step(block)}
    times = in_turn(calls, bench.options.device, 600, least=12)
    if recipe.startswith("torchao."):
        row = Row("b.torchao", recipe=recipe.removeprefix("torchao."), backend="torchao")
    else:
        row = Row(IDS[recipe][mode == "compiled"], recipe=recipe, backend=backend_of(bench.options), sqnr_db=decibel)
    row.shape, row.mode, row.ratio_of = tuple(bench.x.shape), mode, "bf16"
    if variant != "plain":
        row.variant, row.label = variant, f"{row.id}.{variant}"
    row.timed(times["ours"], times["bf16"]).tflops = bench.flop / times["ours"].median / 1e9
    row.extra = {"first_step_s": round(first_step, 2)}  # compiles, where the mode is compiled
    if used is not None and peak is not None:
        row.extra |= {"peak_gib": round(used, 3), "peak_ratio": round(used / peak, 4)}
    report.add(row)
    if used is not None and peak is not None and row.backend != "torchao":
        memory = Row(f"b.mem.{'compile' if mode == 'compiled' else 'eager'}", row.shape, recipe, row.variant, mode)
        memory.value, memory.unit, memory.ratio, memory.ratio_of = used, "GiB", used / peak, "bf16"
        report.add(memory)
    bench.clear(block, plain)


def plan(report: Report) -> list[tuple[str, str, str]]:
    """(recipe, variant, mode) of every wanted row."""
    listed = []
    for mode in ("eager", "compiled"):
        memory = f"b.mem.{'compile' if mode == 'compiled' else 'eager'}"
        for recipe, ids in IDS.items():
            row_id = ids[mode == "compiled"]
            for variant in ("plain", "fused"):
                if variant == "fused" and (mode == "compiled" or recipe not in ("delayed", "current", "mxfp8.folded")):
                    continue
                name = f"{row_id}.{recipe}" if variant == "plain" else f"{row_id}.fused"
                if report.wants(row_id, name, f"{row_id}.{mode}", f"{memory}.{recipe}"):
                    listed.append((recipe, variant, mode))
        for recipe in ("tensorwise", "rowwise"):
            if report.wants(f"b.torchao.{recipe}", f"b.torchao.{mode}"):
                listed.append((f"torchao.{recipe}", "plain", mode))
    return listed


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    report, bench = Report(options, arguments), Bench(options)
    peaks: dict[str, float | None] = {}
    for recipe, variant, mode in plan(report):
        fields = {"recipe": recipe, "variant": variant, "mode": mode}
        if recipe.startswith("torchao.") and (why := _torchao.missing_training(options.device)):
            report.skip("b.torchao", why, recipe=recipe.removeprefix("torchao."), mode=mode, backend="torchao")
            continue
        if mode == "compiled" and options.quick and recipe not in ("current",):
            continue
        if mode not in peaks:
            plain = bench.build(None)
            peaks[mode] = bench.peak_gib(bench.compiled(plain) if mode == "compiled" else plain)
            bench.clear(plain)
            del plain
        report.attempt("b", functools.partial(measure, report, bench, recipe, variant, mode, peaks[mode]), **fields)
        bench.clear()
    return report.finish()
