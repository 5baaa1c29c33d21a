"""Inference recipes: weights that are stored quantized, with activations in high precision or quantized too.

    weight-only          y = x @ dequantize(w).T           weights are read in 4 to 8 bits, nothing else changes
    weight-activation    y = quantize(x) @ w.T             the product is one of the format's own

They are recipes like any other: `microfloat.torch.quantize_` stores weights under them, a Placement puts them on
layers, `explain` and ``print`` show them. dx is ``dy @ dequantize(w)``, so that adapters train over frozen weights; a
gradient of the weight is refused (`Gemm.path`). `convert` pins a
recipe under which plain weights train to become such codes.
"""

import functools
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Self

from microfloat.arguments import check_bool, check_choice, check_int
from microfloat.errors import MicrofloatError, invalid_value, unknown_name
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.recipes.cast import Cast, Current, Static, as_scaled_format
from microfloat.recipes.core import CustomRecipe, Gemm, NamedRecipe, Recipe, folds_beside, register
from microfloat.recipes.names import hint_of_recipe
from microfloat.recipes.placement import Placement, parted

_SEARCHES = ("four_over_six", "mse")
# The format of activations -> (that of the weights beside them, how the product accumulates as in training).
_PAIRS = {
    "fp8_tensor": ("fp8_tensor", "fast"),
    "fp8_row": ("fp8_row", "split"),
    "fp8_1x128": ("fp8_128x128", "split"),
    "mxfp8": ("mxfp8", "fast"),
    "mxfp6_e2m3": ("mxfp6_e2m3", "fast"),
    "mxfp6_e3m2": ("mxfp6_e3m2", "fast"),
    "mxfp4": ("mxfp4", "fast"),
    "nvfp4": ("nvfp4", "fast"),
    "nvfp4_row": ("nvfp4", "fast"),
}
# Rows of x up to which FP8 rows are multiplied by the exact values of an MX or NVFP4 weight, whose codes a kernel reads
# (benchmarks/results/served_h200.json); more rows are multiplied by the folded weight.
_EXACT_ROWS = 16
# What `prefill` does with calls of many rows -> the number of rows from which on it does so by default. From 65 rows on
# a weight of four bits is dequantized for every call on most chips, and the kernel that decodes is slower than bfloat16
# on an H200; that of a weight of more bits is from 33 rows on (docs/inference.md).
_PREFILL_ROWS = {None: 128, "folded": 128, "dequantized": 65, "auto": 65}
_ROWS_OF_MORE_BITS = 33


def _prefill_rows(prefill: str | None, fmt: str) -> int:
    """The rows from which on `prefill` changes a call, by default."""
    return _ROWS_OF_MORE_BITS if prefill == "auto" and FORMATS[fmt].element.bits > 4 else _PREFILL_ROWS[prefill]


def _name_of(fmt: str | ScaledFormat, argument: str) -> str:
    """The name of a stock format, given by itself or by its name."""
    made = as_scaled_format(fmt, argument)
    if FORMATS.get(made.name) != made:
        raise invalid_value(
            argument, f"a ScaledFormat of your own, {made.name!r}", f"one of {', '.join(FORMATS)}",
            "Quantize such a weight with microfloat.torch.quantize, and multiply by it with microfloat.torch.linear.",
        )  # fmt: skip
    return made.name


def _weight_cast(fmt: str, scale_search: str | None, joint_scale: bool) -> Cast:
    """The cast of a weight: with the rule "four_over_six" if that is the search, else with the format's own."""
    check_bool("joint_scale", joint_scale)
    if scale_search is not None:
        check_choice("scale_search", scale_search, _SEARCHES, or_none=True)
    scaling = Static() if joint_scale else Current()
    if scale_search != "four_over_six":
        return Cast(as_scaled_format(fmt), scaling=scaling)
    if not fmt.startswith("nvfp4"):
        raise invalid_value("scale_search", f"'four_over_six' with {fmt}", "'mse', or an NVFP4 format")
    return Cast(as_scaled_format(fmt), "four_over_six", scaling=scaling)


def _table(fprop: Gemm) -> tuple[Gemm, Gemm, Gemm]:
    """fprop, dx from the operand of the weight that fprop reads, and no dw."""
    return fprop, Gemm(None, fprop.rhs, from_fprop=True), Gemm(None, None, path="refused")


