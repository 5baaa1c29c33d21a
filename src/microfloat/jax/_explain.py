"""`explain` and the availability queries: what runs where and why, before anything runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from microfloat.errors import invalid_type, invalid_value
from microfloat.jax._dimensions import canonical_dimensions
from microfloat.jax.backends import native, reference
from microfloat.jax.backends.kernels import why_no_kernel
from microfloat.jax.backends.select import GemmPlan, choice_of
from microfloat.jax.ops import check_backend
from microfloat.recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from microfloat.recipes.core import GEMMS, OPERANDS
from microfloat.recipes.names import as_recipe
from microfloat.support import Support

__all__ = [
    "CastRow", "Explanation", "GemmRow", "ProgramDots", "explain", "is_fp8_available", "is_fp8_block_scaling_available",
    "is_mxfp8_available", "is_nvfp4_available",
]  # fmt: skip


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: its operands, how its contraction is padded, the kernel, and what the hardware makes of it."""

    gemm: str
    operands: str
    padding: str
    kernel: str
    support: Support


@dataclass(frozen=True)
class CastRow:
    """What casts a tensor (x, w or dy) on a GPU, and why."""

    tensor: str
    kernel: str
    reason: str


@dataclass(frozen=True)
class Explanation:
    """What a recipe does on a device: a row per GEMM, and what casts x, w and dy; prints as a table."""

    recipe: Recipe
    device: str
    rows: tuple[GemmRow, ...]
    casts: tuple[CastRow, ...] = ()

    @property
    def accelerated(self) -> bool:
        """Whether every quantized GEMM runs on tensor cores of its format."""
        return all(row.support.accelerated for row in self.rows)

    def __str__(self) -> str:
        header = ("GEMM", "operands", "padding", "kernel", "runs", "accelerated", "why")
        yes = {True: "yes", False: "no"}
        cells = [header] + [
            (row.gemm, row.operands, row.padding, row.kernel, yes[row.support.available], yes[row.support.accelerated],
             row.support.reason)
            for row in self.rows
        ]  # fmt: skip
        return "\n".join([f"{self.recipe!r} on {self.device}", *_table(cells), *self._cast_lines()])

    def _cast_lines(self) -> list[str]:
        """One line for all tensors that are cast alike."""
        alike: dict[tuple[str, str], list[str]] = {}
        for row in self.casts:
            alike.setdefault((row.kernel, row.reason), []).append(row.tensor)
        return [f"casts of {', '.join(tensors)}: {kernel} ({why})" for (kernel, why), tensors in alike.items()]


@dataclass(frozen=True)
class ProgramDots:
    """The dots of a compiled program: (instruction, operand dtypes, whether it calls an FP8 GEMM)."""

    device: str
    rows: tuple[tuple[str, str, bool], ...]

    @property
    def calls_fp8(self) -> bool:
        """Whether the program calls a GEMM with two FP8 operands."""
        return any(row[2] for row in self.rows)

    def __str__(self) -> str:
        cells = [("instruction", "operands", "FP8 GEMM")]
        cells += [(name, kinds, "yes" if fp8 else "no") for name, kinds, fp8 in self.rows]
        verdict = "Fp8 call detected!" if self.calls_fp8 else "No Fp8 call!"
        return "\n".join([f"{verdict} ({self.device})", *_table(cells)])


