"""Recipe -> Gemm -> Cast: immutable data that fills the table of three GEMMs and six operands.

fprop ``y = x @ w.T`` contracts K (operands x, w); dgrad ``dx = dy @ w`` contracts N (dy, w); wgrad ``dw = dy.T @ x``
contracts M (dy, x). Validity is checked when an object is built (docs/numerics.md, section 10), so later code need not
ask which recipe it runs.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

from microfloat._environment import warn_of_peer
from microfloat.arguments import check_bool, check_choice, check_int, check_number
from microfloat.contents import contents_of_cast
from microfloat.errors import NotSupportedError, invalid_type, invalid_value, kind_of, unknown_name
from microfloat.formats import E5M2, FORMATS, ScaledFormat
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes._ported import PortedQuestions
from microfloat.scale_rules import SCALE_RULES, ScaleRule, resolve_scale_rule

__all__ = [
    "Cast", "Current", "CustomRecipe", "Delayed", "Gemm", "GradientCast", "Hadamard", "NamedRecipe", "Recipe", "Static",
    "as_cast", "as_scaled_format",
]  # fmt: skip


class HashOnce:
    """Base of frozen dataclasses whose hash is computed once per object, so that caches find them by value cheaply.

    The hash never leaves the process, because hashes of strings differ between processes.
    """

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

    def __getstate__(self) -> dict:
        made = {name for name in vars(self) if isinstance(getattr(type(self), name, None), functools.cached_property)}
        return {name: value for name, value in vars(self).items() if name != "_hash" and name not in made}


_LONGEST_HISTORY = 1 << 20
_FLOAT32_MAX = float.fromhex("0x1.fffffep+127")
_KEYS: "dict[Recipe, object]" = {}  # see `Recipe._key`


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
    """The 16-point Hadamard transform ``diag(sgn) H / 4`` along the contraction axis (docs/numerics.md 5.2).

    If bit i of `sign_mask` is set, sgn_i = -1. Only size 16 exists.
    """

    size: int = 16
    sign_mask: int = 0xD7E8

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, int) or self.size != 16:
            raise invalid_value("Hadamard.size", self.size, "16", "The transform is defined for blocks of 16 only.")
        check_int("Hadamard.sign_mask", self.sign_mask, 0, 0xFFFF)

    def __repr__(self) -> str:
        return f"Hadamard({self.size}, {self.sign_mask:#06x})"


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

    The resolved rule name is stored, so equal Casts compare equal. `format` may be a name such as "mxfp8". Raises
    InvalidValueError for a combination that is not defined (docs/numerics.md, section 10).
    """

    format: ScaledFormat
    scale_rule: str | None = None
    rounding: str = "nearest"
    hadamard: Hadamard | None = None
    scaling: Current | Delayed = None  # type: ignore[assignment]  # as the format, resolved below
    is_gradient: ClassVar[bool] = False  # True for a `GradientCast` only

    def __post_init__(self) -> None:
        fmt = as_scaled_format(self.format, "Cast.format")
        object.__setattr__(self, "format", fmt)
        object.__setattr__(self, "scale_rule", resolve_scale_rule(self.scale_rule, fmt))
        check_choice("rounding", self.rounding, ("nearest", "stochastic"))
        if self.hadamard is not None and not isinstance(self.hadamard, Hadamard):
            raise invalid_type("hadamard", type(self.hadamard), "None or Hadamard(16, sign_mask)")
        if self.scaling is None:
            object.__setattr__(self, "scaling", Current())
        if not isinstance(self.scaling, Current | Delayed):
            raise invalid_type("scaling", type(self.scaling), "Current(...) or Delayed(...)")
        scaling, hadamard = self.scaling, self.hadamard
        rule = SCALE_RULES[str(self.scale_rule)]
        object.__setattr__(self, "rule", rule)
        object.__setattr__(self, "is_delayed", isinstance(scaling, Delayed))
        object.__setattr__(self, "is_static", isinstance(scaling, Static))
        object.__setattr__(self, "is_stochastic", self.rounding == "stochastic")
        level = rule.two_level
        object.__setattr__(self, "chooses_by_error", level is not None and level.four_over_six is not None)
        stores_two = level is not None and level.tensor_scale
        object.__setattr__(self, "tensor_scale", self.format.tensor_scale if stores_two else None)
        self._check_combination()
        if isinstance(scaling, Delayed) and callable(scaling.amax_compute_algo):
            scaling = Delayed()  # how a history is read plays no part in a cast
        numbers = tuple([(name, getattr(scaling, name)) for name in type(scaling).__dataclass_fields__])
        contents = contents_of_cast(
            self.format.contents, self.scale_rule, self.rounding,
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
        if self.chooses_by_error and (self.hadamard is not None or self.rounding == "stochastic"):
            raise invalid_value(
                "scale_rule", f"{self.scale_rule!r} with Hadamard or stochastic rounding",
                "nearest rounding, no Hadamard",
                "four_over_six chooses by the error of nearest rounding; use 'two_level' here.",
            )  # fmt: skip
        is_per_tensor_amax = self.format.is_per_tensor and self.scale_rule == "amax"
        if isinstance(self.scaling, Delayed) and not is_per_tensor_amax:
            raise invalid_value(
                "scaling", f"Delayed with {self.format.name} and rule {self.scale_rule!r}",
                "FP8_TENSOR or FP8_TENSOR_E5M2 with rule 'amax'", "Use Current() here.",
            )  # fmt: skip
        if isinstance(self.scaling, Static) and (not self.takes_amax or self.tensor_scale == "row"):
            raise invalid_value(
                "scaling", f"Static with {self.format.name} and rule {self.scale_rule!r}",
                "a format with one scale for the whole tensor: FP8_TENSOR or NVFP4", "Use Current() here.",
            )  # fmt: skip
        if isinstance(self.scaling, Current) and self.scaling.amax_epsilon and self.format.scale.name != "FP32":
            raise invalid_value("amax_epsilon", self.scaling.amax_epsilon, f"0 for {self.format.name} (no FP32 scale)")

    @functools.cached_property
    def of_gradient(self) -> "Cast":
        """The same cast of an output gradient, as the products of a layer run it."""
        if self.format.scale.name == "E8M0":
            return self
        made = object.__new__(GradientCast)
        vars(made).update(vars(self))  # which were checked when this cast was made
        vars(made).pop("_hash", None)  # it is another one for another class
        return made

    @property
    def takes_amax(self) -> bool:
        """True where the cast measures an amax of the whole tensor, or of its rows, which `amax=` may replace."""
        measured = self.format.is_per_tensor and self.format.scale.name == "FP32" and not self.is_delayed
        return measured or self.tensor_scale is not None

    @property
    def transposes(self) -> bool:
        """True where the codes of the transposed tensor are the transposed codes, so one cast may serve two GEMMs.

        Rules that choose by an error do not guarantee this: rows are summed first, so a near tie may fall the other
        way.
        """
        deterministic = self.hadamard is None and not self.is_stochastic and not self.chooses_by_error
        return self.format.transposes and deterministic


@dataclass(frozen=True)
class GradientCast(Cast):
    """A Cast of an output gradient as dgrad and wgrad read it: the same codes, and scales that show an overflow.

    Where the amax of a scope (tensor, row, block) is infinite, so that its elements saturate, the product receives NaN
    instead of the stored scale (with two levels, instead of the outer one). dx and dw are then not finite, which is
    what a GradScaler looks for. E8M0 scales do so by themselves. Source: docs/numerics.md 8.4.
    """

    is_gradient: ClassVar[bool] = True


def _is_recipe(value: object) -> bool:
    return isinstance(value, Recipe) or (isinstance(value, type) and issubclass(value, Recipe))


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
    if fmt not in FORMATS:
        from microfloat.recipes import names

        raise unknown_name(argument, fmt, FORMATS, names.hint_of_recipe(fmt))
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


@dataclass(frozen=True)
class Gemm(HashOnce):
    """The two Casts of one GEMM (None = high precision), how it accumulates, and its path on chips without MX GEMMs.

    `accumulate`: "split" (partial sums over at most 128 contraction elements added in float32), "fast" (hardware
    accumulator), "exact" (reference backend only). `path`: "exact", "folded" or "auto" (docs/numerics.md, section 10);
    "refused", for a GEMM without casts, makes calling it an error. `from_fprop`, for dgrad and wgrad: lhs is None, and
    rhs is the operand that fprop has read, dequantized to the compute dtype, instead of one that is cast along this
    GEMM's own contraction axis.
    """

    lhs: Cast | None
    rhs: Cast | None
    accumulate: str = "split"
    path: str = "auto"
    from_fprop: bool = False

    def __post_init__(self) -> None:
        for name in ("lhs", "rhs"):
            cast = getattr(self, name)
            if isinstance(cast, str | ScaledFormat):  # not by `_default_cast`: Dynamo warns of a cache that it traces
                object.__setattr__(self, name, Cast(as_scaled_format(cast, f"Gemm.{name}")))
            elif cast is not None and not isinstance(cast, Cast):
                raise invalid_type(f"Gemm.{name}", type(cast), "a Cast, a format name, or None (high precision)")
        check_choice("accumulate", self.accumulate, ("fast", "split", "exact"))
        check_choice("path", self.path, ("exact", "folded", "auto", "refused"))
        check_bool("from_fprop", self.from_fprop)
        if self.path == "refused" and not self.is_high_precision:
            raise invalid_value("Gemm.path", "'refused' with casts", "'refused' for Gemm(None, None) alone")
        if self.from_fprop and (self.lhs is not None or self.rhs is None or self.rhs.hadamard is not None):
            raise invalid_value(
                "Gemm.from_fprop", f"True with {self.lhs} x {self.rhs}",
                "None x the Cast of fprop's operand, without a Hadamard transform", "It serves dgrad and wgrad only.",
            )  # fmt: skip
        if self.lhs is not None and self.rhs is not None:
            self._check_pair(self.lhs, self.rhs)

    @staticmethod
    def _check_pair(lhs: Cast, rhs: Cast) -> None:
        if lhs.format.scale != rhs.format.scale:
            raise invalid_value(
                "Gemm", f"{lhs.format.name} x {rhs.format.name} ({lhs.format.scale} x {rhs.format.scale} scales)",
                "operands of one family (both FP32, both E8M0 or both E4M3 scales)",
                "Dequantize one of them by giving None for its Cast.",
            )  # fmt: skip
        if lhs.format.element == E5M2 and rhs.format.element == E5M2:
            raise invalid_value("Gemm", "E5M2 x E5M2", "at least one E4M3 operand", "No such GEMM exists in hardware.")
        if lhs.hadamard != rhs.hadamard:
            raise invalid_value(
                "Gemm", f"hadamard {lhs.hadamard} x {rhs.hadamard}", "the same Hadamard on both, or on neither",
                "The transform cancels only when both share it.",
            )  # fmt: skip

    @property
    def is_high_precision(self) -> bool:
        """True where no operand is quantized."""
        return self.lhs is None and self.rhs is None

    @property
    def casts(self) -> tuple[Cast | None, Cast | None]:
        """(lhs, rhs)."""
        return self.lhs, self.rhs


@dataclass(frozen=True)
class Recipe(HashOnce, PortedQuestions):
    """The table of three GEMMs. It is immutable, hashable and comparable; ``print(recipe)`` shows its six rows."""

    fprop: Gemm
    dgrad: Gemm
    wgrad: Gemm

    def __post_init__(self) -> None:
        for name in GEMMS:
            gemm = getattr(self, name)
            if not isinstance(gemm, Gemm):
                raise invalid_type(f"{type(self).__name__}.{name}", type(gemm), "a Gemm(lhs, rhs)")
        for name, of_fprop in (("fprop", None), ("dgrad", self.fprop.rhs), ("wgrad", self.fprop.lhs)):
            gemm = getattr(self, name)
            if gemm.from_fprop and gemm.rhs != of_fprop:
                raise invalid_value(
                    f"{type(self).__name__}.{name}", f"from_fprop=True with {gemm.rhs}",
                    f"from_fprop=False: fprop reads {of_fprop}" if name != "fprop" else "from_fprop=False",
                    "Only dgrad and wgrad can read an operand of fprop, under its Cast.",
                )  # fmt: skip

    def cast(self, gemm: str, side: str) -> Cast | None:
        """The Cast of one of the six operands, for example ``cast("wgrad", "lhs")``."""
        return getattr(getattr(self, gemm), side)

    @property
    def casts(self) -> dict[tuple[str, str], Cast | None]:
        """The six operands in the order of the random streams."""
        return {(gemm, side): self.cast(gemm, side) for gemm, side, *_ in OPERANDS}

    @functools.cached_property
    def is_stochastic(self) -> bool:
        """True where an operand is rounded stochastically, so that a call seed is needed."""
        return any(cast is not None and cast.is_stochastic for cast in self.casts.values())

    @functools.cached_property
    def is_delayed(self) -> bool:
        """True where an operand carries delayed-scaling state."""
        return any(cast is not None and cast.is_delayed for cast in self.casts.values())

    @functools.cached_property
    def is_static(self) -> bool:
        """True where x is cast with an amax that was measured beforehand."""
        return self.fprop.lhs is not None and self.fprop.lhs.is_static

    @functools.cached_property
    def _is_high_precision(self) -> bool:
        """True where no GEMM quantizes."""
        return all(getattr(self, name).is_high_precision for name in GEMMS)

    @functools.cached_property
    def _key(self) -> object:
        """One object for all equal recipes of this process, for tables that every call looks into: it hashes in C."""
        return _KEYS.setdefault(self, object())

    @property
    def label(self) -> str:
        """The name of the recipe in tables of layers."""
        return type(self).__name__

    def for_call(self, rows: int, stored: Cast) -> "Recipe":
        """The recipe of a call with so many rows (tokens), and the Cast of a weight that is stored as codes.

        This is the recipe itself, except for inference recipes.
        """
        return self

    _of_many_rows = ""  # what calls of many rows do otherwise, in words

    def _keeping_nothing(self) -> "Recipe":
        """The recipe where no call keeps what it makes of stored codes: of experts, and in exported programs."""
        return self

    def to_dict(self) -> dict:
        """A JSON-ready dictionary; `Recipe.from_dict` makes an equal recipe from it."""
        from microfloat.recipes._serialize import recipe_to_dict

        return recipe_to_dict(self)

    @staticmethod
    def from_dict(data: dict) -> "Recipe":
        """The recipe that `to_dict` described. Raises InvalidValueError for unknown names or missing fields."""
        from microfloat.recipes._serialize import recipe_from_dict

        return recipe_from_dict(data)

    def __str__(self) -> str:
        from microfloat.recipes.explanation import recipe_table

        return recipe_table(self)


_NUMBERS: Mapping[str, type] = {"int": int, "float": float}


@dataclass(frozen=True)
class NamedRecipe(Recipe):
    """A Recipe whose table follows from a few fields: subclasses define fields and `_table`, in one file each.

    `backward` replaces dgrad and wgrad in any such recipe: None = those of the table; "high_precision" = both on the
    saved originals; "dequantized" = both in high precision on the operands that fprop has read, dequantized, so that x
    and w are cast and saved once. dy is not quantized under either (docs/numerics.md, section 6).

    A subclass is a frozen dataclass, whose fields compare and hash. Raises InvalidTypeError if it is not one, or if
    `_table` returns anything but three Gemms.
    """

    fprop: Gemm = field(init=False, repr=False, compare=False)
    dgrad: Gemm = field(init=False, repr=False, compare=False)
    wgrad: Gemm = field(init=False, repr=False, compare=False)
    backward: str | None = field(default=None, kw_only=True)
    # Fields that are numbers, as text. Compiled code takes text for a constant, but numbers of an object for variables.
    _numbers: ClassVar[Mapping[str, tuple[str, str]]] = MappingProxyType({})
    # Variables of TransformerEngine's environment -> the field that does the same here, or the advice.
    _of_peers: ClassVar[Mapping[str, str]] = MappingProxyType({"NVTE_BACKWARD_OVERRIDE": "backward"})

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # a dataclass keeps the one that its class brings along
            cls.__repr__ = NamedRecipe.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self._check_class()
        table = self._table()
        if not isinstance(table, tuple | list) or [type(gemm) for gemm in table] != [Gemm] * len(GEMMS):
            raise invalid_type(
                f"{type(self).__name__}._table()", repr(table), "three Gemms, those of fprop, dgrad, wgrad"
            )
        if self.backward is not None:
            check_choice("backward", self.backward, ("high_precision", "dequantized"))
            x, w = table[0].casts if self.backward == "dequantized" else (None, None)
            table = table[0], *(Gemm(None, cast, from_fprop=cast is not None) for cast in (w, x))
        for name, gemm in zip(GEMMS, table, strict=True):
            object.__setattr__(self, name, gemm)
        object.__setattr__(self, "_numbers", {
            name: (kind, repr(_NUMBERS[kind](value)))
            for name, value in self.arguments().items() for kind in _NUMBERS
            if isinstance(value, _NUMBERS[kind]) and not isinstance(value, bool)
        })  # fmt: skip
        super().__post_init__()
        for name, advice in self._of_peers.items():
            if not getattr(self, advice, None):
                given = f"Give the recipe {advice}=."
                warn_of_peer(name, given if advice.isidentifier() else advice)

    def _check_class(self) -> None:
        """Refuse a class whose recipes would not compare by their fields, since caches find recipes by comparison."""
        cls, name = type(self), type(self).__name__
        defines = {"__init__", "__annotations__", "__annotate_func__"} & set(vars(cls))
        if defines and "__dataclass_fields__" not in vars(cls):
            raise invalid_type(name, "a class with fields or a constructor of its own", "a frozen dataclass",
                               "Decorate it with @dataclass(frozen=True).")  # fmt: skip
        for entry in fields(self):
            try:
                hash(getattr(self, entry.name, None) if entry.compare else None)
            except TypeError:
                needed = "a value that can be hashed, such as a tuple in place of a list"
                raise invalid_type(f"{name}.{entry.name}", type(getattr(self, entry.name)), needed) from None

    def _trace(self) -> None:
        """`__post_init__` in the eyes of torch.compile, which cannot look into Casts: the Gemms are constants."""
        for name, gemm in zip(GEMMS, gemms_of_constants(*constants_of(self)), strict=True):
            object.__setattr__(self, name, gemm)

    __post_init__._torchdynamo_inline = _trace  # type: ignore[attr-defined]

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        raise NotSupportedError(f"{type(self).__name__}: got no method _table, needed one that returns three Gemms.")

    def arguments(self) -> dict[str, object]:
        """The constructor's arguments and their effective values."""
        taken = sorted((entry for entry in fields(self) if entry.init), key=lambda entry: bool(entry.kw_only))
        return {entry.name: getattr(self, entry.name) for entry in taken}

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.arguments().items() if name != "backward" or value is not None}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Any three Gemms: mixed formats per direction, ``Gemm(None, None)`` for a GEMM in high precision.

    It must be possible to multiply the two operands of a GEMM; if one of them is None, the other is dequantized.
    """


def delayed_of(recipe: Recipe) -> Delayed:
    """The settings of a recipe with delayed scaling."""
    return next(one.scaling for one in recipe.casts.values() if one is not None and isinstance(one.scaling, Delayed))


def constants_of(recipe: Recipe) -> tuple:
    """Everything that defines a recipe: its class, then strings, numbers and None, which a compiler can guard."""
    if isinstance(recipe, NamedRecipe):
        numbers = recipe._numbers
        values = [numbers[name] if name in numbers else getattr(recipe, name) for name in recipe.__match_args__]
        return (type(recipe), recipe.backward, *values)
    gemms, made = (recipe.fprop, recipe.dgrad, recipe.wgrad), []
    for gemm in gemms:
        texts = [None if cast is None else cast.contents for cast in gemm.casts]
        made.append((*texts, gemm.accumulate, gemm.path, gemm.from_fprop))
    return (type(recipe), *made)


def recipe_of_constants(cls: type, *constants: Any) -> Recipe:
    """The recipe whose `constants_of` these are."""
    from microfloat.recipes._serialize import cast_of

    if issubclass(cls, NamedRecipe):
        backward, *values = constants
        read = [_NUMBERS[v[0]](v[1]) if isinstance(v, tuple) and v and v[0] in _NUMBERS else v for v in values]
        return cls(*read, backward=backward)
    return cls(*[Gemm(lhs and cast_of(lhs), rhs and cast_of(rhs), *rest) for lhs, rhs, *rest in constants])


def gemms_of_constants(*constants: Any) -> tuple[Gemm, ...]:
    """The three Gemms of the recipe whose `constants_of` these are."""
    recipe = recipe_of_constants(*constants)
    return recipe.fprop, recipe.dgrad, recipe.wgrad


gemms_of_constants._dynamo_marked_constant = True  # type: ignore[attr-defined]
