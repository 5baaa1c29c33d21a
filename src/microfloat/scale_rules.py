"""Scale rules as rows of numbers: how an amax becomes a stored scale (docs/numerics.md, section 2).

Three kinds, one for each scale format: E8M0 rules ("threshold") differ in one mantissa threshold; FP32 rules ("ratio")
in whether the encode factor, max / amax, is rounded to a power of two; E4M3 rules ("two_level", NVFP4) in their
headroom and order of operations. Whoever computes scales knows kinds, not names, and refuses a kind that it does not
know.
"""

from dataclasses import dataclass

from microfloat.errors import NotSupportedError, invalid_type, invalid_value, unknown_name
from microfloat.formats import SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat, ScaleFormat


@dataclass(frozen=True)
class TwoLevel:
    """Constants of one NVFP4 rule. All are exact float32 values.

    `capacity`: the largest magnitude that codes x block scale can hold under a tensor scale of one; the encode factor
    of the tensor is ``capacity / A``. `inverse_six`: the factor that turns a block amax into a block scale (None where
    the rule divides by 6 instead). `smallest_scale`, `largest_scale`: clamps of the block scale (0 = none).
    `smallest_amax`: lower clamp of the tensor amax, which keeps the encode factor at about 2^117 or below.
    `tensor_scale`: False for one-level.
    `four_over_six`: None, or the error that chooses between mapping the block maximum to 6 or to 4 ("mae", "mse").
    """

    capacity: float
    inverse_six: float | None = None
    smallest_scale: float = 0.0
    largest_scale: float = 448.0
    smallest_amax: float = 2688.0 * 2.0**-117
    tensor_scale: bool = True
    four_over_six: str | None = None


_THRESHOLDS = ("never", "any", "even", "max")
KINDS = ("ratio", "threshold", "two_level")


@dataclass(frozen=True)
class ScaleRule:
    """One named rule: the scale format it writes, and the numbers that its kind needs.

    `kind`: how the numbers are used. None is the kind that `thresholds` or `two_level` belong to; a rule without them,
    and without a kind, is a kind of its own, which every backend refuses until it computes it.
    """

    name: str
    scale: ScaleFormat
    summary: str
    power_of_two: bool = False
    thresholds: dict[str, int] | str | None = None
    two_level: TwoLevel | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        if self.kind is None:
            threshold = isinstance(self.thresholds, dict) or self.thresholds in _THRESHOLDS
            kind = "two_level" if self.two_level is not None else "threshold" if threshold else self.name
            object.__setattr__(self, "kind", kind)

    def __hash__(self) -> int:
        return hash(self.name)


# Qwix's outlier-aware threshold: the exact image of its float32 chain on the mantissa (numerics 2.2; arXiv 2603.08713).
_OUTLIER_AWARE = {"E4M3": 0x6703BD, "E2M1": 0x5F9000}
_INVERSE_SIX = float.fromhex("0x1.555556p-3")  # f32(1/6)
_CAPACITY_17_16 = float.fromhex("0x1.3c3c3cp+11")  # f32(2688 * 16/17)
_INVERSE_SIX_17_16 = float.fromhex("0x1.6aaaaap-3")  # f32(17/96)


def _four_over_six(error: str, bound: int) -> ScaleRule:
    summary = f"per block the better, by {error}, of mapping its maximum to 6 or to 4; block scales up to {bound}"
    level = TwoLevel(capacity=6.0 * bound, smallest_amax=6.0 * bound * 2.0**-117, four_over_six=error)
    return ScaleRule(f"four_over_six_{error}_{bound}", SCALE_E4M3, summary, two_level=level)


