"""The quantized linear under torch.compile: one opaque operator forward, one backward, plain tensors between them.

Compiled code cannot read the context variable of `autocast`. It reads attributes of `microfloat.torch.context` instead,
which Dynamo guards: each call looks them up again in its own thread and task, and an autocast that changes what a layer
runs finds or compiles other code. What an autocast inside the compiled function says is a constant of that code. Code
that runs without its guards, such as an exported program, would not look: so the operator compares with the true
context of its caller, and raises where a layer would run another recipe.

Legend: M = rows of x, K = in features, N = out features.
"""

from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.recipes import Recipe
from microfloat.routes import routes_of
from microfloat.torch import backends, context
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.compile import export as exported
from microfloat.torch.compile.operators import Settings, describe, makes_again, settings_in
from microfloat.torch.linear.function import bias_gradient, refuse_double_backward
from microfloat.torch.linear.grouped import groups_of
from microfloat.torch.linear.schedule import autocast_dtype
from microfloat.torch.linear.weight_cache import plain_beside
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.tensor.checks import check_grouped
from microfloat.torch.tensor.custom_ops import refuse_transforms
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

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
_EAGER_FORWARD, _EAGER_GATHERED, _EAGER_SHARDED = (
    context.in_eager_mode(lambda layer, x: layer.forward(x), reason) for reason in (OWN_WGRAD, _GATHERED, _SHARDED)
)


def compiled_linear(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """`Linear.forward` as Dynamo traces it: the same bits as in eager mode (docs/recipes.md)."""
    own_wgrad = layer.fuse_wgrad_accumulation and torch.is_grad_enabled()
    shards = getattr(layer, "_fsdp_state", None)
    is_gathered = shards is not None and not shards.reason  # by FSDP2 as codes, which no graph takes
    if (own_wgrad or is_gathered) and not torch.compiler.is_exporting():
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
    return _run(layer, x, weight, layer.added_bias, None, token, origin, layer.backend)


def compiled_grouped(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, group_sizes: object, pin_token: str | None,
    backend: str,
) -> torch.Tensor:  # fmt: skip
    """A grouped call as Dynamo traces it; `layer`: the holder of delayed-scaling state, or None."""
    if getattr(layer, "fuse_wgrad_accumulation", False) and torch.is_grad_enabled():
        raise NotSupportedError(OWN_WGRAD)
    if exported.PLAINLY:
        raise NotSupportedError(
            "export: got a GroupedLinear or a grouped_matmul, needed layers that plain operations can run: these take "
            "groups of fixed sizes alone. torch.export.export keeps it as an operator of this library."
        )
    token, origin = context.recipe_here(pin_token)
    refuse_transforms("forward", x)
    check_grouped(x, weight, bias)
    ends = groups_of(group_sizes, x, weight.shape[0]).ends
    if token == context.PLAIN:
        if origin != "code":
            torch.ops.microfloat.check_autocast_(MARKER, origin)
        token = context.token_of_high_precision()
    return _run(layer, x, weight, bias, ends, token, origin, backend)


def _run(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, ends: Maybe, token: str, origin: str, backend: str
) -> torch.Tensor:
    """y by the operators; the amaxes that come with it, if any, go to the layer's histories."""
    state, number = _state_of(layer, x, weight, token)
    settings = settings_of(x, weight, token, origin, backend, state)
    y = _Compiled.apply(x, weight, bias, ends, *state, number, *settings)
    if isinstance(y, tuple):
        y, live = y
        histories = layer.scaling_x_amax_history, layer.scaling_w_amax_history
        torch.ops.microfloat.record_forward_(*histories, live, token, number)
    return y


def _state_of(layer: Any, x: torch.Tensor, weight: torch.Tensor, token: str) -> tuple[tuple[Maybe, ...], int]:
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
    return _Compiled.apply(x, weight, bias, None, *state, -1, *settings)


def check_buffers(layer: torch.nn.Module) -> None:
    if not layer_state.has_buffers(layer) or (layer.scaling_x_scale.is_meta and not layer.weight.is_meta):
        raise NotSupportedError(
            "torch.compile: got a layer without delayed-scaling state, needed its buffers before compilation. "
            "Convert the model with the DelayedScaling recipe first, or run one step in eager mode."
        )


class _Compiled(torch.autograd.Function):
    """A call by the two operators; `ends`: of the groups of rows, None for a Linear."""

    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, ends: Maybe, *state: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        seed, x_scale, w_scale, dy_scale, dy_history, number, *settings = state
        call = settings_in(settings)
        weights = weight.part_list() if isinstance(weight, QuantizedTensor) else [weight]
        y, *saved = torch.ops.microfloat.linear_forward(x, weights, bias, ends, seed, x_scale, w_scale, *settings)
        live, saved = (saved[0], saved[1:]) if call.records else (None, saved)
        keeps_x = ends is not None or (
            call.wants_dw and _keeps_x(call.token, call.backend, x.device.type, x.device.index)
        )
        scales = (None, None) if ends is None else (x_scale, w_scale)  # of casts in backward
        ctx.save_for_backward(x if keeps_x else None, ends, seed, *scales, *weights, *saved)
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
        x, ends, seed, x_scale, w_scale, *saved = ctx.saved_tensors
        (dy_scale, dy_history), (parts, number, *settings) = ctx.dy_state, ctx.settings
        call = settings_in(settings)
        records = dy_history is not None and (call.wants_dx or call.wants_dw)
        scales = x_scale, w_scale, dy_scale.clone() if records else None
        sums = ctx.bias_dtype if ends is not None and ctx.needs_input_grad[2] else None  # of each group
        gradients = list(torch.ops.microfloat.linear_backward(
            dy, x, saved[:parts], saved[parts:], ends, seed, *scales, sums, *settings[:-1], records
        ))  # fmt: skip
        if records:
            torch.ops.microfloat.record_backward_(dy_history, gradients.pop(0), call.token, number)
        wanted = call.wants_dx, call.wants_dw, sums is not None
        dx, dw, db = (gradients.pop(0) if one else None for one in wanted)
        if ends is None and ctx.bias_dtype is not None:
            db = bias_gradient(dy, ctx.bias_dtype)
        return (dx, dw, db, *(None,) * (7 + len(settings)))


def _keeps_x(token: str, backend: str, device: str, index: int | None) -> bool:
    """True where backward reads x itself: in high precision, or to cast it once more."""
    on = torch.device(device if index is None else f"{device}:{index}")
    recipe, module = context.recipe_of(token), backends.choose(backend, on)
    return context.keeps_x(token) or makes_again(routes_of(recipe, module.chip_of(on)), recipe, "wgrad")


# As torch.compiler.assume_constant_result marks a function, which would import all of Dynamo.
_keeps_x._dynamo_marked_constant = True  # type: ignore[attr-defined]
