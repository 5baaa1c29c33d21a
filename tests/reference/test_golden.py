"""Every golden case that follows docs/numerics.md, against the oracle, under the case's own compare kind and mask."""

import dataclasses
import hashlib
import re

import numpy as np
import pytest

from microfloat import formats, metrics, reference
from microfloat.recipes import Cast, Delayed
from microfloat.reference import Quantized
from tests import golden_cases
from tests.golden_cases import case_id, cases, compared, contraction_axis, get, input_array, mismatch

ONE_TENSOR = [
    case for family in ("mx", "mx_2d", "fp8_tensor", "fp8_row", "fp8_block", "nvfp4", "qwix") for case in cases(family)
]


def test_every_case_that_follows_the_spec_is_tested_somewhere():
    families = {"cast": 10, "decode": 6, "mx_scale": 40, "swizzle": 6, "delayed": 10, "delayed_tensor": 4, "gemm": 23}
    assert {family: len(cases(family)) for family in families} == families
    assert len(ONE_TENSOR) + sum(families.values()) == len(cases()) == 340


def test_the_files_are_those_of_the_provenance(repository):
    folder = repository / "tests" / "golden"
    rows = re.findall(
        r"^\| `(\S+\.npz)` \| (\d+) \| `([0-9a-f]{64})` \|$", (folder / "PROVENANCE.md").read_text(), re.M
    )
    assert {name for name, _, _ in rows} == {path.relative_to(folder).as_posix() for path in folder.glob("*/*.npz")}
    for name, size, checksum in rows:
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (int(size), checksum), name


def outputs(q: Quantized, case: dict) -> dict[str, np.ndarray]:
    """The oracle's tensor for each role of a case of one tensor."""
    element = q.format.element
    transformed = dataclasses.replace(q, hadamard=None) if q.hadamard else q
    dequantized = reference.dequantize(transformed)
    found = {
        "data": q.unpacked_codes(),
        "scale": q.scale,
        "dequant": dequantized.T if q.axis == 0 and len(q.shape) == 2 else dequantized,
    }
    if q.format.scale.name == "FP32":
        found["encode_scale"] = np.float32(1) / q.scale  # masked roles aside, scales are f32(1 / s) of these s
    if q.tensor_scale is not None:
        found["tensor_scale"] = q.tensor_scale
    if case["family"] == "qwix":
        found["scale"] = np.ldexp(1.0, q.scale.astype(int) - 127)
    assert element.name == case["element"]
    return found


@pytest.mark.parametrize("case", ONE_TENSOR, ids=case_id)
def test_one_tensor(case):
    cast, x = golden_cases.cast_of(case), input_array(case)
    q = reference.quantize(x, cast, axis=contraction_axis(case))
    found = outputs(q, case)
    if "encode_scale" in case["outputs"]:
        # The factor itself is not stored: recompute it as docs/numerics.md 2.3 does and check that it is what was used.
        found["encode_scale"] = encode_scale(q, case)
    if "amax" in case["outputs"]:
        found.pop("tensor_scale")
        check_tensor_scale(q, case)
    if "hadamard_out" in case["outputs"]:
        found["hadamard_out"] = transformed_input(q, case)
    for role in case["outputs"]:
        if role != "amax":
            problem = mismatch(case, role, found[role])
            assert problem is None, problem


def encode_scale(q, case):
    """f32(max / amax) per scope, for the cases that store the encode scale."""
    x = input_array(case).astype(np.float32)
    x = x.T if q.axis == 0 else x
    amax = np.abs(x).max(axis=1, keepdims=True) if q.format.block == (1, None) else np.abs(x).max()
    with np.errstate(divide="ignore", over="ignore"):
        factor = np.float32(q.format.element.max) / amax
    if case["scale_rule"] == "amax_pow2":
        factor = (np.asarray(factor).view(np.uint32) & np.uint32(0xFF800000)).view(np.float32)
    mask = get(case, "encode_scale")[1].reshape(np.shape(factor) or (1,))
    assert np.array_equal((np.float32(1) / factor).reshape(mask.shape)[mask], q.scale.reshape(mask.shape)[mask])
    return factor


def check_tensor_scale(q, case):
    """tensor_scale = f32(amax / (6 * e4m3_max)), 1 where the stored amax is 0."""
    amax = get(case, "amax")[0]
    capacity = np.float32(6 * case["options"]["e4m3_max"])
    expected = np.where(amax == 0, np.float32(1), amax / capacity)
    assert np.array_equal(q.tensor_scale.reshape(expected.shape), expected)


def transformed_input(q, case):
    """The Hadamard transform of the operand form, through the package's own private function."""
    from microfloat.reference import hadamard_transform

    x = input_array(case).astype(np.float32)
    return hadamard_transform(x.T if q.axis == 0 else x, q.hadamard)


@pytest.mark.parametrize("case", cases("mx_scale"), ids=case_id)
def test_e8m0_byte_of_every_amax(case):
    amax = input_array(case, "amax")
    q = reference.quantize(amax[:, None], golden_cases.cast_of(case))
    assert mismatch(case, "scale", q.scale) is None, mismatch(case, "scale", q.scale)


