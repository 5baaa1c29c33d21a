"""Support for JAX's transformations: mesh axes, explicit meshes, gradients that add up by maximum (docs/jax.md)."""

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from microfloat.errors import NotSupportedError, missing_package

_Tree = TypeVar("_Tree")


# Mesh axes inside shard_map, and batches


def varying_axes(*arrays: Array) -> frozenset[str]:
    """The manual mesh axes over which any array differs between devices, known under ``shard_map(check_vma=True)``."""
    axes: set[str] = set()
    for kind in map(jax.typeof, arrays):  # a newer JAX and an older one
        axes.update(getattr(getattr(kind, "manual_axis_type", None), "varying", ()) or getattr(kind, "vma", ()))
    return frozenset(axes)


def told_axes(axis_names: Sequence[str]) -> frozenset[str]:
    """The names among `axis_names` that are bound here: a module is initialised outside of shard_map."""
    bound = set()
    for name in axis_names:
        try:
            lax.axis_size(name)
            bound.add(name)
        except NameError:  # JAX's answer for an axis that is not bound
            pass
    return frozenset(bound)


def sharding_axes(x: Array, axis_names: Sequence[str]) -> frozenset[str]:
    """Mesh axes that shard `x`: its varying axes, else the names in `axis_names` that are bound here."""
    return varying_axes(x) or told_axes(axis_names)


def max_over(value: Array, axes: frozenset[str] | Sequence[str]) -> Array:
    """The maximum of `value` over mesh axes; `value` itself without axes."""
    return lax.pmax(value, tuple(sorted(axes))) if axes else value


def sum_to_type_of(cotangent: Array, primal: Array) -> Array:
    """A cotangent in its primal's dtype, summed before that over mesh axes along which the primal is the same."""
    axes = varying_axes(cotangent) - varying_axes(primal)
    return (lax.psum(cotangent, tuple(sorted(axes))) if axes else cotangent).astype(primal.dtype)


def like_in_variance(value: Array, *like: Array) -> Array:
    """`value`, marked as varying over the mesh axes over which any of `like` varies."""
    missing = varying_axes(*like) - varying_axes(value)
    return lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value


