"""The quantized linear under torch.compile: one opaque operator forward, one backward, plain tensors between them.

Compiled code cannot read the context variable of `autocast`. It reads attributes of `microfloat.torch.context` instead,
which Dynamo guards: each call looks them up again in its own thread and task, and an autocast that changes what a layer
runs finds or compiles other code. Code that runs without its guards, such as an exported program, would not: so the
operator compares with the true context of its caller, and raises where a layer would run another recipe.

Legend: M = rows of x, K = in features, N = out features.
"""

from dataclasses import dataclass
from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.formats import ScaledFormat
from microfloat.layout import folded_format
from microfloat.operands import OPERANDS
from microfloat.recipes import Cast, Delayed, Gemm, Recipe
from microfloat.torch import backends, context, scaling
from microfloat.torch import context as tokens
from microfloat.torch.backends.base import Operand
from microfloat.torch.linear import (
    LinearCall,
    bias_gradient,
    column_operand,
    linear_backward,
    linear_forward,
    refuse_double_backward,
    refuse_transforms,
)
from microfloat.torch.seeds import draw_seed
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["abstract_linear", "compiled_linear"]

_library = torch.library.Library("microfloat", "FRAGMENT")
_library.define(
    "linear_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? seed, Tensor? x_scale, Tensor? w_scale, str token, "
    "bool pinned, str backend, ScalarType compute, bool wants_dx, bool wants_dw, bool records) -> Tensor[]"
)
# x only where wgrad reads it in high precision, or decoded: elsewhere its codes are among `saved`, and x itself can go.
_library.define(
    "linear_backward(Tensor dy, Tensor? x, Tensor weight, Tensor[] saved, Tensor? seed, Tensor? dy_scale, str token, "
    "str backend, ScalarType compute, ScalarType x_dtype, bool wants_dx, bool wants_dw, bool records) -> Tensor[]"
)
# With `records` both give a float32 [8] besides, whose elements `_LIVE` are the amaxes of this call's delayed casts,
# taken by the casts themselves.
_LIVE = {"x": 0, "w": 4, "dy": 0}
_library.define("record_amax_(Tensor(a!) history, Tensor live, str token, str slot, int layer) -> ()")
# The call seed of a layer, drawn once its input exists: a plain draw has no inputs, and a compiler is free to swap the
# draws of two layers, which would give each the other's noise.
_library.define("draw_seed_for(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
_library.define("check_autocast_(Tensor(a!) marker, bool pinned) -> ()")
_library.define(
    "calibrate_(Tensor(a!) x_history, Tensor(b!) w_history, Tensor x, Tensor weight, str token, int layer) -> ()"
)

_STORED_WEIGHT = (
    "weight: got a QuantizedTensor, made by quantized_model_init or loaded, needed a plain weight in compiled and "
    "exported code. Leave fullgraph=True out, so that such layers run in eager mode between the graphs, or dequantize "
    "their weights with microfloat.torch.revert(model) and convert it again."
)

# What the check of a plain layer mutates, so that no compiler drops the check.
MARKER = torch.zeros(1)


_EAGER_FORWARD: Any = None  # `Linear.forward` outside of the graph


def _make_eager_forward() -> bool:
    """Set it, at the time when Dynamo traces: importing Dynamo takes seconds."""
    global _EAGER_FORWARD
    if _EAGER_FORWARD is None:
        _EAGER_FORWARD = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=_STORED_WEIGHT)
    return True


