"""A whole training step of transformers' Llama: time, tokens per second, model TFLOP/s, memory, kernels. (model.*)

    python -m benchmarks model --json benchmarks/results/model.json                one GPU, 12 layers of an 8B, batch 2
    torchrun --nproc-per-node 2 -m benchmarks model --layers 32 --batch 1          the 8B on two GPUs

Llama 3 8B's layers and head with random weights, sequence 8192, random tokens. Parameters, gradients and AdamW in
float32, products in bfloat16 by FSDP2's mixed precision (also on one GPU). Candidates, each a row ``model.NAME``:

* ``bf16``, ``bf16.compiled``: transformers' model; every layer compiled.
* ``torchao.tensorwise.compiled``, ``torchao.rowwise.compiled``: torchao's float8 training, every layer compiled.
* a recipe: ``microfloat.torch.convert(model, placement, fuse=True)``, eager, weights gathered in low precision; the
  head stays in bfloat16, and its loss is computed in chunks of tokens. ``.head``: the head under the recipe too
  (fp8_current beside delayed scaling).
* any of them ``.recomputed``: every layer is computed again in backward.

They run one after the other in one process, since two of them do not fit on one GPU; the first loss of each is compared
with that of bfloat16, from the same weights, before anything is timed. `--profile` adds the busy time
of one step by kind of kernel, its longest kernels, and the time in which the GPU idles.
"""

import argparse
import contextlib
import functools
import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import microfloat.torch as mf
from benchmarks import _torchao
from benchmarks._recipes import RECIPES, sqnr_db
from benchmarks._report import Report, Row
from microfloat.recipes import Placement
from microfloat.torch.timing import Times

SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
         "vocab_size": 128256}  # fmt: skip
QUICK = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 256}  # fmt: skip
NAMES = ("bf16", "bf16.compiled", "torchao.tensorwise.compiled", "torchao.rowwise.compiled",
         *(name for name in RECIPES if name in ("delayed", "current", "row", "block") or name.endswith(".folded")),
         "nvfp4", "delayed.head", "current.head", "bf16.recomputed", "current.recomputed")  # fmt: skip
# Kind of a kernel -> words of which its name has one.
KINDS = {
    "collectives": ("nccl",), "products": ("gemm", "nvjet", "cutlass", "_multiply"),
    "attention": ("flash", "cudnn", "sdpa"), "optimizer": ("adam",), "softmax and loss": ("softmax", "nll"),
    "copies": ("memcpy", "memset", "split_with_sizes", "chunk_cat"),
    "casts and producers": ("cast_", "quantize_", "produce_", "amax", "fold", "scale_and_round", "rotate_tokens"),
}  # fmt: skip
WARM, STEPS = 3, 6
# Largest relative difference of the first losses; an untrained model's logits are small, and so is it.
LARGEST = 0.02


class Bench:
    """The configuration of the model, its tokens, and what a step of it multiplies."""

    def __init__(self, options: argparse.Namespace) -> None:
        from transformers import LlamaConfig

        sizes = QUICK if options.quick else SIZES
        layers, batch, tokens = (2, 1, 32) if options.quick else (options.layers, options.batch, options.sequence)
        self.layers, self.device, self.shape = layers, options.device, (batch, tokens)
        self.config = LlamaConfig(
            **sizes, num_hidden_layers=layers, max_position_embeddings=tokens, attn_implementation="sdpa",
            use_cache=False, tie_word_embeddings=False, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )  # fmt: skip
        torch.manual_seed(0)
        self.ids = torch.randint(0, sizes["vocab_size"], self.shape, device=self.device)
        width, hidden = sizes["hidden_size"], sizes["intermediate_size"]
        kv = width * sizes["num_key_value_heads"] // sizes["num_attention_heads"]
        weights = layers * (2 * width * width + 2 * width * kv + 3 * width * hidden) + sizes["vocab_size"] * width
        # Causal attention counted by half.
        self.flops = 6 * weights * batch * tokens + 6 * layers * batch * tokens * tokens * width

    @functools.cached_property
    def first_loss(self) -> float:
        """The loss of the untrained model in bfloat16."""
        model = self.build("bf16")
        with torch.no_grad():
            loss = float(model(input_ids=self.ids, labels=self.ids).loss)
        del model
        clean(self.device)
        return loss

    def build(self, name: str) -> nn.Module:
        """The model of a candidate, sharded over the ranks, with random weights."""
        from transformers import LlamaForCausalLM

        head, recomputed, compiled = (f".{word}" in name for word in ("head", "recomputed", "compiled"))
        recipe = RECIPES.get(name.replace(".head", "").replace(".recomputed", ""))
        torch.manual_seed(0)
        with torch.device("meta"):
            model = LlamaForCausalLM(self.config).train()
        if name.startswith("torchao."):
            lm_head, model.lm_head = model.lm_head, nn.Identity()  # type: ignore[assignment]
            model = _torchao.float8_training(model, name.split(".")[1])
            model.lm_head = lm_head  # type: ignore[assignment]
        elif recipe is not None:
            # The loss in chunks takes no recipe that keeps state.
            of_head = None if not head else RECIPES["current"] if name.startswith("delayed") else recipe
            mf.convert(model, Placement([("lm_head", of_head), ("*", recipe)]), fuse=True)
            if not recomputed:
                mf.distributed.low_precision_all_gather(model)
        layers = model.model.layers
        if recomputed:
            for index, layer in enumerate(layers):
                layers[index] = checkpoint_wrapper(layer)  # type: ignore[index]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*layers, model):  # type: ignore[misc]
            fully_shard(part, mp_policy=policy)
        model.to_empty(device=self.device)
        for parameter in model.parameters():
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.02)
        made = type(model.model.rotary_emb)(self.config).to(self.device)  # type: ignore[operator]
        model.model.rotary_emb = made  # its frequencies were made on the meta device
        if recipe is not None:
            mf.reset_scaling(model)
        if compiled:
            for layer in layers:  # type: ignore[union-attr]
                layer.compile(backend="inductor" if self.device == "cuda" else "aot_eager")
        return model

    def stepper(self, name: str) -> Callable[[], torch.Tensor]:
        """Forward, backward and AdamW of a candidate; the call returns the loss."""
        model = self.build(name)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

        def step() -> torch.Tensor:
            optimizer.zero_grad(set_to_none=True)
            with mf.autocast() if name in RECIPES else contextlib.nullcontext():
                loss = model(input_ids=self.ids, labels=self.ids).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step