@pytest.mark.parametrize("case", cases("swizzle"), ids=case_id)
def test_swizzle(case):
    scale = get(case, "scale", "inputs")[0]
    flat = reference.swizzle_scales(scale)
    assert mismatch(case, "swizzled", flat) is None
    assert np.array_equal(reference.unswizzle_scales(flat, *scale.shape), scale)


def delayed_steps(case, amaxes):
    """(scale_enc used in the step, history after it, scale_enc after it) for every step of a delayed-scaling case."""
    options = case["options"]
    algo = options.get("amax_compute_algo") or case["id"].split(".")[4]
    history, scale_enc = np.zeros(options["amax_history_len"], np.float32), np.float32(options["initial_scale"])
    for amax in amaxes:
        used = scale_enc
        history = reference.record_amax(history, amax)
        history, scale_enc = reference.update_delayed(
            history, scale_enc, case["element"], margin=int(options["margin"]), amax_compute_algo=algo
        )
        yield used, history, scale_enc


@pytest.mark.parametrize("case", cases("delayed"), ids=case_id)
def test_delayed_update(case):
    steps = list(delayed_steps(case, get(case, "amax", "inputs")[0]))
    assert mismatch(case, "history", np.stack([history for _, history, _ in steps])) is None
    assert mismatch(case, "encode_scale", np.stack([scale for _, _, scale in steps])) is None


@pytest.mark.parametrize("case", cases("delayed_tensor"), ids=case_id)
def test_delayed_tensors(case):
    x = input_array(case)
    fmt = {"E4M3": formats.FP8_TENSOR, "E5M2": formats.FP8_TENSOR_E5M2}[case["element"]]
    steps = list(delayed_steps(case, np.abs(x).max(axis=(1, 2))))
    quantized = [
        reference.quantize(matrix, Cast(fmt, scaling=Delayed()), scale_enc=used)
        for matrix, (used, _, _) in zip(x, steps, strict=True)
    ]
    found = {
        "data": np.stack([q.codes for q in quantized]),
        "scale": np.stack([q.scale for q in quantized]),
        "history": np.stack([history for _, history, _ in steps]),
        "encode_scale": np.stack([scale for _, _, scale in steps]),
    }
    assert set(found) == set(case["outputs"])
    for role, actual in found.items():
        assert mismatch(case, role, actual) is None, mismatch(case, role, actual)


def gemm_operand(case, gemm, side):
    """One of the six operands in operand form: a Quantized, or the input itself where the recipe has no Cast."""
    name, transposed = golden_cases.GEMM_OPERANDS[gemm, side]
    x, cast = input_array(case, name), golden_cases.recipe_of(case).cast(gemm, side)
    if cast is None:
        return x.T if transposed else x
    scale_enc = golden_cases.gemm_scale_enc(case, gemm, side)
    return reference.quantize(x, cast, axis=-2 if transposed else -1, scale_enc=scale_enc)


def operand_roles(operand, case, prefix):
    """Roles of a GEMM case that one operand answers for."""
    if not isinstance(operand, Quantized):
        return {f"{prefix}.bf16": operand.astype(np.float32)}
    scale = operand.scale
    if operand.format == formats.NVFP4_2D:
        scale = np.repeat(scale, 16, axis=0)[: operand.rows]
    found = {f"{prefix}.data": operand.unpacked_codes(), f"{prefix}.scale": scale}
    if operand.tensor_scale is not None:
        capacity = np.float32(operand_capacity(case, prefix))
        amax = get(case, f"{prefix}.amax")[0]
        assert np.array_equal(operand.tensor_scale.reshape(1), amax / capacity)
        found[f"{prefix}.amax"] = amax
    if f"{prefix}.encode_scale" in case["outputs"]:
        stored = get(case, f"{prefix}.encode_scale")[0]
        assert np.array_equal(np.float32(1) / stored, scale.reshape(stored.shape))
        found[f"{prefix}.encode_scale"] = stored
    return found


def operand_capacity(case, prefix):
    gemm, side = prefix.split(".")
    return golden_cases.recipe_of(case).cast(gemm, side).rule.two_level.capacity


@pytest.mark.parametrize("case", cases("gemm"), ids=case_id)
def test_gemm(case):
    found = {}
    for gemm, result in golden_cases.GEMM_RESULTS.items():
        lhs, rhs = (gemm_operand(case, gemm, side) for side in ("lhs", "rhs"))
        found |= operand_roles(lhs, case, f"{gemm}.lhs") | operand_roles(rhs, case, f"{gemm}.rhs")
        found[f"{result}_f64"] = found[result] = reference.scaled_matmul(lhs, rhs)
    assert set(case["outputs"]) <= set(found)
    for role in case["outputs"]:
        problem = mismatch(case, role, found[role])
        assert problem is None, problem


def test_a_changed_byte_is_seen():
    case = cases("mx")[0]
    q = reference.quantize(input_array(case), golden_cases.cast_of(case))
    wrong = q.scale.copy()
    wrong[3, 1] += 1
    assert "first at (3, 1)" in mismatch(case, "scale", wrong)
    assert metrics.first_difference(wrong, q.scale).index == (3, 1)
    assert compared(case, "scale") == q.scale.size
