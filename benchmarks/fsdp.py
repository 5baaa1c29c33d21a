"""Training steps under FSDP2: bfloat16, converted models with its gather, and with low-precision gathers. (fsdp.*)

    torchrun --nproc-per-node 2 -m benchmarks fsdp --json fsdp.json        GPUs (NCCL)
    python -m benchmarks fsdp --quick                                      two processes on a CPU (gloo), tiny sizes

Four Llama-like blocks, 16384 tokens a rank, forward and backward in eager mode; the models take turns in one run, and
weights do not change between steps, as in a microbatch. Beside the time: bytes that a rank sends into all-gathers in a
step, and the peak of its memory. Never run on the GPUs it is for.
"""

import argparse
import contextlib
import copy
import datetime
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import microfloat.torch as mf
from benchmarks._report import Report, Row, wanted
from microfloat.recipes import from_name
from microfloat.torch.distributed import low_precision_all_gather, precompute_scales

RECIPES = {"current": "fp8_current", "delayed": "delayed", "mxfp8": "mxfp8"}
LAYERS, ROUNDS, STEPS = 4, 5, 2


class Block(nn.Module):
    """A decoder layer without its attention: norms, q/k/v, output projection, gated MLP."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.hidden = hidden
        self.qkv, self.o = linear(hidden, hidden + hidden // 2), linear(hidden, hidden)
        self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)
        self.n1, self.n2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        x = x + self.o(self.qkv(self.n1(x))[..., : self.hidden].contiguous())
        h = self.n2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


@contextlib.contextmanager
def counted_gathers() -> Iterator[list[int]]:
    """Bytes that this rank sends into all-gathers, one entry each."""
    found: list[int] = []
    names = [name for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)]

    def counting(gather: Callable) -> Callable:
        def call(output: torch.Tensor, part: torch.Tensor, *arguments: Any, **options: Any) -> Any:
            found.append(part.numel() * part.element_size())
            return gather(output, part, *arguments, **options)

        return call

    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, counting(getattr(dist, name))))
        yield found


def variants(base: nn.Sequential, x: torch.Tensor) -> Iterator[tuple[str, str | None, Callable[[], torch.Tensor]]]:
    """(id, recipe, one step) of every model, each sharded over all ranks."""
    for name in (None, *RECIPES):
        for gathers_low in (False,) if name is None else (False, True):
            model = copy.deepcopy(base)
            if name is not None:
                mf.convert(model, RECIPES[name])
            if gathers_low:
                low_precision_all_gather(model)
            for block in model:
                fully_shard(block)
            fully_shard(model)
            region = mf.autocast(recipe=from_name("delayed")) if name == "delayed" else None

            def step(
                model: nn.Sequential = model, region: Any = region, gathers_low: bool = gathers_low
            ) -> torch.Tensor:
                model.zero_grad(set_to_none=True)
                with region or contextlib.nullcontext():
                    y = model(x)
                y.float().pow(2).mean().backward()
                if gathers_low:  # as after an optimizer's step
                    precompute_scales(model)
                return y.detach()

            yield f"fsdp.{name or 'bf16'}" + (".low" if gathers_low else ""), RECIPES.get(name or ""), step


def measure(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """A row for each model, timed in turns."""
    hidden, inner, tokens = (128, 256, 32) if options.quick else (4096, 14336, 16384)
    torch.manual_seed(0)
    base = nn.Sequential(*(Block(hidden, inner) for _ in range(LAYERS))).to(device, torch.bfloat16)
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    steps, rows, outputs = {}, {}, {}
    for name, recipe, step in variants(base, x):
        if name != "fsdp.bf16" and not wanted(options.only, name):
            continue
        for _ in range(1 if options.quick else 3):
            step()
        wait()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with counted_gathers() as sent:
            y = step()
        wait()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
        steps[name], outputs[name] = step, y.sum(dtype=torch.float64)
        rows[name] = Row(
            name, (tokens, hidden, inner), recipe, mode="eager, forward and backward",
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
    base_row = rows["fsdp.bf16"]
    for name, row in rows.items():
        row.median_ms = statistics.median(times[name])
        row.p10_ms, row.p90_ms = min(times[name]), max(times[name])
        if row is not base_row:
            row.ratio = statistics.median(a / b for a, b in zip(times["fsdp.bf16"], times[name], strict=True))
            row.base_ms, row.ratio_of = statistics.median(times["fsdp.bf16"]), "bfloat16 under FSDP2"
            row.value = row.extra["gathered_bytes"] / base_row.extra["gathered_bytes"]
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
        rows = measure(options, device)
        if dist.get_rank() == 0:
            report = Report(options, arguments)
            for row in rows:
                report.add(row)
            report.finish()
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
