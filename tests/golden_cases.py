"""Reader of tests/golden: cases, arrays, what a case means in microfloat's words, and how its outputs compare.

For every front end and backend: `cast_of(case)` says what to run on `input_array(case)`; `mismatch(case, role, actual)`
judges the result under the case's own compare kind and mask. Codes are one per byte (unpacked), whatever a file holds.
"""

import functools
import io
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from microfloat import formats
from microfloat.recipes import (
    Cast,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    Gemm,
    Hadamard,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)

ROOT = Path(__file__).parent / "golden"
CODE_ENCODINGS = ("e4m3", "e5m2", "e2m3", "e3m2", "e2m1", "e2m1x2")


@functools.cache
def load_index() -> dict:
    """The whole index: encodings, compare kinds, exclusions, cases."""
    return json.loads((ROOT / "index.json").read_text())


def cases(family: str | None = None, follows_spec: bool | None = True, **fields) -> list[dict]:
    """The cases of a family (None = all) in the index's order; `fields` must be equal too, for example ``file=...``."""
    return [
        case
        for case in load_index()["cases"]
        if family in (None, case["family"])
        and case["follows_spec"] is follows_spec
        and all(case.get(name) == value for name, value in fields.items())
    ]


def case_id(case: dict) -> str:
    """For ``pytest.mark.parametrize(..., ids=case_id)``."""
    return case["id"]


@functools.cache
def _file(name: str) -> np.lib.npyio.NpzFile:
    return np.load(io.BytesIO((ROOT / name).read_bytes()))


@functools.cache
def _stored(name: str, key: str) -> np.ndarray:
    array = _file(name)[key]
    array.setflags(write=False)
    return array


def get(case: dict, role: str, side: str = "outputs") -> tuple[np.ndarray, np.ndarray]:
    """(array, mask) of a role: floats as float32, codes one per byte; compare only where the mask is True."""
    entry = case[side][role]
    array = _stored(case["file"], entry["key"])
    mask = _stored(case["file"], entry["where"]) if "where" in entry else np.ones(array.shape, bool)
    encoding = entry["encoding"]
    if encoding == "e2m1x2":
        array = np.stack([array & 15, array >> 4], -1).reshape(*array.shape[:-1], 2 * array.shape[-1])
        mask = np.repeat(mask, 2, -1)
    elif encoding == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    elif encoding in ("f32", "f16"):
        array = array.view({"f32": np.float32, "f16": np.float16}[encoding])
    return array, mask


def input_array(case: dict, role: str = "x") -> np.ndarray:
    """An input in its own dtype: float32, float16 or ml_dtypes.bfloat16."""
    if case["inputs"][role]["encoding"] == "bf16":
        return _stored(case["file"], case["inputs"][role]["key"]).view(ml_dtypes.bfloat16)
    return get(case, role, "inputs")[0]


def contraction_axis(case: dict) -> int:
    """`axis` for quantize: -1, or -2 where blocks run along the first axis of x."""
    return -2 if case["axis"] == 0 else -1


def format_of(case: dict) -> formats.ScaledFormat:
    """The ScaledFormat of a case; a user's own one for the 32x32 tiles of MXFP8."""
    name = case.get("format") or {"E4M3": "MXFP8", "E2M1": "MXFP4"}[case["element"]]
    if (case.get("options") or {}).get("row_scaled"):
        return formats.NVFP4_ROW
    if name.lower() in formats.FORMATS:
        return formats.FORMATS[name.lower()]
    assert name == "MXFP8 with 32x32 tiles", name
    return formats.ScaledFormat("mxfp8_32x32", formats.E4M3, formats.SCALE_E8M0, (32, 32))


def cast_of(case: dict) -> Cast:
    """The Cast that a case of one tensor describes."""
    transform = case.get("hadamard")
    hadamard = Hadamard(transform["size"], int(transform["sign_mask"], 16)) if transform else None
    return Cast(format_of(case), case["scale_rule"], case.get("rounding", "nearest"), hadamard)


def _elements_recipe(case: dict) -> Recipe:
    """An MX recipe with one element per tensor, as torchao's cases state them."""
    by_element = {fmt.element.name.lower(): fmt for fmt in formats.FORMATS.values() if fmt.scale == formats.SCALE_E8M0}
    rule = case["options"].get("scale_rule", "rceil")
    x, w, dy = (Cast(by_element[case["options"]["elements"][name]], rule) for name in ("x", "w", "dy"))
    return CustomRecipe(Gemm(x, w), Gemm(dy, w), Gemm(dy, x))


def _four_over_six_weights() -> Recipe:
    stock = NVFP4BlockScaling(disable_stochastic_rounding=True)
    w = Cast(formats.NVFP4_2D, "four_over_six_mae_256")
    return CustomRecipe(Gemm(stock.fprop.lhs, w), Gemm(stock.dgrad.lhs, w), stock.wgrad)


