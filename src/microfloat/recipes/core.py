"""Recipe -> Gemm -> Cast: immutable data that fills the table of six operands, also as constants for compilers.

fprop ``y = x @ w.T`` contracts K (operands x, w); dgrad ``dx = dy @ w`` contracts N (dy, w); wgrad ``dw = dy.T @ x``
contracts M (dy, x). Validity is checked when an object is built (docs/numerics.md, section 10), so later code need not
ask which recipe it runs.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, ClassVar

from microfloat._environment import warn_of_peer
from microfloat.arguments import check_bool, check_choice, check_keys
from microfloat.errors import NotSupportedError, invalid_type, invalid_value
from microfloat.formats import E2M1, E5M2, SCALE_E4M3, SCALE_E8M0, ScaledFormat
from microfloat.operands import GEMMS, OPERANDS
from microfloat.recipes._serialize import cast_from_data, cast_of, cast_to_data, not_serializable
from microfloat.recipes.cast import Cast, Delayed, HashOnce, as_scaled_format
from microfloat.support import text_table

# The classes that `from_dict` makes, by name; the modules that define them add theirs (`register`).
_CLASSES: "dict[str, type[Recipe]]" = {}


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
        if lhs.format.scale != rhs.format.scale and not folds_beside(lhs.format, rhs.format):
            raise invalid_value(
                "Gemm", f"{lhs.format.name} x {rhs.format.name} ({lhs.format.scale} x {rhs.format.scale} scales)",
                "operands of one family (both FP32, both E8M0 or both E4M3 scales), or fp8_row x MX or NVFP4",
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


def folds_beside(lhs: ScaledFormat, rhs: ScaledFormat) -> bool:
    """True for FP8 with a scale for each row beside an MX or NVFP4 format, which folds to such FP8 too."""
    folds = rhs.scale == SCALE_E8M0 or (rhs.scale == SCALE_E4M3 and rhs.element == E2M1)
    return lhs.scale.name == "FP32" and lhs.block == (1, None) and folds


# Bits of an element, the format of its scale, and what shares one: "tensor", "row" or "block".
_PER_TENSOR = (8, "FP32", "tensor")
_FLOAT8_BLOCKS = (8, "FP32", "block")
_MXFP8 = (8, "E8M0", "block")
_NVFP4 = (4, "E4M3", "block")


class PortedQuestions:
    """Predicates that code written for TransformerEngine asks; nothing in this library asks them. They follow from the
    casts of the six operands, so a CustomRecipe of MXFP8 casts is `mxfp8` too."""

    @property
    def casts(self) -> Mapping[tuple[str, str], Cast | None]:
        """The six operands."""
        raise NotImplementedError

    def _families(self) -> set[tuple[int, str, str]]:
        formats = [cast.format for cast in self.casts.values() if cast is not None]
        scopes = ["tensor" if fmt.is_per_tensor else "row" if fmt.block[1] is None else "block" for fmt in formats]
        return {(fmt.element.bits, fmt.scale.name, scope) for fmt, scope in zip(formats, scopes, strict=True)}

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


_HEADER = ("GEMM", "operand", "format", "block", "scale_rule", "rounding", "hadamard", "scaling", "accumulate", "path")
_AXES = {"x": "MK", "w": "NK", "dy": "MN"}


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
    def is_joint(self) -> bool:
        """True where the weight is cast with an amax that it shares with other weights."""
        return self.fprop.rhs is not None and self.fprop.rhs.is_static

    @functools.cached_property
    def _is_high_precision(self) -> bool:
        """True where no GEMM quantizes."""
        return all(getattr(self, name).is_high_precision for name in GEMMS)

    @property
    def label(self) -> str:
        """The name of the recipe in tables of layers."""
        return type(self).__name__

    # True where fprop casts a weight as it is, not rounded to the compute dtype first: codes are those of the master.
    _casts_masters: ClassVar[bool] = False

    def for_call(self, rows: int, stored: Cast | None) -> "Recipe":
        """The recipe of a call with `rows` rows (tokens) on a weight that is stored as codes of the Cast `stored`, or
        on a plain one (None).

        This is the recipe itself, except for inference recipes.
        """
        return self

    _of_many_rows = ""  # what calls of many rows do otherwise, in words
    # The recipe of a layer that has memory for a copy of its stored weight.
    _with_copies: "ClassVar[Recipe | None]" = None

    def _keeping_nothing(self) -> "Recipe":
        """The recipe for experts and exported programs, whose calls keep no other form of stored codes."""
        return self

    def to_dict(self) -> dict:
        """``{"recipe": class name, "fields": {...}}``, JSON-ready; `Recipe.from_dict` makes an equal recipe from it."""
        values: dict[str, dict] = {}
        for name, gemm in ((name, getattr(self, name)) for name in GEMMS):
            values[name] = {"lhs": cast_to_data(gemm.lhs), "rhs": cast_to_data(gemm.rhs)}
            values[name] |= {"accumulate": gemm.accumulate, "path": gemm.path}
            values[name] |= {"from_fprop": True} if gemm.from_fprop else {}
        return {"recipe": type(self).__name__, "fields": values}

    @staticmethod
    def from_dict(data: dict) -> "Recipe":
        """The recipe that `to_dict` described. Raises InvalidValueError for unknown names or missing fields."""
        check_keys("data", data, ("recipe", "fields"))
        check_choice("recipe", data["recipe"], _CLASSES)
        return _CLASSES[data["recipe"]]._from_fields(data["fields"])

    @classmethod
    def _from_fields(cls, values: dict) -> "Recipe":
        """The recipe with the fields that `to_dict` wrote."""
        gemms = {}
        for name, entry in check_keys("fields", values, GEMMS).items():
            data = {"from_fprop": False, **entry} if isinstance(entry, dict) else entry
            data = dict(check_keys(name, data, [one.name for one in fields(Gemm)]))
            gemms[name] = Gemm(cast_from_data(data.pop("lhs")), cast_from_data(data.pop("rhs")), **data)
        return cls(**gemms)

    def __str__(self) -> str:
        """One line of the repr, then a row per operand; '-' marks what does not apply."""
        rows: list[tuple[str, ...]] = [_HEADER]
        for gemm_name, side, tensor, transposed, _ in OPERANDS:
            gemm, cast = getattr(self, gemm_name), self.cast(gemm_name, side)
            # The operand as the GEMM reads it: its contraction axis last (docs/numerics.md, section 6).
            name, axes = (f"{tensor}.T", _AXES[tensor][::-1]) if transposed else (tensor, _AXES[tensor])
            described = ("-", "-", "-", "-", "-")
            if cast is None:
                described = ("refused" if gemm.path == "refused" else "high precision", *described)
            elif gemm.from_fprop:
                described = (f"{cast.format.name} of fprop", *described)
            else:
                described = cast._cells
            modes = ("-", "-") if gemm.is_high_precision else (gemm.accumulate, gemm.path)
            rows.append((gemm_name, f"{name} [{axes[0]},{axes[1]}]", *described, *modes))
        return "\n".join([repr(self), *text_table(rows)])


def register(*classes: type[Recipe]) -> None:
    """Let `Recipe.from_dict` make recipes of these classes."""
    _CLASSES.update((cls.__name__, cls) for cls in classes)


_NUMBERS: Mapping[str, type] = {"int": int, "float": float}
# Fields that a repr shows where they are on, and values that are off.
_OPTIONS = ("backward", "joint_scale", "row_scaled_activation", "nvfp4_4over6", "enable_2d_quantization")
_OFF = (None, False, "none")


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
    # Variables of TransformerEngine's environment -> the field that does the same here.
    _of_peers: ClassVar[Mapping[str, str]] = MappingProxyType({"NVTE_BACKWARD_OVERRIDE": "backward"})

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "__repr__" not in vars(cls):  # a dataclass keeps the one that its class brings along
            cls.__repr__ = NamedRecipe.__repr__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        self._check_class()
        table = self._table()
        if not isinstance(table, tuple | list) or [type(gemm) for gemm in table] != [Gemm] * len(GEMMS):
            needed = "three Gemms, those of fprop, dgrad, wgrad"
            raise invalid_type(f"{type(self).__name__}._table()", repr(table), needed)
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
            if getattr(self, advice, None) in _OFF:
                warn_of_peer(name, f"Give the recipe {advice}=.")

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

    def to_dict(self) -> dict:
        """``{"recipe": class name, "fields": arguments}``, JSON-ready."""
        values = {}
        for name, value in self.arguments().items():
            if callable(value):
                raise not_serializable(name, value)
            values[name] = list(value) if isinstance(value, tuple) else getattr(value, "value", value)
        return {"recipe": type(self).__name__, "fields": values}

    @classmethod
    def _from_fields(cls, values: dict) -> Recipe:
        check_keys("fields", values, cls().arguments(), all_of_them=False)
        options: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        return cls(**options)

    def __repr__(self) -> str:
        shown = {name: value for name, value in self.arguments().items() if name not in _OPTIONS or value not in _OFF}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


@dataclass(frozen=True)
class CustomRecipe(Recipe):
    """Any three Gemms: mixed formats per direction, ``Gemm(None, None)`` for a GEMM in high precision.

    It must be possible to multiply the two operands of a GEMM; if one of them is None, the other is dequantized.
    """


register(CustomRecipe, Recipe)


@functools.lru_cache(256)
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
