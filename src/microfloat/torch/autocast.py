"""`autocast`, which sets the recipe of the layers inside, and `checkpoint`, whose recomputation runs under it again.

The first that applies wins: ``autocast(enabled=False)``, the recipe pinned to a layer by `convert`, the recipe of the
innermost autocast, high precision. Backward reads no ambient state: it uses the recipe of its forward.
"""

import contextlib
import functools
import inspect
import threading
import warnings
from collections.abc import Callable, Iterable
from contextvars import Token
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from microfloat.errors import NotSupportedError, invalid_type, invalid_value, kind_of
from microfloat.recipes import Recipe, get_default_recipe
from microfloat.recipes.core import delayed_of
from microfloat.recipes.names import as_recipe
from microfloat.torch import backends, context
from microfloat.torch._typing import Options, Result, Takes
from microfloat.torch.context import Ambient, Tape, ambient, canonical, entered, reset_ambient, set_ambient
from microfloat.torch.scaling import buffers as layer_state
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.scaling.amax_reduction import Group, exists

_default_recipe = functools.cache(get_default_recipe)


class autocast:
    """Run the microfloat layers inside under a recipe; a context manager and a decorator.

    Parameters: `enabled` (False: a high-precision island, pinned layers included), `recipe` (None:
    ``get_default_recipe()``, one constant on every device), `calibrating` (with ``enabled=False``: outputs stay in high
    precision, amaxes are recorded for delayed scaling and, of inputs, for static scales), `amax_reduction_group`
    (process group over which delayed amaxes are MAX-reduced; None = world), `backend` ("auto", "reference", "triton",
    "native").

    An inner autocast overrides an outer one fully, and any exit restores the state before. Entering does no device work
    except a pending delayed-scaling update. Inside a function of torch.compile it is part of the graph
    (docs/training.md). Raises InvalidTypeError for a wrong recipe and NotSupportedError when one instance is entered
    again before it was left. Source: docs/recipes.md.
    """

    _traced: context.Traced | None = None  # of an instance that compiled code has made

    def __init__(
        self, enabled: bool = True, recipe: Recipe | str | None = None, calibrating: bool = False,
        amax_reduction_group: Group = None, *, backend: str = "auto",
    ) -> None:  # fmt: skip
        self._arguments = enabled, recipe, calibrating, amax_reduction_group, backend
        if torch.compiler.is_dynamo_compiling():
            self._traced = _trace(*self._arguments)
            return
        if not (isinstance(enabled, bool) and isinstance(calibrating, bool)):
            name, value = ("calibrating", calibrating) if isinstance(enabled, bool) else ("enabled", enabled)
            hint = "Write @autocast() with parentheses." if callable(value) else "A recipe goes to recipe=."
            raise invalid_type(name, type(value), "True or False", hint)
        if backend != "auto":
            backends.check_name(backend)
        if amax_reduction_group is not None:
            _check_group(amax_reduction_group)
        recipe = canonical(_default_recipe() if recipe is None else as_recipe(recipe))
        self._state = Ambient(enabled, recipe, calibrating, amax_reduction_group, backend)
        self._busy = threading.Lock()
        self._entered: tuple[scaling.Region | None, Token] | None = None

    def __reduce__(self) -> tuple[Callable[..., "autocast"], tuple]:
        state = self._state
        arguments = state.enabled, state.recipe, state.calibrating, state.group
        return functools.partial(autocast, backend=state.backend), arguments

    def _recreate_cm(self) -> "autocast":
        """A fresh instance per decorated call, so that decorated functions may recurse and run in several threads."""
        make, arguments = self.__reduce__()
        return make(*arguments)

    def __deepcopy__(self, memo: dict) -> "autocast":
        return self._recreate_cm()

    def __call__(self, function: Callable[Takes, Result]) -> Callable[Takes, Result]:
        """Decorate a function: each call runs under an autocast of its own.

        A coroutine runs under it in the task that awaits it. Generators are refused, whose callers would run under it.
        """
        if isinstance(function, (staticmethod, classmethod)):
            raise invalid_type("autocast", type(function), "a function to decorate", "Write @autocast() below it.")
        if isinstance(function, type) or not callable(function):
            remedy = "Decorate a method, such as forward."
            raise invalid_type("autocast", kind_of(function), "a function to decorate", remedy)
        return _decorated(function, self._recreate_cm)

    def __enter__(self) -> "autocast":
        if torch.compiler.is_dynamo_compiling():
            # Some versions of Dynamo also trace into an instance that eager code has made.
            traced = _trace(*self._arguments) if self._traced is None else self._traced
            context.TRACED = traced._replace(outer=context.TRACED)
            return self
        if self._traced is not None:  # compiled code has made it, and ended its graph before this
            self.__init__(*self._arguments[:4], backend=self._arguments[4])
            self._traced = None
        if not self._busy.acquire(blocking=False):
            raise NotSupportedError(
                "autocast: got one instance entered a second time before it was left, needed one instance per nesting "
                "level and thread. Create a new autocast(...) for the inner block; sequential reuse is fine."
            )
        try:
            outer = ambient()
            enabled, recipe, calibrating, group, backend = self._state[:5]
            region, tapes = (None, (None, None)) if outer is None else (outer.region, (outer.record_tape, outer.replay))
            # Closed: the context was copied inside an autocast that has been left. A replay belongs to its forward.
            has_ended = region is None or (region.closed and tapes[1] is None)
            if has_ended and (enabled or calibrating):
                region = scaling.Region()
                scaling.flush_backward(region)
            if region is not None and enabled and recipe is not None and recipe.is_delayed:
                delayed = delayed_of(recipe)
                # Else what an outer autocast shares stays as it is.
                if delayed.reduce_amax and not region.is_alone:
                    region.shared[group] = delayed
            is_traced = torch.compiler.is_compiling()
            if is_traced and (calibrating or (enabled and recipe is not None and recipe.is_delayed)):
                context.refuse_state()
            depth = 1 if outer is None else outer.depth + 1
            state = Ambient(enabled, recipe, calibrating, group, backend, region, *tapes, self, outer, is_traced, depth)
            self._entered = region, set_ambient(state)
        except BaseException:
            self._busy.release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if torch.compiler.is_dynamo_compiling():
            context.TRACED = context.TRACED.outer  # type: ignore[union-attr]
            return
        if self._entered is None:
            raise NotSupportedError(
                "autocast: got an exit of an instance that is not entered, needed one exit for each enter."
            )
        region, token = self._entered
        outer, was_innermost = reset_ambient(token, self)
        self._entered = None
        self._busy.release()
        if not was_innermost:
            if region is not None:
                region.failed = True
            raise NotSupportedError(
                "autocast: got an exit while an autocast that was entered later is still active in this thread and "
                "task, needed exits in the reverse order of the entries. A generator must not yield inside "
                "`with autocast(...)` while others do: enter around each step, from one yield to the next."
            )
        if region is not None and (outer is None or outer.region is not region):
            region.close(completed=kind is None and not region.failed)

    def __repr__(self) -> str:
        state = self._state
        return (
            f"autocast(enabled={state.enabled}, recipe={state.recipe!r}, calibrating={state.calibrating}, "
            f"backend={state.backend!r})"
        )


