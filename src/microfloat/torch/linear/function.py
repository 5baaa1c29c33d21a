"""A Linear under a recipe in eager mode: one autograd Function over a schedule.

    fprop  y_MN  = x_MK @ w_NK.T      contracts K   operands x [M, K],    w [N, K]
    dgrad  dx_MK = dy_MN @ w_NK       contracts N   operands dy [M, N],   w.T [K, N]
    wgrad  dw_NK = dy_MN.T @ x_MK     contracts M   operands dy.T [N, M], x.T [K, M]

`run_linear` looks up the schedule of a call (`linear.schedule`), gathers the inputs of its casts besides tensors
(seeds, encode scales and histories of delayed scaling, words for fold counts) and runs it. Only usages whose
GEMM will run are cast (docs/numerics.md, 6).

Legend: M = rows of x (all leading dimensions), K = in features, N = out features.
"""

import typing
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad

from microfloat.errors import MicrofloatError, NotSupportedError
from microfloat.passes import CastInputs
from microfloat.recipes import Cast, Recipe
from microfloat.routes import Routes, routes_of
from microfloat.torch import backends
from microfloat.torch._typing import Context, Layer, Maybe
from microfloat.torch._upper import upper
from microfloat.torch.backends.base import Operands, aligned, current_device
from microfloat.torch.context import Ambient
from microfloat.torch.linear import weight_cache
from microfloat.torch.linear.fold_counts import FoldCounts, routes_after
from microfloat.torch.linear.gathered_weight import Gathered
from microfloat.torch.linear.observer import OBSERVERS, observed
from microfloat.torch.linear.schedule import NO_INPUTS, SCHEDULES, Inputs, Schedule, autocast_dtype, remember
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.scaling.amax_reduction import Group
from microfloat.torch.tensor.checks import check_linear, is_abstract, with_path
from microfloat.torch.tensor.custom_ops import refusal_of_transforms, refuse_transforms
from microfloat.torch.tensor.dispatch_modes import are_named, multiply_groups, outside_of_modes, quantize_operands
from microfloat.torch.tensor.quantized_tensor import QuantizedTensor

_PLAIN_TYPES = (torch.Tensor, nn.Parameter)
_WEIGHT_TYPES = (nn.Parameter, QuantizedTensor, Gathered)
_COMPUTED: Any = object()  # stands for a bias that is no parameter of the layer itself: parametrized or pruned


def run_linear(
    layer: Layer, x: torch.Tensor, recipe: Recipe, state: Ambient | None, is_first_microbatch: bool | None
) -> torch.Tensor | None:
    """``x @ weight.T + bias`` under `recipe`, differentiable once; None where there are no elements to multiply.

    x [..., K], weight [N, K], bias [N] or None -> y [..., N] in the compute dtype. Sizes need not divide anything.
    Source: docs/numerics.md, section 6.
    """
    parameters = layer._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias", _COMPUTED)
    if weight is None or bias is _COMPUTED:  # a parametrization, or a hook, computes them: read them once
        weight, bias = layer.weight, layer.bias
    if layer.return_bias:
        bias = None
    if (
        type(x) not in _PLAIN_TYPES or type(weight) not in _WEIGHT_TYPES or x.is_meta
        or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):  # fmt: skip
        refuse_transforms("forward", x, weight, bias)
        if _is_sharded(x) or _is_sharded(weight):
            return upper("run_sharded")(layer, x, weight, bias, recipe, state, is_first_microbatch)
        check_linear(x, weight, bias)
        if x.numel() == 0 or weight.numel() == 0:
            return None
        if is_abstract(x):
            name = "auto" if x.is_meta else backend_name(layer, state)
            return upper("abstract_linear")(x, weight, bias, recipe, name, autocast_dtype(x.device.type) or x.dtype)
    schedule = _of_call(layer, x, weight, bias, recipe, state)
    if schedule is None:
        return None
    if schedule.device >= 0 and schedule.device != current_device():
        with torch.cuda.device(schedule.device):
            return run_linear(layer, x, recipe, state, is_first_microbatch)
    if OBSERVERS:
        schedule = observed(schedule, (layer,))
    run = begin(layer, schedule, weight, state, is_first_microbatch)
    if schedule.wants_dx or schedule.wants_dw or (bias is not None and bias.requires_grad and torch.is_grad_enabled()):
        y = apply(run, x, weight, bias)
    else:
        y = run.forward(None, x, weight, bias)
    if run.delayed is not None:
        end(run, layer)
    return y


