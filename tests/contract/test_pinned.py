"""Digests and golden cases, which do not depend on the oracle: every front end and backend against the same pins."""

import numpy as np
import pytest

from microfloat.reference import unpack_fp4
from tests import extent, golden_cases
from tests.contract.adapters import ADAPTERS, COMPARED, RUNNING
from tests.contract.cases import SEED
from tests.digests import APPENDIX_A, APPENDIX_C, DEQUANTIZED, TENSOR_SCALES, digest, input_set
from tests.golden_cases import case_id, cases, contraction_axis, input_array, mismatch

# With all of XLA's passes, which may not change a bit of the digests; golden cases take its cheaper ones.
as_users_compile = pytest.mark.as_users_compile

assert digest(input_set("A")) == "71160c66205a"
assert SEED == 0x89ABCDEF01234567
PINS = {pin.id: pin for pin in APPENDIX_A + APPENDIX_C}
ONE_TENSOR = [
    case for family in ("mx", "mx_2d", "fp8_tensor", "fp8_row", "fp8_block", "nvfp4") for case in cases(family)
]
every_adapter = pytest.mark.parametrize("adapter", RUNNING, ids=lambda adapter: adapter.name)


# Of these cases tests/reference/test_golden.py has more to say where the oracle is concerned.
every_other_adapter = pytest.mark.parametrize("adapter", COMPARED, ids=lambda adapter: adapter.name)


@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
def test_which_adapters_run(adapter):
    reason = adapter.unavailable()
    if reason is not None:
        pytest.skip(f"{adapter.name}: {reason}")


def supported(adapter, cast, pin=None):
    if not adapter.supports(cast):
        pytest.skip(f"{adapter.name} {adapter.left_out}")
    if pin and has_a_program_of_its_own(adapter, pin):
        pytest.skip(f"{adapter.name} compiles every shape: tests/jax/test_every_cast.py has this one with fewer passes")


def has_a_program_of_its_own(adapter, pin):
    """True in `make test` of views, of other axes and of given amaxes, where each of them is compiled."""
    return adapter.compiles_every_shape and extent.is_quick() and (pin.axis, pin.view, pin.amax) != (-1, "", None)


def where_shapes_compile(condition):
    return pytest.mark.left_to_others("compiles every shape: takes a sample of pinned cases", condition)


@as_users_compile
@every_adapter
@pytest.mark.parametrize("pin", PINS.values(), ids=lambda pin: pin.id)
@where_shapes_compile(has_a_program_of_its_own)  # tests/jax/test_every_cast.py has those, with fewer passes
def test_digests(adapter, pin):
    supported(adapter, pin.cast)
    found = adapter.quantize(pin.x, pin.cast, **pin.arguments)
    assert pin.digest(found.scale, found.codes) == pin.expected


@as_users_compile
@every_adapter
@pytest.mark.parametrize(("pin_id", "expected"), TENSOR_SCALES)
def test_tensor_scales(adapter, pin_id, expected):
    pin = PINS[pin_id]
    supported(adapter, pin.cast, pin)
    tensor_scale = adapter.quantize(pin.x, pin.cast, **pin.arguments).tensor_scale
    found = digest(tensor_scale) if isinstance(expected, str) else int(tensor_scale.view(np.uint32))
    assert found == expected


@as_users_compile
@every_adapter
@pytest.mark.parametrize(("cast", "expected"), DEQUANTIZED, ids=lambda value: getattr(value, "scale_rule", None))
def test_dequantized_digests(adapter, cast, expected):
    supported(adapter, cast)
    assert digest(adapter.dequantize(adapter.quantize(input_set("A"), cast).handle)) == expected


@every_other_adapter
@pytest.mark.parametrize("case", ONE_TENSOR, ids=case_id)
@where_shapes_compile(
    lambda adapter, case: adapter.compiles_every_shape and extent.is_quick() and ONE_TENSOR.index(case) % 3
)
def test_golden_tensors(adapter, case):
    cast, x = golden_cases.cast_of(case), input_array(case)
    supported(adapter, cast)
    axis = contraction_axis(case)
    found = adapter.quantize(x, cast, axis=axis)
    length = x.shape[axis] if cast.hadamard is None else -(-x.shape[axis] // 16) * 16
    packed = cast.format.element.codes_per_byte == 2
    roles = {"data": unpack_fp4(found.codes, length) if packed else found.codes, "scale": found.scale}
    if found.tensor_scale is not None and "tensor_scale" in case["outputs"]:
        roles["tensor_scale"] = found.tensor_scale
    if cast.hadamard is None:
        values = adapter.dequantize(found.handle)
        roles["dequant"] = values.T if axis == -2 else values
    for role in roles.keys() & case["outputs"].keys():
        problem = mismatch(case, role, roles[role])
        assert problem is None, f"{adapter.name}: {problem}"


@every_adapter
@pytest.mark.parametrize("case", cases("mx_scale"), ids=case_id)
def test_golden_e8m0_byte_of_every_amax(adapter, case):
    cast = golden_cases.cast_of(case)
    supported(adapter, cast)
    problem = mismatch(case, "scale", adapter.quantize(input_array(case, "amax")[:, None], cast).scale)
    assert problem is None, problem
