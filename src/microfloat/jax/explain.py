"""`explain` and the availability queries: kernels of a recipe on a device and their reasons, before anything runs."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from microfloat.arguments import check_shape
from microfloat.chips import chip_named
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax.autocast import recipe_here
from microfloat.jax.backends import gemms, reference
from microfloat.jax.backends.casts import form_by_kernel
from microfloat.jax.backends.gemms import GemmPlan, route_of_plan
from microfloat.jax.backends.kernels import why_no_kernel
from microfloat.jax.calls import Op
from microfloat.jax.dot_general import DotGeneral, Einsum
from microfloat.jax.numerics.dimensions import DimensionNumbers, canonical_dimensions, parse_einsum
from microfloat.jax.ops import check_backend
from microfloat.jax.ragged_dot import RaggedDot
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes import Recipe
from microfloat.recipes.explanation import Answer, CastRow, operands_of
from microfloat.recipes.names import as_recipe
from microfloat.routes import family_of
from microfloat.support import Printed, Support, text_table


@dataclass(frozen=True)
class GemmRow:
    """One GEMM: its operands, the padding of its contraction, the kernel, and its support by the hardware."""

    gemm: str
    operands: str
    padding: str
    kernel: str
    support: Support


@dataclass(frozen=True, repr=False)
class Explanation(Answer):
    """A recipe on a device: a row per GEMM, and the kernel that casts each operand; prints as a table with notes."""

    _column = "padding"

    recipe: Recipe
    device: str
    rows: tuple[GemmRow, ...]
    casts: tuple[CastRow, ...] = ()


class ProgramDot(NamedTuple):
    """One dot of a compiled program: its instruction, the dtypes of its operands, and if it calls an FP8 GEMM."""

    instruction: str
    operands: str
    is_fp8: bool


@dataclass(frozen=True, repr=False)
class ProgramDots(Printed):
    """The dots of a compiled program."""

    device: str
    rows: tuple[ProgramDot, ...]

    @property
    def calls_fp8(self) -> bool:
        """True if the program calls a GEMM with two FP8 operands."""
        return any(row.is_fp8 for row in self.rows)

    def __str__(self) -> str:
        cells = [("instruction", "operands", "FP8 GEMM")]
        cells += [(row.instruction, row.operands, "yes" if row.is_fp8 else "no") for row in self.rows]
        verdict = "Fp8 call detected!" if self.calls_fp8 else "No Fp8 call!"
        return "\n".join([f"{verdict} ({self.device})", *text_table(cells)])


def explain(
    subject: Recipe | str | Callable, *arguments: Any, device: object = None, shape: object = None,
    backend: str = "auto",
) -> "Explanation | ProgramDots":  # fmt: skip
    """The kernels of a recipe or of a compiled function on a device, and why; nothing is run.

    * ``explain(recipe, device=None, shape=None)``: the three GEMMs on `device`: "cpu", "cuda", a JAX device, None for
      the default one, or a GPU that this machine lacks, by name, generation or architecture ("h200", "ampere",
      "sm_100"), with all packages. `shape` is (M, K, N) of a Linear, for padding and casts. Both may be positional.
    * ``explain(op, device=None, shape=None)``: the same of a `dot_general`, an `einsum` or a `ragged_dot`, with its
      recipe and backend; of ragged_dot, the products of a group.
    * ``explain(recipe, lhs, rhs, dimension_numbers)``: the same for these operands (arrays or jax.ShapeDtypeStruct);
      also of a `dot_general`, and of an `einsum`: ``explain(op, equation, lhs, rhs)``.
    * ``explain(function, *arguments)``: compiles the function and lists its dots; `calls_fp8` tells if it calls an FP8
      GEMM, on any platform.

    Raises InvalidTypeError or InvalidValueError for other arguments.
    """
    op, grouped = subject, False
    is_called = any(hasattr(argument, "shape") for argument in arguments)
    if isinstance(subject, Einsum):
        op, arguments = subject.op, _operands(*arguments) if is_called else arguments
    if isinstance(op, Op) and (not is_called or (isinstance(op, DotGeneral) and len(arguments) == 3)):
        grouped, backend = isinstance(op, RaggedDot), op.backend if backend == "auto" else backend
        subject = as_recipe(recipe_here(op.recipe))  # type: ignore[arg-type]
    if not isinstance(subject, Recipe | str):
        if isinstance(subject, type):
            as_recipe(subject)  # type: ignore[arg-type]
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
    target = _target(device)
    sizes = None if shape is None else check_shape(shape)
    rows = [_row(recipe, gemm, target, sizes, backend) for gemm in GEMMS]
    cast_rows = [] if target.chip is None else _casts(recipe, target, sizes, backend)
    if grouped:
        more = ", for every block of rows"
        rows = [row if row.kernel == "-" else replace(row, kernel=row.kernel + more) for row in rows]
        by_xla = {"kernel": "XLA's operations", "reason": "ragged_dot casts blocks of rows"}
        cast_rows = [replace(row, **by_xla) for row in cast_rows]
    return Explanation(recipe, target.name, tuple(rows), tuple(cast_rows))


def _operands(*arguments: Any) -> tuple[Any, Any, DimensionNumbers]:
    """lhs, rhs and the dimension numbers of the product that an einsum of these arguments makes."""
    if len(arguments) != 3:
        raise invalid_value("arguments", f"{len(arguments)} of them", "an equation, lhs and rhs")
    equation, lhs, rhs = arguments
    plan = parse_einsum(equation, tuple(lhs.shape), tuple(rhs.shape))
    return *jax.eval_shape(plan.operands, lhs, rhs), plan.dimension_numbers


class _Target(NamedTuple):
    """The device of a question: its compute capability, why it is missing, and if it is `elsewhere`, a GPU by name."""

    name: str
    chip: tuple[int, int] | None = None
    missing: Support | None = None
    elsewhere: bool = False


def _casts(recipe: Recipe, target: _Target, shape: tuple[int, int, int] | None, backend: str) -> list[CastRow]:
    """A row for each quantized operand: a kernel casts it where all casts of its tensor have one."""
    assert target.chip is not None  # `explain` lists no casts without one
    rows, inputs, outputs = shape or (0, 0, 0)
    sizes = {"x": (rows, inputs), "w": (outputs, inputs), "dy": (rows, outputs)}
    found = []
    for gemm, side, tensor, *_ in OPERANDS:
        one = recipe.cast(gemm, side)
        if one is None or getattr(recipe, gemm).from_fprop:
            continue
        together = [recipe.casts[operand.key] for operand in OPERANDS if operand.tensor == tensor]
        size = sizes[tensor] if shape else None
        why = (why_no_kernel(each, size, backend, elsewhere=target.elsewhere) for each in together if each is not None)
        reason = next(filter(None, why), "")
        kernel = "XLA's operations" if reason else f"kernels.{family_of(one)[0]}"
        about = getattr(recipe, gemm), side, target.chip, gemms.library(elsewhere=target.elsewhere)
        form = "codes" if reason else form_by_kernel(*about, at_once=(gemm, side) in _READ_AT_ONCE)
        kernel += {"codes": "", "values": " (decoded to bfloat16)"}.get(form, " (folded to FP8)")
        found.append(CastRow(gemm, tensor, one.format.name, kernel, reason))
    return found


# Operands whose GEMM follows their cast; the others wait for the backward, as codes.
_READ_AT_ONCE = (("fprop", "lhs"), ("fprop", "rhs"), ("dgrad", "lhs"), ("wgrad", "lhs"))


def _target(device: object) -> _Target:
    if isinstance(device, jax.Device):
        device = cast(Any, device).platform
    if device is not None and not isinstance(device, str):
        raise invalid_type("device", type(device), "a JAX device, its platform, a GPU by its name, or None")
    chip = gemms.capability()
    if device is None:
        device = "cuda" if chip else jax.default_backend()
    named = chip_named(device)
    if named is not None:
        return _Target(f"{device} ({named.name}, {named.architecture})", named.capability, None, True)
    name = device.split(":")[0].replace("gpu", "cuda")
    if name not in ("cpu", "cuda", "tpu", "rocm"):
        needed = "'cpu', 'cuda', 'rocm' or 'tpu', or a GPU by its name, such as 'h200' or 'sm_100'"
        raise invalid_value("device", repr(device), needed)
    if name != "cuda":
        return _Target(name)
    return _Target(name, chip, None if chip else Support(False, False, "JAX sees no CUDA device on this machine"))


def _row(recipe: Recipe, name: str, target: _Target, shape: tuple[int, int, int] | None, backend: str) -> GemmRow:
    gemm = getattr(recipe, name)
    operands = operands_of(gemm)
    if target.missing is not None:
        return GemmRow(name, operands, "-", "-", target.missing)
    cols = 0 if shape is None else {"fprop": shape[1], "dgrad": shape[2], "wgrad": shape[0]}[name]
    kinds = [reference.kind_of(operand, cols) for operand in gemm.casts]
    # An operand that fprop has read is dequantized before the product, on every backend.
    backend = "reference" if gemm.from_fprop else backend
    plan = GemmPlan(kinds[0], kinds[1], gemm.accumulate, gemm.path, backend, np.dtype(np.float32))
    route = route_of_plan(plan, target.chip, elsewhere=target.elsewhere)
    reason = route.reason if route.accelerated else f"emulated: {route.reason}"
    return GemmRow(name, operands, _padding(kinds, cols, shape), route.kernel, Support(True, route.accelerated, reason))


def _padding(kinds: list[reference.Kind | None], cols: int, shape: tuple[int, int, int] | None) -> str:
    """The padding of the contraction inside, for people."""
    multiples = [kind.hadamard.size for kind in kinds if kind is not None and kind.hadamard is not None]
    multiples += [kind.format.block[1] for kind in kinds if kind is not None and kind.format.block[1] is not None]
    if shape is None or not multiples:
        return "-"
    padded = -(-cols // max(multiples)) * max(multiples)
    return "none" if padded == cols else f"{cols} -> {padded}"


def _program_dots(function: Callable, *arguments: Any) -> ProgramDots:
    for leaf in jax.tree.leaves(arguments):
        if not hasattr(leaf, "shape") and not isinstance(leaf, bool | int | float | complex):
            needed = "arrays, jax.ShapeDtypeStructs or numbers, on which the function is compiled"
            remedy = "Put others into the function: explain(lambda x: function(x, other), x)."
            raise invalid_type("arguments", type(leaf), needed, remedy)
    compiled = jax.jit(function).lower(*arguments).compile()
    return ProgramDots(jax.default_backend(), dots_of(cast(str, compiled.as_text())))


_SHAPE = re.compile(r"\b([a-z]+[0-9][0-9a-z]*|pred)\[")
_OPERAND = re.compile(r"%([\w.\-]+)")


def dots_of(text: str) -> tuple[ProgramDot, ...]:
    """The rows of `ProgramDots` from the text of an optimised HLO module."""
    # Operands may be printed by name alone. A dot of FP8 operands inside a fusion is a GEMM that XLA generates.
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
            rows.append(ProgramDot(name, " x ".join(kinds[:2]) or "-", fp8))
    return tuple(rows)


def _availability(recipe: str, device: object) -> Support:
    answer = cast(Explanation, explain(recipe, device=device))  # of a recipe, not of a function
    return Support(answer.available, answer.accelerated, answer.rows[0].support.reason)


def is_fp8_available(device: object = None) -> Support:
    """Support of per-tensor FP8 on `device`, which runs everywhere; `accelerated`: on tensor cores of FP8."""
    return _availability("fp8_current", device)


def is_mxfp8_available(device: object = None) -> Support:
    """Support of MXFP8, as `is_fp8_available` gives that of FP8."""
    return _availability("mxfp8", device)


def is_fp8_block_scaling_available(device: object = None) -> Support:
    """Support of FP8 with 1x128 and 128x128 blocks, as `is_fp8_available` gives that of FP8."""
    return _availability("fp8_block", device)


def is_nvfp4_available(device: object = None) -> Support:
    """Support of NVFP4, as `is_fp8_available` gives that of FP8."""
    return _availability("nvfp4", device)