def find_for(layer: Layer, x: torch.Tensor, recipe: Recipe, state: Ambient | None) -> Schedule | None:
    """The schedule that a call of `layer` with `x` would run; None where there are no elements to multiply."""
    weight, bias = layer.weight, layer.added_bias
    if _is_sharded(x) or _is_sharded(weight):
        return upper("find_sharded")(layer, x, recipe, state)
    check_linear(x, weight, bias)
    if is_abstract(x):
        raise NotSupportedError("x: got a tensor without values, needed one whose memory a schedule can be made for.")
    return _of_call(layer, x, weight, bias, recipe, state)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor, told by its class: its module takes long to import, and a tracer's stand-in for a tensor has
    every attribute."""
    return hasattr(type(tensor), "placements")


def backend_name(layer: Layer, state: Ambient | None) -> str:
    """The backend that a call asks for: the layer's own, else the autocast's."""
    return layer.backend if layer.backend != "auto" or state is None else state.backend


def _of_call(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe,
    state: Ambient | None,
) -> Schedule | None:  # fmt: skip
    """The schedule of an eager call; None where there are no elements to multiply."""
    grad, kind = torch.is_grad_enabled(), "cuda" if x.is_cuda else "cpu"
    compute = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    x_key = (x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15, x.is_neg())
    name = layer.backend if layer.backend != "auto" or state is None else state.backend  # as `backend_name`
    late = bool(layer._load_state_dict_post_hooks) and weight_cache.casts_late(layer, weight)
    needs = grad and x.requires_grad, grad and weight.requires_grad, late
    if (
        recipe._with_copies is not None and not needs[0] and recipe.prefill_rows * x.shape[-1] <= x.numel()  # type: ignore[attr-defined]
        and weight_cache.may_copy(layer, weight, compute.itemsize)
    ):  # fmt: skip
        recipe = recipe._with_copies
    call = x_key, x, weight, bias, recipe, name, compute, needs
    schedule = find(*call)
    if schedule is None or not schedule.folds:
        return schedule
    return after_counts(schedule, counts_of(layer), call)


def after_counts(schedule: Schedule, counts: FoldCounts, call: tuple) -> Schedule | None:
    """The schedule that fold counts of earlier steps ask for; `call`: the arguments of `find` that found this one."""
    if counts.is_quiet:
        return schedule
    routes = routes_after(schedule.recipe, schedule.backend.chip_of(call[2].device), counts)
    return schedule if routes is schedule.asked else find(*call, routes=routes)  # type: ignore[misc]


def find(
    x_key: tuple, x: torch.Tensor | None, weight: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe, name: str,
    compute: torch.dtype, needs: tuple[bool, bool, bool], routes: Routes | None = None,
) -> Schedule | None:  # fmt: skip
    """The schedule of a call, made where there is none yet; None where there are no elements to multiply.

    `x_key`: shape, strides, dtype, device index, alignment and negation bit of x; `x`: an example, or None to have
    one made; `needs`: True for dx, for dw, and for a weight that backward casts again; `routes`: others than the
    recipe's.
    """
    if isinstance(weight, QuantizedTensor):
        codes = weight.codes
        of_weight = weight.cast, weight._shape, codes.stride(), weight._dtype, codes.get_device()
    else:
        of_weight = weight.data_ptr() & 15, weight.shape, weight.stride(), weight.dtype, weight.get_device()
    key = (
        recipe._key, name, compute, needs, x_key, routes, of_weight,
        None if bias is None else (bias.shape, bias.dtype, bias.get_device(), bias.data_ptr() & 15),
    )  # fmt: skip
    schedule = SCHEDULES.get(key)
    if schedule is not None:
        return schedule
    if x is None:
        x = torch.empty_strided(x_key[0], x_key[1], dtype=x_key[2], device=weight.device)
    check_linear(x, weight, bias)
    if x.numel() == 0 or weight.numel() == 0:
        return None
    backend = backends.choose(name, x.device)
    if routes is None:
        routes = routes_of(recipe, backend.chip_of(x.device))
    options = compute, *needs[:2], 0, needs[2]
    return remember(key, Schedule(recipe, backend, routes, x.detach(), weight.detach(), bias, *options))


def counts_of(layer: Layer) -> FoldCounts:
    """The number of elements that folding has changed in this layer so far."""
    counts = layer.__dict__.get("_fold_counts")
    if counts is None:
        counts = layer.__dict__["_fold_counts"] = FoldCounts()
    return counts


@dataclass(slots=True, eq=False)
class Run:
    """One forward of a schedule and its backward: no ambient state is consulted after it was made.

    `x`, `w`, `dy`: the inputs of the three casts, `later` of the cast of the weight in backward; `kept`: the weight's
    operands from an earlier call; `delayed`: the state of delayed scaling; `into`: what dw is added to; `path`: the
    name of the layer in its model.
    """

    schedule: Schedule
    x: CastInputs
    w: CastInputs
    dy: CastInputs
    later: CastInputs = NO_INPUTS[1]
    kept: Operands | None = None
    delayed: "_Delayed | None" = None
    into: weight_cache.MainGrad | None = None
    path: str = ""
    bias_dtype: torch.dtype | None = None

    def forward(
        self, ctx: Context | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y; autograd keeps the operands of backward. `ctx` None: there will be no backward."""
        schedule = self.schedule
        if are_named():
            y, saved = self.forward_by_name(x, weight, bias)
        elif schedule.shields:
            with schedule.scope():
                y, saved = schedule.forward(x, weight, bias, self.x, self.w, self.kept)
        else:
            y, saved = schedule.forward(x, weight, bias, self.x, self.w, self.kept)
        self.kept = None
        if ctx is not None:
            ctx.save_for_backward(*saved)
            self.bias_dtype = None if bias is None else bias.dtype
        return y

    def forward_by_name(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor | None]]:
        """`Schedule.forward` by operators that have names, for modes of torch's dispatcher."""
        schedule = self.schedule
        with schedule.scope():
            if schedule.number and is_abstract(x):
                return schedule.forward(x, weight, bias, self.x, self.w, self.kept)
            parts = (
                weight.part_list() if isinstance(weight, QuantizedTensor)
                else weight.contents.tensors() if isinstance(weight, Gathered) else [weight]
            )  # fmt: skip
            if schedule.number:

                def forward() -> Sequence[torch.Tensor | None]:
                    y, saved = schedule.forward(x, weight, bias, self.x, self.w, self.kept)
                    return y, *saved

                y, *saved = multiply_groups(forward, x, parts, bias, schedule.flops)
                return y, saved
            x_made, w_made = quantize_operands(
                lambda: schedule.cast_operands(x, weight, self.x, self.w, self.kept), x, parts
            )  # fmt: skip
            schedule.fill_in(x_made, schedule.x_cast.entries, x)
            if self.kept is None:
                schedule.fill_in(w_made, schedule.w_cast.entries, weight)
            else:
                w_made = self.kept
            y = schedule.fprop(x_made.row, w_made.row, bias)
        w_saved = weight_cache.weights_of(weight) if schedule.late else w_made.one(schedule.reads_w_row)
        saved = (*x_made.one(schedule.reads_x_row), *w_saved)
        return y if schedule.y_shape is None else y.view(schedule.y_shape), saved

    def backward(self, ctx: Context, dy: torch.Tensor) -> tuple[Maybe, ...]:
        """The gradients of x, weight and bias."""
        _, wants_dx, wants_dw, wants_db = ctx.wanted if ctx.run is self else ctx.needs_input_grad
        schedule, dx, dw = self.schedule, None, None
        if wants_dx or wants_dw:
            try:
                inputs = self.dy if self.delayed is None else self.dy_inputs(wants_dx, wants_dw)
                if schedule.shields or (schedule.device >= 0 and schedule.device != current_device()):
                    with schedule.scope():
                        made = schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
                        saved = schedule.saved_operands(ctx.saved_tensors, self.later)
                        dx, dw = schedule.gradients(made, saved, wants_dx, wants_dw, self.into)
                else:
                    made = schedule.cast_dy(dy, inputs, wants_dx, wants_dw)
                    saved = schedule.saved_operands(ctx.saved_tensors, self.later)
                    dx, dw = schedule.gradients(made, saved, wants_dx, wants_dw, self.into)
            except RuntimeError:
                refuse_batched(dy)  # whose address cannot be read
                raise
        elif self.delayed is not None and self.delayed.late:
            scaling.record_late(self.delayed.kept_layer(), self.delayed.late)
        if not wants_db:
            return dx, dw, None
        return dx, dw, bias_gradient(getattr(dy, "shard", dy), self.bias_dtype, self.dy.groups)

    def dy_inputs(self, wants_dx: bool, wants_dw: bool) -> CastInputs:
        """The inputs of dy's cast. Its encode scale is read when backward runs: forward could not know it."""
        delayed = self.delayed
        if delayed is None:
            return self.dy
        recipe = self.schedule.recipe
        casts = (recipe.dgrad.lhs if wants_dx else None, recipe.wgrad.lhs if wants_dw else None)
        cast = next((cast for cast in casts if cast is not None and cast.is_delayed), None)
        if cast is None:
            if delayed.late:
                scaling.record_late(delayed.kept_layer(), delayed.late)
            return self.dy
        layer, region, group = delayed.kept_layer(), delayed.region, delayed.group
        if delayed.late is not None:
            region, group = scaling.record_late(layer, delayed.late)
        history = None
        if delayed.records:
            scaling.note_recorded(layer, {"dy": cast}, group=group, region=region)
            history = layer._buffers["scaling_dy_amax_history"]
        return CastInputs(aligned(layer._buffers["scaling_dy_scale"]), self.dy.seed, history, *self.dy[3:])


