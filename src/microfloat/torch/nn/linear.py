"""`Linear`: nn.Linear whose three GEMMs run under a recipe, and `RecipeLayer`, the base of all such layers."""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.types import Device

from microfloat.arguments import check_bool
from microfloat.errors import CheckpointError, MicrofloatError, NotSupportedError, invalid_type
from microfloat.recipes import Recipe
from microfloat.recipes.core import delayed_of
from microfloat.recipes.names import as_recipe
from microfloat.torch import backends, context
from microfloat.torch._typing import InitMethod, StateDict, WithBias
from microfloat.torch._upper import upper
from microfloat.torch.compile.linear import MARKER, compiled_linear
from microfloat.torch.context import HIGH_PRECISION, Ambient, ambient, canonical, token_of
from microfloat.torch.linear.function import find_for, run_linear
from microfloat.torch.linear.gathered_weight import values_of, without_values
from microfloat.torch.linear.observer import OBSERVERS
from microfloat.torch.linear.schedule import Schedule, autocast_dtype
from microfloat.torch.linear.weight_cache import fsdp_parameters, without_rows
from microfloat.torch.nn.options import check_scaling_entry, drop_extra_state, names_moved, warn_once_per_load
from microfloat.torch.nn.quantized_init import draw_parameters, quantize_parameter
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.tensor.checks import check_linear, is_abstract, with_path
from microfloat.torch.tensor.quantized_tensor import Decoded, QuantizedTensor, attached_to


class _Unpinned:
    """The value of `pinned` for a layer that follows the ambient autocast; None is pinned to high precision."""

    def __repr__(self) -> str:
        return "UNPINNED"

    def __reduce__(self) -> str:  # so that copies and pickles are the same object
        return "UNPINNED"


UNPINNED = _Unpinned()
_dynamo_callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # pyright: ignore[reportAttributeAccessIssue]
# Attributes of a Linear that nn.Linear does not have.
OWN_ATTRIBUTES = ("_pinned", "_pin_token", "_path", "backend", "_weight_cache", "_fold_counts", "_number",
                  "_followed", "fuse_wgrad_accumulation", "_fsdp_state", "_untied_from", "init_method",
                  "_joint", "_joint_amax")  # fmt: skip


