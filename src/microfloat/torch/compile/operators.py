"""The operators of compiled code: a Linear's forward and backward, and the writes to the state of its layer.

Each of them is opaque to a compiler, and runs the schedule of an eager call. With `ends` it is a call of groups of rows
(`linear.grouped`), whose operands have the size of a group, which a compiler cannot know: so forward saves x and the
weight, and backward casts them once more, to the same bytes.

Legend: M = rows of x, G = groups, K = in features, N = out features.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.layout import Layout
from microfloat.operands import OPERANDS_OF
from microfloat.passes import CastInputs
from microfloat.recipes import Delayed, Recipe
from microfloat.recipes._serialize import cast_of
from microfloat.routes import Routes, entries_of, routes_of
from microfloat.torch import backends, context
from microfloat.torch._typing import Maybe
from microfloat.torch.backends import layouts_of
from microfloat.torch.backends.base import NO_PARTS, Parts, Saved, laid
from microfloat.torch.linear.function import find
from microfloat.torch.linear.grouped import GroupedSchedule, Groups, find_grouped
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import Schedule
from microfloat.torch.linear.weight_cache import joint_amax
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.tensor.custom_ops import define
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor
from microfloat.torch.tensor.seeds import draw_seed


class Settings(NamedTuple):
    """All of a compiled call besides its tensors. Operators take it flat behind their tensors (`_SETTINGS`).

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


_SETTINGS = (
    "str stored, str token, str origin, str backend, ScalarType compute, ScalarType x_dtype, "
    "bool wants_dx, bool wants_dw, bool records"
)
_LIVE = {"x": 0, "w": 4, "dy": 0}

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


def _name(error: MicrofloatError, layer: torch.nn.Module) -> None:
    name = getattr(layer, "_with_path", None)
    if name is not None:  # not reverted since
        name(error)


def _named(function: Callable) -> Callable:
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


def makes_again(routes: Routes, recipe: Recipe, gemm: str) -> bool:
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


def _live_amaxes(records: bool, device: torch.device) -> list[torch.Tensor]:
    """The tensor that the delayed casts of a call record into, an output of the operator; none where they do not."""
    return [torch.zeros(8, dtype=torch.float32, device=device)] if records else []


def _cast_inputs(
    scale: Maybe, seed: Maybe, live: list[torch.Tensor], tensor: str, groups: Groups | None = None,
    is_static: bool = False,
) -> CastInputs:  # fmt: skip
    """The inputs of the cast of x, w or dy; a static one is given an amax in place of an encode scale."""
    if is_static:
        return CastInputs(seed=seed, amax=scale, groups=groups)
    history = live[0][_LIVE[tensor] : _LIVE[tensor] + 1] if live else None
    return CastInputs(scale, seed, history, groups=groups)


def _grouped(call: Settings, x: torch.Tensor, weight: torch.Tensor, bias: Maybe) -> GroupedSchedule:
    """The schedule of a call of groups."""
    wants = call.wants_dx, call.wants_dw
    return find_grouped(x, weight, bias, call.recipe, call.backend, *wants, compute=call.compute)


def _forward(
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, ends: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    check_caller(call.token, call.origin)
    if ends is None and x.numel() == 0:  # no schedule: nothing is multiplied
        return [tensor.zero_() for tensor in _fake_forward(x, parts, bias, ends, seed, x_scale, w_scale, *settings)]
    weight, groups = rebuilt(parts, call.stored), None if ends is None else Groups(ends, x.shape[0])
    if groups is None:
        schedule = _schedule(_saving(call, x.device), x.shape, x, weight, bias)
    else:
        schedule = _grouped(call._replace(wants_dx=False, wants_dw=False), x, weight, bias)
    if OBSERVERS:
        schedule = observed(schedule, (), weight)
    live = _live_amaxes(call.records, x.device)
    x_inputs = _cast_inputs(x_scale, seed, live, "x", groups, schedule.is_static)
    w_inputs = _cast_inputs(w_scale, seed, live, "w", groups, schedule.is_joint)
    with schedule.scope():
        # The seed is drawn, so that the launch which casts x and w together and draws one does not serve.
        is_apart = groups is None and schedule.is_stochastic
        kept = schedule.quantize_weight(weight, w_inputs) if is_apart else None
        y, made = schedule.forward(x, weight, bias, x_inputs, w_inputs, kept)
    if groups is not None:
        return [y, *live]
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
        wants_dx=wants_dx and recipe.dgrad.rhs is not None and not makes_again(routes, recipe, "dgrad"),
        wants_dw=call.wants_dw and recipe.wgrad.rhs is not None and not makes_again(routes, recipe, "wgrad"),
    )