class Scheduled(torch.autograd.Function):
    """The one Function of the library: `run.forward` and `run.backward`, of a `Run` or of a fused one."""

    @staticmethod
    def forward(ctx: Context, run: Run, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        ctx.run = run
        return run.forward(ctx, *tensors)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor) -> tuple[Maybe, ...]:
        # A pipeline asks for the gradients of inputs first and for those of weights later, and a `main_grad` is added
        # to once: `wanted` is `needs_input_grad`, of the gradients that this backward asks for.
        wanted, place = list(ctx.needs_input_grad), -1
        for node, _ in ctx.next_functions:
            if node is not None:  # of an input that needs a gradient
                place = wanted.index(True, place + 1)
                try:  # noqa: SIM105
                    wanted[place] = torch._C._will_engine_execute_node(node)
                except RuntimeError:  # torch has no answer for a leaf that autograd.grad asks for
                    pass
        ctx.wanted = wanted
        try:
            refuse_double_backward()
            return None, *ctx.run.backward(ctx, *gradients)
        except MicrofloatError as error:
            with_path(error, ctx.run.path)
            raise


# What torch's own `Function.apply` ends in, without its preparations for functorch, which is refused before.
apply: Callable = super(torch.autograd.Function, Scheduled).apply  # pyright: ignore[reportAttributeAccessIssue]