SCALE_RULES = {
    rule.name: rule
    for rule in (
        ScaleRule("amax", SCALE_FP32, "encode by f32(max / amax)", kind="ratio"),
        ScaleRule("amax_pow2", SCALE_FP32, "the same, factor rounded down to 2^k", power_of_two=True, kind="ratio"),
        ScaleRule("floor", SCALE_E8M0, "OCP: 2^(floor(log2 amax) - emax); saturates", thresholds="never"),
        ScaleRule("ceil", SCALE_E8M0, "floor + 1 unless amax is a power of two", thresholds="any"),
        ScaleRule("even", SCALE_E8M0, "floor of amax rounded to the element's mantissa width", thresholds="even"),
        ScaleRule("rceil", SCALE_E8M0, "smallest 2^k with amax <= max * 2^k; never saturates", thresholds="max"),
        ScaleRule("oas", SCALE_E8M0, "outlier aware: may clip up to 3 %", thresholds=_OUTLIER_AWARE),
        ScaleRule(
            "two_level", SCALE_E4M3, "E4M3 block scale under an FP32 tensor scale",
            two_level=TwoLevel(capacity=2688.0, inverse_six=_INVERSE_SIX),
        ),
        ScaleRule(
            "two_level_torchao", SCALE_E4M3, "the same, dividing by 6 first; block scale >= 2^-6",
            two_level=TwoLevel(capacity=2688.0, smallest_scale=2.0**-6),
        ),
        ScaleRule(
            "one_level_e4m3", SCALE_E4M3, "E4M3 block scale only, >= 2^-6",
            two_level=TwoLevel(capacity=2688.0, smallest_scale=2.0**-6, tensor_scale=False),
        ),
        *(_four_over_six(error, bound) for error in ("mae", "mse") for bound in (256, 448)),
        ScaleRule(
            "two_level_17_16", SCALE_E4M3, "two_level with 16/17 headroom, so that stochastic rounding does not clip",
            two_level=TwoLevel(capacity=_CAPACITY_17_16, inverse_six=_INVERSE_SIX_17_16),
        ),
    )
}  # fmt: skip

_ALIASES = {"four_over_six": "four_over_six_mae_256"}


def check_kind(rule: ScaleRule, who: str) -> None:
    """Raise NotSupportedError for a rule of a kind that `who`, which computes all of KINDS, does not know."""
    if rule.kind not in KINDS:
        raise NotSupportedError(f"{who}: got {unknown_kind(rule)}, needed one of a kind that it computes: {KINDS}.")


def unknown_kind(rule: ScaleRule) -> str:
    """A rule of a new kind, in words."""
    return f"the scale rule {rule.name!r} of the kind {rule.kind!r}"


def e8m0_threshold(rule: ScaleRule, element: ElementFormat) -> int:
    """The smallest 23-bit mantissa of the block amax that makes `rule` take the next power of two.

    ``b = E(amax) - emax + (M(amax) >= threshold)``; 2^23 means never (docs/numerics.md 2.2).
    """
    if isinstance(rule.thresholds, dict):
        return rule.thresholds[element.name]
    max_mantissa = int((element.max / 2.0**element.emax - 1.0) * 2**23)
    return {
        "never": 1 << 23,
        "any": 1,
        "even": (1 << 23) - (1 << (22 - element.mantissa_bits)),
        "max": max_mantissa + 1,
    }[str(rule.thresholds)]


def resolve_scale_rule(name: str | None, fmt: ScaledFormat) -> str:
    """The canonical rule name for `fmt` (None = its default); InvalidValueError for a rule of another family."""
    name = fmt.default_scale_rule if name is None else name
    if not isinstance(name, str):
        raise invalid_type("scale_rule", type(name), "the name of a rule, such as 'rceil', or None")
    canonical = _ALIASES.get(name, name)
    if canonical not in SCALE_RULES:
        raise unknown_name("scale_rule", name, [*SCALE_RULES, *_ALIASES])
    rule = SCALE_RULES[canonical]
    if rule.scale != fmt.scale:
        fitting = [other.name for other in SCALE_RULES.values() if other.scale == fmt.scale]
        raise invalid_value(
            "scale_rule", repr(name), f"a rule that writes {fmt.scale} scales, as {fmt.name} has them",
            "Choose one of " + ", ".join(fitting) + ".",
        )  # fmt: skip
    if isinstance(rule.thresholds, dict) and fmt.element.name not in rule.thresholds:
        raise invalid_value(
            "scale_rule", f"{name!r} with {fmt.element} elements", "E4M3 or E2M1 elements", "Use 'rceil' instead."
        )
    if rule.two_level is not None and (fmt.element.max, fmt.element.bits) != (6.0, 4):
        raise invalid_value("scale_rule", f"{name!r} with {fmt.element} elements", "E2M1 elements")
    if rule.two_level is not None and rule.two_level.tensor_scale and fmt.tensor_scale is None:
        raise invalid_value(
            "scale_rule", f"{name!r} on {fmt.name}, which has no tensor scale", "a format with tensor_scale='tensor'",
            "Use NVFP4, or the rule 'one_level_e4m3'.",
        )  # fmt: skip
    return canonical
