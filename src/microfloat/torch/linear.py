"""The quantized linear function: three GEMMs read off a recipe's table, six operands cast where the table says.

    fprop  y_MN  = x_MK @ w_NK.T      contracts K   operands x [M, K],    w [N, K]
    dgrad  dx_MK = dy_MN @ w_NK       contracts N   operands dy [M, N],   w.T [K, N]
    wgrad  dw_NK = dy_MN.T @ x_MK     contracts M   operands dy.T [N, M], x.T [K, M]

Legend: M = rows of x (all leading dimensions), K = in features, N = out features. "row" is the operand form of the
tensor as it lies, "column" that of its transpose. Only usages whose GEMM will run are cast (docs/numerics.md, 6).
"""

import contextlib
import dataclasses
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Cast, Gemm, Recipe
from microfloat.torch import scaling
from microfloat.torch._operators import has_tangent
from microfloat.torch.backends.base import Operand, Values
from microfloat.torch.gemms import high_precision_product
from microfloat.torch.kept import KeptWeight
from microfloat.torch.reference import transpose_operand
from microfloat.torch.tensor import QuantizedTensor

__all__ = [
    "STREAM", "LinearCall", "autocast_dtype", "bias_gradient", "column_operand", "layer_of", "linear_backward",
    "linear_forward", "quantized_linear", "refuse_batched", "refuse_double_backward", "refuse_transforms",
]  # fmt: skip

_unsafe_view = torch.ops.aten._unsafe_view.default

# Counter word `stream` of each operand's random bytes (docs/numerics.md 5.3).
STREAM = {"x": (0, 5), "w": (1, 3), "dy": (2, 4)}
# The GEMM and side (0 = lhs, 1 = rhs) that read a tensor's row form, and those that read its column form.
USES = {
    "x": (("fprop", 0), ("wgrad", 1)),
    "w": (("fprop", 1), ("dgrad", 1)),
    "dy": (("dgrad", 0), ("wgrad", 0)),
}

# An operand in high precision is the plain 2-D tensor in operand form.
AnyOperand = Operand | Values | torch.Tensor


@dataclass(eq=False)
class LinearCall:
    """Everything one forward fixes and its backward reads again: no ambient state is consulted later."""

    recipe: Recipe
    backend: Any
    compute_dtype: torch.dtype
    layer: "weakref.ref[torch.nn.Module] | None" = None
    region: scaling.Region | None = None
    group: Any = None
    wants_grad: bool = True
    records: bool = False
    seed: torch.Tensor | None = None
    scales: dict[str, torch.Tensor] = field(default_factory=dict)
    # Slot -> float32 [1] that takes the amax of a delayed cast, where the caller records it and not the layer's state.
    live: dict[str, torch.Tensor] = field(default_factory=dict)
    kept_weight: KeptWeight | None = None
    weight_key: tuple = ()
    # In a forward inside a backward: what it records if its own backward runs.
    late: scaling.Late | None = None
    # Only for backends with several forms of an operand (`call_forms`): GEMM -> forms of its operands, and fold counts.
    forms: dict[str, tuple[str, str]] | None = None
    counts: Any = None


def quantized_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall
) -> torch.Tensor:
    """``y = x @ weight.T + bias`` under ``call.recipe``, differentiable once.

    x [..., K], weight [N, K], bias [N] or None -> y [..., N] in the call's compute dtype. Sizes need not divide
    anything. Source: docs/numerics.md, section 6.
    """
    return _QuantizedLinear.apply(x, weight, bias, call)


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LinearCall):
        wants_dx, wants_dw = (needed and call.wants_grad for needed in ctx.needs_input_grad[:2])
        y, x_column, w_column = linear_forward(call, x, weight, bias, wants_dx, wants_dw)
        saver = _Saver()
        ctx.x_column, ctx.w_column = saver.add(x_column), saver.add(w_column)
        ctx.save_for_backward(*saver.tensors)
        ctx.call = call
        ctx.x_shape, ctx.x_dtype = x.shape, x.dtype
        ctx.w_dtype, ctx.bias_dtype = weight.dtype, bias.dtype if bias is not None else None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        refuse_double_backward()
        (dy,) = gradients
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        saved = ctx.saved_tensors
        x_column = _Saver.restore(ctx.x_column, saved) if wants_dw else None
        w_column = _Saver.restore(ctx.w_column, saved) if wants_dx else None
        if ctx.call.late and not (wants_dx or wants_dw):
            scaling.record_late(layer_of(ctx.call), ctx.call.late)
        dx, dw = linear_backward(ctx.call, dy, x_column, w_column, ctx.x_dtype, ctx.w_dtype)
        db = bias_gradient(dy, ctx.bias_dtype) if wants_db else None
        return None if dx is None else dx.reshape(ctx.x_shape), dw, db, None


