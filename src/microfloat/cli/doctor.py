"""`microfloat doctor`: installed packages, the recipes that run here on which hardware, and a check of results."""

import importlib
import re
from dataclasses import asdict
from types import ModuleType
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from microfloat import recipes, reference
from microfloat.chips import chip_named
from microfloat.cli.machine import LARGEST_DIFFERENCE, PACKAGES, gpus, versions
from microfloat.cli.output import Column, Output
from microfloat.errors import InvalidValueError, MicrofloatError, NotSupportedError, install_hint, invalid_value
from microfloat.recipes import Cast, Gemm, from_name
from microfloat.support import Support

_FRONT_ENDS = ("torch", "jax")


class Place(NamedTuple):
    """A backend of a front end: the table's columns."""

    front_end: str
    backend: str


PLACES = (
    Place("torch", "native"), Place("torch", "triton"), Place("torch", "reference"),
    Place("jax", "native"), Place("jax", "reference"), Place("numpy", "reference"),
)  # fmt: skip
RECIPES = tuple(recipes.RECIPES)
_COLOURS = {"fast": "green", "runs": "", "no": "yellow"}


def doctor(
    output: Output,
    check: Annotated[bool, typer.Option("--check", help="Cast and multiply 64x64 matrices on every backend.")] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="cpu, cuda, or a GPU you need not have: h200, b200, sm_100.")
    ] = "",
) -> int:
    """Show what is installed, and what runs on which hardware and why.

    \b
    microfloat doctor
    microfloat doctor --check
    microfloat doctor --device b200
    """
    kinds = ("cpu", "cuda", "gpu", "rocm", "tpu")
    if device and not chip_named(device) and device.split(":")[0] not in kinds:
        raise invalid_value("--device", repr(device), "cpu, cuda, or the name of a GPU such as h200, b200 or sm_100")
    if check and chip_named(device):
        raise invalid_value("--device", device, "a device of this machine for --check, such as cpu or cuda")
    front_ends = {name: import_front_end(name) for name in _FRONT_ENDS}
    rows = [_row(place, recipe, front_ends, device or None) for place in PLACES for recipe in RECIPES]
    if not chip_named(device):
        _first_words(output, rows)
    _packages(output, front_ends)
    output.put(gpus=gpus())
    if output.document["gpus"]:
        columns = [Column(key) for key in ("gpu", "name", "architecture", "generation", "memory", "driver")]
        output.table("gpus", output.document["gpus"], columns, "GPUs")
    else:
        output.say("No NVIDIA GPU: nvidia-smi is not there or lists none. Everything runs on the CPU.")
        output.say()
    _matrix(output, rows, device)
    return _check(output, rows, device) if check else 0


def import_front_end(name: str) -> ModuleType | str:
    """The front end, or why it cannot be imported."""
    try:
        return importlib.import_module(f"microfloat.{name}")
    except ImportError as error:
        return str(error) if isinstance(error, MicrofloatError) else f"import {name} fails: {error}"
    except Exception as error:  # a broken installation is a finding
        return f"import {name} fails: {type(error).__name__}: {error}"


def _first_words(output: Output, rows: list[dict[str, Any]]) -> None:
    """The line of a machine on which every recipe trains, and none on tensor cores of its format."""
    able = [
        " ".join(place) for place in PLACES if place.front_end in _FRONT_ENDS
        and all(row["available"] for row in rows if (row["front_end"], row["backend"]) == place)
    ]  # fmt: skip
    if rows and able and not any(row["accelerated"] for row in rows):
        output.say(f"Every recipe trains here, by {' and '.join(able)} (the same bytes), not accelerated.")
        output.say()


def _packages(output: Output, front_ends: dict[str, ModuleType | str]) -> None:
    found = versions(*PACKAGES)
    rows = [
        {"package": name, "version": version, "remedy": None if version else install_hint(PACKAGES[name])}
        for name, version in found.items()
    ]
    if isinstance(front_ends["torch"], ModuleType):
        from microfloat.torch.timing import cuda_version

        cuda = cuda_version()
        remedy = None if cuda else "this torch is built without CUDA"
        rows.append({"package": "CUDA (of torch)", "version": cuda, "remedy": remedy})
    version = Column("version", text=lambda text: text or "not installed")
    output.table("packages", rows, [Column("package"), version, Column("remedy", prose=True)], "Packages")


def _row(place: Place, recipe: str, front_ends: dict[str, ModuleType | str], device: str | None) -> dict[str, Any]:
    """The answer of one backend about the fprop of a recipe, and the kernel that runs instead."""
    answer, runs, instead = _answer(place, recipe, front_ends, device)
    return {**place._asdict(), "recipe": recipe, **asdict(answer), "runs": runs, "instead": instead}


