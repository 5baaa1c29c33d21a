"""Recipes in Flax linen: dot_general and einsum classes to inject, layers that inject them, and the training state.

    nn.Dense(features, dot_general_cls=linen.dot_general_cls(NVFP4BlockScaling()))

Parameter trees do not change. Delayed scaling adds the collection ``_overwrite_with_gradient``, whose gradient is
its new value; stochastic recipes read the random stream ``sr_rng`` (``rngs={"sr_rng": key}``).
"""

import functools
import traceback
from collections.abc import Callable, Mapping
from typing import Any, cast

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import core as flax_core
from flax.training import train_state
from jax import Array
from jax.typing import DTypeLike

from microfloat.errors import NotSupportedError, invalid_type
from microfloat.jax.array import check_array
from microfloat.jax.autocast import get_autocast_recipe, recipe_here
from microfloat.jax.calls import place, words_of
from microfloat.jax.dot_general import DotGeneral, dot_general, einsum
from microfloat.jax.flax import state as flax_state
from microfloat.jax.flax.state import OVERWRITE_WITH_GRADIENT, SLOT_NAMES, StateVariables, max_accumulate
from microfloat.jax.numerics.dimensions import DimensionNumbers, einsum_by
from microfloat.jax.ragged_dot import RaggedDot, check_offset, ragged_dot
from microfloat.jax.scaling import DelayedState, slot_rules
from microfloat.jax.transformations import notice_fixed_state
from microfloat.operands import TENSORS
from microfloat.recipes import Recipe

__all__ = [
    "Dense", "DenseGeneral", "MultiHeadDotProductAttention", "MultiSteps", "TrainState", "dot_general_cls",
    "einsum_cls", "max_accumulate", "overwrite_with_gradient", "ragged_dot_cls",
]  # fmt: skip

SR_STREAM = "sr_rng"


def dot_general_cls(recipe: Recipe | str | None = None, **options: Any) -> type[nn.Module]:
    """A linen module class for every place where Flax takes ``dot_general_cls=``; called like `lax.dot_general`.

    None is the recipe of the `microfloat.jax.autocast` that the module is called under. `options` are those of
    `microfloat.jax.dot_general`. Equal recipes and options give the same class, named after the recipe, for example
    ``MXFP8BlockScalingOp``, or ``DelayedScalingOp`` where it can hold state, so that state that was made under an
    autocast serves a pinned recipe too. Raises InvalidTypeError for anything but a Recipe or its name.
    """
    return _op_class(dot_general(recipe, **options), "Op")


def einsum_cls(recipe: Recipe | str | None = None, **options: Any) -> type[nn.Module]:
    """A linen module class for einsums of two operands: ``cls()(equation, input, kernel)``."""
    return _op_class(dot_general(recipe, **options), "Einsum")


def ragged_dot_cls(recipe: Recipe | str | None = None, **options: Any) -> type[nn.Module]:
    """A linen module class for layers of experts, as `lax.ragged_dot`: ``cls()(x_TK, kernels_GKN, group_sizes)``."""
    return _op_class(ragged_dot(recipe, **options), "RaggedDot")


@functools.cache
def _op_class(op: DotGeneral | RaggedDot, kind: str) -> type[nn.Module]:
    @nn.compact
    def call(
        self: Any, lhs: Array, rhs: Array, dimension_numbers: Any, precision: object = None,
        preferred_element_type: DTypeLike | None = None, *_: object, **__: object,
    ) -> Array:  # fmt: skip
        """lax.dot_general under the recipe; `precision` is for high precision, others are ignored."""
        return _run(self, op, dimension_numbers, precision, preferred_element_type, lhs, rhs)

    @nn.compact
    def ragged_call(
        self: Any, lhs: Array, rhs: Array, group_sizes: Any, precision: object = None,
        preferred_element_type: DTypeLike | None = None, group_offset: None = None, out_sharding: Any = None,
    ) -> Array:  # fmt: skip
        """lax.ragged_dot under the recipe; `precision` is for high precision."""
        check_offset(group_offset)
        return place(_run(self, op, group_sizes, precision, preferred_element_type, lhs, rhs), out_sharding)

    @nn.compact
    def einsum_call(
        self: Any, equation: str, lhs: Array, rhs: Array, precision: object = None,
        preferred_element_type: DTypeLike | None = None, **_: object,
    ) -> Array:  # fmt: skip
        """The einsum under the recipe; the first operand is the input, the second the kernel."""
        if recipe_here(op.recipe) is None and (op.recipe is None or not op.recipe.is_delayed):
            return einsum()(equation, lhs, rhs, precision, preferred_element_type)

        def dot(lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers) -> Array:
            return _run(self, op, dimension_numbers, precision, preferred_element_type, lhs, rhs)

        return einsum_by(dot, equation, check_array("lhs", lhs), check_array("rhs", rhs))

    # The state of delayed scaling has this name, under a pinned recipe and under an autocast.
    holds_state = op.recipe is None or op.recipe.is_delayed
    name = f"{'DelayedScaling' if holds_state else type(op.recipe).__name__}{kind}"
    function = {"Op": call, "Einsum": einsum_call, "RaggedDot": ragged_call}[kind]
    function.__name__ = "__call__"  # Flax looks methods up by this name: interceptors, tabulate, intermediates
    members = {"__call__": function, "__module__": __name__, "__doc__": f"{kind} under {op.recipe!r}."}
    return type(name, (nn.Module,), members)