@functools.cache
def _dequantized(wgrad: Gemm) -> Recipe:
    """Products of a weight that is dequantized first; one object, since layers compare it at every call."""
    return CustomRecipe(Gemm(None, None), Gemm(None, None), wgrad)


class _Inference(NamedRecipe):
    """Base of inference recipes: codes in the recipe's format are read as stored, whatever scale rule made them."""

    _of_peers = MappingProxyType({})  # the variables of TransformerEngine are about training
    _casts_masters = True
    scale_search: str | None
    joint_scale: bool

    def _in_training(self, joint: bool) -> Self:
        """The recipe of plain weights in training: fprop casts them as `quantize_` does, and backward multiplies in
        high precision, unless `backward` says otherwise. `joint`: other weights share the scale of the tensor.
        """
        for name, value in (("scale_search", "mse"), ("prefill", "folded")):
            if getattr(self, name, None) == value:
                raise invalid_value(
                    name, f"{value!r} for weights that train", "the scales and products of every call",
                    f"Train under {name}=None, and give {name}={value!r} to quantize_ when the weights are stored.",
                )  # fmt: skip
        w = self.fprop.rhs
        joint = joint and w is not None and w.takes_amax and w.tensor_scale != "row"
        return replace(self, joint_scale=joint, backward=self.backward or "high_precision")

    def _served(self) -> Self:
        """The config that stores the weights of this recipe."""
        return replace(self, joint_scale=False, backward=None) if self.joint_scale else self

    @property
    def _usual(self) -> dict[str, object]:
        """The default values of the fields."""
        return {entry.name: entry.default for entry in fields(self)}

    @property
    def label(self) -> str:
        """The class with its format, and with the other fields that have no default value."""
        usual = self._usual
        told = {name: value for name, value in self.arguments().items() if name == "format" or value != usual[name]}
        told.pop("joint_scale", None)
        words = (str(value) if name == "format" else f"{name}={value}" for name, value in told.items())
        return f"{type(self).__name__}({', '.join(words)})"

    def for_call(self, rows: int, stored: Cast | None) -> Recipe:
        """The recipe with the Cast of the stored weight."""
        w = self.fprop.rhs
        if w is None or stored is None or stored == w or stored.format != w.format:
            return self
        return CustomRecipe(*_table(replace(self.fprop, rhs=stored)))


@dataclass(frozen=True)
class WeightOnly(_Inference):
    """Quantized weights with activations in high precision: ``y = x @ dequantize(w).T``.

    `format`: that of the weights. `scale_search`: "four_over_six" (NVFP4: each block maps its maximum to 6 or to 4,
    whichever has the smaller error) or "mse" (any format: each block takes the candidate scale with the smallest
    squared error); None uses the format's own rule. `prefill`: what calls with `prefill_rows` rows (tokens) or more do
    instead. `joint_scale`: the tensor scale is that of several weights, as `convert` sets it for fused groups.

    * "auto": as "dequantized" on a GPU whose free memory allows it, of which each layer asks once: an eighth of the
      GPU's memory has to stay free. Not in calls that need a gradient of x, and nowhere else. None: never.
    * "dequantized": they multiply by the weight dequantized to the dtype of the call, with the bits of a call that
      dequantizes. That weight, 2 bytes for each element in bfloat16, is made at the first such call.
    * "folded": they multiply on FP8 tensor cores. An MX weight is then folded as ``path="folded"`` does (at most
      2^-17.8 of a group's amax is lost, docs/numerics.md 9), any other is quantized once more, to FP8 with 128x128
      scales (an error of at most 2^-4 of an element, or 2^-17.8 of the largest of its 128x128 block where that is more,
      besides its own), and activations are quantized too: MXFP8, or FP8 with 1x128 scales. The folded weight, a byte
      for each element, is made at the first such call.

    The codes are kept in both cases, and the dequantized or folded weight is made again after they were written.
    `prefill_rows` None: 65 for "dequantized" and "auto" (33 for weights of more than four bits), 128 for "folded".
    Source: docs/inference.md.
    """

    format: str = "nvfp4"
    scale_search: str | None = None
    prefill: str | None = "auto"
    prefill_rows: int | None = None
    joint_scale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "format", _name_of(self.format, "format"))
        if self.prefill is not None:
            check_choice("prefill", self.prefill, ("auto", "dequantized", "folded"), or_none=True)
        if self.prefill_rows is None:
            object.__setattr__(self, "prefill_rows", _prefill_rows(self.prefill, self.format))
        check_int("prefill_rows", self.prefill_rows, 1, 2**31 - 1)
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        return _table(Gemm(None, _weight_cast(self.format, self.scale_search, self.joint_scale)))

    @property
    def _usual(self) -> dict[str, object]:
        return {**super()._usual, "prefill_rows": _prefill_rows(self.prefill, self.format)}

    @property
    def _of_many_rows(self) -> str:
        if self.prefill is None:
            return ""
        made = "in FP8, and x too" if self.prefill == "folded" else "dequantized to the dtype of the call"
        where = " on a GPU with enough free memory" if self.prefill == "auto" else ""
        return (
            f"{self.prefill_rows} rows of x or more{where}: by the weight {made}, made once (prefill={self.prefill!r})"
        )

    @functools.cached_property
    def _with_copies(self) -> Recipe | None:  # type: ignore[override]
        return replace(self, prefill="dequantized") if self.prefill == "auto" else None

    def _keeping_nothing(self) -> Recipe:
        return replace(self, prefill=None) if self.prefill == "dequantized" else self

    def for_call(self, rows: int, stored: Cast | None) -> Recipe:
        """The recipe of the stored weight, or from `prefill_rows` rows on that of its prefill form."""
        assert self.prefill_rows is not None
        if self.prefill in (None, "auto") or stored is None or rows < self.prefill_rows:
            return super().for_call(rows, stored)
        if self.prefill == "dequantized":
            chosen = super().for_call(rows, stored)
            # A weight that is stored in another format is quantized to that of the recipe first.
            return _dequantized(chosen.wgrad) if chosen.fprop.rhs == stored else chosen
        if stored.format.scale.name == "E8M0":
            element = as_scaled_format("mxfp8")
            return CustomRecipe(*_table(Gemm(Cast(element), stored, "fast", "folded")))
        return CustomRecipe(*_table(Gemm("fp8_1x128", "fp8_128x128")))  # type: ignore[arg-type]


