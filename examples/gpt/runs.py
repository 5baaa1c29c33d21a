"""The parts without a framework: the loop over steps, interruptions, runs side by side, and the report."""

import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from gpt import report
from gpt.data import Corpus, load_corpus
from gpt.files import Arrays, check_writable, load_checkpoint, load_weights, save_arrays, save_checkpoint, save_model
from gpt.options import BASELINE, BASELINE_AGAIN, Options
from gpt.report import Result, Results
from gpt.stopping import SIGNALS, noted
from microfloat.errors import CheckpointError, MicrofloatError, invalid_value


class Training:
    """One run: the loop, and what is kept of it. A framework's Trainer makes the model and adds

    ``place_recipe()``, ``train_step() -> loss``, ``held_out_loss(tokens) -> loss``, ``weights() -> {name: array}``,
    ``operands(rows) -> {layer: {name: array}}``, ``prepare_cuda() -> what to say``; and ``dump() -> bytes`` and
    ``load(bytes)``, all that the rest of the run depends on.
    """

    writes = True  # the files and the console; of several processes that train one model, one does
    launcher: tuple[str, ...] | None = None  # what starts the script, if not this Python
    patience = 0.0  # seconds after a Ctrl-C in which another one is taken for the same

    @staticmethod
    def tells(error: MicrofloatError) -> bool:
        """True if this process is to print the error that ends it; of several that meet the same one, one is."""
        return True

    @staticmethod
    def first(function: Callable[[], None]) -> None:
        """Call it in the process that writes, before the others go on; all raise what it raises."""
        function()

    def __init__(self, name: str, options: Options, corpus: Corpus) -> None:
        self.name, self.recipe, self.options, self.corpus = name, options.runs[name], options, corpus
        self.step, self.result, self.file = 0, Result(), options.checkpoint(name)

    def first_weights(self, weights: Arrays) -> Arrays:
        """The weights to start from, in place of the model's own; writes --export-weights."""
        if self.options.initial_weights is not None:
            weights = load_weights(self.options.initial_weights, weights)
        if self.options.export_weights is not None and self.name == BASELINE and self.writes:
            save_arrays(self.options.export_weights, weights)
        if self.name == BASELINE_AGAIN:  # a bfloat16 has eight bits
            noise = np.random.default_rng(self.options.seed)
            factors = {name: 1 + 2**-8 * noise.uniform(-1, 1, array.shape) for name, array in weights.items()}
            weights = {name: (array * factors[name]).astype(np.float32) for name, array in weights.items()}
        return weights

    def train(self, stopped: Callable[[], Any], show: Callable[[tuple], None]) -> Result:
        """Train to the last step and evaluate, or until `stopped`; the checkpoint is written either way."""
        options, result = self.options, self.result
        show(self.progress())
        while self.step < options.steps and not stopped():
            started = time.perf_counter()
            if self.step == options.bf16_from_step:
                self.place_recipe()
            if self.step == options.bf16_from_step - 1:  # the last one that still runs the recipe
                result.underflow = report.underflow(self.operands(2048), self.recipe)
            if self.step == 0 and options.record is not None and self.name == [*options.runs][-1]:
                layers = self.operands(None)
                save_arrays(
                    options.record, {f"{layer}.{key}": layers[layer][key] for layer in layers for key in layers[layer]}
                )
            result.train_loss.append(self.train_step())
            self.step += 1
            result.seconds += time.perf_counter() - started
            show(self.progress())
            if self.step % options.checkpoint_every == 0 or self.step == options.steps:
                self.save()
        if self.step == options.steps:
            result.final_train = float(np.mean(result.train_loss[-max(1, options.steps // 10) :]))
            batches = self.corpus.held_out_batches(options.eval_windows, options.batch, options.context)
            losses = [self.held_out_loss(tokens_BT) for tokens_BT in batches]
            result.final_heldout = float(np.average(losses, weights=[len(tokens_BT) for tokens_BT in batches]))
            if options.export_model is not None and self.name == [*options.runs][-1]:
                sizes = {name: getattr(options, name) for name in ("dim", "layers", "heads", "hidden", "context")}
                weights = self.weights()
                if self.writes:
                    save_model(options.export_model, weights, {"model_type": "gpt_of_bytes", **sizes})
        self.save()
        return result

    def progress(self) -> tuple[str, int, float | None]:
        """The run's name, its steps so far, and the last one's loss: what the display shows."""
        return self.name, self.step, self.result.train_loss[-1] if self.result.train_loss else None

    def batch(self) -> np.ndarray:
        """The windows of this step."""
        return self.corpus.batch(self.options.seed, self.step, self.options.batch, self.options.context)

    def save(self) -> None:
        """Write the checkpoint; the data position is the step (gpt/data.py)."""
        settings = self.options.settings(self.name, self.corpus.digest)
        facts = {"settings": settings, "environment": report.environment(self.options), "step": self.step}
        state = self.dump()
        if self.writes:
            save_checkpoint(self.file, {**facts, "result": asdict(self.result)}, state)

    def restore(self) -> None:
        """Continue where the checkpoint was written."""
        facts, state = load_checkpoint(self.file)
        self.step, self.result = facts["step"], Result(**facts["result"])
        if self.step > self.options.bf16_from_step:  # at that very step the switch is still to come
            self.place_recipe()
        if not self.result.finished:
            self.load(state)


def train_run(kind: type, name: str, options: Options, corpus: Corpus, stopped: Any, show: Any) -> Result:
    """Train one run to its end, from its checkpoint if there is one, or until it is stopped."""
    trainer = kind(name, options, corpus)
    if trainer.file.exists():
        trainer.restore()
    if trainer.result.finished:
        show(trainer.progress())
        return trainer.result
    return trainer.train(stopped, show)


# A run of a small model spends its time in many short operations, which a second core hardly speeds up and a busy one
# slows down. So several runs share the cores, each in a process of its own and on one core.


def begin_worker(stop: Any, steps: Any) -> None:
    """Prepare a process that trains runs and sends its steps to the parent."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # a terminal sends Ctrl-C to all of them; the parent passes it on
    train_in_worker.callbacks = stop.is_set, steps.put  # type: ignore[attr-defined]


def train_in_worker(*run: Any) -> Result:
    """`train_run` in this process."""
    return train_run(*run, *train_in_worker.callbacks)  # type: ignore[attr-defined]


def train_side_by_side(kind: type, options: Options, corpus: Corpus, caught: list[int], show: Any) -> Results:
    """Train every run, `options.jobs` at a time."""
    spawn = multiprocessing.get_context("spawn")
    stop, steps = spawn.Event(), spawn.SimpleQueue()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes to come
    with ProcessPoolExecutor(options.jobs, spawn, begin_worker, (stop, steps)) as pool:
        # The baseline first, since all others are compared with it; then the last ones, which take longest.
        order = [name for name in options.runs if name == BASELINE]
        order += [name for name in reversed(options.runs) if name != BASELINE]
        runs = {name: pool.submit(train_in_worker, kind, name, options, corpus) for name in order}
        try:
            pending: Any = True
            while pending:
                done, pending = wait(runs.values(), 0.2, FIRST_EXCEPTION)
                while not steps.empty():
                    show(steps.get())
                if caught or any(run.exception() for run in done):
                    stop.set()
        finally:
            stop.set()
    try:
        return {name: runs[name].result() for name in options.runs}
    except BrokenProcessPool as error:
        raise MicrofloatError(f"--jobs {options.jobs}: a training process died. Try --jobs 1.") from error


def train_all(kind: Any, options: Options, corpus: Corpus, console: Console) -> tuple[Results, list[int]]:
    """Results of the runs that were begun, and the signal that stopped them, if any.

    The first Ctrl-C (or SIGTERM) is granted between two steps; the second one ends the process at once.
    """
    with (
        noted(console, kind.patience) as caught,
        report.Display([*options.runs], options.steps, options.batch * options.context, console) as display,
    ):
        if options.jobs > 1:
            results = train_side_by_side(kind, options, corpus, caught, display.show)
        else:
            runs = (name for name in options.runs if not caught)
            results = {name: train_run(kind, name, options, corpus, lambda: caught, display.show) for name in runs}
    return {name: result for name, result in results.items() if result.train_loss}, caught


def check_outputs(options: Options) -> None:
    """Raise InvalidValueError where a file of this run could not be written, before hours of training."""
    outputs = {"--out": options.folder / "results.json", "--record": options.record}
    for flag, path in {**outputs, "--export-weights": options.export_weights}.items():
        if path is not None:
            check_writable(flag, path)
    if options.export_model is not None and options.export_model.exists():
        raise invalid_value("--export-model", options.export_model, "a folder that does not exist yet")
    # A checkpoint holds the parameters and two moments of each until its run is done; one more is there while written.
    free, needed = shutil.disk_usage(options.folder).free, 4 * options.parameters * (len(options.runs) + 5)
    if free < needed:
        got = f"{str(options.folder)!r} ({free / 1e6:.1f} MB are free there)"
        raise invalid_value("--out", got, f"about {needed / 1e6:.1f} MB for its files")


def check_checkpoints(options: Options, corpus: Corpus, console: Console) -> None:
    """Set earlier checkpoints aside, or raise CheckpointError for one that --resume cannot use."""
    folder = options.folder / "checkpoints"
    if not options.resume and folder.exists():
        kept = folder.with_name("checkpoints.previous")
        shutil.rmtree(kept, ignore_errors=True)
        folder.rename(kept)
        console.print(f"Starting over (no --resume); the checkpoints of the earlier run are now in {kept}.")
    for name in options.runs:
        file, ours = options.checkpoint(name), options.settings(name, corpus.digest)
        if not file.exists():
            continue
        facts, _ = load_checkpoint(file)
        theirs = facts["settings"]
        differing = [f"{key} {theirs.get(key)!r} (now {ours[key]!r})" for key in ours if ours[key] != theirs.get(key)]
        if differing:
            raise CheckpointError(
                f"--resume: {file} was made with other settings: {', '.join(differing)}. Give the flags of that run, "
                f"or choose a new --name."
            )
        changed = report.describe_changes(facts["environment"], report.environment(options))
        if changed:
            console.print(f"{name}: the checkpoint was made with {changed}: last bits may differ.")


def compare(kind: Any, options: Options, console: Console) -> int:
    """Train every run and report. Returns the exit status: 0, or 128 + signal when it was stopped."""
    corpus = load_corpus(options.corpus_bytes)

    def check() -> None:
        check_outputs(options)
        check_checkpoints(options, corpus, console)

    kind.first(check)
    console.print(
        f"{options.parameters / 1e6:.2f} million parameters on {options.device}, {options.steps} steps of "
        f"{options.batch} x {options.context} bytes; text: {corpus.files} files of Python's standard library, "
        f"{len(corpus.train) / 1e6:.1f} MB to train on, {len(corpus.held_out) / 1e6:.1f} MB held out."
    )
    if options.last_fraction_bf16:
        console.print(
            f"In bf16 under every recipe: the last {options.last_fraction_bf16:.1%} of the {options.last_in}."
        )
    if options.device_type == "cuda":
        console.print(kind.prepare_cuda())
    results, caught = train_all(kind, options, corpus, console)
    complete = len(results) == len(options.runs) and all(result.finished for result in results.values())
    if kind.writes:
        report.write(options, corpus, results, complete, console)
    if complete or not caught:
        return 0
    again = command_to_resume(sys.argv, options.resume, kind.launcher)
    console.print(f"Stopped. To continue with the same losses: {again}", markup=False, soft_wrap=True)
    return 128 + caught[0]


def command_to_resume(arguments: list[str], resumed: bool, launcher: tuple[str, ...] | None = None) -> str:
    """The command line that continues this run, with the interpreter that runs it: `make demo` has one of its own."""
    python = Path(sys.executable)
    python = python.relative_to(Path.cwd()) if python.is_relative_to(Path.cwd()) else python
    return shlex.join([*(launcher or [str(python)]), *arguments, *([] if resumed else ["--resume"])])


def run_command(kind: Any, parse: Callable[[], Options]) -> int:
    """Run the command line; errors of the user's own become one message and exit status 2."""
    console = Console(quiet=not kind.writes)
    try:
        return compare(kind, parse(), console)
    except KeyboardInterrupt:
        console.print("Aborted. The last checkpoint that was written is whole.")
        return 128 + signal.SIGINT
    except MicrofloatError as error:
        Console(stderr=True, quiet=not kind.tells(error)).print(
            f"{kind.program}: {error}", style="red", markup=False, soft_wrap=True
        )
        return 2
