"""Casts of matrices that jit shards over a mesh by itself: every device casts the whole blocks that it holds.

XLA would gather a sharded matrix before a kernel. A rule for the partitioner says that the codes and scales of a shard
are the shard of the codes and scales. Source: docs/jax.md, "What casts on a GPU".
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import jax
from jax.core import eval_jaxpr
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from microfloat.jax.transformations import batched_by
from microfloat.recipes import Cast


def unit_of(cast: Cast) -> int:
    """The length along either axis of a matrix that holds whole blocks of a cast."""
    return math.lcm(*(size or 1 for size in cast.format.block), 1 if cast.hadamard is None else cast.hadamard.size)


def why_not_whole(cast: Cast, shape: Sequence[int] | None) -> str:
    """Reason against casting shards of a matrix of this shape apart, "" if there is none, however they are cut."""
    if cast.is_stochastic:
        return "a shard does not know where it stands, and stochastic rounding counts elements of the whole matrix"
    if (cast.format.block[1] is None and not cast.format.is_per_tensor) or cast.tensor_scale == "row":
        return f"a scale of {cast.format.name} spans a row, which may be sharded"
    unit = unit_of(cast) * jax.device_count()
    if shape is not None and any(size % unit for size in shape):
        return f"shards that are whole blocks need sizes divisible by {unit}, {jax.device_count()} blocks"
    return ""


def on_shards(on_device: Callable, by_xla: Callable, unit: int) -> Callable:
    """``on_device(axes)`` of the shards of a matrix, which mesh axes `axes` cut; batches of matrices run `by_xla`. Both
    give `casts.Operands`; `unit` is a length that holds whole blocks of every cast."""

    @custom_vmap
    def cast(*arguments: Any) -> Any:
        # The function that is partitioned may hold no constants of its own, such as the signs of a transform.
        shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments)]
        structure = jax.tree.structure(arguments)
        traced, results = jax.make_jaxpr(
            lambda *leaves: on_device(frozenset())(*structure.unflatten(leaves)), return_shape=True
        )(*shapes)  # fmt: skip

        def on_all(constants: Sequence[Any], *arguments: Any) -> Any:
            made = eval_jaxpr(traced.jaxpr, constants, *jax.tree.leaves(arguments))
            return jax.tree.structure(results).unflatten(made)

        function = custom_partitioning(on_all)
        operands = [*(constant.shape for constant in traced.consts), *(shape.shape for shape in shapes)]
        rule = _rule(operands, len(traced.consts), unit, results)
        function.def_partition(partial(_partition, on_device), sharding_rule=rule)
        return function(traced.consts, *arguments)

    cast.def_vmap(batched_by(by_xla))
    return cast


def _partition(on_device: Callable[..., Any], mesh: Any, operands: Any, results: Any) -> tuple:
    """The mesh, the function of shards, and how its results and operands are cut: as XLA has cut the matrix."""
    sharding = operands[1].sharding
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    cut = dict(zip("rc", (*spec, None, None), strict=False))
    axes = frozenset(name for part in spec if part for name in (part if isinstance(part, tuple) else (part,)))

    def placed(letters: Sequence[str | None]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*(cut.get(letter or "") for letter in letters)))

    made = jax.tree.unflatten(jax.tree.structure(results), [placed(letters) for letters in _letters(results)])
    constants, _, *others = jax.tree.map(lambda _: placed(()), operands)
    return mesh, lambda _, *arguments: on_device(axes)(*arguments), made, (constants, placed("rc"), *others)


def _letters(results: Any) -> list[tuple[str | None, ...]]:
    """For every array of `Operands` the axis of x that each of its axes is cut with: "r", "c", or None."""
    return [
        tuple(letter if size > 1 else None for letter, size in zip(letters, leaf.shape, strict=True))
        if len(leaf.shape) == len(letters)
        else ()
        for operand, letters in ((results.row, "rc"), (results.column, "cr"), (results.amax, ""))
        for leaf in jax.tree.leaves(operand)
    ]


def _rule(operands: Sequence[tuple[int, ...]], x: int, unit: int, results: Any) -> SdyShardingRule:
    """The rule for operands of these shapes, with the matrix at position `x`: axes cut together share a factor."""
    units = {letter: size // unit for letter, size in zip("rc", operands[x], strict=True)}
    sizes: dict[str, int] = {}

    def mapping(shape: Sequence[int], letters: Sequence[str | None]) -> ArrayMapping:
        parts: list[Any] = []
        for size, letter in zip_longest(shape, letters):
            own, rest = f"own{len(sizes)}", size // units[letter] if letter else size
            if letter and rest == 1:
                parts.append(letter)
            else:
                sizes[own] = rest
                parts.append(CompoundFactor(letter, own) if letter else own)
        return ArrayMapping(*parts)

    given = tuple(mapping(shape, "rc" if index == x else ()) for index, shape in enumerate(operands))
    pairs = zip(jax.tree.leaves(results), _letters(results), strict=True)
    made = tuple(mapping(leaf.shape, letters) for leaf, letters in pairs)
    alone = {part for one in (*given, *made) for part in one if isinstance(part, str)}
    known: Any = {name: size for name, size in {**units, **sizes}.items() if name not in alone}
    return SdyShardingRule(given, made, **known)