def begin(
    layer: Any, schedule: Schedule, weight: torch.Tensor, state: Ambient | None,
    is_first_microbatch: bool | None, apart: bool = False, inputs: Inputs = NO_INPUTS,
) -> Run:  # fmt: skip
    """The run of one call, with the inputs of its casts besides tensors. `apart`: x is not cast together with w."""
    if schedule.folds:
        counts = counts_of(layer)
        counts.note(schedule.noted)
        *counted, w_later = counts.inputs(schedule.device)
        inputs = counted[0], counted[1], counted[2]
    else:
        w_later = NO_INPUTS[1]
    if schedule.is_stochastic:
        inputs = schedule.seeded(inputs, apart or is_first_microbatch is not None or are_named() > 0)
    run = Run(schedule, *inputs)
    if schedule.is_joint:
        amax = aligned(weight_cache.amax_beside(layer, weight))
        run.w, w_later = run.w._replace(amax=amax), w_later._replace(amax=amax)
    if schedule.late:  # words of the seed are dy's: a launch that casts x and w together is given bits for w
        run.later = w_later._replace(seed=run.dy.seed)
    if layer is None:  # of a function, which keeps nothing between calls
        return run
    run.path = layer._path
    if schedule.is_static:
        run.x = run.x._replace(amax=aligned(layer_state.static_amax(layer)))
    if schedule.wants_dw and layer.fuse_wgrad_accumulation:
        run.into = weight_cache.MainGrad(layer, weight, is_first_microbatch is True)
    if schedule.is_delayed and are_named():
        with outside_of_modes():  # which expect the same operators of a recomputation, and it records elsewhere
            _begin_delayed(run, layer, weight, state, is_first_microbatch)
    elif schedule.is_delayed:
        _begin_delayed(run, layer, weight, state, is_first_microbatch)
    elif is_first_microbatch is not None or (schedule.keeps_weight and not weight_cache.fsdp_parameters(layer)):
        _keep_weight(run, layer, weight, is_first_microbatch is True, None)
    return run


