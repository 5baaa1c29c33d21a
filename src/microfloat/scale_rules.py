"""Scale rules as rows of numbers: how an amax becomes a stored scale (docs/numerics.md, section 2).

Three kinds, one for each kind of scale format: rules of powers of two such as E8M0 ("threshold") differ in one mantissa
threshold; FP32 rules ("ratio") in whether the encode factor, max / amax, is rounded to a power of two; rules of scales
with a mantissa such as E4M3 ("two_level") in their headroom and order of operations. Whoever computes scales knows
kinds, not names, and refuses a kind that it does not know. A Cast takes a rule by its name, or a `ScaleRule` of a known
kind by value.
"""

import json
from dataclasses import asdict, dataclass, replace

import numpy as np

from microfloat.arguments import check_bool, check_choice, check_int, check_name, check_number
from microfloat.errors import NotSupportedError, invalid_type, invalid_value, unknown_name
from microfloat.formats import E2M1, SCALE_E4M3, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat, ScaleFormat


@dataclass(frozen=True)
class TwoLevel:
    """Constants of one rule of block scales with a mantissa. All are exact float32 values; the defaults are NVFP4's.

    `capacity`: the largest magnitude that codes x block scale can hold under a tensor scale of one; the encode factor
    of the tensor is ``capacity / A``. `inverse_max`: the factor that turns a block amax into a block scale (None where
    the rule divides by the element's max instead). `smallest_scale`, `largest_scale`: clamps of the block scale (0 =
    none). `smallest_amax`: lower clamp of the tensor amax, which keeps a step of the block scale times the tensor scale
    a normal number. `tensor_scale`: False for one-level.
    `four_over_six`: None, or the error that chooses between mapping the block maximum to 6 or to 4 ("mae", "mse").
    """

    capacity: float
    inverse_max: float | None = None
    smallest_scale: float = 0.0
    largest_scale: float = 448.0
    smallest_amax: float = 2688.0 * 2.0**-117
    tensor_scale: bool = True
    four_over_six: str | None = None

    @staticmethod
    def of(element: ElementFormat, scale: ScaleFormat, *, headroom: float = 1.0, one_level: bool = False) -> "TwoLevel":
        """The constants of `two_level`, or of `one_level`, for a pair of formats; `headroom` times their capacity."""
        if scale.kind != "two_level":
            raise invalid_value("scale", scale, "a scale format with a mantissa in a byte, such as SCALE_E4M3")
        check_number("headroom", headroom, "a number from 0.25 to 4", 0.25, 4.0)
        reach = float(np.float32(element.max * headroom))
        smallest, inverse = (scale.element.min_normal, None) if one_level else (0.0, float(np.float32(1 / reach)))
        capacity = float(np.float32(reach * scale.element.max))
        least = element.max * scale.element.max * 2.0**-126 / scale.element.step
        return TwoLevel(capacity, inverse, smallest, scale.element.max, least, not one_level)


_THRESHOLDS = ("never", "any", "even", "max")
KINDS = ("ratio", "threshold", "two_level")


@dataclass(frozen=True)
class ScaleRule:
    """One named rule: a scale format that it writes, and the numbers that its kind needs.

    `kind`: how the numbers are used. None is the kind that `thresholds` or `two_level` belong to; a rule without them,
    and without a kind, is a kind of its own, which every backend refuses until it computes it. `thresholds`: "never",
    "any", "even", "max", or the mantissa of the block amax in [1, 2^23] from which the next power of two is taken, for
    every element or by the names of elements. The names of the stock rules stand for their numbers.
    """

    name: str
    scale: ScaleFormat
    summary: str = ""
    power_of_two: bool = False
    thresholds: dict[str, int] | str | int | None = None
    two_level: TwoLevel | None = None
    kind: str | None = None

    def __post_init__(self) -> None:
        check_name("ScaleRule.name", self.name)
        for field, kind in (("scale", ScaleFormat), ("two_level", TwoLevel | None)):
            if not isinstance(getattr(self, field), kind):
                raise invalid_type(f"ScaleRule.{field}", type(getattr(self, field)), f"a {kind}")
        given = self.thresholds
        for value in given.values() if isinstance(given, dict) else () if isinstance(given, str | None) else [given]:
            check_int("ScaleRule.thresholds", value, 1, 1 << 23)
        check_bool("ScaleRule.power_of_two", self.power_of_two)
        if self.kind is None:
            threshold = isinstance(self.thresholds, dict | int) or self.thresholds in _THRESHOLDS
            simple = "threshold" if threshold else "ratio" if self.power_of_two else self.name
            kind = "two_level" if self.two_level is not None else simple
            object.__setattr__(self, "kind", kind)
        # Beside the fields, as in ScaledFormat: all numbers, as JSON.
        object.__setattr__(self, "contents", json.dumps(asdict(self), sort_keys=True))

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name


