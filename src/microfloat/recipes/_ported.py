"""Questions that code written for TransformerEngine asks of a recipe; nothing in this library asks them.

The answers follow from the casts of the six operands, so that a CustomRecipe of MXFP8 casts is one of MXFP8.
"""

from collections.abc import Mapping

from microfloat.recipes.cast import Cast

# Bits of an element, the format of its scale, and what shares one: "tensor", "row" or "block".
_PER_TENSOR = (8, "FP32", "tensor")
_FLOAT8_BLOCKS = (8, "FP32", "block")
_MXFP8 = (8, "E8M0", "block")
_NVFP4 = (4, "E4M3", "block")


def _family(cast: Cast) -> tuple[int, str, str]:
    fmt = cast.format
    scope = "tensor" if fmt.is_per_tensor else "row" if fmt.block[1] is None else "block"
    return fmt.element.bits, fmt.scale.name, scope


class PortedQuestions:
    """TransformerEngine's predicates of recipes: one is True where every operand that is quantized is of its kind."""

    @property
    def casts(self) -> Mapping[tuple[str, str], Cast | None]:
        """The six operands, those in high precision None."""
        raise NotImplementedError

    def _families(self) -> set[tuple[int, str, str]]:
        return {_family(cast) for cast in self.casts.values() if cast is not None}

    def delayed(self) -> bool:
        """True for FP8 with one scale per tensor from the amaxes of earlier steps."""
        quantized = [cast for cast in self.casts.values() if cast is not None]
        return self.float8_per_tensor_scaling() and all(cast.is_delayed for cast in quantized)

    def float8_per_tensor_scaling(self) -> bool:
        """True for FP8 with one scale per tensor."""
        return self._families() == {_PER_TENSOR}

    def float8_current_scaling(self) -> bool:
        """True for FP8 with one scale per tensor from its own amax."""
        delayed = any(cast is not None and cast.is_delayed for cast in self.casts.values())
        return self.float8_per_tensor_scaling() and not delayed

    def float8_block_scaling(self) -> bool:
        """True for FP8 with float32 scales of blocks or tiles."""
        return self._families() == {_FLOAT8_BLOCKS}

    def mxfp8(self) -> bool:
        """True for MXFP8."""
        return self._families() == {_MXFP8}

    def nvfp4(self) -> bool:
        """True for NVFP4, with the Hadamard transform and stochastic rounding or without."""
        return self._families() == {_NVFP4}

    def custom(self) -> bool:
        """True where no other predicate is: rows, MXFP6, MXFP4, mixed casts, high precision."""
        families = self._families()
        return len(families) != 1 or not families <= {_PER_TENSOR, _FLOAT8_BLOCKS, _MXFP8, _NVFP4}
