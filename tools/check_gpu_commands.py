"""Every command, every example and every page of the documentation on a machine with a GPU: what ran, and what did not.

    python tools/check_gpu_commands.py --out DIR                  # some eight minutes at most
    python tools/check_gpu_commands.py --out DIR --only bench     # chains whose names begin so; --list names all
    python tools/check_gpu_commands.py --out DIR --device cpu     # without pages, which tests/docs runs on a CPU

A chain is a list of commands that need each other, and chains run beside each other. A page is run twice: as it stands,
and with every tensor on the GPU (its default device, "cpu" read as "cuda", `numpy()` of a copy). A command that lacks a
package is left out by the package's name. Output goes to DIR/NAME.log, and DIR/check_gpu_commands.json says after every
command what it was, how it ended, on which machine and when. Nothing is installed: the sources beside this file are
used as they are. Exits with 1 if a command failed or there was no time for it.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tools")]

from check_gpus import Step, run  # noqa: E402

_LACKS = re.compile(r"needs the package (\w+), which is not installed|No module named '(\w+)'")
# Packages of others: a command without one of them is left out, a command without a part of this library fails.
_OPTIONAL = {
    "accelerate", "compressed_tensors", "equinox", "flax", "huggingface_hub", "jax", "lightning", "matplotlib",
    "optax", "peft", "rich", "safetensors", "transformers", "triton", "typer",
}  # fmt: skip
_STEPS, _LEFT_OUT = ("--steps", "20", "--eval-windows", "8"), "left out"


class Command(NamedTuple):
    """Arguments of Python, and the exit codes that are right."""

    arguments: tuple[str, ...]
    right: tuple[int, ...] = (0,)

    def __str__(self) -> str:
        return " ".join(["python", *self.arguments])


class Chain(NamedTuple):
    """Commands one after the other, and the seconds that they may take together."""

    seconds: int
    commands: tuple[Command, ...]


def pages() -> list[Path]:
    """README.md and the pages of docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def chains(out: Path, device: str) -> dict[str, Chain]:
    """Every chain by its name, those that take longest first."""

    def microfloat(*words: object, right: tuple[int, ...] = (0,)) -> Command:
        return Command(("-m", "microfloat", *map(str, words)), right)

    def example(name: str, *words: object, ranks: bool = False) -> Command:
        start = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1") if ranks else ()
        return Command((*start, f"examples/{name}.py", *map(str, words)))

    is_gpu = device != "cpu"
    shape = "4096x4096x4096" if is_gpu else "64x64x64"
    bench = ("bench", "--device", device, "--milliseconds", 1, "--shapes", shape)
    every = ("--formats", "delayed,fp8_current,fp8_row,fp8_block,mxfp8,mxfp6,mxfp4,nvfp4,nvfp4_row,mxfp6_e2m3")
    recipes = "fp8_current,mxfp8,nvfp4" if is_gpu else "mxfp8"
    model, made, train = out / "model", out / "made", out / "train"
    found = {
        "bench": Chain(240, (
            microfloat(*bench, *every, "--csv", out / "bench.csv", "--plot", out / "bench.png"),
            Command(("tools/check_gpu_commands.py", "--save", str(out / "bench.json"), *map(str, bench), "--json")),
            microfloat(*bench, "--baseline", out / "bench.json", "--tolerance", 900),
            *([microfloat("bench")] if is_gpu else []),
        )),
        "train_gpt": Chain(200, (
            example("train_gpt", *_STEPS, "--device", device, "--out", train, "--recipe", recipes, "--export-model",
                    out / "trained"),
            example("generate", train / "tiny" / "checkpoints" / "bf16.zip", "--bytes", 20, "--windows", 4),
            microfloat("inspect", out / "trained"),
            example("train_gpt", *_STEPS, "--device", device, "--out", out / "watched", "--recipe", "delayed",
                    "--watch", 10),
            *([example("train_gpt", *_STEPS, "--device", device, "--out", out / "compiled", "--recipe", "mxfp8",
                       "--compile")] if is_gpu else []),
        )),
        "train_fsdp": Chain(200, (
            example("train_fsdp", *_STEPS, "--out", out / "fsdp", "--recipe", "fp8_current", ranks=True),
        )),
        "train_gpt_jax": Chain(240, (
            example("train_gpt_jax", "--steps", 4, "--eval-windows", 4, "--out", out / "jax", "--recipe", "mxfp8"),
        )),
        "doctor": Chain(120, (
            microfloat("doctor"), microfloat("doctor", "--check", "--device", "cuda" if is_gpu else "cpu"),
            microfloat("doctor", "--check"), microfloat("doctor", "--json"), microfloat("doctor", "--device", "b200"),
        )),
        "formats": Chain(60, (
            microfloat("formats"), microfloat("formats", "nvfp4", "--plot", out / "formats.png"),
            microfloat("formats", "encode", "0.3", "--as", "e2m1"),
        )),
        "files": Chain(120, (
            Command(("tools/check_gpu_commands.py", "--folder", str(model))),
            microfloat("inspect", model, "--plot", out / "inspect.png"),
            microfloat("convert", model, made, "--to", "ct:nvfp4"),
            microfloat("inspect", made), microfloat("diff", model, made, "--plot", out / "diff.png"),
            microfloat("plan", model, "--bits", 6, "--out", out / "plan.json"),
        )),
        "equinox_linear": Chain(120, (example("equinox_linear"),)),
        "lightning_recipe": Chain(120, (example("lightning_recipe"),)),
        "study": Chain(120, (
            example("study", "run", "--size", "seconds", "--rows", "bf16,nvfp4", "--seeds", "0", "--out", out / "study",
                    "--workers", "0" if is_gpu else "cpu", "--keep", "bf16"),
            example("post_training", out / "study" / "bf16.0.safetensors", "--tokens", "64", "--batch", "2"),
        )),
    }  # fmt: skip
    for page in pages() if is_gpu else ():
        for form in ("stands", "gpu"):
            command = Command(("tools/check_gpu_commands.py", "--page", str(page.relative_to(ROOT)), "--form", form))
            found[f"page {page.stem} {form}"] = Chain(150, (command,))
    return found


