"""Grouped layers under torch.compile: one opaque operator forward and one backward, as in `microfloat.torch.compiled`.

What a group saves for backward has the size of the group, which a compiler cannot know. So forward saves x and the
weight, and backward casts them once more, to the same bytes.

Legend: T = rows of x, G = groups, K = in features, N = out features.
"""

from typing import Any

import torch

from microfloat.errors import NotSupportedError
from microfloat.torch import context
from microfloat.torch._checks import check_grouped
from microfloat.torch._operators import refuse_batches, refuse_transforms
from microfloat.torch._typing import Context, Maybe
from microfloat.torch.compiled import (
    MAIN_GRAD,
    MARKER,
    cast_inputs,
    check_caller,
    delayed_state,
    describe,
    live_amaxes,
    named,
    rebuilt,
    recorded,
    token_of_high_precision,
)
from microfloat.torch.grouped import GroupedSchedule, Groups, find_grouped, groups_of
from microfloat.torch.linear import refuse_double_backward, static_amax
from microfloat.torch.observing import OBSERVERS, observed_by_weight
from microfloat.torch.tensor import QuantizedTensor

__all__ = ["compiled_grouped"]

_library = torch.library.Library("microfloat", "FRAGMENT")
_library.define(
    "grouped_forward(Tensor x, Tensor[] weight, str stored, Tensor? bias, Tensor ends, Tensor? seed, "
    "Tensor? x_scale, Tensor? w_scale, str token, str origin, str backend, ScalarType compute, "
    "bool records) -> Tensor[]"
)
_library.define(
    "grouped_backward(Tensor dy, Tensor x, Tensor[] weight, str stored, Tensor ends, Tensor? seed, "
    "Tensor? x_scale, Tensor? w_scale, Tensor? dy_scale, str token, str backend, ScalarType compute, "
    "bool wants_dx, bool wants_dw, "
    "ScalarType? bias_dtype, bool records) -> Tensor[]"
)


def compiled_grouped(
    layer: Any, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, group_sizes: object,
    pin_token: str | None,
    backend: str,
) -> torch.Tensor:  # fmt: skip
    """A grouped call as Dynamo traces it; `layer`: the holder of delayed-scaling state, or None."""
    if getattr(layer, "fuse_wgrad_accumulation", False) and torch.is_grad_enabled():
        raise NotSupportedError(MAIN_GRAD)
    token, origin = context.recipe_here(pin_token)
    refuse_transforms("forward", x)
    check_grouped(x, weight, bias)
    ends = groups_of(group_sizes, x, weight.shape[0]).ends
    if token == context.PLAIN:
        if origin != "code":
            torch.ops.microfloat.check_autocast_(MARKER, origin)
        token = token_of_high_precision()
    compute = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        compute = torch.get_autocast_dtype(x.device.type)
    backend = context.asked().BACKEND if backend == "auto" else backend
    seed = torch.ops.microfloat.draw_seed_for(x) if context.is_stochastic(token) else None
    state: tuple[Maybe, ...] = (None, None, None, None)
    number = -1
    if context.is_delayed(token):
        if layer is None:
            raise NotSupportedError("recipe: got delayed scaling for a function. Use microfloat.torch.GroupedLinear.")
        state = delayed_state(layer)
        number = layer._number
    elif context.is_static(token):
        state = (static_amax(layer), None, None, None)
    outputs = _CompiledGrouped.apply(
        x, weight, bias, ends, seed, *state, token, origin, backend, compute, number, torch.is_grad_enabled()
    )
    return recorded(layer, outputs, token, number)


class _CompiledGrouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Context, x: torch.Tensor, weight: torch.Tensor, bias: Maybe, ends: torch.Tensor, seed: Maybe,
        x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, dy_history: Maybe, token: str, origin: str, backend: str,
        compute: torch.dtype, number: int, has_grad: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        records = has_grad and dy_history is not None
        stored = describe(weight) if isinstance(weight, QuantizedTensor) else ""
        weights = weight.part_list() if isinstance(weight, QuantizedTensor) else [weight]
        outputs = torch.ops.microfloat.grouped_forward(
            x, weights, stored, bias, ends, seed, x_scale, w_scale, token, origin, backend, compute, records
        )
        ctx.save_for_backward(x, ends, seed, x_scale, w_scale, *weights)
        ctx.stored = stored
        ctx.dy_state = dy_scale, dy_history
        ctx.settings = token, backend, compute, number, None if bias is None else bias.dtype
        if not records:
            return outputs[0]
        ctx.mark_non_differentiable(outputs[1])
        return outputs[0], outputs[1]

    @staticmethod
    def backward(ctx: Context, dy: torch.Tensor, *_: object) -> tuple[Maybe, ...]:  # type: ignore[override]
        if not torch.compiler.is_compiling():
            refuse_double_backward()
        (x, *saved), (dy_scale, dy_history) = ctx.saved_tensors, ctx.dy_state
        saved, weights = saved[:4], saved[4:]
        token, backend, compute, number, bias_dtype = ctx.settings
        wants_dx, wants_dw, wants_db = ctx.needs_input_grad[:3]
        records = dy_history is not None and (wants_dx or wants_dw)
        gradients = list(
            torch.ops.microfloat.grouped_backward(
                dy, x, weights, ctx.stored, *saved, dy_scale.clone() if records else None, token, backend, compute,
                wants_dx, wants_dw, bias_dtype if wants_db else None, records,
            )
        )  # fmt: skip
        if records:
            torch.ops.microfloat.record_backward_(dy_history, gradients.pop(0), token, number)
        made = [gradients.pop(0) if wanted else None for wanted in (wants_dx, wants_dw, wants_db)]
        return (*made, *(None,) * 12)


