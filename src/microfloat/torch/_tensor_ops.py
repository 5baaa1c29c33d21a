"""The operators of torch on a QuantizedTensor: a table from operator to function, and an error for the rest.

Shape operations act on the operand form [leading axes..., C]: they may regroup, permute and cut the leading axes as
long as no block is torn apart, and cut the contraction axis at block boundaries.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from microfloat.errors import InvalidValueError, NotSupportedError, invalid_type, invalid_value
from microfloat.layout import leading_axes, scale_shape
from microfloat.torch import _operators
from microfloat.torch.tensor import UNKNOWN, QuantizedTensor

aten = torch.ops.aten
Operator: TypeAlias = torch._ops.OpOverload
Arguments: TypeAlias = Sequence[Any]  # as torch passes them: of any type
Options: TypeAlias = dict[str, Any]
Implementation = TypeVar("Implementation", bound=Callable[..., object])

_TABLE: dict[Operator, Callable[[Operator, Arguments, Options], object]] = {}


_FOREACH = re.compile(r"aten::_foreach_\w+_")  # in place
_FUSED = re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_")
_AVERAGES = (aten.lerp_.Scalar, aten.lerp_.Tensor, aten._foreach_lerp_.Scalar, aten._foreach_lerp_.ScalarList,
             aten._foreach_lerp_.List)  # fmt: skip


def dispatch(func: Operator, args: Arguments, kwargs: Options) -> object:
    """Run `func` if it is known, else raise InvalidTypeError."""
    implementation = _TABLE.get(func)
    if implementation is None and _FOREACH.fullmatch(func._schema.name):
        implementation = _in_place_lists
    elif implementation is None and _FUSED.fullmatch(func._schema.name):
        implementation = _fused_step
    if implementation is None:
        raise _refusal(func, args, kwargs)
    try:
        return implementation(func, args, kwargs)
    except NotImplementedError as error:  # torch's, of parts that vmap has wrapped
        flat = tree_leaves((args, kwargs))
        if any(isinstance(q, QuantizedTensor) and _operators.is_followed(q.codes) for q in flat):
            raise _refusal_in_vmap(func) from error
        raise


def _refusal_in_vmap(func: Operator) -> NotSupportedError:
    name = str(func).removeprefix("aten.")
    return NotSupportedError(
        f"{name}: got a QuantizedTensor inside vmap, or one that leaves it, needed plain tensors, which torch batches. "
        "Inside, call dequantize or scaled_matmul with it; return q.dequantize(), or the tensors of q.parts() and make "
        "QuantizedTensor.from_parts of them outside."
    )


def _refusal(func: Operator, args: Arguments, kwargs: Options) -> Exception:
    name, remedy = str(func).removeprefix("aten."), "Call .dequantize() first; nothing dequantizes in silence."
    flat = tree_leaves((args, kwargs))
    formats = sorted({str(value.format) for value in flat if isinstance(value, QuantizedTensor)})
    if name.startswith(("_foreach_", "_fused_")):
        remedy = "Compute on q.dequantize(). Clip gradients, which are plain, as usual."
    elif name.startswith("dequantize"):  # of a tensor that a transform of torch.func wraps, so not our method
        remedy = "A transform of torch.func hides that it is quantized: call .dequantize() outside of the transform."
    elif "c10d" in name or (name.startswith("copy_") and not isinstance(args[0], QuantizedTensor)):
        remedy += (
            " Where load_state_dict asked for it: load microfloat.torch.plain_state_dict(model), or take the quantized "
            "weights over with assign=True. Where fully_shard, DistributedDataParallel or distribute_tensor did: build "
            "the layers without quantized_model_init and let a recipe quantize them, or shard q.parts()."
        )
    elif name.split(".")[0].endswith("_") and isinstance(args[0], QuantizedTensor):
        remedy = "Compute on q.dequantize(), then write the result with q.copy_(values), which quantizes it."
    return invalid_type(name, f"a QuantizedTensor ({', '.join(formats)})", "a plain tensor", remedy)


def _register(*operators: Operator) -> Callable[[Implementation], Implementation]:
    """Enter ``implementation(func, args, kwargs)`` into the table for all of these operators."""

    def add(implementation: Implementation) -> Implementation:
        _TABLE.update(dict.fromkeys(operators, implementation))
        return implementation

    return add


def _view(
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
            expected = func(_valueless(q), *args[1:], **kwargs) if takes_axes else q
            result = implementation(q, expected.shape) if by_shape else implementation(*args, **kwargs)
            if torch.compiler.is_compiling():
                return return_and_correct_aliasing(func, tuple(args), kwargs, result)
            return result

        _register(*operators)(run)
        return implementation

    return add


def _valueless(q: QuantizedTensor) -> torch.Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device="meta")


def _view_of(
    q: QuantizedTensor, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, *,
    shape: Sequence[int], axis: int | None = None, is_slice: bool = False,
) -> QuantizedTensor:  # fmt: skip
    """A tensor of these parts, which share storage with those of q; a slice remembers what it is cut from."""
    root = q.root
    if is_slice and root is None:
        root = UNKNOWN if _operators.is_tracing(codes) else q.map_parts(lambda part: part)
    return QuantizedTensor(
        codes, scale, tensor_scale, q.cast, axis=q.axis if axis is None else axis, shape=shape, dtype=q.dtype, root=root
    )


# ---- copies ------------------------------------------------------------------------------------------------------


@_view(aten.detach.default, aten.alias.default, aten.lift_fresh.default, takes_axes=False)
def _detach(q: QuantizedTensor) -> QuantizedTensor:
    tensor_scale = None if q.tensor_scale is None else q.tensor_scale.detach()
    return _view_of(q, q.codes.detach(), q.scale.detach(), tensor_scale, shape=q.shape)


@_register(aten.clone.default)
def _clone(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    return args[0].map_parts(lambda part: part.clone(memory_format=kwargs.get("memory_format")))


@_register(aten._to_copy.default)
def _to_copy(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Moves the parts; a dtype only changes what is presented and what `dequantize` returns."""
    dtype = kwargs.get("dtype")
    if dtype is not None and dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise invalid_type(
            "dtype", dtype, "torch.float32, torch.bfloat16 or torch.float16: what a QuantizedTensor may present",
            "Call .dequantize() first.",
        )  # fmt: skip
    device = kwargs.get("device")
    options = {name: kwargs[name] for name in ("non_blocking",) if name in kwargs}
    moved = args[0].map_parts(lambda part: part.to(device=device or part.device, copy=True, **options), dtype)
    return moved.map_parts(torch.Tensor.pin_memory) if kwargs.get("pin_memory") else moved


