"""Every Cast: pinned digests, and random bits of every exponent, against the oracle; one compilation each.

Integer arithmetic does not depend on how hard XLA tries, which a second test of the same Casts shows.
`make test` takes all pairs of what a Cast is, `make test-all` every format with every rule and a sample of them with
stochastic rounding and the Hadamard transform; HYPOTHESIS_PROFILE=thorough takes every combination.
"""

import os
import zlib

import numpy as np
import pytest

import microfloat.jax as mj
from microfloat.recipes import Cast
from tests import digests, extent
from tests.contract.cases import EDEN, EVERY_CAST, cast_id
from tests.jax.compare import assert_oracle, to_numpy

SHAPE = digests.SHAPE
# What one compilation serves: the float32 sets as they are. Views, other axes and given amaxes are the rest.
PINS = [pin for pin in digests.APPENDIX_A + digests.APPENDIX_C if pin.set != "Abf16"]
PLAIN_PINS = [pin for pin in PINS if (pin.axis, pin.view, pin.amax) == (-1, "", None)]
OTHER_PINS = [pin for pin in PINS if pin not in PLAIN_PINS]
PINNED = {pin.cast for pin in PLAIN_PINS}


def is_taken(cast):
    """True if `make test-all` takes the Cast: of combinations of tested parts, a twelfth."""
    plain = not cast.is_stochastic and cast.hadamard is None
    return plain or cast in PINNED or zlib.crc32(cast_id(cast).encode()) % 12 == 0


def pairs(cast):
    """What meets in a Cast: its element or blocks with its rule, and each of them with rounding and transform."""
    element, block, rule, is_turned = cast.format.element, cast.format.block, str(cast.scale_rule), bool(cast.hadamard)
    rounding = {(one, cast.is_stochastic) for one in (element, block, rule, is_turned)}
    return {cast.format, (element, rule), *rounding, *((one, "turned", is_turned) for one in (element, block, rule))}


def cover(casts):
    """Few of these casts that have all pairs of them; the default ones of every format come first."""
    taken = [Cast(fmt) for fmt in dict.fromkeys(cast.format for cast in casts)]
    left = set().union(*map(pairs, casts)).difference(*map(pairs, taken))
    while left:
        taken.append(max(casts, key=lambda cast: len(pairs(cast) & left)))
        left -= pairs(taken[-1])
    return taken


EVERY = list(dict.fromkeys([*EVERY_CAST, *(pin.cast for pin in PLAIN_PINS)]))
CASTS, COVER = EVERY, cover(EVERY_CAST)
if extent.is_quick():
    CASTS = COVER
elif os.environ.get("HYPOTHESIS_PROFILE") != "thorough":
    CASTS = [cast for cast in EVERY if is_taken(cast) or cast in COVER]


def with_exponents(rng, exponents):
    """float32 of random sign and mantissa with these exponent fields."""
    exponents = np.clip(exponents, 0, 254).astype(np.uint32)
    sign = rng.integers(0, 2, exponents.shape, dtype=np.uint32) << 31
    return (rng.integers(0, 1 << 23, exponents.shape, dtype=np.uint32) | exponents << 23 | sign).view(np.float32)


def random_inputs(rng, lowest):
    """Named arrays: any bits at all; every exponent; a few binades; rows of their own; near ties; subnormal numbers.

    `lowest`: the smallest exponent field of the last four.
    """
    few = rng.integers(1, 12)
    start = int(rng.integers(lowest, 235))
    ties = with_exponents(rng, rng.integers(start, start + 6, SHAPE)).view(np.uint32) & np.uint32(0xFFF80000)
    ties += rng.integers(-1, 2, SHAPE).astype(np.uint32)
    inputs = {
        "any bits": rng.integers(0, 1 << 32, SHAPE, dtype=np.uint32).view(np.float32),
        "every exponent": with_exponents(rng, rng.integers(0, 255, SHAPE)),
        "a few binades": with_exponents(rng, rng.integers(start, start + few, SHAPE)),
        "rows": with_exponents(rng, rng.integers(lowest, 250, (SHAPE[0], 1)) + rng.integers(0, 5, SHAPE)),
        "near ties": ties.view(np.float32),
        "subnormal": with_exponents(rng, rng.integers(lowest, lowest + 2, SHAPE)),
    }
    spoilt = inputs["a few binades"].copy()
    spoilt[rng.integers(64), rng.integers(256)] = rng.choice(np.float32([np.nan, np.inf, -np.inf, -0.0]))
    return {**inputs, "one special value": spoilt}


@pytest.mark.parametrize("cast", CASTS, ids=cast_id)
def test_every_cast(cast):
    check(cast)


# One of each kind of scale that differs most: of a tensor, of blocks as powers of two, and of two levels.
EVERY_RUN = [Cast(name) for name in ("fp8_tensor", "mxfp8", "nvfp4")]


def with_all_passes(cast):
    """A Cast as a parameter: one of each kind is compiled with all passes in every run."""
    left = pytest.mark.slow("further casts compiled with all of XLA's passes")
    return pytest.param(cast, marks=[] if cast in EVERY_RUN else left)


@pytest.mark.as_users_compile
@pytest.mark.parametrize("cast", [with_all_passes(cast) for cast in CASTS], ids=cast_id)
def test_as_users_compile(cast):
    """Again with all of XLA's passes, which must not change a bit."""
    check(cast)


def check(cast):
    stream = 3
    for pin in PLAIN_PINS:
        if pin.cast == cast:
            q = mj.quantize(pin.x, cast, **pin.arguments)
            assert pin.digest(to_numpy(q.scale), to_numpy(q.codes)) == pin.expected, pin.id
            stream = pin.stream  # a number that is part of the program
    rng = np.random.default_rng(zlib.crc32(cast_id(cast).encode()))
    # Squares of errors below 2^-63 are flushed where subnormal numbers are (docs/numerics.md 2.6).
    lowest = 90 if "mse" in str(cast.scale_rule) else 0
    for name, x in random_inputs(rng, lowest).items():
        given = {"seed": int(rng.integers(0, 1 << 64, dtype=np.uint64)), "stream": stream} if cast.is_stochastic else {}
        assert_oracle(mj.quantize(x, cast, **given), x, cast, context=name, **given)


@pytest.mark.parametrize("cast", [EDEN[0], pytest.param(EDEN[2], marks=pytest.mark.slow("a second rule"))], ids=cast_id)
def test_corrected_scales(cast):
    """rounding="eden": sums over groups of 64 in their order, which nothing may contract."""
    check(cast)


@pytest.mark.parametrize("pin", OTHER_PINS, ids=lambda pin: pin.id)
def test_pinned_digests(pin):
    q = mj.quantize(pin.x, pin.cast, **pin.arguments)
    assert pin.digest(to_numpy(q.scale), to_numpy(q.codes)) == pin.expected


def test_what_is_taken_reaches_everything():
    assert len(PINS) > 200
    assert set().union(*map(pairs, CASTS)) >= set().union(*map(pairs, EVERY_CAST))
    if extent.is_quick():
        return
    assert set(CASTS) >= PINNED
    for what in (
        lambda cast: (cast.format, cast.scale_rule),
        lambda cast: (cast.format.element, cast.is_stochastic),
        lambda cast: (cast.format.block, cast.hadamard is None),
    ):
        assert {what(cast) for cast in CASTS} >= {what(cast) for cast in EVERY_CAST}