@dataclass(frozen=True)
class WeightActivation(_Inference):
    """Quantized weights and activations: the product of both on the format's tensor cores, where there are any.

    `format` of the activations: fp8_tensor, fp8_row, fp8_1x128, mxfp8, mxfp6_e2m3, mxfp6_e3m2, mxfp4, nvfp4, nvfp4_row.
    `weight`: the format of the weights, any with scales of the same kind (FP8 with FP8, MX with MX, NVFP4 with NVFP4),
    and with fp8_row any MX or NVFP4 format; None means the same format (128x128 with 1x128, NVFP4 with nvfp4_row).
    `activation`: where it is given, it is the format of the activations, and `format` that of the weights.
    `scales` "dynamic": computed from each input; "static": the scale of a whole input (fp8_tensor, and the tensor scale
    of nvfp4) comes from the largest amax seen under `microfloat.torch.calibrate`. `scale_search`: as in `WeightOnly`.
    `path`: how an MX product runs on chips without MX GEMMs. `joint_scale`: as in `WeightOnly`.

    ``WeightActivation("nvfp4", activation="fp8_row")`` multiplies FP8 activations by a weight of four bits. Calls of up
    to 16 rows take the weight's own values; for more rows it is folded once to FP8 with a scale for each row
    (docs/numerics.md, section 9.5), a byte for each element. `path` "exact" or "folded": either at any number of rows.
    Source: docs/inference.md.
    """

    format: str = "mxfp8"
    activation: str | None = None
    weight: str | None = None
    scales: str = "dynamic"
    scale_search: str | None = None
    path: str = "auto"
    joint_scale: bool = False

    def __post_init__(self) -> None:
        if self.activation is not None:
            if self.weight is not None and self.format not in ("mxfp8", self.weight):
                needed = "the format of the weights once, by `format` or by `weight`"
                raise invalid_value("weight", f"{self.weight!r} beside {self.format!r} and an activation", needed)
            values = {"weight": self.weight or self.format, "format": self.activation, "activation": None}
            for name, value in values.items():
                object.__setattr__(self, name, value)
        if isinstance(self.format, str) and self.format not in _PAIRS:
            raise unknown_name("format", self.format, _PAIRS, hint_of_recipe(self.format))
        object.__setattr__(self, "format", _name_of(self.format, "format"))
        if self.format not in _PAIRS:
            raise unknown_name("format", self.format, _PAIRS)
        if self.weight is not None:
            object.__setattr__(self, "weight", _name_of(self.weight, "weight"))
            x = FORMATS[self.format]
            beside = [name for name, fmt in FORMATS.items() if fmt.scale == x.scale or folds_beside(x, fmt)]
            if self.weight not in beside:
                remedy = f"A GEMM multiplies {self.format} by formats whose scales are {x.scale} too."
                if self.format.startswith("fp8"):
                    remedy += " FP8 activations beside MX and NVFP4 weights have a scale for each row: fp8_row."
                raise unknown_name("weight", self.weight, beside, remedy, or_none=True)
        check_choice("scales", self.scales, ("dynamic", "static"))
        super().__post_init__()

    def _table(self) -> tuple[Gemm, Gemm, Gemm]:
        weight, accumulate = _PAIRS[self.format]
        x = Cast(as_scaled_format(self.format))
        if self.scales == "static":
            if not x.takes_amax or x.tensor_scale == "row":
                raise invalid_value(
                    "scales", f"'static' with {self.format}",
                    "'dynamic', or a format with one scale for the whole tensor",
                    "Choose fp8_tensor or nvfp4 for static scales.",
                )  # fmt: skip
            x = replace(x, scaling=Static())
        w = _weight_cast(self.weight or weight, self.scale_search, self.joint_scale)
        folds = self.path == "auto" and folds_beside(x.format, w.format)
        return _table(Gemm(x, w, accumulate, "folded" if folds else self.path))

    @property
    def _folds_many(self) -> bool:
        """True where the weight is folded for many rows and exact for few."""
        return self.path == "auto" and self.fprop.path == "folded"

    @property
    def _of_many_rows(self) -> str:
        copy = f"up to {_EXACT_ROWS} rows of x: by the weight's own values; more: by its fold to FP8, made once"
        return copy if self._folds_many else ""

    def _keeping_nothing(self) -> Recipe:
        return replace(self, path="exact") if self._folds_many else self

    def for_call(self, rows: int, stored: Cast | None) -> Recipe:
        """The recipe of the stored weight, whose own values are multiplied by a few rows of FP8."""
        chosen = super().for_call(rows, stored)
        if rows > _EXACT_ROWS or not self._folds_many:
            return chosen
        return CustomRecipe(replace(chosen.fprop, path="exact"), chosen.dgrad, chosen.wgrad)