# ---- a page, a folder, the output of a command


def run_page(page: Path, form: str) -> int:
    """Run the blocks of a page in one namespace; 1 if one has failed, 3 if all others lack a package."""
    from tests.docs.code_blocks import code_blocks

    if form == "gpu":
        import torch

        torch.set_default_device("cuda")
        numpy = torch.Tensor.numpy
        torch.Tensor.numpy = lambda x, **options: numpy(x.cpu(), **options)  # type: ignore[method-assign]
    if "distributed" in page.name:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    failed, ran, lacking = [], 0, set()
    for block in code_blocks(page, "python"):
        if "no-run" in block.info and "needs a CUDA device" not in block.source:
            print(f"{page.name}:{block.line}: {block.source.splitlines()[0]}")
            continue
        is_jax = "jax" in block.source
        source = block.padded.replace('"cpu"', '"cuda"') if form == "gpu" and not is_jax else block.padded
        try:
            exec(compile(source, str(page), "exec"), namespace)
            ran += 1
        except ModuleNotFoundError as error:
            lacking.add(str(error.name))
            print(f"{page.name}:{block.line}: No module named '{error.name}'")
        except Exception:
            if lacking:
                print(f"{page.name}:{block.line}: after a block that lacks a package")
                continue
            failed.append(block.line)
            traceback.print_exc()
    print(f"{page.name}, form {form}: {ran} blocks ran, failed at lines {failed}, lacking {sorted(lacking)}")
    return 1 if failed else 3 if lacking and not ran else 0


def save_output(file: Path, words: list[str]) -> int:
    """Run a command and write what it prints to a file, as a shell would."""
    from microfloat.cli import main as command

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        command(words)
    file.write_text(printed.getvalue())
    return int(not printed.getvalue())


def make_folder(folder: Path) -> int:
    """A tiny checkpoint, of a Llama."""
    from tests.cli.checkpoints import llama

    folder.mkdir(parents=True)
    llama(folder)
    return 0


# ---- running


def machine_of(device: str) -> dict[str, Any]:
    """The GPU, or the processor; versions."""
    from microfloat.cli import machine

    gpus = machine.gpus()
    name = gpus[0]["name"] if gpus and device != "cpu" else machine.processor()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    versions = machine.versions("torch", "triton", "jax", "flax", "numpy", "transformers")
    return {"machine": name, "device": device, "commit": commit.stdout.strip() or None, "versions": versions}