@_register(aten._pin_memory.default)
def _pin_memory(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    return args[0].map_parts(lambda part: part.pin_memory())


@_register(aten.is_pinned.default)
def _is_pinned(func: Operator, args: Arguments, kwargs: Options) -> bool:
    return all(part.is_pinned() for part in args[0].parts().values())


@_register(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.new_empty.default, aten.new_zeros.default,
    aten.new_ones.default, aten.new_full.default,
)  # fmt: skip
def _like(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """A plain tensor of the presented shape, dtype and device: nothing of the values is read.

    Memory for a parameter without any, which ``module.to_empty`` asks for, is memory for its codes and scales.
    """
    q = args[0]
    device = kwargs.get("device")
    if func is aten.empty_like.default and q.codes.is_meta and device is not None and device.type != "meta":
        return q.map_parts(lambda part: torch.empty_like(part, device=device))
    stand_in = torch.empty((), dtype=q.dtype, device=q.device).expand(q.shape)
    kwargs = {**kwargs, "memory_format": torch.contiguous_format} if "like" in str(func) else kwargs
    return func(stand_in, *args[1:], **kwargs)


@_register(aten.equal.default)
def _equal(func: Operator, args: Arguments, kwargs: Options) -> bool:
    """Same format, shape, axis and transform, and the same bytes."""
    a, b = args
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor)):
        raise _refusal(func, args, kwargs)
    if (a.format, a.hadamard, a.axis, a.shape) != (b.format, b.hadamard, b.axis, b.shape):
        return False
    left, right = a.parts(), b.parts()
    return left.keys() == right.keys() and all(torch.equal(_raw(left[name]), _raw(right[name])) for name in left)


def _raw(part: torch.Tensor) -> torch.Tensor:
    """The bits as integers: equal for equal NaN, and known to operators that do not know float8."""
    return part.view(torch.int32 if part.dtype == torch.float32 else torch.uint8)


