"""`dot_general(recipe)`: lax.dot_general with the recipe's three GEMMs.

    fprop: y_MN  = cast(x, K) . cast(w, K)
    dgrad: dx_MK = cast(dy, N) . cast(w, N)
    wgrad: dw_NK = cast(dy, M) . cast(x, M)

lhs is x, rhs is w. Shapes: M free axes of lhs, N free axes of rhs, K contracted axes, each merged into one in the
order given; every entry of the batch dimensions is a matrix of its own. Source: docs/numerics.md 6, docs/jax.md.
"""

from dataclasses import dataclass
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding
from jax.typing import DTypeLike

from microfloat.arguments import check_choice
from microfloat.errors import invalid_type, invalid_value
from microfloat.jax import _explicit, scaling
from microfloat.jax._dimensions import DimensionNumbers, DotDimensions, canonical_dimensions, parse_einsum
from microfloat.jax._linear import Config, Seed, amax_carrier, linear, live_amax
from microfloat.jax.numerics.random import call_seed
from microfloat.jax.ops import check_array, check_backend, check_dtype, real_array
from microfloat.jax.scaling import DelayedState, Slot
from microfloat.recipes import Recipe
from microfloat.recipes.names import as_recipe

__all__ = ["DotGeneral", "Einsum", "dot_general", "einsum"]


def dot_general(
    recipe: Recipe | str, *, backend: str = "auto", axis_names: tuple[str, ...] = (), residuals: str = "low"
) -> "DotGeneral":
    """An op with the signature of `lax.dot_general` that runs `recipe` (or the stock recipe of that name).

    `backend`: "auto", "reference" or "native". `axis_names`: under ``shard_map(check_vma=False)``, the mesh axes
    that shard the operands (otherwise JAX knows them). `residuals`: "low" keeps quantized operands for the
    backward, "high" the originals. Ops made from equal arguments are equal and hash equal, so they do not retrace.
    """
    recipe = as_recipe(recipe)
    check_choice("residuals", residuals, ("low", "high"))
    if isinstance(axis_names, str):
        axis_names = (axis_names,)
    if not isinstance(axis_names, tuple | list) or not all(isinstance(name, str) for name in axis_names):
        raise invalid_type("axis_names", repr(axis_names), "a tuple of names of mesh axes")
    return DotGeneral(recipe, check_backend(backend), tuple(axis_names), residuals)


@dataclass(frozen=True)
class DotGeneral:
    """What `dot_general` returns: frozen, hashable, callable."""

    recipe: Recipe
    backend: str = "auto"
    axis_names: tuple[str, ...] = ()
    residuals: str = "low"

    def __call__(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
        state: DelayedState | None = None,
        key: Array | None = None,
        seed: Array | int | None = None,
    ) -> Array:
        """``lax.dot_general(lhs, rhs, dimension_numbers)`` under the recipe; lhs are activations, rhs weights.

        Returns lhs's dtype, or `preferred_element_type`; gradients have the dtypes of their operands. `precision`
        is accepted and ignored: the recipe's `accumulate` decides. Delayed scaling needs `state` (its gradient is
        the new state), stochastic rounding `key`, or `seed`, the call seed itself; without one a recipe that rounds
        only gradients stochastically runs forward. Raises errors of microfloat.errors at trace time, among them
        NotSupportedError for a derivative of a gradient.
        """
        del precision
        words = self._words(seed, key)
        y, _ = self.threaded(lhs, rhs, dimension_numbers, preferred_element_type, words, state, out_sharding)
        return y

    def threaded(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        preferred_element_type: DTypeLike | None,
        words: Array | np.ndarray | None,
        state: DelayedState | None,
        out_sharding: object = None,
    ) -> tuple[Array, DelayedState | None]:
        """(y, the state handed through) for the call seed's words; a later use in this step takes that state.

        Without words a stochastic recipe runs forward only, if its fprop is not stochastic.
        """
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        dimensions = canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        wanted = lhs.dtype if preferred_element_type is None else preferred_element_type
        dtype = check_dtype("preferred_element_type", wanted)
        state = self._check_state(state)
        config = Config(self.recipe, dtype, self.backend, self.axis_names, self.residuals)
        run = partial(_apply, config=config, dimensions=dimensions)
        if _explicit.is_explicit(lhs, rhs):
            plain = partial(lax.dot_general, dimension_numbers=dimension_numbers, out_sharding=out_sharding)
            spec = jax.eval_shape(plain, lhs, rhs.astype(lhs.dtype)).sharding.spec
            return _explicit.run_automatically(
                run, lambda shapes: (spec, _explicit.replicated(shapes[1])), lhs, rhs, words, state
            )
        y, state = run(lhs, rhs, words, state)
        return place(y, out_sharding), state

    def with_amax(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        *,
        state: DelayedState,
        gradient_slot: Array,
        preferred_element_type: DTypeLike | None = None,
    ) -> tuple[Array, dict[str, Array]]:
        """Delayed scaling without state in gradients: (y, amaxes of x and w) for `scaling.update`, outside autodiff.

        The gradient with respect to `gradient_slot`, a float32 zero, is the amax of dy.
        """
        if self._check_state(state) is None:
            raise invalid_value(
                "recipe", repr(self.recipe), "a recipe with delayed scaling", "This one needs no amaxes."
            )
        slot = real_array("gradient_slot", gradient_slot)
        if slot.shape != ():
            raise invalid_value("gradient_slot", f"shape {slot.shape}", "a float32 zero of shape ()")
        frozen = lax.stop_gradient(state)
        dy = frozen.dy and Slot(frozen.dy.scale_enc, amax_carrier(frozen.dy.amax_history, slot))
        y = self(
            lhs, rhs, dimension_numbers, preferred_element_type=preferred_element_type,
            state=DelayedState(frozen.x, frozen.w, dy, state.rules),
        )  # fmt: skip
        operands = {"x": lax.stop_gradient(lhs), "w": lax.stop_gradient(rhs)}
        amaxes = {
            name: live_amax(value, self.axis_names) for name, value in operands.items() if state.slot(name) is not None
        }
        return y, amaxes

    def _check_state(self, state: DelayedState | None) -> DelayedState | None:
        if self.recipe.is_delayed and not isinstance(state, DelayedState):
            raise invalid_value(
                "state", "None" if state is None else type(state).__name__, f"a DelayedState for {self.recipe!r}",
                "Make the first one with microfloat.jax.scaling.init(recipe).",
            )  # fmt: skip
        if not self.recipe.is_delayed and state is not None:
            raise invalid_value("state", type(state).__name__, f"None for {self.recipe!r}, which keeps no state")
        if state is not None and state.rules != scaling.slot_rules(self.recipe):
            raise invalid_value("state", "a state made for another recipe", f"scaling.init({self.recipe!r})")
        if state is not None:
            scaling.check_slots("state", state)
        return state

    def _words(self, seed: Array | int | None, key: Array | None) -> Array | np.ndarray | None:
        """The call seed's words; None where nothing is stochastic, or nothing was given: casts that need it ask."""
        if not self.recipe.is_stochastic or (seed is None and key is None):
            return None
        return call_seed(seed, key, repr(self.recipe))