def outcome_of(ended: str, right: tuple[int, ...], said: str) -> str:
    """The outcome of a command in words, by how its process ended and what it printed."""
    status = 0 if ended == "passed" else int(ended.rpartition(" ")[2]) if "status" in ended else None
    if status in right:
        return "passed"
    lacks = [name for pair in _LACKS.findall(said) for name in pair if name in _OPTIONAL]
    if status is not None and lacks:
        return f"{_LEFT_OUT}: {lacks[-1]} is not installed"
    return ended


def main(arguments: list[str] | None = None) -> int:
    """Run the chains; 1 if a command has failed or had no time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_commands"), help="folder for logs and JSON")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=7.5, help="time for everything")
    parser.add_argument("--together", type=int, default=5, help="chains at a time")
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="chains whose names begin so")
    parser.add_argument("--list", action="store_true", help="name the commands, and end")
    parser.add_argument("--page", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--form", choices=("stands", "gpu"), default="stands", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--save", type=Path, help=argparse.SUPPRESS)
    options, words = parser.parse_known_args(arguments)
    if options.save is not None:
        return save_output(options.save, _after(words, options))
    if options.page is not None:
        return run_page(ROOT / options.page, options.form)
    if options.folder is not None:
        return make_folder(options.folder)
    out = options.out.resolve()
    every = chains(out, options.device)
    chosen = {name: chain for name, chain in every.items() if name.startswith(tuple(options.only) or "")}
    if options.list or not chosen:
        print("\n".join(f"{name}: {one}" for name, chain in every.items() for one in chain.commands))
        return int(not chosen)
    return _run_all(chosen, out, options)


def _run_all(chosen: dict[str, Chain], out: Path, options: argparse.Namespace) -> int:
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other chains use the GPU too
    document = machine_of(options.device) | {
        "command": " ".join(["python", "tools/check_gpu_commands.py", *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commands": [],
    }  # fmt: skip
    until, writing = time.monotonic() + 60 * options.minutes, threading.Lock()

    def check(name: str) -> None:
        chain, broken = chosen[name], ""
        end = min(until, time.monotonic() + chain.seconds)
        for number, command in enumerate(chain.commands):
            log, left = out / f"{name.replace(' ', '_')}_{number}.log", end - time.monotonic()
            row = {"chain": name, "command": str(command).replace(str(out), "DIR"), "seconds": 0.0}
            if broken or left < 5:
                row["outcome"] = f"{_LEFT_OUT}: {broken}" if broken else "no time"
            else:
                ended, seconds = run(Step(int(left), command.arguments), log, left)
                said = log.read_text(errors="replace")
                row |= {"seconds": round(seconds, 1), "outcome": outcome_of(ended, command.right, said)}
                if row["outcome"] != "passed":
                    row["end"] = said[-2500:].replace(str(out), "DIR").replace(str(ROOT), "ROOT")
            if row["outcome"] != "passed" and not broken and "files" in name:
                broken = f"the command before it: {row['outcome']}"
            print(f"{name}: {row['outcome']}, {row['seconds']:.0f} s: {row['command'][:110]}", flush=True)
            with writing:
                document["commands"].append(row)
                (out / "check_gpu_commands.json").write_text(json.dumps(document, indent=1) + "\n")

    with concurrent.futures.ThreadPoolExecutor(options.together) as pool:
        list(pool.map(check, chosen))
    outcomes = [row["outcome"] for row in document["commands"]]
    bad = [outcome for outcome in outcomes if outcome != "passed" and not outcome.startswith(_LEFT_OUT)]
    left = [outcome for outcome in outcomes if outcome.startswith(_LEFT_OUT)]
    print(
        f"{outcomes.count('passed')} passed, {len(bad)} failed, {len(left)} left out; {out / 'check_gpu_commands.json'}"
    )
    return int(bool(bad))


def _after(words: list[str], options: argparse.Namespace) -> list[str]:
    """The words of a command, with those that this program's own parser has taken."""
    return [*words[:1], "--device", options.device, *words[1:]]


if __name__ == "__main__":
    sys.exit(main())
