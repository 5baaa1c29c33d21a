"""Meshes with explicit axis types: casts and GEMMs run under automatic sharding, their results are typed.

JAX cannot type the reshapes of a blocked cast by itself; what comes out can be said: codes and scales are sharded
as their operand is, a product as `lax.dot_general` shards it (docs/jax.md, "Transformations and sharding").
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

__all__ = ["is_explicit", "run_automatically", "spec_of"]


def is_explicit(*arrays: Array | None) -> bool:
    """Whether any of the arrays lives on a mesh with an explicit axis."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays if array is not None)
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes)


def spec_of(array: Array) -> tuple:
    """The partition of every axis of `array`, padded to its rank."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def sharded_if_divisible(axis: Any, size: int, array: Array) -> Any:
    """`axis`, a mesh axis or several, if it cuts `size` evenly; else None."""
    if axis is None:
        return None
    sizes = dict(zip(*_mesh(array), strict=True))
    parts = 1
    for name in axis if isinstance(axis, tuple) else (axis,):
        parts *= sizes[name]
    return axis if size and size % parts == 0 else None


def _mesh(array: Array) -> tuple[tuple[str, ...], tuple[int, ...]]:
    mesh = jax.typeof(array).sharding.mesh
    return mesh.axis_names, mesh.axis_sizes


def run_automatically(function: Callable[..., Any], out_specs: Callable[[Any], Any], *arguments: Any) -> Any:
    """``function(*arguments)`` under automatic sharding; ``out_specs(shapes)`` gives every result its PartitionSpec."""
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arguments)
    specs = out_specs(jax.eval_shape(function, *bare))
    return jax.sharding.auto_axes(function, out_sharding=specs)(*arguments)


def replicated(shapes: Any) -> Any:
    """Every result on every device."""
    return jax.tree.map(lambda _: PartitionSpec(), shapes)