# Qwix's outlier-aware threshold: the exact image of its float32 chain on the mantissa (numerics 2.2; arXiv 2603.08713).
_OUTLIER_AWARE = {"E4M3": 0x6703BD, "E2M1": 0x5F9000}


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
            two_level=TwoLevel.of(E2M1, SCALE_E4M3),
        ),
        ScaleRule(
            "two_level_torchao", SCALE_E4M3, "the same, dividing by 6 first; block scale >= 2^-6",
            two_level=TwoLevel(capacity=2688.0, smallest_scale=2.0**-6),
        ),
        ScaleRule(
            "one_level_e4m3", SCALE_E4M3, "E4M3 block scale only, >= 2^-6",
            two_level=TwoLevel(capacity=2688.0, smallest_scale=2.0**-6, tensor_scale=False),
        ),
        ScaleRule(
            "one_level", SCALE_E4M3, "block scale with a mantissa only, at least its smallest normal value",
            two_level=TwoLevel.of(E2M1, SCALE_E4M3, one_level=True),
        ),
        *(_four_over_six(error, bound) for error in ("mae", "mse") for bound in (256, 448)),
        ScaleRule(
            "two_level_17_16", SCALE_E4M3, "two_level with 16/17 headroom, so that stochastic rounding does not clip",
            two_level=TwoLevel.of(E2M1, SCALE_E4M3, headroom=16 / 17),
        ),
        ScaleRule(
            "two_level_256", SCALE_E4M3, "two_level with block scales up to 256, which rounding='eden' may raise",
            two_level=TwoLevel(capacity=256 * 6.07210636138916, inverse_max=0.16468749940395355),
        ),
    )
}  # fmt: skip

_ALIASES = {"four_over_six": "four_over_six_mae_256"}


def check_kind(rule: ScaleRule, who: str) -> None:
    """Raise NotSupportedError for a rule of a kind that `who`, which computes all of KINDS, does not know."""
    if rule.kind not in KINDS:
        needed = f"a kind that it computes, by thresholds=, two_level= or power_of_two=: one of {KINDS}"
        raise NotSupportedError(f"{who}: got {unknown_kind(rule)}, needed {needed}.")


def unknown_kind(rule: ScaleRule) -> str:
    """A rule of a new kind, in words."""
    return f"the scale rule {rule.name!r} of the kind {rule.kind!r}"


def e8m0_threshold(rule: ScaleRule, element: ElementFormat) -> int:
    """The smallest 23-bit mantissa of the block amax that makes `rule` take the next power of two.

    ``b = E(amax) - emax + (M(amax) >= threshold)``; 2^23 means never (docs/numerics.md 2.2).
    """
    if isinstance(rule.thresholds, int):
        return rule.thresholds
    if isinstance(rule.thresholds, dict):
        return rule.thresholds[element.name]
    max_mantissa = int((element.max / 2.0**element.emax - 1.0) * 2**23)
    even = (1 << 23) - (1 << (22 - element.mantissa_bits))
    return {"never": 1 << 23, "any": 1, "even": even, "max": max_mantissa + 1}[str(rule.thresholds)]


# Rules whose numbers follow from the formats; other stock rules of this kind are for E2M1 elements and E4M3 scales.
_OPEN = {"two_level": False, "one_level": True}