# Delayed scaling is quantized with the encode scales that the case gives; see `gemm_scale_enc`.
_GEMM_RECIPES = {
    "fp8_current_hybrid_te": lambda case: Float8CurrentScaling(),
    "fp8_current_hybrid_te_pow2": lambda case: Float8CurrentScaling(use_power_2_scales=True),
    "fp8_tensorwise_torchao": lambda case: Float8CurrentScaling(),
    "fp8_rowwise_torchao": lambda case: Float8RowScaling(),
    "fp8_rowwise_with_gw_hp_torchao": lambda case: Float8RowScaling(wgrad="high_precision"),
    "fp8_block_te": lambda case: Float8BlockScaling(),
    "fp8_block_te_f32": lambda case: Float8BlockScaling(use_f32_scales=True),
    "fp8_delayed_given_scales": lambda case: DelayedScaling(),
    "mxfp8_rceil_torchao": lambda case: MXFP8BlockScaling(),
    "mxfp8_floor_torchao": lambda case: MXFP8BlockScaling(scale_rule="floor"),
    "mxfp8_rceil_hybrid_torchao": lambda case: MXFP8BlockScaling(fp8_format="HYBRID"),
    "mxfp6_e2m3_rceil_torchao": _elements_recipe,
    "mxfp4_rceil_torchao": _elements_recipe,
    "nvfp4_te": lambda case: NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4_te_no_rht": lambda case: NVFP4BlockScaling(disable_stochastic_rounding=True, disable_rht=True),
    "nvfp4_te_4over6_weights": lambda case: _four_over_six_weights(),
}


def recipe_of(case: dict) -> Recipe:
    """The recipe of a GEMM case."""
    return _GEMM_RECIPES[case["recipe"]](case)


# (GEMM, side) -> (input, whether the operand form is its transpose)
GEMM_OPERANDS = {
    ("fprop", "lhs"): ("x", False), ("fprop", "rhs"): ("w", False), ("dgrad", "lhs"): ("dy", False),
    ("dgrad", "rhs"): ("w", True), ("wgrad", "lhs"): ("dy", True), ("wgrad", "rhs"): ("x", True),
}  # fmt: skip
GEMM_RESULTS = {"fprop": "y", "dgrad": "dx", "wgrad": "dw"}


def gemm_scale_enc(case: dict, gemm: str, side: str) -> np.float32 | None:
    """The encode scale of a delayed operand (an input of the case, stored among its outputs), else None."""
    if case["recipe"] != "fp8_delayed_given_scales":
        return None
    return get(case, f"{gemm}.{side}.encode_scale")[0][0]


def mismatch(case: dict, role: str, actual: np.ndarray) -> str | None:
    """None where `actual` meets the stored output under its compare kind and mask, else a sentence that says where not.

    `actual`: codes one per byte (uint8), scale bytes (uint8), or floats; a shape with the same number of elements.
    """
    entry = case["outputs"][role]
    expected, mask = get(case, role)
    actual = np.asarray(actual)
    if actual.size != expected.size:
        return f"{case['id']} {role}: shape {actual.shape}, expected {expected.shape}"
    actual = actual.reshape(expected.shape)
    equal = _equal(actual, expected, entry["encoding"], entry["compare"]) | ~mask
    if equal.all():
        return None
    index = tuple(int(i) for i in np.argwhere(~equal)[0])
    return (
        f"{case['id']} {role}: {int((~equal).sum())} of {int(mask.sum())} differ; first at {index}: "
        f"{actual[index]!r}, expected {expected[index]!r}"
    )


def compared(case: dict, role: str) -> int:
    """Number of elements that `mismatch` compares."""
    return int(get(case, role)[1].sum())


def _equal(actual: np.ndarray, expected: np.ndarray, encoding: str, compare: dict) -> np.ndarray:
    kind = compare["kind"]
    if kind == "bytes":
        return _bits(actual, expected.dtype) == _bits(expected, expected.dtype)
    if kind == "codes":
        return _codes_equal(actual, expected, encoding, zero_sign=compare.get("zero_sign", True))
    if encoding in CODE_ENCODINGS:
        actual, expected = (formats.decode(codes, encoding[:4]) for codes in (actual, expected))
    a, b = actual.astype(np.float64), expected.astype(np.float64)
    both_nan = np.isnan(a) & np.isnan(b)
    with np.errstate(invalid="ignore"):
        if kind == "values":
            return (a == b) | both_nan
        if kind == "close":
            return (np.abs(a - b) <= compare["atol"] + compare["rtol"] * np.abs(b)) | (a == b) | both_nan
        if kind == "bf16_ulp":
            return np.abs(_bf16_order(actual) - _bf16_order(expected)) <= compare["ulp"]
    raise AssertionError(f"unknown compare kind {kind!r}")


def _bits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Raw bits of `array` in `dtype`; refuses a silent change of value on the way."""
    converted = array.astype(dtype)
    assert array.dtype == dtype or np.array_equal(converted.astype(array.dtype), array, equal_nan=True)
    return converted.view(np.dtype(f"u{dtype.itemsize}"))


def _codes_equal(actual: np.ndarray, expected: np.ndarray, encoding: str, *, zero_sign: bool) -> np.ndarray:
    element = formats.get_element(encoding[:4])
    equal = actual == expected
    both_nan = np.isnan(formats.decode(actual, element)) & np.isnan(formats.decode(expected, element))
    if zero_sign:
        return equal | both_nan
    magnitude = element.sign_code - 1
    return equal | both_nan | ((actual & magnitude == 0) & (expected & magnitude == 0))


def _bf16_order(values: np.ndarray) -> np.ndarray:
    """Position of each value among all bfloat16 numbers, zero at 0."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    assert (bits & 0xFFFF == 0).all(), "not bfloat16 values"
    return np.where(bits >> 31, -(bits & 0x7FFFFFFF), bits & 0x7FFFFFFF) >> 16
