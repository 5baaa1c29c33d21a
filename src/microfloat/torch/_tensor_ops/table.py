"""The table, its two ways to enter an operator, the refusal of others, and what the functions share."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from microfloat.errors import InvalidTypeError, NotSupportedError, invalid_type, invalid_value
from microfloat.torch import _operators
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.tensor import UNKNOWN, QuantizedTensor

__all__ = [
    "Arguments", "Operator", "Options", "check_kinds", "check_rows", "dispatch", "is_decay", "raw", "refusal",
    "refuse_experts", "register", "register_family", "register_view", "upper_name", "valueless", "values_of_weights",
    "view_of",
]  # fmt: skip

Operator: TypeAlias = torch._ops.OpOverload
_Run: TypeAlias = Callable[[Operator, Arguments, Options], object]
Implementation = TypeVar("Implementation", bound=Callable[..., object])

_TABLE: dict[Operator, _Run] = {}
_FAMILIES: dict[re.Pattern[str], _Run] = {}  # by the names of their schemas


def dispatch(func: Operator, args: Arguments, kwargs: Options) -> object:
    """Run `func` if it is known, else raise InvalidTypeError."""
    implementation = _TABLE.get(func)
    if implementation is None:
        named = (one for pattern, one in _FAMILIES.items() if pattern.fullmatch(func._schema.name))
        implementation = next(named, None)
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
            raise _refusal_in_vmap(func) from error
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


def _refusal_in_vmap(func: Operator) -> NotSupportedError:
    name = str(func).removeprefix("aten.")
    return NotSupportedError(
        f"{name}: got a QuantizedTensor inside vmap, or one that leaves it, needed plain tensors, which torch batches. "
        "Inside, call dequantize or scaled_matmul with it; return q.dequantize(), or the tensors of q.parts() and make "
        "QuantizedTensor.from_parts of them outside."
    )


def refusal(func: Operator, args: Arguments, kwargs: Options) -> Exception:
    name, remedy = str(func).removeprefix("aten."), "Call .dequantize() first; nothing dequantizes in silence."
    flat = tree_leaves((args, kwargs))
    formats = sorted({str(value.format) for value in flat if isinstance(value, QuantizedTensor)})
    asgd = " Where the optimizer ASGD did: step with another one, and average by torch.optim.swa_utils.AveragedModel."
    if name.startswith(("_foreach_", "_fused_")):
        remedy = "Compute on q.dequantize(). Clip gradients, which are plain, as usual."
        remedy += asgd if name.startswith("_foreach_sub") else ""
    elif name.startswith("dequantize"):  # of a tensor that a transform of torch.func wraps, so not our method
        remedy = "A transform of torch.func hides that it is quantized: call .dequantize() outside of the transform."
    elif (
        "c10d" in name
        or name.startswith("constant_pad_nd")
        or (name.startswith("copy_") and not isinstance(args[0], QuantizedTensor))
    ):
        remedy += (
            " Where load_state_dict asked for it: load microfloat.torch.plain_state_dict(model), or take the quantized "
            "weights over with assign=True. Where DistributedDataParallel or distribute_tensor did: use fully_shard, "
            "or build the layers without quantized_model_init and let a recipe quantize them. Where full_tensor or a "
            "full state dict did: save shards with torch.distributed.checkpoint, or plain_state_dict(model)." + asgd
        )
    elif name.startswith(("isclose", "allclose")):  # where torch.testing.assert_close arrives
        remedy += " torch.equal(a, b) compares codes and scales."
    elif name.startswith(("mm", "addmm")):
        remedy += (
            " Or quantize the other operand too. With a plain tensor, a product contracts the axis along which the "
            "blocks of the weight run, as microfloat.torch.linear(x, w) does: x @ w.t() or w @ x of one cast along its "
            "last axis."
        )
    elif name.startswith("_grouped_mm"):
        remedy += (
            " microfloat.torch.grouped_matmul(x, weight, group_sizes) multiplies experts [E, N, K], with group_sizes = "
            "offs.diff(prepend=offs.new_zeros(1))."
        )
    elif name.startswith("embedding"):
        remedy += (
            " weight[indices].dequantize() reads the rows of these indices alone, as F.embedding does "
            "of a matrix cast along its last axis, without max_norm and sparse."
        )
    elif name.startswith("as_strided"):
        remedy += (
            " Where torch.compile asked, for a view of a quantized argument that compiled code returns: return "
            "view.clone(), or take the view outside of it."
        )
    elif name.startswith(("bmm", "baddbmm")):
        remedy += " Quantized matrices are multiplied one by one, or by microfloat.torch.grouped_matmul."
    elif name.split(".")[0].endswith("_") and isinstance(args[0], QuantizedTensor):
        remedy = "Compute on q.dequantize(), then write the result with q.copy_(values), which quantizes it."
    return invalid_type(name, f"a QuantizedTensor ({', '.join(formats)})", "a plain tensor", remedy)


def register(*operators: Operator) -> Callable[[Implementation], Implementation]:
    """Enter ``implementation(func, args, kwargs)`` into the table for all of these operators."""

    def add(implementation: Implementation) -> Implementation:
        _TABLE.update(dict.fromkeys(operators, implementation))
        return implementation

    return add


def register_family(pattern: str) -> Callable[[Implementation], Implementation]:
    """Enter an implementation for all operators whose names match, but for those in the table."""

    def add(implementation: Implementation) -> Implementation:
        _FAMILIES[re.compile(pattern)] = implementation
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


def is_decay(gradients: object, kwargs: Options) -> bool:
    """True for a sum by which an optimizer decays weights: with a factor, and into gradients, which are plain."""
    return kwargs.get("alpha", 1) != 1 and not any(isinstance(one, QuantizedTensor) for one in tree_leaves(gradients))


def values_of_weights(weights: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Weights as plain tensors of the dtypes that they present, of one or of a list."""
    if isinstance(weights, torch.Tensor):
        return weights.dequantize() if isinstance(weights, QuantizedTensor) else weights
    return [weight.dequantize() if isinstance(weight, QuantizedTensor) else weight for weight in weights]


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
