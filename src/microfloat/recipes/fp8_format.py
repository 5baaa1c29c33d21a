"""Which FP8 element each direction uses, under the names that TransformerEngine's users know."""

import enum

from microfloat.errors import invalid_type, unknown_name
from microfloat.formats import E4M3, E5M2, ElementFormat

__all__ = ["Format", "as_format"]


class Format(enum.Enum):
    """E4M3: everywhere; HYBRID: E4M3 forward, E5M2 for gradients; E5M2: exists as a name only (no GEMM takes it)."""

    E4M3 = "E4M3"
    E5M2 = "E5M2"
    HYBRID = "HYBRID"

    @property
    def forward(self) -> ElementFormat:
        """Element of x and w."""
        return E5M2 if self is Format.E5M2 else E4M3

    @property
    def backward(self) -> ElementFormat:
        """Element of dy."""
        return E4M3 if self is Format.E4M3 else E5M2

    def __repr__(self) -> str:
        return f"Format.{self.name}"


def as_format(value: object, allowed: tuple[Format, ...]) -> Format:
    """A Format from itself or its name; refuses those that the recipe has no GEMM for."""
    if isinstance(value, str):
        if value.upper() not in Format.__members__:
            raise unknown_name("fp8_format", value, Format.__members__)
        value = Format[value.upper()]
    if not isinstance(value, Format):
        raise invalid_type("fp8_format", type(value), "recipes.Format.E4M3 or HYBRID, or its name")
    if value not in allowed:
        raise unknown_name("fp8_format", value.name, [choice.name for choice in allowed])
    return value