def place(y: Array, out_sharding: object) -> Array:
    """`y` with the sharding that was asked for; None leaves it alone."""
    if out_sharding is None:
        return y
    if not isinstance(out_sharding, Sharding | PartitionSpec | Format):
        raise invalid_type("out_sharding", type(out_sharding), "a jax.sharding.NamedSharding, a PartitionSpec or None")
    constrain = jax.sharding.reshard if _explicit.is_explicit(y) else lax.with_sharding_constraint
    return constrain(y, out_sharding)


def einsum(recipe: Recipe | str, **options: object) -> "Einsum":
    """``einsum(recipe)(equation, lhs, rhs, ...)`` of two operands; the first is always x, the second w.

    `options` are those of `dot_general`.
    """
    return Einsum(dot_general(recipe, **options))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Einsum:
    """What `einsum` returns: frozen, hashable, callable."""

    op: DotGeneral

    def __call__(
        self,
        equation: str,
        lhs: Array,
        rhs: Array,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: object = None,
        state: DelayedState | None = None,
        key: Array | None = None,
        seed: Array | int | None = None,
    ) -> Array:
        """The einsum of two operands under the recipe; see `DotGeneral.__call__`."""
        del precision
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        plan = parse_einsum(equation, lhs.ndim, rhs.ndim)
        y = self.op(
            *plan.operands(lhs, rhs), plan.dimension_numbers, preferred_element_type=preferred_element_type,
            state=state, key=key, seed=seed,
        )  # fmt: skip
        return place(plan.result(y), out_sharding)


@partial(jax.jit, static_argnames=("config", "dimensions"))
def _apply(
    lhs: Array,
    rhs: Array,
    words: Array | None,
    state: DelayedState | None,
    *,
    config: Config,
    dimensions: DotDimensions,
) -> tuple[Array, DelayedState | None]:
    x, w = dimensions.matrices(lhs, rhs)
    if not dimensions.batch:
        config = config._replace(w_is_transposed=dimensions.rhs_is_transposed)
        y, state = cast(tuple[Array, DelayedState | None], linear(config, x, w, Seed(words, None), state))
        return dimensions.result(y), state
    # Every entry of the batch is quantized alone, with its own tensor amax and `batch` word (numerics, Notation).
    index = None if words is None else jnp.arange(x.shape[0], dtype=jnp.uint32)
    if x.shape[0] == 0:
        return dimensions.result(jnp.zeros((0, x.shape[1], w.shape[1]), config.dtype)), state
    each = jax.vmap(partial(linear, config), in_axes=(0, 0, Seed(None, 0), None), out_axes=(0, None))
    y, state = each(x, w, Seed(words, index), state)
    return dimensions.result(y), state
