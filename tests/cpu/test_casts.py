"""microfloat.cpu gives the bytes of the oracle: for every cast that it compiles, and for those that it hands on."""

import dataclasses
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from microfloat import Cast, Current, Delayed, Hadamard, cpu, reference
from microfloat.cpu import _casts
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.formats import (
    E2M1,
    E4M3,
    ELEMENTS,
    FORMATS,
    SCALE_E4M3,
    SCALE_E8M0,
    SCALE_FP32,
    ElementFormat,
    ScaledFormat,
    decode,
)  # fmt: skip
from microfloat.scale_rules import SCALE_RULES
from tests.contract.cases import DTYPES, EVERY_CAST, cast_id, edge_cases

pytest.importorskip("numba", reason="numba is not installed")
# One process of pytest-xdist compiles the kernels, which takes some seconds where numba's cache is empty.

COMPILED = [cast for cast in EVERY_CAST if cast.rounding == "nearest" and cast.hadamard is None]
NORMAL = np.random.default_rng(5).standard_normal((40, 200), dtype=np.float32)


def assert_same(ours, theirs):
    assert (ours.format, ours.axis, ours.shape, ours.hadamard) == (
        theirs.format, theirs.axis, theirs.shape, theirs.hadamard,
    )  # fmt: skip
    for name in ("codes", "scale", "tensor_scale"):
        got, wanted = getattr(ours, name), getattr(theirs, name)
        assert (got is None) == (wanted is None), name
        if wanted is not None:
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), name
            assert got.tobytes() == wanted.tobytes(), name


def casts_of_dtypes():
    """Each cast in one dtype, the default of a format in all of them.

    To compile the kernel of blocks takes longer than all other tests here, so that it is for float32 and bfloat16 in
    every run. How float16 is read is seen in the kernel of rows.
    """
    slow = pytest.mark.slow("casts of blocks of float16, a kernel that is compiled for them alone")
    dtypes = list(DTYPES)
    for number, cast in enumerate(COMPILED):
        by_blocks = cast.format.block not in ((None, None), (1, None))
        taken = dtypes if cast == Cast(cast.format) else [dtypes[number % 3]]
        if by_blocks and taken == ["float16"]:
            taken = ["float32", "float16"]
        for dtype in taken:
            marks = [slow] if by_blocks and dtype == "float16" else []
            yield pytest.param(cast, dtype, id=f"{cast_id(cast)}-{dtype}", marks=marks)


@pytest.mark.parametrize(("cast", "dtype"), list(casts_of_dtypes()))
def test_the_bytes_are_those_of_the_oracle(cast, dtype):
    assert cpu.support(cast).accelerated
    for name, x, axis in edge_cases(cast, dtype):
        ours, theirs = cpu.quantize(x, cast, axis=axis), reference.quantize(x, cast, axis=axis)
        try:
            assert_same(ours, theirs)
        except AssertionError as error:
            raise AssertionError(f"{name}, {dtype}, axis {axis}: {error}") from None


@pytest.mark.parametrize("fmt", FORMATS)
def test_dequantized_values_are_rounded_once(fmt):
    cast = Cast(fmt)
    for name, x, axis in edge_cases(cast, "float32"):
        q = reference.quantize(x, cast, axis=axis)
        values = reference.dequantize(q)
        for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
            got = cpu.dequantize(q, dtype)
            with np.errstate(all="ignore"):
                wanted = values.astype(dtype)
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            assert got.tobytes() == wanted.tobytes(), (name, axis, dtype)


@pytest.mark.parametrize(
    ("cast", "arguments"),
    [
        (Cast("nvfp4"), {"amax": 2.0}),
        (Cast("nvfp4"), {"amax": 0.0}),
        (Cast("nvfp4", "four_over_six"), {"amax": np.float32(1e30)}),
        (Cast("nvfp4_row"), {"amax": np.linspace(0, 9, 40, dtype=np.float32).reshape(40, 1)}),
        (Cast("fp8_tensor"), {"amax": 100.0}),
        (Cast("fp8_tensor", scaling=Delayed()), {"scale_enc": 64.0}),
        (Cast("fp8_1x128", "amax", scaling=Current(amax_epsilon=3.0)), {}),
        (Cast("fp8_row", scaling=Current(amax_epsilon=3.0)), {}),
        (Cast(ScaledFormat("mine", E2M1, SCALE_E8M0, (3, 48))), {}),
        (Cast(ScaledFormat("tiles", E2M1, SCALE_E8M0, (32, 32))), {}),
        ("mxfp8", {"axis": (-1, -2)}),
    ],
)
def test_arguments_mean_what_they_mean_to_the_oracle(cast, arguments):
    ours, theirs = cpu.quantize(NORMAL, cast, **arguments), reference.quantize(NORMAL, cast, **arguments)
    for one, other in zip(*((q if isinstance(q, tuple) else (q,)) for q in (ours, theirs)), strict=True):
        assert_same(one, other)