def _backward(
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], saved: list[torch.Tensor], ends: Maybe, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, bias_dtype: torch.dtype | None, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    wants_dx, wants_dw = call.wants_dx, call.wants_dw
    weight = rebuilt(parts, call.stored)
    if ends is not None:
        assert x is not None
        groups = Groups(ends, x.shape[0])
        return _grouped_backward(call, dy, x, weight, groups, seed, x_scale, w_scale, dy_scale, bias_dtype)
    if dy.numel() == 0:
        settings = x_scale, w_scale, dy_scale, None, *settings
        return [tensor.zero_() for tensor in _fake_backward(dy, x, parts, saved, ends, seed, *settings)]
    schedule = _schedule(call, (*dy.shape[:-1], weight.shape[1]), x, weight, None)
    if OBSERVERS:
        schedule = observed(schedule, (), weight, True)
    live = _live_amaxes(call.records, dy.device)
    inputs, plain, rest = _cast_inputs(dy_scale, seed, live, "dy"), CastInputs(seed=seed), list(saved)
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


def _grouped_backward(
    call: Settings, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, groups: Groups, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, bias_dtype: torch.dtype | None,
) -> list[torch.Tensor]:  # fmt: skip
    """`_backward` of a call of groups, with the gradient of the bias; x and the weight are cast again."""
    schedule = _grouped(call, x, weight, None)
    if OBSERVERS:
        schedule = observed(schedule, (), weight, True)
    live = _live_amaxes(call.records, dy.device)
    x_inputs = _cast_inputs(x_scale, seed, [], "x", groups, schedule.is_static)
    w_inputs = _cast_inputs(w_scale, seed, [], "w", groups, schedule.is_joint)
    made: list[torch.Tensor] = list(live)
    with schedule.scope():
        if call.wants_dx or call.wants_dw:
            saved = schedule.saved_anew(x, weight, x_inputs, w_inputs)
            inputs = _cast_inputs(dy_scale, seed, live, "dy", groups)
            operands = schedule.cast_dy(dy, inputs, call.wants_dx, call.wants_dw)
            read = schedule.saved_operands(saved, CastInputs())
            gradients = schedule.gradients(operands, read, call.wants_dx, call.wants_dw)
            made += [gradient for gradient in gradients if gradient is not None]
        if bias_dtype is not None:
            made.append(groups.sums(dy).to(bias_dtype))
    return made


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


def _record(slots: dict[str, torch.Tensor], live: torch.Tensor, token: str, layer: int) -> None:
    """Combine the amaxes of a call, in one launch, with the newest amaxes in the histories of these slots."""
    given = context.recipe_of(token).casts
    operands = [(slot, given[one.key]) for slot in slots for one in reversed(OPERANDS_OF[slot])]
    casts = {slot: cast for slot, cast in operands if cast is not None and isinstance(cast.scaling, Delayed)}
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


def _fake_forward(
    x: torch.Tensor, parts: list[torch.Tensor], bias: Maybe, ends: Maybe, seed: Maybe, x_scale: Maybe, w_scale: Maybe,
    *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    call = settings_in(settings)
    weight, recipe = rebuilt(parts, call.stored), call.recipe  # [N, K] or [G, N, K]
    outputs = [x.new_empty((*x.shape[:-1], weight.shape[-2]), dtype=call.compute)]
    outputs += [x.new_empty(8, dtype=torch.float32)] if call.records else []
    if ends is not None:
        return outputs
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
    dy: torch.Tensor, x: Maybe, parts: list[torch.Tensor], saved: list[torch.Tensor], ends: Maybe, seed: Maybe,
    x_scale: Maybe, w_scale: Maybe, dy_scale: Maybe, bias_dtype: torch.dtype | None, *settings: object,
) -> list[torch.Tensor]:  # fmt: skip
    """The gradients without values, behind the amaxes of delayed casts."""
    call = settings_in(settings)
    weight = rebuilt(parts, call.stored)
    made = [dy.new_empty(8, dtype=torch.float32)] if call.records else []
    made += [dy.new_empty((*dy.shape[:-1], weight.shape[-1]), dtype=call.x_dtype)] if call.wants_dx else []
    made += [dy.new_empty(weight.shape, dtype=weight.dtype)] if call.wants_dw else []
    return made + ([] if bias_dtype is None else [dy.new_empty(weight.shape[:-1], dtype=bias_dtype)])


def _no_result(*_: object) -> None:
    """The fake of an operator that changes its arguments alone."""


for _schema, _run, _fake in (
    (
        "linear_forward(Tensor x, Tensor[] weight, Tensor? bias, Tensor? ends, Tensor? seed, Tensor? x_scale, "
        f"Tensor? w_scale, {_SETTINGS}) -> Tensor[]", _named(_forward), _fake_forward,
    ), (
        # x only where wgrad reads it in high precision, or decoded: elsewhere its codes are among `saved`.
        "linear_backward(Tensor dy, Tensor? x, Tensor[] weight, Tensor[] saved, Tensor? ends, Tensor? seed, "
        f"Tensor? x_scale, Tensor? w_scale, Tensor? dy_scale, ScalarType? bias_dtype, {_SETTINGS}) -> Tensor[]",
        _named(_backward), _fake_backward,
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