def refuse_double_backward() -> None:
    """Raise NotSupportedError where backward is itself being differentiated."""
    if torch.is_grad_enabled():
        raise NotSupportedError(
            "backward: got create_graph=True (a double backward) through a quantized Linear, needed a single backward. "
            "Quantization has no second derivative; run this layer under autocast(enabled=False)."
        )
    if torch._C._are_functorch_transforms_active():
        _refuse_transform("backward")


def refuse_transforms(*tensors: torch.Tensor | None) -> None:
    """Raise NotSupportedError inside torch.func's transforms and for tensors that carry a forward-mode tangent."""
    if torch._C._are_functorch_transforms_active():
        _refuse_transform("forward")
    if has_tangent(*tensors):
        _refuse_transform("forward")


def refuse_batched(tensor: torch.Tensor) -> None:
    """Raise NotSupportedError for one of the gradients that ``is_grads_batched=True`` takes at once."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
        _refuse_transform("backward")


def _refuse_transform(where: str) -> None:
    raise NotSupportedError(
        f"{where}: got a transform of torch.func (vmap, grad, jvp, jacrev, ...), forward-mode AD or batched gradients "
        "through a quantized Linear, needed an ordinary forward and backward. Call the layer on a batch and use "
        "loss.backward() or torch.autograd.grad, one gradient at a time, or run it under autocast(enabled=False)."
    )


def linear_forward(
    call: LinearCall, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wants_dx: bool, wants_dw: bool
) -> tuple[torch.Tensor, AnyOperand | None, AnyOperand | None]:
    """fprop. Returns y [..., N], and what backward needs: x.T for wgrad and w.T for dgrad (None if not wanted)."""
    recipe = call.recipe
    x = x.resolve_neg()  # a kernel reads memory, not the negation that a view of it may stand for
    x_MK = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if x_MK.dtype != call.compute_dtype:
        x_MK = x_MK.to(call.compute_dtype)
    with _plain_dtypes(x.device.type):
        x_row, x_column = _cast_both(call, "x", x_MK, recipe.fprop.lhs, recipe.wgrad.rhs if wants_dw else _UNUSED)
        w_row, w_column = _cast_weight(call, weight, recipe.dgrad.rhs if wants_dx else _UNUSED)
        y_MN = _gemm(call.backend, recipe.fprop, x_row, w_row, bias, call.compute_dtype)
    # Not a view for autograd, as nn.Linear's result is none: an activation may then work in place.
    y = y_MN if x.dim() == 2 else _unsafe_view(y_MN, (*x.shape[:-1], weight.shape[0]))
    return y, x_column, w_column


def linear_backward(
    call: LinearCall, dy: torch.Tensor, x_column: AnyOperand | None, w_column: AnyOperand | None,
    x_dtype: torch.dtype, w_dtype: torch.dtype,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    """dgrad and wgrad, each where its other operand is given: (dx [M, K], dw [N, K])."""
    recipe, backend = call.recipe, call.backend
    dy = dy.resolve_neg()
    dy_MN = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    dx = dw = None
    with _plain_dtypes(dy.device.type):
        dy_row, dy_column = _cast_both(
            call, "dy", dy_MN,
            _UNUSED if w_column is None else recipe.dgrad.lhs,
            _UNUSED if x_column is None else recipe.wgrad.lhs,
        )  # fmt: skip
        if w_column is not None:
            dx = _gemm(backend, recipe.dgrad, dy_row, w_column, None, x_dtype)
        if x_column is not None:
            dw = _gemm(backend, recipe.wgrad, dy_column, x_column, None, w_dtype)
    return dx, dw


def column_operand(call: LinearCall, slot: str, tensor: torch.Tensor, cast: Cast | None) -> AnyOperand | None:
    """The column operand of x or w alone, to the bits of the one that comes with a row operand; None = as it is."""
    with _plain_dtypes(tensor.device.type):
        return _cast_both(call, slot, tensor, _UNUSED, cast)[1]


def bias_gradient(dy: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``db = sum over rows of dy``, summed in float32 from the unquantized dy and rounded once."""
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def of_slot(slot: str, cast: Cast) -> Cast:
    """The cast as products of a layer run it: of dy, one that tells them of overflow."""
    return cast.of_gradient if slot == "dy" else cast


