"""Maxima over mesh axes and batches, for code that may run inside shard_map and vmap.

Source: docs/jax.md, "Transformations and sharding".
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

__all__ = [
    "in_common_variance", "like_in_variance", "max_over", "on_first_device", "once", "sharding_axes", "sum_to_type_of",
    "told_axes", "varying_axes",
]  # fmt: skip


def varying_axes(*arrays: Array) -> frozenset[str]:
    """The manual mesh axes over which any of the arrays differs between devices; empty outside of shard_map.

    Known only under ``shard_map(check_vma=True)``.
    """
    axes: frozenset[str] = frozenset()
    for array in arrays:
        kind = jax.typeof(array)
        manual = getattr(kind, "manual_axis_type", None)
        axes |= frozenset(getattr(manual, "varying", None) or getattr(kind, "vma", None) or ())
    return axes


def sharding_axes(x: Array, axis_names: Sequence[str]) -> frozenset[str]:
    """Mesh axes that shard `x`: what JAX knows of it, else those of `axis_names` that are bound here."""
    return varying_axes(x) or told_axes(axis_names)


def told_axes(axis_names: Sequence[str]) -> frozenset[str]:
    """Those of `axis_names` that exist where this runs: a module is initialised outside of shard_map."""
    return frozenset(name for name in axis_names if _is_bound(name))


def _is_bound(name: str) -> bool:
    try:
        lax.axis_size(name)
    except NameError:  # how JAX answers the question
        return False
    return True


def max_over(value: Array, axes: frozenset[str] | Sequence[str]) -> Array:
    """The maximum of `value` over mesh axes; `value` itself without axes."""
    return lax.pmax(value, tuple(sorted(axes))) if axes else value


def sum_to_type_of(cotangent: Array, primal: Array) -> Array:
    """Sum a cotangent over the mesh axes along which its primal is the same everywhere.

    Call it on the float32 accumulator: low-precision partial results are never summed over devices.
    """
    axes = varying_axes(cotangent) - varying_axes(primal)
    return lax.psum(cotangent, tuple(sorted(axes))) if axes else cotangent


def like_in_variance(value: Array, like: Array) -> Array:
    """`value`, marked as varying over the mesh axes over which `like` varies."""
    return _marked(value, varying_axes(like))


def in_common_variance(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each marked as varying over the mesh axes over which any of them varies: loops carry one type."""
    return tuple(_marked(value, varying_axes(*arrays)) for value in arrays)


def _marked(value: Array, axes: frozenset[str]) -> Array:
    missing = axes - varying_axes(value)
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def on_first_device(value: Array, axes: frozenset[str]) -> Array:
    """`value` on the device of index 0 along all of `axes`, zeros elsewhere."""
    first = jnp.array(True)
    for axis in sorted(axes):
        first &= lax.axis_index(axis) == 0
    return jnp.where(first, value, jnp.zeros_like(value))


@custom_vmap
def once(value: Array, state: Array) -> Array:
    """`value`, the cotangent of `state`; under vmap over everything but the state, the maximum over the batch.

    JAX would sum the cotangents of an operand that is not batched; a result that is not batched is left alone. A
    batched state keeps one value per entry.
    """
    del state
    return value


@once.def_vmap
def _once_batched(axis_size: int, in_batched: Sequence[bool], value: Array, state: Array) -> tuple[Array, bool]:
    del axis_size
    value_batched, state_batched = in_batched
    if state_batched:
        return value, value_batched
    return once(jnp.max(value, axis=0) if value_batched else value, state), False
