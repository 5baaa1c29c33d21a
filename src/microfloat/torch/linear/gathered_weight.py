"""`Gathered`: a weight that FSDP2 has gathered as codes and scales, in place of its values.

The gathered codes serve one GEMM, fprop in forward and dgrad in backward, and the other one too where transposed codes
are the codes of the transposed weight. Everything else (values, another dtype or recipe) is gathered when it is read,
by every rank at the same point of the program.

Legend: N = out features, K = in features; R, C = rows and contraction length of an operand: N, K or, transposed, K, N.
"""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.layout import FOLDED, Layout
from microfloat.recipes import Cast, Recipe
from microfloat.torch import reference
from microfloat.torch._typing import Arguments, Context, Options
from microfloat.torch.backends.base import Operand

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from microfloat.torch.backends.base import Backend

aten = torch.ops.aten
_Way = Callable[[torch.Tensor], torch.Tensor]


class Gather:
    """The gathered operands of one weight, replaced in place by the next gather.

    `casts`: of fprop and of dgrad; `dtype`: of the cast values; `source`: gathers operands that are not here;
    `scale_enc`, `amax`: of delayed scaling, the encode scale and what this rank records; `made_of`: the stamp of the
    buffer that the scale was copied from; `is_current`: the latest forward has used it.
    """

    def __init__(self, casts: Sequence[Cast], dtype: torch.dtype, source: Any) -> None:
        self.casts, self.dtype, self.source = casts, dtype, source
        # Gathered tensors of the operand as it lies and of the transpose, from which `source` makes them.
        self.gathered: list[tuple | None] = [None, None]
        self.scale_enc: torch.Tensor | None = None
        self.amax: torch.Tensor | None = None
        self.made_of: tuple[int, int] | None = None
        self.is_current = True

    def operand(
        self, cast: Cast, transposed: bool, dtype: torch.dtype, scale_enc: torch.Tensor | None
    ) -> Operand | None:
        """The operand of fprop or dgrad under `cast`; None where it must be cast from the values."""
        is_other_scale = cast.is_delayed and scale_enc is not self.scale_enc
        if dtype != self.dtype or cast != self.casts[transposed] or is_other_scale:
            return None
        found, other = self.gathered[transposed], self.gathered[not transposed]
        if found is not None:
            return self.source.operand_of(found)
        if other is not None and cast.transposes and self.casts[0] == self.casts[1]:
            return reference.transpose_operand(self.source.operand_of(other))
        return self.source.operand(self, transposed)

    def values(self) -> torch.Tensor:
        """The weight in high precision, gathered now."""
        return self.source.values()

    def tensors(self) -> list[torch.Tensor]:
        """The bytes that were gathered."""
        return [tensor for found in self.gathered if found is not None for tensor in found[0]]


class Gathered(torch.Tensor):
    """The parameter that a Linear sees between gather and reshard: a shape, a dtype, and a `Gather`."""

    contents: Gather

    @staticmethod
    def __new__(cls: type, gather: Gather, shape: Sequence[int], device: torch.device) -> "Gathered":
        return torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=gather.dtype, device=device)  # type: ignore[attr-defined]

    def __init__(self, gather: Gather, shape: Sequence[int], device: torch.device) -> None:
        self.contents = gather
        self._casts_late = True

    def data_ptr(self) -> int:
        """-1, an address that no memory has: schedules are found by addresses, among others."""
        return -1

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Gathered(shape={tuple(self.shape)}, dtype={self.dtype}, {self.contents.casts[0].format.name})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, func: torch._ops.OpOverload, types: object, args: Arguments = (), kwargs: Options | None = None
    ) -> object:
        if func in _SAME and tuple(_shape_of(func, args)) == tuple(args[0].shape):
            return Gathered(args[0].contents, args[0].shape, args[0].device)
        if func in _LIKE:
            options = {"dtype": args[0].dtype, "device": args[0].device, **(kwargs or {})}
            shape = args[0].shape if func in (aten.zeros_like.default, aten.empty_like.default) else args[1]
            options.pop("memory_format", None)
            return (torch.empty if "empty" in func._schema.name else torch.zeros)(shape, **options)
        raise NotSupportedError(
            f"{func.__name__.split('.')[0]}: got a weight that was gathered in low precision, needed its values. Read "
            "the sharded parameter (layer.weight after reshard), or leave the layer out of low_precision_all_gather."
        )