def resolve_scale_rule(given: str | ScaleRule | None, fmt: ScaledFormat) -> str | ScaleRule:
    """The canonical name of a stock rule for `fmt` (None = its default), or a rule of a user's own itself.

    InvalidValueError for a rule of another kind than the scales of `fmt`, for other elements, or with numbers that
    leave float32.
    """
    given = fmt.default_scale_rule if given is None else given
    if not isinstance(given, str | ScaleRule):
        needed = "the name of a rule, such as 'rceil', a ScaleRule, or None"
        raise invalid_type("scale_rule", type(given), needed)
    name = _ALIASES.get(str(given), str(given))
    if isinstance(given, str) and name not in SCALE_RULES:
        raise unknown_name("scale_rule", given, [*SCALE_RULES, *_ALIASES])
    rule = given if isinstance(given, ScaleRule) else SCALE_RULES[name]
    if SCALE_RULES.get(name, rule) != rule:
        raise invalid_value("ScaleRule.name", f"{name!r} for other numbers than the stock rule's", "a name of its own")
    if rule.kind != fmt.scale.kind if rule.kind in KINDS else rule.scale != fmt.scale:
        fitting = [other.name for other in SCALE_RULES.values() if other.kind == fmt.scale.kind]
        raise invalid_value(
            "scale_rule", repr(str(given)), f"a rule that writes {fmt.scale} scales, as {fmt.name} has them",
            "Choose one of " + ", ".join(fitting) + ".",
        )  # fmt: skip
    if isinstance(rule.thresholds, dict) and fmt.element.name not in rule.thresholds:
        needed = " or ".join(rule.thresholds) + " elements"
        raise invalid_value("scale_rule", f"{name!r} with {fmt.element} elements", needed, "Use 'rceil' instead.")
    if rule.two_level is not None:
        _check_level(rule.two_level, name, fmt)
    return name if name in SCALE_RULES else rule


def _check_level(level: TwoLevel, name: str, fmt: ScaledFormat) -> None:
    """Refuse formats that a rule with this level does not serve, and numbers that it cannot compute with."""
    element, scale, is_own = fmt.element, fmt.scale.element, name not in SCALE_RULES
    if is_own or name in _OPEN:
        fits = (element.max, element.bits) == (6.0, 4) or not level.four_over_six
    else:
        fits = (element.max, element.bits, fmt.scale) == (6.0, 4, SCALE_E4M3)
    if not fits:
        got, fix = f"{name!r} with {element} elements and {fmt.scale} scales", "Use 'two_level' or 'one_level' here."
        raise invalid_value("scale_rule", got, "E2M1 elements and E4M3 scales", fix)
    if level.tensor_scale and fmt.tensor_scale is None:
        raise invalid_value(
            "scale_rule", f"{name!r} on {fmt.name}, which has no tensor scale", "a format with tensor_scale='tensor'",
            "Give it one, or use the rule 'one_level'; in a rule of your own TwoLevel.of(..., one_level=True).",
        )  # fmt: skip
    if not is_own:
        return
    check_choice("TwoLevel.four_over_six", level.four_over_six or "mae", ("mae", "mse"), or_none=True)
    check_number("TwoLevel.capacity", level.capacity, "a float32 number", 0.0, 2.0**120)
    divides = level.inverse_max is None and level.four_over_six is None
    limits = {
        "capacity": (2.0**-60, 2.0**120), "inverse_max": (2.0**-60, 2.0**60),
        "smallest_scale": (scale.step if divides else 0.0, scale.max), "largest_scale": (scale.step, scale.max),
        "smallest_amax": (level.capacity * 2.0**-126 / scale.step, 2.0**127),
    }  # fmt: skip
    for field, ends in limits.items():
        value, needed = getattr(level, field), f"a float32 number in {list(ends)} for {fmt.scale} scales"
        exact = value if value is None else float(np.float32(check_number(f"TwoLevel.{field}", value, needed, *ends)))
        if exact != value:
            raise invalid_value(f"TwoLevel.{field}", repr(value), needed, f"Use {exact!r}.")


def rule_of(resolved: str | ScaleRule, fmt: ScaledFormat) -> ScaleRule:
    """The rule that `resolve_scale_rule` found, with the numbers that it has for `fmt`."""
    if isinstance(resolved, ScaleRule):
        return resolved
    rule = SCALE_RULES[resolved]
    if resolved not in _OPEN or (fmt.element, fmt.scale) == (E2M1, SCALE_E4M3):
        return rule
    return replace(rule, scale=fmt.scale, two_level=TwoLevel.of(fmt.element, fmt.scale, one_level=_OPEN[resolved]))
