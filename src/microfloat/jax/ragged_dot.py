"""`ragged_dot(recipe)`: lax.ragged_dot with the recipe's three GEMMs; the matrix of every group is quantized alone.

    fprop: y_g = cast(x_g, K) . cast(w_g, K)   dgrad: dx_g = cast(dy_g, N) . cast(w_g, N)
    wgrad: dw_g = cast(dy_g, T) . cast(x_g, T)

x_TK holds the rows of all groups one after the other, w_GKN a matrix per group. The rows of a group are gathered into
*blocks* [P, K], whose count does not depend on the sizes, so these may be traced. P is a multiple of every block of a
scale; an amax of more than one block of rows (of a tensor, of a column) is the maximum over those of the group. A GEMM
is then a loop over blocks, each with the w of its group. Bytes are those of a `dot_general` per group whose `batch`
word is the index of the group. Source: docs/numerics.md 5.3 and Notation.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.jax import calls, transformations
from microfloat.jax.array import check_array
from microfloat.jax.autocast import recipe_here
from microfloat.jax.backends import cuda, reference
from microfloat.jax.backends.reference import Noise
from microfloat.jax.calls import Call, Config, Op, Seed, check_shards, named, place, words_of
from microfloat.jax.numerics.bits import as_float, hadamard_transform, measured_bits, widened
from microfloat.jax.numerics.scales import block_amax_bits, to_tiles
from microfloat.jax.observing import Blocks, observe_backward, observe_forward, seen_by_backward
from microfloat.jax.scaling import DelayedState
from microfloat.operands import GEMMS, OPERANDS, OPERANDS_OF, Operand
from microfloat.recipes import Cast, Recipe


def ragged_dot(
    recipe: Recipe | str | None = None, *, backend: str = "auto", axis_names: tuple[str, ...] = (),
    residuals: str = "low",
) -> "RaggedDot":  # fmt: skip
    """An op with the signature of `lax.ragged_dot` that runs `recipe`: a GEMM per group of rows, as experts need it.

    Options are those of `dot_general`. Inside shard_map the mesh axes over which both `rhs` and `group_sizes` vary give
    every device experts of its own, whose amaxes are not shared; `axis_names` names only others.
    """
    return RaggedDot(recipe, backend, axis_names, residuals)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RaggedDot(Op):
    """The op that `ragged_dot` returns: frozen, hashable, callable."""

    def __call__(
        self, lhs: Array, rhs: Array, group_sizes: ArrayLike, precision: object = None,
        preferred_element_type: DTypeLike | None = None, group_offset: None = None, out_sharding: object = None, *,
        state: DelayedState | None = None, **seeds: Any,
    ) -> Array:  # fmt: skip
        """``lax.ragged_dot(lhs, rhs, group_sizes)`` under the recipe: lhs [T, K], rhs [G, K, N], sizes [G] -> [T, N].

        The first ``group_sizes[0]`` rows of lhs meet rhs[0], the next rhs[1], and so on; rows beyond the last group
        give zeros. `group_sizes` may be traced. Delayed scaling needs a `state` per group,
        ``scaling.init(recipe, num_groups=G)``; the others, `key` and `seed` among them, are those of `DotGeneral`.
        Raises InvalidValueError for shapes that do not fit, NotSupportedError for a `group_offset`, as JAX does.
        """
        words = words_of(recipe_here(self.recipe), **seeds)
        options = precision, preferred_element_type, group_offset, out_sharding
        return self.with_words(lhs, rhs, group_sizes, *options, words=words, state=state)

    def with_words(
        self, lhs: Array, rhs: Array, group_sizes: ArrayLike, precision: Any = None,
        preferred_element_type: DTypeLike | None = None, group_offset: None = None, out_sharding: Any = None, *,
        words: Array | np.ndarray | None = None, state: DelayedState | None = None,
    ) -> Array:  # fmt: skip
        """The same with the words of the call seed; see `DotGeneral.with_words`."""
        check_offset(group_offset)
        recipe = recipe_here(self.recipe)
        if recipe is None:
            sharding = {} if out_sharding is None else {"out_sharding": out_sharding}
            sizes = jnp.asarray(group_sizes)
            return lax.ragged_dot(lhs, rhs, sizes, precision, preferred_element_type, **sharding)
        lhs, rhs = check_array("lhs", lhs), check_array("rhs", rhs)
        sizes = _checked_sizes(lhs, rhs, group_sizes)
        dtype = calls.result_dtype(lhs, preferred_element_type)
        state = calls.check_state(recipe, state, (rhs.shape[0],))
        if 0 in (lhs.shape[0], rhs.shape[0]):
            return place(jnp.zeros((lhs.shape[0], rhs.shape[2]), dtype), out_sharding)
        config = self.config(recipe, dtype, w_is_transposed=True)
        y = transformations.run_automatically(_apply, _specs, lhs, rhs, sizes, words, state, config=config)
        return place(y, out_sharding)


def check_offset(group_offset: object) -> None:
    """NotSupportedError for a `group_offset`."""
    if group_offset is not None:
        raise NotSupportedError(
            "group_offset: got an offset, needed None: JAX has no implementation of it. Slice rhs and group_sizes."
        )


def _checked_sizes(lhs: Array, rhs: Array, group_sizes: ArrayLike) -> Array:
    """`group_sizes` as int32; InvalidValueError for shapes that do not fit, and for numbers on the host that do not."""
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise invalid_value("rhs", f"shape {rhs.shape} for lhs of {lhs.shape}", "lhs [T, K] and rhs [G, K, N]")
    sizes: Any = group_sizes if hasattr(group_sizes, "dtype") else np.asarray(group_sizes)
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise invalid_type("group_sizes", sizes.dtype, "integers")
    if sizes.shape != rhs.shape[:1]:
        raise invalid_value("group_sizes", f"shape {sizes.shape}", f"[{rhs.shape[0]}], one per matrix of rhs")
    is_read = not isinstance(sizes, Tracer) and getattr(sizes, "is_fully_addressable", True)
    is_on_host = is_read and all(one.platform == "cpu" for one in (sizes.devices() if isinstance(sizes, Array) else ()))
    if is_on_host and (((host := np.asarray(sizes)) < 0).any() or host.sum() > lhs.shape[0]):
        raise invalid_value("group_sizes", host.tolist(), f"sizes >= 0 of no more than the {lhs.shape[0]} rows of lhs")
    return jnp.asarray(sizes).astype(jnp.int32)


# Blocks of rows


class _Blocks(NamedTuple):
    """The rows of every block, and the way back.

    `group` [B]: the group of a block, G for one that no group needs. `start` [B]: the row of its group at which a block
    begins. `rows` [B, P]: row of x, T for none. `position` [T]: where a row of x stands among those of all blocks,
    B * P for a row beyond the last group.
    """

    group: Array
    start: Array
    rows: Array
    position: Array

    def gather(self, x_TC: Array) -> Array:
        """The blocks of a matrix [B, P, C], with zeros for rows of none."""
        return jnp.take(x_TC, self.rows, axis=0, mode="fill", fill_value=0)

    def result(self, y_BPC: Array) -> Array:
        """The rows of all blocks in the order of x [T, C], zeros beyond the last group."""
        blocks, size, cols = y_BPC.shape
        return jnp.take(y_BPC.reshape(blocks * size, cols), self.position, axis=0, mode="fill", fill_value=0)

    def of_group(self, values_G: Array) -> Array:
        """Each block's own of one value per group."""
        return jnp.take(values_G, self.group, axis=0, mode="clip")


