"""The quantized linear under torch.compile: one opaque operator forward, one backward, plain tensors between them.

Compiled code cannot read the context variable of `autocast`. It reads attributes of `microfloat.torch.context` instead,
which Dynamo guards: each call looks them up again in its own thread and task, and an autocast that changes what a layer
runs finds or compiles other code. What an autocast inside the compiled function says is a constant of that code. Code
that runs without its guards, such as an exported program, would not look: so the operator compares with the true
context of its caller, and raises where a layer would run another recipe.

Legend: M = rows of x, K = in features, N = out features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.layout import Layout
from microfloat.operands import operands_of
from microfloat.passes import CastInputs
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.recipes._serialize import cast_of
from microfloat.routes import Routes
from microfloat.torch import backends, context, scaling
from microfloat.torch._checks import check_model
from microfloat.torch._operators import refuse_batches, refuse_transforms
from microfloat.torch._typing import Context, Maybe, Options
from microfloat.torch.linear import bias_gradient, find, refuse_double_backward, static_amax
from microfloat.torch.observing import OBSERVERS, observed_by_weight
from microfloat.torch.schedule import Schedule, entries_of, laid, layouts_of, saved_parts
from microfloat.torch.seeds import draw_seed
from microfloat.torch.tensor import QuantizedTensor

if TYPE_CHECKING:
    from microfloat.torch.nn.linear import RecipeLayer

__all__ = [
    "MAIN_GRAD", "MARKER", "abstract_linear", "cast_inputs", "check_caller", "compiled_linear",
    "delayed_state", "describe", "export", "live_amaxes", "named", "rebuilt", "recorded", "token_of_high_precision",
]  # fmt: skip


_library = torch.library.Library("microfloat", "FRAGMENT")
_library.define(
    "linear_forward(Tensor x, Tensor[] weight, str stored, Tensor? bias, Tensor? seed, Tensor? x_scale, "
    "Tensor? w_scale, str token, str origin, str backend, ScalarType compute, bool wants_dx, bool wants_dw, "
    "bool records) -> Tensor[]"
)
# `weight`: the weight alone, or the parts of a QuantizedTensor, which `stored` describes (`describe`).
# x only where wgrad reads it in high precision, or decoded: elsewhere its codes are among `saved`, and x itself can go.
_library.define(
    "linear_backward(Tensor dy, Tensor? x, Tensor[] weight, str stored, Tensor[] saved, Tensor? seed, "
    "Tensor? dy_scale, str token, str backend, ScalarType compute, ScalarType x_dtype, bool wants_dx, bool wants_dw, "
    "bool records) -> Tensor[]"
)
# With `records` both give a float32 [8] besides, whose elements `_LIVE` are the amaxes of this call's delayed casts,
# taken by the casts themselves.
_LIVE = {"x": 0, "w": 4, "dy": 0}
_library.define("record_forward_(Tensor(a!) x_history, Tensor(b!) w_history, Tensor live, str token, int layer) -> ()")
_library.define("record_backward_(Tensor(a!) history, Tensor live, str token, int layer) -> ()")
# The call seed of a layer, drawn once its input exists: a plain draw has no inputs, and a compiler is free to swap the
# draws of two layers, which would give each the other's noise.
_library.define("draw_seed_for(Tensor x) -> Tensor", tags=[torch.Tag.nondeterministic_seeded])
_library.define("check_autocast_(Tensor(a!) marker, str origin) -> ()")
_library.define(
    "calibrate_(Tensor(a!) x_history, Tensor(b!) w_history, Tensor x, Tensor weight, str token, int layer) -> ()"
)

MAIN_GRAD = (
    "fuse_wgrad_accumulation: got True in compiled code, needed eager mode, since a compiled backward cannot see "
    "weight.main_grad. Leave fullgraph=True out, so that such layers run in eager mode between the graphs, or set it "
    "to False there."
)

# A buffer that the check of a plain layer mutates, so that no compiler drops the check.
MARKER = torch.zeros(1)


_SHARDED = (
    "torch.compile: got a layer on DTensors, whose collectives run in eager mode. Leave fullgraph=True out, so that "
    "such layers run between the graphs."
)
# `Linear.forward` outside of the graph, with the two reasons for it.
_EAGER_FORWARD: Any = None
_EAGER_SHARDED: Any = None


def _make_eager_forward() -> bool:
    """Set them, at the time when Dynamo traces: importing Dynamo takes seconds."""
    global _EAGER_FORWARD, _EAGER_SHARDED
    if _EAGER_FORWARD is None:
        _EAGER_FORWARD = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=MAIN_GRAD)
        _EAGER_SHARDED = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=_SHARDED)
    return True


_make_eager_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`Linear.forward` as Dynamo traces it: the same bits as in eager mode (docs/recipes.md)."""
    fuses = getattr(layer, "fuse_wgrad_accumulation", False) and torch.is_grad_enabled()
    shards = getattr(layer, "_shards", None)
    is_gathered = shards is not None and not shards.reason  # by FSDP2 as codes, which no graph takes
    if (fuses or is_gathered) and not torch.compiler.is_exporting():
        _make_eager_forward()
        return _EAGER_FORWARD(layer, x)
    token, origin = context.recipe_here(layer._pin_token)
    weight = layer.weight
    stored = describe(weight) if isinstance(weight, QuantizedTensor) else ""
    if token == context.PLAIN:
        calibrated = context.asked().CALIBRATED
        calibrated = calibrated and (layer._pin_token or calibrated)
        if calibrated and context.is_delayed(calibrated):
            check_buffers(layer)
            histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
            operands = x.detach(), weight.dequantize() if stored else weight.detach()
            torch.ops.microfloat.calibrate_(*histories, *operands, calibrated, layer._number)
        if not _exports_plainly and origin != "code" and layer._pin_token != context.PLAIN:
            torch.ops.microfloat.check_autocast_(MARKER, origin)
        if not stored:
            return layer._plain(x)
        token = token_of_high_precision()
    if hasattr(weight, "placements"):
        _make_eager_forward()
        return _EAGER_SHARDED(layer, x)
    refuse_transforms("forward", x)
    layer._check_input(x)
    if weight.numel() == 0:
        return layer._plain(x)
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    if _exports_plainly:
        scales = (layer.scaling_x_scale, layer.scaling_w_scale) if context.is_delayed(token) else (None, None)
        if context.is_static(token):
            scales = static_amax(layer), None
        return _in_torch_operations(x, weight, layer.bias, token, scales, compute)
    backend = context.asked().BACKEND if layer.backend == "auto" else layer.backend
    seed = torch.ops.microfloat.draw_seed_for(x) if context.is_stochastic(token) else None
    state: tuple[Maybe, ...] = (None, None, None, None)
    number = -1
    if context.is_delayed(token):
        state = delayed_state(layer)
        number = layer._number  # a constant of compiled code, which only state makes one layer's own
    elif context.is_static(token):
        state = (static_amax(layer), None, None, None)
    outputs = _CompiledLinear.apply(
        x, weight, layer.bias, seed, *state, stored, token, origin, backend, compute, number,
        torch.is_grad_enabled(),
    )  # fmt: skip
    return recorded(layer, outputs, token, number)