register(WeightOnly, WeightActivation)


def as_stored(placement: Placement) -> Placement:
    """The Placement under which weights are stored: of each rule about fprop the config that multiplies as it does.

    x and w have the formats of fprop, and scales of their own tensors: delayed scaling becomes a current one. Tiles
    with scales of one byte, which two GEMMs of a training share, become blocks along K, which checkpoints have.
    """
    if all(recipe is None or isinstance(recipe, _Inference) for _, recipe in placement.rules):
        return placement
    rules: list[tuple[str, Recipe | None]] = []
    for index, (pattern, recipe) in enumerate(placement.rules):
        names, gemms = parted(pattern)
        if "fprop" in gemms:
            try:
                rules.append((names, recipe and _config_of(recipe)))
            except MicrofloatError as error:
                raise type(error)(f"{placement._source}: rules[{index}] {pattern!r}: {error}") from None
    made = Placement(rules)
    vars(made).update({"_source": placement._source} if "_source" in vars(placement) else {})
    return made


def _config_of(recipe: Recipe) -> Recipe | None:
    """The config that multiplies x and stored weights as fprop of a recipe does; None in high precision."""
    x, w = recipe.fprop.casts
    if w is None or isinstance(recipe, _Inference):
        return recipe if w is not None else None
    search, weight = "four_over_six" if w.chooses_by_error else None, _name_of(_along_k(w.format), "w of fprop")
    if x is None:
        return WeightOnly(weight, search)
    name = _name_of(_along_k(x.format), "x of fprop")
    is_usual = name in _PAIRS and _PAIRS[name][0] == weight
    path = recipe.fprop.path if x.format.tensor_scale is None or recipe.fprop.path == "folded" else "auto"
    return WeightActivation(name, None if is_usual else weight, scale_search=search, path=path)


def _along_k(fmt: ScaledFormat) -> ScaledFormat:
    """The format of blocks of one row, in the place of tiles with scales of one byte."""
    if not fmt.is_tile or fmt.scale.bits != 8:
        return fmt
    rows = replace(fmt, block=(1, fmt.block[1]))
    return next((one for one in FORMATS.values() if replace(rows, name=one.name) == one), rows)
