"""The six-row table that ``print(recipe)`` shows."""

from microfloat.operands import OPERANDS
from microfloat.recipes.core import Cast, Delayed, Recipe
from microfloat.support import text_table

__all__ = ["recipe_table"]

_HEADER = ("GEMM", "operand", "format", "block", "scale_rule", "rounding", "hadamard", "scaling", "accumulate", "path")
# The operand as the GEMM reads it: its contraction axis last (docs/numerics.md, section 6).
_OPERAND_FORM = {
    ("fprop", "lhs"): "x [M,K]", ("fprop", "rhs"): "w [N,K]", ("dgrad", "lhs"): "dy [M,N]",
    ("dgrad", "rhs"): "w.T [K,N]", ("wgrad", "lhs"): "dy.T [N,M]", ("wgrad", "rhs"): "x.T [K,M]",
}  # fmt: skip


def _scaling_text(cast: Cast) -> str:
    if isinstance(cast.scaling, Delayed):
        algo = cast.scaling.amax_compute_algo
        name = algo if isinstance(algo, str) else getattr(algo, "__name__", "callable")
        return f"delayed({name} of {cast.scaling.amax_history_len}, margin {cast.scaling.margin})"
    return f"current(>= {cast.scaling.amax_epsilon:g})" if cast.scaling.amax_epsilon else "current"


def recipe_table(recipe: Recipe) -> str:
    """One line of the recipe's repr, then a row per operand; '-' marks what does not apply."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for gemm_name, side, *_ in OPERANDS:
        gemm, cast = getattr(recipe, gemm_name), recipe.cast(gemm_name, side)
        form = _OPERAND_FORM[gemm_name, side]
        if cast is None:
            described = ("high precision", "-", "-", "-", "-", "-")
        else:
            transform = f"{cast.hadamard.size}, {cast.hadamard.sign_mask:#06x}" if cast.hadamard else "-"
            fmt = cast.format
            described = (
                fmt.name, fmt.block_text, str(cast.scale_rule), cast.rounding, transform, _scaling_text(cast),
            )  # fmt: skip
        modes = ("-", "-") if gemm.is_high_precision else (gemm.accumulate, gemm.path)
        rows.append((gemm_name, form, *described, *modes))
    return "\n".join([repr(recipe), *text_table(rows)])
