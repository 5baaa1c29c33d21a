"""Train a small transformer in bf16 and again under low-precision recipes, and see what each recipe costs.

    python examples/train_gpt.py                                     # bf16, fp8_current, mxfp8, nvfp4: three minutes
    python examples/train_gpt.py --recipe nvfp4,mxfp4 --steps 500
    python examples/train_gpt.py --ablate rht,sr,2d                  # NVFP4 without one of its aids each
    python examples/train_gpt.py --recipe nvfp4 --last-fraction-bf16 0.15
    python examples/train_gpt.py --recipe bf16_again,mxfp8           # is a gap more than chance?
    python examples/train_gpt.py --preset 124m --device cuda
    python examples/train_gpt.py --resume                            # after Ctrl-C: the same losses, bit for bit

The text is the running Python's own standard library, byte by byte (gpt/data.py): nothing is downloaded. Every run
starts from the same seed and sees the same batches. Parameters and optimizer are float32 and everything computes under
``torch.autocast(bfloat16)``; a recipe then quantizes the operands of the block's matrix products, and nothing else
differs: `Trainer.place_recipe` is all that turns a bf16 training into a low-precision one.

Results: a table, runs/NAME/loss_curves.png and runs/NAME/results.json.
"""

import os

# torch's OpenMP threads wait for each other by spinning. On cores that something else also uses, the default (read when
# torch is imported) makes a step tens of times slower; a short spin costs nothing where the cores are free.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import contextlib
import dataclasses
import math
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch
from gpt import report
from gpt.checkpointing import generator_states, load_checkpoint, restore_generators, save_checkpoint
from gpt.data import Corpus, CorpusError, load_corpus
from gpt.model import GPT
from gpt.options import Options, Run, parse_options
from gpt.underflow import measure_underflow
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

import microfloat.torch as mf
from microfloat.errors import CheckpointError, MicrofloatError
from microfloat.recipes import Placement, Recipe


