"""Elements of a user's own in JAX: the oracle's bytes and values, and no GEMM on units that know stock ones only."""

import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import reference
from microfloat.chips import Chip
from microfloat.formats import E2M1, E3M2, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat
from microfloat.recipes import Cast, CustomRecipe, Delayed, Gemm
from microfloat.routes import route_of
from tests.formats.elements import own_casts, wild_matrix

E3M4 = ElementFormat("E3M4", 3, 4, bias=3, max=31.0, has_inf=False, has_nan=False)
E3M4_IEEE = ElementFormat("E3M4_IEEE", 3, 4, bias=3, max=15.5, has_inf=True, has_nan=True)
E2M1_NAN = ElementFormat("E2M1_NAN", 2, 1, bias=1, max=4.0, has_inf=False, has_nan=True)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("E3M4",))
@pytest.mark.parametrize("element", [E3M4, E3M4_IEEE, E2M1_NAN], ids=str)
def test_bytes_and_values_are_the_oracles(element):
    x = wild_matrix()
    for scale, block in ((SCALE_FP32, (1, None)), (SCALE_E8M0, (3, 5))):
        cast = Cast(ScaledFormat("mine", element, scale, block))
        ours, oracle = mj.quantize(x, cast), reference.quantize(x, cast)
        assert np.asarray(ours.codes).tobytes() == oracle.codes.tobytes()
        assert np.asarray(ours.scale).tobytes() == oracle.scale.tobytes()
        np.testing.assert_array_equal(np.asarray(ours.dequantize()), reference.dequantize(oracle))
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    from microfloat import formats
    from microfloat.jax.numerics.bits import decode

    np.testing.assert_array_equal(np.asarray(decode(codes, element)), formats.decode(codes, element))


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("short powers",))
@pytest.mark.parametrize("name", own_casts())
def test_scales_and_rules_of_a_users_own_have_the_oracles_bytes(name):
    cast, x = own_casts()[name], wild_matrix()
    ours, oracle = mj.quantize(x, cast, seed=3), reference.quantize(x, cast, seed=3)
    assert np.asarray(ours.codes).tobytes() == oracle.codes.tobytes()
    assert np.asarray(ours.scale).tobytes() == oracle.scale.tobytes()
    np.testing.assert_array_equal(np.asarray(ours.dequantize()), reference.dequantize(oracle))


@pytest.mark.parametrize("chip", [(8, 0), (9, 0), (10, 0)])
@pytest.mark.parametrize(
    ("element", "scale", "block", "way"),
    [
        (E3M4, SCALE_E8M0, (1, 32), "float32"), (E3M4, SCALE_FP32, (None, None), "float32"),
        (E2M1, SCALE_FP32, (1, None), "values"), (E3M2, SCALE_FP32, (None, None), "values"),
    ],
)  # fmt: skip
def test_no_unit_takes_codes_that_it_does_not_know(chip, element, scale, block, way):
    cast = Cast(ScaledFormat("mine", element, scale, block))
    route = route_of(Gemm(cast, cast), Chip(chip), library="xla")
    assert (route.kind, route.accelerated) == (way, False)
    assert "E3M4 is not one of the stock elements" in route.reason or way == "values"


def test_delayed_scaling_goes_by_the_largest_value_of_the_element():
    cast = Cast(ScaledFormat("mine", E3M4, SCALE_FP32, (None, None)), scaling=Delayed(amax_history_len=2))
    state = mj.scaling.init(CustomRecipe(*[Gemm(cast, cast)] * 3))
    slot = state.x._replace(amax_history=state.x.amax_history.at[0].set(2.0))
    assert float(mj.scaling.advance(slot, state.rules[0]).scale_enc) == 31.0 / 2.0