def _keep_weight(run: Run, layer: object, weight: torch.Tensor, is_first_microbatch: bool, version: int | None) -> bool:
    """Take the weight's operands that the layer keeps, if nothing they depend on has changed; True if they are new."""
    weights = weight_cache.weights_of(weight)
    if run.schedule.is_joint:
        weights = *weights, *(one.weight for one in getattr(layer, "_joint", ()))
    # A weight that a parametrization or a hook computes is made anew, perhaps where the last one lay.
    schedule = run.schedule
    if not all(isinstance(one, nn.Parameter) for one in weights) or (
        isinstance(weight, QuantizedTensor | Gathered) and not schedule.keeps_weight
    ):
        return True
    kept = layer.__dict__.setdefault("_weight_cache", weight_cache.KeptWeight())
    if is_first_microbatch:
        kept.clear()
    key = (*schedule.weight_key, version, weight.dtype)
    operands = kept.find(weights, key)
    reads_column = schedule.wants_dx and not schedule.late
    if operands is not None and not (reads_column and operands.one(schedule.reads_w_row).codes is None):
        run.kept = operands
        return False
    with torch.no_grad(), schedule.scope():
        run.kept = schedule.quantize_weight(weight, run.w)
    # What a CUDA graph makes has no values before its first replay.
    if not (schedule.keeps_weight and schedule.device >= 0 and torch.cuda.is_current_stream_capturing()):
        kept.keep(weights, key, run.kept)
    return True


class _Delayed(NamedTuple):
    """The delayed scaling of one forward, as its backward needs it."""

    layer: "weakref.ref[nn.Module]"
    group: Group
    region: scaling.Region
    records: bool
    late: scaling.Late | None  # amaxes of a forward inside a backward, recorded if its own backward runs
    recorded: tuple[Cast | None, Cast | None]  # the casts of x and w that this forward has recorded for
    is_alone: bool  # no autocast will update the state

    def kept_layer(self) -> nn.Module:
        """The layer that holds the state."""
        layer = self.layer()
        if layer is None:
            raise NotSupportedError(
                "backward: the layer that holds the delayed-scaling state was deleted before its backward ran. "
                "Keep the model alive until backward is done."
            )
        layer_state.check_kept(layer)
        return layer