class _Unused:
    """Marks a usage whose GEMM will not run; None already means high precision."""


_UNUSED = _Unused()


def _cast_both(
    call: LinearCall, slot: str, tensor: torch.Tensor, row: Cast | _Unused | None, column: Cast | _Unused | None
) -> tuple[AnyOperand | None, AnyOperand | None]:
    """Both operand forms of one tensor; high-precision forms are views of it, unused ones None."""
    refuse_batched(tensor)
    row_cast, column_cast = (of_slot(slot, cast) if isinstance(cast, Cast) else None for cast in (row, column))
    row_stream, column_stream = STREAM[slot]
    quantized: tuple[Any, Any] = (None, None)
    if row_cast is not None or column_cast is not None:
        options: dict[str, Any] = {"seed": call.seed, "row_stream": row_stream, "column_stream": column_stream}
        backend, history = call.backend, None
        delayed = next((cast for cast in (row_cast, column_cast) if cast is not None and cast.is_delayed), None)
        if delayed is not None:
            options["scale_enc"], history = _delayed_state(call, slot, tensor, delayed)
        if call.forms is not None:
            (row_gemm, row_side), (column_gemm, column_side) = USES[slot]
            quantized = backend.prepare_both(
                tensor, row_cast, column_cast, row_form=call.forms[row_gemm][row_side],
                column_form=call.forms[column_gemm][column_side], record=history, slot=slot, counts=call.counts,
                **options,
            )  # fmt: skip
        else:
            if history is not None:
                options["amax"] = backend.amax(tensor)
                scaling.record_amax_(history, options["amax"])
            quantized = backend.quantize_both(tensor, row_cast, column_cast, **options)
    return tensor if row is None else quantized[0], tensor.t() if column is None else quantized[1]


def layer_of(call: Any) -> torch.nn.Module:
    """The layer that holds the delayed-scaling state of a call whose backward runs."""
    layer = call.layer()
    if layer is None:
        raise NotSupportedError(
            "backward: the layer that holds the delayed-scaling state was deleted before its backward ran. "
            "Keep the model alive until backward is done."
        )
    scaling.check_kept(layer)
    return layer