class RecipeLayer(nn.Module):
    """Base of a layer whose GEMMs run under a recipe: the choice of the recipe, scaling state, copies and state dicts.

    It comes before the plain layer among the bases of a class.
    """

    backend: str = "auto"
    _pinned: Any = UNPINNED  # a Recipe, None, or UNPINNED
    _pin_token: str | None = None
    _path: str = ""  # the layer's name in the model that was converted, for messages
    fuse_wgrad_accumulation: bool = False  # True: dw is added to `weight.main_grad` (docs/training.md)
    return_bias: bool = False  # True: a call returns (y, bias), and its product adds no bias
    init_method: InitMethod | None = None  # draws the weight in place
    _number: int = -1  # of the layer in `microfloat.torch.scaling.buffers`
    _followed: bool = False  # True: the latest forward outside a backward ran the recipe of an autocast
    _joint: "tuple[RecipeLayer, ...]" = ()  # those whose weights share one scale, itself among them
    weight: torch.Tensor
    bias: torch.Tensor | None
    _check_input: Callable[[torch.Tensor], None]

    @property
    def pinned(self) -> Any:
        """The recipe that `pin` fixed (None = high precision), or UNPINNED."""
        return self._pinned

    @pinned.setter
    def pinned(self, recipe: Recipe | str | _Unpinned | None) -> None:
        self.unpin() if isinstance(recipe, _Unpinned) else self.pin(recipe)

    def pin(self, recipe: Recipe | str | None) -> Self:
        """Fix the recipe of this layer (None = high precision), which wins over the autocast's. Returns the layer.

        Delayed-scaling state is made or dropped as the recipe asks. Raises InvalidTypeError and InvalidValueError for
        anything but a Recipe, the name of one, or None.
        """
        self._pinned = None if recipe is None else canonical(as_recipe(recipe))
        self._pin_token = token_of(self._pinned)
        self._drop_weight_cache()
        if not (self._pinned is not None and self._pinned.is_joint):
            self._leave_group()
        layer_state.state_of(self)  # gives it a number
        if self._pinned is not None and self._pinned.is_delayed:
            layer_state.ensure_buffers(self, delayed_of(self._pinned))
        else:
            scaling.drop_buffers(self)
        return self

    def unpin(self) -> Self:
        """Follow the ambient autocast again; delayed-scaling state is dropped. Returns the layer."""
        self._pinned, self._pin_token = UNPINNED, None
        self._drop_weight_cache()
        self._leave_group()
        scaling.drop_buffers(self)
        return self

    def effective_recipe(self) -> Recipe | None:
        """The recipe that a call here and now would run; None = high precision."""
        return self._resolve(ambient())

    def _resolve(self, state: Ambient | None) -> Recipe | None:
        if state is not None and not state.enabled:
            return None
        if self._pinned is not UNPINNED:
            return self._pinned
        return state.recipe if state is not None else None

    def _set_options(self, fuse_wgrad_accumulation: bool, return_bias: bool, init_method: InitMethod | None) -> None:
        """Set the options that are not the default of the class, before torch's constructor draws the weight."""
        check_bool("fuse_wgrad_accumulation", fuse_wgrad_accumulation)
        check_bool("return_bias", return_bias)
        if init_method is not None and not callable(init_method):
            needed = "a function that writes into a weight, such as torch.nn.init.xavier_uniform_"
            raise invalid_type("init_method", type(init_method), needed)
        options = ("fuse_wgrad_accumulation", fuse_wgrad_accumulation), ("return_bias", return_bias)
        self.__dict__.update({name: value for name, value in (*options, ("init_method", init_method)) if value})

    @property
    def added_bias(self) -> torch.Tensor | None:
        """The bias that the product of a call adds: none with `return_bias`."""
        return None if self.return_bias else self.bias

    def _with_bias(self, y: torch.Tensor) -> WithBias:
        """The result of a call: y, or with `return_bias` (y, bias)."""
        return (y, self._returned_bias(y)) if self.return_bias else y

    def _returned_bias(self, y: torch.Tensor) -> torch.Tensor | None:
        """The bias in the dtype of y that a call with `return_bias` returns beside y, else None."""
        bias = self.bias if self.return_bias else None
        if bias is None:
            return None
        if hasattr(bias, "placements"):
            bias = upper("beside")(self, bias, y.dim())
        if bias.dtype != y.dtype:
            return bias.to(y.dtype)
        # FSDP2 frees the memory of a parameter when the forward of its module ends, which may be this one.
        return bias.clone() if fsdp_parameters(self) else bias

    def _with_path(self, error: MicrofloatError) -> MicrofloatError:
        return with_path(error, self._path)

    def _note_plain(self, state: Ambient | None) -> None:
        """Refuse a forward in high precision that recomputes a forward under an autocast's recipe."""
        if not self.__dict__.get("_followed"):
            return
        if torch._C._current_graph_task_id() == -1:
            self._followed = False
        elif state is None and self._pinned is UNPINNED and torch.is_grad_enabled():
            raise NotSupportedError(
                "torch.utils.checkpoint: got a recomputation outside the microfloat.torch.autocast whose recipe this "
                "layer ran in the first pass, needed that recipe. Use microfloat.torch.checkpoint in its place, or pin "
                "the recipe with microfloat.torch.convert."
            )

    def _slow_forward(self, *arguments: object, **options: object) -> object:
        """The forward that nn.Module calls while torch.jit traces."""
        if self.effective_recipe() is not None:
            raise NotSupportedError(
                "torch.jit.trace: got a Linear under a recipe, which TorchScript cannot hold. Use torch.compile or "
                "torch.export, or trace under autocast(enabled=False)."
            )
        return super()._slow_forward(*arguments, **options)

    def __prepare_scriptable__(self) -> NoReturn:
        raise NotSupportedError(
            "torch.jit.script: got a microfloat Linear, which TorchScript cannot hold. Use torch.compile or "
            "torch.export, or microfloat.torch.revert the model first."
        )

    def _calibrate(self, x: torch.Tensor, state: Ambient) -> None:
        recipe = self._pinned if isinstance(self._pinned, Recipe) else state.recipe
        if recipe is None or not (recipe.is_delayed or recipe.is_static):
            return
        self._check_input(x)
        if x.numel() == 0 or is_abstract(x):
            return
        if recipe.is_static:
            before = getattr(self, "input_amax", None)
            self.register_buffer("input_amax", layer_state.larger_amax(x, before))
            return
        layer_state.ensure_buffers(self, delayed_of(recipe))
        scaling.calibrate(self, recipe, x.detach(), self.weight.detach(), state.group)

    def folded_elements(self) -> dict[str, float]:
        """Share of elements that folding changed in the latest step, per operand ("fprop.lhs"); empty if none folded.

        Elements count as they are stored, with the padding of a Hadamard transform. Layers of groups of rows
        (`GroupedLinear`) do not count, and give {}. Waits for the GPU. Source: docs/numerics.md, section 9.
        """
        counts = self.__dict__.get("_fold_counts")
        return {} if counts is None else counts.shares()

    def _tell_ranks(self) -> None:
        """Before values are written, tell shards of codes that FSDP2 has made which ranks hold the other shards."""
        if any(isinstance(getattr(one, "_local_tensor", None), QuantizedTensor) for one in self._parameters.values()):
            upper("tell_ranks")(self)

    def _drop_weight_cache(self) -> None:
        self.__dict__.pop("_weight_cache", None)
        _ = [one.__dict__.pop("_joint_amax", None) for one in self._joint]

    def _leave_group(self) -> None:
        """Share the scale of no weight any more; the others of the group share theirs without this one."""
        left = self.__dict__.pop("_joint", ())
        rest = tuple(one for one in left if one is not self)
        for one in rest:
            if one._joint is left:  # else it has joined another group since
                one._drop_weight_cache()
                one._joint = rest

    def __getstate__(self) -> dict[str, object]:
        if layer_state.has_buffers(self):
            scaling.flush_to_read(self)  # the copy does not know what is pending
        state = dict(super().__getstate__())
        for name in ("_weight_cache", "_joint_amax", "_fold_counts", "_pin_token", "_path", "_followed"):
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        if isinstance(self._pinned, Recipe):
            self._pinned = canonical(self._pinned)
        if self._pinned is not UNPINNED:
            self._pin_token = token_of(self._pinned)
        layer_state.state_of(self)  # gives it a number

    def _apply(self, fn: Callable, recurse: bool = True) -> Self:
        """Move the scaling state with the parameters, but keep it float32: .half() must not round a scale.

        Attributes of quantized parameters stay, as those of plain parameters do, though torch makes new objects.
        """
        self._drop_weight_cache()
        attached = {name: attached_to(q) for name, q in self._parameters.items() if isinstance(q, QuantizedTensor)}
        names = [name for name, value in self._buffers.items() if value is not None
                 and name.startswith(("scaling_", "input_amax"))]  # fmt: skip
        kept: dict[str, Any] = {name: self._buffers.pop(name) for name in names}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = fn(buffer)
            self._buffers[name] = moved if moved.dtype == torch.float32 else buffer.to(moved.device)
        for name, attributes in attached.items():
            for attribute, value in attributes.items():
                setattr(self._parameters[name], attribute, value)
        return self

    def _save_to_state_dict(self, destination: StateDict, prefix: str, keep_vars: bool) -> None:
        layer_state.unwrap_buffers(self)
        scaling.flush_to_read(self)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *arguments: list[str]) -> None:  # type: ignore[override]
        layer_state.unwrap_buffers(self)
        self._tell_ranks()
        adapt_scaling_keys(self, state_dict, prefix, arguments[-1])
        if self._buffers.get("input_amax", self) is None and prefix + "input_amax" in state_dict:
            self._buffers["input_amax"] = torch.empty((), dtype=torch.float32, device=self.weight.device)
        self._drop_weight_cache()  # first: torch swaps no parameter to which something refers weakly
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        pinned = "" if self._pinned is UNPINNED else f", recipe={self._pinned!r}"
        options = [name for name in ("fuse_wgrad_accumulation", "return_bias") if getattr(self, name)]
        kept = self.__dict__.get("_weight_cache")
        told = f", {kept.answer}" if kept is not None and kept.answer else ""
        return super().extra_repr() + pinned + "".join(f", {name}=True" for name in options) + told