def in_common_variance(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each marked as varying over the mesh axes over which any of them varies: loops carry one type."""
    return tuple(like_in_variance(value, *arrays) for value in arrays)


def on_first_device(value: Array, axes: frozenset[str]) -> Array:
    """`value` on the device of index 0 along all of `axes`, zeros elsewhere."""
    is_first = sum(lax.axis_index(axis) for axis in sorted(axes)) == 0
    return jnp.where(is_first, value, jnp.zeros_like(value))


@custom_vmap
def once(value: Array, state: Array) -> Array:
    """`value`, the cotangent of `state`; under vmap over everything but the state, the maximum over the batch. JAX
    would sum the cotangents of an operand that is not batched. A batched state keeps one value per entry."""
    del state
    return value


@once.def_vmap
def _once_batched(axis_size: int, in_batched: Sequence[bool], value: Array, state: Array) -> tuple[Array, bool]:
    del axis_size
    value_batched, state_batched = in_batched
    if state_batched:
        return value, value_batched
    return once(jnp.max(value, axis=0) if value_batched else value, state), False


def batched_by(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule of a `custom_vmap` function whose batches go by `function`, under JAX's own vmap."""

    def rule(axis_size: int, in_batched: Any, *arguments: Any) -> tuple[Any, Any]:
        axes = jax.tree.map(lambda batched: 0 if batched else None, in_batched)
        results = jax.vmap(function, in_axes=tuple(axes), axis_size=axis_size)(*arguments)
        return results, jax.tree.map(lambda _: True, results)

    return rule


def by_maximum(value: Array, leaf: Array, told: frozenset[str] = frozenset()) -> Array:
    """The cotangent of a leaf of state, which is its new value. `told`: mesh axes that JAX cannot see, over which it
    sums the cotangent: one device contributes."""
    # A derivative of a gradient does not go through `once`, which has none.
    value = like_in_variance(once(*lax.stop_gradient((value, from_max_grad(leaf)))), leaf)
    return lax.convert_element_type(on_first_device(value, told) if told else value, leaf.dtype)


# Meshes with explicit axis types: JAX cannot type the reshapes of a blocked cast, so casts and GEMMs run under
# automatic sharding. Codes and scales are sharded as their operand is, a product as `lax.dot_general` shards it.


def explicit_mesh(*arrays: Array) -> AbstractMesh | None:
    """The mesh with explicit axes on which one of the arrays lives; None without one."""
    meshes = (jax.typeof(array).sharding.mesh for array in arrays)
    return next((mesh for mesh in meshes if AxisType.Explicit in mesh.axis_types), None)


def spec_of(array: Array) -> tuple:
    """The partition of every axis of `array`, padded to its rank."""
    spec = tuple(jax.typeof(array).sharding.spec)
    return spec + (None,) * (array.ndim - len(spec))


def sharding_of(array: Array, order: Sequence[int]) -> NamedSharding | None:
    """The sharding of `array` with its axes in another order; None off a mesh with explicit axes."""
    mesh = explicit_mesh(array)
    return None if mesh is None else NamedSharding(mesh, PartitionSpec(*(spec_of(array)[axis] for axis in order)))


def spec_of_product(lhs: Any, rhs: Any, dimension_numbers: Any, out_sharding: object = None) -> PartitionSpec:
    """The partition that `lax.dot_general` gives the product of two operands, whose shapes and shardings are read."""
    kinds = [jax.ShapeDtypeStruct(one.shape, jnp.float32, sharding=one.sharding) for one in (lhs, rhs)]
    plain = partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
    (product,) = jax.make_jaxpr(plain)(*kinds).out_avals
    return product.sharding.spec


def distinct(spec: Sequence[Any]) -> PartitionSpec:
    """`spec` without the mesh axes that an earlier axis of the array has."""
    taken: set[str | None] = {None}
    kept = []
    for axis in spec:
        names = tuple(name for name in (axis if isinstance(axis, tuple) else (axis,)) if name not in taken)
        taken.update(names)
        kept.append(names if len(names) > 1 else next(iter(names), None))
    return PartitionSpec(*kept)


def rows_apart(array: Array, **_: Any) -> PartitionSpec:
    """The partition of a result whose rows are made from rows of `array`, each on one device."""
    return PartitionSpec(*spec_of(array)[:-1], None)


def divided(spec: tuple, shape: tuple[int, ...], array: Array) -> PartitionSpec:
    """`spec` on the mesh of `array`, without the mesh axes that do not cut their axis of `shape` evenly."""
    sizes = jax.typeof(array).sharding.mesh.shape

    def kept(axis: Any, size: int) -> Any:
        names = axis if isinstance(axis, tuple) else () if axis is None else (axis,)
        return axis if size and size % math.prod(sizes[name] for name in names) == 0 else None

    return PartitionSpec(*map(kept, spec, shape))


def run_automatically(function: Callable, out_specs: Callable, *arguments: Any, **static: Any) -> Any:
    """``function(*arguments, **static)``, with the explicit axes of its arguments' mesh under automatic sharding.
    ``out_specs(*arguments, **static)`` gives the partitions of its results. Both functions hash by value: eager calls
    trace once.
    """
    if explicit_mesh(*jax.tree.leaves(arguments)) is None:
        return function(*arguments, **static)
    return _automatically(*arguments, function=function, out_specs=out_specs, static=tuple(static.items()))


# Under jit also where a call is eager: the context of an eager call does not say on which devices its mesh lies.
@partial(jax.jit, static_argnames=("function", "out_specs", "static"))
def _automatically(
    *arguments: Any, function: Callable[..., Any], out_specs: Callable[..., Any], static: tuple[tuple[str, Any], ...]
) -> Any:  # fmt: skip
    options = dict(static)
    mesh = cast(AbstractMesh, explicit_mesh(*jax.tree.leaves(arguments)))
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit)
    # The mesh is named with every result, since the caller need not have entered it (`jax.set_mesh`).
    specs, is_spec = out_specs(*arguments, **options), lambda spec: isinstance(spec, PartitionSpec)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    return jax.sharding.auto_axes(partial(function, **options), axes=axes, out_sharding=shardings)(*arguments)