def _note_step(*_: object) -> None:
    if not torch.compiler.is_compiling() and (state := ambient()) is not None and state.region is not None:
        state.region.note_step()


register_optimizer_step_post_hook(_note_step)


def _check_group(group: object) -> None:
    distributed = torch.distributed
    if distributed.is_available() and group == distributed.GroupMember.NON_GROUP_MEMBER:
        return
    if not (distributed.is_available() and isinstance(group, distributed.ProcessGroup)):
        raise invalid_type(
            "amax_reduction_group", repr(group) if isinstance(group, str) else type(group),
            "a torch.distributed.ProcessGroup, or None for all ranks", "Of a DeviceMesh pass mesh.get_group().",
        )  # fmt: skip
    if not exists(group):
        raise invalid_value("amax_reduction_group", "a process group that was destroyed", "one that exists")


def _trace(enabled: bool, recipe: Recipe | str | None, calibrating: bool, group: Group, backend: str) -> context.Traced:
    """The views of an autocast that Dynamo traces; ends the graph at one with state or wrong arguments."""
    token = context.traced_token(recipe)
    if token is None or not (enabled is True or enabled is False) or backend not in backends.NAMES:
        context.refuse_arguments()
    elif calibrating is not False or group is not None or (enabled and context.is_delayed(token)):
        context.refuse_state()
    return context.Traced(token if enabled else context.PLAIN, not enabled, backend)