class Linear(RecipeLayer, nn.Linear):  # pyright: ignore[reportIncompatibleMethodOverride]
    """``y = x @ weight.T + bias`` with fprop, dgrad and wgrad under a recipe; elsewhere exactly nn.Linear.

    Same constructor, parameters and initialisation as nn.Linear. The recipe is the pinned one (`pin`, `convert`), else
    that of the ambient `microfloat.torch.autocast`, else plain high precision. x [..., K] of float32, bfloat16 or
    float16, any sizes; y [..., N] in the compute dtype: x's, or torch.autocast's where that is enabled.

    `return_bias`: a call returns (``x @ weight.T``, bias in y's dtype or None), and the caller adds the bias.
    `init_method`: ``init_method(weight)`` draws the weight in place, here and in `reset_parameters`; biases are then 0.

    Under a recipe, raises InvalidTypeError for other dtypes, sparse and nested tensors, InvalidValueError for shapes
    and devices that do not fit, NotSupportedError inside torch.func's transforms and forward-mode AD, and for
    torch.jit. With DTensors: docs/distributed.md. Source: docs/numerics.md, section 6.
    """

    @names_moved
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, device: Device = None,
        dtype: torch.dtype | None = None, *, recipe: Recipe | str | None = None, backend: str = "auto",
        fuse_wgrad_accumulation: bool = False, return_bias: bool = False,
        init_method: InitMethod | None = None,
    ) -> None:  # fmt: skip
        self._set_options(fuse_wgrad_accumulation, return_bias, init_method)
        super().__init__(in_features, out_features, bias, device, dtype)
        layer_state.state_of(self)  # gives it a number
        self.backend = backends.check_name(backend)
        quantize_parameter(self)
        if recipe is not None:
            self.pin(recipe)

    def reset_parameters(self) -> None:
        """Draw fresh parameters, as nn.Linear or `init_method` does, and start delayed scaling afresh."""
        self._tell_ranks()
        if self.init_method is None:
            super().reset_parameters()
        else:
            draw_parameters(self, self.init_method)
        scaling.reset_scaling(self)

    def forward(self, input: torch.Tensor, is_first_microbatch: bool | None = None) -> WithBias:
        """y, or with `return_bias` (y, bias). `is_first_microbatch` True: quantize the weight and keep its codes;
        False: use the kept codes if the weight is unchanged; None: keep nothing.

        A step of any torch.optim optimizer counts as a change, and so does every write that torch counts. Pass True
        after writes that cannot be seen: through ``weight.data`` (of a weight that is not stored quantized), by
        collectives, by kernels of your own and by replays of CUDA graphs.
        """
        x = input
        if torch.compiler.is_compiling():
            if not self.return_bias:  # the last call: a break of the graph in it leaves nothing to resume
                return compiled_linear(self, x)
            y = compiled_linear(self, x)
            return y if isinstance(y, tuple) else self._with_bias(y)  # a tuple: of this method in eager mode
        if _dynamo_callback() is not None:
            # Dynamo has met an error in this frame and does not compile it, but it would compile the functions that the
            # frame calls: casts, whose divisions a compiler must not touch.
            untraced: Any = torch._dynamo.disable(Linear.forward)
            return untraced(self, input, is_first_microbatch)
        state = ambient()
        recipe = self._resolve(state)
        try:
            if recipe is None:
                self._note_plain(state)
                if state is not None and state.calibrating:
                    self._calibrate(x, state)
                y = self._plain(x, is_first_microbatch)
                for observer in OBSERVERS:
                    observer.see_plain(self, x, y)
            else:
                if is_first_microbatch is not None:
                    check_first_microbatch(is_first_microbatch)
                if self._pinned is UNPINNED:
                    self.__dict__["_followed"] = True
                y = run_linear(self, x, recipe, state, is_first_microbatch)
                if y is None:
                    y = self._plain(x, is_first_microbatch, recipe)
            return (y, self._returned_bias(y)) if self.return_bias else y
        except Exception as error:
            named = self._named(error, x, recipe)
            if named is error:
                raise
            raise named from error

    def _named(self, error: Exception, x: torch.Tensor, recipe: Recipe | None) -> Exception:
        """The error to raise for `error` of a call: ours, with the layer's name, if an operand is the cause."""
        if not isinstance(error, MicrofloatError):
            sharded = any(hasattr(one, "placements") for one in (x, self._parameters.get("weight")))
            if recipe is None or sharded:  # DTensors are checked by the call itself
                return error
            try:
                self._check_input(x)
                return error
            except MicrofloatError as cause:
                return cause
        return self._with_path(error)

    def _plain(
        self, x: torch.Tensor, is_first_microbatch: bool | None = None, recipe: Recipe | None = None
    ) -> torch.Tensor:
        """y in high precision; `recipe`: the recipe of a call that has nothing to multiply, because x has no rows."""
        if not isinstance(x, torch.Tensor):
            raise invalid_type("x", type(x), "a torch.Tensor")
        bias = self.added_bias
        if recipe is None:
            weight = values_of(self.weight)
        else:
            options = recipe, autocast_dtype(x.device.type) or x.dtype, x.requires_grad
            weight = values_of(self.weight, lambda gathered: without_values(gathered, *options))
        if isinstance(weight, QuantizedTensor) or self.fuse_wgrad_accumulation:
            y = run_linear(self, x, HIGH_PRECISION, None, is_first_microbatch)
            if y is not None:
                return y
            if self.fuse_wgrad_accumulation and not hasattr(weight, "placements"):
                weight = without_rows(self, weight, is_first_microbatch is True)
        if isinstance(weight, QuantizedTensor):
            weight, bias = Decoded.apply(weight, x.dtype), None if bias is None else bias.to(x.dtype)
        if (
            isinstance(weight, torch.Tensor) and x.dtype != weight.dtype and x.is_floating_point()
            and autocast_dtype(x.device.type) is None
        ):  # fmt: skip
            weight, bias = weight.to(x.dtype), bias.to(x.dtype) if bias is not None else None
        return F.linear(x, weight, bias)

    def _check_input(self, x: torch.Tensor) -> None:
        self._check(check_linear, x, self.weight, self.bias)

    def _check(self, check: Callable[..., object], *tensors: torch.Tensor | None) -> None:
        try:
            check(*tensors)
        except MicrofloatError as error:
            raise self._with_path(error) from None

    def schedule(self, x: torch.Tensor) -> Schedule | None:
        """The schedule of a call with `x` here and now: casts, products and saved operands; ``print`` shows it.

        None where x has no elements. Nothing runs, and no state changes. Raises the errors of the call for x.
        """
        with torch.enable_grad():
            recipe = self.effective_recipe()
            return find_for(self, x, HIGH_PRECISION if recipe is None else recipe, ambient())


