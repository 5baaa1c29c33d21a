"""Eager steps of `Linear` by plan: what a call works out before it touches data is worked out once and looked up.

A plan belongs to a backend (`backend.linear_plan`) and is kept under everything it depends on: recipe, backend, shape,
strides, dtype, device and alignment of input and weight, what needs a gradient, torch's autocast. Any change finds
another plan, or none, and then the general path of `microfloat.torch.linear` runs, with the same bytes.
"""

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad

from microfloat.recipes import Cast, Recipe
from microfloat.torch import backends, scaling
from microfloat.torch._checks import check_linear
from microfloat.torch.context import Ambient
from microfloat.torch.kept import KeptWeight
from microfloat.torch.linear import (
    LinearCall,
    bias_gradient,
    layer_of,
    linear_backward,
    refuse_batched,
    refuse_double_backward,
)

__all__ = ["counts_of", "planned_linear"]

# Plans run on CUDA alone; tests run them in Triton's interpreter.
_ON_CPU_TOO = False
_MOST_PLANS = 1024
# Key -> (recipe, plan or None). The recipe is kept, so that its id, which stands in the key, stays its own.
_PLANS: dict[tuple, tuple[Recipe, Any]] = {}
_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
# Stands for a bias that is no parameter of the layer itself: parametrized or pruned.
_COMPUTED: Any = object()


class _Delayed(NamedTuple):
    """What backward needs to know about the delayed scaling of its forward."""

    layer: "weakref.ref[nn.Module]"
    group: Any
    region: scaling.Region
    records: bool
    late: scaling.Late | None  # of a forward inside a backward


def planned_linear(
    layer: Any, x: Any, recipe: Recipe, state: Ambient | None, is_first_microbatch: bool | None
) -> torch.Tensor | None:
    """``x @ weight.T + bias`` under `recipe` by a plan; None where none applies and the general path must run."""
    parameters = layer._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias", _COMPUTED)
    if (
        type(x) not in _PLAIN_TYPES or type(weight) is not nn.Parameter or not (x.is_cuda or _ON_CPU_TOO)
        or bias is _COMPUTED or x.is_neg() or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
    ):  # fmt: skip
        return None
    name = layer.backend if layer.backend != "auto" or state is None else state.backend
    grad = torch.is_grad_enabled()
    kind = "cuda" if x.is_cuda else "cpu"
    key = (
        id(recipe), name, grad, x.requires_grad, weight.requires_grad,
        x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15,
        weight.shape, weight.stride(), weight.dtype, weight.get_device(), weight.data_ptr() & 15,
        None if bias is None else (bias.shape, bias.dtype, bias.get_device(), bias.data_ptr() & 15),
        torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None,
    )  # fmt: skip
    known = _PLANS.get(key)
    if known is None:
        known = _make(key, recipe, x, weight, bias, name)
    plan = known[1]
    if plan is None:
        return None
    if plan.device >= 0 and plan.device != torch._C._cuda_getDevice():
        with torch.cuda.device(plan.device):
            return planned_linear(layer, x, recipe, state, is_first_microbatch)
    if plan.is_delayed:
        return _delayed_linear(plan, layer, x, weight, bias, state, is_first_microbatch)
    given = plan.nothing_given
    if plan.folds:
        counts = counts_of(layer, plan.module)
        plan = _listened(plan, counts, x, weight, bias)
        if plan is None:
            return None
        counts.note(plan.noted)
        given = plan.given_by(counts)
    if plan.is_stochastic:
        given = plan.seeded(given, is_first_microbatch is not None)
    kept = None
    if is_first_microbatch is not None:
        kept, _ = _kept_weight(plan, layer, weight, given[1], is_first_microbatch)
    x_given, w_given, dy_given = given
    if plan.wants_dx or plan.wants_dw or (grad and bias is not None and bias.requires_grad):
        return _apply(x, weight, bias, plan, dy_given, x_given, w_given, kept)
    return plan.forward(x, weight, bias, x_given, w_given, kept)[0]


