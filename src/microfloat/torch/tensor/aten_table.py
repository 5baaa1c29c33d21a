"""The table from operators of torch to functions on a QuantizedTensor, and the errors for all other operators."""

import sys
from collections.abc import Callable, Sequence
from typing import NoReturn, TypeAlias, TypeVar

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves

from microfloat.errors import InvalidTypeError, NotSupportedError, invalid_type, invalid_value
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.tensor import custom_ops as _operators
from microfloat.torch.tensor.quantized_tensor import UNKNOWN, QuantizedTensor

Operator: TypeAlias = torch._ops.OpOverload
Implementation = TypeVar("Implementation", bound=Callable[..., object])

# Filled by the decorators below when the aten modules are imported; bounded by their number of operators.
_TABLE: dict[Operator, Callable[[Operator, Arguments, Options], object]] = {}


def _dispatch(cls: type, func: Operator, types: object, args: Arguments = (), kwargs: Options | None = None) -> object:
    """Run the function of an operator; raises InvalidTypeError for an operator without one."""
    implementation, kwargs = _TABLE.get(func), kwargs or {}
    try:
        if implementation is None:
            raise refusal(func, args, kwargs)
        result = implementation(func, args, kwargs)
    except InvalidTypeError as error:
        if func is not torch.ops.aten.dequantize.self and _is_in_vmap():
            # Binary operators of the tensors that vmap wraps would swallow a TypeError.
            raise NotSupportedError(f"{error} Do so outside of vmap, which maps over plain tensors.") from error
        raise
    except NotImplementedError as error:  # torch's, of parts that vmap has wrapped
        flat = tree_leaves((args, kwargs))
        if not any(isinstance(q, QuantizedTensor) and _operators.is_followed(q.codes) for q in flat):
            raise
        raise NotSupportedError(
            f"{_name(func)}: got a QuantizedTensor inside vmap, or one that leaves it, needed plain tensors, which "
            "torch batches. Inside, call dequantize or scaled_matmul with it; return q.dequantize(), or the tensors of "
            "q.parts() and make QuantizedTensor.from_parts of them outside."
        ) from error
    if func._schema.is_mutable:
        _count_writes(args[0])
    return result


QuantizedTensor.__torch_dispatch__ = classmethod(_dispatch)  # type: ignore[assignment]


def _count_writes(written: object) -> None:
    """Add one to the version of every part of a written tensor, which torch does not count here.

    Behind ``weight.data``, through which loaders write, the version of the tensor itself is a separate one. The parts
    share theirs with the weight's, and caches of a weight compare both.
    """
    for q in written if isinstance(written, list | tuple) else (written,):
        if isinstance(q, QuantizedTensor) and not _operators.is_tracing(q.codes):
            for part in q.part_list():
                if not (part.is_inference() or _operators.is_followed(part)):
                    torch.autograd.graph.increment_version(part)


def _is_in_vmap() -> bool:
    """True below a call of `torch.vmap`, found by the frames, since vmap is off while a wrapped operator runs."""
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

    `by_shape`: the implementation gets the shape of the result in place of the arguments. `takes_axes`: the arguments
    may be wrong, and torch checks them on a tensor without values first.
    """

    def add(implementation: Implementation) -> Implementation:
        def run(func: Operator, args: Arguments, kwargs: Options) -> object:
            expected = func(valueless(args[0]), *args[1:], **kwargs) if takes_axes else args[0]
            result = implementation(args[0], expected.shape) if by_shape else implementation(*args, **kwargs)
            if torch.compiler.is_compiling():
                return return_and_correct_aliasing(func, tuple(args), kwargs, result)
            return result

        register(*operators)(run)
        return implementation

    return add


def valueless(q: QuantizedTensor) -> torch.Tensor:
    """A plain tensor of q's shape and dtype on the meta device."""
    return torch.empty(q.shape, dtype=q.dtype, device="meta")


def view_of(
    q: QuantizedTensor, codes: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor | None, *,
    shape: Sequence[int], axis: int | None = None, is_slice: bool = False,
) -> QuantizedTensor:  # fmt: skip
    """A tensor of these parts, which share storage with q's; a slice keeps the tensor that it is cut from."""
    root = q.root
    if is_slice and root is None:
        root = UNKNOWN if _operators.is_tracing(codes) else q.map_parts(lambda part: part)
        if q._is_filled and root is not UNKNOWN:
            root._is_filled = True
    return q._remade(
        codes, scale, tensor_scale, axis=q.axis if axis is None else axis, shape=shape, dtype=q.dtype, root=root
    )


