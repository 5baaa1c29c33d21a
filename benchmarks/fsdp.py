"""Training steps across ranks, in bfloat16 and of converted models. (fsdp.*, tp.*)

    torchrun --nproc-per-node 2 -m benchmarks fsdp --json fsdp.json        GPUs (NCCL)
    python -m benchmarks fsdp --quick                                      two processes on a CPU (gloo), tiny sizes

FSDP2 with its gather and with low-precision gathers (.low), of plain blocks and of blocks whose norms and SwiGLU are
fused with casts (.fused), and tensor with sequence parallelism over all ranks. Four Llama-like blocks, forward and
backward in eager mode, 16384 tokens a rank (all ranks together under tensor parallelism); the models take turns in one
run, and weights do not change between steps, as in a microbatch. Rows are written as they are measured: those of FSDP2,
then those of the plan. Beside the time: bytes that a rank sends into all-gathers in a step, and the peak of the memory
that a model adds.
"""

import argparse
import contextlib
import copy
import datetime
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor import parallel as torch_styles
from torch.distributed.tensor.parallel import parallelize_module

import microfloat.torch as mf
import microfloat.torch.distributed as microfloat_styles
from benchmarks import _recipes
from benchmarks._report import Report, Row, wanted
from microfloat.recipes import Recipe, from_name
from microfloat.torch.distributed import collectives, low_precision_all_gather, precompute_scales
from microfloat.torch.distributed import fsdp as sharded
from microfloat.torch.nn import functional as fused

RECIPES: dict[str, str | Recipe] = {
    "current": "fp8_current", "delayed": "delayed", "mxfp8": "mxfp8", "mxfp8.folded": _recipes.RECIPES["mxfp8.folded"],
    "nvfp4": "nvfp4",
}  # fmt: skip
WAYS = ("", ".low", ".fused", ".fused.low")
LAYERS, ROUNDS, STEPS = 4, 5, 2


