"""The operands of one tensor in a schedule: which GEMMs read it, in which form, and how each lies in memory.

Legend: M = rows of x, K = in features, N = out features. "row" is the operand of a tensor as it lies, "column" that of
its transpose.
"""

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

import torch

from microfloat.errors import NotSupportedError
from microfloat.layout import ALIGNMENT, Layout, Part, layout_of
from microfloat.operands import OPERANDS_OF, Operand
from microfloat.passes import OperandSpec, family_of
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.routes import Routes
from microfloat.torch._typing import Parts
from microfloat.torch.backends.base import Backend
from microfloat.torch.backends.base import Operand as StoredOperand

__all__ = [
    "Entries",
    "Entry",
    "aligned",
    "delayed_of",
    "entries_of",
    "first_delayed",
    "laid",
    "layouts_of",
    "parts_of",
    "saved_parts",
    "why_by_torch",
]


_Kept = TypeVar("_Kept", torch.Tensor, torch.Tensor | None)


class Entry(NamedTuple):
    """One of the six operands in a schedule; `spec`: as casts are asked for it.

    `cast` and `spec` None: the GEMM reads it in high precision.
    """

    operand: Operand
    cast: Cast | None
    form: str
    turned: bool
    spec: OperandSpec | None


Entries = tuple[Entry | None, Entry | None]  # row and column of one tensor; None: no GEMM will read it


def entries_of(recipe: Recipe, routes: Routes, tensor: str, row: bool, column: bool) -> Entries:
    """The row and the column operand of "x", "w" or "dy", each if a GEMM will read it."""
    made: list[Entry | None] = []
    for is_read, operand in zip((row, column), OPERANDS_OF[tensor], strict=True):
        gemm = getattr(recipe, operand.gemm)
        if not is_read or gemm.path == "refused" or (operand.side == "rhs" and gemm.from_fprop):
            made.append(None)
            continue
        cast, route = getattr(gemm, operand.side), getattr(routes, operand.gemm)
        if cast is not None and tensor == "dy":
            cast = cast.of_gradient  # it tells its products of overflow
        is_rhs = operand.side == "rhs"
        form, turned = (route.rhs, route.turned) if is_rhs else (route.lhs, False)
        spec = None if cast is None else OperandSpec(cast, form, turned, operand.stream)
        made.append(Entry(operand, cast, form, turned, spec))
    return made[0], made[1]


def saved_parts(recipe: Recipe, wants_dx: bool, wants_dw: bool) -> tuple[slice, slice]:
    """The parts of the casts of x and w that backward reads: of the row operands where its GEMMs take what fprop read.

    Else of the column operands, which do not exist where no gradient is wanted.
    """
    rows = wants_dw and recipe.wgrad.from_fprop, wants_dx and recipe.dgrad.from_fprop
    x, w = (slice(0, 3) if row else slice(3, 6) for row in rows)
    return x, w


def layouts_of(backend: Backend, entries: Entries, rows: int, length: int) -> tuple[Layout | None, Layout | None]:
    """Layouts of the operands of a matrix [rows, length]; None in high precision, and where there is no operand.

    Sizes may be symbols of a compiler.
    """
    row, column = entries
    programs = backend.programs
    paired = programs is not None and programs.is_one_pass(row and row.spec, column and column.spec)
    made = []
    for entry, sizes in ((row, (rows, length)), (column, (length, rows))):
        made.append(
            None if entry is None or entry.cast is None
            else layout_of(
                entry.cast, *sizes, entry.form, of_transpose=entry.operand.transposed, paired=paired,
                turned=entry.turned,
            )
        )  # fmt: skip
    return made[0], made[1]


def why_by_torch(backend: Backend, *specs: OperandSpec | None) -> str:
    """Reason for casts of these operands by torch operations, "" if launches make them.

    Raises NotSupportedError where a backend that was asked for by name has no kernel.
    """
    if backend.no_programs:
        return backend.no_programs
    refusal = next((why for spec in specs if spec is not None and (why := family_of(spec.cast)[1])), "")
    if refusal and backend.is_strict:
        raise NotSupportedError(f"the {backend.name} backend has no kernel for {refusal}. Use backend='reference'.")
    return refusal and f"no kernel for {refusal}"


def first_delayed(casts: Iterable[Cast | None]) -> Cast | None:
    """The first of some casts whose scaling is delayed."""
    return next((cast for cast in casts if cast is not None and cast.is_delayed), None)


def delayed_of(recipe: Recipe) -> Delayed:
    """The settings of a recipe with delayed scaling."""
    return next(one.scaling for one in recipe.casts.values() if one is not None and isinstance(one.scaling, Delayed))


def laid(tensor: torch.Tensor | None, part: Part | None, backend: Backend | None = None) -> torch.Tensor | None:
    """The tensor in the memory order of its layout: itself where it lies so, else a copy, by a kernel of `backend`."""
    if tensor is None or part is None or tensor.stride() == part.strides:
        return tensor
    if backend is not None and tensor.itemsize == 1 and tensor.dim() == 2:
        by_rows, by_columns = (part.shape[1], 1), (1, part.shape[0])
        if (tensor.stride(), part.strides) == (by_columns, by_rows):
            return backend.turned(tensor.t())
        if (tensor.stride(), part.strides) == (by_rows, by_columns):
            return backend.turned(tensor).t()
    return torch.empty_strided(part.shape, part.strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def aligned(tensor: _Kept) -> _Kept:
    """A tensor, or a copy of it that begins at a multiple of 16 bytes, where bound launches and cuBLAS read tensors."""
    return tensor if tensor is None or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()


def parts_of(
    operand: StoredOperand | None, entry: Entry | None, layout: Layout | None, backend: Backend | None = None
) -> Parts:
    """Codes, scale and tensor scale of an operand [R, C], as its GEMM takes them; `backend`: transposes codes."""
    if operand is None or entry is None or layout is None:
        return [None, None, None]
    codes, scale, fmt = operand.codes, operand.scale, operand.format
    if entry.turned:
        codes = codes.t()
        if scale is not None and fmt.block != (1, 128):  # those lie column-major either way, and are not turned
            scale = scale.t() if scale.dim() else scale
    return [laid(codes, layout.codes, backend), laid(scale, layout.scale), operand.tensor_scale]
