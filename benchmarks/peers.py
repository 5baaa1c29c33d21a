"""Whole model, decoder layer and Linear beside peers, each candidate in a process of its own. (peers.*)

    python -m benchmarks peers --json benchmarks/results/peers/one_run.json

README's first table and picture are one run of this command. Work, forward and backward each:

* ``model``: a step of Llama 3 8B's first twelve layers and its head, with AdamW, as `benchmarks.model` measures it;
* ``layer``: such a decoder layer of transformers, 4 x 4096 tokens; microfloat by ``convert(layer, recipe, fuse=True)``;
* ``linear``: 16384 tokens, 4096 to 14336 features.

Candidates: ``bf16``, compiled; microfloat's recipes, eager; torchao's tensorwise FP8, compiled; TransformerEngine's
recipes with its own layers. A peer that is not installed is left out. A process each, since an imported library slows
others (torch's attention after TransformerEngine's import). Layers and Linears take turns, a few steps each; models do
not fit beside each other on a GPU, and run one after the other.
"""

import argparse
import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import nn

from benchmarks import ROOT, _torchao
from benchmarks._recipes import RECIPES, sqnr_db
from benchmarks._report import Report, Row
from microfloat.torch.timing import Times

OURS = ("delayed", "current", "row", "block", "mxfp8.folded", "nvfp4.folded", "nvfp4")
NAMES = ("bf16", "torchao.tensorwise", "te.delayed", "te.current", "te.block", *OURS)
WORKS = ("linear", "layer", "model")
SHAPES = {"linear": (16384, 4096, 14336), "layer": (4, 4096, 4096)}
QUICK = {"linear": (48, 32, 64), "layer": (2, 16, 64)}
# Rounds of turns, and steps in each after one that is not timed.
ROUNDS, STEPS = 9, 4
LARGEST = 0.25  # relative difference of a result to bfloat16's


def library(name: str) -> tuple[str, str]:
    """The package of a candidate, and its version ("" where it is not installed)."""
    kind = name.split(".")[0]
    package = {"torchao": "torchao", "te": "transformer_engine", "bf16": "torch"}.get(kind, "microfloat")
    if importlib.util.find_spec(package) is None:
        return package, ""
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout on the path
        return package, str(getattr(importlib.import_module(package), "__version__", "unknown"))


def missing(name: str, device: str) -> str:
    """Why a candidate cannot take part, "" if it can."""
    if name.startswith("torchao"):
        return _torchao.missing_training(device)
    return "" if library(name)[1] else "TransformerEngine is not installed"


class Asked(Protocol):
    """What answers a candidate's part of the work."""

    def send(self, **command: Any) -> None: ...
    def answer(self) -> dict[str, Any]: ...


class Candidate:
    """A process that measures one candidate on demand (`serve`), by lines of JSON."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        words = [sys.executable, "-m", "benchmarks.peers", name, options.device, *["quick"] * options.quick]
        self._process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
        )  # fmt: skip

    def send(self, **command: Any) -> None:
        """Ask without waiting."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` says that it has ended
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """What it says next; {"skipped": why} where it has failed or ended."""
        assert self._process.stdout is not None
        said = self._process.stdout.readline()
        return json.loads(said) if said else {"skipped": f"failed: ended with status {self._process.wait()}"}

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._process.stdout.close()


