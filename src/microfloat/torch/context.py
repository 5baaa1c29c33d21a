"""The ambient state that `autocast` sets: a context variable per thread and task, and attributes for compiled code.

Dynamo can neither trace a context variable nor guard it, but it guards attributes of a module, and strings by their
value. So compiled code reads attributes of this module, in which a recipe is a string, its token: equal recipes never
recompile, and a changed recipe always does. An autocast inside the compiled function sets `TRACED` while Dynamo traces;
it is read in place of these attributes, and is None whenever code runs.
"""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, NoReturn

import torch

from microfloat.errors import InvalidValueError, MicrofloatError, NotSupportedError
from microfloat.recipes import CustomRecipe, Gemm, Recipe, get_default_recipe
from microfloat.recipes.core import constants_of, recipe_of_constants
from microfloat.recipes.names import as_recipe
from microfloat.torch.scaling import regions as scaling
from microfloat.torch.scaling.amax_reduction import Group


class Tape:
    """Encode scales in the order a checkpointed region used them, so that its recomputation uses the same ones."""

    def __init__(self, outer: "Tape | None" = None) -> None:
        self.scales: list[dict[str, torch.Tensor]] = []
        self._outer = outer  # of a checkpointed region around this one, which is recomputed too

    def record(self, scales: dict[str, torch.Tensor]) -> None:
        """Add the scales of one call."""
        self.scales.append(scales)
        if self._outer is not None:
            self._outer.record(scales)


class Ambient(NamedTuple):
    """The settings of one autocast, its delayed-scaling region, and the state outside it."""

    enabled: bool
    recipe: Recipe | None
    calibrating: bool = False
    group: Group = None
    backend: str = "auto"
    region: "scaling.Region | None" = None
    record_tape: Tape | None = None
    replay: Iterator[dict[str, torch.Tensor]] | None = None
    owner: object = None  # the object that leaves this state again
    outer: "Ambient | None" = None
    is_traced: bool = False  # entered by code that `torch.export` runs to trace it, so that it is part of the program
    depth: int = 0  # autocasts that were entered and not left, this one included


_AMBIENT: ContextVar[Ambient | None] = ContextVar("microfloat_autocast", default=None)
# `ambient()` is the innermost autocast of this thread and task, or None; `set_ambient` returns the token that
# `reset_ambient` takes. They are methods of the variable itself, since every call of a layer asks.
ambient, set_ambient = _AMBIENT.get, _AMBIENT.set


def reset_ambient(token: Token, owner: object) -> tuple[Ambient | None, bool]:
    """Remove the state of `owner`; returns the innermost state that is left, and True if `owner`'s was the innermost.

    States that were entered after it stay. Raises NotSupportedError, and changes nothing, in another thread or task
    than that of the entry.
    """
    state = _AMBIENT.get()
    try:
        _AMBIENT.reset(token)
    except ValueError:
        raise NotSupportedError(
            "autocast: got an exit in another thread or task than the one that entered it, needed both in one. "
            "An autocast is seen by its own thread and task alone; enter it where the layers are called."
        ) from None
    left = _without(state, owner)
    _AMBIENT.set(left)
    return left, state is not None and state.owner is owner


def _without(state: Ambient | None, owner: object) -> Ambient | None:
    if state is None or state.owner is owner:
        return state and state.outer
    return state._replace(outer=_without(state.outer, owner))


@contextlib.contextmanager
def entered(state: Ambient | None, **changes: object) -> Iterator[None]:
    """Make `state` with `changes` the ambient state inside, without opening a delayed-scaling region."""
    state, owner = state or Ambient(enabled=True, recipe=None), object()
    token = _AMBIENT.set(state._replace(**changes, owner=owner, outer=_AMBIENT.get()))
    try:
        yield
    finally:
        reset_ambient(token, owner)


HIGH_PRECISION = CustomRecipe(Gemm(None, None), Gemm(None, None), Gemm(None, None))
PLAIN = ""  # the token of high precision
# One entry for each different recipe of the process; none may go, since compiled code and layers hold tokens.
_RECIPES: dict[str, Recipe] = {}
_TOKENS: dict[Recipe, str] = {}
_FIRST: dict[object, Recipe] = {}  # by their keys, which hash in C


def canonical(recipe: Recipe) -> Recipe:
    """One object for all equal recipes, by which layers and autocasts look up without comparing fields."""
    return _FIRST.setdefault(recipe._key, recipe)


def token_of(recipe: Recipe | None) -> str:
    """The token of a recipe, derived from its contents, so that it means the same in another process."""
    if recipe is None:
        return PLAIN
    token = _TOKENS.get(recipe)
    if token is None:
        kept = recipe.wgrad.rhs is None and recipe.wgrad.path != "refused"
        scaling_of_x = "d" if recipe.is_delayed else "a" if recipe.is_static else "-"
        traits = ("s" if recipe.is_stochastic else "-") + scaling_of_x + ("x" if kept else "-")
        traits += "j" if recipe.is_joint else "-"
        try:
            contents = json.dumps(recipe.to_dict(), sort_keys=True)
        except InvalidValueError:  # a callable amax_compute_algo has no contents to write down
            contents = f"recipe {len(_TOKENS)} of this process"
        token = _TOKENS[recipe] = f"{traits} {contents}"
        _RECIPES[token] = recipe
    return token


def token_of_high_precision() -> str:
    """The token of products without casts."""
    return token_of(HIGH_PRECISION)