def _make(key: tuple, recipe: Recipe, x: Any, weight: Any, bias: Any, name: str) -> tuple[Recipe, Any]:
    """Ask the backend for a plan, and remember its answer."""
    check_linear(x, weight, bias)
    make = getattr(backends.choose(name, x.device), "linear_plan", None)
    grad, x_grad, weight_grad, autocast = key[2], key[3], key[4], key[-1]
    plan = None
    if make is not None and (autocast is None or autocast == x.dtype):
        plan = make(recipe, x.detach(), weight.detach(), bias, grad and x_grad, grad and weight_grad)
    if len(_PLANS) >= _MOST_PLANS:  # shapes made anew for every call must not pile up
        _PLANS.clear()
    known = _PLANS[key] = (recipe, plan)
    return known


def counts_of(layer: Any, backend: Any) -> Any:
    """What folding has changed in this layer so far."""
    counts = layer.__dict__.get("_fold_counts")
    if counts is None:
        counts = layer.__dict__["_fold_counts"] = backend.FoldCounts()
    return counts


def _listened(plan: Any, counts: Any, x: Any, weight: Any, bias: Any) -> Any:
    """The plan with the forms that the counts of the step before ask for."""
    forms = plan.module.call_forms(plan.recipe, x.device, counts)
    if forms == plan.forms:
        return plan
    key = tuple(forms.values())
    if key not in plan.variants:
        plan.variants[key] = plan.module.linear_plan(
            plan.recipe, x.detach(), weight.detach(), bias, plan.wants_dx, plan.wants_dw, counts
        )
    return plan.variants[key]


def _kept_weight(
    plan: Any, layer: Any, weight: torch.Tensor, given: Any, is_first_microbatch: bool
) -> tuple[Any, bool]:
    """The weight's operands, the layer's kept ones if nothing they depend on has changed; and whether they are new."""
    kept = layer.__dict__.setdefault("_weight_cache", KeptWeight())
    if is_first_microbatch:
        kept.clear()
    version = given.scale_enc._version if plan.is_delayed else None
    # The recipe stands in the key, so that no other gets its id while the key is kept.
    key = ("planned", *plan.weight_key, version, weight.dtype, plan.recipe)
    operands = kept.find(weight, key)
    if operands is not None and not (plan.wants_dx and operands.column is None):
        return operands, False
    operands = plan.quantize_weight(weight, given)
    kept.keep(weight, key, operands)
    return operands, True


def _delayed_linear(
    plan: Any, layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: Ambient | None,
    is_first_microbatch: bool | None,
) -> torch.Tensor:  # fmt: skip
    """The same with the layer's scaling state."""
    x_cast, w_cast = plan.recipe.fprop.casts
    buffers = layer._buffers
    history = buffers.get("scaling_x_amax_history")
    if history is None or history.is_meta or history.shape[0] != x_cast.scaling.amax_history_len:
        scaling.ensure_buffers(layer, x_cast.scaling)
    group, region = (None, None) if state is None else (state.group, state.region)
    if region is not None and region.closed:  # the context was copied inside an autocast that has been left
        region = None
    recomputed = scaling.recomputation(layer, state)
    late = None
    alone = region is None
    if recomputed is not None:
        scales, late = recomputed
        records = late is not None
        histories: tuple[Any, Any] = (None, None)
        if late is not None:
            histories = x.new_zeros(1, dtype=torch.float32), x.new_zeros(1, dtype=torch.float32)
    else:
        records = torch.is_grad_enabled()
        if not alone or scaling.LATE:
            scaling.begin_forward(layer, region, group)
        scales = {"x": buffers["scaling_x_scale"], "w": buffers["scaling_w_scale"]}
        histories = (None, None)
        if records:
            histories = buffers["scaling_x_amax_history"], buffers["scaling_w_amax_history"]
    given = (
        plan.given(_aligned(scales["x"]), None, histories[0]), plan.given(_aligned(scales["w"]), None, histories[1])
    )  # fmt: skip
    if state is not None and state.record_tape is not None:
        # Clones: the live buffers change when the region closes, the recomputation wants those of now.
        state.record_tape.record({"x": given[0].scale_enc.clone(), "w": given[1].scale_enc.clone()})
    kept = None
    if is_first_microbatch is not None:
        kept, is_new = _kept_weight(plan, layer, weight, given[1], is_first_microbatch)
        w_cast = w_cast if is_new else None  # codes of an earlier call were recorded then
    if late is not None:
        late["x"] = (x_cast, histories[0])
        if w_cast is not None:
            late["w"] = (w_cast, histories[1])
    elif records and region is not None:
        scaling.note_forward(layer, x_cast, w_cast, group=group, region=region)
    call = _Delayed(weakref.ref(layer), group, scaling.CLOSED_REGION if region is None else region, records, late)
    if plan.wants_dx or plan.wants_dw or (torch.is_grad_enabled() and bias is not None and bias.requires_grad):
        y = _apply(x, weight, bias, plan, call, *given, kept)
    else:
        y = plan.forward(x, weight, bias, *given, kept)[0]
    if alone and recomputed is None:
        scaling.roll_alone(layer, x_cast, w_cast, records=records)
    return y


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """An encode scale where a prepared launch may read it."""
    return scale if scale.data_ptr() & 15 == 0 else scale.clone()


