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
from typing import Any, NamedTuple

import torch

from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.layout import Layout
from microfloat.operands import OPERANDS_OF
from microfloat.passes import CastInputs
from microfloat.recipes import Cast, Delayed, Recipe
from microfloat.recipes._serialize import cast_of
from microfloat.routes import Routes, entries_of, routes_of
from microfloat.torch import backends, context
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import NO_PARTS, Parts, Saved, laid
from microfloat.torch.compile import export as exported
from microfloat.torch.linear.function import bias_gradient, find, refuse_double_backward
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import Schedule, autocast_dtype
from microfloat.torch.linear.weight_cache import joint_amax, plain_beside
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.tensor.custom_ops import define, refuse_transforms
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.tensor.seeds import draw_seed


class Settings(NamedTuple):
    """All of a compiled call besides its tensors. Operators take it flat behind their tensors (`SETTINGS`).

    `stored`: the description of a stored weight (`describe`), whose parts are given in its place. `origin`: who has
    named the recipe (`check_caller`). `records`: a float32 [8] comes with the results, whose elements `_LIVE` are the
    amaxes of the call's delayed casts, taken by the casts themselves.
    """

    stored: str
    token: str
    origin: str
    backend: str
    compute: torch.dtype
    x_dtype: torch.dtype
    wants_dx: bool
    wants_dw: bool
    records: bool

    @property
    def recipe(self) -> Recipe:
        """The recipe that the token names."""
        return context.recipe_of(self.token)


def settings_in(flat: Sequence[object]) -> Settings:
    """The settings that an operator was given."""
    return Settings(*flat)  # type: ignore[arg-type]


SETTINGS = (
    "str stored, str token, str origin, str backend, ScalarType compute, ScalarType x_dtype, "
    "bool wants_dx, bool wants_dw, bool records"
)
_LIVE = {"x": 0, "w": 4, "dy": 0}

OWN_WGRAD = (
    "fuse_wgrad_accumulation: got True in compiled code, needed eager mode, since a compiled backward cannot see "
    "weight.main_grad. Leave fullgraph=True out, so that such layers run in eager mode between the graphs, or set it "
    "to False there."
)

# A buffer that the check of a plain layer mutates, so that no compiler drops the check.
MARKER = torch.zeros(1, device="cpu")


_SHARDED = (
    "torch.compile: got a layer on DTensors, whose collectives run in eager mode. Leave fullgraph=True out, so that "
    "such layers run between the graphs."
)
_GATHERED = (
    "torch.compile: got a layer whose weight low_precision_all_gather gathers as codes, in eager mode. Leave "
    "fullgraph=True out, so that such layers run between the graphs, or gather values."
)
# `Linear.forward` outside of the graph, with the three reasons for it.
_EAGER_FORWARD: Callable = None  # type: ignore[assignment]
_EAGER_GATHERED: Callable = None  # type: ignore[assignment]
_EAGER_SHARDED: Callable = None  # type: ignore[assignment]


def _make_eager_forward() -> bool:
    """Set them, at the time when Dynamo traces: importing Dynamo takes seconds."""
    global _EAGER_FORWARD, _EAGER_GATHERED, _EAGER_SHARDED
    if _EAGER_FORWARD is None:
        _EAGER_FORWARD = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=OWN_WGRAD)
        _EAGER_GATHERED = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=_GATHERED)
        _EAGER_SHARDED = torch.compiler.disable(lambda layer, x: layer.forward(x), reason=_SHARDED)
    return True


_make_eager_forward._dynamo_marked_constant = True  # type: ignore[attr-defined]


