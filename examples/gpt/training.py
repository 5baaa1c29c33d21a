"""What no framework has a part in: the loop over steps, interruptions, when to save, all runs, the report."""

import abc
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
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.progress import Progress, TaskID

from gpt import report
from gpt.data import Corpus, CorpusError, load_corpus
from gpt.files import check_writable
from gpt.options import Options, Run
from gpt.side_by_side import train_side_by_side
from microfloat.errors import CheckpointError, MicrofloatError

__all__ = ["StopRequest", "Training", "compare", "run_command"]


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


class Training(abc.ABC):
    """One run: step number, result, and the loop; a framework's subclass has the model and the optimizer."""

    suffix: ClassVar[str]

    def __init__(self, run: Run, options: Options, corpus: Corpus) -> None:
        self.run, self.options, self.corpus = run, options, corpus
        self.step = 0
        self.result = report.Result()

    def train(self, stop: StopRequest, checkpoint: Path, on_step: Callable[["Training"], None]) -> bool:
        """Train to the last step and evaluate. False when `stop` came first; the checkpoint is written either way."""
        options = self.options
        while self.step < options.steps:
            if stop.signal is not None:
                self.save(checkpoint)
                return False
            if self.step == options.bf16_from_step:
                self.place_recipe()
            started = time.perf_counter()
            self.result.train_loss.append(self._train_step())
            self.step += 1
            self.result.seconds += time.perf_counter() - started
            on_step(self)
            if self.step % options.checkpoint_every == 0 or self.step == options.steps:
                self.save(checkpoint)
        self.result.finish(self.evaluate())
        self.save(checkpoint)
        return True

    def batch(self) -> np.ndarray:
        """The windows of this step."""
        options = self.options
        return self.corpus.batch(options.seed, self.step, options.batch, options.shape.context)

    def evaluate(self) -> float:
        """Mean loss over the held-out windows, computed the way the model was trained to the end."""
        options = self.options
        batches = self.corpus.held_out_batches(options.eval_windows, options.batch, options.shape.context)
        total = sum(self.held_out_loss(tokens_BT) * len(tokens_BT) for tokens_BT in batches)
        return total / sum(len(tokens_BT) for tokens_BT in batches)

    @property
    def measuring(self) -> bool:
        """Whether this is the last step that still runs the recipe: the one that the report is about."""
        return self.step == self.options.bf16_from_step - 1

    @property
    def recording(self) -> bool:
        """Whether --record wants this step: the first one of the last run."""
        return self.options.record is not None and self.step == 0 and self.run is self.options.runs[-1]

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak."""
        options, warmup = self.options, self.options.warmup_steps
        if step < warmup:
            return options.lr * (step + 1) / warmup
        progress = (step - warmup) / max(1, options.steps - warmup)
        return options.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))

    def facts(self) -> dict[str, Any]:
        """What every checkpoint holds besides model and optimizer; the data position is the step (gpt/data.py)."""
        return {
            "settings": settings_of(self.run, self.options, self.corpus),
            "environment": self.environment(),
            "step": self.step,
            "result": dataclasses.asdict(self.result),
        }

    # ------------------------------------------------------------------------------- a framework's part

    @abc.abstractmethod
    def place_recipe(self) -> None:
        """Give the blocks' linear layers the recipe, or take it away again from `Options.bf16_from_step` on."""

    @abc.abstractmethod
    def _train_step(self) -> float:
        """One optimizer step on `batch`; returns its loss."""

    @abc.abstractmethod
    def held_out_loss(self, tokens_BT: np.ndarray) -> float:
        """The mean loss of a batch, without a gradient."""

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Write a checkpoint: `facts`, model, optimizer, random generators."""

    @abc.abstractmethod
    def restore(self, state: dict) -> None:
        """Continue where `state`, which `load` returned, was taken."""

    @staticmethod
    @abc.abstractmethod
    def load(path: Path) -> dict:
        """Read a checkpoint; CheckpointError for one that is damaged."""

    @staticmethod
    @abc.abstractmethod
    def prepare(options: Options, console: Console) -> int:
        """Set the framework up for these options; returns the number of parameters of the model."""

    @staticmethod
    @abc.abstractmethod
    def environment() -> dict[str, Any]:
        """What the last bits of a sum may depend on, besides the settings."""

    @staticmethod
    @abc.abstractmethod
    def machine(options: Options) -> dict[str, Any]:
        """What the run ran on: `report.machine`."""

    @staticmethod
    @abc.abstractmethod
    def versions() -> dict[str, str]:
        """Versions of what computes: `report.versions`."""


# ----------------------------------------------------------------------------- all runs and the report


def compare(options: Options, console: Console, kind: type[Training]) -> int:
    """Train every run in turn and report. Returns the exit status: 0, or 128 + signal when it was stopped."""
    corpus = load_corpus(options.corpus_bytes)
    parameters = kind.prepare(options, console)
    check_outputs(options, parameters)
    introduce(options, corpus, console, parameters)
    results: dict[str, report.Result] = {}
    files = {run.name: options.folder / "checkpoints" / f"{run.name}{kind.suffix}" for run in options.runs}
    if not options.resume:
        set_aside(options.folder / "checkpoints", console)
    for run in options.runs:
        if files[run.name].exists():  # all of them now: an unusable one must not show up after hours of training
            check_settings(kind.load(files[run.name]), files[run.name], settings_of(run, options, corpus))
    with StopRequest() as stop:
        with report.make_progress(console) as progress:
            blank = {"total": options.steps, "start": False, "loss": "", "speed": ""}
            bars = {run.name: Bar(progress, progress.add_task(run.name, **blank), options) for run in options.runs}
            if options.jobs > 1:
                results = train_side_by_side(
                    train_run, kind, options, files, stop, lambda name, *state: bars[name].show(*state), console.print
                )
            else:
                for run in options.runs:
                    show = bars[run.name].show
                    results[run.name] = train_run(
                        kind, run, options, corpus, files[run.name], stop, show, console.print
                    )
                    if not results[run.name].finished:
                        break
        write_report(options, corpus, results, console, kind)
    if stop.signal is None or is_complete(options, results):
        return 0
    again = command_to_resume(sys.argv, options.resume)
    console.print(f"Stopped. To continue with the same losses: {again}", markup=False, soft_wrap=True)
    return 128 + stop.signal


def train_run(
    kind: type[Training], run: Run, options: Options, corpus: Corpus, file: Path, stop: Any,
    show: Callable[[int, float | None], None], say: Callable[[str], None],
) -> report.Result:  # fmt: skip
    """Train one run to its end, from its checkpoint if there is one, or until `stop` has a signal."""
    trainer = kind(run, options, corpus)
    if file.exists():
        state = kind.load(file)
        trainer.restore(state)
        remark_on_environment(state["environment"], trainer, say)
    show(trainer.step, None)
    if not trainer.result.finished:
        trainer.train(stop, file, lambda trainer: show(trainer.step, trainer.result.train_loss[-1]))
    return trainer.result


def is_complete(options: Options, results: dict[str, report.Result]) -> bool:
    """True if every run has finished."""
    return len(results) == len(options.runs) and all(result.finished for result in results.values())


def check_outputs(options: Options, parameters: int) -> None:
    """Raise InvalidValueError where a file of this run could not be written, before hours of training."""
    # A checkpoint holds the parameters and two moments of each until its run is done; one more is there while written.
    check_writable("--out", options.folder / "results.json", 4 * parameters * (len(options.runs) + 5))
    for flag, path in (("--export-weights", options.export_weights), ("--record", options.record)):
        if path is not None:
            check_writable(flag, path)


def command_to_resume(arguments: list[str], resumed: bool) -> str:
    """The command line that continues this run, with the interpreter that runs it: `make demo` has one of its own."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), *arguments, *([] if resumed else ["--resume"])])


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


