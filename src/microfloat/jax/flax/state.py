"""How Flax modules of this package hold delayed-scaling state, and hand it from one use to the next within a trace."""

from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from flax import linen as nn
from flax.core.scope import Scope
from jax import Array
from jax.extend.core import get_opaque_trace_state

from microfloat.jax.flax.fp8_state import OVERWRITE_WITH_GRADIENT

__all__ = ["STATE_NAMES", "StateModule"]

STATE_NAMES = ("input", "kernel", "output_grad")


class _Threaded(NamedTuple):
    """A state that an earlier use handed through, valid for the same variable in the same trace only."""

    variable: Array
    trace: object
    pair: tuple[Array, Array]


def _trace() -> object:
    return get_opaque_trace_state(convention="flax")


class StateModule(nn.Module):
    """A module with the six state variables ``{input,kernel,output_grad}_{scale,amax_history}``, float32.

    A second use of the module within one trace reads the state that the first one handed through instead of the
    variable, so that their contributions meet as a maximum. The memo lives on the root scope of this apply and
    holds the opaque trace state: uses in different traces (bodies of scan, remat) stay apart,
    `fp8_ops.max_accumulate` joins those.
    """

    amax_history_length: int = 1024

    def setup(self) -> None:
        self.variables_of = {name: self._pair(name) for name in STATE_NAMES}

    def _pair(self, name: str) -> tuple[nn.Variable, nn.Variable]:
        collection, length = OVERWRITE_WITH_GRADIENT, self.amax_history_length
        scale = self.variable(collection, f"{name}_scale", lambda: jnp.ones((1,), jnp.float32))
        history = self.variable(collection, f"{name}_amax_history", lambda: jnp.zeros((length,), jnp.float32))
        return scale, history

    def _bound_scope(self) -> Scope:
        return cast(Scope, self.scope)  # None only outside of init and apply

    def _memo(self) -> dict:
        root: Any = self._bound_scope().root
        if not hasattr(root, "_microfloat_threaded"):
            root._microfloat_threaded = {}
        return root._microfloat_threaded

    def current_state(self, name: str) -> tuple[Array, Array]:
        """(scale, history) for this use: handed through by an earlier one, or the variables."""
        scale, history = (variable.value for variable in self.variables_of[name])
        threaded = self._memo().get((self._bound_scope().path, name))
        if threaded is not None and threaded.variable is history and threaded.trace == _trace():
            return threaded.pair
        return scale, history

    def hand_on(self, name: str, pair: tuple[Array, Array]) -> None:
        """Remember the state that this use handed through, for a later use in the same trace."""
        variable = self.variables_of[name][1].value
        self._memo()[(self._bound_scope().path, name)] = _Threaded(variable, _trace(), pair)
