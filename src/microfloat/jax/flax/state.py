"""Delayed-scaling state in Flax: variables of linen modules, collections as a whole, optimizers that step now and then.

A collection is any pytree of dicts that holds pairs ``<name>_scale`` and ``<name>_amax_history`` (newest amax at
index 0 of the last axis). The *consumer rule* says how an optimizer uses the gradient of such a pair:
everything in a new state but one amax follows from the old state, so only ``gradient_history[0]`` is taken over.
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array, lax
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from microfloat.errors import InvalidValueError, invalid_type, invalid_value
from microfloat.formats import E4M3, E5M2
from microfloat.jax.flax.fp8_casts import compute_scale
from microfloat.jax.scaling import OVERWRITE_WITH_GRADIENT, Slot, largest, listed, next_scale
from microfloat.jax.transformations import as_max_grad, from_max_grad
from microfloat.recipes import Delayed

__all__ = ["OVERWRITE_WITH_GRADIENT", "max_accumulate", "merge_state", "next_state", "reset_state"]

# The names of the slots of x, w and dy in Flax, and of its operators.
SLOT_NAMES = {"x": "input", "w": "kernel", "dy": "output_grad"}
STATE_NAMES = tuple(SLOT_NAMES.values())
_SCALE, _HISTORY = "_scale", "_amax_history"


def accumulating(memo: dict[Any, Any], key: Any, scale: Array, history: Array) -> Slot:
    """State in the dtype whose gradients accumulate by maximum: `memo` keeps one cast for all uses in a trace."""
    made, trace = memo.get(key), get_opaque_trace_state(convention="flax")
    if made is None or made[0] is not history or made[1] != trace:
        made = memo[key] = history, trace, Slot(*map(as_max_grad, (scale, history)))
    return made[2]


class StateVariables:
    """The variables ``{input,kernel,output_grad}_{scale,amax_history}`` of a linen module, float32, after axes `lead`.

    All uses of the module in one trace read one cast of the state, on the root scope of this apply, which accumulates
    them as a maximum. `fp8_ops.max_accumulate` joins uses in different traces (bodies of scan, remat).
    """

    def __init__(self, module: nn.Module, length: int, lead: tuple[int, ...] = ()) -> None:
        def variable(name: str, value: float, size: int) -> Any:
            return module.variable(OVERWRITE_WITH_GRADIENT, name, lambda: jnp.full((*lead, size), value, jnp.float32))

        self.pairs = {
            name: (variable(f"{name}{_SCALE}", 1, 1), variable(f"{name}{_HISTORY}", 0, length)) for name in STATE_NAMES
        }
        scope = cast(Any, module.scope)  # None only outside of init and apply
        if not hasattr(scope.root, "_microfloat_state"):
            scope.root._microfloat_state = {}
        self._memo, self._path = scope.root._microfloat_state, scope.path

    def current(self, name: str) -> Slot:
        """Scale and history for a use of the module."""
        scale, history = accumulating(self._memo, (self._path, name), *(one.value for one in self.pairs[name]))
        # An optimizer that steps on the state steps on every slot: checking one is enough.
        return Slot(scale, _with_amaxes(history) if name == SLOT_NAMES["w"] else history)


_STEPPED_ON = (
    "_overwrite_with_gradient: got a negative amax in a history of delayed scaling, needed amaxes. The gradient of "
    "this collection is its new value, and an optimizer has stepped on it. Use microfloat.jax.linen.TrainState, or "
    "optimize with linen.overwrite_with_gradient(tx) or linen.MultiSteps(tx, k), and start from "
    "fp8_ops.reset_state(collection)."
)


@jax.custom_vjp
def _with_amaxes(history: Array) -> Array:
    """`history`; where a gradient is taken, a negative amax is InvalidValueError, or a warning under jit on a CPU."""
    return history


def _check_amaxes(history: Array) -> tuple[Array, None]:
    def warn(negative: Any) -> None:
        if np.any(negative):
            warnings.warn(_STEPPED_ON, stacklevel=2)

    negative = jnp.any(from_max_grad(history) < 0)
    if isinstance(negative, Tracer):
        lax.platform_dependent(negative, cpu=partial(jax.debug.callback, warn), default=lambda negative: None)
    elif negative:
        raise InvalidValueError(_STEPPED_ON)
    return history, None


_with_amaxes.defvjp(_check_amaxes, lambda _, cotangent: (cotangent,))


# Collections

# The largest finite values a scale may have been made for: e4m3fn, e5m2 (both kinds), e4m3fnuz.
_LARGEST = (448.0, 57344.0, 240.0)


def max_accumulate(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with state whose gradients become their maximum: cast it once in the loss, before all uses."""
    _check_collection("variables", variables, "a mapping of collections")
    if OVERWRITE_WITH_GRADIENT not in variables:
        return dict(variables)
    return {**variables, OVERWRITE_WITH_GRADIENT: jax.tree.map(as_max_grad, variables[OVERWRITE_WITH_GRADIENT])}


def reset_state(collection: Any) -> Any:
    """Scales of one and histories of zero, in the shapes of `collection`."""
    _check_collection("collection", collection)

    def fresh(path: tuple, leaf: Array) -> Array:
        name = str(getattr(path[-1], "key", getattr(path[-1], "name", ""))) if path else ""
        return jnp.ones_like(leaf) if name.endswith(_SCALE) else jnp.zeros_like(leaf)

    return jax.tree_util.tree_map_with_path(fresh, collection)


