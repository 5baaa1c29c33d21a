"""The ambient recipe, a part of JAX's trace context: a function that jit has cached is traced again under another one.

Precedence, the first that applies: ``autocast(enabled=False)``, the recipe pinned to an op or a layer, the recipe of
the innermost autocast, nothing (high precision). A backward never reads this: it runs the recipe of its forward.
"""

import contextlib
import threading
from typing import NamedTuple

import jax

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.recipes import Recipe, get_default_recipe
from microfloat.recipes.names import as_recipe


class _Ambient(NamedTuple):
    enabled: bool
    recipe: Recipe


# Local to a thread, and in the key of every cache of traced and compiled functions.
_context = jax.make_user_context(None)
# `stack`: the autocasts that a thread has entered, outermost first, and the contexts that JAX leaves with each.
_entered = threading.local()


class autocast(contextlib.ContextDecorator):
    """Run ops and layers without a recipe of their own under `recipe`; a context manager and a decorator.

    `recipe`: a Recipe or its name, None for ``get_default_recipe()``. ``enabled=False`` is a high-precision island, ops
    with a recipe of their own included. Autocasts nest, and the inner one overrides; any exit restores the outer one; a
    thread does not see another's. jit caches a function by the recipe around its call; inside a jitted function the
    recipe holds for the code traced there. Raises InvalidTypeError for a wrong recipe, NotSupportedError for exits out
    of order.
    """

    def __init__(self, recipe: Recipe | str | None = None, *, enabled: bool = True) -> None:
        if not isinstance(enabled, bool) or isinstance(recipe, bool):
            name, value = ("recipe", recipe) if isinstance(recipe, bool) else ("enabled", enabled)
            raise invalid_type(name, type(value), "autocast(recipe, enabled=True)", "Without one: enabled=False.")
        if callable(recipe) and not isinstance(recipe, type):
            raise invalid_type("recipe", "a function", "a Recipe or its name", "Write @autocast() with parentheses.")
        self._ambient = _Ambient(enabled, get_default_recipe() if recipe is None else as_recipe(recipe))

    def __enter__(self) -> "autocast":
        context = _context(self._ambient)
        context.__enter__()
        _entered.__dict__.setdefault("stack", []).append((self, context))
        return self

    def __exit__(self, *error: object) -> None:
        stack = getattr(_entered, "stack", None)
        innermost, context = stack.pop() if stack else (None, contextlib.nullcontext())
        context.__exit__(*error)
        if innermost is not self:
            raise NotSupportedError(
                "autocast: got an exit while another autocast of this thread is the innermost one, needed exits in the "
                "reverse order of the entries. Neither yield nor await inside `with autocast(...)`."
            )

    def __repr__(self) -> str:
        return f"autocast({self._ambient.recipe!r}, enabled={self._ambient.enabled})"


def get_autocast_recipe() -> Recipe | None:
    """The recipe of an op without one of its own where this is called or traced; None is high precision."""
    return recipe_here(None)


def is_autocast_enabled() -> bool:
    """True inside an autocast that is not switched off."""
    return _context.value is not None and _context.value.enabled


def recipe_here(pinned: Recipe | None) -> Recipe | None:
    """The recipe that an op with the recipe `pinned` runs where this is called or traced; None is high precision."""
    ambient = _context.value
    if ambient is None:
        return pinned
    if not ambient.enabled:
        return None
    return ambient.recipe if pinned is None else pinned
