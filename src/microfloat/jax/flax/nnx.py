"""Recipes in Flax nnx: a dot_general module, layers that hold one, and training.

Parameters are untouched. Delayed-scaling state lives in `ScaleState` variables, which no filter for nnx.Param sees;
its gradient is its new value. Examples: docs/jax.md, "nnx".
"""

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce, wraps
from operator import getitem
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax
from jax.typing import DTypeLike

from microfloat.arguments import check_int, check_sizes
from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.jax import scaling
from microfloat.jax.array import check_array
from microfloat.jax.autocast import recipe_here
from microfloat.jax.calls import place, words_of
from microfloat.jax.dot_general import dot_general, einsum
from microfloat.jax.flax.state import SLOT_NAMES, accumulating, check_transformation, collected, step_counts
from microfloat.jax.numerics.dimensions import einsum_by
from microfloat.jax.ragged_dot import RaggedDot as RaggedOp
from microfloat.jax.ragged_dot import check_offset, ragged_dot
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.jax.transformations import as_max_grad, notice_fixed_state
from microfloat.jax.watch import Readings
from microfloat.jax.watch import watch_outputs as watch_pure_outputs
from microfloat.recipes import Recipe

__all__ = [
    "DotGeneral", "Einsum", "EinsumOp", "Linear", "LinearGeneral", "Optimizer", "RaggedDot", "ScaleState", "grad",
    "value_and_grad", "watch_outputs",
]  # fmt: skip

_LOG = logging.getLogger("microfloat")


class ScaleState(nnx.Variable):
    """Delayed-scaling state: never a parameter; its gradient is its new value."""

    is_delayed_scaling_state = True  # a mark for `scaling.microbatched`


# Per module, the memo of `accumulating`. nnx transforms make modules anew; an entry lives no longer than its module.
_MEMOS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


class DotGeneral(nnx.Module):
    """A module that is called like `lax.dot_general` and runs `recipe`; for ``dot_general=`` of nnx layers.

    None is the recipe of the `microfloat.jax.autocast` that the module is called under. Delayed recipes hold six
    `ScaleState` variables, named as in linen. Stochastic recipes draw from the stream ``sr_rng`` of `rngs` (or its
    default stream) unless a call has a ``key=``. `stacked`: the leading axes of a layer whose variables are stacked for
    nnx.scan or nnx.vmap. Further arguments are those of `microfloat.jax.dot_general`.
    """

    _make: Callable[..., Any] = staticmethod(dot_general)
    _scope: str | None = None  # in a watched function the name of the layer, for jax.named_scope

    def __init__(
        self, recipe: Recipe | str | None = None, *, rngs: nnx.Rngs | None = None, stacked: tuple[int, ...] = (),
        **options: Any,
    ) -> None:  # fmt: skip
        self.op = self._make(recipe, **options)
        stacked = check_sizes("stacked", stacked, "a tuple of sizes: the leading axes of stacked variables")
        self.sr_rng: Any = nnx.data(_stream(self.recipe, rngs, stacked))
        if self.recipe is not None and self.recipe.is_delayed:
            fresh = scaling.init(self.recipe)
            for tensor, slot, _ in scaling.slots_of(fresh):
                for kind, leaf in (("scale", slot.scale_enc.reshape(1)), ("amax_history", slot.amax_history)):
                    each = ScaleState(jnp.broadcast_to(leaf, (*stacked, *leaf.shape)))
                    setattr(self, f"{SLOT_NAMES[tensor]}_{kind}", each)

    @property
    def recipe(self) -> Recipe | None:
        """The recipe of this op; None is that of the autocast."""
        return self.op.recipe

    def variables(self) -> dict[str, Any]:
        """The scale and the history of each tensor, as variables; empty for stateless recipes."""
        return self._variables()

    def state(self) -> DelayedState | None:
        """The delayed-scaling state as a pytree, for `microfloat.jax.scaling`."""
        return self._state(lambda _, slot: slot)

    # nnx.tabulate gives every public method that a call enters a row of its own.
    def _variables(self) -> dict[str, Any]:
        return {
            tensor: Slot(getattr(self, f"{name}_scale"), getattr(self, f"{name}_amax_history"))
            for tensor, name in SLOT_NAMES.items()
            if hasattr(self, f"{name}_scale")
        }

    def _state(self, of_slot: Callable[[str, Slot], Slot]) -> DelayedState | None:
        slots = {
            tensor: of_slot(tensor, Slot(*(variable.get_value() for variable in variables)))
            for tensor, variables in self._variables().items()
        }
        return scaling.state_of(slots, scaling.slot_rules(cast(Recipe, self.recipe))) if slots else None

    def __call__(
        self, lhs: Array, rhs: Array, dimension_numbers: Any, precision: object = None,
        preferred_element_type: DTypeLike | None = None, *, out_sharding: object = None, key: Array | None = None,
    ) -> Array:  # fmt: skip
        """``lax.dot_general`` under the recipe; lhs are activations, rhs weights. `precision` is for high precision."""
        memo = _MEMOS.setdefault(self, {})
        recipe, state = recipe_here(self.recipe), self._state(lambda tensor, slot: accumulating(memo, tensor, *slot))
        if recipe is not None and recipe.is_delayed and state is None:
            raise NotSupportedError(
                f"autocast: got {recipe!r} for an nnx layer without its state, needed a stateless recipe. Pin it to "
                "the layers: microfloat.jax.nnx.convert(model, recipe)."
            )
        if recipe is not None and recipe.is_stochastic and key is None and self.sr_rng is not None:
            key = self.sr_rng()
        if state is not None:
            rhs = notice_fixed_state(check_array("rhs", rhs), state)
        options = precision, preferred_element_type
        drawn = {"words": words_of(recipe, key), "state": state, "out_sharding": out_sharding}
        with jax.named_scope(self._scope) if self._scope else contextlib.nullcontext():
            return self.op.with_words(lhs, rhs, dimension_numbers, *options, **drawn)