def _table(cells: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def explain(
    subject: Recipe | str | Callable,
    *arguments: Any,
    device: object = None,
    shape: object = None,
    backend: str = "auto",
) -> "Explanation | ProgramDots":
    """What runs, where and why; nothing is run.

    * ``explain(recipe, device=None, shape=None)``: the three GEMMs on `device` ("cpu", "cuda", a JAX device, or
      None for the default one); `shape` is (M, K, N) of a Linear, for the padding.
    * ``explain(recipe, lhs, rhs, dimension_numbers)``: the same for these operands (arrays or jax.ShapeDtypeStruct).
    * ``explain(function, *arguments)``: compiles the function and lists its dots; `calls_fp8` says whether an FP8
      GEMM is called, on any platform.

    `device` and `shape` may also be given by position. Raises InvalidTypeError or InvalidValueError for other
    arguments.
    """
    if not isinstance(subject, Recipe | str):
        if not callable(subject):
            raise invalid_type("recipe", type(subject), "a Recipe, its name, or a function")
        return _program_dots(subject, *arguments)
    recipe = as_recipe(subject)
    check_backend(backend)
    if arguments and hasattr(arguments[0], "shape"):
        if len(arguments) != 3:
            raise invalid_value("arguments", f"{len(arguments)} of them", "lhs, rhs and dimension_numbers")
        lhs, rhs, numbers = arguments
        dimensions = canonical_dimensions(tuple(lhs.shape), tuple(rhs.shape), numbers)
        sizes = (dimensions.lhs_free, dimensions.contracted, dimensions.rhs_free)
        shape = tuple(int(np.prod(part, dtype=np.int64)) for part in sizes)
    elif arguments:
        device = arguments[0] if device is None else device
        shape = arguments[1] if len(arguments) > 1 and shape is None else shape
    name, chip, missing = _target(device)
    sizes = _checked_shape(shape)
    rows = tuple(_row(recipe, gemm, chip, missing, sizes, backend) for gemm in GEMMS)
    return Explanation(recipe, name, rows, _casts(recipe, sizes, backend) if name == "cuda" and chip else ())


def _casts(recipe: Recipe, shape: tuple[int, int, int] | None, backend: str) -> tuple[CastRow, ...]:
    """What casts each tensor: a kernel where all its casts have one."""
    rows, inputs, outputs = shape or (0, 0, 0)
    sizes = {"x": (rows, inputs), "w": (outputs, inputs), "dy": (rows, outputs)}
    found = []
    for tensor, size in sizes.items():
        wanted = [recipe.casts[operand] for operand, name in OPERANDS.items() if name == tensor]
        reasons = [why_no_kernel(one, size if shape else None, backend) for one in wanted if one is not None]
        missing = next((reason for reason in reasons if reason), "")
        if missing:
            found.append(CastRow(tensor, "XLA's operations", missing))
        elif reasons:
            found.append(CastRow(tensor, "Triton kernel", "one pass writes both layouts"))
    return tuple(found)


def _checked_shape(shape: object) -> tuple[int, int, int] | None:
    if shape is None:
        return None
    if isinstance(shape, tuple | list) and len(shape) == 3 and all(isinstance(n, int) and n >= 0 for n in shape):
        return tuple(shape)  # type: ignore[return-value]
    raise invalid_value("shape", shape, "(M, K, N), three sizes of a Linear: rows, in features, out features")


def _target(device: object) -> tuple[str, tuple[int, int] | None, Support | None]:
    """(name, compute capability or None, why nothing can be said or None)."""
    if isinstance(device, jax.Device):
        device = cast(Any, device).platform
    if device is not None and not isinstance(device, str):
        raise invalid_type("device", type(device), "a JAX device, 'cpu', 'cuda' or None")
    chip = native.capability()
    if device is None:
        device = "cuda" if chip else jax.default_backend()
    name = {"gpu": "cuda"}.get(device.split(":")[0], device.split(":")[0])
    if name not in ("cpu", "cuda", "tpu", "rocm"):
        raise invalid_value("device", repr(device), "'cpu', 'cuda', 'rocm' or 'tpu'")
    if name != "cuda":
        return name, None, None
    absent = None if chip else Support(False, False, "JAX sees no CUDA device on this machine")
    return name, chip, absent


_IN_HIGH_PRECISION = Support(True, True, "the recipe keeps this GEMM in high precision; it runs in the operands' dtype")


def _row(
    recipe: Recipe, name: str, chip: tuple[int, int] | None, missing: Support | None,
    shape: tuple[int, int, int] | None, backend: str,
) -> GemmRow:  # fmt: skip
    gemm = getattr(recipe, name)
    operands = " x ".join("high precision" if operand is None else operand.format.name for operand in gemm.casts)
    if missing is not None:
        return GemmRow(name, operands, "-", "-", missing)
    if gemm.is_high_precision:
        return GemmRow(name, operands, "-", "lax.dot_general", _IN_HIGH_PRECISION)
    cols = 0 if shape is None else {"fprop": shape[1], "dgrad": shape[2], "wgrad": shape[0]}[name]
    kinds = [reference.kind_of(operand, cols) for operand in gemm.casts]
    plan = GemmPlan(kinds[0], kinds[1], gemm.accumulate, gemm.path, backend, np.dtype(np.float32))
    choice = choice_of(plan, chip)
    support = choice.support
    if not support.accelerated:
        support = Support(True, False, f"emulated: {support.reason}")
    return GemmRow(name, operands, _padding(kinds, cols, shape), choice.kernel, support)


def _padding(kinds: list[reference.Kind | None], cols: int, shape: tuple[int, int, int] | None) -> str:
    """How the contraction is padded inside."""
    multiples = [kind.hadamard.size for kind in kinds if kind is not None and kind.hadamard is not None]
    multiples += [kind.format.block[1] for kind in kinds if kind is not None and kind.format.block[1] is not None]
    if shape is None or not multiples:
        return "-"
    padded = -(-cols // max(multiples)) * max(multiples)
    return "none" if padded == cols else f"{cols} -> {padded}"


def _program_dots(function: Callable, *arguments: Any) -> ProgramDots:
    compiled = jax.jit(function).lower(*arguments).compile()
    return ProgramDots(jax.default_backend(), dots_of(cast(str, compiled.as_text())))


_SHAPE = re.compile(r"\b([a-z]+[0-9][0-9a-z]*|pred)\[")
_OPERAND = re.compile(r"%([\w.\-]+)")


def dots_of(text: str) -> tuple[tuple[str, str, bool], ...]:
    """The rows of `ProgramDots` from the text of an optimised HLO module.

    Operands may be printed by name alone: their dtypes are those of the instructions of that name. A dot of two FP8
    operands that is left inside a fusion is a GEMM that XLA generates itself.
    """
    dtypes: dict[str, str] = {}
    rows = []
    for line in text.splitlines():
        head, equals, body = line.strip().partition(" = ")
        name = head.removeprefix("ROOT ").lstrip("%")
        match = _SHAPE.search(body)
        if not equals or match is None:
            continue
        dtypes[name] = match[1]
        is_dot = " dot(" in body
        is_call = " custom-call(" in body and ("matmul" in body or "gemm" in body)
        if is_dot or is_call:
            inside = body.split(" dot(" if is_dot else " custom-call(", 1)[1].split(")", 1)[0]
            kinds = _SHAPE.findall(inside) or [dtypes.get(operand, "?") for operand in _OPERAND.findall(inside)]
            fp8 = len(kinds) >= 2 and all(kind.startswith("f8e") for kind in kinds[:2])
            rows.append((name, " x ".join(kinds[:2]) or "-", fp8))
    return tuple(rows)


def _availability(recipe: Recipe, device: object) -> Support:
    rows = cast(Explanation, explain(recipe, device=device)).rows  # of a recipe, not of a function
    available = all(row.support.available for row in rows)
    return Support(available, all(row.support.accelerated for row in rows), rows[0].support.reason)


def is_fp8_available(device: object = None) -> Support:
    """Whether per-tensor FP8 runs on `device` (it does everywhere), and whether tensor cores take it.

    The answer unpacks into ``(available, reason)``; its truth value is `available`.
    """
    return _availability(Float8CurrentScaling(), device)


def is_mxfp8_available(device: object = None) -> Support:
    """The same for MXFP8."""
    return _availability(MXFP8BlockScaling(), device)


def is_fp8_block_scaling_available(device: object = None) -> Support:
    """The same for FP8 with 1x128 and 128x128 blocks."""
    return _availability(Float8BlockScaling(), device)


def is_nvfp4_available(device: object = None) -> Support:
    """The same for NVFP4."""
    return _availability(NVFP4BlockScaling(), device)