def raw(part: torch.Tensor) -> torch.Tensor:
    """The bits as integers, which are equal for equal NaN, and which operators without float8 can read."""
    return part.view(torch.int32 if part.dtype == torch.float32 else torch.uint8)


def take(q: QuantizedTensor, fresh: QuantizedTensor, flag: torch.Tensor | None = None) -> None:
    """Copy the bytes of `fresh`, of q's kind, unless `flag` says otherwise."""
    for part, new in zip(q.part_list(), fresh.part_list(), strict=True):
        kept = raw(part)
        kept.copy_(raw(new) if flag is None else torch.where(flag.reshape(()).to(kept.device) != 0, kept, raw(new)))


def refuse_experts(q: QuantizedTensor, operation: str) -> None:
    """Refuse to move or to divide the first axis of experts, which have one scale each."""
    if q.is_per_expert:
        got = f"a QuantizedTensor ({q.format}) of {q.shape[0]} experts, each with a scale of its own"
        remedy = "Take them one by one, q[e], or dequantize."
        raise invalid_value(operation, got, "their axis where it is, the first", remedy)


def is_decay(gradient: object, kwargs: Options) -> bool:
    """True for a sum by which an optimizer decays a weight: with a factor, and into a gradient, which is plain."""
    return kwargs.get("alpha", 1) != 1 and not isinstance(gradient, QuantizedTensor)


def check_kinds(
    operation: str, q: QuantizedTensor, source: QuantizedTensor, got: Sequence[int], needed: Sequence[int]
) -> None:
    """Refuse to copy the bytes of `source`, whose shape is `got`, into q where they would have other values."""
    kinds = [
        (one.format, one.hadamard, sorted(one.parts()), tuple(shape), one.axis - one.dim())
        for one, shape in ((source, got), (q, needed))
    ]
    if kinds[0] != kinds[1]:
        raise invalid_value(
            operation, f"{source.format} of shape {tuple(got)}, axis {source.axis}",
            f"{q.format} of shape {tuple(needed)}, axis {q.axis}, and the same Hadamard and scales",
            "Copy from source.dequantize() to quantize anew.",
        )  # fmt: skip


def joined(func: Operator, args: Arguments, kwargs: Options) -> tuple[Sequence[QuantizedTensor], int, torch.Tensor]:
    """The tensors that cat or stack joins, along which axis, and their result without values; no plain one joins."""
    tensors, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(q, QuantizedTensor) for q in tensors):
        raise refusal(func, args, kwargs)
    made = func([valueless(q) for q in tensors], dim)
    return tensors, dim % made.dim(), made


_DEQUANTIZE = "Call .dequantize() first; nothing dequantizes in silence."
_OF_STATE = (
    f"{_DEQUANTIZE} Where load_state_dict asked for it: load microfloat.torch.plain_state_dict(model), or take the "
    "quantized weights over with assign=True. Where DistributedDataParallel or distribute_tensor did: use fully_shard, "
    "or build the layers without quantized_model_init and let a recipe quantize them. Where full_tensor or a full "
    "state dict did: save shards with torch.distributed.checkpoint, or plain_state_dict(model). Where the optimizer "
    "ASGD did: step with another one, and average by torch.optim.swa_utils.AveragedModel."
)
# Beginnings of operators' names, and the remedy.
_NO_ARRAY = (
    f"{_DEQUANTIZE} Instead of accelerate's disk_offload: from_pretrained with a MicrofloatConfig and a device_map."
)
_REMEDIES: dict[tuple[str, ...], str] = {
    ("_foreach_", "_fused_"): "Quantized tensors are updated one by one. Where an optimizer asked: give it "
    "foreach=False, and no fused=True, or let it step on float32 master weights and write them by "
    "microfloat.torch.update_quantized(weight, master). Where AveragedModel did: give it an avg_fn that averages "
    "q.dequantize(). Clip gradients, which are plain, as usual.",
    # Inside torch.func, where torch's own method is called for a wrapped tensor.
    ("dequantize",): "A transform of torch.func hides that it is quantized: call .dequantize() outside of the "
    "transform.",
    ("_c10d", "c10d", "constant_pad_nd"): _OF_STATE,
    # Called by torch.testing.assert_close.
    ("view.dtype",): _NO_ARRAY,
    ("isclose", "allclose"): f"{_DEQUANTIZE} torch.equal(a, b) compares codes and scales.",
    ("mm", "addmm"): f"{_DEQUANTIZE} Or quantize the other operand too. With a plain tensor, a product contracts the "
    "axis along which the blocks of the weight run, as microfloat.torch.linear(x, w) does: x @ w.t() or w @ x of one "
    "cast along its last axis.",
    ("_grouped_mm",): f"{_DEQUANTIZE} microfloat.torch.grouped_matmul(x, weight, group_sizes) multiplies experts "
    "[E, N, K], with group_sizes = offs.diff(prepend=offs.new_zeros(1)).",
    ("embedding",): f"{_DEQUANTIZE} weight[indices].dequantize() reads the rows of these indices alone, as "
    "F.embedding does of a matrix cast along its last axis, without max_norm and sparse.",
    ("as_strided",): f"{_DEQUANTIZE} Where torch.compile asked, for a view of a quantized argument that compiled code "
    "returns: return view.clone(), or take the view outside of it.",
    ("bmm",): f"{_DEQUANTIZE} Quantized matrices are multiplied one by one, or by microfloat.torch.grouped_matmul.",
    ("baddbmm",): f"{_DEQUANTIZE} Where an adapter asked whose target are quantized experts (target_parameters of "
    "PEFT): it adds to their values, which would make all of them dense. Adapt linear layers around them "
    "(target_modules), or leave these experts out of quantize_; experts that convert has changed take such adapters.",
}  # fmt: skip