def _answer(
    place: Place, recipe: str, front_ends: dict[str, ModuleType | str], device: str | None
) -> tuple[Support, str | None, str | None]:
    """Support, the kernel, and where it does not run what `backend="auto"` takes."""
    if place.front_end == "numpy":
        return Support(True, False, "the definition that every backend is tested against"), "NumPy, float64 sums", None
    module = front_ends[place.front_end]
    if isinstance(module, str):
        return Support(False, False, module), None, None
    try:
        found = module.explain(recipe, device=device, backend=place.backend)
        kernel = found.rows[0].kernel
        support = Support(found.available, found.accelerated, found.rows[0].support.reason)
    except NotSupportedError as refusal:
        support, kernel = Support(False, False, str(refusal)), "-"
    except InvalidValueError as unknown:  # a device of the other front end
        return Support(False, False, str(unknown)), None, None
    if support.available:
        return support, kernel, None
    automatic = module.explain(recipe, device=device).rows[0]
    if not automatic.support.available:
        return support, None, None
    if place.front_end == "jax":  # the refusal advises about arguments that nobody gave here
        support = Support(False, False, automatic.support.reason.removeprefix("emulated: "))
    return support, None, automatic.kernel


def _matrix(output: Output, rows: list[dict[str, Any]], device: str) -> None:
    """Recipes by backends; the reasons as numbered notes."""
    output.put(device=device or None, support=rows)
    notes: dict[str, int] = {}
    lines = []
    for recipe in RECIPES:
        line: dict[str, Any] = {"recipe": recipe}
        for row in rows:
            if row["recipe"] == recipe:
                word = "fast" if row["accelerated"] else "runs" if row["available"] else "no"
                line[f"{row['front_end']} {row['backend']}"] = f"{word} {notes.setdefault(_why(row), len(notes) + 1)}"
        lines.append(line)
    columns = [
        Column(" ".join(place), "\n".join(place), style=lambda cell: _COLOURS[cell.split()[0]]) for place in PLACES
    ]
    where = f" on {device}" if device else ""
    output.table(None, lines, [Column("recipe"), *columns], f"Recipes by backend{where}")
    output.say("fast: on tensor cores of the format; runs: the same bytes, not accelerated; numbers: see below.")
    output.notes(notes)


def _why(row: dict[str, Any]) -> str:
    """The note of a cell; formats by name would number equal answers apart."""
    if row["available"]:
        text = f"{row['runs']}: {row['reason']}"
    else:
        text = row["reason"] + (f". Instead: {row['instead']}" if row["instead"] else "")
    return re.sub(r" (\([a-z0-9_]+ x [a-z0-9_]+\)|for [a-z0-9_]+ x [a-z0-9_]+)", "", text)


def _check(output: Output, rows: list[dict[str, Any]], device: str) -> int:
    """Casts and products of every backend that runs here against the oracle; the exit code."""
    output.put(check=[])
    able = [row for row in rows if row["available"] and row["front_end"] != "numpy"]
    each = output.each("checking", able, lambda row: f"{row['front_end']} {row['backend']} {row['recipe']}")
    results = [_checked(row, device) for row in each]
    columns = (
        Column("front_end"), Column("backend"), Column("recipe"), Column("bytes_equal"),
        Column("difference", text=lambda value: "-" if value is None else f"{value:.1e}", right=True),
        Column("passed", style=lambda passed: "green" if passed else "bold red"), Column("problem", prose=True),
    )  # fmt: skip
    if not results:
        output.say("Nothing to check: no backend of torch or JAX runs here.")
        return 0
    title = f"Check: 64x64 matrices against the oracle; a product may differ by {LARGEST_DIFFERENCE:g}"
    output.table("check", results, columns, title)
    return int(any(not row["passed"] for row in results))


def _checked(row: dict[str, Any], device: str) -> dict[str, Any]:
    """One line of the check; whatever goes wrong is its result."""
    found: dict[str, Any] = {key: row[key] for key in ("front_end", "backend", "recipe")}
    found |= {"bytes_equal": None, "difference": None, "passed": False, "problem": None}
    gemm = from_name(row["recipe"]).fprop
    try:
        found["bytes_equal"], found["difference"] = against_oracle(row["front_end"], gemm, row["backend"], device)
    except Exception as error:  # a backend that fails is a finding
        found["problem"] = f"{type(error).__name__}: {error}"
        return found
    found["passed"] = found["bytes_equal"] and found["difference"] <= LARGEST_DIFFERENCE
    return found


def against_oracle(front_end: str, gemm: Gemm, backend: str, device: str) -> tuple[bool, float]:
    """The public casts and product of square matrices: bytes equal to the oracle's, relative difference of the product.

    Nearest rounding, without Hadamard transform: what does not depend on a seed. Delayed scaling with the scale 64.
    """
    generator = np.random.default_rng(0)
    casts = [Cast(cast.format, cast.scale_rule, scaling=cast.scaling) for cast in gemm.casts if cast is not None]
    arrays = [generator.normal(size=(64, 64)).astype(np.float32) for _ in casts]
    pairs = [(x, cast, 64.0 if cast.is_delayed else None) for x, cast in zip(arrays, casts, strict=True)]
    want = [reference.quantize(x, cast, scale_enc=scale) for x, cast, scale in pairs]
    measure = importlib.import_module(f"microfloat.{front_end}.timing")
    made, product = measure.cast_and_multiply(pairs, backend, device or None)
    parts = [(one.codes, one.scale, one.tensor_scale) for one in want]
    equal = made == [[None if part is None else np.asarray(part).tobytes() for part in one] for one in parts]
    exact = reference.scaled_matmul(*want)
    return equal, float(np.linalg.norm(product - exact) / np.linalg.norm(exact))
