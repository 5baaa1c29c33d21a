"""Values of stored matrices, and sums of squares, by bands of rows on several threads."""

import os

import ml_dtypes
import numpy as np
import pytest

from microfloat import reference
from microfloat.checkpoint import _arrays
from microfloat.checkpoint._casting import amax_of
from microfloat.formats import E2M1, ELEMENTS, FORMATS, SCALE_E8M0, ElementFormat, ScaledFormat, decode
from microfloat.reference._values import scale_grid

NORMAL = np.random.default_rng(5).standard_normal((40, 200), dtype=np.float32)


def misaligned(x):
    """A copy that begins at an odd address and cannot be written, as mapped files may."""
    memory = np.empty(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    view.setflags(write=False)
    return view


def decoded(q, codes=None, dtype=np.float32, **outer):
    out = np.empty((q.rows, q.length), dtype)
    codes = q.codes if codes is None else codes
    _arrays.decode_into(out, codes, q.format, scale_grid(q), **outer)
    return out


def expected(q):
    """Code times scale, without the tensor scale."""
    values = decode(q.unpacked_codes(), q.format.element)
    _arrays.scale_in_place(values, q.format.scale.values(scale_grid(q)), q.format.block)
    return values


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [32, 201])
def test_values_are_rounded_once(fmt, columns, monkeypatch):
    monkeypatch.setattr(_arrays, "_BAND", 1000)
    x = np.random.default_rng(columns).standard_normal((150, columns), dtype=np.float32)
    x[3, 7], x[5] = np.nan, 0
    q = reference.quantize(x, fmt)
    for codes in (q.codes, misaligned(q.codes), np.repeat(q.codes, 2, axis=1)[:, ::2]):
        assert decoded(q, codes).tobytes() == expected(q).tobytes()
    if q.tensor_scale is None:
        assert decoded(q).tobytes() == reference.dequantize(q).tobytes()
    for dtype in (ml_dtypes.bfloat16, np.float16):
        with np.errstate(all="ignore"):
            assert decoded(q, dtype=dtype).tobytes() == expected(q).astype(dtype).tobytes()
    level = np.float32(3) if fmt != "nvfp4_row" else np.linspace(1, 3, len(x), dtype=np.float32).reshape(-1, 1)
    assert decoded(q, outer=level).tobytes() == (expected(q) * level).tobytes()
    assert decoded(q, outer=level, divides=True).tobytes() == (expected(q) / level).tobytes()


def test_packed_codes_of_six_bits():
    q = reference.quantize(NORMAL, "mxfp6_e2m3")
    assert decoded(q, reference.pack_fp6(q.codes)).tobytes() == reference.dequantize(q).tobytes()


@pytest.mark.parametrize(
    "element",
    [
        *ELEMENTS.values(), ElementFormat("ieee", 4, 3, bias=7, max=240.0, has_inf=True, has_nan=True),
        ElementFormat("fine", 2, 5, bias=1, max=7.875, has_inf=False, has_nan=False),
    ],
    ids=lambda element: element.name,
)  # fmt: skip
def test_every_code_is_decoded(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8).reshape(2, -1)
    stored = codes if element.bits > 4 else reference.pack_fp4(codes)
    made = ScaledFormat("mine", element, SCALE_E8M0, (1, 32))
    out, scale = np.empty(codes.shape, np.float32), np.full((2, -(-codes.shape[1] // 32)), 127, np.uint8)
    _arrays.decode_into(out, stored, made, scale)
    assert out.tobytes() == decode(codes, element).tobytes()


def test_tiles_of_odd_heights():
    q = reference.quantize(NORMAL, ScaledFormat("mine", E2M1, SCALE_E8M0, (3, 48)))
    assert decoded(q).tobytes() == reference.dequantize(q).tobytes()


@pytest.mark.parametrize("failing", range(4))
def test_an_error_in_a_band_reaches_the_caller(failing):
    def work(band):
        if band.start == failing:
            raise OSError(f"band {failing}")

    with pytest.raises(OSError, match=f"band {failing}"):
        _arrays.in_bands(work, 4, _arrays._BAND)


@pytest.mark.parametrize(("rows", "multiple", "heights"), [(7, 1, [1] * 7), (7, 3, [3, 3, 1]), (0, 2, [])])
def test_the_results_of_bands_are_in_their_order(rows, multiple, heights):
    bands = _arrays.in_bands(lambda band: band, rows, _arrays._BAND, multiple)
    assert [band.stop - band.start for band in bands] == heights
    assert [band.start for band in bands] == [sum(heights[:i]) for i in range(len(heights))]


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    ours = _arrays._pool(os.getpid())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert _arrays._pool(os.getpid()) is not ours


@pytest.mark.parametrize("size", [1.0, 1e-21, 1e25])
def test_energies_are_sums_over_the_finite_elements(size):
    """Squares of 1e-21 and of 1e25 do not fit into float32."""
    x, y = NORMAL * np.float32(size), NORMAL * np.float32(1.01 * size)
    x[3, 5], x[7, 8], y[9, 9] = np.nan, np.inf, 4 * size
    for array, other in ((x, y), (misaligned(x), y), (x[:2], y[:2])):
        finite = np.isfinite(array)
        wide, error = array[finite].astype(np.float64), (other - array)[finite].astype(np.float64)
        np.testing.assert_allclose(
            _arrays.energies(array, other), (np.square(wide).sum(), np.square(error).sum()), rtol=1e-5
        )


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "values", [[1, -3, 2], [-1, -2], [4, 5], [-0.0], [np.nan, -7, np.inf], [-np.nan, -np.inf, 0.5], [np.inf], []]
)
def test_the_largest_finite_magnitude_by_its_bits(values, dtype):
    array = np.array(values, dtype)
    finite = np.abs(array.astype(np.float32))[np.isfinite(array.astype(np.float32))]
    assert amax_of(array) == (finite.max(initial=0), array.size - finite.size)