def _begin_delayed(
    run: Run, layer: nn.Module, weight: torch.Tensor, state: Ambient | None, is_first_microbatch: bool | None
) -> None:
    """Give the casts of x and w their encode scales and histories, and note the amaxes that they will record."""
    x_cast, w_cast = run.schedule.delayed
    delayed = run.schedule.delayed_scaling
    buffers: Any = layer._buffers
    history = buffers.get("scaling_x_amax_history")
    if history is None or history.is_meta or history.shape[0] != delayed.amax_history_len:
        layer_state.ensure_buffers(layer, delayed)
    group, region = (None, None) if state is None else (state.group, state.region)
    if region is not None and region.closed:  # the context was copied inside an autocast that has been left
        region = None
    recomputed = scaling.recomputation(layer, None if state is None else state.replay)
    late: scaling.Late | None = None
    x_history: torch.Tensor | None = None
    w_history: torch.Tensor | None = None
    if recomputed is not None:
        scales, late = recomputed
        records = late is not None
        if records:
            x_history, w_history = (scales["x"].new_zeros(1, dtype=torch.float32) for _ in range(2))
    else:
        records = torch.is_grad_enabled()
        if region is not None or scaling.LATE:
            scaling.begin_forward(layer, region, group)
        scales = {"x": buffers["scaling_x_scale"], "w": buffers["scaling_w_scale"]}
        if records:
            x_history, w_history = buffers["scaling_x_amax_history"], buffers["scaling_w_amax_history"]
    x_scale, w_scale = aligned(scales["x"]), scales["w"]
    is_live = True
    if isinstance(weight, Gathered):
        gather = weight.contents
        if recomputed is None:  # a weight that was not resharded since has codes by an earlier scale
            gather.is_current = gather.made_of == (w_scale.data_ptr(), w_scale._version)
        if gather.is_current and gather.scale_enc is not None and (state is None or state.replay is None):
            w_scale = gather.scale_enc
        is_live = w_scale is not gather.scale_enc
    w_scale = aligned(w_scale)
    if state is not None and state.record_tape is not None:
        # Clones: the live buffers change when the region closes, the recomputation takes those of now.
        state.record_tape.record({"x": x_scale.clone(), "w": w_scale.clone() if is_live else w_scale})
    if x_cast is not None:
        run.x = CastInputs(x_scale, run.x.seed, x_history, *run.x[3:])
    if w_cast is not None:
        run.w = CastInputs(w_scale, run.w.seed, w_history, *run.w[3:])
    if run.schedule.late:  # the live buffer may change before backward
        run.later = run.later._replace(scale_enc=w_scale.clone() if is_live else w_scale)
    if is_first_microbatch is not None and not _keep_weight(run, layer, weight, is_first_microbatch, w_scale._version):
        w_cast = None  # codes of an earlier call were recorded then
    if late is not None:
        if x_cast is not None and x_history is not None:
            late["x"] = x_cast, x_history
        if w_cast is not None and w_history is not None:
            late["w"] = w_cast, w_history
    elif records and region is not None:
        scaling.note_recorded(layer, {"x": x_cast, "w": w_cast}, group=group, region=region)
    closed = scaling.CLOSED_REGION if region is None else region
    is_alone = region is None and recomputed is None
    run.delayed = _Delayed(weakref.ref(layer), group, closed, records, late, (x_cast, w_cast), is_alone)


def end(run: Run, layer: object) -> None:
    """Update the scaling state after a forward outside any autocast, as the exit of a region does."""
    if run.delayed is not None and run.delayed.is_alone:
        scaling.roll_alone(typing.cast(nn.Module, layer), *run.delayed.recorded, records=run.delayed.records)


def bias_gradient(dy: torch.Tensor, dtype: torch.dtype | None, groups: Any = None) -> torch.Tensor:
    """``db = sum over rows of dy``, or of each of `groups` of rows: in float32 from unquantized dy, rounded once."""
    if groups is not None:
        return groups.sums(dy).to(dtype)
    return dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(dtype)


def refuse_double_backward() -> None:
    """Raise NotSupportedError where backward is itself being differentiated; a compiler refuses it by itself."""
    grad, transforms = torch.is_grad_enabled(), torch._C._are_functorch_transforms_active()
    if not (grad or transforms) or torch.compiler.is_compiling():
        return
    if grad:
        raise NotSupportedError(
            "backward: got create_graph=True (a double backward) through a quantized Linear, needed a single backward. "
            "Quantization has no second derivative; run this layer under autocast(enabled=False)."
        )
    raise refusal_of_transforms("backward")


def refuse_batched(tensor: torch.Tensor) -> None:
    """Raise NotSupportedError for a gradient of ``is_grads_batched=True``, which takes several at once."""
    if torch._C._functorch.is_legacy_batchedtensor(tensor):  # pyright: ignore[reportAttributeAccessIssue]
        raise refusal_of_transforms("backward")