# Dynamo inlines these in compiled code, but does not compile their calls between two graphs.
_frames = torch._C._dynamo.eval_frame  # pyright: ignore[reportAttributeAccessIssue]
_strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.SKIP)
for _method in (autocast.__init__, autocast.__enter__, autocast.__exit__):
    _frames.set_code_exec_strategy(_method.__code__, _strategy)


def _decorated(function: Callable, enter: Callable[[], autocast]) -> Callable:
    """`function`, whose own code runs inside ``with enter()``."""

    def is_kind(asks: Callable[[object], bool]) -> bool:
        return asks(function) or asks(type(function).__call__)

    async def run_async(*args: object, **kwargs: object) -> object:
        with enter():
            return await function(*args, **kwargs)

    def run(*args: object, **kwargs: object) -> object:
        with enter():
            return function(*args, **kwargs)

    if is_kind(inspect.isasyncgenfunction) or is_kind(inspect.isgeneratorfunction):
        remedy = "Inside of it enter autocast(...) around each step, from one yield to the next."
        raise invalid_type("autocast", "a generator", "a function or a coroutine to decorate", remedy)
    return functools.wraps(function)(run_async if is_kind(inspect.iscoroutinefunction) else run)


@dataclass(frozen=True)
class AutocastState:
    """The settings for the layers that are called here, as `get_autocast_state` returns them.

    `depth`: autocasts that were entered and not left; the innermost one decides the rest. `recipe`: the recipe of
    layers that have none of their own, None in high precision. `is_island`: layers with a recipe of their own run in
    high precision too. `calibrating`, `amax_reduction_group` (None: all ranks) and `backend`: its arguments.
    """

    depth: int = 0
    recipe: Recipe | None = None
    is_island: bool = False
    calibrating: bool = False
    amax_reduction_group: Group = None
    backend: str = "auto"


def get_autocast_state() -> AutocastState:
    """The settings that the autocasts of this thread and task make. Compiled code follows their changes."""
    if not torch.compiler.is_compiling():
        state = ambient()
        if state is None:
            return AutocastState()
        recipe = state.recipe if state.enabled else None
        return AutocastState(state.depth, recipe, not state.enabled, state.calibrating, state.group, state.backend)
    views, traced, depth = context.asked(), context.TRACED, int(context.DEPTH)
    group = None if traced is not None else context.GROUP
    while traced is not None:
        traced, depth = traced.outer, depth + 1
    calibrating = views.CALIBRATED != context.PLAIN
    return AutocastState(depth, get_autocast_recipe(), views.ISLAND, calibrating, group, views.BACKEND)


def get_autocast_recipe() -> Recipe | None:
    """The recipe of layers here that have none of their own; None = high precision. Also in compiled code."""
    if torch.compiler.is_compiling():
        token = context.asked().RECIPE
        return None if token == context.PLAIN else context.recipe_of(token)
    state = ambient()
    return state.recipe if state is not None and state.enabled else None


def is_autocast_enabled() -> bool:
    """True inside an autocast that is enabled."""
    return get_autocast_recipe() is not None