def compiled_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`Linear.forward` as Dynamo traces it: the same bits as in eager mode (docs/recipes.md)."""
    own_wgrad = layer.fuse_wgrad_accumulation and torch.is_grad_enabled()
    shards = getattr(layer, "_fsdp_state", None)
    is_gathered = shards is not None and not shards.reason  # by FSDP2 as codes, which no graph takes
    if (own_wgrad or is_gathered) and not torch.compiler.is_exporting():
        _make_eager_forward()
        return (_EAGER_FORWARD if own_wgrad else _EAGER_GATHERED)(layer, x)
    token, origin = context.recipe_here(layer._pin_token)
    weight = layer.weight
    is_stored = isinstance(weight, QuantizedTensor)
    if token == context.PLAIN:
        calibrated = context.asked().CALIBRATED
        calibrated = calibrated and (layer._pin_token or calibrated)
        if calibrated and context.is_static(calibrated):
            raise NotSupportedError(
                "calibrating: got a layer with static scales in compiled code, needed eager mode, in which it measures "
                "its inputs. Calibrate the model that torch.compile was given."
            )
        if calibrated and context.is_delayed(calibrated):
            check_buffers(layer)
            histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
            operands = x.detach(), (weight.dequantize() if is_stored else weight).detach()
            torch.ops.microfloat.calibrate_(*histories, *operands, calibrated, layer._number)
        if not exported.PLAINLY and origin != "code" and layer._pin_token != context.PLAIN:
            torch.ops.microfloat.check_autocast_(MARKER, origin)
        if not is_stored:
            return layer._plain(x)
        token = context.token_of_high_precision()
    if hasattr(weight, "placements") or any(hasattr(one.weight, "placements") for one in getattr(layer, "_joint", ())):
        _make_eager_forward()
        return _EAGER_SHARDED(layer, x)
    refuse_transforms("forward", x)
    layer._check_input(x)
    if weight.numel() == 0:
        return layer._plain(x)
    if exported.PLAINLY:
        scales = (layer.scaling_x_scale, layer.scaling_w_scale) if context.is_delayed(token) else (None, None)
        amax = layer_state.static_amax(layer) if context.is_static(token) else scales[0]
        scales = amax, plain_beside(layer, weight) if context.is_joint(token) else scales[1]
        return exported.in_torch_operations(x, weight, layer.added_bias, token, scales)
    state, number = state_of(layer, x, weight, token)
    settings = settings_of(x, weight, token, origin, layer.backend, state)
    y = _CompiledLinear.apply(x, weight, layer.added_bias, *state, number, *settings)
    return recorded(layer, y, token, number)


def state_of(layer: Any, x: torch.Tensor, weight: torch.Tensor, token: str) -> tuple[tuple[Maybe, ...], int]:
    """Call seed, scales of x and w as they are now (or amaxes), scale and history of dy, which backward reads; and the
    number of the layer. Each None, or -1, where the recipe has no use for it; `layer` None: a function.
    """
    seed = seed_for(x) if context.is_stochastic(token) else None
    if context.is_delayed(token):
        if layer is None:
            raise NotSupportedError("recipe: got delayed scaling for a function. Use microfloat.torch.GroupedLinear.")
        check_buffers(layer)
        scales = layer.scaling_x_scale.clone(), layer.scaling_w_scale.clone(), layer.scaling_dy_scale
        # The number is a constant of compiled code, which only state makes one layer's own.
        return (seed, *scales, layer.scaling_dy_amax_history), layer._number
    of_x = layer_state.static_amax(layer) if context.is_static(token) else None
    weights = plain_beside(layer, weight) if context.is_joint(token) else []
    return (seed, of_x, torch.ops.microfloat.joint_amax(weights) if weights else None, None, None), -1


def seed_for(x: torch.Tensor) -> torch.Tensor:
    """A call seed, drawn by an operator once x exists."""
    return torch.ops.microfloat.draw_seed_for(x, torch.empty(0, device=x.device))


def settings_of(
    x: torch.Tensor, weight: torch.Tensor, token: str, origin: str, backend: str, state: tuple[Maybe, ...]
) -> Settings:  # fmt: skip
    """The settings of a call of operators; `state`: as `state_of` gives it."""
    backend = context.asked().BACKEND if backend == "auto" else backend
    stored = describe(weight) if isinstance(weight, QuantizedTensor) else ""
    grad = torch.is_grad_enabled()
    wants = x.requires_grad and grad, weight.requires_grad and grad
    records = grad and state[-1] is not None
    compute = autocast_dtype(x.device.type) or x.dtype
    return Settings(stored, token, origin, backend, compute, x.dtype, *wants, records)


def recorded(
    layer: Any, outputs: torch.Tensor | tuple[torch.Tensor, torch.Tensor], token: str, number: int
) -> torch.Tensor:
    """y, after the amaxes that came with it, if any, have gone to the layer's histories."""
    if not isinstance(outputs, tuple):
        return outputs
    y, live = outputs
    histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
    torch.ops.microfloat.record_forward_(*histories, live, token, number)
    return y