class _PlannedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, plan: Any, call: Any, x_given: Any,
        w_given: Any, kept: Any,
    ) -> torch.Tensor:  # fmt: skip
        y, saved = plan.forward(x, weight, bias, x_given, w_given, kept)
        ctx.save_for_backward(*saved)
        ctx.plan, ctx.call = plan, call
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[torch.Tensor | None, ...]:
        refuse_double_backward()
        (dy,) = gradients
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        dx = dw = None
        if wants_dx or wants_dw:
            try:
                dx, dw = _backward(ctx.plan, ctx.call, dy, ctx.saved_tensors, wants_dx, wants_dw)
            except RuntimeError:
                refuse_batched(dy)  # whose address cannot be read
                raise
        elif ctx.plan.is_delayed and ctx.call.late:
            scaling.record_late(layer_of(ctx.call), ctx.call.late)
        db = bias_gradient(dy, ctx.bias_dtype) if wants_db else None
        return dx, dw, db, None, None, None, None, None


# What torch's own `Function.apply` ends in, without its preparations for functorch, which is not at work here.
_apply: Any = super(torch.autograd.Function, _PlannedLinear).apply  # pyright: ignore[reportAttributeAccessIssue]


def _backward(plan: Any, call: Any, dy: torch.Tensor, saved: tuple, wants_dx: bool, wants_dw: bool) -> tuple[Any, Any]:
    """dx and dw by the plan where it was made for this gradient and these wishes, else by the general path.

    `call`: a `_Delayed` if the recipe is one of delayed scaling, else what the plan gives to the cast of dy.
    """
    if wants_dx is not plan.wants_dx or wants_dw is not plan.wants_dw or not plan.takes(dy):
        return _general_backward(plan, call, dy, saved, wants_dx, wants_dw)
    given = _dy_state(plan, call) if plan.is_delayed else call
    if plan.device >= 0 and plan.device != torch._C._cuda_getDevice():
        with torch.cuda.device(plan.device):
            return plan.backward(dy, saved, given)
    return plan.backward(dy, saved, given)


def _dy_state(plan: Any, call: _Delayed) -> Any:
    """dy's encode scale, read when backward runs, and the history to record into."""
    layer, region, group = layer_of(call), call.region, call.group
    if call.late is not None:
        region, group = scaling.record_late(layer, call.late)
    if call.records:
        recipe = plan.recipe
        cast: Cast = recipe.dgrad.lhs if plan.wants_dx else recipe.wgrad.lhs
        scaling.note_recorded(layer, "dy", cast, group=group, region=region)
    history = scaling.amax_history(layer, "dy") if call.records else None
    return plan.given(_aligned(scaling.encode_scale(layer, "dy")), None, history)


def _general_backward(
    plan: Any, call: Any, dy: torch.Tensor, saved: tuple, wants_dx: bool, wants_dw: bool
) -> tuple[Any, Any]:
    """A gradient that the plan was not made for, or fewer results than it gives: the loop over the GEMMs."""
    general = LinearCall(plan.recipe, plan.module, plan.dtype)
    general.forms = plan.forms
    if plan.is_delayed:
        general.layer, general.group, general.region = call.layer, call.group, call.region
        general.records, general.late = call.records, call.late
    else:
        general.seed = call.seed
    x_column, w_column = plan.operands(saved)
    dx, dw = linear_backward(
        general, dy, x_column if wants_dw else None, w_column if wants_dx else None, plan.dtype, plan.dtype
    )
    return dx if dx is None or plan.x_shape is None else dx.view(plan.x_shape), dw