def delayed_state(layer: Any) -> tuple[torch.Tensor, ...]:
    """Encode scales of x and w as they are now, and the scale and history of dy, which backward reads."""
    check_buffers(layer)
    return (
        layer.scaling_x_scale.clone(), layer.scaling_w_scale.clone(), layer.scaling_dy_scale,
        layer.scaling_dy_amax_history,
    )  # fmt: skip


def recorded(
    layer: "RecipeLayer", outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], token: str, number: int
) -> torch.Tensor:
    """y, after the amaxes that came with it, if any, have gone to the layer's histories."""
    if not isinstance(outputs, tuple):
        return outputs
    y, live = outputs
    histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
    torch.ops.microfloat.record_forward_(*histories, live, token, number)
    return y


def abstract_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, backend: str, compute: torch.dtype
) -> torch.Tensor:
    """A call on tensors without values: y and what backward keeps as they would be; no state is read or recorded."""
    token = context.token_of(recipe)
    seed = torch.ops.microfloat.draw_seed_for(x) if context.is_stochastic(token) else None
    scale = x.new_empty((), dtype=torch.float32) if context.is_delayed(token) else None
    stored = describe(weight) if isinstance(weight, QuantizedTensor) else ""
    return _CompiledLinear.apply(
        x, weight, bias, seed, scale, scale, scale, None, stored, token, "layer", backend, compute, -1,
        torch.is_grad_enabled(),
    )  # fmt: skip


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def describe(weight: QuantizedTensor) -> str:
    """Text that tells operators of a stored weight besides its parts: dtype, in features and Cast, as text."""
    return f"{_DTYPES[weight.dtype]} {weight.shape[-1]} {weight.token}"