class Block(nn.Module):
    """A decoder layer without its attention: norms, q/k/v, output projection, gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()

        def layer(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.hidden = hidden
        self.qkv, self.o = layer(hidden, hidden + hidden // 2), layer(hidden, hidden)
        self.gate, self.up, self.down = layer(hidden, inner), layer(hidden, inner), layer(inner, hidden)
        self.n1, self.n2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        x = x + self.o(self.qkv(self.n1(x))[..., : self.hidden].contiguous())
        h = self.n2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class FusedBlock(Block):
    """The block on the functions of `microfloat.torch.fused`: norms and SwiGLU are cast as they are computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As `Block.forward`."""
        qkv = fused.norm_linear(x, self.n1, self.qkv)  # type: ignore[arg-type]
        x = x + self.o(qkv[..., : self.hidden].contiguous())
        return x + fused.norm_mlp(x, self.n2, self.gate, self.down, up=self.up)  # type: ignore[arg-type]


# Where FSDP2 and DTensors look up an all-gather, by the names that it has in some version of torch, and this library's.
OF_TORCH = (
    (dist, "all_gather_single"),
    (dist, "all_gather_into_tensor"),
    (functional, "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"),
)
GATHERS = (
    *(one for one in OF_TORCH if hasattr(*one)), (collectives, "all_gather_together"), (sharded, "all_gather"),
)  # fmt: skip


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Bytes that this rank sends into all-gathers, one entry each."""
    found: list[int] = []

    def counting(gather: Callable, of_input: int) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            named = options.get("input_tensor", options.get("self"))
            part = arguments[of_input] if len(arguments) > of_input else named
            together = part if isinstance(part, list) else [part]
            found.append(sum(one.numel() * one.element_size() for one in together))
            return gather(*arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for module, name in GATHERS:
            counted = counting(getattr(module, name), 0 if module is functional else 1)
            stack.enter_context(mock.patch.object(module, name, counted))
        yield found


def step_of(model: nn.Sequential, name: str | None, x: torch.Tensor, after: Callable) -> Callable[[], torch.Tensor]:
    """Forward and backward of a model, then `after`."""
    region = mf.autocast(recipe=from_name("delayed")) if name == "delayed" else contextlib.nullcontext()

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        with region:
            y = model(x)
        y.float().pow(2).mean().backward()
        after(model)
        return y.detach()

    return step


class Variant(NamedTuple):
    """A row to measure: its id, its recipe in words, and what makes one step of its model."""

    id: str
    recipe: str | None
    make: Callable[[], Callable[[], torch.Tensor]]


def under_fsdp(base: nn.Sequential, x: torch.Tensor) -> Iterator[Variant]:
    """Every model, each sharded over all ranks."""

    def make(name: str | None, way: str) -> Callable[[], torch.Tensor]:
        model, gathers_low = copy.deepcopy(base), way.endswith(".low")
        if name is not None:
            mf.convert(model, RECIPES[name])
        for block in model:
            block.__class__ = FusedBlock if ".fused" in way else Block
        if gathers_low:
            low_precision_all_gather(model)
        for block in model:
            fully_shard(block)
        fully_shard(model)
        # As after an optimizer's step.
        return step_of(model, name, x, precompute_scales if gathers_low else lambda model: None)

    for name in (None, *RECIPES):
        for way in WAYS if name else ("",):
            yield Variant(f"fsdp.{name or 'bf16'}{way}", name, functools.partial(make, name, way))


def under_plan(base: nn.Sequential, x: torch.Tensor) -> Iterator[Variant]:
    """The same of models cut by a plan over all ranks, each of which has its rows of x between the products."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh(x.device.type, (ranks,))

    def make(name: str | None) -> Callable[[], torch.Tensor]:
        model = copy.deepcopy(base)
        if name is not None:
            mf.convert(model, RECIPES[name])
        styles = torch_styles if name is None else microfloat_styles
        plan: dict[str, Any] = {key: styles.SequenceParallel(sequence_dim=0) for key in ("n1", "n2")}
        plan |= {key: styles.ColwiseParallel(input_layouts=Shard(0)) for key in ("qkv", "gate", "up")}
        plan |= {key: styles.RowwiseParallel(output_layouts=Shard(0)) for key in ("o", "down")}
        for block in model:
            parallelize_module(block, mesh, plan)
            block.hidden //= ranks
        return step_of(model, name, x.chunk(ranks)[dist.get_rank()].contiguous(), lambda model: None)

    for name in (None, *RECIPES):
        yield Variant(f"tp.{name or 'bf16'}", name, functools.partial(make, name))


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[list[Row]]:
    """A row for each model, timed in turns, for one kind of parallelism after the other."""
    hidden, inner, tokens = (128, 256, 32) if options.quick else (4096, 14336, 16384)
    torch.manual_seed(0)
    base = nn.Sequential(*(Block(hidden, inner) for _ in range(LAYERS))).to(device, torch.bfloat16)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    for variants, what in (
        (under_fsdp(base, x), "FSDP2"), (under_plan(base, x), "tensor and sequence parallelism"),
    ):  # fmt: skip
        chosen = [one for one in variants if one.recipe is None or wanted(options.only, one.id)]
        if len(chosen) > 1:
            yield in_turns(chosen, (tokens, hidden, inner), what, options, device)


def in_turns(
    variants: Sequence[Variant], shape: tuple[int, ...], what: str, options: argparse.Namespace, device: torch.device
) -> list[Row]:
    """A row for each variant, the first of which is that of bfloat16."""
    on_gpu = device.type == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    allocated = torch.cuda.memory_allocated if on_gpu else lambda: 0
    steps, rows, outputs, before = {}, {}, {}, allocated()
    for name, recipe, make in variants:
        step = make()
        for _ in range(1 if options.quick else 3):
            step()
        wait()
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        with counted_gathers() as sent:
            y = step()
        wait()
        peak = torch.cuda.max_memory_allocated() - before if on_gpu else None  # without the models made before it
        steps[name], outputs[name], before = step, y.sum(dtype=torch.float64), allocated()
        rows[name] = Row(
            name, shape, recipe, mode="eager, forward and backward",
            extra={"gathered_bytes": sum(sent), "peak_bytes": peak, "ranks": dist.get_world_size()},
        )  # fmt: skip
    for name, row in rows.items():
        default = outputs.get(name.removesuffix(".low"))
        if name.endswith(".low") and default is not None and row.recipe != "delayed":  # whose scales change by step
            row.bytes_equal = bool(outputs[name] == default)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 if options.quick else ROUNDS):
        for name, step in steps.items():
            dist.barrier()
            wait()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            wait()
            times[name].append((time.perf_counter() - start) / STEPS * 1e3)
    base = next(iter(rows))
    for name, row in rows.items():
        row.median_ms = statistics.median(times[name])
        row.p10_ms, row.p90_ms = min(times[name]), max(times[name])
        if name != base:
            row.ratio = statistics.median(a / b for a, b in zip(times[base], times[name], strict=True))
            row.base_ms, row.ratio_of = rows[base].median_ms, f"bfloat16 under {what}"
            row.value = row.extra["gathered_bytes"] / rows[base].extra["gathered_bytes"]
            row.unit = "of its gathered bytes"
    return list(rows.values())


def run(rank: int, world: int, store: str, options: argparse.Namespace, arguments: list[str]) -> None:
    """One rank; the first one reports."""
    device = torch.device("cuda", rank) if options.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    wait = datetime.timedelta(seconds=300)
    backend = "nccl" if device.type == "cuda" else "gloo"
    how: dict[str, Any] = {"init_method": f"file://{store}", "rank": rank, "world_size": world} if store else {}
    dist.init_process_group(backend, timeout=wait, device_id=device if device.type == "cuda" else None, **how)
    try:
        report = Report(options, arguments) if dist.get_rank() == 0 else None
        for rows in measure(options, device):
            if report is not None:
                for row in rows:
                    report.add(row)
                report.finish()  # so that an abort in between leaves what was measured
    finally:
        dist.destroy_process_group()


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Run as one of torchrun's ranks; or start as many as there are GPUs, two on a CPU."""
    if "LOCAL_RANK" in os.environ:
        run(int(os.environ["LOCAL_RANK"]), 0, "", options, arguments)
        return 0
    world = max(torch.cuda.device_count(), 1) if options.device == "cuda" else 2
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        torch.multiprocessing.spawn(run, (world, store, options, arguments), nprocs=world)
    return 0
