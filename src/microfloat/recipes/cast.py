"""Cast: how one operand is quantized, as data that is checked when it is built (docs/numerics.md, section 10)."""

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from microfloat.arguments import check_bool, check_choice, check_int, check_number
from microfloat.errors import invalid_type, invalid_value, kind_of, unknown_name
from microfloat.formats import ELEMENT_NAME, FORMATS, NVFP4, ScaledFormat, get_format
from microfloat.scale_rules import ScaleRule, resolve_scale_rule, rule_of

_KEYS: "dict[HashOnce, object]" = {}  # see `HashOnce._key`


class HashOnce:
    """Base of frozen dataclasses whose hash is computed once per object, so that caches find them by value cheaply."""

    # The hash never leaves the process, because hashes of strings differ between processes.

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__eq__" not in vars(cls):  # a dataclass keeps a hash that its class brings along
            cls.__hash__ = HashOnce.__hash__  # type: ignore[method-assign]

    def __hash__(self) -> int:
        try:
            return self._hash  # type: ignore[attr-defined]
        except AttributeError:
            compared = [entry.name for entry in fields(self) if entry.compare]  # type: ignore[arg-type]
            value = hash((type(self), *[getattr(self, name) for name in compared]))
            object.__setattr__(self, "_hash", value)
            return value

    @functools.cached_property
    def _key(self) -> object:
        """One object for all equal values of this process, for tables that every call looks into: it hashes in C."""
        return _KEYS.setdefault(self, object())

    def __getstate__(self) -> dict:
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), functools.cached_property)}
        return {name: value for name, value in vars(self).items() if name != "_hash" and name not in made}


_LONGEST_HISTORY = 1 << 20
_FLOAT32_MAX = float.fromhex("0x1.fffffep+127")


@dataclass(frozen=True)
class Current:
    """Scale from the amax of the tensor itself, at least `amax_epsilon` (same unit as the tensor)."""

    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        needed = "a number >= 0 in the range of float32"
        epsilon = check_number("amax_epsilon", self.amax_epsilon, needed, 0.0, _FLOAT32_MAX)
        object.__setattr__(self, "amax_epsilon", epsilon)


