"""GPTQ beside the nearest codes and searched scales: errors of layers and perplexity of a small Llama on source code.

A model trains on the text of examples/train_gpt.py, a byte a token. Then for each format and method: the error of every
layer's outputs on held-out text, ``|(W - Q) x|^2 / |W x|^2``, the held-out loss of the quantized model in nats per
byte, and the time that calibration and `quantize_` take: of the clock with a GPU, of the processor without one.
"""

import argparse
import copy
import datetime
import json
import math
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import microfloat.torch as mf
from benchmarks import ROOT
from benchmarks._report import versions
from benchmarks.cpu_quantize import processor

# Format -> its methods: the name of each, the search of scales, and the method of `quantize_`.
SEARCHES = ("nearest", None, "nearest"), ("mse", "mse", "nearest"), ("gptq", None, "gptq")
OF_NVFP4 = (
    *SEARCHES[:1], ("four_over_six", "four_over_six", "nearest"), *SEARCHES[1:],
    ("gptq, four_over_six", "four_over_six", "gptq"),
)  # fmt: skip
FORMATS = {"nvfp4": OF_NVFP4, "mxfp4": SEARCHES, "mxfp6_e2m3": SEARCHES, "mxfp8": SEARCHES, "fp8_row": SEARCHES}
CALIBRATION, HELD_OUT = 64, 256  # sequences


def train(options: argparse.Namespace, corpus: Any) -> torch.nn.Module:
    """A Llama, trained on the corpus."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, max_position_embeddings=options.context, hidden_size=options.width,
        intermediate_size=3 * options.width, num_hidden_layers=options.layers, num_attention_heads=options.width // 32,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), options.rate, weight_decay=0.01)
    at = lambda i: min(1, (i + 1) / 50) * (1 - i / options.steps)  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, at)
    for step in range(options.steps):
        ids = torch.from_numpy(corpus.batch(0, step, options.batch, options.context)).to(options.device)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device == "cuda"):
            loss = F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"trained to {float(loss.detach()):.4f}", flush=True)
    return model.bfloat16().float().eval()


@torch.no_grad()
def loss_of(model: torch.nn.Module, batches: list[torch.Tensor]) -> float:
    """Held-out loss in nats per byte."""
    losses = [F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()) for ids in batches]
    return float(torch.stack(losses).mean())


@torch.no_grad()
def calibrated(model: torch.nn.Module, batches: list[torch.Tensor]) -> torch.nn.Module:
    """A copy of the model, which has seen the batches."""
    made = copy.deepcopy(model)
    with mf.calibrate(made):
        for ids in batches:
            made(ids[:, :-1])
    return made


@torch.no_grad()
def errors_of(model: torch.nn.Module, seen: torch.nn.Module) -> dict[str, float]:
    """The error of the outputs of each layer, relative to their energy; `seen`: the plain model after held-out text."""
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, mf.Linear):
            plain = seen.get_submodule(name)
            squares, w = vars(plain)["_hessians"]["weight"].double(), plain.weight.double()
            d = layer.weight.dequantize().double() - w
            found[name] = float(((d @ squares) * d).sum() / ((w @ squares) * w).sum())
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gptq", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import data  # type: ignore[import-not-found]

    corpus = data.load_corpus(1 << 24)
    model = train(options, corpus)
    held_out = [torch.from_numpy(one).to(options.device)
                for one in corpus.held_out_batches(HELD_OUT, options.batch, options.context)]  # fmt: skip
    batches = [torch.from_numpy(corpus.batch(1, i, options.batch, options.context)).to(options.device)
               for i in range(CALIBRATION // options.batch)]  # fmt: skip
    clock = time.perf_counter if options.device == "cuda" else time.process_time
    seen, plain, rows = calibrated(model, held_out), loss_of(model, held_out), []
    for fmt, methods in FORMATS.items():
        for name, search, method in methods:
            for _ in range(2 if not rows else 1):  # the first time everything is loaded
                began = clock()
                made = calibrated(model, batches if method == "gptq" else [])
                mf.quantize_(made, mf.WeightOnly(fmt, search), method=method)
                if options.device == "cuda":
                    torch.cuda.synchronize()
                seconds = clock() - began
            errors = errors_of(made, seen)
            row = {"format": fmt, "method": name, "loss": loss_of(made, held_out), "seconds": seconds, "errors": errors}
            rows.append(row)
            mean = sum(errors.values()) / len(errors)
            print(f"{fmt:12} {name:20} {mean:.3%} +{row['loss'] - plain:.5f} {seconds:.2f} s", flush=True)
    print(f"plain: {plain:.5f}, perplexity {math.exp(plain):.4f}")
    if options.json:
        written = [word for word in arguments if word not in ("--json", str(options.json))]
        gpu = {"gpu": torch.cuda.get_device_name()} if options.device == "cuda" else {}
        report = {
            "command": " ".join(["python -m benchmarks gptq", *written]), "date": datetime.date.today().isoformat(),
            "machine": {**gpu, "processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
            "versions": versions(), "plain": plain, "rows": rows,
            "config": {"layers": options.layers, "width": options.width, "context": options.context,
                       "batch": options.batch, "steps": options.steps, "rate": options.rate,
                       "parameters": sum(one.numel() for one in model.parameters()),
                       "calibration_tokens": sum(one[:, 1:].numel() for one in batches),
                       "held_out_tokens": sum(one[:, 1:].numel() for one in held_out)},
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
