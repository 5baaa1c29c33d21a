"""Grouped layers under torch.compile: one opaque operator forward and one backward, as in `compile.linear`.

Operands of a group have the size of the group, which a compiler cannot know. So forward saves x and the weight, and
backward casts them once more, to the same bytes.

Legend: T = rows of x, G = groups, K = in features, N = out features.
"""

from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.passes import CastInputs
from microfloat.torch import context
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.compile import export as exported
from microfloat.torch.compile.linear import (
    MARKER,
    OWN_WGRAD,
    SETTINGS,
    Settings,
    cast_inputs,
    check_caller,
    fake_gradients,
    fake_result,
    live_amaxes,
    named,
    rebuilt,
    recorded,
    settings_in,
    settings_of,
    state_of,
)
from microfloat.torch.linear.function import refuse_double_backward
from microfloat.torch.linear.grouped import GroupedSchedule, Groups, find_grouped, groups_of
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.tensor.checks import check_grouped
from microfloat.torch.tensor.custom_ops import define, refuse_transforms
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor


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
    state, number = state_of(layer, x, weight, token)
    settings = settings_of(x, weight, token, origin, backend, state)
    return recorded(layer, _CompiledGrouped.apply(x, weight, bias, ends, *state, number, *settings), token, number)


class _CompiledGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, ends: torch.Tensor, *state: Any
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        seed, x_scale, w_scale, dy_scale, dy_history, number, *settings = state
        weights = weight.part_list() if isinstance(weight, QuantizedTensor) else [weight]
        y, *live = torch.ops.microfloat.grouped_forward(x, weights, bias, ends, seed, x_scale, w_scale, *settings)
        ctx.save_for_backward(x, ends, seed, x_scale, w_scale, *weights)
        ctx.dy_state, ctx.settings = (dy_scale, dy_history), (number, *settings)
        ctx.bias_dtype = None if bias is None else bias.dtype
        if not live:
            return y
        ctx.mark_non_differentiable(live[0])
        return y, live[0]

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor, *_: object) -> tuple[Maybe, ...]:  # type: ignore[override]
        refuse_double_backward()
        (x, *saved), (dy_scale, dy_history) = ctx.saved_tensors, ctx.dy_state
        number, *settings = ctx.settings
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        records = dy_history is not None and (wants_dx or wants_dw)
        scale, bias_dtype = dy_scale.clone() if records else None, ctx.bias_dtype if wants_db else None
        call = settings_in(settings)._replace(wants_dx=wants_dx, wants_dw=wants_dw, records=records)
        gradients = list(torch.ops.microfloat.grouped_backward(dy, x, saved[4:], *saved[:4], scale, bias_dtype, *call))
        if records:
            torch.ops.microfloat.record_backward_(dy_history, gradients.pop(0), call.token, number)
        made = [gradients.pop(0) if wanted else None for wanted in (wants_dx, wants_dw, wants_db)]
        return (*made, *(None,) * (7 + len(settings)))


def _begin(
    call: Settings, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, ends: torch.Tensor, is_backward: bool
) -> tuple[GroupedSchedule, Groups]:
    """The schedule of a call, shown to watches, and its groups."""
    wants = (call.wants_dx, call.wants_dw) if is_backward else (False, False)
    schedule = find_grouped(x, weight, bias, call.recipe, call.backend, *wants, compute=call.compute)
    if OBSERVERS:
        schedule = observed(schedule, (), weight, is_backward)
    return schedule, Groups(ends, x.shape[0])


def _grouped_forward(
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, ends: torch.Tensor, seed: Maybe, x_scale: Maybe,
    w_scale: Maybe, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    check_caller(call.token, call.origin)
    weight = rebuilt(parts, call.stored)
    schedule, groups = _begin(call, x, weight, bias, ends, False)
    live = live_amaxes(call.records, x.device)
    x_inputs = cast_inputs(x_scale, seed, live, "x", schedule.is_static)._replace(groups=groups)
    w_inputs = cast_inputs(w_scale, seed, live, "w", schedule.is_joint)._replace(groups=groups)
    with schedule.scope():
        return [schedule.forward(x, weight, bias, x_inputs, w_inputs)[0], *live]


def _grouped_backward(
    dy: torch.Tensor, x: torch.Tensor, parts: list[torch.Tensor], ends: torch.Tensor, seed: Maybe, x_scale: Maybe,
    w_scale: Maybe, dy_scale: Maybe, bias_dtype: torch.dtype | None, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    weight = rebuilt(parts, call.stored)
    schedule, groups = _begin(call, x, weight, None, ends, True)
    live = live_amaxes(call.records, dy.device)
    x_inputs = cast_inputs(x_scale, seed, [], "x", schedule.is_static)._replace(groups=groups)
    w_inputs = cast_inputs(w_scale, seed, [], "w", schedule.is_joint)._replace(groups=groups)
    inputs = cast_inputs(dy_scale, seed, live, "dy")._replace(groups=groups)
    made: list[torch.Tensor] = list(live)
    with schedule.scope():
        if call.wants_dx or call.wants_dw:
            saved = schedule.saved_anew(x, weight, x_inputs, w_inputs)
            operands = schedule.cast_dy(dy, inputs, call.wants_dx, call.wants_dw)
            read = schedule.saved_operands(saved, CastInputs())
            gradients = schedule.gradients(operands, read, call.wants_dx, call.wants_dw)
            made += [gradient for gradient in gradients if gradient is not None]
        if bias_dtype is not None:
            made.append(groups.sums(dy).to(bias_dtype))
    return made


def _fake_forward(
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, ends: torch.Tensor, seed: Maybe, x_scale: Maybe,
    w_scale: Maybe, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    return fake_result(call, x, rebuilt(parts, call.stored))


def _fake_backward(
    dy: torch.Tensor, x: torch.Tensor, parts: list[torch.Tensor], ends: torch.Tensor, seed: Maybe, x_scale: Maybe,
    w_scale: Maybe, dy_scale: Maybe, bias_dtype: torch.dtype | None, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    return fake_gradients(call, dy, rebuilt(parts, call.stored), bias_dtype)


define(
    "grouped_forward(Tensor x, Tensor[] weight, Tensor? bias, Tensor ends, Tensor? seed, Tensor? x_scale, "
    f"Tensor? w_scale, {SETTINGS}) -> Tensor[]",
    named(_grouped_forward), _fake_forward, batches=False,
)  # fmt: skip
define(
    "grouped_backward(Tensor dy, Tensor x, Tensor[] weight, Tensor ends, Tensor? seed, Tensor? x_scale, "
    f"Tensor? w_scale, Tensor? dy_scale, ScalarType? bias_dtype, {SETTINGS}) -> Tensor[]",
    named(_grouped_backward), _fake_backward, batches=False,
)  # fmt: skip