def misaligned(x):
    memory = np.empty(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    view.setflags(write=False)
    return view


@pytest.mark.parametrize(
    "x",
    [
        misaligned(NORMAL), misaligned(NORMAL.astype(ml_dtypes.bfloat16)), NORMAL.astype(">f4"),
        NORMAL.astype(np.float64) * (1 + 1e-9), NORMAL[::2, ::-1], NORMAL.reshape(2, 20, 200)[:, ::3],
        np.asfortranarray(NORMAL), NORMAL.tolist(),
    ],
    ids=["misaligned", "misaligned bf16", "big-endian", "float64", "strided", "strided 3-D", "Fortran order", "list"],
)  # fmt: skip
def test_memory_may_lie_anyhow(x):
    for cast in ("mxfp8", "nvfp4", "fp8_row", "fp8_128x128"):
        assert_same(cpu.quantize(x, cast), reference.quantize(x, cast))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4", "fp8_row", "fp8_128x128", "fp8_tensor"])
def test_parts_in_mapped_or_strided_memory_are_decoded(fmt):
    q = reference.quantize(NORMAL, fmt)
    every_second = np.repeat(q.codes, 2, axis=1)[:, ::2]
    for codes in (misaligned(q.codes), every_second):
        mapped = dataclasses.replace(q, codes=codes, scale=misaligned(q.scale))
        assert cpu.dequantize(mapped).tobytes() == reference.dequantize(q).tobytes()


@pytest.mark.parametrize("cast", ["mxfp4", "nvfp4_row", "nvfp4_2d", "fp8_tensor", "fp8_row", "fp8_128x128"])
def test_bytes_do_not_depend_on_threads(monkeypatch, cast):
    monkeypatch.setattr(_casts, "_BAND", 1000)
    x = np.random.default_rng(6).standard_normal((300, 70), dtype=np.float32)
    wanted = reference.quantize(x, cast)
    for threads in (1, 3):
        assert_same(cpu.quantize(x, cast, threads=threads), wanted)
        assert cpu.dequantize(wanted, threads=threads).tobytes() == reference.dequantize(wanted).tobytes()


@pytest.mark.parametrize("failing", range(4))
def test_an_error_in_a_band_reaches_the_caller(failing):
    def work(band):
        if band.start == failing:
            raise OSError(f"band {failing}")

    with pytest.raises(OSError, match=f"band {failing}"):
        _casts._spread(work, [slice(start, start + 1) for start in range(4)], 2)


def test_a_forked_process_has_threads_of_its_own(monkeypatch):
    ours = _casts._pool(os.getpid())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert _casts._pool(os.getpid()) is not ours
    assert_same(cpu.quantize(NORMAL, "mxfp8", threads=2), reference.quantize(NORMAL, "mxfp8"))


@pytest.mark.parametrize(
    ("cast", "reason"),
    [
        (Cast("nvfp4", rounding="stochastic"), "stochastic"),
        (Cast("nvfp4", hadamard=Hadamard()), "Hadamard"),
        (Cast(ScaledFormat("narrow", E2M1, SCALE_E8M0, (1, 8))), "16 columns, not of 8"),
        (Cast(ScaledFormat("one_byte", E2M1, SCALE_E8M0, (None, None))), "one float32 scale"),
        (Cast(ScaledFormat("byte_a_row", E2M1, SCALE_E4M3, (1, None), "row")), "one float32 scale"),
        (Cast(ScaledFormat("four_rows", E4M3, SCALE_FP32, (4, None))), "one float32 scale"),
    ],
)
def test_other_casts_go_to_the_oracle_and_say_why(cast, reason):
    answer = cpu.support(cast)
    assert answer.available
    assert not answer.accelerated
    assert reason in answer.reason
    ours = cpu.quantize(NORMAL, cast, seed=7, stream=2)
    assert_same(ours, reference.quantize(NORMAL, cast, seed=7, stream=2))
    assert cpu.dequantize(ours).tobytes() == reference.dequantize(ours).tobytes()


def test_without_numba_the_bytes_are_the_same(monkeypatch):
    wanted = cpu.quantize(NORMAL, "mxfp8")
    monkeypatch.setattr(_casts, "_kernels", lambda: "numba cannot be imported")
    assert not cpu.support("mxfp8").accelerated
    assert_same(cpu.quantize(NORMAL, "mxfp8"), wanted)
    assert cpu.dequantize(wanted).tobytes() == reference.dequantize(wanted).tobytes()


def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch):
    from microfloat.cpu import _kernels

    asked = []

    def njit(signature, cache=False, **settings):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available for file")
        return lambda function: function

    monkeypatch.setattr(_kernels.numba, "njit", njit)
    assert _kernels.compiled.__wrapped__(_kernels.decode, np.dtype(np.float32)) is _kernels.decode
    assert asked == [True, False]