def merge_state(old: Any, gradients: Iterable[Any]) -> Any:
    """N microbatches as one step: the state after `old`, with the largest amax of all gradients, rolled once."""
    _check_collection("old", old)
    gradients = listed(gradients, Mapping)
    for gradient in gradients:
        _check_same("gradients", old, gradient)
    return next_state(old, largest(gradients)) if gradients else old


def next_state(old: Any, gradient: Any) -> Any:
    """The consumer rule over a whole collection; leaves that are no scale or history take their gradient as it is."""
    _check_collection("old", old)
    _check_same("gradient", old, gradient)
    return _next(old, gradient)


def _check_collection(argument: str, collection: Any, needed: str = "a state collection: a mapping") -> None:
    if not isinstance(collection, Mapping):
        raise invalid_type(argument, type(collection), f"{needed}, as model.init returns it")


def _check_same(argument: str, old: Any, gradient: Any) -> None:
    """InvalidTypeError or InvalidValueError for a gradient that is none with respect to `old`."""
    _check_collection(argument, gradient)
    if missing := [name for name in old if name not in gradient]:
        raise invalid_value(argument, f"a mapping without {missing}", "the gradient with respect to `old`")
    for name, value in old.items():
        if isinstance(value, Mapping):
            _check_same(argument, value, gradient[name])


def _next(old: Mapping[str, Any], gradient: Mapping[str, Any]) -> Any:
    result = {}
    for name, value in old.items():
        history = f"{name.removesuffix(_SCALE)}{_HISTORY}"
        if isinstance(value, Mapping):
            result[name] = _next(value, gradient[name])
        elif name.endswith(_SCALE) and history in old:
            pair = _next_pair((value, old[history]), (gradient[name], gradient[history]))
            result[name], result[history] = pair
        else:
            result.setdefault(name, gradient[name])
    return cast(Any, type(old))(result) if not isinstance(old, dict) else {name: result[name] for name in old}


def _next_pair(old: tuple[Array, Array], gradient: tuple[Array, Array]) -> tuple[Array, Array]:
    scale, history = old
    new_scale, new_history = (from_max_grad(leaf) for leaf in gradient)
    newest = new_history[..., 0]
    used = (newest > 0) & jnp.isfinite(newest)
    rolled = jnp.roll(history, -1, axis=-1).at[..., 0].set(newest)
    advanced = jnp.where(used.reshape(scale.shape), _single_use(scale, history, new_scale), scale)
    return advanced, jnp.where(used[..., None], rolled, history)


def _single_use(scale: Array, history: Array, gradient: Array) -> Array:
    """The new scale behind a gradient that may be the sum of several equal ones."""
    # Few rules make scales: the gradient is a small multiple of one candidate. Otherwise it is taken as it is.
    amax = jnp.max(history, axis=-1).reshape(scale.shape)
    candidates = [compute_scale(amax, scale, np.float32(largest)) for largest in _LARGEST]
    for element in (E4M3, E5M2):
        each = jnp.vectorize(lambda h, s, element=element: next_scale(h, s, element, Delayed()), signature="(l),()->()")
        candidates.append(each(history, scale.reshape(history.shape[:-1])).reshape(scale.shape))
    best, uses = gradient, jnp.full_like(gradient, np.float32(1e9))
    for candidate in candidates:
        ratio = gradient / candidate
        count = jnp.round(ratio)
        fits = (count >= 1) & (jnp.abs(ratio - count) <= np.float32(1e-5) * count) & (count < uses)
        best, uses = jnp.where(fits, candidate, best), jnp.where(fits, count, uses)
    return best


# Optimizers that step once per several gradients (optax.MultiSteps). A step's new state follows from the largest amax
# of all its microbatches, and rolls the history once.


class Collected(NamedTuple):
    """State of an optimizer that steps once per several gradients, and the largest state gradients since it stepped."""

    inner: Any
    largest: Any


def check_transformation(tx: object) -> None:
    """InvalidTypeError for anything but an optax transformation, recognised by its two functions."""
    if not (callable(getattr(tx, "init", None)) and callable(getattr(tx, "update", None))):
        raise invalid_type("tx", type(tx), "an optax transformation such as optax.adam(1e-3)")


def _is_multi_steps(node: Any) -> bool:
    # Also of an nnx optimizer, which holds the fields in variables.
    return hasattr(node, "mini_step") and hasattr(node, "gradient_step")


def step_counts(opt_state: Any) -> list[Any]:
    """The step counter of every MultiSteps in an optimizer's state; none for an optimizer that always steps."""
    nodes = jax.tree.leaves(opt_state, is_leaf=_is_multi_steps)
    return [node.gradient_step for node in nodes if _is_multi_steps(node)]


def collecting(opt_state: Any, collection: Any) -> Any:
    """`opt_state`, with a buffer for state gradients if the optimizer does not step every time."""
    if not step_counts(opt_state):
        return opt_state
    return Collected(opt_state, jax.tree.map(jnp.zeros_like, collection))


def collected(
    advance: Callable[[Any, Any], Any], old: Any, gradient: Any, held: Any, before: list[Any], after: list[Any]
) -> tuple[Any, Any]:
    """(new state, largest gradients) after one gradient; `before` and `after` are the optimizer's counters of steps. At
    a step ``advance(old, gradient)`` applies the consumer rule to the largest of `held` and the gradient.
    """
    stepped = jnp.any(jnp.stack([count != now for count, now in zip(before, after, strict=True)]))
    top = largest([gradient, held])

    def chosen(new: Any, kept: Any) -> Any:
        return jax.tree.map(lambda one, other: jnp.where(stepped, one, other), new, kept)

    return chosen(advance(old, top), old), chosen(jax.tree.map(jnp.zeros_like, top), top)