def abstract_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, backend: str,
    compute: torch.dtype, origin: str = "layer",
) -> torch.Tensor:  # fmt: skip
    """A call on tensors without values: y and the saved tensors without values; no state is read or recorded."""
    token = context.token_of(recipe)
    seed = seed_for(x) if context.is_stochastic(token) else None
    scale = x.new_empty((), dtype=torch.float32) if context.is_delayed(token) else None
    state = seed, scale, scale, scale, None
    settings = settings_of(x, weight, token, origin, backend, state)._replace(backend=backend, compute=compute)
    return _CompiledLinear.apply(x, weight, bias, *state, -1, *settings)


_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def describe(weight: QuantizedTensor) -> str:
    """Text that tells operators of a stored weight besides its parts: dtype, in features and Cast, as text."""
    return f"{_DTYPES[weight.dtype]} {weight.shape[-1]} {weight.token}"


def rebuilt(parts: Sequence[torch.Tensor], stored: str) -> torch.Tensor:
    """The weight that has these parts, by its description; a plain weight is its own only part."""
    if not stored:
        return parts[0]
    dtype, length, token = stored.split(" ", 2)
    tensor_scale = parts[2] if len(parts) > 2 else None
    return QuantizedTensor(
        parts[0], parts[1], tensor_scale, cast_of(token), axis=parts[0].dim() - 1,
        shape=(*parts[0].shape[:-1], int(length)), dtype=getattr(torch, dtype),
    )  # fmt: skip


def check_buffers(layer: torch.nn.Module) -> None:
    if not layer_state.has_buffers(layer) or (layer.scaling_x_scale.is_meta and not layer.weight.is_meta):
        raise NotSupportedError(
            "torch.compile: got a layer without delayed-scaling state, needed its buffers before compilation. "
            "Convert the model with the DelayedScaling recipe first, or run one step in eager mode."
        )