token_of_high_precision._dynamo_marked_constant = True  # type: ignore[attr-defined]


def recipe_of(token: str) -> Recipe:
    """The recipe that `token_of` named."""
    return _RECIPES[token]


recipe_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_stochastic(token: str) -> bool:
    """True where the recipe needs a call seed; it reads the token only, so that compiled code may ask."""
    return token[0] == "s"


def is_delayed(token: str) -> bool:
    """True where the recipe carries delayed-scaling state."""
    return token[1] == "d"


def is_static(token: str) -> bool:
    """True where x is cast under an amax that was measured beforehand."""
    return token[1] == "a"


def is_joint(token: str) -> bool:
    """True where the weight is cast under an amax that it shares with other weights."""
    return token[3] == "j"


def keeps_x(token: str) -> bool:
    """True where backward reads x itself, because wgrad takes it in high precision."""
    return token[2] == "x"


def traced_token(recipe: Recipe | str | None) -> str | None:
    """The token of an argument `recipe` of an autocast in compiled code; None for one that eager code refuses.

    Dynamo reads the fields of a recipe, and guards them by value; of a recipe that the compiled function itself has
    made it knows nothing else.
    """
    if recipe is None or isinstance(recipe, str):
        return _token_of_name(recipe)
    return _token_of_constants(*constants_of(recipe)) if isinstance(recipe, Recipe) else None


def _token_of_name(name: str | None) -> str | None:
    try:
        return token_of(get_default_recipe() if name is None else as_recipe(name))
    except MicrofloatError:
        return None


def _token_of_constants(*constants: Any) -> str | None:
    try:
        return token_of(recipe_of_constants(*constants))
    except MicrofloatError:
        return None


for _function in (_token_of_name, _token_of_constants):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# The ambient state as compiled code asks for it, as constants.
_VIEWS: dict[str, Callable[[Ambient | None], Any]] = {
    # The token of the recipe of layers that have none of their own.
    "RECIPE": lambda state: PLAIN if state is None or not state.enabled else token_of(state.recipe),
    # True: layers with a recipe of their own run in high precision too.
    "ISLAND": lambda state: state is not None and not state.enabled,
    # The token of the recipe for which layers in high precision record their amaxes.
    "CALIBRATED": lambda state: token_of(state.recipe) if state is not None and state.calibrating else PLAIN,
    "BACKEND": lambda state: "auto" if state is None else state.backend,
    # The number of autocasts around the call, as text: Dynamo takes numbers of a module for variables.
    "DEPTH": lambda state: "0" if state is None else str(state.depth),
    "GROUP": lambda state: None if state is None else state.group,
}


def __getattr__(name: str) -> Any:
    """The views above as attributes of this module, read by the thread and task that call the compiled code."""
    if name not in _VIEWS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _VIEWS[name](_AMBIENT.get())


class Traced(NamedTuple):
    """The views of an autocast inside the function that Dynamo traces."""

    RECIPE: str
    ISLAND: bool
    BACKEND: str
    CALIBRATED: str = PLAIN
    outer: "Traced | None" = None


TRACED: Traced | None = None
_this_module = sys.modules[__name__]


def asked() -> Any:
    """The object with the views of the ambient state: the autocast that is being traced, else this module."""
    return _this_module if TRACED is None else TRACED


def recipe_here(pin_token: str | None) -> tuple[str, str]:
    """The token of the recipe that a layer runs in compiled code, and its source: "layer", "caller" or "code".

    `pin_token`: the token of the layer's own recipe, if it has one. Ends the graph at delayed scaling inside an
    autocast that is traced.
    """
    views = asked()
    token = views.RECIPE if pin_token is None else PLAIN if views.ISLAND else pin_token
    if torch.compiler.is_dynamo_compiling():
        is_in_code = TRACED is not None  # the autocast is part of the code that is compiled, not of its caller
    else:
        state = _AMBIENT.get()
        is_in_code = state is not None and state.is_traced
    if not is_in_code:
        return token, "caller" if pin_token is None else "layer"
    if token != PLAIN and is_delayed(token):
        refuse_state()
    return token, "code"


def in_eager_mode(function: Callable, reason: str) -> Callable:
    """A function whose call ends the graph; the reason is told under fullgraph."""
    # Dynamo is imported by the first call only.
    wrapped = torch._disable_dynamo(function)  # pyright: ignore[reportPrivateImportUsage]
    wrapped._torchdynamo_disable, wrapped._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return wrapped


def _ends_the_graph(reason: str) -> Callable[[], NoReturn]:
    """A function at which Dynamo ends the graph, so that its caller runs in eager mode; else it raises."""

    def refuse() -> NoReturn:
        raise NotSupportedError(reason)

    # The mark of torch.compiler.disable, which would import all of Dynamo.
    refuse._torchdynamo_disable, refuse._torchdynamo_disable_msg = True, reason  # type: ignore[attr-defined]
    return refuse


refuse_state = _ends_the_graph(
    "autocast: got delayed scaling, calibrating or a group of processes in an autocast inside compiled code, needed "
    "the autocast around the call of the compiled function, since its exit updates the scales. Or leave fullgraph=True "
    "out: the code inside then runs in eager mode."
)
refuse_arguments = _ends_the_graph(
    "autocast: got arguments that eager mode refuses, or a recipe that is no constant, inside compiled code. Call the "
    "function without torch.compile to see which; make recipes outside of the function."
)