_make_eager_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`Linear.forward` as Dynamo traces it: the same bits as in eager mode (docs/recipes.md)."""
    if isinstance(layer.weight, QuantizedTensor):
        if torch.compiler.is_exporting():
            raise NotSupportedError(_STORED_WEIGHT)
        _make_eager_forward()
        return _EAGER_FORWARD(layer, x)
    pinned = layer._pin_token is not None
    token = context.RECIPE if not pinned else tokens.PLAIN if context.ISLAND else layer._pin_token
    if token == tokens.PLAIN:
        calibrated = context.CALIBRATED and (layer._pin_token or context.CALIBRATED)
        if calibrated and tokens.is_delayed(calibrated):
            _check_buffers(layer)
            histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
            operands = x.detach(), layer.weight.detach()
            torch.ops.microfloat.calibrate_(*histories, *operands, calibrated, layer._number)
        if not pinned or layer._pin_token != tokens.PLAIN:
            torch.ops.microfloat.check_autocast_(MARKER, pinned)
        return layer._plain(x)
    refuse_transforms(x)
    layer._check_input(x)
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    backend = context.BACKEND if layer.backend == "auto" else layer.backend
    seed = torch.ops.microfloat.draw_seed_for(x) if tokens.is_stochastic(token) else None
    state: tuple[Any, ...] = (None, None, None, None)
    number = -1
    if tokens.is_delayed(token):
        _check_buffers(layer)
        state = (
            layer.scaling_x_scale.clone(), layer.scaling_w_scale.clone(), layer.scaling_dy_scale,
            layer.scaling_dy_amax_history,
        )  # fmt: skip
        number = layer._number  # a constant of compiled code, which only state makes one layer's own
    outputs = _CompiledLinear.apply(
        x, layer.weight, layer.bias, seed, *state, token, pinned, backend, compute,
        number, torch.is_grad_enabled(),
    )  # fmt: skip
    if not isinstance(outputs, tuple):
        return outputs
    y, live = outputs
    record = torch.ops.microfloat.record_amax_
    record(layer.scaling_x_amax_history, live, token, "x", number)
    record(layer.scaling_w_amax_history, live, token, "w", number)
    return y


def abstract_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, backend: str, compute: torch.dtype
) -> torch.Tensor:
    """A call on tensors without values: y and what backward keeps as they would be; no state is read or recorded."""
    token = tokens.token_of(recipe)
    seed = torch.ops.microfloat.draw_seed_for(x) if tokens.is_stochastic(token) else None
    scale = x.new_empty((), dtype=torch.float32) if tokens.is_delayed(token) else None
    return _CompiledLinear.apply(
        x, weight, bias, seed, scale, scale, scale, None, token, True, backend, compute, -1, torch.is_grad_enabled()
    )


def _check_buffers(layer: Any) -> None:
    if not scaling.has_buffers(layer) or (layer.scaling_x_scale.is_meta and not layer.weight.is_meta):
        raise NotSupportedError(
            "torch.compile: got a layer without delayed-scaling state, needed its buffers before compilation. "
            "Convert the model with the DelayedScaling recipe first, or run one step in eager mode."
        )


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, seed: Any, x_scale: Any, w_scale: Any, dy_scale: Any,
        dy_history: Any, token: str, pinned: bool, backend: str, compute: torch.dtype, number: int, wants_grad: bool,
    ) -> Any:  # fmt: skip
        wants_dx, wants_dw = x.requires_grad and wants_grad, weight.requires_grad and wants_grad
        records = wants_grad and dy_history is not None
        y, *saved = torch.ops.microfloat.linear_forward(
            x, weight, bias, seed, x_scale, w_scale, token, pinned, backend, compute, wants_dx, wants_dw, records
        )
        live, saved = (saved[0], saved[1:]) if records else (None, saved)
        again = tokens.keeps_x(token) or _is_made_again(token, backend, "wgrad", x.device.type, x.device.index)
        kept = x if wants_dw and again else None
        ctx.save_for_backward(kept, weight, seed, *saved)
        # Not saved, which would refuse a backward after that of another call, whose amax went into the history since.
        ctx.dy_state = dy_scale, dy_history
        ctx.settings = (token, backend, compute, x.dtype, wants_dx, wants_dw, number)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if live is None:
            return y
        ctx.mark_non_differentiable(live)
        return y, live

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_double_backward()
        x, weight, seed, *saved = ctx.saved_tensors
        dy_scale, dy_history = ctx.dy_state
        token, backend, compute, x_dtype, wants_dx, wants_dw, number = ctx.settings
        records = dy_history is not None and (wants_dx or wants_dw)
        scale = dy_scale.clone() if records else None
        gradients = torch.ops.microfloat.linear_backward(
            dy, x, weight, saved, seed, scale, token, backend, compute, x_dtype, wants_dx, wants_dw, records
        )
        if records:
            torch.ops.microfloat.record_amax_(dy_history, gradients[0], token, "dy", number)
        dx = gradients[1 if records else 0] if wants_dx else None
        dw = gradients[-1] if wants_dw else None
        db = bias_gradient(dy, ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return (dx, dw, db, *(None,) * 11)


def _is_made_again(token: str, backend: str, gemm: str, device: str, index: int | None) -> bool:
    """Whether backward casts the right operand of a GEMM itself, for a GEMM that reads decoded values.

    These take two bytes an element, as x and the weight do, which are there (or can be had again by a compiler) for
    others who read them too; codes take one.
    """
    place = torch.device(device if index is None else f"{device}:{index}")
    recipe, module = tokens.recipe_of(token), backends.choose(backend, place)
    return _makes_again(_forms(module, recipe, place), getattr(recipe, gemm), gemm)


# What torch.compiler.assume_constant_result does; that function would import all of Dynamo.
_is_made_again._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _makes_again(forms: dict[str, tuple[str, str]], gemm: Gemm, name: str) -> bool:
    return gemm.rhs is not None and forms[name][1] == "values"


def _call(token: str, backend: str, device: torch.device, compute: torch.dtype, seed: Any) -> LinearCall:
    # Not forced on a fake device: shapes of saved operands are those of the same backend on the real one.
    module, recipe = backends.choose(backend, device), tokens.recipe_of(token)
    forms = _forms(module, recipe, device) if hasattr(module, "call_forms") else None
    return LinearCall(recipe, module, compute, seed=seed, forms=forms)


def _record_into(call: LinearCall, records: bool, device: torch.device, *slots: str) -> list[torch.Tensor]:
    """Let the casts of a call record their amaxes into a tensor of its own, which is returned."""
    if not records:
        return []
    live = torch.zeros(8, dtype=torch.float32, device=device)
    call.live = {slot: live[_LIVE[slot] : _LIVE[slot] + 1] for slot in slots}
    return [live]


def _linear_forward(
    x: Any, weight: Any, bias: Any, seed: Any, x_scale: Any, w_scale: Any, token: str, pinned: bool, backend: str,
    compute: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    _check_caller(token, pinned)
    call = _call(token, backend, x.device, compute, seed)
    call.scales = {"x": x_scale, "w": w_scale}
    live = _record_into(call, records, x.device, "x", "w")
    recipe = call.recipe
    forms = _forms(call.backend, recipe, x.device)
    wants_dx = wants_dx and not _makes_again(forms, recipe.dgrad, "dgrad")
    wants_dw = wants_dw and not _makes_again(forms, recipe.wgrad, "wgrad")
    y, x_column, w_column = linear_forward(call, x, weight, bias, wants_dx, wants_dw)
    saved = []
    layouts = _saved_layouts(recipe, call.backend, x.numel() // x.shape[-1], x.device, weight, wants_dx, wants_dw)
    for operand, layout in zip((x_column, w_column), layouts, strict=True):
        if operand is not None and layout is not None:
            saved += layout.conform(list(operand.flatten()[0]))
    # Outputs of an operator may not share memory with its inputs or with each other.
    seen = {y.untyped_storage().data_ptr()}
    for index, tensor in enumerate(saved):
        storage = tensor.untyped_storage().data_ptr()
        saved[index] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return [y, *live, *saved]


def _linear_backward(
    dy: Any, x: Any, weight: Any, saved: list[torch.Tensor], seed: Any, dy_scale: Any, token: str, backend: str,
    compute: torch.dtype, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    call = _call(token, backend, dy.device, compute, seed)
    call.scales = {"dy": dy_scale}
    live = _record_into(call, records, dy.device, "dy")
    recipe, rest = call.recipe, list(saved)
    rows = dy.numel() // dy.shape[-1]
    x_layout, w_layout = _saved_layouts(recipe, call.backend, rows, dy.device, weight, wants_dx, wants_dw)
    x_column = None if x_layout is None else x_layout.take(rest)
    w_column = None if w_layout is None else w_layout.take(rest)

    def x_operand() -> Any:
        if x_column is not None or not wants_dw:
            return x_column
        return column_operand(call, "x", x.reshape(-1, x.shape[-1]).to(compute), recipe.wgrad.rhs)

    def w_operand() -> Any:
        if w_column is not None or not wants_dx:
            return w_column
        return column_operand(call, "w", weight.detach().to(compute), recipe.dgrad.rhs)

    forms = _forms(call.backend, recipe, dy.device)
    if "values" in (*forms["dgrad"], *forms["wgrad"]):  # one GEMM after the other, so that only its operands exist
        dx, _ = linear_backward(call, dy, None, w_operand(), x_dtype, weight.dtype)
        _, dw = linear_backward(call, dy, x_operand(), None, x_dtype, weight.dtype)
    else:
        dx, dw = linear_backward(call, dy, x_operand(), w_operand(), x_dtype, weight.dtype)
    dx = None if dx is None else dx.reshape(*dy.shape[:-1], weight.shape[1])
    return [*live, *(gradient for gradient in (dx, dw) if gradient is not None)]


def _check_caller(token: str, pinned: bool) -> None:
    """Raise where the recipe that was compiled is not the one that the caller's autocast asks for."""
    if torch._C._current_graph_task_id() != -1:
        return  # run again by a backward, whose context is not that of the forward
    stale = context.ISLAND is not (token == tokens.PLAIN) if pinned else token != context.RECIPE
    if stale:
        raise NotSupportedError(
            "compiled code: got code of another recipe than the caller's autocast asks for, because its guards were "
            "not evaluated, as in an exported program. Pin the recipes with microfloat.torch.convert before "
            "compilation, or call it under the autocast that it was compiled under."
        )


