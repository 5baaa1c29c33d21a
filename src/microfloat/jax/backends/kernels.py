"""Where Triton kernels can be called from JAX, and a wrapper for what calls one.

Kernels serve matrices that lie on one CUDA device as a whole: with one device, under a mesh of one, or inside shard_map
(over several devices they wait for `SEEN_ON_SEVERAL_DEVICES`). XLA would gather what it has sharded before it calls a
kernel it knows nothing about.

Source: docs/jax.md, "What casts on a GPU".
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import AxisType

from microfloat.jax.backends import cuda
from microfloat.jax.transformations import in_common_variance, like_in_variance
from microfloat.passes import family_of
from microfloat.recipes import Cast

__all__ = ["is_local", "on_either", "why_no_kernel", "why_none_here"]

# Smaller matrices are left to XLA's operations: compiling a kernel for them takes longer than they ever cost.
SMALLEST = 1 << 16
# Whether kernels run inside shard_map over several devices. They are lowered there in the tests, and wait for a first
# run on two GPUs: `test_transformations_with_kernels`.
SEEN_ON_SEVERAL_DEVICES = False


def why_none_here(shape: Sequence[int] | None = None) -> str:
    """Why no kernel is called for a matrix of this shape (None: one large enough), or "" where one can be."""
    capability = cuda.capability()
    if capability is None:
        return "no CUDA device"
    from microfloat.jax.backends.triton import _launch

    if missing := _launch.why_unavailable(capability):
        return missing
    if not is_local():
        return "several devices or a mesh: XLA shards its own operations only"
    return _why_too_small(shape)


def _why_too_small(shape: Sequence[int] | None) -> str:
    is_small = shape is not None and int(np.prod(shape, dtype=np.int64)) < SMALLEST
    return f"fewer than {SMALLEST} elements" if is_small else ""


def why_no_kernel(
    cast: Cast, shape: Sequence[int] | None = None, backend: str = "auto", *, elsewhere: bool = False
) -> str:
    """Why XLA's operations cast a matrix of this shape, or "" where a kernel does.

    `elsewhere`: on a machine with one GPU that has all packages, instead of this one.
    """
    if backend == "reference":
        return "backend='reference'"
    if reason := _why_too_small(shape) if elsewhere else why_none_here(shape):
        return reason
    family, refusal = family_of(cast)
    if refusal:
        return f"no kernel for {refusal}"
    return "its Hadamard transform has no kernel" if cast.hadamard is not None and family != "nvfp4" else ""


def is_local() -> bool:
    """Whether arrays lie on one device as a whole where this is traced: one device, or all of a mesh is manual."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.axis_names:
        return jax.device_count() == 1
    if mesh.size == 1:
        return True
    return SEEN_ON_SEVERAL_DEVICES and all(kind == AxisType.Manual for kind in mesh.axis_types)


def on_either(by_kernel: Callable[..., Any], by_xla: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a kernel where the program is lowered for CUDA, and does the same by XLA's operations
    elsewhere and for a batch of matrices. Arguments and results are pytrees of arrays.
    """

    def marked(way: Callable[..., Any], *arguments: Any) -> Any:
        # Inside shard_map both ways must agree on what varies over the mesh: all results, if any argument does.
        given = jax.tree.leaves(arguments)
        return jax.tree.map(lambda leaf: like_in_variance(leaf, in_common_variance(*given)[0]), way(*arguments))

    @custom_vmap
    def function(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, cuda=partial(marked, by_kernel), default=partial(marked, by_xla))

    @function.def_vmap
    def _batched(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        del axis_size
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        results = jax.vmap(by_xla, in_axes=tuple(axes))(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return cast(Callable[..., Any], function)