class _CompiledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
        dy_scale: Maybe, dy_history: Maybe, number: int, *settings: object,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        call = settings_in(settings)
        weights = weight.part_list() if isinstance(weight, QuantizedTensor) else [weight]
        y, *saved = torch.ops.microfloat.linear_forward(x, weights, bias, seed, x_scale, w_scale, *settings)
        live, saved = (saved[0], saved[1:]) if call.records else (None, saved)
        keeps_x = call.wants_dw and _keeps_x(call.token, call.backend, x.device.type, x.device.index)
        ctx.save_for_backward(x if keeps_x else None, seed, *weights, *saved)
        # Not saved, which would refuse a backward after that of another call, whose amax went into the history since.
        ctx.dy_state = dy_scale, dy_history
        ctx.settings = (len(weights), number, *settings)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if live is None:
            return y
        ctx.mark_non_differentiable(live)
        return y, live

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor, *_: object) -> tuple[Maybe, ...]:  # type: ignore[override]
        refuse_double_backward()
        x, seed, *saved = ctx.saved_tensors
        (dy_scale, dy_history), (parts, number, *settings) = ctx.dy_state, ctx.settings
        call = settings_in(settings)
        records = dy_history is not None and (call.wants_dx or call.wants_dw)
        scale = dy_scale.clone() if records else None
        gradients = torch.ops.microfloat.linear_backward(
            dy, x, saved[:parts], saved[parts:], seed, scale, *settings[:-1], records
        )
        if records:
            torch.ops.microfloat.record_backward_(dy_history, gradients[0], call.token, number)
        dx = gradients[1 if records else 0] if call.wants_dx else None
        dw = gradients[-1] if call.wants_dw else None
        db = bias_gradient(dy, ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return (dx, dw, db, *(None,) * (6 + len(settings)))


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
            for layer in layer_state.layers():
                own = layer._parameters.get("weight")
                own = own.part_list()[0] if isinstance(own, QuantizedTensor) else own
                if own is not None and own.device == parts[0].device and own.data_ptr() == parts[0].data_ptr():
                    _name(error, layer)
            raise

    return run


def _keeps_x(token: str, backend: str, device: str, index: int | None) -> bool:
    """True where backward reads x itself: in high precision, or to cast it once more."""
    on = torch.device(device if index is None else f"{device}:{index}")
    recipe, module = context.recipe_of(token), backends.choose(backend, on)
    return context.keeps_x(token) or _makes_again(routes_of(recipe, module.chip_of(on)), recipe, "wgrad")


# As torch.compiler.assume_constant_result marks a function, which would import all of Dynamo.
_keeps_x._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _makes_again(routes: Routes, recipe: Recipe, gemm: str) -> bool:
    """True where backward casts the right operand of a GEMM itself, because the GEMM reads decoded values.

    These take two bytes an element, as x and the weight do, which are there (or can be had again by a compiler) for
    others who read them too; codes take one.
    """
    rhs = getattr(recipe, gemm).rhs  # a static one is cast in forward alone, which is given its amax
    return rhs is not None and not rhs.is_static and getattr(routes, gemm).rhs == "values"


def _schedule(call: Settings, shape: Sequence[int], x: Maybe, weight: torch.Tensor, bias: Maybe) -> Schedule:
    """The schedule of a call.

    No fold counts: the outputs of what is compiled once cannot change with what a step before has counted. Where x is
    not at hand it is taken to be contiguous, on which nothing in a backward depends.
    """
    if x is None:
        strides = (weight.shape[1], 1) if len(shape) == 2 else torch.empty(shape, device="meta").stride()
        key = (shape, strides, call.x_dtype, weight.get_device(), 0, False)
    else:
        key = (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg())
    needs = call.wants_dx, call.wants_dw, False
    schedule = find(key, x, weight, bias, call.recipe, call.backend, call.compute, needs)
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
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    check_caller(call.token, call.origin)
    if x.numel() == 0:  # no schedule: nothing is multiplied
        return [tensor.zero_() for tensor in _fake_forward(x, parts, bias, seed, x_scale, w_scale, *settings)]
    weight = rebuilt(parts, call.stored)
    schedule = _schedule(_saving(call, x.device), x.shape, x, weight, bias)
    if OBSERVERS:
        schedule = observed(schedule, (), weight)
    live = live_amaxes(call.records, x.device)
    x_inputs = cast_inputs(x_scale, seed, live, "x", schedule.is_static)
    w_inputs = cast_inputs(w_scale, seed, live, "w", schedule.is_joint)
    with schedule.scope():
        # The seed is drawn, so that the launch which casts x and w together and draws one does not serve.
        kept = schedule.quantize_weight(weight, w_inputs) if schedule.is_stochastic else None
        y, made = schedule.forward(x, weight, bias, x_inputs, w_inputs, kept)
    saved = []
    for operand, layout in zip(schedule.saved_operands(made, w_inputs), schedule.saved_layouts, strict=True):
        if layout is not None:
            saved += [laid(tensor, part) for tensor, part in zip(operand, layout, strict=True) if part is not None]
    # Outputs of an operator may not share memory with its inputs or with each other.
    seen = {tensor.untyped_storage().data_ptr() for tensor in (y, *parts)}
    for index, tensor in enumerate(saved):
        storage = tensor.untyped_storage().data_ptr()
        saved[index] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return [y, *live, *saved]


def _saving(call: Settings, device: torch.device) -> Settings:
    """The call that wants dx where forward makes the operand of w that backward reads, and dw likewise for x.

    A stored weight has its codes already; its scales alone would do for delayed scaling.
    """
    recipe = call.recipe
    routes = routes_of(recipe, backends.choose(call.backend, device).chip_of(device))
    wants_dx = call.wants_dx and not (call.stored and not recipe.is_delayed)
    return call._replace(
        wants_dx=wants_dx and recipe.dgrad.rhs is not None and not _makes_again(routes, recipe, "dgrad"),
        wants_dw=call.wants_dw and recipe.wgrad.rhs is not None and not _makes_again(routes, recipe, "wgrad"),
    )


def _linear_backward(
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], saved: list[torch.Tensor], seed: Maybe, dy_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    wants_dx, wants_dw = call.wants_dx, call.wants_dw
    if dy.numel() == 0:
        return [tensor.zero_() for tensor in _fake_backward(dy, x, parts, saved, seed, dy_scale, *settings)]
    weight = rebuilt(parts, call.stored)
    schedule = _schedule(call, (*dy.shape[:-1], weight.shape[1]), x, weight, None)
    if OBSERVERS:
        schedule = observed(schedule, (), weight, True)
    live = live_amaxes(call.records, dy.device)
    inputs, plain, rest = cast_inputs(dy_scale, seed, live, "dy"), CastInputs(seed=seed), list(saved)
    saving = _saving(call, dy.device)
    saves_w, saves_x = saving.wants_dx, saving.wants_dw
    x_layout, w_layout = schedule.saved_layouts
    if wants_dw and schedule.recipe.wgrad.path == "refused":
        raise NotSupportedError(schedule.routes.wgrad.reason)

    def column(tensor: str, source: Maybe, layout: Layout | None, needed: bool, is_saved: bool) -> Parts:
        """A column operand: one that forward has saved, or cast now; empty where it is not needed."""
        if not needed:
            return NO_PARTS
        if is_saved and layout is not None:
            return Parts(*[None if part is None else rest.pop(0) for part in layout])
        assert source is not None
        if isinstance(source, QuantizedTensor):
            return schedule.quantize_weight(source, plain).one(schedule.reads_w_row)
        return schedule.saved_again(tensor, source, plain)

    with schedule.scope():
        x_column = column("x", x, x_layout, wants_dw, saves_x) if saves_x else None
        w_column = column("w", weight, w_layout, wants_dx, saves_w) if saves_w else None
        dx = dw = None
        if x_column is None and w_column is None and wants_dx and wants_dw and not call.records:
            # One GEMM after the other, so that only its operands exist.
            w_column = column("w", weight, w_layout, True, False)
            made = schedule.cast_dy(dy, inputs, True, False)
            dx, _ = schedule.gradients(made, Saved(w=w_column), True, False)
            del w_column
            made = schedule.cast_dy(dy, inputs, False, True)
            _, dw = schedule.gradients(made, Saved(column("x", x, x_layout, True, False)), False, True)
        else:
            x_column = x_column or column("x", x, x_layout, wants_dw, False)
            w_column = w_column or column("w", weight, w_layout, wants_dx, False)
            made = schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
            dx, dw = schedule.gradients(made, Saved(x_column, w_column), wants_dx, wants_dw)
    return [*live, *(gradient for gradient in (dx, dw) if gradient is not None)]


def check_caller(token: str, origin: str) -> None:
    """Raise where the recipe that was compiled is not the one that the caller's autocast asks for.

    `origin`: who has named the recipe. That of "code", an autocast inside what was compiled, holds for every caller.
    "product": a function of torch, which takes none.
    """
    if origin == "code" or torch._C._current_graph_task_id() != -1:
        return  # or run again by a backward, whose context is not that of the forward
    if token == context.token_of_high_precision() and origin != "product":
        return
    token = context.PLAIN if origin == "product" else token
    stale = context.ISLAND is not (token == context.PLAIN) if origin == "layer" else token != context.RECIPE
    if stale:
        raise NotSupportedError(
            "compiled code: got code of another recipe than the caller's autocast asks for, because its guards were "
            "not evaluated, as in an exported program. Pin the recipes with microfloat.torch.convert before "
            "compilation, or call it under the autocast that it was compiled under."
        )


def _delayed_casts(token: str) -> dict[str, Cast]:
    """Slot -> its cast, of x, w and dy as far as their scaling is delayed."""
    casts = context.recipe_of(token).casts
    operands = [(slot, casts[one.key]) for slot in ("x", "w", "dy") for one in reversed(OPERANDS_OF[slot])]
    return {slot: cast for slot, cast in operands if cast is not None and isinstance(cast.scaling, Delayed)}


def _record(slots: dict[str, torch.Tensor], live: torch.Tensor, token: str, layer: int) -> None:
    """Combine the amaxes of a call, in one launch, with the newest amaxes in the histories of these slots."""
    casts = {slot: cast for slot, cast in _delayed_casts(token).items() if slot in slots}
    if not casts:
        return
    state = context.ambient()
    region, group = (state.region, state.group) if state is not None else (None, None)
    try:
        scaling.record_compiled(layer, casts, region, group)
    except MicrofloatError as error:
        _name(error, layer_state.numbered(layer))
        raise
    heads = [slots[slot][:1] for slot in casts]
    live_of = [live[_LIVE[slot] : _LIVE[slot] + 1] for slot in casts]
    torch._foreach_maximum_(heads, live_of)  # pyright: ignore[reportPrivateImportUsage]


def _calibrate_(
    x_history: torch.Tensor, w_history: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, token: str, layer: int
) -> None:
    state = context.ambient()
    group = None if state is None else state.group
    histories = {"x": x_history, "w": w_history}
    scaling.calibrate(layer_state.numbered(layer), context.recipe_of(token), x, weight, group, histories)


def fake_result(call: Settings, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """y without values, and behind it the amaxes of delayed casts; weight [N, K] or [G, N, K]."""
    y = x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=call.compute)
    return [y, x.new_empty(8, dtype=torch.float32)] if call.records else [y]


def fake_gradients(
    call: Settings, dy: torch.Tensor, weight: torch.Tensor, bias_dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The gradients without values, behind the amaxes of delayed casts; weight [N, K] or [G, N, K]."""
    made = [dy.new_empty(8, dtype=torch.float32)] if call.records else []
    made += [dy.new_empty((*dy.shape[:-1], weight.shape[-1]), dtype=call.x_dtype)] if call.wants_dx else []
    made += [dy.new_empty(weight.shape, dtype=weight.dtype)] if call.wants_dw else []
    return made + ([] if bias_dtype is None else [dy.new_empty(weight.shape[:-1], dtype=bias_dtype)])


def _fake_forward(
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    weight, recipe = rebuilt(parts, call.stored), call.recipe
    outputs = fake_result(call, x, weight)
    module = backends.choose(call.backend, x.device)
    routes, saving = routes_of(recipe, module.chip_of(x.device)), _saving(call, x.device)
    saves_w, saves_x = saving.wants_dx, saving.wants_dw
    rows, (out_features, in_features) = x.numel() // x.shape[-1], weight.shape
    for tensor, saves, gemm, sizes in (
        ("x", saves_x, recipe.wgrad, (rows, in_features)), ("w", saves_w, recipe.dgrad, (out_features, in_features))
    ):  # fmt: skip
        layouts = layouts_of(module, entries_of(recipe, routes, tensor, True, saves), *sizes)
        layout = layouts[not (saves and gemm.from_fprop)]
        for part in layout or ():
            if part is not None:
                outputs.append(x.new_empty_strided(part.shape, part.strides, dtype=getattr(torch, part.dtype)))
    return outputs


def _fake_backward(
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], saved: list[torch.Tensor], seed: Maybe, dy_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    return fake_gradients(call, dy, rebuilt(parts, call.stored))


def _no_result(*_: object) -> None:
    """The fake of an operator that changes its arguments alone."""


for _schema, _run, _fake in (
    (
        "linear_forward(Tensor x, Tensor[] weight, Tensor? bias, Tensor? seed, Tensor? x_scale, Tensor? w_scale, "
        f"{SETTINGS}) -> Tensor[]", named(_linear_forward), _fake_forward,
    ), (
        # x only where wgrad reads it in high precision, or decoded: elsewhere its codes are among `saved`.
        "linear_backward(Tensor dy, Tensor? x, Tensor[] weight, Tensor[] saved, Tensor? seed, Tensor? dy_scale, "
        f"{SETTINGS}) -> Tensor[]", named(_linear_backward), _fake_backward,
    ), (
        "joint_amax(Tensor[] weights) -> Tensor", joint_amax,
        lambda weights: weights[0].new_empty(weights[0].shape[:-2], dtype=torch.float32),
    ), (
        "record_forward_(Tensor(a!) x_history, Tensor(b!) w_history, Tensor live, str token, int layer) -> ()",
        lambda x, w, *call: _record({"x": x, "w": w}, *call), _no_result,
    ), (
        "record_backward_(Tensor(a!) history, Tensor live, str token, int layer) -> ()",
        lambda dy, *call: _record({"dy": dy}, *call), _no_result,
    ), (
        "check_autocast_(Tensor(a!) marker, str origin) -> ()",
        lambda marker, origin: check_caller(context.PLAIN, origin), _no_result,
    ), (
        "calibrate_(Tensor(a!) x_history, Tensor(b!) w_history, Tensor x, Tensor weight, str token, int layer) -> ()",
        _calibrate_, _no_result,
    ),
):  # fmt: skip
    define(_schema, _run, _fake, batches=False)
# The call seed of a layer, drawn once its input exists: a plain draw has no inputs, and a compiler is free to swap the
# draws of two layers, which would give each the other's noise. `apart`: as of `draw_seed`, for layers of one input.
define(
    "draw_seed_for(Tensor x, Tensor apart) -> Tensor", lambda x, _: draw_seed(x.device),
    lambda x, _: x.new_empty(2, dtype=torch.int64), batches=False, tags=[torch.Tag.nondeterministic_seeded],
)  # fmt: skip