@dataclass(frozen=True)
class Delayed:
    """Scale from the amaxes of earlier steps (docs/numerics.md 3.3).

    ``scale_enc = max / amax_compute_algo(history) * 2^-margin``; the history holds `amax_history_len` steps; with
    `reduce_amax` live amaxes are MAX-reduced over the autocast's group. `amax_compute_algo` is "max", "most_recent" or
    a callable that maps the history to one amax.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable = "max"
    reduce_amax: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.margin, float) and self.margin.is_integer():  # as TransformerEngine also writes it
            object.__setattr__(self, "margin", int(self.margin))
        check_int("margin", self.margin, -64, 64)
        check_int("amax_history_len", self.amax_history_len, 1, _LONGEST_HISTORY)
        if not callable(self.amax_compute_algo):
            check_choice("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))
        check_bool("reduce_amax", self.reduce_amax)


@dataclass(frozen=True)
class Static(Current):
    """Scale from an amax that `microfloat.torch.calibrate` measured beforehand and that is passed with every call."""


@dataclass(frozen=True)
class Hadamard:
    """The transform ``diag(sgn) H / sqrt(size)`` of 16 or 64 points along the contraction axis (docs/numerics.md 5.2).

    If bit i of `sign_mask` is set, sgn_i = -1. Kernels have size 16.
    """

    size: int = 16
    sign_mask: int = 0xD7E8

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size not in (16, 64):
            raise invalid_value("Hadamard.size", self.size, "16 or 64", "Their factor, 1/sqrt(size), is exact.")
        check_int("Hadamard.sign_mask", self.sign_mask, 0, (1 << self.size) - 1)

    def __repr__(self) -> str:
        return f"Hadamard({self.size}, {self.sign_mask:#0{self.size // 4 + 2}x})"

    @property
    def signs(self) -> list[int]:
        """+1 or -1 for each of the points."""
        return [1 - 2 * (self.sign_mask >> i & 1) for i in range(self.size)]


class CastFacts(HashOnce):
    """What follows from the fields of a Cast, computed when it is made.

    These are not fields, because Dynamo passes fields to constructors. `rule`: the row of numbers behind `scale_rule`.
    `is_delayed`: the scale comes from earlier steps. `is_static`: the amax was measured beforehand and comes with the
    call. `is_stochastic`: it draws random bytes. `chooses_by_error`: a block's scale depends on the errors of its
    elements, and not on its amax alone. `tensor_scale`: the second scale that it stores, None, "tensor" or "row".
    `contents`: all that decides the bytes, as JSON: how compiled code takes in a Cast, since it can guard a string.
    """

    rule: ScaleRule
    is_delayed: bool
    is_static: bool
    is_stochastic: bool
    chooses_by_error: bool
    tensor_scale: str | None
    contents: str


@dataclass(frozen=True)
class Cast(CastFacts):
    """How one operand is cast to low precision: format, scale rule, rounding, Hadamard transform, scaling.

    The resolved rule name is stored, so equal Casts compare equal. `format` may be a name such as "mxfp8", `scale_rule`
    a name or a `ScaleRule` of a user's own, `rounding` "nearest", "stochastic" or "eden" (nearest elements, unbiased by
    their block scales: docs/numerics.md 5.5). Raises InvalidValueError for a combination that is not defined
    (docs/numerics.md, section 10).
    """

    format: ScaledFormat
    scale_rule: str | ScaleRule | None = None
    rounding: str = "nearest"
    hadamard: Hadamard | None = None
    scaling: Current | Delayed = None  # type: ignore[assignment]  # as the format, resolved below
    is_gradient: ClassVar[bool] = False  # True for a `GradientCast` only

    def __post_init__(self) -> None:
        fmt = as_scaled_format(self.format, "Cast.format")
        object.__setattr__(self, "format", fmt)
        check_choice("rounding", self.rounding, ("nearest", "stochastic", "eden"))
        if self.scale_rule is None and self.rounding == "eden" and fmt == NVFP4:
            object.__setattr__(self, "scale_rule", "two_level_256")
        object.__setattr__(self, "scale_rule", resolve_scale_rule(self.scale_rule, fmt))
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise invalid_type("hadamard", type(self.hadamard), "None or Hadamard(size, sign_mask)")
        if self.scaling is None:
            object.__setattr__(self, "scaling", Current())
        if not isinstance(self.scaling, Current | Delayed):
            raise invalid_type("scaling", type(self.scaling), "Current(...) or Delayed(...)")
        scaling, hadamard = self.scaling, self.hadamard
        rule = rule_of(self.scale_rule, fmt)  # type: ignore[arg-type]  # resolved above
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "is_delayed", isinstance(scaling, Delayed))
        object.__setattr__(self, "is_static", isinstance(scaling, Static))
        object.__setattr__(self, "is_stochastic", self.rounding != "nearest")
        level = rule.two_level
        object.__setattr__(self, "chooses_by_error", level is not None and level.four_over_six is not None)
        stores_two = level is not None and level.tensor_scale
        object.__setattr__(self, "tensor_scale", self.format.tensor_scale if stores_two else None)
        self._check_combination()
        if isinstance(scaling, Delayed) and callable(scaling.amax_compute_algo):
            scaling = Delayed()  # how a history is read plays no part in a cast
        numbers = tuple([(name, getattr(scaling, name)) for name in type(scaling).__dataclass_fields__])
        contents = contents_of_cast(
            self.format.contents, getattr(self.scale_rule, "contents", self.scale_rule), self.rounding,
            None if hadamard is None else (hadamard.size, hadamard.sign_mask), type(scaling).__name__, numbers,
        )  # fmt: skip
        object.__setattr__(self, "contents", contents)

    def __getstate__(self) -> dict:
        return {name: getattr(self, name) for name in Cast.__match_args__}  # what follows from these is made anew

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self.__post_init__()

    def _check_combination(self) -> None:
        if self.hadamard is not None and self.format.is_per_tensor:
            raise invalid_value(
                "hadamard", f"{self.hadamard} on {self.format.name}", "None on a per-tensor format",
                "Its one quantization serves both orientations; use a blocked format.",
            )  # fmt: skip
        if self.hadamard is not None and self.format.tensor_scale == "row":
            raise invalid_value(
                "hadamard", f"{self.hadamard} on {self.format.name}", "None on a format with a tensor scale per row",
                "Such scales are for activations as they are; use NVFP4.",
            )  # fmt: skip
        has_scales = self.format.scale.kind == "two_level" and self.format.block == (1, 16)
        if self.rounding == "eden" and (self.hadamard is None or not has_scales):
            raise invalid_value(
                "rounding", f"'eden' on {self.format.name} with hadamard {self.hadamard}",
                "1x16 blocks whose scales have a mantissa, and a Hadamard transform, such as NVFP4 and Hadamard(64)",
            )  # fmt: skip
        if self.chooses_by_error and (self.hadamard is not None or self.rounding != "nearest"):
            raise invalid_value(
                "scale_rule", f"{str(self.scale_rule)!r} with Hadamard or stochastic rounding",
                "nearest rounding, no Hadamard",
                "four_over_six chooses by the error of nearest rounding; use 'two_level' here.",
            )  # fmt: skip
        is_per_tensor_amax = self.format.is_per_tensor and self.scale_rule == "amax"
        if isinstance(self.scaling, Delayed) and not is_per_tensor_amax:
            raise invalid_value(
                "scaling", f"Delayed with {self.format.name} and rule {str(self.scale_rule)!r}",
                "FP8_TENSOR or FP8_TENSOR_E5M2 with rule 'amax'", "Use Current() here.",
            )  # fmt: skip
        if isinstance(self.scaling, Static) and (not self.takes_amax or self.tensor_scale == "row"):
            raise invalid_value(
                "scaling", f"Static with {self.format.name} and rule {str(self.scale_rule)!r}",
                "a format with one scale for the whole tensor: FP8_TENSOR or NVFP4", "Use Current() here.",
            )  # fmt: skip
        if isinstance(self.scaling, Current) and self.scaling.amax_epsilon and self.format.scale.name != "FP32":
            raise invalid_value("amax_epsilon", self.scaling.amax_epsilon, f"0 for {self.format.name} (no FP32 scale)")

    @functools.cached_property
    def of_gradient(self) -> "Cast":
        """The same cast of an output gradient, as the products of a layer run it."""
        if self.rule.kind == "threshold":
            return self
        made = object.__new__(GradientCast)
        vars(made).update(vars(self))  # which were checked when this cast was made
        vars(made).pop("_hash", None)  # it is another one for another class
        return made

    @property
    def _cells(self) -> tuple[str, ...]:
        """Format, block, scale rule, rounding, Hadamard transform and scaling as text, for tables."""
        transform = f"{self.hadamard.size}, {self.hadamard.sign_mask:#06x}" if self.hadamard else "-"
        scaling = self.scaling
        if isinstance(scaling, Delayed):
            algo = scaling.amax_compute_algo
            name = algo if isinstance(algo, str) else getattr(algo, "__name__", "callable")
            shown = f"delayed({name} of {scaling.amax_history_len}, margin {scaling.margin})"
        elif self.is_static:
            shown = "static"
        else:
            shown = f"current(>= {scaling.amax_epsilon:g})" if scaling.amax_epsilon else "current"
        return self.format.name, self.format.block_text, str(self.scale_rule), self.rounding, transform, shown

    @property
    def takes_amax(self) -> bool:
        """True where the cast measures an amax of the whole tensor, or of its rows, which `amax=` may replace."""
        measured = self.format.is_per_tensor and self.format.scale.name == "FP32" and not self.is_delayed
        return measured or self.tensor_scale is not None

    @property
    def transposes(self) -> bool:
        """True where the codes of the transposed tensor are the transposed codes, so one cast may serve two GEMMs."""
        # Rules that choose by an error sum rows first, so that a near tie may fall the other way.
        deterministic = self.hadamard is None and not self.is_stochastic and not self.chooses_by_error
        return self.format.transposes and deterministic


def contents_of_cast(
    fmt: str, scale_rule: Any, rounding: str, hadamard: tuple[int, int] | None, scaling: str, numbers: tuple
) -> str:
    """The `contents` of a Cast as JSON; `fmt`: those of its format, `numbers`: names and values of the scaling."""
    data = {
        "format": json.loads(fmt), "rounding": rounding,
        "scale_rule": json.loads(scale_rule) if scale_rule and scale_rule.startswith("{") else scale_rule,
        "hadamard": hadamard and {"size": hadamard[0], "sign_mask": hadamard[1]},
        "scaling": {"kind": scaling, **dict(numbers)},
    }  # fmt: skip
    return json.dumps(data, sort_keys=True)


# Dynamo follows the constructor of a Cast, and takes the function for a constant.
contents_of_cast._dynamo_marked_constant = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class GradientCast(Cast):
    """A Cast of an output gradient as dgrad and wgrad read it: the same codes, and scales that show an overflow.

    Where the amax of a scope (tensor, row, block) is infinite, so that its elements saturate, the product receives NaN
    instead of the stored scale (with two levels, instead of the outer one). dx and dw are then not finite, which is
    what a GradScaler looks for. E8M0 scales do so by themselves. Source: docs/numerics.md 8.4.
    """

    is_gradient: ClassVar[bool] = True


def _is_recipe(value: object) -> bool:
    return hasattr(value, "for_call")  # a Recipe or its class, which stand above this module


# Hints about names that are no formats: each takes a name and returns a hint or "". `recipes.names` adds one.
HINTS: list[Callable[[str], str]] = []


def as_scaled_format(fmt: ScaledFormat | str, argument: str = "format") -> ScaledFormat:
    """A ScaledFormat from itself or its lower-case name; errors call it `argument`."""
    if isinstance(fmt, ScaledFormat):
        return fmt
    if not isinstance(fmt, str):
        raise invalid_type(
            argument, kind_of(fmt), "a ScaledFormat such as formats.MXFP8, or its name",
            "A Recipe has six Casts; take the format of one, for example recipe.fprop.rhs.format." if _is_recipe(fmt)
            else "",
        )  # fmt: skip
    if ":" in fmt or ELEMENT_NAME.fullmatch(fmt):
        return get_format(fmt, argument)
    if fmt not in FORMATS:
        raise unknown_name(argument, fmt, FORMATS, " ".join(filter(None, (hint(fmt) for hint in HINTS))))
    return FORMATS[fmt]


@functools.lru_cache(maxsize=256)
def _default_cast(fmt: ScaledFormat) -> Cast:
    return Cast(fmt)


def as_cast(cast: "Cast | ScaledFormat | str") -> Cast:
    """A Cast from a Cast, a ScaledFormat (its defaults), or a lower-case format name."""
    if isinstance(cast, Cast):
        return cast
    if isinstance(cast, ScaledFormat | str):
        return _default_cast(as_scaled_format(cast, "cast"))
    raise invalid_type(
        "cast", kind_of(cast), "a Cast, a ScaledFormat or a lower-case name such as 'mxfp8'",
        "A Recipe has six Casts; take one, for example recipe.fprop.lhs." if _is_recipe(cast)
        else "A pair of casts takes a pair of axes: axis=(-1, -2)." if isinstance(cast, tuple) else "",
    )  # fmt: skip