def _stream(recipe: Recipe | None, rngs: object, stacked: tuple[int, ...]) -> nnx.RngStream | None:
    """The random stream of an op; without a recipe the stream ``sr_rng`` alone, so that no parameter changes."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise invalid_type("rngs", type(rngs), "an nnx.Rngs", "For instance nnx.Rngs(sr_rng=0).")
    if rngs is None or not ("sr_rng" in rngs if recipe is None else recipe.is_stochastic):
        return None
    if "sr_rng" not in rngs and "default" not in rngs:
        streams = ", ".join(name for name, value in vars(rngs).items() if isinstance(value, nnx.RngStream))
        needed = f"a stream sr_rng or a default one for {recipe!r}, which rounds stochastically"
        got = f"an nnx.Rngs with the streams {streams or 'none'}"
        raise invalid_value("rngs", got, needed, "For instance nnx.Rngs(0, sr_rng=1).")
    stream = rngs["sr_rng"]
    return stream.split(stacked) if stacked else stream.fork()


class EinsumOp(DotGeneral):
    """A module called as ``einsum(equation, input, kernel)``; for ``einsum_op=`` of nnx.Einsum."""

    def __call__(  # type: ignore[override]
        self, equation: str, lhs: Array, rhs: Array, precision: object = None,
        preferred_element_type: DTypeLike | None = None, *, out_sharding: object = None, key: Array | None = None,
    ) -> Array:  # fmt: skip
        """The einsum of two operands under the recipe; the first is always the input, the second the kernel."""
        if recipe_here(self.recipe) is None:
            options = {"preferred_element_type": preferred_element_type, "out_sharding": out_sharding}
            return einsum()(equation, lhs, rhs, precision, **options)
        dot = partial(super().__call__, precision=precision, preferred_element_type=preferred_element_type, key=key)
        return place(einsum_by(dot, equation, check_array("lhs", lhs), check_array("rhs", rhs)), out_sharding)


class RaggedDot(DotGeneral):
    """A module called as ``lax.ragged_dot(x_TK, kernels_GKN, group_sizes)``, with a state for each of `num_groups`
    experts.
    """

    _make = staticmethod(ragged_dot)

    def __init__(self, recipe: Recipe | str | None = None, *, num_groups: int, **options: Any) -> None:
        check_int("num_groups", num_groups, 1, 2**31 - 1)
        super().__init__(recipe, **options)
        self.num_groups = num_groups
        for variable in _leaves(self).values():
            value = variable.get_value()
            each = jnp.broadcast_to(value[..., None, :], (*value.shape[:-1], num_groups, value.shape[-1]))
            variable.set_value(each)

    def __call__(  # type: ignore[override]
        self, lhs: Array, rhs: Array, group_sizes: Any, precision: object = None,
        preferred_element_type: DTypeLike | None = None, group_offset: None = None, out_sharding: object = None, *,
        key: Array | None = None,
    ) -> Array:  # fmt: skip
        """``lax.ragged_dot`` under the recipe; lhs are activations, rhs a weight for each expert."""
        check_offset(group_offset)
        options = {"out_sharding": out_sharding, "key": key}
        return super().__call__(lhs, rhs, group_sizes, precision, preferred_element_type, **options)


def grouped_products(module: object) -> list[str]:
    """The attributes in which a module keeps `jax.lax.ragged_dot` or a `ragged_dot` of this library."""
    held = {} if isinstance(module, DotGeneral) else vars(module)
    return [name for name, one in held.items() if one is lax.ragged_dot or isinstance(one, RaggedDot | RaggedOp)]


def name_of_product(path: tuple, attribute: object, products: int) -> str:
    """The name of a product: the name of its module, and its attribute if the module has several products."""
    return ".".join(map(str, path if products < 2 else (*path, attribute)))


def _set(variables: Iterable[nnx.Variable], values: Iterable[Array]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.set_value(value)


class _Layer:
    """The constructor of a layer of Flax with `recipe`, whose op it gets where no product is named."""

    _product: tuple[str, type[DotGeneral]] = ("dot_general", DotGeneral)

    def __init__(self, *sizes: Any, recipe: Recipe | str | None = None, rngs: nnx.Rngs, **options: Any) -> None:
        name, op = self._product
        if options.get(name) is None and options.get("dot_general_cls") is None:
            options[name] = op(recipe, rngs=rngs)
        super().__init__(*sizes, rngs=rngs, **options)  # type: ignore[call-arg]


class Linear(_Layer, nnx.Linear):
    """`flax.nnx.Linear` under `recipe` (None: that of the autocast); same parameters, same names."""


class LinearGeneral(_Layer, nnx.LinearGeneral):
    """`flax.nnx.LinearGeneral` under `recipe`; same parameters, same names."""


class Einsum(_Layer, nnx.Einsum):
    """`flax.nnx.Einsum` under `recipe`; same parameters, same names."""

    _product = ("einsum_op", EinsumOp)


def check_model(model: object) -> None:
    if not isinstance(model, nnx.Module):
        raise invalid_type("model", type(model), "an nnx.Module", "For linen use linen.dot_general_cls.")


# Training


def value_and_grad(f: Callable, *, argnums: int | Sequence[int] = 0, wrt: Any = nnx.Param, **options: Any) -> Callable:
    """``nnx.value_and_grad``, with its options, with respect to `wrt` and the delayed-scaling state of the models at
    `argnums`. State of a layer that is used several times accumulates by maximum.
    """
    return _differentiated(nnx.value_and_grad, f, argnums, wrt, options)


def grad(f: Callable, *, argnums: int | Sequence[int] = 0, wrt: Any = nnx.Param, **options: Any) -> Callable:
    """``nnx.grad`` with respect to `wrt` and the delayed-scaling state; see `value_and_grad`."""
    return _differentiated(nnx.grad, f, argnums, wrt, options)


def _differentiated(transform: Callable, f: Callable, argnums: Any, wrt: Any, options: dict) -> Callable:
    if not callable(f):
        raise invalid_type("f", type(f), "a function of the model")
    numbers = [argnums] if isinstance(argnums, int) else argnums
    if not isinstance(numbers, tuple | list) or not numbers or not all(type(number) is int for number in numbers):
        raise invalid_value("argnums", repr(argnums), "an int or a tuple of ints", "Give the filter as wrt=.")
    states = tuple(nnx.DiffState(number, (wrt, ScaleState)) for number in numbers)

    def accumulating(*args: Any, **kwargs: Any) -> Any:
        ops = [op for number in numbers for _, op in _delayed_ops(args[number])]
        variables = [variable for op in ops for variable in _leaves(op).values()]
        originals = [variable.get_value() for variable in variables]
        _set(variables, map(as_max_grad, originals))
        try:
            return f(*args, **kwargs)
        finally:
            # The cast must not leave the loss function: its dtype exists for the gradient only.
            _set(variables, originals)

    return transform(accumulating, argnums=states[0] if isinstance(argnums, int) else states, **options)


def watch_outputs(fn: Callable[..., Any], *tensors: Any, **options: Any) -> Callable[..., tuple[Any, Readings]]:
    """`microfloat.jax.watch_outputs` of a function of modules, which it may update; layers have their names. Call it
    inside nnx.jit: ``nnx.jit(mnnx.watch_outputs(train_step))(model, optimizer, batch)``.
    """

    @wraps(fn)
    def watched(*arguments: Any, **keywords: Any) -> tuple[Any, Readings]:
        leaves, structure = jax.tree.flatten((arguments, keywords), is_leaf=_is_graph)
        nodes = tuple(leaf for leaf in leaves if _is_graph(leaf))
        graph, state = nnx.split(nodes)

        def pure(state: Any, others: list[Any]) -> tuple[Any, Any]:
            made = nnx.merge(graph, state)
            left, rest = iter(made), iter(others)
            again, more = structure.unflatten([next(left if _is_graph(leaf) else rest) for leaf in leaves])
            ops = {op: name for node in made for op, name in _op_names(node).items()}
            for op, name in ops.items():
                op._scope = name
            result = fn(*again, **more)
            for op in ops:
                del op._scope
            return result, nnx.state(made)

        others = [leaf for leaf in leaves if not _is_graph(leaf)]
        (result, state), readings = watch_pure_outputs(pure, *tensors, **options)(state, others)
        nnx.update(nodes, state)
        return result, readings

    return watched


def _is_graph(value: object) -> bool:
    """True for an object that nnx updates in place."""
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _op_names(module: object) -> dict["DotGeneral", str]:
    """The names of the layers that hold the ops of a module."""
    if not isinstance(module, nnx.Module):
        return {}
    products = {path: len(grouped_products(holder)) for path, holder in nnx.iter_modules(module)}
    found = ((path, op) for path, op in nnx.iter_modules(module) if isinstance(op, DotGeneral))
    return {op: name_of_product(path[:-1], path[-1], products.get(path[:-1], 0)) for path, op in found}


class Collected(nnx.Variable):
    """The largest gradient of a delayed-scaling variable since the optimizer's last step."""


