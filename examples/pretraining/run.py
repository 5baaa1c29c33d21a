"""One run of a row: a pure function of row, seed, size and text, whole or interrupted.

The same seed gives every row the same first weights, the same batches and the same seeds of stochastic rounding. On a
GPU the whole step is one CUDA graph: forward, backward, clipping and AdamW.
"""

import contextlib
import math
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt.model import products
from torch import Tensor, nn

import microfloat
import microfloat.torch as mf
from microfloat.cli.machine import processor
from microfloat.errors import CheckpointError
from microfloat.recipes import Placement
from pretraining.model import Model, Size
from pretraining.rows import ROWS
from pretraining.text import Text

EVALUATIONS = 10  # of a few held-out batches in the course of a run
FEW = 2


class Run:
    """A training run: `train` goes on until it is done or told to stop, `state` and `load` are all it depends on."""

    def __init__(
        self, row: str, seed: int, size: Size, text: Text, device: torch.device, compiled: bool = False
    ) -> None:
        self.name, self.row, self.seed, self.size, self.text, self.device = row, ROWS[row], seed, size, text, device
        self.step, self.seconds, self.held_out = 0, 0.0, []  # type: ignore[var-annotated]
        self.switch = math.ceil(self.row.bf16_from * size.steps)  # the first step that is bf16 whatever the row
        self.losses = torch.zeros(size.steps, device=device)
        torch.manual_seed(seed)
        self.model = Model(size, text.entries)
        if self.row.noise:
            noise = torch.Generator().manual_seed(seed + 1)
            for parameter in self.model.parameters():
                factor = 1 + self.row.noise * (2 * torch.rand(parameter.shape, generator=noise) - 1)
                parameter.data.mul_(factor)
        self.model.to(device)
        self.place_recipe()
        self.compiled = compiled
        if compiled:
            for block in self.model.blocks:
                block.compile(fullgraph=True)
            self.model.loss = torch.compile(self.model.loss)  # type: ignore[method-assign]
        parameters = list(self.model.parameters())
        matrices = {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": size.weight_decay}
        others = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}
        on_gpu = device.type == "cuda"
        rate = torch.tensor(0.0, device=device) if on_gpu else 0.0
        self.optimizer = torch.optim.AdamW([matrices, others], rate, betas=(0.9, 0.95), fused=on_gpu, capturable=on_gpu)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.tokens = torch.zeros(size.batch, size.context + 1, dtype=torch.int64, device=device)
        self.loss = torch.zeros((), device=device)
        self.prepared = False
        torch.manual_seed(seed)  # of stochastic rounding: drawn anew, whatever the first weights took

    def place_recipe(self) -> None:
        """Swap Linears for quantized ones; from `bf16_from` on, back again."""
        if self.step >= self.switch:
            mf.revert(self.model)
        elif self.row.recipe is not None or self.row.head is not None:
            mf.convert(self.model, Placement([("blocks.*", self.row.recipe), ("head", self.row.head)]))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """The loss as it is trained on: bfloat16 operands, quantized where the row says so; parameters are float32."""
        recipe = self.row.recipe
        nothing = contextlib.nullcontext()
        slow = nothing if self.compiled else products(self.device.type)
        steps = nothing if recipe is None else mf.autocast(recipe=recipe)  # of delayed scaling
        with torch.autocast(self.device.type, torch.bfloat16), steps, slow:
            return self.model(tokens_BT)

    def compute_step(self) -> None:
        """One step of the optimizer on `tokens`."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.forward(self.tokens)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.loss.copy_(loss.detach())

    def prepare(self) -> None:
        """Allocate the optimizer's state, on a GPU also compile and capture the step; leaves no trace in the run."""
        state = self.state()
        if self.device.type == "cuda":
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.compute_step()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.compute_step()
        else:
            self.compute_step()
        self.prepared = True
        self.load(state)

    def train(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Train to the last step; True when it got there. Between two steps `stopped` may end it early."""
        size, every = self.size, max(1, self.size.steps // EVALUATIONS)
        if not self.prepared:
            self.prepare()
        began = time.perf_counter()
        while self.step < size.steps and not stopped():
            if self.step == self.switch:
                self.place_recipe()
                self.prepare()
            self.train_step()
            self.step += 1
            if self.step % every == 0 and self.step < size.steps:
                self.held_out.append([self.step, {kind: self.evaluate(kind, FEW) for kind in self.text.held_out}])
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds += time.perf_counter() - began
        return self.step == size.steps

    def train_step(self) -> None:
        """One step on its batch, at its learning rate; the loss is kept on the device."""
        batch = torch.from_numpy(self.text.batch(self.seed, self.step, self.size.batch, self.size.context))
        self.tokens.copy_(batch)
        for group in self.optimizer.param_groups:
            rate = self.learning_rate()
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        if self.graph is not None:
            self.graph.replay()
        else:
            self.compute_step()
        self.losses[self.step].copy_(self.loss)

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine to a tenth of the peak."""
        warmup = max(1, round(self.size.warmup * self.size.steps))
        if self.step < warmup:
            return self.size.lr * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, self.size.steps - warmup)
        return self.size.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def evaluate(self, kind: str, limit: int | None = None) -> float:
        """Mean loss of held-out windows, computed as in training but not compiled; it draws from no generator."""
        devices = [self.device] if self.device.type == "cuda" else []
        batches = self.text.held_out_batches(kind, self.size.batch, self.size.context, limit)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"), torch.random.fork_rng(devices):
            losses = [self.forward(torch.from_numpy(batch).to(self.device)) for batch in batches]
        return float(np.average([float(loss) for loss in losses], weights=[len(batch) for batch in batches]))

    def summary(self) -> dict[str, Any]:
        """What is kept of a run that is done."""
        group = max(1, self.size.steps // 200)
        losses = self.losses.double().cpu().numpy()[: self.size.steps // group * group]
        return {
            "row": self.name,
            "seed": self.seed,
            "held_out": {kind: self.evaluate(kind, self.size.evaluated) for kind in self.text.held_out},
            "train": [round(float(mean), 5) for mean in losses.reshape(-1, group).mean(axis=1)],
            "steps_of_a_mean": group,
            "held_out_curve": self.held_out,
            "seconds": round(self.seconds, 1),
            **self.settings(),
            "environment": environment(self.device),
        }

    def settings(self) -> dict[str, Any]:
        """What the losses depend on, besides row and seed."""
        return {"size": asdict(self.size), "steps": self.size.steps, "text": self.text.facts}

    def state(self) -> dict[str, Any]:
        """A copy of everything that the rest of the run depends on."""
        moments = [self.optimizer.state.get(parameter, {}) for parameter in self.model.parameters()]
        state = {
            "row": self.name, "seed": self.seed, "step": self.step, "seconds": self.seconds,
            "settings": self.settings(), "held_out": [*self.held_out], "losses": self.losses,
            "model": self.model.state_dict(), "moments": moments, "generator": torch.get_rng_state(),
            "cuda_generator": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }  # fmt: skip
        return copied(state)

    def load(self, state: dict[str, Any]) -> None:
        """Go on where `state` was called: into the tensors that are there, since a captured step reads those."""
        for key in ("row", "seed", "settings"):
            ours = {"row": self.name, "seed": self.seed, "settings": self.settings()}[key]
            if state[key] != ours:
                raise CheckpointError(
                    f"{key}: the checkpoint has {state[key]}, this run has {ours}. Use another --out."
                )
        self.step, self.seconds, self.held_out = state["step"], state["seconds"], state["held_out"]
        if not self.prepared:
            if self.step > self.switch:  # at that very step it is still to come
                self.place_recipe()
            self.prepare()
            self.step, self.seconds, self.held_out = state["step"], state["seconds"], state["held_out"]
        self.losses.copy_(state["losses"])
        self.model.load_state_dict(state["model"])
        for parameter, moments in zip(self.model.parameters(), state["moments"], strict=True):
            for name, tensor in self.optimizer.state[parameter].items():
                tensor.copy_(moments[name]) if moments else tensor.zero_()
        self.optimizer.zero_grad(set_to_none=True)
        torch.set_rng_state(state["generator"])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_generator"], self.device)

    def save(self, file: Path) -> None:
        """Write the state; the file is whole or not there."""
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        torch.save(self.state(), temporary)
        temporary.replace(file)


def environment(device: torch.device) -> dict[str, str]:
    """Device and versions."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    versions = {"torch": torch.__version__, "microfloat": microfloat.__version__}
    return {"device": name, "python": platform.python_version(), **versions}


def copied(value: Any) -> Any:
    """A copy with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: copied(one) for key, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value