def _delayed_state(
    call: LinearCall, slot: str, tensor: torch.Tensor, cast: Cast
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The slot's encode scale, and the history whose live entry this cast must record into (None: it must not)."""
    scale = call.scales.get(slot)
    if call.layer is None:  # compiled code, which records by itself
        return scale, call.live.get(slot)  # type: ignore[return-value]
    layer = layer_of(call)
    region, group = call.region, call.group
    if call.late is not None:
        if slot != "dy":
            live = torch.zeros(1, dtype=torch.float32, device=scale.device)  # type: ignore[union-attr]
            call.late[slot] = (cast, live)
            return scale, live  # type: ignore[return-value]
        region, group = scaling.record_late(layer, call.late)
    if scale is None:  # dy's scale is read when backward runs: forward could not know it
        scale = scaling.encode_scale(layer, slot)
    if not call.records:
        return scale, None
    scaling.note_recorded(layer, slot, cast, group=group, region=region)
    return scale, scaling.amax_history(layer, slot)


def _cast_weight(
    call: LinearCall, weight: torch.Tensor, column: Cast | _Unused | None
) -> tuple[AnyOperand | None, AnyOperand | None]:
    """The weight's two operands, the kept ones where the caller allows it and the weight has not changed."""
    kept = None if call.kept_weight is None else call.kept_weight.find(weight, call.weight_key)
    if kept is not None and (kept[1] is not None or isinstance(column, _Unused)):
        return kept[0], None if isinstance(column, _Unused) else kept[1]
    if isinstance(weight, QuantizedTensor):
        return _stored_weight(call, weight, column)
    w_NK = weight.detach()
    if w_NK.dtype != call.compute_dtype:
        w_NK = w_NK.to(call.compute_dtype)
    operands = _cast_both(call, "w", w_NK, call.recipe.fprop.rhs, column)
    if call.kept_weight is not None:
        call.kept_weight.keep(weight, call.weight_key, operands)
    return operands


def _stored_weight(
    call: LinearCall, weight: QuantizedTensor, column: Cast | _Unused | None
) -> tuple[AnyOperand | None, AnyOperand | None]:
    """The operands of a weight that exists as codes only: those codes where the casts agree, else cast anew."""
    row = call.recipe.fprop.rhs
    w_NK = weight.dequantize(call.compute_dtype)
    w_row, w_column = _cast_both(call, "w", w_NK, _UNUSED if _is_stored(weight, row) else row, column)
    if _is_stored(weight, row):
        w_row = weight.to_operand()
    if isinstance(column, Cast) and column.transposes and _is_stored(weight, column):
        w_column = transpose_operand(weight.to_operand())
    return w_row, w_column


def _is_stored(weight: QuantizedTensor, cast: Cast | None) -> bool:
    return cast is not None and weight.cast == dataclasses.replace(cast, scaling=weight.cast.scaling)


def _gemm(
    backend: Any, gemm: Gemm, lhs: Any, rhs: Any, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """``lhs @ rhs.T (+ bias)``: quantized when both operands are, else in high precision with the other dequantized."""
    if not isinstance(lhs, torch.Tensor) and not isinstance(rhs, torch.Tensor):
        return backend.scaled_matmul(lhs, rhs, bias=bias, out_dtype=out_dtype, accumulate=gemm.accumulate)
    if isinstance(lhs, torch.Tensor):
        rhs = rhs if isinstance(rhs, torch.Tensor) else backend.dequantize(rhs, lhs.dtype)
    else:
        lhs = backend.dequantize(lhs, rhs.dtype)
    return high_precision_product(lhs, rhs, bias, out_dtype)


class _Saver:
    """Flattens operands into the tensors that save_for_backward takes, so that saved-tensor hooks see codes."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def add(self, operand: AnyOperand | None) -> Any:
        if operand is None:
            return None
        start = len(self.tensors)
        if isinstance(operand, torch.Tensor):
            self.tensors.append(operand)
            return (start, start + 1, None, None)
        tensors, rest = operand.flatten()
        self.tensors += tensors
        return (start, len(self.tensors), type(operand), rest)

    @staticmethod
    def restore(entry: Any, saved: tuple[torch.Tensor, ...]) -> AnyOperand:
        start, stop, kind, rest = entry
        return saved[start] if kind is None else kind.unflatten(saved[start:stop], rest)


_NOTHING = contextlib.nullcontext()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """The dtype of torch.autocast where it is enabled for such devices (there is none for meta), else None."""
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _plain_dtypes(device_type: str) -> Any:
    """Keep torch.autocast from touching the GEMMs inside: their dtypes are this module's business."""
    if autocast_dtype(device_type) is not None:
        return torch.autocast(device_type, enabled=False)
    return _NOTHING