class Optimizer(nnx.Optimizer):
    """`flax.nnx.Optimizer` that also advances the delayed-scaling state: same constructor and methods.

    ``update(model, grads)`` sends the gradients that `wrt` selects to optax, and those of `ScaleState` to the consumer
    rule of `microfloat.jax.scaling.apply`. Gradients without that state log a warning: the scales would never move.
    Under ``optax.MultiSteps`` the state advances when the optimizer steps, by the largest amax of its microbatches.
    """

    def __init__(self, model: nnx.Module, tx: Any, *, wrt: Any = nnx.Param, **options: Any) -> None:
        check_model(model)
        check_transformation(tx)
        super().__init__(model, tx, wrt=wrt, **options)
        # Variable names of the delayed ops -> the largest gradients since the last step.
        self.collected = nnx.data({})
        if step_counts(self.opt_state):
            for name, op in _delayed_ops(model):
                for leaf, variable in _leaves(op).items():
                    self.collected[_key(name, leaf)] = Collected(jnp.zeros_like(variable.get_value()))

    def update(self, model: nnx.Module, grads: Any, /, **kwargs: Any) -> Any:
        """One step; `grads` comes from `value_and_grad` or `grad` of this module."""
        check_model(model)
        if not isinstance(grads, Mapping) or not grads:
            got = type(grads) if not isinstance(grads, Mapping) else "no gradient"
            raise invalid_type("grads", got, "what value_and_grad or grad of this module returned")
        before = self._step_counts()
        updates = super().update(model, grads, **kwargs)
        missing = [name for name, op in _delayed_ops(model) if not self._advance(op, grads, name, before)]
        if missing:
            _LOG.warning(
                "the gradients hold no delayed-scaling state for %s: scales do not move. "
                "Use microfloat.jax.nnx.value_and_grad, or nnx.DiffState(0, (nnx.Param, ScaleState)).",
                ", ".join(".".join(map(str, name)) for name in missing),
            )
        return updates

    def _step_counts(self) -> list[Array]:
        return [count.get_value() for count in step_counts(self.opt_state)]

    def _advance(self, op: DotGeneral, grads: Any, path: tuple, before: list[Array]) -> bool:
        """Advance one op's state by its gradient; False if `grads` does not hold it. `before`: counts of steps."""
        variables = _leaves(op)
        try:
            found = [reduce(getitem, (*path, leaf), grads) for leaf in variables]
        except KeyError:
            return False
        old = cast(DelayedState, op.state())  # the recipe is delayed
        # The variables are the leaves of the state, in this order.
        structure = jax.tree.structure(old)
        gradient = structure.unflatten([one.get_value() if isinstance(one, nnx.Variable) else one for one in found])
        if not before:
            after = scaling.apply(old, gradient)
        else:
            held = [self.collected[_key(path, leaf)] for leaf in variables]
            largest = structure.unflatten(variable.get_value() for variable in held)
            after, largest = collected(scaling.apply, old, gradient, largest, before, self._step_counts())
            _set(held, jax.tree.leaves(largest))
        _set(variables.values(), jax.tree.leaves(after))
        return True


def _delayed_ops(model: nnx.Module) -> list[tuple[tuple, DotGeneral]]:
    ops = ((path, module) for path, module in nnx.iter_modules(model) if isinstance(module, DotGeneral))
    return [(path, op) for path, op in ops if op.variables()]


def _leaves(op: DotGeneral) -> dict[str, ScaleState]:
    """The state variables of an op by name."""
    names = [f"{name}_{kind}" for name in SLOT_NAMES.values() for kind in ("scale", "amax_history")]
    return {name: getattr(op, name) for name in names if hasattr(op, name)}


def _key(path: tuple, leaf: str) -> str:
    return ".".join(map(str, (*path, leaf)))
