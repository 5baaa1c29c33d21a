"""Quantization-aware training beside quantizing afterwards: held-out loss of a small Llama on source code.

A teacher trains in float32 on the text of examples/train_gpt.py, a byte a token. Then, for each config and from the
teacher's weights:

    nearest        the teacher, quantized by `quantize_`
    longer         the teacher after the further steps in high precision, quantized
    qat            the further steps under the config, loss of the next byte
    distilled      the further steps under the config, distance (KL) to the teacher's distribution

All losses are those of the served model (`quantize_` after training) on held-out text, in nats per byte; every seed
draws other weights and other batches.
"""

import argparse
import copy
import datetime
import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import microfloat.torch as mf
from benchmarks import ROOT
from benchmarks._report import versions
from benchmarks.cpu_quantize import processor

SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
CONTEXT, BATCH, WINDOWS = 128, 8, 128
CONFIGS = (mf.WeightOnly("nvfp4"), mf.WeightOnly("mxfp4"), mf.WeightActivation("mxfp4"))


class Run:
    """One seed: its text and its teacher."""

    def __init__(self, corpus: Any, seed: int, steps: int, further: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        self.corpus, self.seed, self.further, self.step = corpus, seed, further, 0
        config = LlamaConfig(vocab_size=256, max_position_embeddings=CONTEXT, **SIZES)
        self.teacher = LlamaForCausalLM(config)
        self.train(self.teacher, steps, 1.5e-3)

    def train(self, model: torch.nn.Module, steps: int, rate: float, teacher: torch.nn.Module | None = None) -> None:
        """`steps` further steps; the same batches for all models that begin at the same step."""
        optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / 20) * (1 - i / steps))
        for step in range(self.step, self.step + steps):
            ids = torch.from_numpy(self.corpus.batch(self.seed, step, BATCH, CONTEXT))
            logits = model(ids[:, :-1]).logits.flatten(0, 1)
            if teacher is None:
                loss = F.cross_entropy(logits, ids[:, 1:].flatten())
            else:
                with torch.no_grad():
                    wanted = teacher(ids[:, :-1]).logits.flatten(0, 1).log_softmax(-1)
                loss = F.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

    @torch.no_grad()
    def loss(self, model: torch.nn.Module) -> float:
        """Held-out loss."""
        found = []
        for batch in self.corpus.held_out_batches(WINDOWS, BATCH, CONTEXT):
            ids = torch.from_numpy(batch)
            found.append(F.cross_entropy(model(ids[:, :-1]).logits.flatten(0, 1), ids[:, 1:].flatten()))
        return float(torch.stack(found).mean())

    def served(self, model: torch.nn.Module, config: object) -> float:
        """Held-out loss of the model as it is served."""
        model = copy.deepcopy(model)
        mf.quantize_(model, config)
        return self.loss(model)

    def losses(self, rate: float) -> dict[str, Any]:
        """The losses of this seed."""
        self.step = 1 << 20  # batches that the teacher has not seen
        longer = copy.deepcopy(self.teacher)
        self.train(longer, self.further, rate)
        made: dict[str, Any] = {"teacher": self.loss(self.teacher), "teacher_longer": self.loss(longer)}
        for config in CONFIGS:
            row = {"nearest": self.served(self.teacher, config), "longer": self.served(longer, config)}
            for name, teacher in (("qat", None), ("distilled", self.teacher)):
                student = copy.deepcopy(self.teacher)
                mf.convert(student, config)
                self.train(student, self.further, rate, teacher)
                trained = self.loss(student)
                row[name] = self.served(student, config)
                assert row[name] == trained, "the served forward is the one that has trained"
            made[config.label] = row
            print(self.seed, config.label, {name: round(loss, 4) for name, loss in row.items()}, flush=True)
        return made


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks qat", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write the losses here")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=400, help="of the teacher")
    parser.add_argument("--further", type=int, default=100, help="steps of every other model")
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate of the further steps")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import data  # type: ignore[import-not-found]

    corpus = data.load_corpus(1 << 24)
    seeds = [
        Run(corpus, seed, options.steps, options.further).losses(options.rate) for seed in range(options.seeds)
    ]  # fmt: skip
    for label in (config.label for config in CONFIGS):
        means = {name: sum(one[label][name] for one in seeds) / len(seeds) for name in seeds[0][label]}
        print(label, {name: f"{loss:.4f} ({math.exp(loss):.3f})" for name, loss in means.items()})
    if options.json:
        written = [word for word in arguments if word not in ("--json", str(options.json))]
        report = {
            "command": " ".join(["python -m benchmarks qat", *written]), "date": datetime.date.today().isoformat(),
            "machine": {"processor": processor(), "cores": os.cpu_count(), "system": platform.system()},
            "versions": versions(), "seeds": seeds,
            "config": {**SIZES, "context": CONTEXT, "batch": BATCH, "windows": WINDOWS, "steps": options.steps,
                       "further": options.further, "rate": options.rate, "train_bytes": len(corpus.train)},
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0