def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Recipe | None = None, fp8_group: Group = None
) -> autocast:
    """Deprecated name of an older TransformerEngine: `autocast(enabled, recipe, calibrating, amax_reduction_group)`."""
    if not torch.compiler.is_dynamo_compiling():  # which cannot trace a warning
        warnings.warn(
            "fp8_autocast is deprecated; use microfloat.torch.autocast(recipe=...).", DeprecationWarning, stacklevel=2
        )
    return autocast(enabled, fp8_recipe, calibrating, fp8_group)


def checkpoint(
    function: Callable[..., Result], *args: object, use_reentrant: bool = False, preserve_rng_state: bool = True,
    context_fn: Callable | None = None, **kwargs: Any,
) -> Result:  # fmt: skip
    """``function(*args, **kwargs)`` whose activations are recomputed in backward, with the bits of the first pass.

    It is `torch.utils.checkpoint.checkpoint(use_reentrant=False)` with a recomputation under the recipe of its forward,
    with the same call seeds and the same delayed encode scales; it records nothing (docs/numerics.md 3.3, 5.3).
    `context_fn` as there: with ``create_selective_checkpoint_contexts`` a policy keeps results of operators by name;
    all casts of a layer are ``torch.ops.microfloat.quantize_operands.default`` (docs/training.md). In compiled code it
    is torch's own; under delayed scaling it runs, with `function`, in eager mode. Raises InvalidTypeError if `function`
    is not callable, InvalidValueError for use_reentrant=True.
    """
    if not callable(function):
        raise invalid_type("function", type(function), "a callable")
    if use_reentrant is not False:
        raise invalid_value(
            "use_reentrant", repr(use_reentrant), "False, the form that can replay what its forward drew and measured",
            "Leave it out. torch.utils.checkpoint has the reentrant form, for layers pinned by convert.",
        )  # fmt: skip
    options: Options = {"use_reentrant": False, "preserve_rng_state": preserve_rng_state}
    if torch.compiler.is_compiling() and not _has_scales(function):
        if context_fn is not None:
            options["context_fn"] = context_fn
        return torch_checkpoint.checkpoint(function, *args, **options, **kwargs)
    return _REPLAYED(context_fn, function, args, options | kwargs)


def _has_scales(function: object) -> bool:
    """True where a layer of `function`, if it is a module, runs under delayed scaling."""
    token = context.asked().RECIPE
    if token != context.PLAIN and context.is_delayed(token):
        return True
    return isinstance(function, nn.Module) and any(layer_state.has_buffers(module) for module in function.modules())


def _replayed(context_fn: Callable | None, function: Callable[..., Result], args: tuple, options: Options) -> Result:
    state = ambient()

    def contexts() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        tape = Tape(None if state is None else state.record_tape)
        first, again = (contextlib.nullcontext(),) * 2 if context_fn is None else context_fn()
        return (
            _Reentered(lambda: (entered(state, record_tape=tape), first)),
            _Reentered(lambda: (entered(state, record_tape=None, replay=iter(tape.scales)), again)),
        )

    return torch_checkpoint.checkpoint(function, *args, context_fn=contexts, **options)


_REPLAYED: Callable = context.in_eager_mode(
    _replayed,
    "microfloat.torch.checkpoint: got layers under delayed scaling in compiled code, needed eager mode, which alone "
    "replays the scales of the first pass. Leave fullgraph=True out, or use a recipe with current scaling",
)


class _Reentered(threading.local):
    """Contexts that are made anew whenever they are entered, as each backward through a kept graph does."""

    def __init__(self, make: Callable[[], Iterable[contextlib.AbstractContextManager]]) -> None:
        self._make = make
        self._opened: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:  # left at once where one of them fails
            for made in self._make():
                stack.enter_context(made)
            self._opened.append(stack.pop_all())

    def __exit__(self, *error: object) -> bool | None:
        return self._opened.pop().__exit__(*error)  # type: ignore[arg-type]