def rebuilt(parts: Sequence[torch.Tensor], stored: str) -> torch.Tensor:
    """The weight of which these are the parts; itself where nothing describes it."""
    if not stored:
        return parts[0]
    dtype, length, token = stored.split(" ", 2)
    tensor_scale = parts[2] if len(parts) > 2 else None
    return QuantizedTensor(
        parts[0], parts[1], tensor_scale, cast_of(token), axis=parts[0].dim() - 1,
        shape=(*parts[0].shape[:-1], int(length)), dtype=getattr(torch, dtype),
    )  # fmt: skip


def token_of_high_precision() -> str:
    return context.token_of(context.HIGH_PRECISION)


token_of_high_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_buffers(layer: torch.nn.Module) -> None:
    if not scaling.has_buffers(layer) or (layer.scaling_x_scale.is_meta and not layer.weight.is_meta):
        raise NotSupportedError(
            "torch.compile: got a layer without delayed-scaling state, needed its buffers before compilation. "
            "Convert the model with the DelayedScaling recipe first, or run one step in eager mode."
        )


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
        dy_scale: Maybe, dy_history: Maybe, stored: str, token: str, origin: str, backend: str, compute: torch.dtype,
        number: int, has_grad: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        wants_dx, wants_dw = x.requires_grad and has_grad, weight.requires_grad and has_grad
        records = has_grad and dy_history is not None
        weights = weight.part_list() if isinstance(weight, QuantizedTensor) else [weight]
        y, *saved = torch.ops.microfloat.linear_forward(
            x,
            weights,
            stored,
            bias,
            seed,
            x_scale,
            w_scale,
            token,
            origin,
            backend,
            compute,
            wants_dx,
            wants_dw,
            records,
        )
        live, saved = (saved[0], saved[1:]) if records else (None, saved)
        again = context.keeps_x(token) or _is_made_again(token, backend, "wgrad", x.device.type, x.device.index)
        kept = x if wants_dw and again else None
        ctx.save_for_backward(kept, seed, *weights, *saved)
        # Not saved, which would refuse a backward after that of another call, whose amax went into the history since.
        ctx.dy_state = dy_scale, dy_history
        ctx.settings = (len(weights), stored, token, backend, compute, x.dtype, wants_dx, wants_dw, number)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if live is None:
            return y
        ctx.mark_non_differentiable(live)
        return y, live

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor, *_: object) -> tuple[Maybe, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_double_backward()
        x, seed, *saved = ctx.saved_tensors
        dy_scale, dy_history = ctx.dy_state
        parts, stored, token, backend, compute, x_dtype, wants_dx, wants_dw, number = ctx.settings
        weight, saved = saved[:parts], saved[parts:]
        records = dy_history is not None and (wants_dx or wants_dw)
        scale = dy_scale.clone() if records else None
        gradients = torch.ops.microfloat.linear_backward(
            dy, x, weight, stored, saved, seed, scale, token, backend, compute, x_dtype, wants_dx, wants_dw, records
        )
        if records:
            torch.ops.microfloat.record_backward_(dy_history, gradients[0], token, number)
        dx = gradients[1 if records else 0] if wants_dx else None
        dw = gradients[-1] if wants_dw else None
        db = bias_gradient(dy, ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return (dx, dw, db, *(None,) * 12)


def _name(error: MicrofloatError, layer: torch.nn.Module) -> None:
    name = getattr(layer, "_with_path", None)
    if name is not None:  # not reverted since
        name(error)


def named(function: Callable) -> Callable:
    """An operator over a weight whose errors name the layer that holds it: compiled code knows none."""

    @functools.wraps(function)
    def run(*arguments: object) -> object:
        try:
            return function(*arguments)
        except MicrofloatError as error:
            parts = next(argument for argument in arguments if isinstance(argument, list))
            for layer in scaling.layers():
                own = layer._parameters.get("weight")
                own = own.part_list()[0] if isinstance(own, QuantizedTensor) else own
                if own is not None and own.device == parts[0].device and own.data_ptr() == parts[0].data_ptr():
                    _name(error, layer)
            raise

    return run


def _is_made_again(token: str, backend: str, gemm: str, device: str, index: int | None) -> bool:
    """True where backward casts the right operand of a GEMM itself, because the GEMM reads decoded values.

    These take two bytes an element, as x and the weight do, which are there (or can be had again by a compiler) for
    others who read them too; codes take one.
    """
    on = torch.device(device if index is None else f"{device}:{index}")
    recipe, module = context.recipe_of(token), backends.choose(backend, on)
    return _makes_again(module.routes(recipe, on, None), recipe, gemm)


# As torch.compiler.assume_constant_result marks a function, which would import all of Dynamo.
_is_made_again._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _makes_again(routes: Routes, recipe: Recipe, gemm: str) -> bool:
    return getattr(recipe, gemm).rhs is not None and getattr(routes, gemm).rhs == "values"


def _schedule(
    token: str, backend: str, shape: Sequence[int], x: Maybe, weight: torch.Tensor, bias: Maybe,
    compute: torch.dtype, x_dtype: torch.dtype, wants_dx: bool, wants_dw: bool,
) -> Schedule:  # fmt: skip
    """The schedule of a call.

    No fold counts: the outputs of what is compiled once cannot change with what a step before has counted. Where x is
    not at hand it is taken to be contiguous, on which nothing in a backward depends.
    """
    if x is None:
        strides = (weight.shape[1], 1) if len(shape) == 2 else torch.empty(shape, device="meta").stride()
        key = (shape, strides, x_dtype, weight.get_device(), 0, False)
    else:
        key = (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg())
    schedule = find(key, x, weight, bias, context.recipe_of(token), backend, compute, wants_dx, wants_dw)
    assert schedule is not None
    return schedule


def live_amaxes(records: bool, device: torch.device) -> list[torch.Tensor]:
    """The tensor that the delayed casts of a call record into, an output of the operator; none where they do not."""
    return [torch.zeros(8, dtype=torch.float32, device=device)] if records else []


def cast_inputs(
    scale: Maybe, seed: Maybe, live: list[torch.Tensor], tensor: str, is_static: bool = False
) -> CastInputs:  # fmt: skip
    """The inputs of the cast of x, w or dy; a static one is given an amax in place of an encode scale."""
    if is_static:
        return CastInputs(seed=seed, amax=scale)
    history = live[0][_LIVE[tensor] : _LIVE[tensor] + 1] if live else None
    return CastInputs(scale, seed, history)


def _linear_forward(
    x: torch.Tensor, parts: list[torch.Tensor], stored: str, bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    token: str, origin: str, backend: str, compute: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    check_caller(token, origin)
    if x.numel() == 0:  # no schedule: nothing is multiplied
        shapes = (x, parts, stored, bias, seed, x_scale, w_scale, token, origin, backend, compute)
        return [tensor.zero_() for tensor in _fake_forward(*shapes, wants_dx, wants_dw, records)]
    weight = rebuilt(parts, stored)
    wants_dx, wants_dw = _saves(token, backend, x.device, wants_dx, wants_dw, stored)
    schedule = _schedule(token, backend, x.shape, x, weight, bias, compute, x.dtype, wants_dx, wants_dw)
    if OBSERVERS:
        schedule = observed_by_weight(schedule, weight, False)
    live = live_amaxes(records, x.device)
    x_inputs = cast_inputs(x_scale, seed, live, "x", schedule.is_static)
    w_inputs = cast_inputs(w_scale, seed, live, "w")
    with schedule.scope():
        # The seed is drawn, so that the launch which casts x and w together and draws one does not serve.
        kept = schedule.quantize_weight(weight, w_inputs) if schedule.is_stochastic else None
        y, made = schedule.forward(x, weight, bias, x_inputs, w_inputs, kept)
    saved = []
    for operand, layout in zip((made[:3], made[3:]), schedule.saved_layouts(), strict=True):
        if layout is not None:
            saved += [laid(tensor, part) for tensor, part in zip(operand, layout, strict=True) if part is not None]
    # Outputs of an operator may not share memory with its inputs or with each other.
    seen = {tensor.untyped_storage().data_ptr() for tensor in (y, *parts)}
    for index, tensor in enumerate(saved):
        storage = tensor.untyped_storage().data_ptr()
        saved[index] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return [y, *live, *saved]


def _saves(
    token: str, backend: str, device: torch.device, wants_dx: bool, wants_dw: bool, stored: str
) -> tuple[bool, bool]:
    """True for dx where forward makes the operand of w that backward reads, and for dw likewise that of x.

    A stored weight has its codes already; its scales alone would do for delayed scaling.
    """
    recipe = context.recipe_of(token)
    wants_dx = wants_dx and not (stored and not recipe.is_delayed)
    routes = backends.choose(backend, device).routes(recipe, device, None)
    return (
        wants_dx and recipe.dgrad.rhs is not None and not _makes_again(routes, recipe, "dgrad"),
        wants_dw and recipe.wgrad.rhs is not None and not _makes_again(routes, recipe, "wgrad"),
    )


def _linear_backward(
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], stored: str, saved: list[torch.Tensor], seed: Maybe,
    dy_scale: Maybe, token: str, backend: str, compute: torch.dtype, x_dtype: torch.dtype, wants_dx: bool,
    wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    if dy.numel() == 0:
        shapes = (dy, x, parts, stored, saved, seed, dy_scale, token, backend, compute, x_dtype)
        return [tensor.zero_() for tensor in _fake_backward(*shapes, wants_dx, wants_dw, records)]
    weight = rebuilt(parts, stored)
    shape = (*dy.shape[:-1], weight.shape[1])
    schedule = _schedule(token, backend, shape, x, weight, None, compute, x_dtype, wants_dx, wants_dw)
    if OBSERVERS:
        schedule = observed_by_weight(schedule, weight, True)
    live = live_amaxes(records, dy.device)
    inputs, plain, rest = cast_inputs(dy_scale, seed, live, "dy"), CastInputs(seed=seed), list(saved)
    saves_w, saves_x = _saves(token, backend, dy.device, wants_dx, wants_dw, stored)
    x_layout, w_layout = schedule.saved_layouts()
    if wants_dw and schedule.recipe.wgrad.path == "refused":
        raise NotSupportedError(schedule.routes.wgrad.reason)

    def column(tensor: str, source: Maybe, layout: Layout | None, needed: bool, is_saved: bool) -> tuple[Maybe, ...]:
        """A column operand: taken from what forward has saved, or cast now; nothing where it is not needed."""
        if not needed:
            return None, None, None
        if is_saved and layout is not None:
            return tuple(None if part is None else rest.pop(0) for part in layout)
        assert source is not None
        if isinstance(source, QuantizedTensor):
            return tuple(schedule.quantize_weight(source, plain)[schedule.w_saved])
        return tuple(schedule.saved_again(tensor, source, plain))

    with schedule.scope():
        x_column = column("x", x, x_layout, wants_dw, saves_x) if saves_x else None
        w_column = column("w", weight, w_layout, wants_dx, saves_w) if saves_w else None
        dx = dw = None
        if x_column is None and w_column is None and wants_dx and wants_dw and not records:
            # One GEMM after the other, so that only its operands exist.
            w_column = column("w", weight, w_layout, True, False)
            made = schedule.cast_dy(dy, inputs, True, False)
            dx, _ = schedule.gradients(made, (None, None, None, *w_column), True, False)
            del w_column
            made = schedule.cast_dy(dy, inputs, False, True)
            _, dw = schedule.gradients(made, column("x", x, x_layout, True, False), False, True)
        else:
            x_column = x_column or column("x", x, x_layout, wants_dw, False)
            w_column = w_column or column("w", weight, w_layout, wants_dx, False)
            made = schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
            dx, dw = schedule.gradients(made, (*x_column, *w_column), wants_dx, wants_dw)
    return [*live, *(gradient for gradient in (dx, dw) if gradient is not None)]


def check_caller(token: str, origin: str) -> None:
    """Raise where the recipe that was compiled is not the one that the caller's autocast asks for.

    `origin`: who has named the recipe. That of "code", an autocast inside what was compiled, holds for every caller.
    """
    if origin == "code" or torch._C._current_graph_task_id() != -1 or token == token_of_high_precision():
        return  # or run again by a backward, whose context is not that of the forward
    stale = context.ISLAND is not (token == context.PLAIN) if origin == "layer" else token != context.RECIPE
    if stale:
        raise NotSupportedError(
            "compiled code: got code of another recipe than the caller's autocast asks for, because its guards were "
            "not evaluated, as in an exported program. Pin the recipes with microfloat.torch.convert before "
            "compilation, or call it under the autocast that it was compiled under."
        )


def _check_autocast_(marker: torch.Tensor, origin: str) -> None:
    check_caller(context.PLAIN, origin)


@functools.cache
def _delayed_casts(token: str) -> dict[str, Cast]:
    """Slot -> its cast, of x, w and dy as far as their scaling is delayed."""
    casts = context.recipe_of(token).casts
    operands = [(slot, casts[one.key]) for slot in ("x", "w", "dy") for one in reversed(operands_of(slot))]
    return {slot: cast for slot, cast in operands if cast is not None and isinstance(cast.scaling, Delayed)}


def _record(slots: dict[str, torch.Tensor], live: torch.Tensor, token: str, layer: int) -> None:
    """Combine the amaxes of a call, in one launch, with those that the histories of these slots hold."""
    casts = {slot: cast for slot, cast in _delayed_casts(token).items() if slot in slots}
    if not casts:
        return
    state = context.ambient()
    region, group = (state.region, state.group) if state is not None else (None, None)
    try:
        scaling.record_compiled(layer, casts, region, group)
    except MicrofloatError as error:
        _name(error, scaling.numbered(layer))
        raise
    heads = [slots[slot][:1] for slot in casts]
    live_of = [live[_LIVE[slot] : _LIVE[slot] + 1] for slot in casts]
    torch._foreach_maximum_(heads, live_of)  # pyright: ignore[reportPrivateImportUsage]


def _record_forward_(
    x_history: torch.Tensor, w_history: torch.Tensor, live: torch.Tensor, token: str, layer: int
) -> None:  # fmt: skip
    _record({"x": x_history, "w": w_history}, live, token, layer)


def _record_backward_(history: torch.Tensor, live: torch.Tensor, token: str, layer: int) -> None:
    _record({"dy": history}, live, token, layer)


def _calibrate_(
    x_history: torch.Tensor, w_history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, token: str, layer: int
) -> None:
    state = context.ambient()
    group = None if state is None else state.group
    histories = {"x": x_history, "w": w_history}
    scaling.calibrate(scaling.numbered(layer), context.recipe_of(token), x, weight, group, histories)


def _fake_forward(
    x: torch.Tensor, parts: list[torch.Tensor], stored: str, bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    token: str, origin: str, backend: str, compute: torch.dtype, wants_dx: bool, wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    weight = rebuilt(parts, stored)
    outputs = [x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=compute)]
    outputs += [x.new_empty(8, dtype=torch.float32)] if records else []
    module, recipe = backends.choose(backend, x.device), context.recipe_of(token)
    routes = module.routes(recipe, x.device, None)
    saves_w, saves_x = _saves(token, backend, x.device, wants_dx, wants_dw, stored)
    rows, (out_features, in_features) = x.numel() // x.shape[-1], weight.shape
    for tensor, saves, sizes in (("x", saves_x, (rows, in_features)), ("w", saves_w, (out_features, in_features))):
        layouts = layouts_of(module, entries_of(recipe, routes, tensor, True, saves), *sizes)
        layout = layouts[saved_parts(recipe, saves, saves)[tensor == "w"].start // 3]
        for part in layout or ():
            if part is not None:
                outputs.append(x.new_empty_strided(part.shape, part.strides, dtype=getattr(torch, part.dtype)))
    return outputs


def _fake_backward(
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], stored: str, saved: list[torch.Tensor], seed: Maybe,
    dy_scale: Maybe, token: str, backend: str, compute: torch.dtype, x_dtype: torch.dtype, wants_dx: bool,
    wants_dw: bool, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    weight = rebuilt(parts, stored)
    made = [dy.new_empty(8, dtype=torch.float32)] if records else []
    made += [dy.new_empty((*dy.shape[:-1], weight.shape[1]), dtype=x_dtype)] if wants_dx else []
    return made + ([dy.new_empty(weight.shape, dtype=weight.dtype)] if wants_dw else [])


_library.impl("linear_forward", named(_linear_forward), "CompositeExplicitAutograd")
_library.impl("linear_backward", named(_linear_backward), "CompositeExplicitAutograd")
_library.impl("draw_seed_for", lambda x: draw_seed(x.device), "CompositeExplicitAutograd")
_library.impl("record_forward_", _record_forward_, "CompositeExplicitAutograd")
_library.impl("record_backward_", _record_backward_, "CompositeExplicitAutograd")
_library.impl("check_autocast_", _check_autocast_, "CompositeExplicitAutograd")
_library.impl("calibrate_", _calibrate_, "CompositeExplicitAutograd")
torch.library.register_fake("microfloat::linear_forward", _fake_forward, lib=_library)
torch.library.register_fake("microfloat::linear_backward", _fake_backward, lib=_library)
torch.library.register_fake("microfloat::draw_seed_for", lambda x: x.new_empty(2, dtype=torch.int64), lib=_library)
torch.library.register_fake("microfloat::record_forward_", lambda *_: None, lib=_library)
torch.library.register_fake("microfloat::record_backward_", lambda *_: None, lib=_library)
torch.library.register_fake("microfloat::check_autocast_", lambda *_: None, lib=_library)
torch.library.register_fake("microfloat::calibrate_", lambda *_: None, lib=_library)
refuse_batches(
    _library,
    "linear_forward",
    "linear_backward",
    "draw_seed_for",
    "record_forward_",
    "record_backward_",
    "check_autocast_",
    "calibrate_",
)


# ------------------------------------------------------------------------------------------------- exported programs


_exports_plainly = False  # True while `export` traces


def export(
    model: torch.nn.Module,
    args: tuple[object, ...],
    kwargs: Options | None = None,
    *,
    dynamic_shapes: Options | tuple | list | None = None,
) -> torch.export.ExportedProgram:
    """``torch.export`` of a converted model for inference, as a program of torch's own operations alone.

    It quantizes, decodes and multiplies by plain operations, to the codes of the layers, and runs where this library is
    not installed. ``torch.export.export`` itself keeps the layers as operators of this library, which are faster.
    Parameters as there. Raises InvalidTypeError for anything but a module, NotSupportedError for a recipe whose fprop
    rounds stochastically. Source: docs/training.md.
    """
    global _exports_plainly
    check_model(model)
    # Their codes become parameters of the program, and integers cannot ask for a gradient.
    stored = [one for one in model.parameters() if isinstance(one, QuantizedTensor) and one.requires_grad]
    _exports_plainly = True
    try:
        for parameter in stored:
            parameter.requires_grad_(False)
        with torch.no_grad():
            program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
            return program.run_decompositions()
    finally:
        _exports_plainly = False
        for parameter in stored:
            parameter.requires_grad_(True)


def _in_torch_operations(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, token: str, scales: tuple[Maybe, Maybe], compute: torch.dtype
) -> torch.Tensor:
    recipe, module = context.recipe_of(token), backends.choose("reference", x.device)
    if any(cast is not None and cast.is_stochastic for cast in recipe.fprop.casts):
        raise NotSupportedError(
            "export: got a recipe whose fprop rounds stochastically, needed nearest rounding in an exported program."
        )
    routes = module.routes(recipe, x.device, None)
    schedule = Schedule(recipe, module, routes, x, weight, None, compute, False, False)
    inputs = CastInputs(amax=scales[0]) if schedule.is_static else CastInputs(scales[0])
    return schedule.forward(x, weight, bias, inputs, CastInputs(scales[1]))[0]