def _check_autocast_(marker: torch.Tensor, pinned: bool) -> None:
    _check_caller(tokens.PLAIN, pinned)


def _record_amax_(history: torch.Tensor, live: torch.Tensor, token: str, slot: str, layer: int) -> None:
    recipe = tokens.recipe_of(token)
    of_slot = [recipe.casts[operand.key] for operand in OPERANDS if operand.tensor == slot]
    cast = next((cast for cast in of_slot if _is_delayed(cast)), None)
    if cast is None:
        return
    amax = live[_LIVE[slot] : _LIVE[slot] + 1]
    state = context.ambient()
    region, group = (state.region, state.group) if state is not None else (None, None)
    scaling.record_compiled(layer, history, slot, amax, cast, region, group)


def _calibrate_(
    x_history: torch.Tensor, w_history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, token: str, layer: int
) -> None:
    state = context.ambient()
    group = None if state is None else state.group
    histories = {"x": x_history, "w": w_history}
    scaling.calibrate(scaling.numbered(layer), tokens.recipe_of(token), x, weight, group, histories)


def _is_delayed(cast: Cast | None) -> bool:
    return cast is not None and isinstance(cast.scaling, Delayed)


@dataclass(frozen=True)
class _Layout:
    """What a saved operand [rows, length] is made of: its class, its fields, and the shape of every tensor among them.

    Outputs of an operator are known by shape before it runs, so this says what `prepare_both` will return.
    """

    kind: type
    fields: tuple[Any, ...]  # a field that is a tensor is given as (shape, dtype, column_major)

    def take(self, tensors: list[torch.Tensor]) -> Any:
        """The operand, built from the first of `tensors`, which are removed."""
        return self.kind(*(tensors.pop(0) if isinstance(field, tuple) else field for field in self.fields))

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Its tensors, uninitialised, on the device of `like`."""
        tensors = []
        for field in self.fields:
            if isinstance(field, tuple):
                shape, dtype, column_major = field
                tensor = like.new_empty(shape[::-1] if column_major else shape, dtype=dtype)
                tensors.append(tensor.t() if column_major else tensor)
        return tensors

    def conform(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Its tensors in the memory order that `empty` promises to a compiler."""
        promised = [field[2] for field in self.fields if isinstance(field, tuple)]
        return [
            tensor.t().contiguous().t() if column_major else tensor.contiguous()
            for tensor, column_major in zip(tensors, promised, strict=True)
        ]