def clean(device: str) -> None:
    """Give back the memory of models that nobody holds."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def profiled(step: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Milliseconds of one step by kind of kernel, the longest kernels, and the time in which the GPU idles."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        step()
        torch.cuda.synchronize()
    kinds, names, busy, end = Counter[str](), Counter[str](), 0.0, 0.0
    events = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    for start, stop, kernel in spans:
        found = (kind for kind, words in KINDS.items() if any(word in kernel.lower() for word in words))
        kinds[next(found, "other")] += (stop - start) / 1e3  # type: ignore[assignment]
        names[kernel[:90]] += (stop - start) / 1e3  # type: ignore[assignment]
        busy, end = busy + max(0.0, stop - max(start, end)), max(end, stop)
    span = end - spans[0][0]
    return {
        "kinds_ms": {kind: round(ms, 1) for kind, ms in kinds.most_common()},
        "kernels_ms": {kernel: round(ms, 2) for kernel, ms in names.most_common(40)},
        "idle_ms": round((span - busy) / 1e3, 1),
    }


def measure(report: Report, bench: Bench, name: str, profile: bool) -> None:
    """The row of a candidate."""
    gpu = bench.device == "cuda"
    wait = torch.cuda.synchronize if gpu else lambda: None
    wanted_loss = bench.first_loss
    step = bench.stepper(name)
    losses, times = [round(float(step()), 4) for _ in range(WARM)], []
    off = abs(losses[0] / wanted_loss - 1)
    if not off < LARGEST:
        report.skip(f"model.{name}", f"differs: first loss {losses[0]}, in bfloat16 {wanted_loss:.4f}")
        return
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(STEPS):
        dist.barrier()
        wait()
        begin = time.perf_counter()
        loss = step()
        wait()
        times.append((time.perf_counter() - begin) * 1e3)
        losses.append(round(float(loss), 4))
    row = Row(f"model.{name}", (bench.layers, *bench.shape), name.split(".")[0], sqnr_db=sqnr_db(off))
    row.backend, row.mode = "native", "compiled" if "compiled" in name else "eager"
    ms = statistics.median(times)
    row.timed(Times(ms, min(times), max(times)))
    row.tflops = bench.flops / ms / 1e9
    row.extra = {"tokens_per_s_gpu": round(bench.ids.numel() / ms * 1e3), "ranks": dist.get_world_size()}
    if gpu:
        row.extra["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    row.extra["losses"] = losses
    if profile and gpu:
        row.extra |= profiled(step)
    if dist.get_rank() == 0:
        report.add(row)
        print("  ", {key: value for key, value in row.extra.items() if key != "kernels_ms"}, flush=True)


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """The rows that were asked for."""
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    report = Report(argparse.Namespace(**{**vars(options), "json": None if rank else options.json}), arguments)
    gpu = options.device == "cuda"
    if gpu:
        torch.cuda.set_device(local)
    with tempfile.TemporaryDirectory() as folder:
        alone = {} if "RANK" in os.environ else {"init_method": f"file://{folder}/ranks", "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if gpu else "gloo", **alone)
        try:
            bench = Bench(options)
            for name in NAMES:
                if not report.wants(f"model.{name}"):
                    continue
                missing = _torchao.missing_training(options.device) if name.startswith("torchao") else ""
                if missing:
                    report.skip(f"model.{name}", missing)
                    continue
                report.attempt(f"model.{name}", functools.partial(measure, report, bench, name, options.profile))
                torch._dynamo.reset()
                clean(options.device)
        finally:
            dist.destroy_process_group()
    return report.finish()
