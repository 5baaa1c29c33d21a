"""FP4 and FP6 bytes and the tiles of scales on arrays: the oracle's bytes, jitted too. features Q7 and Q8."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat import reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.recipes import Cast, Hadamard

RANDOM = np.random.default_rng(5)
PACKING = [(mj.pack_fp4, mj.unpack_fp4, 4), (mj.pack_fp6, mj.unpack_fp6, 6)]


@pytest.mark.slow_cases(
    "further JAX programs of a checked kind", all_but=("(2, 3, 33)-pack_fp6-*", "(0, 4)-pack_fp4-*")
)
@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKING)
@pytest.mark.parametrize("shape", [(7,), (5, 32), (2, 3, 33), (0, 4), (3, 0)], ids=str)
def test_packing_is_the_oracles(pack, unpack, bits, shape):
    codes = RANDOM.integers(0, 2**bits, shape, np.uint8)
    packed = pack(codes)
    np.testing.assert_array_equal(packed, getattr(reference, pack.__name__)(codes))
    np.testing.assert_array_equal(unpack(packed, shape[-1]), codes)
    np.testing.assert_array_equal(jax.jit(lambda c: unpack(pack(c), shape[-1]))(codes), codes)


@pytest.mark.parametrize(("pack", "unpack", "bits"), PACKING)
def test_what_cannot_be_packed(pack, unpack, bits):
    with pytest.raises(InvalidValueError, match=f"codes: got values from 0 to {2**bits}, needed {bits}-bit codes"):
        pack(np.uint8([0, 2**bits]))
    with pytest.raises(InvalidTypeError, match="codes: got float32"):
        pack(jnp.ones(3))
    with pytest.raises(InvalidTypeError, match="data: got int16"):
        unpack(np.zeros(3, np.int16), 4)
    with pytest.raises(InvalidValueError, match=r"length: got 99 for data of shape \(2, 3\)"):
        unpack(np.zeros((2, 3), np.uint8), 99)


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("*-0",))
@pytest.mark.parametrize(("sizes", "dim"), [(None, 0), ([130, 0, 70], 0), ([200], 0), ([3, 2, 6], 1), ([], 0)], ids=str)
def test_tiles_are_the_oracles(sizes, dim):
    scale = RANDOM.integers(0, 256, (0 if sizes == [] else 200, 11), np.uint8)
    flat = mj.to_blocked(scale, sizes, dim=dim)
    np.testing.assert_array_equal(flat, reference.to_blocked(scale, sizes, dim=dim))
    back = jax.jit(lambda flat: mj.from_blocked(flat, *scale.shape, sizes, dim=dim))(flat)
    np.testing.assert_array_equal(back, scale)
    np.testing.assert_array_equal(jax.jit(lambda s: mj.to_blocked(s, sizes, dim=dim))(scale), flat)
    named = jax.lax.bitcast_convert_type(jnp.asarray(scale), jnp.float8_e4m3fn)
    made = jax.jit(lambda named: mj.to_blocked(named, sizes, dim=dim))(named)
    assert made.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(jax.lax.bitcast_convert_type(made, jnp.uint8), flat)


def test_what_has_no_tiles():
    with pytest.raises(InvalidTypeError, match=r"scale: got float32.*FP32 scales have no swizzled layout"):
        mj.to_blocked(mj.quantize(jnp.ones((4, 128)), "fp8_1x128").scale)
    with pytest.raises(InvalidTypeError, match=r"scale: got QuantizedArray.*Give q\.scale"):
        mj.to_blocked(mj.quantize(jnp.ones((4, 128)), "mxfp8"))
    with pytest.raises(InvalidTypeError, match="group_sizes: got a traced array"):
        jax.jit(lambda sizes: mj.to_blocked(np.zeros((4, 2), np.uint8), sizes))(np.int32([4]))
    with pytest.raises(InvalidValueError, match=r"group_sizes: got .* add up to 4, the rows"):
        mj.to_blocked(np.zeros((4, 2), np.uint8), [1, 2])


@pytest.mark.slow_cases(
    "further JAX programs of a checked kind",
    all_but=("(70, 5)--2-Cast*",),
)
@pytest.mark.parametrize("cast", ["mxfp6_e2m3", "mxfp6_e3m2", Cast("mxfp6_e2m3", hadamard=Hadamard())], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((5, 70), -1), ((70, 5), -2), ((2, 3, 32), -1)], ids=str)
def test_packed_fp6_is_a_form_of_the_array(cast, shape, axis):  # features Q7
    q = mj.quantize(RANDOM.standard_normal(shape).astype(np.float32), cast, axis=axis)
    data = q.packed_codes()
    np.testing.assert_array_equal(data, reference.pack_fp6(np.asarray(q.codes)))
    again = mj.QuantizedArray.from_parts(
        data, q.scale, None, q.format, axis=axis, shape=shape, hadamard=q.hadamard, packed=True
    )
    np.testing.assert_array_equal(again.codes, q.codes)
    assert again.shape == q.shape


def test_packed_codes_of_other_formats_are_the_stored_bytes():
    q = mj.quantize(RANDOM.standard_normal((4, 64)).astype(np.float32), "mxfp8")
    data = q.packed_codes()
    again = mj.QuantizedArray.from_parts(data, q.scale, None, "mxfp8", packed=True)
    assert data.dtype == jnp.uint8
    np.testing.assert_array_equal(again.dequantize(), q.dequantize())