def test_what_another_version_has_compiled_is_not_taken(monkeypatch):
    """numba's cache finds a kernel by its name, and by the date of one file: those of a wheel all have one date."""
    from microfloat.cpu import _kernels

    monkeypatch.setattr(_kernels.numba, "njit", lambda signature, **settings: lambda function: function)
    names = {_kernels.compiled.__wrapped__(_kernels.decode, np.dtype(np.float32)).__qualname__}
    for changed in ("_kernels.py", "_lanes.py"):
        read = Path.read_bytes
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda file: read(file) + b"#" * (file.name == changed))  # noqa: B023
            names.add(_kernels.compiled.__wrapped__(_kernels.decode, np.dtype(np.float32)).__qualname__)
    assert len(names) == 3


def test_a_rule_of_an_unknown_kind_is_refused(monkeypatch):
    monkeypatch.setitem(SCALE_RULES, "mine", dataclasses.replace(SCALE_RULES["rceil"], name="mine", kind="new"))
    cast = Cast("mxfp8", "mine")
    answer = cpu.support(cast)
    assert not answer
    assert "new" in answer.reason
    with pytest.raises(NotSupportedError, match="new"):
        cpu.quantize(NORMAL, cast)


def test_wrong_arguments_are_named():
    with pytest.raises(InvalidTypeError, match="x: got int64"):
        cpu.quantize(np.arange(4), "mxfp8")
    with pytest.raises(InvalidValueError, match="threads"):
        cpu.quantize(NORMAL, "mxfp8", threads=0)
    with pytest.raises(InvalidValueError, match="scale_enc"):
        cpu.quantize(NORMAL, Cast("fp8_tensor", scaling=Delayed()))
    with pytest.raises(InvalidTypeError, match="q: got"):
        cpu.dequantize(NORMAL)
    for dtype in (np.int32, "no_dtype", ml_dtypes.float8_e4m3fn):
        with pytest.raises(InvalidTypeError, match=r"dtype: got .*, needed float32, bfloat16"):
            cpu.dequantize(reference.quantize(NORMAL, "mxfp8"), dtype)


def test_energies_are_sums_over_the_finite_elements(monkeypatch):
    x, y = NORMAL.copy(), NORMAL * np.float32(1.01)
    x[3, 5], x[7, 8], y[9, 9] = np.nan, np.inf, 4
    finite = np.isfinite(x)
    expected = np.square(x[finite], dtype=np.float64).sum(), np.square((y - x)[finite], dtype=np.float64).sum()
    for array in (x, misaligned(x)):
        np.testing.assert_allclose(_casts.energies(array, y), expected, rtol=1e-6)
    monkeypatch.setattr(_casts, "_kernels", lambda: "numba cannot be imported")
    np.testing.assert_allclose(_casts.energies(x, y), expected, rtol=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("columns", [1024, 1040, 4201])
def test_rows_of_several_segments(fmt, columns):
    """Rows longer than what a kernel takes at a time, with a short last block, a NaN and an infinity on the way."""
    cast, x = Cast(fmt), np.random.default_rng(columns).standard_normal((19, columns), dtype=np.float32)
    x[3, 1030 % columns], x[5, columns - 1], x[7, :40] = np.nan, np.inf, 0
    for array in (x, x.astype(ml_dtypes.bfloat16)):
        wanted = reference.quantize(array, cast)
        assert_same(cpu.quantize(array, cast), wanted)
    assert cpu.dequantize(wanted).tobytes() == reference.dequantize(wanted).tobytes()
    if wanted.format.element.bits == 6 and columns % 4 == 0:
        packed = _casts.Matrix(
            reference.pack_fp6(wanted.codes), columns, wanted.format, wanted.scale, outer=np.float32(3)
        )
        out = np.empty(x.shape, np.float32)
        _casts.decode_into(packed, out)
        assert out.tobytes() == (reference.dequantize(wanted) * np.float32(3)).tobytes()


@pytest.mark.parametrize(
    "element",
    [
        *ELEMENTS.values(), ElementFormat("ieee", 4, 3, bias=7, max=240.0, has_inf=True, has_nan=True),
        ElementFormat("two_nan", 3, 2, bias=3, max=24.0, has_inf=False, has_nan=True),
        ElementFormat("fine", 2, 5, bias=1, max=7.875, has_inf=False, has_nan=False),
    ],
    ids=lambda element: element.name,
)  # fmt: skip
def test_every_code_is_decoded(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8).reshape(2, -1)
    stored = codes if element.bits > 4 else reference.pack_fp4(codes)
    made = ScaledFormat("mine", element, SCALE_E8M0, (1, 32))
    out, scale = np.empty(codes.shape, np.float32), np.full((2, -(-codes.shape[1] // 32)), 127, np.uint8)
    _casts.decode_into(_casts.Matrix(stored, codes.shape[1], made, scale), out)
    assert out.tobytes() == decode(codes, element).tobytes()
