"""FP4 and FP6 bytes, and the 128x4 tile layout of scales."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.reference import pack_fp4, pack_fp6, swizzle_scales, unpack_fp4, unpack_fp6, unswizzle_scales

SHAPES = hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=9)


def codes(bits):
    return SHAPES.flatmap(lambda shape: hnp.arrays(np.uint8, shape, elements=st.integers(0, 2**bits - 1)))


def test_nibble_order():
    assert pack_fp4(np.uint8([1, 2, 3])).tolist() == [0x21, 0x03]
    assert unpack_fp4(np.uint8([0x21, 0x03]), 3).tolist() == [1, 2, 3]
    assert unpack_fp4(np.uint8([0x21, 0x43]), 4).tolist() == [1, 2, 3, 4]


def test_fp6_byte_order():
    """w = c0 | c1 << 6 | c2 << 12 | c3 << 18, little-endian."""
    word = 0x2A | 0x15 << 6 | 0x3F << 12 | 0x01 << 18
    assert pack_fp6(np.uint8([0x2A, 0x15, 0x3F, 0x01])).tolist() == [word & 255, word >> 8 & 255, word >> 16]
    assert pack_fp6(np.uint8([63])).tolist() == [63, 0, 0]


@given(codes(4))
def test_fp4_round_trip(array):
    packed = pack_fp4(array)
    assert packed.shape == (*array.shape[:-1], -(-array.shape[-1] // 2))
    assert packed.dtype == np.uint8
    assert np.array_equal(unpack_fp4(packed, array.shape[-1]), array)


@given(codes(6))
def test_fp6_round_trip(array):
    packed = pack_fp6(array)
    assert packed.shape == (*array.shape[:-1], 3 * -(-array.shape[-1] // 4))
    assert packed.dtype == np.uint8
    assert np.array_equal(unpack_fp6(packed, array.shape[-1]), array)


@pytest.mark.parametrize(("pack", "bits"), [(pack_fp4, 4), (pack_fp6, 6)])
def test_what_cannot_be_packed(pack, bits):
    with pytest.raises(InvalidValueError, match=f"codes: got values from 0 to {2**bits}, needed {bits}-bit codes"):
        pack(np.uint8([0, 2**bits]))
    with pytest.raises(InvalidValueError, match="from -1 to 3"):
        pack(np.int8([-1, 3]))
    with pytest.raises(InvalidTypeError, match="codes: got float32"):
        pack(np.float32([1]))
    with pytest.raises(InvalidValueError, match="at least one axis"):
        pack(np.uint8(1))


@pytest.mark.parametrize(
    ("unpack", "data", "length"), [(unpack_fp4, 2, 5), (unpack_fp4, 2, 2), (unpack_fp6, 3, 5), (unpack_fp6, 4, 4)]
)
def test_lengths_that_do_not_fit(unpack, data, length):
    with pytest.raises(InvalidValueError, match=f"length: got {length} for data of shape"):
        unpack(np.zeros((2, data), np.uint8), length)


@pytest.mark.parametrize("unpack", [unpack_fp4, unpack_fp6])
def test_what_cannot_be_unpacked(unpack):
    with pytest.raises(InvalidTypeError, match="data: got int16"):
        unpack(np.zeros(3, np.int16), 4)
    with pytest.raises(InvalidTypeError, match="length: got float"):
        unpack(np.zeros(3, np.uint8), 4.0)
    with pytest.raises(InvalidValueError, match="length: got -1"):
        unpack(np.zeros(0, np.uint8), -1)
    with pytest.raises(InvalidValueError, match="length: got 2"):
        unpack(np.uint8(3), 2)


@given(rows=st.integers(0, 300), cols=st.integers(0, 13), seed=st.integers(0, 99))
def test_swizzle_puts_every_byte_where_the_formula_says(rows, cols, seed):
    scale = np.random.default_rng(seed).integers(1, 256, (rows, cols), dtype=np.uint8)
    flat = swizzle_scales(scale)
    column_tiles = -(-cols // 4)
    assert flat.shape == (512 * -(-rows // 128) * column_tiles,)
    r, c = np.indices((rows, cols))
    places = ((r // 128) * column_tiles + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
    assert np.array_equal(flat[places], scale)
    assert int((flat != 0).sum()) == rows * cols  # padding is 0
    assert np.array_equal(unswizzle_scales(flat, rows, cols), scale)


def test_what_cannot_be_swizzled():
    with pytest.raises(InvalidTypeError, match=r"scale: got float32.*FP32 scales have no swizzled layout"):
        swizzle_scales(np.ones((2, 2), np.float32))
    with pytest.raises(InvalidValueError, match=r"scale: got shape \(2,\), needed \[R, C\]"):
        swizzle_scales(np.ones(2, np.uint8))
    with pytest.raises(InvalidValueError, match=r"flat: got shape \(512,\), needed \(1024,\) bytes for 129 x 4"):
        unswizzle_scales(np.zeros(512, np.uint8), 129, 4)
    with pytest.raises(InvalidTypeError, match="flat: got int64"):
        unswizzle_scales(np.zeros(512, np.int64), 1, 1)
    with pytest.raises(InvalidTypeError, match="rows: got str"):
        unswizzle_scales(np.zeros(512, np.uint8), "1", 1)
    with pytest.raises(InvalidValueError, match="cols: got -1"):
        unswizzle_scales(np.zeros(512, np.uint8), 1, -1)