def _blocks(sizes_G: Array, rows: int, block: int) -> _Blocks:
    groups = sizes_G.shape[0]
    ends = jnp.minimum(jnp.cumsum(jnp.maximum(sizes_G, 0)), rows)
    starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
    last = jnp.cumsum((ends - starts + (block - 1)) // block)
    first = jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])
    # The most blocks that groups of any sizes need.
    most = (rows - min(groups, rows)) // block + min(groups, rows)
    index, row = jnp.arange(most, dtype=jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    group = jnp.searchsorted(last, index, side="right").astype(jnp.int32)
    own = jnp.minimum(group, groups - 1)
    start = (index - first[own]) * block
    inside = start[:, None] + jnp.arange(block, dtype=jnp.int32)
    is_used = (group < groups)[:, None] & (inside < (ends - starts)[own][:, None])
    of_row = jnp.searchsorted(ends, row, side="right").astype(jnp.int32)
    own_of_row = jnp.minimum(of_row, groups - 1)
    position = first[own_of_row] * block + row - starts[own_of_row]
    taken = jnp.where(is_used, starts[own][:, None] + inside, rows)
    return _Blocks(group, start, taken, jnp.where(of_row < groups, position, most * block))


def _rows_of_block(recipe: Recipe, rows: int, groups: int) -> int:
    """P, which cuts no scale and no call of the random generator, and leaves few rows of blocks empty."""
    unit = 1
    for operand in OPERANDS:
        one = recipe.cast(*operand.key)
        if one is not None and operand.tensor != "w":
            along = one.format.block[1 if operand.transposed else 0]
            sizes = [along or 1]
            if operand.transposed:
                sizes += [16 if one.is_stochastic else 1, 1 if one.hadamard is None else one.hadamard.size]
            unit = math.lcm(unit, *sizes)
    # The exact sum of wgrad is rounded once, so it is one product per group.
    whole = any(getattr(recipe, gemm).accumulate == "exact" for gemm in GEMMS)
    wanted = rows if whole else min(rows, max(128, rows // (4 * groups)))
    return -(-wanted // unit) * unit


# The differentiation rule


def _specs(x_TK: Array, w_GKN: Array, *_: Any, **__: Any) -> PartitionSpec:
    """The partition of the result of `_apply`, as `run_automatically` asks for it."""
    return transformations.distinct((transformations.spec_of(x_TK)[0], transformations.spec_of(w_GKN)[2]))


@partial(jax.jit, static_argnames=("config",))
def _apply(
    x_TK: Array, w_GKN: Array, sizes: Array, words: Array | None, state: DelayedState | None, *, config: Config
) -> Array:
    return cast(Array, _grouped(config, x_TK, w_GKN.swapaxes(1, 2), sizes, words, state))


class _Kept(NamedTuple):
    """Residuals: the rhs of dgrad, per group, and of wgrad, per block (or the originals); else as in `dot_general`."""

    w: reference.Operand
    x: reference.Operand
    sizes: Array
    words: Array | None
    state: DelayedState | None
    amaxes: dict[str, Array]
    no_x: Array
    no_w: Array
    seen: tuple[Array, Array] | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped(
    config: Config, x_TK: Array, w_GNK: Array, sizes: Array, words: Array | None, state: DelayedState | None
) -> Array:
    """y_TN; cotangents of states as in `dot_general`."""
    return _Groups(config, x_TK, w_GNK, sizes, words, state).forward(x_TK, w_GNK, keeps=False)[0]


def _forward(
    config: Config, x_TK: Array, w_GNK: Array, sizes: Array, words: Array | None, state: DelayedState | None
) -> tuple[Array, _Kept]:
    groups = _Groups(config, x_TK, w_GNK, sizes, words, state)
    if config.recipe.is_stochastic:
        groups.call.check_seed()
    y_TN, w, x, amaxes = groups.forward(x_TK, w_GNK, keeps=True)
    kept = _Kept(w, x, sizes, words, state, amaxes, x_TK[:0], w_GNK[:, :0], seen_by_backward(x_TK, w_GNK))
    return checkpoint_name(y_TN, calls.OUTPUT_NAME), kept


def _backward(config: Config, kept: _Kept, dy_TN: Array) -> tuple:
    dy_TN, no_x, no_w = calls.differentiated_once((dy_TN, kept.no_x, kept.no_w))
    groups = _Groups(config, dy_TN, no_w, kept.sizes, kept.words, kept.state)
    dx_TK, dw_GNK, amaxes = groups.backward(dy_TN, kept._replace(no_x=no_x, no_w=no_w))
    return dx_TK, dw_GNK, None, None, groups.new_state(dy_TN, kept.amaxes | amaxes)


_grouped.defvjp(_forward, _backward)


class _Groups:
    """One call's context: the blocks of rows, and the casts and products of the six operands over them."""

    def __init__(
        self, config: Config, x_TK: Array, w_GNK: Array, sizes: Array, words: Array | None, state: DelayedState | None
    ) -> None:
        self._config, self._words, self._state = config, words, state
        # Devices that have sizes and matrices of their own have groups of their own.
        self._apart = transformations.varying_axes(sizes) & transformations.varying_axes(w_GNK)
        self._count = w_GNK.shape[0]
        self.call = self._call_of(None, state)
        rows = x_TK.shape[0]
        self._blocks = _blocks(sizes, rows, _rows_of_block(config.recipe, rows, self._count))
        self._seen = Blocks(
            self.call, self._blocks.rows < rows, self._blocks.gather, self._quantized, self._blocks.of_group,
            self._for_each, lambda x: jax.ops.segment_sum(x, self._blocks.group, self._count),
        )  # fmt: skip

    def _call_of(self, index: Array | None, state: DelayedState | None) -> Call:
        return Call(self._config, Seed(self._words, index), state, self._apart)

    def _for_each(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """``function(call, *arguments)`` for every group, with its index and its state in `call`."""

        def of_group(index: Array, state: DelayedState | None, *arguments: Any) -> Any:
            return function(self._call_of(index, state), *arguments)

        return jax.vmap(of_group)(jnp.arange(self._count, dtype=jnp.uint32), self._state, *arguments)

    def forward(self, x_TK: Array, w_GNK: Array, *, keeps: bool) -> tuple[Array, Any, Any, dict[str, Array]]:
        """(y_TN, w and x as the backward reads them, the live amaxes of both)."""
        check_shards(self._config.recipe, x_TK, w_GNK[0], GEMMS[: 2 if keeps else 1], self._apart)

        def weight(call: Call, w_NK: Array) -> tuple:
            made = call.keep(w_NK, "w") if keeps else call.cast(w_NK, "w", (True, False))
            if not keeps or "w" not in call.scales:
                return made.first, made.second, {}
            return made.first, made.second, {"w": call.live_amax(w_NK, "w") if made.amax is None else made.amax}

        w, w_kept, amaxes = self._for_each(weight, w_GNK)
        x_BPK, (row, column) = self._blocks.gather(x_TK), OPERANDS_OF["x"]
        x = self._operand(row, x_BPK)
        y_BPN = self._products("fprop", x, w, x_TK.shape[1], x_TK.dtype, self._config.dtype)
        y_TN, x_kept = self._blocks.result(y_BPN), x_TK
        y_TN = observe_forward(self._seen, x_TK, w_GNK, y_BPN, y_TN, stage="kept" if keeps else "forward")
        if not keeps:
            return y_TN, None, None, {}
        if self._config.residuals == "low" and self._config.recipe.cast(*column.key) is not None:
            x_kept = named(cast(reference.Matrix, x if self.call.reuses("x") else self._operand(column, x_BPK)))
        return y_TN, w_kept, x_kept, amaxes | self._live_amax(x_TK, "x")

    def backward(self, dy_TN: Array, kept: _Kept) -> tuple[Array, Array, dict[str, Array]]:
        """(dx_TK, dw_GNK, the live amax of dy)."""
        (row, column), x, w, outputs = OPERANDS_OF["dy"], kept.x, kept.w, dy_TN.shape[1]
        dy_BPN, dtype = self._blocks.gather(dy_TN), kept.no_x.dtype
        w = self._for_each(lambda call, one: call.read("dgrad", call.kept(one, "w"), kept.no_x.shape[1], dtype), w)
        if not isinstance(x, reference.Matrix):
            x = self._operand(OPERANDS_OF["x"][not self.call.reuses("x")], self._blocks.gather(cast(Array, x)))
        x = jax.vmap(lambda one: self.call.read("wgrad", one, kept.no_x.shape[1], dtype))(x)
        a = self._operand(row, dy_BPN)
        # A product that is summed over mesh axes is rounded after that.
        summed = transformations.varying_axes(*jax.tree.leaves((a, w))) - transformations.varying_axes(kept.no_x)
        dx_BPK = self._products("dgrad", a, w, outputs, dtype, jnp.dtype(jnp.float32) if summed else dtype)
        dw_GNK = self._sums(self._operand(column, dy_BPN), x, dtype)
        dx_TK = transformations.sum_to_type_of(self._blocks.result(dx_BPK), kept.no_x)
        gradients = dx_TK, transformations.sum_to_type_of(dw_GNK, kept.no_w)
        gradients = observe_backward(self._seen, kept.seen, dy_TN, (dx_BPK, dw_GNK), gradients)
        return *gradients, self._live_amax(dy_TN, "dy")

    def new_state(self, dy_TN: Array, amaxes: dict[str, Array]) -> DelayedState | None:
        """The cotangent of the state, see `dot_general`."""

        def of_group(call: Call, amaxes: dict[str, Array]) -> DelayedState | None:
            return calls.state_cotangent(call, amaxes, dy_TN, amaxes.get("dy"))

        return None if self._state is None else self._for_each(of_group, amaxes)

    def _operand(self, operand: Operand, x_BPC: Array) -> reference.Operand:
        """The operand of every block: quantized as a part of its group's matrix, or the block without a Cast."""
        made = self.call.cast_of(operand, x_BPC.shape[1:])
        turned = operand.transposed
        if made is None:
            return jax.vmap(cuda.turned)(x_BPC) if turned else x_BPC
        return self._quantized(operand, made.cast, x_BPC, self._words)

    def _quantized(self, operand: Operand, one: Cast, x_BPC: Array, words: Any) -> reference.Matrix:
        """The operand of every block under a Cast."""
        turned, scale_enc = operand.transposed, None
        if one.is_delayed:
            scale_enc = self._blocks.of_group(self.call.scales[operand.tensor])

        def quantized(x_PC: Array, group: Array, start: Array, amax: Any, scale_enc: Any) -> reference.Matrix:
            noise = None
            if one.is_stochastic and words is not None:
                noise = Noise(words, operand.stream, group, (0, start) if turned else (start, 0))
            form = x_PC.T if turned else x_PC
            return reference.cast_matrix(form, one, noise, amax=amax, scale_enc=scale_enc)

        amax = self._shared_amax(operand, one, x_BPC)
        return jax.vmap(quantized)(x_BPC, self._blocks.group, self._blocks.start, amax, scale_enc)

    def _shared_amax(self, operand: Operand, one: Cast, x_BPC: Array) -> Array | None:
        """For every block the amax of its group, where one scale spans rows of the whole group; else None."""
        fmt = one.format
        of_tensor = fmt.is_per_tensor or fmt.tensor_scale == "tensor"
        if not of_tensor and (not operand.transposed or (fmt.tensor_scale != "row" and fmt.block[1] is not None)):
            return None
        if not of_tensor and fmt.block[1] is None and fmt.scale.name != "FP32":
            raise NotSupportedError(
                f"recipe: got {fmt.name}, whose {fmt.scale.name} scale spans a whole group, needed blocks of some size "
                "or an FP32 scale for ragged_dot. Run a dot_general per group."
            )

        def measured(x_PC: Array) -> Array:
            form = widened(x_PC.T if operand.transposed else x_PC)
            form = form if one.hadamard is None else hadamard_transform(form, one.hadamard)
            bits = block_amax_bits(to_tiles(form, (None if of_tensor else fmt.block[0], None)))
            return bits.reshape(()) if of_tensor else bits

        bits = jax.ops.segment_max(jax.vmap(measured)(x_BPC), self._blocks.group, self._count)
        # Rows that span a group are on one device, as their blocks are.
        axes = self.call.axes(x_BPC) if of_tensor else frozenset()
        return self._blocks.of_group(transformations.max_over(as_float(bits), axes))

    def _live_amax(self, x_TC: Array, tensor: str) -> dict[str, Array]:
        """{tensor: its amaxes of this step [G]} under delayed scaling, nothing otherwise."""
        if self._state is None or self._state.slot(tensor) is None:
            return {}

        def measured(x_TC: Array) -> Array:
            bits = jnp.max(measured_bits(widened(x_TC)), axis=1, initial=0)
            rows = self._blocks.gather(bits[:, None])
            return as_float(jax.ops.segment_max(jnp.max(rows, axis=(1, 2)), self._blocks.group, self._count))

        return {tensor: self.call.live_amax(x_TC, tensor, measured)}

    def _products(
        self, name: str, a: reference.Operand, b: reference.Operand, cols: int, dtype: np.dtype, out: np.dtype
    ) -> Array:
        """``a[block] @ b[group of the block].T`` for every block, [B, P, columns]."""

        def product(block: tuple) -> Array:
            mine, group = block
            other = jax.tree.map(lambda leaf: jnp.take(leaf, group, axis=0, mode="clip"), b)
            return self.call.gemm(name, mine, other, cols, dtype, out)

        return lax.map(product, (a, self._blocks.group))

    def _sums(self, a: reference.Operand, b: reference.Operand, dtype: np.dtype) -> Array:
        """The sum of ``a[block] @ b[block].T`` over the blocks of every group, float32 [G, rows of a, rows of b]."""
        block = self._blocks.rows.shape[1]

        def add(total: Array, block_of: tuple) -> tuple[Array, None]:
            mine, other, group = block_of
            product = self.call.gemm("wgrad", mine, other, block, dtype, jnp.dtype(jnp.float32))
            return total.at[group].add(product, mode="drop"), None

        sizes = (reference.rows_of(jax.tree.map(lambda leaf: leaf[0], one)) for one in (a, b))
        zeros = jnp.zeros((self._count, *sizes), jnp.float32)
        start, *_ = transformations.in_common_variance(zeros, *jax.tree.leaves((a, b)))
        return lax.scan(add, start, (a, b, self._blocks.group))[0]
