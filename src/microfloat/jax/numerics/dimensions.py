"""Dimension numbers and einsum equations as one form: [B, M, K] x [B, N, K] -> [B, M, N], operands kept by position."""

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from microfloat.errors import invalid_type, invalid_value

Axes = tuple[int, ...]
DimensionNumbers = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]


class DotDimensions(NamedTuple):
    """The order of axes that brings two operands into [B, M, K] and [B, N, K], and the sizes of the result. Static."""

    lhs_order: Axes
    rhs_order: Axes
    batch: Axes
    lhs_free: Axes
    rhs_free: Axes
    contracted: Axes

    @property
    def dimension_numbers(self) -> DimensionNumbers:
        """The dimension numbers that these come from, all axes >= 0."""
        batch, free = len(self.batch), len(self.batch) + len(self.lhs_free)
        of_rhs = len(self.batch) + len(self.rhs_free)
        return (self.lhs_order[free:], self.rhs_order[of_rhs:]), (self.lhs_order[:batch], self.rhs_order[:batch])

    @property
    def rhs_is_transposed(self) -> bool:
        """True if the [N, K] of `matrices` is the transpose of rhs as it is stored, [K, N]."""
        count = len(self.contracted)
        return not self.batch and 0 < count < len(self.rhs_order) and self.rhs_order[-count:] == tuple(range(count))

    def matrices(self, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        """[*B, M, K] and [*B, N, K] with B as one axis, or without it when there are no batch dimensions."""
        batch, contracted = (math.prod(self.batch),) if self.batch else (), math.prod(self.contracted)
        return (
            lhs.transpose(self.lhs_order).reshape(*batch, math.prod(self.lhs_free), contracted),
            rhs.transpose(self.rhs_order).reshape(*batch, math.prod(self.rhs_free), contracted),
        )

    def result(self, y: Array) -> Array:
        """[*B, M, N] -> batch, free dimensions of lhs, free dimensions of rhs, as lax.dot_general has them."""
        return y.reshape(self.batch + self.lhs_free + self.rhs_free)


def canonical_dimensions(lhs_shape: Axes, rhs_shape: Axes, dimension_numbers: DimensionNumbers) -> DotDimensions:
    """Validate lax.dot_general's dimension numbers; contraction and batch dimensions keep their paired order."""
    try:
        (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
        pairs = [tuple(map(operator.index, axes)) for axes in (lhs_contract, rhs_contract, lhs_batch, rhs_batch)]
    except (TypeError, ValueError) as error:
        raise invalid_type(
            "dimension_numbers", repr(dimension_numbers),
            "((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as lax.dot_general takes them",
        ) from error  # fmt: skip
    lhs_contract, lhs_batch = _axes("lhs", lhs_shape, pairs[0], pairs[2])
    rhs_contract, rhs_batch = _axes("rhs", rhs_shape, pairs[1], pairs[3])
    for what, left, right in (("contracting", lhs_contract, rhs_contract), ("batch", lhs_batch, rhs_batch)):
        sizes = [tuple(shape[axis] for axis in axes) for shape, axes in ((lhs_shape, left), (rhs_shape, right))]
        if sizes[0] != sizes[1]:
            of_lhs = f"{what} dimensions {left} of lhs{list(lhs_shape)} (sizes {sizes[0]})"
            got = f"{of_lhs} against {right} of rhs{list(rhs_shape)} (sizes {sizes[1]})"
            raise invalid_value("dimension_numbers", got, "equal sizes, pair by pair")
    lhs_free = tuple(axis for axis in range(len(lhs_shape)) if axis not in lhs_contract + lhs_batch)
    rhs_free = tuple(axis for axis in range(len(rhs_shape)) if axis not in rhs_contract + rhs_batch)
    return DotDimensions(
        lhs_batch + lhs_free + lhs_contract, rhs_batch + rhs_free + rhs_contract,
        tuple(lhs_shape[axis] for axis in lhs_batch), tuple(lhs_shape[axis] for axis in lhs_free),
        tuple(rhs_shape[axis] for axis in rhs_free), tuple(lhs_shape[axis] for axis in lhs_contract),
    )  # fmt: skip


def _axes(side: str, shape: Axes, contract: Axes, batch: Axes) -> tuple[Axes, Axes]:
    """Axes as indices >= 0, all different and in range."""
    ndim = len(shape)
    if any(not -ndim <= axis < ndim for axis in contract + batch):
        raise invalid_value("dimension_numbers", f"axes {contract + batch} of {side}", f"axes of {side}{list(shape)}")
    normal = tuple(axis % ndim for axis in contract), tuple(axis % ndim for axis in batch)
    if len(set(normal[0] + normal[1])) != len(normal[0] + normal[1]):
        got = f"contracting {contract} and batch {batch} of {side}"
        raise invalid_value("dimension_numbers", got, "every axis at most once")
    return normal


class EinsumPlan(NamedTuple):
    """A two-operand einsum as sums, one dot_general and a transposition. Static."""

    lhs_sum: Axes
    rhs_sum: Axes
    dimension_numbers: DimensionNumbers
    out_order: Axes

    def operands(self, lhs: Array, rhs: Array) -> tuple[Array, Array]:
        """The operands, summed over labels that no other term has and over axes of size 1 that broadcast."""
        lhs = jnp.sum(lhs, axis=self.lhs_sum) if self.lhs_sum else lhs
        return lhs, jnp.sum(rhs, axis=self.rhs_sum) if self.rhs_sum else rhs


def parse_einsum(equation: str, lhs_shape: Axes, rhs_shape: Axes) -> EinsumPlan:
    """The plan of ``einsum(equation, lhs, rhs)``; InvalidValueError for an equation that one dot cannot compute.

    The first operand stays lhs. An ellipsis, an implicit output and axes of size 1 that broadcast are jnp.einsum's.
    """
    if not isinstance(equation, str):
        raise invalid_type("eqn", type(equation), "an einsum equation such as 'mk,kn->mn'")
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != 2:
        raise invalid_value("eqn", repr(equation), "an equation of exactly two operands, such as 'mk,kn->mn'")
    if any("." in term.replace("...", "", 1) for term in (*terms, output)):
        raise invalid_value("eqn", repr(equation), "at most one ellipsis, '...', per operand and in the output")
    shapes = lhs_shape, rhs_shape
    ellipses = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    lhs, rhs = (_expand(term, count) for term, count in zip(terms, ellipses, strict=True))
    for side, labels, shape in (("lhs", lhs, lhs_shape), ("rhs", rhs, rhs_shape)):
        if len(labels) != len(shape):
            got = f"{equation!r} with {side} of {len(shape)} axes"
            raise invalid_value("eqn", got, f"{len(labels)} axes in {side}")
        if len(set(labels)) != len(labels):
            raise invalid_value("eqn", f"{equation!r}, a label twice in {side}", "every label at most once per operand")
    widest = max(*ellipses, 0) if "..." in inputs else 0
    once = [label for label in lhs + rhs if (lhs + rhs).count(label) == 1 and not label.startswith(".")]
    of_ellipsis = [f".{index}" for index in range(-widest, 0)]
    out = _expand(output, widest) if arrow else of_ellipsis + sorted(once)
    if len(set(out)) != len(out) or not set(out) <= set(lhs) | set(rhs):
        raise invalid_value("eqn", repr(equation), "output labels that each appear in an operand, once")
    of_lhs, of_rhs = (dict(zip(labels, shape, strict=True)) for labels, shape in ((lhs, lhs_shape), (rhs, rhs_shape)))
    unequal = [label for label in lhs if label in of_rhs and of_lhs[label] != of_rhs[label]]
    for label in unequal:
        if 1 not in (of_lhs[label], of_rhs[label]):
            name = "an axis of '...'" if label.startswith(".") else repr(label)
            sizes = f"{of_lhs[label]} in lhs{list(lhs_shape)} and {of_rhs[label]} in rhs{list(rhs_shape)}"
            raise invalid_value("eqn", f"{equation!r}, {name} of size {sizes}", "one size for every label, or 1")
    return _einsum_plan(lhs, rhs, out, *([one for one in unequal if of[one] == 1] for of in (of_lhs, of_rhs)))


def einsum_by(dot: Callable[..., Array], equation: str, lhs: Array, rhs: Array) -> Array:
    """``einsum(equation, lhs, rhs)`` by one ``dot(lhs, rhs, dimension_numbers)``."""
    plan = parse_einsum(equation, lhs.shape, rhs.shape)
    return dot(*plan.operands(lhs, rhs), plan.dimension_numbers).transpose(plan.out_order)


def _einsum_plan(lhs: list[str], rhs: list[str], out: list[str], lhs_ones: list, rhs_ones: list) -> EinsumPlan:
    """The plan for labelled axes; `lhs_ones`, `rhs_ones`: labels of axes of size 1 that broadcast, to be summed."""
    in_lhs, in_rhs = set(lhs) - set(lhs_ones), set(rhs) - set(rhs_ones)
    keep_lhs, keep_rhs = in_lhs & (in_rhs | set(out)), in_rhs & (in_lhs | set(out))
    lhs_sum = tuple(index for index, label in enumerate(lhs) if label not in keep_lhs)
    rhs_sum = tuple(index for index, label in enumerate(rhs) if label not in keep_rhs)
    lhs, rhs = [label for label in lhs if label in keep_lhs], [label for label in rhs if label in keep_rhs]
    batch = [label for label in lhs if label in rhs and label in out]
    contract = [label for label in lhs if label in rhs and label not in out]
    numbers = [(tuple(map(lhs.index, labels)), tuple(map(rhs.index, labels))) for labels in (contract, batch)]
    produced = batch + [label for label in lhs + rhs if label not in batch + contract]
    return EinsumPlan(lhs_sum, rhs_sum, (numbers[0], numbers[1]), tuple(map(produced.index, out)))


def _expand(term: str, count: int) -> list[str]:
    """Labels of one operand; an ellipsis becomes `count` labels, aligned at the right as NumPy aligns them."""
    if "..." not in term:
        return list(term)
    before, after = term.split("...", 1)
    return [*before, *(f".{index}" for index in range(-max(count, 0), 0)), *after]
