"""FP4 and FP6 bytes, and the 128x4 tile layout of scales."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.reference import (
    from_blocked,
    pack_fp4,
    pack_fp6,
    swizzle_scales,
    to_blocked,
    unpack_fp4,
    unpack_fp6,
    unswizzle_scales,
)

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


# features Q8
@given(sizes=st.lists(st.integers(0, 150), max_size=4), other=st.integers(0, 9), dim=st.sampled_from([0, 1]))
def test_groups_are_put_into_tiles_alone_and_joined(sizes, other, dim):
    """M groups are padded to 128 rows each, K groups to 4 columns each (docs/numerics.md 7.2)."""
    shape = (sum(sizes), other) if dim == 0 else (other, sum(sizes))
    scale = np.random.default_rng(len(sizes)).integers(1, 256, shape, dtype=np.uint8)
    flat = to_blocked(scale, sizes, dim=dim)
    parts = [swizzle_scales(part) for part in np.split(scale, np.cumsum(sizes)[:-1], axis=dim)] if sizes else []
    assert np.array_equal(flat, np.concatenate([np.empty(0, np.uint8), *parts]))
    assert np.array_equal(from_blocked(flat, *shape, np.array(sizes, np.int64), dim=dim), scale)


def test_one_group_is_the_swizzle():
    scale = np.arange(130 * 5, dtype=np.int64).astype(np.uint8).reshape(130, 5)
    assert np.array_equal(to_blocked(scale), swizzle_scales(scale))
    assert np.array_equal(from_blocked(to_blocked(scale), 130, 5), scale)
    named = to_blocked(scale.view(ml_dtypes.float8_e8m0fnu))
    assert named.dtype == ml_dtypes.float8_e8m0fnu
    assert np.array_equal(named.view(np.uint8), to_blocked(scale))


@pytest.mark.parametrize(
    ("sizes", "dim", "error", "message"),
    [
        ([3, 4], 0, InvalidValueError, r"group_sizes: got \[3, 4\], which add up to 7, .* add up to 8, the rows"),
        ([9, -1], 0, InvalidValueError, r"group_sizes: got \[9, -1\]"),
        ([2, 2], 1, InvalidValueError, r"add up to 5, the columns of the scales. Sizes count scales: .* blocks"),
        (3, 0, InvalidTypeError, "group_sizes: got int"), ([4.0, 4.0], 0, InvalidTypeError, "group_sizes: got list"),
        ([8], 2, InvalidValueError, "dim: got 2, needed 0"), ([8], True, InvalidValueError, "dim: got True"),
    ],
)  # fmt: skip
def test_groups_that_do_not_fit(sizes, dim, error, message):
    with pytest.raises(error, match=message):
        to_blocked(np.zeros((8, 5), np.uint8), sizes, dim=dim)
    with pytest.raises(error, match=message):
        from_blocked(np.zeros(1024, np.uint8), 8, 5, sizes, dim=dim)


def test_bytes_of_groups_that_do_not_fit():
    with pytest.raises(InvalidValueError, match=r"flat: got shape \(512,\), needed \(1024,\) .* 8 x 4 .* 2 groups"):
        from_blocked(np.zeros(512, np.uint8), 8, 4, [3, 5])