_SAME = (aten.detach.default, aten.alias.default, aten.view.default, aten.as_strided.default, aten.lift_fresh.default)
_LIKE = (aten.zeros_like.default, aten.empty_like.default, aten.new_zeros.default, aten.new_empty.default)


def _shape_of(func: torch._ops.OpOverload, args: Arguments) -> Sequence[int]:
    return args[1] if func in (aten.view.default, aten.as_strided.default) else args[0].shape


class Through(torch.autograd.Function):
    """``there(x)``, with the gradient ``back(dy)``."""

    @staticmethod
    def forward(ctx: Context, x: torch.Tensor, there: _Way, back: _Way) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradients[0]), None, None


def _values(weight: Gathered) -> torch.Tensor:
    """The values of a gathered weight, whose gradient goes to it."""
    return Through.apply(weight, lambda weight: weight.contents.values(), lambda dw: dw)  # type: ignore[return-value]


def without_values(weight: Gathered, recipe: Recipe, compute: torch.dtype, wants_dx: bool) -> torch.Tensor:
    """Zeros in place of the values, for a call without rows under `recipe`.

    It takes part in the gathers of other ranks, whose calls have rows and read their operands.
    """
    contents, dgrad = weight.contents, recipe.dgrad

    def read(transposed: bool) -> None:
        if contents.operand(contents.casts[transposed], transposed, compute, contents.scale_enc) is None:
            contents.values()

    def zeros(weight: torch.Tensor) -> torch.Tensor:
        read(False)
        return no_values(weight)

    def back(dw: torch.Tensor) -> torch.Tensor:
        if wants_dx and dgrad.path != "refused":
            read(not dgrad.from_fprop)
        return dw

    return Through.apply(weight, zeros, back)  # type: ignore[return-value]


def no_values(weight: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Zeros of a weight's shape, in a dtype or in its own, in the memory of one."""
    return torch.zeros((), dtype=dtype or weight.dtype, device=weight.device).expand(weight.shape)


def with_local(sharded: "DTensor", local: torch.Tensor) -> "DTensor":
    """A DTensor that is laid out as `sharded`, of which this rank has `local`."""
    place = sharded.device_mesh, sharded.placements
    return type(sharded).from_local(local, *place, run_check=False, shape=sharded.shape, stride=sharded.stride())


def values_of(weight: torch.Tensor, read: Callable[[Gathered], torch.Tensor] = _values) -> torch.Tensor:
    """A parameter, in which the result of `read` replaces a `Gathered`, alone or as this rank's part of a DTensor."""
    if isinstance(weight, Gathered):
        return read(weight)
    if isinstance(getattr(weight, "_local_tensor", None), Gathered):
        sharded = typing.cast("DTensor", weight)
        return with_local(sharded, read(typing.cast(Gathered, sharded.to_local())))
    return weight


def in_form(
    operand: Operand, form: str, turned: bool, layout: Layout | None, backend: "Backend",
    changed: torch.Tensor | None = None,
) -> Operand:  # fmt: skip
    """The operand in the form that a GEMM reads (`microfloat.layout`), to the bits of a cast in that form.

    `turned`: `layout` is that of the transpose, which a GEMM reads; the result lies as `operand` does all the same.
    `changed`: int64 (), filled with the number of elements that folding has changed.
    """
    if form == "codes":
        return operand
    if form in FOLDED:
        assert layout is not None
        assert layout.scale is not None
        # Scales of one row of blocks lie alike either way.
        part = layout.scale.transposed if turned and form != "folded" else layout.scale
        if changed is not None:  # the kernel counts nothing: casts with kernels have counted already
            return reference.fold_codes(operand, form, part, changed)
        return backend.fold_codes(operand, form, part)
    # Values that a Hadamard transform has made stay transformed, as its padding stays: the GEMM takes both so.
    bare = dataclasses.replace(operand, tensor_scale=None, hadamard=None, length=operand.stored_length)
    return dataclasses.replace(operand, codes=backend.dequantize(bare, torch.bfloat16), scale=None)  # type: ignore[arg-type]