class StopRequest:
    """Turns the first Ctrl-C (or SIGTERM) into a wish that is granted between two steps; the second one is final."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number


class Trainer:
    """One run: model, optimizer, step number and result; all of it goes into a checkpoint and comes back."""

    def __init__(self, run: Run, options: Options, corpus: Corpus) -> None:
        self.run, self.options, self.corpus = run, options, corpus
        self.step = 0
        self.result = report.Result()
        torch.manual_seed(options.seed)
        self.model = GPT(options.shape)
        if run.disturbed:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(1 + 2**-8 * (2 * torch.rand_like(parameter) - 1))  # a bfloat16 has eight bits
        self.model.to(options.device)
        self.place_recipe()
        self.optimizer = self._make_optimizer()

    # -------------------------------------------------------------------------------- what microfloat does

    def place_recipe(self) -> None:
        """Swap the blocks' nn.Linear for quantized ones (`lm_head` stays, by convert's own rule), or back again.

        Parameters are shared with the layers they came from, so the optimizer never notices.
        """
        if self.run.recipe is None:
            return
        if self.step >= self.options.bf16_from_step:
            mf.revert(self.model)
        elif self.options.bf16_blocks:
            rules = [(f"blocks.{index}.*", None) for index in self.options.bf16_blocks]
            mf.convert(self.model, Placement([*rules, ("blocks.*", self.run.recipe)]))
        else:
            mf.convert(self.model, self.run.recipe)

    def loss(self, tokens_BT: Tensor) -> Tensor:
        """The mean loss of a batch. x and w are bfloat16 before they are quantized; parameters stay float32.

        The converted layers have their recipe pinned; entering `mf.autocast` marks the steps of delayed scaling.
        """
        recipe = self.run.recipe
        with torch.autocast(self.options.device.type, torch.bfloat16), mf.autocast(recipe is not None, recipe):
            return self.model.loss(tokens_BT.to(self.options.device))

    def quantized_layers(self) -> dict[nn.Module, Recipe | None]:
        """The layers whose operands the report is about; the same ones in the baseline, where they round to bf16."""
        skipped = self.options.bf16_blocks
        blocks = (block for index, block in enumerate(self.model.blocks) if index not in skipped)
        return {layer: self.run.recipe for block in blocks for layer in block.modules() if isinstance(layer, nn.Linear)}

    # ----------------------------------------------------------------------------------- ordinary training

    def train(self, stop: StopRequest, checkpoint: Path, on_step: Callable[["Trainer"], None]) -> bool:
        """Train to the last step and evaluate. False when `stop` came first; the checkpoint is written either way."""
        options = self.options
        while self.step < options.steps:
            if stop.signal is not None:
                save_checkpoint(checkpoint, self.state())
                return False
            if self.step == options.bf16_from_step:
                self.place_recipe()
            started = time.perf_counter()
            self.result.train_loss.append(self._train_step())
            self.step += 1
            self.result.seconds += time.perf_counter() - started
            on_step(self)
            if self.step % options.checkpoint_every == 0 or self.step == options.steps:
                save_checkpoint(checkpoint, self.state())
        self.result.finish(self.evaluate())
        save_checkpoint(checkpoint, self.state())
        return True

    def _train_step(self) -> float:
        options = self.options
        tokens_BT = self.corpus.batch(options.seed, self.step, options.batch, options.shape.context)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        # The last step that still runs the recipe is the one the report is about.
        measuring = self.step == options.bf16_from_step - 1
        with contextlib.ExitStack() as stack:
            underflow = stack.enter_context(measure_underflow(self.quantized_layers())) if measuring else None
            loss = self.loss(tokens_BT)
            loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if underflow is not None:
            self.result.underflow = underflow.fractions()
        return loss.item()

    def evaluate(self) -> float:
        """Mean loss over the held-out windows, computed the way the model was trained to the end."""
        options = self.options
        batches = self.corpus.held_out_batches(options.eval_windows, options.batch, options.shape.context)
        self.model.eval()
        with torch.no_grad():
            total = sum(self.loss(tokens_BT).item() * len(tokens_BT) for tokens_BT in batches)
        self.model.train()
        return total / sum(len(tokens_BT) for tokens_BT in batches)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        """AdamW; weight decay on matrices only."""
        parameters = list(self.model.parameters())
        groups = [
            {"params": [parameter for parameter in parameters if parameter.dim() >= 2]},
            {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, self.options.lr, betas=(0.9, 0.95), weight_decay=self.options.weight_decay)

    def _learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak."""
        options, warmup = self.options, self.options.warmup_steps
        if self.step < warmup:
            return options.lr * (self.step + 1) / warmup
        progress = (self.step - warmup) / max(1, options.steps - warmup)
        return options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    # ----------------------------------------------------------------------------------------- checkpoints

    def state(self) -> dict:
        """Everything that the rest of the run depends on; the data position is the step (gpt/data.py)."""
        return {
            "settings": settings_of(self.run, self.options, self.corpus),
            "environment": environment(),
            "step": self.step,
            "result": dataclasses.asdict(self.result),
            "model": self.model.state_dict(),  # delayed scaling keeps its scales and histories here
            "optimizer": None if self.result.finished else self.optimizer.state_dict(),
            "generators": generator_states(self.options.device),
        }

    def restore(self, state: dict) -> None:
        """Continue where `state` was taken."""
        self.step, self.result = state["step"], report.Result(**state["result"])
        if self.result.finished:
            return
        if self.step > self.options.bf16_from_step:  # at that very step the switch is still to come
            self.place_recipe()
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        restore_generators(state["generators"], self.options.device)


# ----------------------------------------------------------------------------- all runs and the report


def compare(options: Options, console: Console) -> int:
    """Train every run in turn and report. Returns the exit status: 0, or 128 + signal when it was stopped."""
    corpus = load_corpus(options.corpus_bytes)
    introduce(options, corpus, console)
    results: dict[str, report.Result] = {}
    files = {run.name: options.folder / "checkpoints" / f"{run.name}.pt" for run in options.runs}
    if not options.resume:
        set_aside(options.folder / "checkpoints", console)
    for run in options.runs:
        if files[run.name].exists():  # all of them now: an unusable one must not show up after hours of training
            check_settings(load_checkpoint(files[run.name]), files[run.name], settings_of(run, options, corpus))
    with StopRequest() as stop:
        with report.make_progress(console) as progress:
            blank = {"total": options.steps, "start": False, "loss": "", "speed": ""}
            bars = [progress.add_task(run.name, **blank) for run in options.runs]
            for run, bar in zip(options.runs, bars, strict=True):
                trainer = Trainer(run, options, corpus)
                if files[run.name].exists():
                    state = load_checkpoint(files[run.name])
                    trainer.restore(state)
                    remark_on_environment(state["environment"], run, console)
                results[run.name] = trainer.result
                show = show_in(progress, bar, trainer)
                if not trainer.result.finished and not trainer.train(stop, files[run.name], show):
                    break
        write_report(options, corpus, results, console)
    if stop.signal is None or trainer.result.finished:
        return 0
    again = shlex.join([*sys.argv, *([] if options.resume else ["--resume"])])
    console.print(f"Stopped. To continue with the same losses: python {again}", markup=False, soft_wrap=True)
    return 128 + stop.signal