def _schedule(
    x: torch.Tensor, weight: torch.Tensor, bias: Maybe, token: str, backend: str, compute: torch.dtype, *wants: bool
) -> GroupedSchedule:
    return find_grouped(x, weight, bias, context.recipe_of(token), backend, *wants, compute=compute)


def _grouped_forward(
    x: torch.Tensor, parts: list[torch.Tensor], stored: str, bias: Maybe, ends: torch.Tensor, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, token: str, origin: str, backend: str, compute: torch.dtype, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    if token != token_of_high_precision():
        check_caller(token, origin)
    weight = rebuilt(parts, stored)
    schedule, groups = _schedule(x, weight, bias, token, backend, compute, False, False), Groups(ends, x.shape[0])
    is_static = schedule.is_static
    if OBSERVERS:
        schedule = observed_by_weight(schedule, weight, False)
    live = live_amaxes(records, x.device)
    x_inputs, w_inputs = (
        cast_inputs(scale, seed, live, tensor, is_static and tensor == "x")._replace(groups=groups)
        for scale, tensor in ((x_scale, "x"), (w_scale, "w"))
    )
    with schedule.scope():
        return [schedule.forward(x, weight, bias, x_inputs, w_inputs)[0], *live]


def _grouped_backward(
    dy: torch.Tensor, x: torch.Tensor, parts: list[torch.Tensor], stored: str, ends: torch.Tensor, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, token: str, backend: str, compute: torch.dtype, wants_dx: bool,
    wants_dw: bool, bias_dtype: torch.dtype | None, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    weight = rebuilt(parts, stored)
    schedule, groups = _schedule(x, weight, None, token, backend, compute, wants_dx, wants_dw), Groups(ends, x.shape[0])
    is_static = schedule.is_static
    if OBSERVERS:
        schedule = observed_by_weight(schedule, weight, True)
    live = live_amaxes(records, dy.device)
    x_inputs, w_inputs, inputs = (
        cast_inputs(scale, seed, into, tensor, is_static and tensor == "x")._replace(groups=groups)
        for scale, into, tensor in ((x_scale, [], "x"), (w_scale, [], "w"), (dy_scale, live, "dy"))
    )
    made: list[torch.Tensor] = list(live)
    with schedule.scope():
        if wants_dx or wants_dw:
            saved = schedule.saved_anew(x, weight, x_inputs, w_inputs)
            parts = schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
            gradients = schedule.gradients(parts, saved, wants_dx, wants_dw)
            made += [gradient for gradient in gradients if gradient is not None]
        if bias_dtype is not None:
            made.append(groups.sums(dy).to(bias_dtype))
    return made


def _fake_forward(
    x: torch.Tensor, parts: list[torch.Tensor], stored: str, bias: Maybe, ends: torch.Tensor, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, token: str, origin: str, backend: str, compute: torch.dtype, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    y = x.new_empty((x.shape[0], rebuilt(parts, stored).shape[1]), dtype=compute)
    return [y, x.new_empty(8, dtype=torch.float32)] if records else [y]


def _fake_backward(
    dy: torch.Tensor, x: torch.Tensor, parts: list[torch.Tensor], stored: str, ends: torch.Tensor, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, token: str, backend: str, compute: torch.dtype, wants_dx: bool,
    wants_dw: bool, bias_dtype: torch.dtype | None, records: bool,
) -> list[torch.Tensor]:  # fmt: skip
    weight = rebuilt(parts, stored)
    made = [dy.new_empty(8, dtype=torch.float32)] if records else []
    made += [x.new_empty(x.shape)] if wants_dx else []
    made += [weight.new_empty(weight.shape)] if wants_dw else []
    return made + ([] if bias_dtype is None else [dy.new_empty(weight.shape[:2], dtype=bias_dtype)])


_library.impl("grouped_forward", named(_grouped_forward), "CompositeExplicitAutograd")
_library.impl("grouped_backward", named(_grouped_backward), "CompositeExplicitAutograd")
torch.library.register_fake("microfloat::grouped_forward", _fake_forward, lib=_library)
torch.library.register_fake("microfloat::grouped_backward", _fake_backward, lib=_library)
refuse_batches(_library, "grouped_forward", "grouped_backward")