# Identities that say something where JAX differentiates through them


def no_derivative(message: str) -> Callable[[_Tree], _Tree]:
    """An identity over a pytree, for use under jit; differentiating it, in any mode, is NotSupportedError(message)."""

    @jax.custom_jvp
    def identity(tree: _Tree) -> _Tree:
        return tree

    @identity.defjvp
    def refuse(_primals: tuple, _tangents: tuple) -> NoReturn:
        raise NotSupportedError(message)

    return identity


@jax.custom_jvp
def straight_through(exact: Array, plain: Array) -> Array:
    """`exact`, differentiated as `plain` is: bits have no derivative."""
    del plain
    return exact


straight_through.defjvp(lambda primals, tangents: (straight_through(*primals), tangents[1].astype(primals[0].dtype)))


@jax.custom_vjp
def notice_fixed_state(w: Array, state: Any) -> Array:
    """`w`; a warning where a gradient is taken of w and of no leaf of the delayed-scaling state."""
    del state
    return w


def _notice_forward(w: Any, state: Any) -> tuple[Array, None]:
    leaves = jax.tree.leaves(state, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    if w.perturbed and not any(leaf.perturbed for leaf in leaves):
        warnings.warn(
            "a gradient is taken with respect to parameters but not to the delayed-scaling state: its scales never "
            "move. In nnx use microfloat.jax.nnx.grad (or value_and_grad) and microfloat.jax.nnx.Optimizer; in linen "
            "differentiate with respect to all variables (microfloat.jax.linen.TrainState). If the scales are to stay "
            "as they are, filter this warning.",
            stacklevel=2,
        )
    return w.value, None


notice_fixed_state.defvjp(
    _notice_forward, lambda _, g: (None if isinstance(g, SymbolicZero) else g, None), symbolic_zeros=True
)


# The dtype whose cotangents add up by their maximum: float32 in memory, ``add(x, y) = max(x, y)``. An operand that is
# cast to it once, outside of all its uses, hands back the maximum of all contributions, where float32 would hand back
# the sum. It is Flax's, which keeps up with the private parts of JAX that such a dtype rests on.


@functools.cache
def max_grad_dtype() -> Any:
    """Flax's `fp32_max_grad`; MissingPackageError without Flax."""
    try:
        from flax.linen.fp8_ops import fp32_max_grad
    except ModuleNotFoundError:
        raise missing_package("flax", "A state that is cast to accumulate by maximum", "jax") from None
    try:
        from jax._src.ad_util import raw_jaxval_adders
        from jax._src.earray import EArray
    except ImportError:  # a JAX that has moved them; gradients under jit do without
        return fp32_max_grad
    # Autodiff outside of jit looks adders up by the class of array, and JAX registers none for this class.
    raw_jaxval_adders.setdefault(EArray, lambda x, y: x.dtype._rules.add(x.dtype, x, y))
    return fp32_max_grad


def is_max_grad(x: Array) -> bool:
    """True if `x` is of the dtype of `as_max_grad`."""
    return getattr(getattr(x, "dtype", None), "name", "") == "fp8_meta32"


def as_max_grad(x: Array) -> Array:
    """`x` as the dtype whose cotangents add up by their maximum."""
    return lax.convert_element_type(x, max_grad_dtype())


def from_max_grad(x: Array) -> Array:
    """`x`, a float32 array or one of the dtype of `as_max_grad`, as float32."""
    return lax.convert_element_type(x, jnp.float32)