def take_turns(candidates: Mapping[str, Asked], rounds: int, steps: int) -> dict[str, list[float]]:
    """Milliseconds of a step in every round, by candidate; each second round goes the other way round.

    Without a candidate that fails on the way.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in list(times)[:: -1 if number % 2 else 1]:
            candidates[name].send(do="time", steps=steps)
            said = candidates[name].answer()
            if "ms" in said:
                times[name].append(said["ms"])
            else:
                del times[name]
    return times


def in_turns(report: Report, candidates: Mapping[str, Asked], work: str) -> None:
    """Rows of the work that all candidates have at the same time."""
    for candidate in candidates.values():  # they compile side by side
        candidate.send(do="prepare", work=work)
    ready = {name: candidate.answer() for name, candidate in candidates.items()}
    able = {name: candidates[name] for name, said in ready.items() if "skipped" not in said}
    rounds, steps = (2, 1) if report.options.quick else (ROUNDS, STEPS)
    times = {name: Times.of(found) for name, found in take_turns(able, rounds, steps).items()}
    for name, said in ready.items():
        row = _row(work, name, (QUICK if report.options.quick else SHAPES)[work], said)
        if name in times:
            row.timed(times[name], times.get("bf16"))
        elif name in able:
            row.skipped = "failed when its turn came"
        report.add(row)
        candidates[name].send(do="drop")
        candidates[name].answer()


def one_by_one(report: Report, candidates: Mapping[str, Asked]) -> None:
    """Rows of the whole model, which fill a GPU each."""
    base: Times | None = None
    loss: float | None = None
    for name, candidate in candidates.items():
        if name.startswith("te."):
            continue  # it has no way to convert transformers' model
        candidate.send(do="model", loss=loss)
        said = candidate.answer()
        row = _row("model", name, tuple(said.get("shape", ())), said)
        if "times" in said:
            times = Times(*said["times"])
            base = times if name == "bf16" else base
            loss = said["extra"]["losses"][0] if name == "bf16" else loss
            row.timed(times, base).tflops = said["tflops"]
            row.extra |= said["extra"]
        report.add(row)


def _row(work: str, name: str, shape: Sequence[int], said: Mapping[str, Any]) -> Row:
    package, version = library(name)
    row = Row(f"peers.{work}.{name}", tuple(shape), name, backend=package, ratio_of="bf16, compiled")
    row.mode = "compiled" if name == "bf16" or package == "torchao" else "eager"
    row.skipped, row.sqnr_db = said.get("skipped"), said.get("sqnr_db")
    row.extra = {"library": f"{package} {version}".strip()}
    return row


def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """The rows that were asked for, in one run."""
    report = Report(options, arguments)
    wanted = {
        work: [name for name in NAMES if report.wants(f"peers.{work}.{name}", f"peers.{work}") or name == "bf16"]
        for work in WORKS if report.wants_some(f"peers.{work}")
    }  # fmt: skip
    names = [name for name in NAMES if any(name in found for found in wanted.values())]
    absent = {name: why for name in names if (why := missing(name, options.device))}
    for work, found in wanted.items():
        for name in (name for name in found if name in absent and not (work == "model" and name.startswith("te."))):
            report.add(_row(work, name, (), {"skipped": absent[name]}))
    candidates = {name: Candidate(name, options) for name in names if name not in absent}
    try:
        for work, found in wanted.items():
            taking_part = {name: candidates[name] for name in found if name in candidates}
            in_turns(report, taking_part, work) if work != "model" else one_by_one(report, taking_part)
    finally:
        for candidate in candidates.values():
            candidate.end()
    return report.finish()


# ------------------------------------------------------------------------------------------------ a candidate's side


class Own:
    """A candidate's modules, in its process."""

    def __init__(self, name: str, device: str, quick: bool) -> None:
        self.name, self.device, self.quick = name, device, quick
        self.step: Callable[[], torch.Tensor] | None = None

    def prepare(self, work: str) -> dict[str, Any]:
        """Make the candidate of a work ready: its first result compared with bfloat16's, everything compiled."""
        shape = (QUICK if self.quick else SHAPES)[work]
        torch.manual_seed(0)
        plain, call, g = self._linear(shape) if work == "linear" else self._layer(shape)
        x = torch.randn(tuple(shape if work == "layer" else shape[:2]), **self._where).requires_grad_()
        with torch.no_grad():
            expected = call(plain, x)
        module = self._own(plain, work)
        self.step = functools.partial(self._step, module, call, x, g)
        first = self.step()
        if self.name.startswith("te."):  # parameters of its own
            off = 0.0 if bool(first.isfinite().all()) else 1.0
        else:
            off = float((first - expected).float().norm() / expected.float().norm())
        if not off < LARGEST:
            return {"skipped": f"differs: {off:.3f} of the norm of bfloat16's result"}
        del expected, first
        for _ in range(1 if self.quick else 6):
            self.step()
        self._wait()
        return {"sqnr_db": sqnr_db(off)}

    def time(self, steps: int) -> dict[str, Any]:
        """Milliseconds of a step, of some that follow one that is not timed."""
        assert self.step is not None
        self.step()
        self._wait()
        begin = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._wait()
        return {"ms": (time.perf_counter() - begin) / steps * 1e3}

    def drop(self) -> dict[str, Any]:
        """Give back what was prepared."""
        from benchmarks import model

        self.step = None
        torch.compiler.reset()  # else other sizes of a layer are compiled for any size
        model.clean(self.device)
        return {}

    def model(self, loss: float | None) -> dict[str, Any]:
        """The whole model's row; `loss`: the first one of bfloat16."""
        from benchmarks import model

        rows: list[Row] = []
        skips: list[str] = []
        options = argparse.Namespace(quick=self.quick, layers=12, batch=2, sequence=8192, device=self.device)
        bench = model.Bench(options)
        if loss is not None:
            bench.first_loss = loss
        name = f"{self.name}.compiled" if self.name == "bf16" or self.name.startswith("torchao") else self.name
        report: Any = SimpleNamespace(add=rows.append, skip=lambda _, why: skips.append(why))
        with tempfile.TemporaryDirectory() as folder:
            torch.distributed.init_process_group(
                "nccl" if self.device == "cuda" else "gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1
            )
            try:
                model.measure(report, bench, name, False)
            finally:
                torch.distributed.destroy_process_group()
                model.clean(self.device)
        if skips:
            return {"skipped": skips[0]}
        (row,) = rows
        times = row.median_ms, row.p10_ms, row.p90_ms
        return {"times": times, "tflops": row.tflops, "sqnr_db": row.sqnr_db, "extra": row.extra, "shape": row.shape}

    @property
    def _where(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": torch.bfloat16}

    def _linear(self, shape: Sequence[int]) -> tuple[nn.Module, Callable, torch.Tensor]:
        rows, width, out = shape
        plain = nn.Sequential(nn.Linear(width, out, bias=False, **self._where))
        return plain, lambda module, x: module(x), torch.randn(rows, out, **self._where)

    def _layer(self, shape: Sequence[int]) -> tuple[nn.Module, Callable, torch.Tensor]:
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

        width, tokens = shape[2], shape[1]
        heads, kv, hidden = (4, 2, 96) if self.quick else (32, 8, 14336)
        config = LlamaConfig(
            hidden_size=width, intermediate_size=hidden, num_hidden_layers=1, num_attention_heads=heads,
            num_key_value_heads=kv, max_position_embeddings=tokens, attn_implementation="sdpa",
        )  # fmt: skip
        rotary = LlamaRotaryEmbedding(config).to(self.device)
        positions = rotary(torch.empty(1, tokens, width, **self._where), torch.arange(tokens, device=self.device)[None])

        def call(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return module(x, **({"position_embeddings": positions} if isinstance(module, LlamaDecoderLayer) else {}))

        plain = LlamaDecoderLayer(config, 0).to(**self._where)
        return plain, call, torch.randn(tuple(shape), **self._where)

    def _own(self, plain: nn.Module, work: str) -> nn.Module:
        if self.name in RECIPES:
            import microfloat.torch as mf

            mf.convert(plain, RECIPES[self.name], fuse=work == "layer")
            return plain
        if self.name.startswith("te."):
            return self._te(work)
        module = _torchao.float8_training(plain, self.name.split(".")[1]) if self.name != "bf16" else plain
        module.compile(backend="inductor" if self.device == "cuda" else "aot_eager")
        return module

    def _te(self, work: str) -> nn.Module:
        import transformer_engine.pytorch as te  # type: ignore[import-not-found]

        place = {"params_dtype": torch.bfloat16, "device": self.device, "bias": False}
        if work == "linear":
            return te.Linear(SHAPES["linear"][1], SHAPES["linear"][2], **place)
        return te.TransformerLayer(
            4096, 14336, 32, num_gqa_groups=8, normalization="RMSNorm", activation="swiglu", hidden_dropout=0.0,
            attention_dropout=0.0, self_attn_mask_type="causal", attn_input_format="bshd", **place,
        )  # fmt: skip

    def _step(self, module: nn.Module, call: Callable, x: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        x.grad = None
        with self._scope():
            y = call(module, x)
        y.backward(g)
        return y.detach()

    def _scope(self) -> Any:
        if self.name.startswith("te."):
            import transformer_engine.pytorch as te  # type: ignore[import-not-found]
            from transformer_engine.common import recipe  # type: ignore[import-not-found]

            kinds = {"delayed": "DelayedScaling", "current": "Float8CurrentScaling", "block": "Float8BlockScaling"}
            return te.autocast(enabled=True, recipe=getattr(recipe, kinds[self.name.split(".")[1]])())
        if self.name == "delayed":  # its scales follow at the exit
            import microfloat.torch as mf

            return mf.autocast()
        return contextlib.nullcontext()

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def serve(own: Any, commands: Iterable[str], say: Callable[[str], Any]) -> None:
    """Answer every line of commands with a line; a failure is an answer too."""
    for line in commands:
        command = json.loads(line)
        try:
            answer = getattr(own, command.pop("do"))(**command)
        except Exception as error:
            traceback.print_exc(limit=-4)
            answer = {"skipped": f"failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        say(json.dumps(answer) + "\n")


def run_candidate(arguments: list[str]) -> None:
    """The process of one candidate; what libraries print goes to the error stream."""
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    name, device, *rest = arguments
    if "quick" in rest and device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    serve(Own(name, device, "quick" in rest), sys.stdin, lines.write)


if __name__ == "__main__":
    run_candidate(sys.argv[1:])