@_register(aten.copy_.default)
def _copy(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """From a QuantizedTensor of the same kind: the bytes. From a plain tensor: quantized with this one's Cast."""
    destination, source = args[0], args[1]
    if not isinstance(destination, QuantizedTensor):
        raise _refusal(func, args, kwargs)
    if not isinstance(source, QuantizedTensor):
        return _store(destination, source.expand(destination.shape))
    _check_kinds("copy_", destination, source, tuple(source.shape), tuple(destination.shape))
    if _shares_a_scale(destination):  # the bytes mean something else under the scale of the destination
        return _store(destination, source.dequantize(torch.float32))
    for name, part in destination.parts().items():
        part.copy_(source.parts()[name])
    return destination


def _check_kinds(
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


def _store(q: QuantizedTensor, values: torch.Tensor) -> QuantizedTensor:
    """Quantize plain `values` with q's Cast, into q's storage; a scale that q shares with its root is the root's."""
    values = values.to(device=q.device, dtype=torch.float32)
    if not _shares_a_scale(q):
        return _overwrite(q, values)
    _check_shared(q)
    amax = _shared_amax(q.root, q.codes, values)  # type: ignore[arg-type]
    return _overwrite(q, values, amax, kept=_upper(q))


def _overwrite(
    q: QuantizedTensor, values: torch.Tensor, amax: float | None = None, kept: str | None = None
) -> QuantizedTensor:
    """Quantize `values`, under a tensor amax if one is given, into the parts of q but the `kept` one."""
    fresh = _quantized_like(q, values, amax).parts()
    for name, part in q.parts().items():
        if name != kept:
            part.copy_(fresh[name])
    return q


def _quantized_like(q: QuantizedTensor, values: torch.Tensor, amax: float | None) -> QuantizedTensor:
    """Plain `values` of q's shape, or of its rows, under q's Cast: the parts are those of q."""
    from microfloat.torch.ops import quantize
    from microfloat.torch.seeds import draw_seed

    # What is stored may be a parameter, whose replicas on other ranks must round alike.
    seed = draw_seed(q.device, folds=False) if q.cast.is_stochastic else None
    if q.axis != max(q.dim() - 1, 0):
        values = values.movedim(q.axis, -1)
    if q.is_per_expert:
        return torch.stack([quantize(one, q.cast, seed=seed) for one in values])  # type: ignore[return-value]
    return quantize(values, q.cast, amax=amax, seed=seed)


def _upper(q: QuantizedTensor) -> str:
    """The name of the part that the most elements share."""
    return "scale" if q.tensor_scale is None else "tensor_scale"


def _of_experts(q: QuantizedTensor, window: slice | int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and tensor scale of some of the experts: a slice of them, or one."""
    if not q.is_per_expert:
        return q.scale, q.tensor_scale
    upper = q.upper[window]
    return (upper, None) if q.tensor_scale is None else (q.scale, upper)


def _refuse_experts(q: QuantizedTensor, operation: str) -> None:
    """Refuse to move or to divide the first axis of experts, which have one scale each."""
    if q.is_per_expert:
        raise invalid_value(
            operation, f"a QuantizedTensor ({q.format}) of {q.shape[0]} experts, each with a scale of its own",
            "their axis where it is, the first", "Take them one by one, q[e], or dequantize.",
        )  # fmt: skip


def _shares_a_scale(q: QuantizedTensor) -> bool:
    """A slice of a tensor whose scale, tensor scale or row scales serve elements outside of the slice too."""
    root, upper = q.root, getattr(q, _upper(q))
    if root is None or upper.dim() < 2:
        return root is not None
    if q.format.block[1] is not None and q.tensor_scale is None:
        return False  # blocks are never torn
    if root is UNKNOWN or q.shape[q.axis] != root.shape[root.axis]:
        return True
    own = getattr(root, _upper(root))
    return upper.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()  # row scales in another order


def _check_shared(q: QuantizedTensor) -> None:
    """Refuse writes into part of a tensor where nothing says how to quantize under its scale."""
    is_known = q.format.scale.name == "FP32" or q.cast.rule.two_level is not None
    is_whole = getattr(q, _upper(q)).dim() == 0
    if q.root is UNKNOWN or not (is_known and is_whole) or q.hadamard or _operators.is_tracing(q.codes):
        raise NotSupportedError(
            f"write into a slice: got {tuple(q.shape)} of a QuantizedTensor ({q.format}) that shares scales with the "
            "rest of it, needed whole rows cut along the first axis, no Hadamard transform, and eager mode. "
            "Write the whole tensor instead: q.copy_(values)."
        )


def _shared_amax(root: QuantizedTensor, codes: torch.Tensor, values: torch.Tensor) -> float:
    """The amax behind the scale of the whole `root`, which covers `values` when this returns.

    `codes`: those that the values will replace. A scale that is too small grows by a power of two, under which the
    codes of the root keep their values (down to subnormals). Where nothing but zeros stays, it becomes that of
    `values`.
    """
    two_level = root.cast.rule.two_level
    upper = float(getattr(root, _upper(root)))
    held = upper * (root.format.element.max if two_level is None else two_level.capacity)
    finite = values.masked_fill(~values.isfinite(), 0.0)
    needed = float(finite.abs().amax()) if values.numel() else 0.0
    if not 0.0 < held < math.inf or _nonzero_bytes(root, root.codes) == _nonzero_bytes(root, codes):
        amax = needed
    elif needed <= held * _ROUNDING:
        return held
    else:
        amax = min(held * 2.0 ** math.ceil(math.log2(needed / held)), torch.finfo(torch.float32).max)
    _overwrite(root, root.dequantize(torch.float32), amax)
    return amax


_ROUNDING = 1 + 2.0**-20  # an amax that went through a scale and back may come out a little smaller


def _nonzero_bytes(q: QuantizedTensor, codes: torch.Tensor) -> int:
    """The number of bytes of `codes` that hold anything but zeros, of either sign."""
    sign = q.format.element.sign_code
    signs = sign | sign << 4 if q.format.element.codes_per_byte == 2 else sign
    return int(codes.view(torch.uint8).bitwise_and(~signs & 0xFF).count_nonzero())


@_register(aten.index_put_.default)
def _index_put(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Replace whole rows, chosen by indices or masks of the leading axes, by plain or quantized ones."""
    q, indices, values, *accumulate = args
    if isinstance(q, QuantizedTensor):
        _refuse_experts(q, "index_put_")
    if not isinstance(q, QuantizedTensor) or any(accumulate) or kwargs.get("accumulate"):
        raise _refusal(func, args, kwargs)
    leading = q.shape[:-1]
    indexed = sum(1 if i is None or i.dtype not in (torch.bool, torch.uint8) else i.dim() for i in indices)
    if not leading or indexed > len(leading) or q.axis != q.dim() - 1 or q.format.is_tile:
        raise invalid_value(
            "indices",
            f"those of {indexed} axes of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "indices of leading axes, the contraction axis being the last, and blocks of one row",
            "Write whole slices, or quantize the changed values anew.",
        )
    numbers = torch.arange(math.prod(leading), device=q.device).view(leading)
    rows = numbers[tuple(slice(None) if index is None else index for index in indices)]
    is_shared = _shares_a_scale(q) or getattr(q, _upper(q)).dim() == 0
    if isinstance(values, QuantizedTensor):
        replaced_shape = (*rows.shape, q.shape[-1])
        if values.numel() == math.prod(replaced_shape):  # torch leaves leading axes of one entry away
            replaced_shape = replaced_shape[-values.dim() :]
        _check_kinds("index_put_", q, values, tuple(values.shape), replaced_shape)
    if is_shared or not isinstance(values, QuantizedTensor):
        plain = values.dequantize(torch.float32) if isinstance(values, QuantizedTensor) else values
        values = plain.to(device=q.device, dtype=torch.float32).expand(*rows.shape, q.shape[-1])
    places, amax, kept = torch.unravel_index(rows.reshape(-1), leading), None, None
    if is_shared:
        _check_shared(q)
        replaced = _raw(q.codes)[torch.unravel_index(rows.unique(), leading)]
        amax, kept = _shared_amax(q if q.root is None else q.root, replaced, values), _upper(q)
    if not isinstance(values, QuantizedTensor):
        values = _quantized_like(q, values.reshape(-1, q.shape[-1]), amax)
    for name, part in q.parts().items():
        if name != kept:
            fresh = _raw(values.parts()[name])
            at = (rows.reshape(-1),) if name == "tensor_scale" else places
            _raw(part)[at] = fresh.reshape(-1, fresh.shape[-1])
    return q


@_register(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.addcmul_.default,
    aten.addcdiv_.default, aten.lerp_.Scalar, aten.lerp_.Tensor, aten.zero_.default, aten.fill_.Scalar,
    aten.fill_.Tensor, aten.normal_.default, aten.uniform_.default,
)  # fmt: skip
def _in_place_arithmetic(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """Dequantize to float32, apply, requantize with the same Cast: what an optimizer's step needs.

    Averages, which `lerp_` makes of weights of one kind, take quantized sources too.
    """
    q = args[0]
    others = args[1:]
    if func in _AVERAGES:
        others = [one.dequantize(torch.float32) if isinstance(one, QuantizedTensor) else one for one in others]
        if not isinstance(q, QuantizedTensor):
            return func(q, *(one.to(q.dtype) if _is_floating(one) else one for one in others), **kwargs)
    if not isinstance(q, QuantizedTensor) or any(isinstance(other, QuantizedTensor) for other in others):
        raise _refusal(func, args, kwargs)
    widened = [other.to(torch.float32) if _is_floating(other) else other for other in others]
    return _store(q, func(q.dequantize(torch.float32), *widened, **kwargs))


def _in_place_lists(func: Operator, args: Arguments, kwargs: Options) -> None:
    """`_in_place_arithmetic` of every tensor of a list: the ``torch._foreach_*_`` functions."""
    targets, *others = args
    if func in _AVERAGES:
        plain = [one.dequantize(one.dtype) if isinstance(one, QuantizedTensor) else one for one in others[0]]
        others = [plain, *others[1:]]
    if any(isinstance(value, QuantizedTensor) for value in tree_leaves((others, kwargs))):
        raise _refusal(func, args, kwargs)
    quantized = [isinstance(target, QuantizedTensor) for target in targets]

    def widened(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            return value
        pairs = zip(value, quantized, strict=True)
        return [one.to(torch.float32) if its and _is_floating(one) else one for one, its in pairs]

    wide = [q.dequantize(torch.float32) if its else q for q, its in zip(targets, quantized, strict=True)]
    func(wide, *(widened(value) for value in others), **{name: widened(value) for name, value in kwargs.items()})
    for q, values in zip(targets, wide, strict=True):
        if isinstance(q, QuantizedTensor):
            _store(q, values)


def _fused_step(func: Operator, args: Arguments, kwargs: Options) -> None:
    """The step of a fused optimizer, on values in the presented dtype, which the kernel asks all tensors to share.

    Where `found_inf` says so the step changes nothing, no byte of the codes either.
    """
    targets, *others = args
    if any(isinstance(value, QuantizedTensor) for value in tree_leaves(others)):
        raise _refusal(func, args, kwargs)
    plain = [q.dequantize() if isinstance(q, QuantizedTensor) else q for q in targets]
    func(plain, *others, **kwargs)
    for q, values in zip(targets, plain, strict=True):
        if isinstance(q, QuantizedTensor):
            store_unless(kwargs.get("found_inf"), q, values)


def store_unless(flag: torch.Tensor | None, q: QuantizedTensor, values: torch.Tensor) -> None:
    """Quantize plain `values` into q, unless `flag`, one number that the device alone reads, says otherwise."""
    if flag is None:
        _store(q, values)
        return
    fresh = q.map_parts(torch.clone)
    _store(fresh, values)
    _take_unless(flag, q, fresh)


def _take_unless(flag: torch.Tensor | None, q: QuantizedTensor, fresh: QuantizedTensor) -> None:
    for part, new in zip(q.part_list(), fresh.part_list(), strict=True):
        kept = _raw(part)
        kept.copy_(_raw(new) if flag is None else torch.where(flag.reshape(()).to(kept.device) != 0, kept, _raw(new)))


def store_shard(
    q: QuantizedTensor, shard: torch.Tensor, offset: int, group: torch.distributed.ProcessGroup,
    flag: torch.Tensor | None,
) -> None:  # fmt: skip
    """Quantize this rank's part of the flattened values, under scales that all ranks agree on, and share the codes.

    Where other ranks have the elements of a block, its amax stands in their place: the scales, and the codes of the
    shard, are then those of the whole.
    """
    rows, columns = math.prod(q.shape[:-1]), q.shape[-1]
    height, width = q.format.block[0] or rows, q.format.block[1] or columns
    values = torch.zeros(rows * columns, dtype=torch.float32, device=q.device)
    inside = torch.zeros(rows * columns, dtype=torch.uint8, device=q.device)
    values[offset : offset + shard.numel()] = shard.reshape(-1).to(values)
    inside[offset : offset + shard.numel()] = 0xFF
    values, inside = values.view(rows, columns), inside.view(rows, columns)
    padded = torch.nn.functional.pad(values.abs(), (0, -columns % width, 0, -rows % height))
    amaxes = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width).amax((1, 3))
    torch.distributed.all_reduce(amaxes, torch.distributed.ReduceOp.MAX, group)
    spread = amaxes.repeat_interleave(height, 0)[:rows].repeat_interleave(width, 1)[:, :columns]
    fresh = _quantized_like(q, torch.where(inside != 0, values, spread).view(q.shape), None)
    codes = fresh.codes.view(torch.uint8)
    if q.format.element.codes_per_byte == 2:
        inside = torch.nn.functional.pad(inside, (0, -columns % 2))
        inside = (inside[:, 0::2] & 0x0F) | (inside[:, 1::2] & 0xF0)
    own = codes & inside.view(codes.shape)
    torch.distributed.all_reduce(own, torch.distributed.ReduceOp.SUM, group)
    codes.copy_(own)
    _take_unless(flag, q, fresh)


@_register(aten._foreach_copy_.default)
def _copy_lists(func: Operator, args: Arguments, kwargs: Options) -> None:
    for destination, source in zip(args[0], args[1], strict=True):
        destination.copy_(source)


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


# ---- joining -----------------------------------------------------------------------------------------------------


@_register(aten.cat.default)
def _cat(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    """The parts side by side; tensors that keep one scale for several blocks must agree on it."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(q, QuantizedTensor) for q in tensors):
        raise _refusal(func, args, kwargs)
    joined = func([_valueless(q) for q in tensors], dim)
    first, dim = tensors[0], dim % tensors[0].dim()
    for q in tensors[1:]:
        _check_kinds(
            "cat", first, q, (*q.shape[:dim], *q.shape[dim + 1 :]), (*first.shape[:dim], *first.shape[dim + 1 :])
        )
    lead = _lead(first, dim)
    along = -1 if dim == first.axis else lead
    _check_joints(tensors, dim, along)
    scale_axis = (1 if along == -1 else 0) if first.format.is_tile else along
    tensor_scale = None
    upper = [q.upper for q in tensors]
    if any(q.is_per_expert for q in tensors):
        if not all(q.is_per_expert for q in tensors):
            raise invalid_value("tensors", "experts beside a tensor of one scale", "experts alone")
        one = torch.cat(upper) if not dim else _common(tensors, _upper(first))
        scales = [q.scale for q in tensors] if first.tensor_scale is not None else None
        return QuantizedTensor(
            torch.cat([_raw(q.codes) for q in tensors], along).view(first.codes.dtype),
            one if scales is None else torch.cat(scales, along),
            None if scales is None else one, first.cast, axis=first.axis, shape=joined.shape, dtype=joined.dtype,
        )  # fmt: skip
    if first.tensor_scale is not None and first.tensor_scale.dim() and along != -1:
        rows = [q.tensor_scale.view(*q.codes.shape[:-1], 1) for q in tensors]
        tensor_scale = torch.cat(rows, lead).view(-1, 1)
    elif first.tensor_scale is not None:
        tensor_scale = _common(tensors, "tensor_scale")
    is_common = first.format.is_per_tensor or (along == -1 and first.format.block[1] is None)
    return QuantizedTensor(
        torch.cat([_raw(q.codes) for q in tensors], along).view(first.codes.dtype),
        _common(tensors, "scale") if is_common else torch.cat([q.scale for q in tensors], scale_axis),
        tensor_scale, first.cast, axis=first.axis, shape=joined.shape, dtype=joined.dtype,
    )  # fmt: skip


def _check_joints(tensors: Sequence[QuantizedTensor], dim: int, along: int) -> None:
    """Every tensor but the last must end with a whole block."""
    first = tensors[0]
    unit, inner = 1, 1
    if along == -1:
        unit = _contraction_unit(first)
    elif first.format.is_tile:
        unit, inner = first.format.block[0] or 1, math.prod(first.codes.shape[1:-1])
    if (along > 0 and first.format.is_tile) or any(q.shape[dim] * inner % unit for q in tensors[:-1]):
        raise invalid_value(
            "tensors",
            f"lengths {[q.shape[dim] for q in tensors]} along axis {dim} of {first.format}",
            f"whole blocks: multiples of {unit} along the first or the contraction axis, but for the last length",
            "Blocks cannot be torn apart; quantize the joined tensor.",
        )


def _common(tensors: Sequence[QuantizedTensor], name: str) -> torch.Tensor:
    """The scale that all tensors have."""
    parts = [getattr(q, name) for q in tensors]
    if _operators.is_tracing(parts[0]) or not all(torch.equal(_raw(part), _raw(parts[0])) for part in parts):
        raise invalid_value(
            "tensors", f"{tensors[0].format} tensors, whose {name} is one for all blocks", "equal ones, in eager mode",
            "Join the values and quantize them: microfloat.torch.quantize(torch.cat([q.dequantize(), ...]), cast).",
        )  # fmt: skip
    return parts[0].clone()


@_register(aten.stack.default)
def _stack(func: Operator, args: Arguments, kwargs: Options) -> QuantizedTensor:
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(q, QuantizedTensor) for q in tensors):
        raise _refusal(func, args, kwargs)
    joined = func([_valueless(q) for q in tensors], dim)
    first = tensors[0]
    if not dim and first.dim() == 2 and first.upper.dim() == 0 and not first.format.is_tile:
        # Experts, which keep their scales.
        for q in tensors[1:]:
            _check_kinds("stack", first, q, tuple(q.shape), tuple(first.shape))
        parts = {
            name: torch.stack([_raw(q.parts()[name]) for q in tensors]).view(part.dtype)
            for name, part in first.parts().items()
        }
        return QuantizedTensor(
            parts["codes"], parts["scale"], parts.get("tensor_scale"), first.cast, axis=first.axis + 1,
            shape=joined.shape, dtype=first.dtype,
        )  # fmt: skip
    return torch.cat([q.unsqueeze(dim) for q in tensors], dim)  # type: ignore[return-value]


# ---- products ----------------------------------------------------------------------------------------------------


@_register(aten.mm.default, aten.addmm.default)
def _matmul(func: Operator, args: Arguments, kwargs: Options) -> torch.Tensor:
    """``a @ b`` (+ bias): a contracts its last axis, b its first. What `torch.matmul` and `F.linear` arrive at."""
    from microfloat.torch.ops import scaled_matmul

    *bias, a, b = args
    plain_bias = not bias or not isinstance(bias[0], QuantizedTensor)
    scaled = any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
    if not (isinstance(a, QuantizedTensor) and isinstance(b, QuantizedTensor) and plain_bias) or scaled:
        raise _refusal(func, args, kwargs)
    for name, q, axis in (("a", a, 1), ("b", b, 0)):
        if q.axis != axis:
            raise invalid_value(
                name,
                f"blocks along axis {q.axis} of shape {tuple(q.shape)}",
                f"blocks along axis {axis}, which a @ b contracts",
                "Quantize with axis=-1 for the left operand and axis=-2 for the right one, or multiply with b.t().",
            )
    return scaled_matmul(a, _permute(b, (1, 0)), bias=bias[0] if bias else None)


# ---- shapes ------------------------------------------------------------------------------------------------------


def _lead(q: QuantizedTensor, dim: int) -> int:
    """The axis of the codes that `dim`, another one than the contraction axis, is: the latter stands last there."""
    return dim if dim < q.axis else dim - 1


@_view(
    aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default, aten.unsqueeze.default,
    aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, by_shape=True,
)  # fmt: skip
def _regroup(q: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """Another division of the leading axes, before and behind the contraction axis, which stays as long as it is."""
    shape = tuple(shape)
    if shape == tuple(q.shape):
        return _detach(q)
    _refuse_experts(q, "view")
    length = q.shape[q.axis] if q.shape else 1
    axis, behind = max(len(shape) - 1, 0), math.prod(q.shape[q.axis + 1 :])
    if q.axis < q.dim() - 1:  # where it stands among others: behind as many entries as before
        fits = [number for number in range(len(shape)) if math.prod(shape[number + 1 :]) == behind]
        axis = next((number for number in fits if shape[number] == length), axis)
    if (shape[axis] if shape else 1) != length or math.prod(shape[axis + 1 :]) != behind:
        raise invalid_value(
            "shape",
            f"{shape} for a QuantizedTensor of shape {tuple(q.shape)} with blocks along axis {q.axis}",
            f"a shape whose last axis is the contraction axis, {length} long"
            if q.axis == max(q.dim() - 1, 0)
            else f"the contraction axis, {length} long, and {behind} entries behind it",
            "View and reshape regroup leading axes only; dequantize for anything else. DistributedDataParallel and "
            "FSDP flatten parameters: build their layers without quantized_model_init.",
        )
    scale = q.scale
    if not (q.format.is_per_tensor or q.format.is_tile):
        scale = scale.view(scale_shape(q.format, shape, axis, (0, scale.shape[-1])))
    codes = q.codes.view(*leading_axes(shape, axis), q.codes.shape[-1])
    return _view_of(q, codes, scale, q.tensor_scale, shape=shape, axis=axis)


@_view(aten.t.default)
def _t(q: QuantizedTensor) -> QuantizedTensor:
    return _permute(q, (1, 0)) if q.dim() == 2 else _detach(q)


@_view(aten.transpose.int)
def _transpose(q: QuantizedTensor, dim0: int, dim1: int) -> QuantizedTensor:
    order = list(range(q.dim()))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return _permute(q, order)


@_view(aten.permute.default)
def _permute(q: QuantizedTensor, dims: Sequence[int]) -> QuantizedTensor:
    """Any order of axes. Codes are in operand form, so moving the contraction axis moves no byte."""
    order = [dim % max(q.dim(), 1) for dim in dims]
    if order == list(range(q.dim())):
        return _detach(q)
    shape, axis = tuple(q.shape[dim] for dim in order), order.index(q.axis)
    leads = [_lead(q, dim) for dim in order if dim != q.axis]
    if order[0]:
        _refuse_experts(q, "permute")
    if leads == sorted(leads):
        return _view_of(q, q.codes, q.scale, q.tensor_scale, shape=shape, axis=axis)
    if q.format.is_tile:
        raise invalid_value(
            "dims",
            f"{tuple(order)} for a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "blocks of one row, or the other axes than the contraction axis in their order",
            "Tiles run over the rows of all leading axes; dequantize first.",
        )
    of_codes = (*leads, q.dim() - 1)
    scale = q.scale if q.format.is_per_tensor else q.scale.permute(of_codes)
    row_scales = _rows(q, lambda rows: rows.permute(of_codes))
    is_copy = row_scales is not q.tensor_scale
    return _view_of(q, q.codes.permute(of_codes), scale, row_scales, shape=shape, axis=axis, is_slice=is_copy)


def _rows(q: QuantizedTensor, function: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """The tensor_scale; one of rows after a function of it with the leading axes of the codes."""
    if q.tensor_scale is None or q.tensor_scale.dim() < 2:
        return q.tensor_scale
    return function(q.tensor_scale.view(*q.codes.shape[:-1], 1)).reshape(-1, 1)


@_view(aten.expand.default, by_shape=True)
def _expand(q: QuantizedTensor, shape: Sequence[int]) -> QuantizedTensor:
    """Leading axes of one entry, and new ones in front, repeated without copying codes; scales of tiles are copied."""
    shape, axis = tuple(shape), q.axis + len(shape) - q.dim()
    if shape == tuple(q.shape):
        return _detach(q)
    _refuse_experts(q, "expand")
    if not q.shape or shape[axis] != q.shape[q.axis]:
        raise invalid_value(
            "size", f"{shape} for a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "the contraction axis as it is", "Only the other axes expand; dequantize first.",
        )  # fmt: skip
    leading, scale, own = leading_axes(shape, axis), q.scale, tuple(q.codes.shape[:-1])
    if q.format.is_tile:
        count = math.prod(leading[: len(leading) - len(own)])
        while own and own[0] == 1 and leading[-len(own)] != 1:
            count, own = count * leading[-len(own)], own[1:]
        rows, tile = math.prod(own), q.format.block[0] or 1
        if leading[len(leading) - len(own) :] != own or (count > 1 and rows % tile):
            raise invalid_value(
                "size", f"{shape} for a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
                f"new axes in front of whole tiles of {tile} rows", "Blocks cannot be torn apart; dequantize first.",
            )  # fmt: skip
        scale = scale.repeat(count, 1)
    elif not q.format.is_per_tensor:
        scale = scale.expand(*leading, -1)
    row_scales = _rows(q, lambda rows: rows.expand(*leading, 1))
    return _view_of(q, q.codes.expand(*leading, -1), scale, row_scales, shape=shape, axis=axis, is_slice=True)


@_view(aten.slice.Tensor)
def _slice(
    q: QuantizedTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> QuantizedTensor:
    dim = dim % q.dim()
    window = slice(start, end, step)
    first, last, _ = window.indices(q.shape[dim])
    last = max(first, last)
    if (first, last, step) == (0, q.shape[dim], 1):
        return _detach(q)
    return _slice_contraction(q, first, last, step) if dim == q.axis else _slice_rows(q, dim, first, last, step)


def _contraction_unit(q: QuantizedTensor) -> int:
    """Elements along C that belong together: a block, a byte, a group of the Hadamard transform."""
    block = q.format.block[1] or 1
    return math.lcm(block, q.format.element.codes_per_byte, q.hadamard.size if q.hadamard else 1)


def _slice_contraction(q: QuantizedTensor, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut C at block boundaries (and at whole bytes, and whole groups of the Hadamard transform)."""
    length = q.shape[q.axis]
    block, unit = q.format.block[1] or 1, _contraction_unit(q)
    if step != 1 or first % unit or (last % unit and last != length):
        raise _torn(q, q.axis, f"[{first}:{last}:{step}]", unit)
    per_byte = q.format.element.codes_per_byte
    stored_last = -(-last // unit) * unit
    codes = q.codes[..., first // per_byte : -(-stored_last // per_byte)]
    scale = q.scale if q.format.block[1] is None else q.scale[..., first // block : -(-last // block)]
    shape = [last - first if dim == q.axis else size for dim, size in enumerate(q.shape)]
    return _view_of(q, codes, scale, q.tensor_scale, shape=shape, is_slice=True)


def _slice_rows(q: QuantizedTensor, dim: int, first: int, last: int, step: int) -> QuantizedTensor:
    """Cut a leading axis; a tile format only along the first one, at whole tiles."""
    shape = list(q.shape)
    shape[dim] = len(range(first, last, step))
    lead = _lead(q, dim)
    window = (slice(None),) * lead + (slice(first, last, step),)
    scale, tensor_scale = (q.scale, q.tensor_scale) if dim else _of_experts(q, window[0])
    codes = q.codes[window]
    if q.format.is_tile:
        inner = math.prod(q.codes.shape[1:-1])
        tile = q.format.block[0] or 1
        start, stop = first * inner, last * inner
        unit = tile // math.gcd(tile, inner) if inner else 1
        if lead or step != 1 or start % tile or (stop % tile and last != q.shape[dim]):
            raise _torn(q, dim, f"[{first}:{last}:{step}]", unit if not lead else None)
        scale = scale[start // tile : -(-stop // tile)]
    elif not q.format.is_per_tensor:
        scale = scale[window]
    if tensor_scale is not None and tensor_scale.dim() == 2:
        tensor_scale = tensor_scale.view(*q.codes.shape[:-1], 1)[window].reshape(-1, 1)
    made = _view_of(q, codes, scale, tensor_scale, shape=shape, is_slice=True)
    return _alone(made) if q.is_per_expert and not dim else made


def _alone(q: QuantizedTensor) -> QuantizedTensor:
    """Experts cut from others: they share no scale with those, so that writing them is writing a tensor."""
    return QuantizedTensor(q.codes, q.scale, q.tensor_scale, q.cast, axis=q.axis, shape=q.shape, dtype=q.dtype)


def _torn(q: QuantizedTensor, dim: int, window: str, unit: int | None) -> InvalidValueError:
    needed = (
        f"step 1 and bounds that are multiples of {unit} (or the end)" if unit else "a cut along the first axis only"
    )
    return invalid_value(
        f"slice of axis {dim}", f"{window} of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}", needed,
        "Blocks cannot be torn apart; dequantize first to cut elsewhere.",
    )  # fmt: skip


@_view(aten.select.int)
def _select(q: QuantizedTensor, dim: int, index: int) -> QuantizedTensor:
    dim = dim % q.dim()
    if dim == q.axis:
        raise invalid_value(
            "dim", f"{dim}, the contraction axis of a QuantizedTensor ({q.format}) of shape {tuple(q.shape)}",
            "a leading axis", "What is left would have no contraction axis; dequantize first.",
        )  # fmt: skip
    index = index % q.shape[dim]
    row = _slice(q, dim, index, index + 1)
    shape = [size for position, size in enumerate(q.shape) if position != dim]
    codes, scale, tensor_scale, lead = row.codes, row.scale, row.tensor_scale, _lead(q, dim)
    if not dim:
        scale, tensor_scale = _of_experts(row, 0)
    if q.dim() > 2:  # the codes of one row have two axes
        codes = codes.squeeze(lead)
        scale = scale if q.format.is_per_tensor or q.format.is_tile else scale.squeeze(lead)
    return _view_of(row, codes, scale, tensor_scale, shape=shape, axis=q.axis - (dim < q.axis))


@_view(aten.split.Tensor)
def _split(q: QuantizedTensor, split_size: int, dim: int = 0) -> list[QuantizedTensor]:
    extent = q.shape[dim]
    starts = range(0, max(extent, 1), max(split_size, 1))
    return [_slice(q, dim, start, min(start + split_size, extent)) for start in starts]


@_view(aten.split_with_sizes.default)
def _split_with_sizes(q: QuantizedTensor, split_sizes: Sequence[int], dim: int = 0) -> list[QuantizedTensor]:
    stops = [sum(split_sizes[: position + 1]) for position in range(len(split_sizes))]
    return [_slice(q, dim, stop - size, stop) for stop, size in zip(stops, split_sizes, strict=True)]


@_view(aten.unbind.int)
def _unbind(q: QuantizedTensor, dim: int = 0) -> list[QuantizedTensor]:
    return [_select(q, dim, index) for index in range(q.shape[dim])]
