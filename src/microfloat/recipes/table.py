"""The table that ``print(recipe)`` shows: a row for each of the six operands."""

from microfloat.operands import OPERANDS
from microfloat.recipes.core import Cast, Delayed, Recipe
from microfloat.support import text_table

__all__ = ["recipe_table"]

_HEADER = ("GEMM", "operand", "format", "block", "scale_rule", "rounding", "hadamard", "scaling", "accumulate", "path")
_AXES = {"x": "MK", "w": "NK", "dy": "MN"}


def _scaling_text(cast: Cast) -> str:
    if isinstance(cast.scaling, Delayed):
        algo = cast.scaling.amax_compute_algo
        name = algo if isinstance(algo, str) else getattr(algo, "__name__", "callable")
        return f"delayed({name} of {cast.scaling.amax_history_len}, margin {cast.scaling.margin})"
    if cast.is_static:
        return "static"
    return f"current(>= {cast.scaling.amax_epsilon:g})" if cast.scaling.amax_epsilon else "current"


def recipe_table(recipe: Recipe) -> str:
    """One line of the recipe's repr, then a row per operand; '-' marks what does not apply."""
    rows: list[tuple[str, ...]] = [_HEADER]
    for gemm_name, side, tensor, transposed, _ in OPERANDS:
        gemm, cast = getattr(recipe, gemm_name), recipe.cast(gemm_name, side)
        # The operand as the GEMM reads it: its contraction axis last (docs/numerics.md, section 6).
        name, axes = (f"{tensor}.T", _AXES[tensor][::-1]) if transposed else (tensor, _AXES[tensor])
        if cast is None:
            described = ("refused" if gemm.path == "refused" else "high precision", "-", "-", "-", "-", "-")
        elif gemm.from_fprop:
            described = (f"{cast.format.name} of fprop", "-", "-", "-", "-", "-")
        else:
            transform = f"{cast.hadamard.size}, {cast.hadamard.sign_mask:#06x}" if cast.hadamard else "-"
            fmt = cast.format
            described = (fmt.name, fmt.block_text, str(cast.scale_rule), cast.rounding, transform, _scaling_text(cast))
        modes = ("-", "-") if gemm.is_high_precision else (gemm.accumulate, gemm.path)
        rows.append((gemm_name, f"{name} [{axes[0]},{axes[1]}]", *described, *modes))
    return "\n".join([repr(recipe), *text_table(rows)])