def _run(
    module: nn.Module, op: DotGeneral | RaggedDot, third: Any, precision: Any, dtype: DTypeLike | None, lhs: Array,
    rhs: Array,
) -> Array:  # fmt: skip
    """``op(lhs, rhs, third)`` with the module's random stream and, under delayed scaling, its state variables."""
    recipe, key = get_autocast_recipe() if op.recipe is None else op.recipe, None
    if recipe is not None and recipe.is_stochastic and module.has_rng(SR_STREAM):
        key = module.make_rng(SR_STREAM)
    words, state = words_of(recipe, key), None
    if recipe is not None and recipe.is_delayed:
        rules = slot_rules(recipe)
        if not (module.is_initializing() or module.has_variable(OVERWRITE_WITH_GRADIENT, "input_scale")):
            raise NotSupportedError(
                f"recipe: got an apply under {recipe!r} of variables without its state, needed variables that "
                "model.init made under the same recipe. Pin the recipe to the layer, or initialise under the autocast."
            )
        length = max(rule.delayed.amax_history_len for rule in rules if rule is not None)
        variables = StateVariables(module, length, np.shape(rhs)[:1] if isinstance(op, RaggedDot) else ())
        names = [SLOT_NAMES[tensor] if rule else None for tensor, rule in zip(TENSORS, rules, strict=True)]
        state = DelayedState(*(variables.current(name) if name else None for name in names), rules=rules)
        rhs = notice_fixed_state(check_array("rhs", rhs), state)
    return op.with_words(lhs, rhs, third, precision, dtype, words=words, state=state)


class _Injected:
    """A layer gets its recipe's op (without one the autocast's) where neither a class nor a function is set."""

    def __post_init__(self) -> None:
        for name in ("dot_general_cls", "qkv_dot_general_cls", "out_dot_general_cls"):
            if getattr(self, name, 0) is None and getattr(self, name.removesuffix("_cls")) is None:
                object.__setattr__(self, name, dot_general_cls(self.recipe))  # type: ignore[attr-defined]
        super().__post_init__()  # type: ignore[misc]


class Dense(_Injected, nn.Dense):
    """`flax.linen.Dense` under `recipe` (None: that of the autocast); same parameters, same names."""

    recipe: Recipe | str | None = None


class DenseGeneral(_Injected, nn.DenseGeneral):
    """`flax.linen.DenseGeneral` under `recipe`; same parameters, same names."""

    recipe: Recipe | str | None = None