def _name(func: Operator) -> str:
    return str(func).removeprefix("aten.")


def refusal(func: Operator, args: Arguments, kwargs: Options) -> Exception:
    """The error of an operator that a QuantizedTensor does not have, with the remedy for the usual callers."""
    name, is_quantized = _name(func), bool(args) and isinstance(args[0], QuantizedTensor)
    remedy = next((remedy for starts, remedy in _REMEDIES.items() if name.startswith(starts)), None)
    if remedy is None:
        remedy = _DEQUANTIZE
        if name.startswith("copy_") and not is_quantized:
            remedy = _OF_STATE
        elif name.split(".")[0].endswith("_") and is_quantized:
            remedy = "Compute on q.dequantize(), then write the result with q.copy_(values), which quantizes it."
    flat = tree_leaves((args, kwargs))
    formats = sorted({str(value.format) for value in flat if isinstance(value, QuantizedTensor)})
    return invalid_type(name, f"a QuantizedTensor ({', '.join(formats)})", "a plain tensor", remedy)


_NO_STORAGE = (
    "Its memory is that of q.codes, q.scale and q.tensor_scale: use those, or q.dequantize(). Save it with torch.save; "
    "safetensors take plain weights, such as those of microfloat.torch.plain_state_dict(model); "
    "microfloat.torch.save_quantized(model, path) writes codes and scales. accelerate's cpu_offload moves it; its "
    "dispatch_model and disk_offload ask for addresses: from_pretrained with a MicrofloatConfig takes a device_map."
)
_NO_ORDER = (
    f"{_DEQUANTIZE} Where torch.nn.init.trunc_normal_ asked, which draws again what is out of bounds: "
    "q.copy_(torch.nn.init.trunc_normal_(torch.empty_like(q)))."
)


def _refuse_methods() -> None:
    """Replace methods of torch.Tensor that never reach `__torch_dispatch__`.

    Torch turns a TypeError inside a binary operator into NotImplemented, so that ``q == x`` would compare identities.
    Methods that ask for memory would read address zero, since a QuantizedTensor has no storage but that of its parts.
    """

    def refuse(remedy: str, name: str) -> None:
        def method(self: QuantizedTensor, *arguments: object, **options: object) -> NoReturn:
            raise invalid_type(name, f"a QuantizedTensor ({self.format})", "a plain tensor", remedy)

        method.__name__ = name
        setattr(QuantizedTensor, name, method)

    arithmetic = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
    binary = [*arithmetic, *(f"r{stem}" for stem in arithmetic), "eq", "ne"]
    for remedy, names in (
        (_NO_ARRAY, ["numpy"]),
        (_DEQUANTIZE, ["item", "tolist", "__array__", "apply_", "map_", *(f"__{stem}__" for stem in binary)]),
        (_NO_STORAGE, ["storage", "_typed_storage", "data_ptr", "const_data_ptr", "__dlpack__", "__dlpack_device__"]),
        (_NO_ORDER, ["__lt__", "__le__", "__gt__", "__ge__"]),
    ):
        for name in names:
            refuse(remedy, name)
    QuantizedTensor.__hash__ = torch.Tensor.__hash__  # type: ignore[method-assign]
    QuantizedTensor.__matmul__ = lambda self, other: torch.matmul(self, other)  # type: ignore[method-assign]
    QuantizedTensor.__rmatmul__ = lambda self, other: torch.matmul(other, self)  # type: ignore[method-assign]


_refuse_methods()
