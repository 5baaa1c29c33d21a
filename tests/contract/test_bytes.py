"""Every Cast on edge inputs, on every bfloat16 number and on random inputs: the oracle's bytes, all of them."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from microfloat.formats import ELEMENTS, FORMATS, SCALE_FP32, ScaledFormat, encode
from microfloat.recipes import Cast, Current, Delayed
from tests import extent
from tests.contract.adapters import COMPARED, THOROUGH
from tests.contract.cases import (
    COMMON_SHAPE,
    DTYPES,
    EDEN,
    EVERY_CAST,
    EVERY_TURN,
    SEED,
    SHAPES,
    alike,
    cast_id,
    dtypes_in_turn,
    edge_cases,
    edge_cases_in_turn,
    edge_cases_of_few_shapes,
    edge_inputs,
    few_edge_cases,
    in_common_shape,
    in_dtype,
    sampled_edge_cases,
    turns,
)
from tests.contract.comparison import arguments_of, check_dequantize, check_quantize, first_difference

every_adapter = pytest.mark.parametrize("adapter", COMPARED, ids=lambda adapter: adapter.name)
every_cast = pytest.mark.parametrize("cast", EVERY_CAST, ids=cast_id)
ALL_BF16 = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).reshape(256, 256)


def supported(adapter, cast, dtype="any"):
    if not adapter.supports(cast, dtype):
        pytest.skip(f"{adapter.name} {adapter.left_out}")


def test_every_format_rule_rounding_and_transform_is_there():
    assert {cast.format.name for cast in EVERY_CAST} == FORMATS.keys()
    assert {cast.rounding for cast in EVERY_CAST} == {"nearest", "stochastic"}
    assert len(EVERY_CAST) > 100
    assert len(set(EVERY_CAST)) == len(EVERY_CAST)


def takes_other_dtypes(adapter, cast, dtype):
    """True if other casts of the kind, or this one in another dtype, stand for this case."""
    if adapter.compiles_kinds_of_shapes:
        return not sampled_edge_cases(cast, dtype)
    return not (THOROUGH or adapter.compiles_every_shape or dtype in dtypes_in_turn(cast))


@every_adapter
@every_cast
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.left_to_others("takes the dtypes in turn under the rules of a format", takes_other_dtypes)
def test_edge_inputs(adapter, cast, dtype):  # features Q9
    """Every one of them, on both axes, in the dtypes of the Cast's turn; a sample where kernels or shapes compile.

    `make test` takes pairs of what a Cast is and of values, axes and dtypes (`few_edge_cases`).
    """
    taken = few_edge_cases if extent.is_quick() else edge_cases_in_turn
    if adapter.compiles_kinds_of_shapes:
        taken = sampled_edge_cases
    elif adapter.compiles_every_shape:
        taken = edge_cases_of_few_shapes
    elif THOROUGH:
        taken = edge_cases
    for name, x, axis in taken(cast, dtype):
        found, expected = check_quantize(adapter, x, cast, name, **arguments_of(cast, axis))
        if THOROUGH or cast == alike(cast)[0]:  # codes and scales mean the same under every rule
            check_dequantize(adapter, found, expected, f"{cast} {name} {dtype} axis {axis}")


@every_adapter
@pytest.mark.parametrize(("cast", "dtype"), [*zip(EDEN, DTYPES, strict=True)], ids=lambda value: str(value)[:8])
def test_edge_inputs_under_eden(adapter, cast, dtype):
    """Block scales that are corrected by sums over Hadamard groups of 16 and of 64."""
    compiles = adapter.compiles_every_shape
    if compiles and cast != EDEN[0]:
        pytest.skip("one cast is enough where every shape is compiled")
    for name, x, axis in edge_cases(cast, dtype):
        if not compiles or (axis == -1 and x.shape == COMMON_SHAPE):
            found, expected = check_quantize(adapter, x, cast, name, **arguments_of(cast, axis))
            check_dequantize(adapter, found, expected, f"{cast} {name} {dtype} axis {axis}")


def test_every_dtype_has_its_turn():
    def kinds(dtypes):
        return {
            (cast.format, cast.rounding, cast.hadamard is None, dtype) for cast in EVERY_CAST for dtype in dtypes(cast)
        }

    assert kinds(dtypes_in_turn) == kinds(lambda cast: DTYPES)
    assert all(dtypes_in_turn(cast) for cast in EVERY_CAST)
    assert all(dtypes_in_turn(Cast(fmt)) == tuple(DTYPES) for fmt in FORMATS.values())


def test_samples_span_what_they_stand_for():
    def met(taken):
        """Casts with values, formats with both, all on which dtype and axis."""
        found = set()
        for cast in EVERY_CAST:
            for dtype in DTYPES:
                for name, x, axis in taken(cast, dtype):
                    found |= {(cast.format, name), (cast.format, dtype, axis), (name, dtype, axis)}
                    if name not in SHAPES:
                        found |= {(cast, name), (cast.format, name, dtype, axis)}
                    assert name in SHAPES or taken is edge_cases or x.shape == COMMON_SHAPE
        return found

    assert met(sampled_edge_cases) == met(edge_cases)


def test_few_edge_cases_keep_all_pairs():
    def met(taken):
        """Formats with values on which axis, roundings and transforms with names, rules with values, and dtypes."""
        found = set()
        for cast in EVERY_CAST:
            kind = cast.format, cast.rounding, cast.hadamard is None
            for dtype in dtypes_in_turn(cast):
                for name, _, axis in taken(cast, dtype):
                    found |= {(cast.format, name, axis), (*kind, name), (*kind, dtype), (name, dtype, axis)}
                    if name not in SHAPES:
                        found |= {(cast.format, cast.scale_rule, name)}
        return found

    assert met(few_edge_cases) == met(edge_cases)


def test_common_shapes_keep_all_boundaries():
    for element in ELEMENTS.values():
        blocks = edge_inputs(element)["boundaries"]
        parts = in_common_shape(blocks)
        assert np.array_equal(np.concatenate(parts)[: blocks.shape[0], :32], blocks)
        assert not np.concatenate(parts)[:, 32:].any()


@every_adapter
@pytest.mark.parametrize("element", ELEMENTS.values(), ids=str)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_every_bf16_number_as_an_element(adapter, element, rounding):
    """Encode scale 1 of delayed scaling leaves nothing but the element's own rounding."""
    cast = Cast(ScaledFormat("mine", element, SCALE_FP32, (None, None)), "amax", rounding, scaling=Delayed())
    supported(adapter, cast)
    found, _ = check_quantize(adapter, ALL_BF16, cast, "all bf16", scale_enc=np.float32(1), **arguments_of(cast, -1))
    if rounding == "nearest" and element.codes_per_byte == 1:
        assert first_difference("codes", found.codes, encode(ALL_BF16.astype(np.float32), element)) is None


