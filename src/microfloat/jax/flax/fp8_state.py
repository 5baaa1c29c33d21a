"""The state collection of FP8 operators as a whole: accumulate by maximum, advance, merge, reset.

A collection is any pytree of dicts that holds pairs ``<name>_scale`` and ``<name>_amax_history`` (newest amax at
index 0 of the last axis). What an optimizer does with the gradient of such a pair is the *consumer rule*:
everything in a new state but one amax follows from the old state, so only ``gradient_history[0]`` is taken over.
"""

from collections.abc import Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from microfloat.errors import invalid_type, invalid_value
from microfloat.formats import E4M3, E5M2
from microfloat.jax._max_grad import fp32_max_grad, from_max_grad
from microfloat.jax.flax.fp8_meta import compute_scale
from microfloat.jax.scaling import next_scale
from microfloat.recipes import Delayed

__all__ = ["OVERWRITE_WITH_GRADIENT", "max_accumulate", "merge_state", "next_state", "reset_state"]

OVERWRITE_WITH_GRADIENT = "_overwrite_with_gradient"
_SCALE, _HISTORY = "_scale", "_amax_history"
# The largest finite values a scale may have been made for: e4m3fn, e5m2 (both kinds), e4m3fnuz.
_LARGEST = (448.0, 57344.0, 240.0)


def max_accumulate(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The variables with the state collection cast to `fp32_max_grad`: gradients of several uses become their maximum.

    Call it inside the loss function, once, outside of all uses: ``model.apply(max_accumulate(variables), x)``. The
    gradient that comes back for the original variables is float32.
    """
    if not isinstance(variables, Mapping):
        raise invalid_type("variables", type(variables), "a mapping of collections, as model.init returns it")
    if OVERWRITE_WITH_GRADIENT not in variables:
        return dict(variables)
    cast = jax.tree.map(lambda leaf: lax.convert_element_type(leaf, fp32_max_grad), variables[OVERWRITE_WITH_GRADIENT])
    return {**variables, OVERWRITE_WITH_GRADIENT: cast}


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
    if isinstance(gradients, Mapping | jax.Array | np.ndarray | str) or not isinstance(gradients, Iterable):
        raise invalid_type(
            "gradients", type(gradients), "a list of gradients with respect to `old`, one per microbatch"
        )
    gradients = list(gradients)
    if not gradients:
        return old
    for gradient in gradients:
        _check_same("gradients", old, gradient)

    def largest(*leaves: Array) -> Array:
        return jnp.max(jnp.stack([from_max_grad(leaf) for leaf in leaves]), axis=0)

    return next_state(old, jax.tree.map(largest, *gradients))


def next_state(old: Any, gradient: Any) -> Any:
    """The consumer rule over a whole collection; leaves that are no scale or history take their gradient as it is."""
    _check_collection("old", old)
    _check_same("gradient", old, gradient)
    return _next(old, gradient)


def _check_collection(argument: str, collection: Any) -> None:
    if not isinstance(collection, Mapping):
        raise invalid_type(argument, type(collection), "a state collection: a mapping, as model.init returns it")


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
    advanced = _single_use(scale, history, new_scale)
    keep_scale = used.reshape(used.shape + (1,) * (scale.ndim - used.ndim))
    return jnp.where(keep_scale, advanced, scale), jnp.where(used[..., None], rolled, history)


def _single_use(scale: Array, history: Array, gradient: Array) -> Array:
    """The new scale behind a gradient that may be the sum of several equal ones.

    The rule that made it is not known here, but only a few exist: the gradient is a small multiple of one
    candidate. Where it is none (a margin, another algorithm) it is taken as it is.
    """
    amax = jnp.max(history, axis=-1).reshape(scale.shape[: history.ndim - 1] + (1,) * (scale.ndim - history.ndim + 1))
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