class MultiHeadDotProductAttention(_Injected, nn.MultiHeadDotProductAttention):
    """Flax's attention with its four projections under `recipe`; the attention itself is untouched."""

    recipe: Recipe | str | None = None


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` that knows delayed-scaling state; same constructor and methods.

    `params` may be all variables of the model: the optimizer sees ``params["params"]`` only, the state collection
    advances by the consumer rule (docs/jax.md), under ``tx=optax.MultiSteps(...)`` at a step of the optimizer, by the
    largest amax of its microbatches, and every other collection (batch_stats) keeps its value. `apply_fn` accumulates
    state by maximum over all uses in one call; for several calls pass it ``max_accumulate(variables)``, made once.
    """

    def apply_gradients(self, *, grads: Any, **kwargs: Any) -> "TrainState":
        """One optimizer step; `grads` has the structure of `params`."""
        if not _has_state(self.params):
            return super().apply_gradients(grads=grads, **kwargs)
        params, collection = self.params["params"], self.params[OVERWRITE_WITH_GRADIENT]
        inner = self.opt_state.inner if isinstance(self.opt_state, flax_state.Collected) else self.opt_state
        updates, inner_after = self.tx.update(grads["params"], inner, params)
        collection, opt_state = _advanced(collection, grads[OVERWRITE_WITH_GRADIENT], self.opt_state, inner_after)
        stepped = jax.tree.map(lambda value, update: (value + update).astype(value.dtype), params, updates)
        advanced = {"params": stepped, OVERWRITE_WITH_GRADIENT: collection}
        return self.replace(step=self.step + 1, params=_replaced(self.params, advanced), opt_state=opt_state, **kwargs)

    @classmethod
    def create(cls, *, apply_fn: Callable, params: Any, tx: Any, **kwargs: Any) -> "TrainState":
        """A state at step 0; `apply_fn` is usually ``model.apply``."""
        flax_state.check_transformation(tx)
        state = super().create(apply_fn=_accumulating(apply_fn), params=params, tx=tx, **kwargs)
        if not _has_state(params):
            return state
        return state.replace(opt_state=flax_state.collecting(state.opt_state, params[OVERWRITE_WITH_GRADIENT]))


def _advanced(collection: Any, gradient: Any, before: Any, inner: Any) -> tuple[Any, Any]:
    """(the state collection, the optimizer's state) after one gradient; `inner`: the optimizer's result."""
    if not isinstance(before, flax_state.Collected):
        return flax_state.next_state(collection, gradient), inner
    counts = flax_state.step_counts(before.inner), flax_state.step_counts(inner)
    after, largest = flax_state.collected(flax_state.next_state, collection, gradient, before.largest, *counts)
    return after, flax_state.Collected(inner, largest)


def _has_state(variables: Any) -> bool:
    return isinstance(variables, Mapping) and OVERWRITE_WITH_GRADIENT in variables


def _replaced(variables: Mapping[str, Any], new: dict[str, Any]) -> Any:
    """A copy of a mapping with some collections replaced, in the order of before."""
    merged = {name: new.get(name, value) for name, value in variables.items()}
    return flax_core.freeze(merged) if isinstance(variables, flax_core.FrozenDict) else merged


def _accumulating(apply_fn: Callable | None) -> Callable | None:
    if apply_fn is None:  # a state that is only saved and restored
        return None
    if not callable(apply_fn):
        raise invalid_type("apply_fn", type(apply_fn), "a function such as model.apply")

    @functools.wraps(apply_fn)
    def apply(variables: Any, *args: Any, **kwargs: Any) -> Any:
        return apply_fn(max_accumulate(variables) if _has_state(variables) else variables, *args, **kwargs)

    return apply


def overwrite_with_gradient(tx: Any) -> Any:
    """An optax transformation for custom loops: state advances by the consumer rule, everything else goes through `tx`.

    The update of the state collection is ``new - old``; `opt_state` holds nothing for it. `update` needs `params`.
    Around ``optax.MultiSteps`` the state advances when the optimizer steps, by the largest amax of its microbatches.
    Inside of one, which averages, or of ``optax.chain``, it is refused: write `MultiSteps` of this module.
    """
    tx = tx.gradient_transformation() if hasattr(tx, "gradient_transformation") else tx
    flax_state.check_transformation(tx)

    def others(tree: Any) -> dict[str, Any]:
        if not isinstance(tree, Mapping):
            raise invalid_type("params", type(tree), "a mapping of collections, as model.init returns it")
        return {name: value for name, value in tree.items() if name != OVERWRITE_WITH_GRADIENT}

    def init(params: Any) -> Any:
        rest = others(params)
        if OVERWRITE_WITH_GRADIENT not in params:
            return tx.init(rest)
        _check_outermost()
        return flax_state.collecting(tx.init(rest), params[OVERWRITE_WITH_GRADIENT])

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        if params is None:
            raise invalid_type("params", "None", "the variables: the new state follows from the old one")
        inner = state.inner if isinstance(state, flax_state.Collected) else state
        rest, new_state = tx.update(others(updates), inner, others(params), **extra)
        if OVERWRITE_WITH_GRADIENT in updates:
            old = params[OVERWRITE_WITH_GRADIENT]
            new, new_state = _advanced(old, updates[OVERWRITE_WITH_GRADIENT], state, new_state)
            rest = {**rest, OVERWRITE_WITH_GRADIENT: jax.tree.map(lambda after, before: after - before, new, old)}
        return _replaced(updates, rest), new_state

    return type(tx)(init, update)


# The code of the closures by which optax initialises a chain; all chains share it.
_CHAINS: list[Any] = [optax.chain(optax.identity()).init, optax.named_chain(("", optax.identity())).init]


def _check_outermost() -> None:
    """NotSupportedError where optax.MultiSteps or a chain initialises this: they would change the state's gradient."""
    callers = [frame.f_code for frame, _ in traceback.walk_stack(None)]
    if optax.MultiSteps.init.__code__ in callers:
        raise NotSupportedError(
            "overwrite_with_gradient: got optax.MultiSteps around it, which averages amaxes, needed their maximum. "
            "Write microfloat.jax.linen.MultiSteps, or overwrite_with_gradient(optax.MultiSteps(tx, k))."
        )
    if any(init.__code__ in callers for init in _CHAINS):
        raise NotSupportedError(
            "overwrite_with_gradient: got optax.chain around it, whose other transformations would change the state "
            "too, needed it outermost. Write overwrite_with_gradient(optax.chain(...))."
        )


class MultiSteps(optax.MultiSteps):
    """`optax.MultiSteps` for variables with delayed-scaling state; same constructor, `init`, `update` and state.

    The state advances when the optimizer steps, once, by the largest amax of all microbatches. `opt` may be any
    transformation, `overwrite_with_gradient` or a chain of it included.
    """

    @property
    def _whole(self) -> Any:
        return overwrite_with_gradient(optax.GradientTransformationExtraArgs(super().init, cast(Any, super().update)))

    def init(self, params: Any) -> Any:
        """The state of `optax.MultiSteps` for everything but the state collection, and the largest amaxes beside it."""
        return self._whole.init(params)

    def update(self, updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        """Updates that are zero until the last microbatch of a step; `params` are the variables."""
        return self._whole.update(updates, state, params, **extra)

    def has_updated(self, state: Any) -> Any:
        """True if the optimizer has stepped with the last microbatch."""
        return super().has_updated(state.inner if isinstance(state, flax_state.Collected) else state)
