"""The table, the two ways to enter an operator, and what the functions share."""

import math
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from microfloat.errors import InvalidTypeError, NotSupportedError, invalid_value
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.aten_refusals import Operator, refusal, refusal_in_vmap
from microfloat.torch.tensor.quantized_tensor import UNKNOWN, QuantizedTensor

__all__ = [
    "Arguments", "Operator", "Options", "check_kinds", "check_rows", "dispatch", "is_decay", "raw", "refuse_experts",
    "register", "register_view", "upper_name", "valueless", "view_of",
]  # fmt: skip

_Run: TypeAlias = Callable[[Operator, Arguments, Options], object]
Implementation = TypeVar("Implementation", bound=Callable[..., object])

_TABLE: dict[Operator, _Run] = {}


def dispatch(func: Operator, args: Arguments, kwargs: Options) -> object:
    """Run `func` if it is known, else raise InvalidTypeError."""
    implementation = _TABLE.get(func)
    try:
        if implementation is None:
            raise refusal(func, args, kwargs)
        result = implementation(func, args, kwargs)
    except InvalidTypeError as error:
        if func is not torch.ops.aten.dequantize.self and _is_in_vmap():
            # Binary operators of the tensors that it wraps would swallow a TypeError.
            raise NotSupportedError(f"{error} Do so outside of vmap, which maps over plain tensors.") from error
        raise
    except NotImplementedError as error:  # torch's, of parts that vmap has wrapped
        flat = tree_leaves((args, kwargs))
        if any(isinstance(q, QuantizedTensor) and _operators.is_followed(q.codes) for q in flat):
            raise refusal_in_vmap(func) from error
        raise
    if func._schema.is_mutable:
        _count_writes(args[0])
    return result


def _count_writes(written: object) -> None:
    """Add to the versions of the parts of what an operator wrote into, which torch does not count down here.

    The version of the tensor itself is one of its own behind ``weight.data``, through which loaders write; its parts
    share theirs with those of the weight, and what is kept of a weight asks for both.
    """
    for q in written if isinstance(written, list | tuple) else (written,):
        if isinstance(q, QuantizedTensor) and not _operators.is_tracing(q.codes):
            for part in q.part_list():
                if not (part.is_inference() or _operators.is_followed(part)):
                    torch.autograd.graph.increment_version(part)


def _is_in_vmap() -> bool:
    """True below a call of `torch.vmap`, which is off while an operator of a wrapped tensor runs."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "torch._functorch.vmap":
        frame = frame.f_back
    return frame is not None


def register(*operators: Operator) -> Callable[[Implementation], Implementation]:
    """Enter ``implementation(func, args, kwargs)`` into the table for all of these operators."""

    def add(implementation: Implementation) -> Implementation:
        _TABLE.update(dict.fromkeys(operators, implementation))
        return implementation

    return add


def register_view(
    *operators: Operator, by_shape: bool = False, takes_axes: bool = True
) -> Callable[[Implementation], Implementation]:
    """Register ``implementation(q, *arguments)`` for operators whose results share storage with q.

    `by_shape`: the implementation gets the shape of the result in place of the arguments. `takes_axes`: there may be
    something wrong with the arguments.
    """

    def add(implementation: Implementation) -> Implementation:
        def run(func: Operator, args: Arguments, kwargs: Options) -> object:
            q = args[0]
            # A tensor without values raises what torch raises for axes, indices and sizes that do not fit.
            expected = func(valueless(q), *args[1:], **kwargs) if takes_axes else q
            result = implementation(q, expected.shape) if by_shape else implementation(*args, **kwargs)
            if torch.compiler.is_compiling():
                return return_and_correct_aliasing(func, tuple(args), kwargs, result)
            return result

        register(*operators)(run)
        return implementation

    return add


def valueless(q: QuantizedTensor) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device="meta")


def view_of(
    q: QuantizedTensor, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, *,
    shape: Sequence[int], axis: int | None = None, is_slice: bool = False,
) -> QuantizedTensor:  # fmt: skip
    """A tensor of these parts, which share storage with those of q; a slice remembers what it is cut from."""
    root = q.root
    if is_slice and root is None:
        root = UNKNOWN if _operators.is_tracing(codes) else q.map_parts(lambda part: part)
        if q._is_filled and root is not UNKNOWN:
            root._is_filled = True
    return q._remade(
        codes, scale, tensor_scale, axis=q.axis if axis is None else axis, shape=shape, dtype=q.dtype, root=root
    )


def raw(part: torch.Tensor) -> torch.Tensor:
    """The bits as integers: equal for equal NaN, and known to operators that do not know float8."""
    return part.view(torch.int32 if part.dtype == torch.float32 else torch.uint8)


def upper_name(q: QuantizedTensor) -> str:
    """The name of the part that the most elements share."""
    return "scale" if q.tensor_scale is None else "tensor_scale"


def refuse_experts(q: QuantizedTensor, operation: str) -> None:
    """Refuse to move or to divide the first axis of experts, which have one scale each."""
    if q.is_per_expert:
        raise invalid_value(
            operation, f"a QuantizedTensor ({q.format}) of {q.shape[0]} experts, each with a scale of its own",
            "their axis where it is, the first", "Take them one by one, q[e], or dequantize.",
        )  # fmt: skip


def is_decay(gradient: object, kwargs: Options) -> bool:
    """True for a sum by which an optimizer decays a weight: with a factor, and into a gradient, which is plain."""
    return kwargs.get("alpha", 1) != 1 and not isinstance(gradient, QuantizedTensor)


def check_kinds(
    operation: str, q: QuantizedTensor, source: QuantizedTensor, got: tuple[int, ...], needed: tuple[int, ...]
) -> None:
    """Refuse to copy the bytes of `source`, whose shape is `got`, into q where they would mean something else."""
    kinds = [
        (one.format, one.hadamard, sorted(one.parts()), shape, one.axis - one.dim())
        for one, shape in ((source, got), (q, needed))
    ]
    if kinds[0] != kinds[1]:
        raise invalid_value(
            operation,
            f"{source.format} of shape {got}, axis {source.axis}",
            f"{q.format} of shape {needed}, axis {q.axis}, and the same Hadamard and scales",
            "Copy from source.dequantize() to quantize anew.",
        )


def check_rows(q: QuantizedTensor, indices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """The numbers of the rows that indices or masks of leading axes choose, in the shape that torch gives them."""
    leading = q.shape[:-1]
    indexed = sum(1 if i is None or i.dtype not in (torch.bool, torch.uint8) else i.dim() for i in indices)
    if not leading or indexed > len(leading) or q.axis != q.dim() - 1 or q.format.is_tile:
        raise invalid_value(
            "indices",
            f"those of {indexed} axes of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "indices of leading axes, the contraction axis being the last, and blocks of one row",
            "Take or write whole slices; dequantize first for anything else.",
        )
    numbers = torch.arange(math.prod(leading), device=q.device).view(leading)
    return numbers[tuple(slice(None) if index is None else index for index in indices)]