def _layout(module: Any, gemm: Gemm, rows: Any, length: Any, form: str) -> _Layout | None:
    """The layout of the right operand of `gemm`, which a forward saves; None where it saves none (`_is_made_again`)."""
    cast = gemm.rhs
    if cast is None or form == "values":
        return None
    stored = -(-length // 16) * 16 if cast.hadamard else length
    row_scaled = cast.format.tensor_scale == "row"
    two_level = cast.rule.two_level is not None and cast.rule.two_level.tensor_scale
    tensor_scale = ((rows, 1) if row_scaled else (), torch.float32, False) if two_level else None
    fmt = cast.format
    if form != "codes":
        fmt = folded_format(fmt, form)
    element = fmt.element
    code_dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}.get(element.name, torch.uint8)
    codes = ((rows, -(-stored // element.codes_per_byte)), code_dtype, False)
    scale_dtype = torch.float32 if fmt.scale.name == "FP32" else torch.uint8
    # FP8 1x128; and MX, which one pass casts along rows and columns, except where a layer does not need the rows.
    block_scales = (fmt.block, fmt.scale.name) in (((1, 128), "FP32"), ((1, 32), "E8M0"))
    column_major = getattr(module, "COLUMN_MAJOR_BLOCK_SCALES", False) and block_scales
    scale = (_scale_shape(fmt, rows, stored), scale_dtype, column_major)
    pow2 = cast.rule.power_of_two
    return _Layout(Operand, (codes, scale, tensor_scale, fmt, rows, length, cast.hadamard, pow2))


def _scale_shape(fmt: ScaledFormat, rows: Any, stored: Any) -> tuple[Any, ...]:
    if fmt.is_per_tensor:
        return ()
    block_rows, block_columns = fmt.block
    return (-(-rows // block_rows), 1 if block_columns is None else -(-stored // block_columns))


def _saved_layouts(
    recipe: Recipe, module: Any, rows: Any, device: torch.device, weight: torch.Tensor, wants_dx: bool, wants_dw: bool
) -> tuple[_Layout | None, _Layout | None]:
    """Layouts of x.T for wgrad and of w.T for dgrad; None where nothing is saved. `rows`: of x."""
    out_features, in_features = weight.shape
    forms = _forms(module, recipe, device)
    return (
        _layout(module, recipe.wgrad, in_features, rows, forms["wgrad"][1]) if wants_dw else None,
        _layout(module, recipe.dgrad, in_features, out_features, forms["dgrad"][1]) if wants_dx else None,
    )


def _forms(module: Any, recipe: Recipe, device: torch.device) -> dict[str, tuple[str, str]]:
    # No counts here: what is compiled once cannot change its outputs with what a step before has counted.
    if hasattr(module, "call_forms"):
        return module.call_forms(recipe, device, None)
    return dict.fromkeys(("fprop", "dgrad", "wgrad"), ("codes", "codes"))


def _fake_forward(
    x: Any, weight: Any, bias: Any, seed: Any, x_scale: Any, w_scale: Any, token: str, pinned: bool, backend: str,
    compute: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    module = backends.choose(backend, x.device)
    outputs = [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=compute)]
    outputs += [x.new_empty(8, dtype=torch.float32)] if records else []
    rows = x.numel() // x.shape[-1]
    for layout in _saved_layouts(tokens.recipe_of(token), module, rows, x.device, weight, wants_dx, wants_dw):
        outputs += [] if layout is None else layout.empty(x)
    return outputs


def _fake_backward(
    dy: Any, x: Any, weight: Any, saved: Any, seed: Any, dy_scale: Any, token: str, backend: str,
    compute: torch.dtype, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    made = [dy.new_empty(8, dtype=torch.float32)] if records else []
    made += [dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=x_dtype)] if wants_dx else []
    return made + ([weight.new_empty(weight.shape)] if wants_dw else [])


_library.impl("linear_forward", _linear_forward, "CompositeExplicitAutograd")
_library.impl("linear_backward", _linear_backward, "CompositeExplicitAutograd")
_library.impl("draw_seed_for", lambda x: draw_seed(x.device), "CompositeExplicitAutograd")
_library.impl("record_amax_", _record_amax_, "CompositeExplicitAutograd")
_library.impl("check_autocast_", _check_autocast_, "CompositeExplicitAutograd")
_library.impl("calibrate_", _calibrate_, "CompositeExplicitAutograd")
torch.library.register_fake("microfloat::linear_forward", _fake_forward, lib=_library)
torch.library.register_fake("microfloat::linear_backward", _fake_backward, lib=_library)
torch.library.register_fake("microfloat::draw_seed_for", lambda x: x.new_empty(2, dtype=torch.int64), lib=_library)
torch.library.register_fake("microfloat::record_amax_", lambda *_: None, lib=_library)
torch.library.register_fake("microfloat::check_autocast_", lambda *_: None, lib=_library)
torch.library.register_fake("microfloat::calibrate_", lambda *_: None, lib=_library)
