"""Which recipe runs here: a context variable per thread and per async task, and nothing else.

Precedence (first that applies): ``autocast(enabled=False)``, the recipe pinned to a layer by `convert`, the recipe of
the innermost autocast, nothing (high precision). Backward never reads this: it uses what its forward captured.
"""

import contextlib
import functools
import threading
from typing import Any

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.recipes import Recipe, get_default_recipe
from microfloat.recipes.names import as_recipe
from microfloat.torch import backends, scaling
from microfloat.torch.context import Ambient, ambient, reset_ambient, set_ambient

__all__ = ["autocast"]

_default_recipe = functools.cache(get_default_recipe)


class autocast(contextlib.ContextDecorator):
    """Run the microfloat layers inside under a recipe; a context manager and a decorator.

    Parameters: `enabled` (False: a high-precision island, pinned layers included), `recipe` (None:
    ``get_default_recipe()``, one constant on every device), `calibrating` (with ``enabled=False``: outputs stay in high
    precision, delayed-scaling amaxes are recorded), `amax_reduction_group` (process group over which delayed amaxes are
    MAX-reduced; None = world), `backend` ("auto", "reference", "triton", "native").

    Nests; the inner one overrides fully; the state before is restored on any exit. Entering does no device work
    except a pending delayed-scaling update. Raises InvalidTypeError for a wrong recipe and NotSupportedError when one
    instance is entered again before it was left. Source: docs/recipes.md.
    """

    def __init__(
        self,
        enabled: bool = True,
        recipe: Recipe | str | None = None,
        calibrating: bool = False,
        amax_reduction_group: Any = None,
        *,
        backend: str = "auto",
    ) -> None:
        if not (isinstance(enabled, bool) and isinstance(calibrating, bool)):
            name, value = ("calibrating", calibrating) if isinstance(enabled, bool) else ("enabled", enabled)
            raise invalid_type(name, type(value), "True or False", "A recipe goes to recipe=.")
        backends.check_name(backend)
        recipe = _default_recipe() if recipe is None else as_recipe(recipe)
        self._state = Ambient(enabled, recipe, calibrating, amax_reduction_group, backend)
        self._busy = threading.Lock()

    def _recreate_cm(self) -> "autocast":
        """A fresh instance per decorated call, so that decorated functions may recurse and run in several threads."""
        state = self._state
        return autocast(state.enabled, state.recipe, state.calibrating, state.group, backend=state.backend)

    def __enter__(self) -> "autocast":
        if not self._busy.acquire(blocking=False):
            raise NotSupportedError(
                "autocast: got one instance entered a second time before it was left, needed one instance per nesting "
                "level and thread. Create a new autocast(...) for the inner block; sequential reuse is fine."
            )
        try:
            outer = ambient()
            region = outer.region if outer is not None else None
            enabled, recipe, calibrating, group, backend, _, _, _ = self._state
            self._opened = None
            if region is None and (enabled or calibrating):
                scaling.flush_backward()
                region = self._opened = scaling.Region()
            self._token = set_ambient(Ambient(enabled, recipe, calibrating, group, backend, region))
        except BaseException:
            self._busy.release()
            raise
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        try:
            reset_ambient(self._token)
            if self._opened is not None:
                self._opened.close(completed=kind is None)
        finally:
            self._opened = self._token = None
            self._busy.release()

    def __repr__(self) -> str:
        state = self._state
        return (
            f"autocast(enabled={state.enabled}, recipe={state.recipe!r}, calibrating={state.calibrating}, "
            f"backend={state.backend!r})"
        )