def check_first_microbatch(value: object) -> None:
    """Raise InvalidTypeError for anything but True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise invalid_type("is_first_microbatch", type(value), "True, False or None")


class _Call:
    """One call of `linear`, with the attributes of a layer that the code of a call reads, and without state."""

    _followed, _path, _number, fuse_wgrad_accumulation = False, "", -1, False
    return_bias, added_bias = False, RecipeLayer.added_bias
    _load_state_dict_post_hooks: ClassVar[dict] = {}  # stays empty

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, pinned: Recipe | _Unpinned | None, token: str | None,
        backend: str,
    ) -> None:  # fmt: skip
        self.weight, self.bias, self.backend = weight, bias, backend
        self._parameters = {"weight": weight, "bias": bias}
        self._pinned, self._pin_token = pinned, token

    forward, _resolve, _plain = Linear.forward, Linear._resolve, Linear._plain
    _check, _check_input, _note_plain = Linear._check, Linear._check_input, Linear._note_plain
    _named, _with_path = Linear._named, RecipeLayer._with_path


class JointCall(_Call):
    """A call of several layers at once, with the settings and the scaling state of the first."""

    def __init__(self, layer: Linear, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias, layer._pinned, layer._pin_token, layer.backend)
        self._buffers, self._number, self._joint = layer._buffers, layer._number, layer._joint
        if layer_state.has_buffers(layer):
            for name in layer_state.BUFFER_NAMES:
                setattr(self, name, getattr(layer, name))


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, recipe: Recipe | str | None = None,
    backend: str = "auto",
) -> torch.Tensor:  # fmt: skip
    """``y = x @ weight.T + bias`` with fprop, dgrad and wgrad under a recipe, differentiable once.

    x [..., K], weight [N, K], bias [N] or None; y [..., N] in the compute dtype. `recipe` None: the recipe of the
    ambient autocast, and high precision outside of one, so that a module of your own joins an autocast with one line.
    Raises as `Linear` does, and NotSupportedError for delayed scaling, whose state needs a layer to live in.

    >>> linear(torch.ones(2, 4), torch.ones(3, 4), recipe="mxfp8").shape
    torch.Size([2, 3])
    """
    pinned, token = (UNPINNED, None) if recipe is None else _pinned(recipe)
    call = _Call(weight, bias, pinned, token, backend)
    if torch.compiler.is_compiling():
        asked = context.asked().RECIPE if token is None else token
        is_delayed = asked != context.PLAIN and context.is_delayed(asked)
    else:
        backends.check_name(backend)
        chosen = call._resolve(ambient())
        is_delayed = chosen is not None and chosen.is_delayed
    if is_delayed:
        raise NotSupportedError(
            "linear: got a recipe of delayed scaling, needed one without state between calls. Use "
            "microfloat.torch.Linear, or another recipe."
        )
    return call.forward(x)


def recipe_of_call(recipe: Recipe | str | None, function: str) -> tuple[str, str, str]:
    """The token of the recipe that a function without state runs, who has named it, and the backend.

    `recipe` None: that of the ambient autocast. Raises NotSupportedError for recipes that need a layer's state.
    """
    pinned, pin_token = (UNPINNED, None) if recipe is None else _pinned(recipe)
    if torch.compiler.is_compiling():
        token, origin = context.recipe_here(pin_token)
        if token == context.PLAIN and origin != "code":
            torch.ops.microfloat.check_autocast_(MARKER, origin)
        backend = context.asked().BACKEND
    else:
        state, origin = ambient(), "layer"
        is_off = state is not None and not state.enabled
        chosen = None if is_off else pinned if pinned is not UNPINNED else state.recipe if state is not None else None
        token, backend = token_of(chosen), "auto" if state is None else state.backend  # type: ignore
    if token == context.PLAIN:
        return context.token_of_high_precision(), origin, backend
    if context.is_delayed(token) or context.is_static(token):
        raise NotSupportedError(
            f"{function}: got a recipe of delayed or static scaling, needed one without state between calls. Use "
            "microfloat.torch.Linear or GroupedLinear, or another recipe."
        )
    return token, origin, backend


def _pinned(recipe: Recipe | str) -> tuple[Recipe, str | None]:
    """`pinned_to`, also for a recipe that a compiled function has made, of which Dynamo knows the fields only."""
    token = context.traced_token(recipe) if torch.compiler.is_compiling() else None
    return pinned_to(recipe) if token is None else (context.recipe_of(token), token)


def pinned_to(recipe: Recipe | str) -> tuple[Recipe, str | None]:
    """The recipe, and its token, by which compiled code names it."""
    made = canonical(as_recipe(recipe))
    return made, token_of(made)


pinned_to._dynamo_marked_constant = True  # type: ignore[attr-defined]


def adapt_scaling_keys(layer: RecipeLayer, state_dict: StateDict, prefix: str, load: list[str], key: str = "") -> None:
    """Let plain layers load our checkpoints strictly, and ours plain ones. `load` identifies one load call, `key` is
    the name of the weight where that is not the layer's.
    """
    drop_extra_state(layer, state_dict, prefix, load)
    names = layer_state.BUFFER_NAMES
    present = [name for name in names if prefix + name in state_dict]
    pinned = layer.pinned
    if present and pinned is not UNPINNED and (pinned is None or not pinned.is_delayed):
        for name in present:  # the recipe has no use for them
            del state_dict[prefix + name]
    elif present:
        if missing := sorted(set(names) - set(present)):
            raise CheckpointError(
                f"state_dict: got {present} under {prefix!r} without {missing}, needed all six delayed-scaling entries "
                "or none. Remove the rest to start with fresh scaling state."
            )
        for name in names:  # all of them before the first is taken
            replicated = getattr(state_dict[prefix + name], "full_tensor", None)  # a DTensor
            if replicated is not None:
                state_dict[prefix + name] = replicated()
            check_scaling_entry(prefix + name, state_dict[prefix + name])
        scaling.forget(layer)
        for name in names:
            # In float32 also where assign=True takes the tensor itself.
            loaded = state_dict[prefix + name] = state_dict[prefix + name].detach().to(torch.float32)
            current = layer._buffers.get(name)
            if current is None or current.shape != loaded.shape:
                with torch.inference_mode(False):  # buffers of inference mode could not be updated outside of it
                    layer._buffers[name] = torch.empty(loaded.shape, dtype=torch.float32, device=layer.weight.device)
    elif layer_state.has_buffers(layer) and (key or prefix + "weight") in state_dict:
        scaling.reset_scaling(layer)
        state_dict.update({prefix + name: layer._buffers[name].clone() for name in names})  # type: ignore[union-attr]
        text = "The checkpoint holds no delayed-scaling state; it starts fresh (scales 1, histories 0)."
        warn_once_per_load(load, text)