def set_aside(checkpoints: Path, console: Console) -> None:
    """Move the checkpoints of an earlier run out of the way of a new one; only one generation is kept."""
    if checkpoints.exists():
        kept = checkpoints.with_name("checkpoints.previous")
        shutil.rmtree(kept, ignore_errors=True)
        checkpoints.rename(kept)
        console.print(f"Starting over (no --resume); the checkpoints of the earlier run are now in {kept}.")


def settings_of(run: Run, options: Options, corpus: Corpus) -> dict:
    """What must be equal for a resumed run to end with the same losses."""
    return {**options.settings(), "recipe": run.recipe and run.recipe.to_dict(), "corpus": corpus.digest}


def check_settings(state: dict, file: Path, ours: dict) -> None:
    """Raise CheckpointError when a checkpoint belongs to a run with other settings."""
    theirs = state["settings"]
    differing = [f"{key} {theirs.get(key)!r} (now {ours[key]!r})" for key in ours if ours[key] != theirs.get(key)]
    if differing:
        raise CheckpointError(
            f"--resume: {file} was made with other settings: {', '.join(differing)}. Give the flags of that run, or "
            f"choose a new --name."
        )


def environment() -> dict:
    """What the last bits of a sum may depend on, besides the settings."""
    return {"torch": str(torch.__version__), "threads": torch.get_num_threads()}


def remark_on_environment(theirs: dict, run: Run, console: Console) -> None:
    """Say so when a checkpoint comes from an environment in which the losses may differ in their last bits."""
    if theirs != environment():
        console.print(
            f"{run.name}: the checkpoint was made under {theirs}, this is {environment()}: last bits may differ."
        )


def introduce(options: Options, corpus: Corpus, console: Console) -> None:
    """Say what will happen; on CUDA also switch on torch's deterministic algorithms, which --resume needs."""
    parameters = GPT(options.shape).parameter_count()
    console.print(
        f"{parameters / 1e6:.2f} million parameters on {options.device}, {options.steps} steps of "
        f"{options.batch} x {options.shape.context} bytes; text: {corpus.files} files of Python's standard library, "
        f"{len(corpus.train) / 1e6:.1f} MB to train on, {len(corpus.held_out) / 1e6:.1f} MB held out."
    )
    if options.last_fraction_bf16:
        part = (
            f"steps {options.bf16_from_step + 1} to {options.steps}"
            if options.last_in == "steps"
            else f"blocks {', '.join(map(str, options.bf16_blocks))}"
        )
        console.print(f"In bf16 under every recipe: {part}.")
    if options.device.type == "cuda":
        # cuBLAS reads this when its first handle is made.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs bandwidth
        console.print("torch's deterministic algorithms are on, so that --resume gives the same losses bit for bit.")


def show_in(progress: Progress, bar: int, trainer: Trainer) -> Callable[[Trainer], None]:
    """A callback that keeps one bar of the progress display up to date."""
    progress.start_task(bar)
    progress.update(bar, completed=trainer.step)
    started, first = time.perf_counter(), trainer.step
    tokens = trainer.options.batch * trainer.options.shape.context

    def show(trainer: Trainer) -> None:
        speed = (trainer.step - first) * tokens / (time.perf_counter() - started)
        loss = trainer.result.train_loss[-1]
        progress.update(bar, completed=trainer.step, loss=f"{loss:.3f}", speed=f"{speed:,.0f}")

    return show


def write_report(options: Options, corpus: Corpus, results: dict[str, report.Result], console: Console) -> None:
    """The table, the picture and results.json, of whatever there is so far."""
    complete = len(results) == len(options.runs) and all(result.finished for result in results.values())
    title = f"{options.preset}, {options.steps} steps" + ("" if complete else " (not finished)")
    report.write_results(
        options.folder / "results.json",
        results,
        complete=complete,
        config={**options.settings(), "runs": {run.name: repr(run.recipe) for run in options.runs}},
        corpus={"files": corpus.files, "train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out),
                "sha256": corpus.digest},
        machine=report.machine(options.device),
        versions=report.versions(),
    )  # fmt: skip
    report.draw_curves(options.folder / "loss_curves.png", results, title)
    console.print(report.make_table(results, title))
    console.print(f"Written: {options.folder / 'loss_curves.png'}, {options.folder / 'results.json'}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; errors of the user's own become one message and exit status 2."""
    console = Console()
    try:
        return compare(parse_options(arguments), console)
    except KeyboardInterrupt:
        console.print("Aborted. The last checkpoint that was written is whole.")
        return 128 + signal.SIGINT
    except (MicrofloatError, CorpusError) as error:
        Console(stderr=True).print(f"train_gpt.py: {error}", style="red", markup=False, soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