@every_adapter
@pytest.mark.parametrize(
    "cast",
    [cast for cast in EVERY_CAST if cast.format.block[0] == 1 and cast.format.block[1] and not cast.hadamard],
    ids=cast_id,
)
def test_every_bf16_number_as_a_block_maximum(adapter, cast):
    """Blocks of one row whose largest magnitude is that of the number, 16 blocks a row; signs take turns."""
    supported(adapter, cast)
    width, numbers = cast.format.block[1], ALL_BF16[:128].reshape(2048, 16)
    if extent.is_quick() and cast != Cast(cast.format):  # casts of other rules and roundings take the numbers in turn
        numbers = numbers[EVERY_CAST.index(cast) % 4 :: 4]
    x = np.zeros((*numbers.shape, width), ml_dtypes.bfloat16)
    x[..., width // 2] = numbers
    x[1::2] = -x[1::2]
    with np.errstate(invalid="ignore"):  # NaN of either sign
        x[..., 0] = x[..., width // 2] / ml_dtypes.bfloat16(-5)
    finite = np.isfinite(x.astype(np.float32)).all(axis=-1, keepdims=True)
    x = (
        np.where(finite, x, ml_dtypes.bfloat16(0)).reshape(2 * len(x), -1)
        if cast.format.tensor_scale
        else x.reshape(2 * len(x), -1)
    )
    check_quantize(adapter, x, cast, "block maxima", **arguments_of(cast, -1))


@every_adapter
@pytest.mark.parametrize("cast", [cast for cast in EVERY_CAST if cast.is_stochastic and not cast.hadamard], ids=cast_id)
def test_streams_seeds_and_windows(adapter, cast):  # features R13
    """The random bytes belong to (seed, stream, row, column): extremes of the counter words, and long rows.

    Streams 0, 1 and 2^32 - 1 are kernels of their own; where kernels are compiled they take turns.
    """
    supported(adapter, cast)
    x = np.random.default_rng(3).standard_normal((5, 701)).astype(np.float32)
    dtype, axis, extremes = "float32", -1, [(0, 0), (2**64 - 1, 2**32 - 1), (1 << 32, 1)]
    if adapter.compiles_kinds_of_shapes:
        (dtype, axis), extremes = turns(cast)[0], [extremes[EVERY_CAST.index(cast) // 2 % 3]]
    x = in_dtype(x if axis == -1 else np.ascontiguousarray(x.T), dtype)
    for seed, stream in ((SEED, 5), *extremes):
        check_quantize(adapter, x, cast, "streams", axis=axis, seed=seed, stream=stream)


@every_adapter
def test_given_amax(adapter):
    x = np.random.default_rng(5).standard_normal((41, 51)).astype(np.float32)
    few = adapter.compiles_every_shape and extent.is_quick()  # one format of one level, and one of two
    for name in ("fp8_tensor", "nvfp4") if few else ("fp8_tensor", "fp8_tensor_e5m2", "nvfp4", "nvfp4_2d"):
        rules = {cast.scale_rule: cast for cast in EVERY_CAST if cast.format.name == name and cast.takes_amax}
        taken = [str(rule) for rule in rules]
        if adapter.compiles_every_shape:  # the default, and one that chooses by error where there is one
            taken = [str(Cast(name).scale_rule), taken[len(taken) // 2]]
        for rule in taken:
            for amax in (0.0, 0.5, 1.0, 1e-40, 1e30, np.inf):
                check_quantize(adapter, x, Cast(name, rule), "given amax", amax=np.float32(amax))
    rows = np.geomspace(1e-38, 1e30, 41, dtype=np.float32)[:, None]
    rows[3], rows[4] = 0, np.inf
    check_quantize(adapter, x, Cast("nvfp4_row"), "given amaxes", amax=rows)
    check_quantize(adapter, x, Cast("nvfp4_row", "four_over_six"), "given amaxes", amax=rows)


@every_adapter
def test_delayed_scales_and_epsilon(adapter):
    x = edge_inputs(FORMATS["fp8_tensor"].element)["NaN and Inf"]
    for name in ("fp8_tensor", "fp8_tensor_e5m2"):
        for scale_enc in (1.0, 3.7, 2.0**126, 1e-30):
            cast = Cast(name, scaling=Delayed())
            check_quantize(adapter, x, cast, "delayed", scale_enc=np.float32(scale_enc))
    few = adapter.compiles_every_shape and extent.is_quick()  # an epsilon is part of the program: they take turns
    for number, name in enumerate(("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128")):
        epsilons = (1e-12, 1.0, 100.0)
        for epsilon in epsilons[number % 3 : number % 3 + 1] if few else epsilons:
            cast = Cast(name, "amax", scaling=Current(epsilon))
            check_quantize(adapter, np.nan_to_num(x, posinf=2.0), cast, "epsilon")


# ---- random inputs


@st.composite
def arrays(draw, one_kind, few_shapes):
    """Any bits, or values of a common magnitude with a few specials among them; 1 to 3 axes.

    `one_kind`: two axes of odd sizes, which share kernels with COMMON_SHAPE; `few_shapes`: one of each number of axes,
    which share programs.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns = COMMON_SHAPE if few_shapes else (draw(st.integers(1, 40)), draw(st.integers(1, 140)))
    shape = draw(st.sampled_from([(rows, columns), (columns,), (2, rows, columns)]))
    if one_kind:
        shape = (4 * (rows // 4) + 5, 2 * (columns // 2) + 3)
    if draw(st.booleans()):
        x = rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)
    else:
        low = draw(st.integers(-149, 120))
        exponents = rng.integers(low, low + draw(st.integers(1, 60)), shape)
        with np.errstate(all="ignore"):
            x = np.ldexp(rng.standard_normal(shape), exponents).astype(np.float32)
    specials = draw(st.lists(st.sampled_from([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 448.0, 6.0]), max_size=3))
    for special in specials:
        x.flat[rng.integers(x.size)] = special
    return x


@every_adapter
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=str)
@settings(max_examples=25 if THOROUGH else 12, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_random_inputs(adapter, fmt, data):
    """Any shape, dtype and axis; where kernels are compiled, sizes of one kind, dtype and axis of the Cast's turn.

    Where every shape is compiled, one shape of each number of axes.
    """
    in_turns = adapter.compiles_kinds_of_shapes
    cast = data.draw(st.sampled_from([cast for cast in EVERY_CAST if cast.format == fmt]))
    if not adapter.supports(cast):
        return
    dtype, axis = data.draw(st.sampled_from(turns(cast) if in_turns else EVERY_TURN))
    x = in_dtype(data.draw(arrays(in_turns, adapter.compiles_every_shape)), dtype)
    axis = axis if x.ndim == 2 else -1
    words = {"seed": data.draw(st.integers(0, 2**64 - 1)), "stream": data.draw(st.integers(0, 2**32 - 1))}
    context = f"{dtype} {x.shape}"
    found, expected = check_quantize(adapter, x, cast, context, axis=axis, **words if cast.is_stochastic else {})
    check_dequantize(adapter, found, expected, f"{cast} {context}")


@every_adapter
@pytest.mark.parametrize("block", [(1, 64), (32, 32), (8, 4), (2, None), (1, 1), (64, 16), (1, 15), (None, None)])
@pytest.mark.parametrize("fmt", ["fp8_tensor", "fp8_tensor_e5m2", "mxfp8", "mxfp6_e3m2", "mxfp4", "nvfp4"])
def test_blocks_of_a_users_own(adapter, fmt, block):
    """Features Q12."""
    stock = FORMATS[fmt]
    cast = Cast(ScaledFormat("mine", stock.element, stock.scale, block, stock.tensor_scale))
    supported(adapter, cast)
    for name in ("spread", "NaN and Inf", "zero", "empty", "empty contraction", "3-D"):
        x = edge_inputs(stock.element)[name]
        if adapter.compiles_kinds_of_shapes and name == "zero":
            (x,) = in_common_shape(x)
        found, expected = check_quantize(adapter, x, cast, name)
        check_dequantize(adapter, found, expected, f"{cast} {name}")
