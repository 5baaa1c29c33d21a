"""Refusals of operators and methods that a QuantizedTensor does not know, and what each says to do instead."""

from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch
from torch.utils._pytree import tree_leaves

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.torch._typing import Arguments, Options
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

__all__ = ["Operator", "refusal", "refusal_in_vmap"]

Operator: TypeAlias = torch._ops.OpOverload

_NO_LISTS = (
    "Quantized tensors are updated one by one. Where an optimizer asked: give it foreach=False, and no fused=True, or "
    "let it step on float32 master weights and write them by microfloat.torch.update_quantized(weight, master). Where "
    "AveragedModel did: give it an avg_fn that averages q.dequantize(). Clip gradients, which are plain, as usual."
)
_NO_STORAGE = (
    "Its memory is that of q.codes, q.scale and q.tensor_scale: use those, or q.dequantize(). Save it with torch.save; "
    "safetensors take plain weights, such as those of microfloat.torch.plain_state_dict(model); "
    "microfloat.torch.save_quantized(model, path) writes codes and scales. accelerate's cpu_offload moves it; its "
    "dispatch_model and disk_offload ask for addresses."
)
_NO_ORDER = (
    "Call .dequantize() first; nothing dequantizes in silence. Where torch.nn.init.trunc_normal_ asked, which draws "
    "again what is out of bounds: q.copy_(torch.nn.init.trunc_normal_(torch.empty_like(q)))."
)


def refusal_in_vmap(func: Operator) -> NotSupportedError:
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
        remedy = _NO_LISTS
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


def _refuse_methods() -> None:
    """Replace what torch would answer past `__torch_dispatch__`.

    It turns a TypeError inside a binary operator into NotImplemented, so that ``q == x`` would fall back to identity;
    and what asks for memory would read address zero, since a QuantizedTensor has no storage but those of its parts.
    """

    def refusing(name: str, *remedy: str) -> Callable[..., NoReturn]:
        def method(self: QuantizedTensor, *arguments: object, **options: object) -> NoReturn:
            raise self._refusal(name, *remedy)

        method.__name__ = name
        return method

    for name in ("numpy", "item", "tolist", "__array__", "apply_", "map_"):
        setattr(QuantizedTensor, name, refusing(name))
    for name in ("storage", "_typed_storage", "data_ptr", "const_data_ptr", "__dlpack__", "__dlpack_device__"):
        setattr(QuantizedTensor, name, refusing(name, _NO_STORAGE))
    arithmetic = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
    for stem in (*arithmetic, *(f"r{stem}" for stem in arithmetic), "eq", "ne"):
        setattr(QuantizedTensor, f"__{stem}__", refusing(f"__{stem}__"))
    for stem in ("lt", "le", "gt", "ge"):
        setattr(QuantizedTensor, f"__{stem}__", refusing(f"__{stem}__", _NO_ORDER))
    QuantizedTensor.__hash__ = torch.Tensor.__hash__  # type: ignore[method-assign]
    QuantizedTensor.__matmul__ = lambda self, other: torch.matmul(self, other)  # type: ignore[method-assign]
    QuantizedTensor.__rmatmul__ = lambda self, other: torch.matmul(other, self)  # type: ignore[method-assign]


_refuse_methods()
