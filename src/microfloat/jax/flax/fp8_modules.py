"""Flax-compatible FP8 operators as linen modules, for ``dot_general_cls=`` and einsum injection.

Class names and state layout are Flax's, so its checkpoints load unchanged. Unlike Flax's, a module that is used
several times in one step leaves the maximum of the amaxes, and each honours `e4m3_dtype`, `e5m2_dtype` and
`preferred_element_type`.
"""

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike, DTypeLike

from microfloat.errors import invalid_type
from microfloat.jax._dimensions import DimensionNumbers, canonical_dimensions, parse_einsum
from microfloat.jax.flax.fp8_arguments import as_numbers
from microfloat.jax.flax.fp8_autodiff import Rule, in_qdq_threaded, out_qdq_threaded
from microfloat.jax.flax.fp8_dot import DotOptions, dot_general_with_precision, scaled_dot_threaded
from microfloat.jax.flax.state import STATE_NAMES, StateModule

__all__ = [
    "Fp8DirectDotGeneralOp", "Fp8DotGeneral", "Fp8DotGeneralBase", "Fp8DotGeneralOp", "Fp8Einsum",
    "NANOOFp8DotGeneralOp",
]  # fmt: skip


class Fp8DotGeneralBase(StateModule):
    """State and options of the FP8 operators; `axis_names`: mesh axes that shard them, where JAX cannot see those."""

    e4m3_dtype: DTypeLike = jnp.float8_e4m3fn
    e5m2_dtype: DTypeLike = jnp.float8_e5m2
    axis_names: tuple[str, ...] = ()

    def setup(self) -> None:
        """The six variables, also under the names that subclasses of Flax's class read."""
        super().setup()
        for name, (scale, history) in self.variables_of.items():
            setattr(self, f"{name}_scale", scale)
            setattr(self, f"{name}_amax_history", history)

    def direct_dot(
        self, lhs: Array, rhs: Array, dimension_numbers: DimensionNumbers, preferred_element_type: DTypeLike | None
    ) -> Array:
        """The dot with FP8 operands, in rhs's dtype or `preferred_element_type`."""
        out = rhs.dtype if preferred_element_type is None else preferred_element_type
        options = DotOptions(
            dimension_numbers, rhs.dtype, out, self.e4m3_dtype, self.e5m2_dtype, tuple(self.axis_names)
        )
        states = (self.current_state("input"), self.current_state("kernel"), self.current_state("output_grad"))
        y, states = scaled_dot_threaded(options, lhs, rhs, states)
        for name, pair in zip(STATE_NAMES, states, strict=True):
            self.hand_on(name, pair)
        return y


class Fp8DotGeneralOp(Fp8DotGeneralBase):
    """dot_general of operands that went through FP8 and back; its output gradient does the same (fake quantization)."""

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *args: object,
        **kwargs: object,
    ) -> Array:
        """Computes in rhs's dtype; further arguments are accepted and ignored."""
        del precision, args, kwargs
        lhs, rhs = _operands(lhs, rhs)
        canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        operands = {"input": lhs, "kernel": rhs}
        faked = []
        for name, operand in operands.items():
            rule = self._rule(rhs.dtype, self.e4m3_dtype)
            value, scale, history = in_qdq_threaded(rule, operand, *self.current_state(name))
            self.hand_on(name, (scale, history))
            faked.append(value)
        y = dot_general_with_precision(*faked, dimension_numbers)
        rule = self._rule(rhs.dtype, self.e5m2_dtype)
        y, scale, history = out_qdq_threaded(rule, y, *self.current_state("output_grad"))
        self.hand_on("output_grad", (scale, history))
        return y if preferred_element_type is None else y.astype(preferred_element_type)

    def _rule(self, compute_dtype: DTypeLike, q_dtype: DTypeLike) -> Rule:
        return Rule(compute_dtype, q_dtype, tuple(self.axis_names))


class Fp8DirectDotGeneralOp(Fp8DotGeneralBase):
    """dot_general of FP8 codes: they go into the dot themselves, the scales follow."""

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: Array,
        dimension_numbers: DimensionNumbers,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
        *args: object,
        **kwargs: object,
    ) -> Array:
        """Computes in rhs's dtype; further arguments are accepted and ignored."""
        del precision, args, kwargs
        lhs, rhs = _operands(lhs, rhs)
        canonical_dimensions(lhs.shape, rhs.shape, dimension_numbers)
        return self.direct_dot(lhs, rhs, dimension_numbers, preferred_element_type)


class NANOOFp8DotGeneralOp(Fp8DotGeneralOp):
    """`Fp8DotGeneralOp` in the fnuz formats of MI300."""

    e4m3_dtype: DTypeLike = jnp.float8_e4m3fnuz
    e5m2_dtype: DTypeLike = jnp.float8_e5m2fnuz


class Fp8Einsum(Fp8DotGeneralBase):
    """An einsum of two operands with FP8 operands; the first is always the input, the second the kernel."""

    def __call__(
        self,
        eqn: str,
        lhs: ArrayLike,
        rhs: Array,
        precision: object = None,
        preferred_element_type: DTypeLike | None = None,
    ) -> Array:
        """Computes in rhs's dtype. Raises InvalidValueError for another number of operands or a repeated label."""
        del precision
        lhs, rhs = _operands(lhs, rhs)
        plan = parse_einsum(eqn, lhs.ndim, rhs.ndim)
        return plan.result(self.direct_dot(*plan.operands(lhs, rhs), plan.dimension_numbers, preferred_element_type))


def _operands(lhs: ArrayLike, rhs: ArrayLike) -> tuple[Array, Array]:
    """Both operands in rhs's dtype, the dtype to compute in: a float dtype of 16 bits or more."""
    lhs, rhs = as_numbers("lhs", lhs), as_numbers("rhs", rhs)
    if not jnp.issubdtype(rhs.dtype, jnp.floating):
        remedy = "The op quantizes; convert rhs with .astype."
        raise invalid_type("rhs", rhs.dtype, "float32, bfloat16, float16 or float64", remedy)
    return lhs.astype(rhs.dtype), rhs


Fp8DotGeneral = Fp8DirectDotGeneralOp
