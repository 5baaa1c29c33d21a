"""A recipe written out operand by operand."""

from dataclasses import dataclass

from microfloat.recipes.core import Recipe

__all__ = ["CustomRecipe"]


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Any three Gemms: mixed formats per direction, ``Gemm(None, None)`` for a GEMM in high precision.

    The two operands of a GEMM must be multipliable; one of them may be None, then the other is dequantized.
    """