def remark_on_environment(theirs: dict, trainer: Training, say: Callable[[str], None]) -> None:
    """Say so when a checkpoint comes from an environment in which the losses may differ in their last bits."""
    ours = trainer.environment()
    if theirs != ours:
        say(f"{trainer.run.name}: the checkpoint was made under {theirs}, this is {ours}: last bits may differ.")


def introduce(options: Options, corpus: Corpus, console: Console, parameters: int) -> None:
    """Say what will happen."""
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


class Bar:
    """One run's line of the progress display."""

    def __init__(self, progress: Progress, task: TaskID, options: Options) -> None:
        self._progress, self._task = progress, task
        self._tokens = options.batch * options.shape.context
        self._started = self._first = 0.0

    def show(self, step: int, loss: float | None) -> None:
        """Show that `step` steps are done; without a loss, that the run begins there."""
        if loss is None:
            self._started, self._first = time.perf_counter(), step
            self._progress.start_task(self._task)
            self._progress.update(self._task, completed=step)
            return
        speed = (step - self._first) * self._tokens / (time.perf_counter() - self._started)
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=f"{speed:,.0f}")


def write_report(
    options: Options, corpus: Corpus, results: dict[str, report.Result], console: Console, kind: type[Training]
) -> None:
    """The table, the picture and results.json, of whatever there is so far."""
    complete = is_complete(options, results)
    title = f"{options.preset}, {options.steps} steps" + ("" if complete else " (not finished)")
    report.write_results(
        options.folder / "results.json",
        results,
        complete=complete,
        config={**options.settings(), "runs": {run.name: repr(run.recipe) for run in options.runs}},
        corpus={"files": corpus.files, "train_bytes": len(corpus.train), "held_out_bytes": len(corpus.held_out),
                "sha256": corpus.digest},
        machine=kind.machine(options),
        versions=kind.versions(),
    )  # fmt: skip
    report.draw_curves(options.folder / "loss_curves.png", results, title)
    console.print(report.make_table(results, title))
    console.print(f"Written: {options.folder / 'loss_curves.png'}, {options.folder / 'results.json'}")


def run_command(
    program: str, parse: Callable[[list[str] | None], Options], kind: type[Training], arguments: list[str] | None
) -> int:
    """Run the command line; errors of the user's own become one message and exit status 2."""
    console = Console()
    try:
        return compare(parse(arguments), console, kind)
    except KeyboardInterrupt:
        console.print("Aborted. The last checkpoint that was written is whole.")
        return 128 + signal.SIGINT
    except (MicrofloatError, CorpusError) as error:
        Console(stderr=True).print(f"{program}: {error}", style="red", markup=False, soft_wrap=True)
        return 2
