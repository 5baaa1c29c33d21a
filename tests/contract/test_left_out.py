"""The cases that an adapter does not take: the exact set, so that none is left out by mistake."""

import pytest

from microfloat.formats import E2M1, FORMATS, SCALE_E4M3, ScaledFormat
from microfloat.recipes import Cast, Hadamard
from tests import golden_cases
from tests.contract import conftest
from tests.contract.adapters import ADAPTERS, THOROUGH
from tests.contract.cases import DTYPES, EVERY_CAST
from tests.contract.test_pinned import ONE_TENSOR, PINS

# What JAX takes of the casts of the contract, by dtype; tests/jax/test_every_cast.py takes all of them.
JAX = {
    ("fp8_tensor", "nearest", None): {"float32"},
    ("mxfp8", "nearest", None): {"float32", "bfloat16"},
    ("nvfp4", "stochastic", Hadamard()): {"float16"},
}
EVERY_KIND = [
    *EVERY_CAST, *(pin.cast for pin in PINS.values()), *(golden_cases.cast_of(case) for case in ONE_TENSOR),
]  # fmt: skip
of_every_adapter = pytest.mark.parametrize("each", ADAPTERS, ids=lambda each: each.name)


def _taken_by_jax(cast: Cast, dtype: str) -> bool:
    key = cast.format.name, cast.rounding, cast.hadamard
    is_usual = cast == Cast(cast.format, rounding=cast.rounding, hadamard=cast.hadamard)
    return is_usual and dtype in JAX.get(key, ())


@of_every_adapter
def test_every_adapter_but_jax_takes_every_case_of_the_librarys_formats(each) -> None:
    left = {(cast, dtype) for cast in EVERY_KIND for dtype in DTYPES if not each.supports(cast, dtype)}
    expected = set()
    if each.name == "jax" and not THOROUGH:
        expected = {(cast, dtype) for cast in EVERY_KIND for dtype in DTYPES if not _taken_by_jax(cast, dtype)}
    assert left == expected


def test_only_the_kernels_of_triton_lack_formats_of_a_users_own() -> None:
    """A block that no kernel knows; the native backend falls back on torch operations, and says so."""
    cast = Cast(ScaledFormat("mine", E2M1, SCALE_E4M3, (1, 32), "tensor"))
    assert cast.format not in FORMATS.values()
    takes = {each.name for each in ADAPTERS if each.supports(cast)}
    assert takes >= {"numpy", "torch-reference-cpu", "torch-reference-cuda", "torch-native-cuda"}
    assert {each.name for each in ADAPTERS} - takes == {"torch-triton-cuda"} | ({"jax"} if not THOROUGH else set())


class _Item:
    """A collected test, as the hook of conftest.py sees it."""

    def __init__(self, marker: object = None, **params: object) -> None:
        self.callspec = type("callspec", (), {"params": params})
        self.get_closest_marker = {"left_to_others": marker}.get


@of_every_adapter
def test_collection_leaves_out_what_the_adapter_does_not_take_and_nothing_else(each) -> None:
    for cast in EVERY_CAST:
        for dtype in DTYPES:
            reason = conftest.why_not(_Item(adapter=each, cast=cast, dtype=dtype))
            assert reason == (None if each.supports(cast, dtype) else f"tests/contract: {each.name} {each.left_out}")
    for pin in PINS.values():
        assert (conftest.why_not(_Item(adapter=each, pin=pin)) is None) == each.supports(pin.cast)
    for other in ({}, {"adapter": each}, {"cast": EVERY_CAST[0]}, {"adapter": each, "fmt": "mxfp8"}):
        assert conftest.why_not(_Item(**other)) is None


def test_cases_are_left_to_others_by_a_condition() -> None:
    mark = pytest.mark.left_to_others(
        "takes even numbers", lambda adapter, number: adapter.compiles_every_shape and number % 2
    )
    numpy, jax = ADAPTERS[0], ADAPTERS[-1]
    assert conftest.why_not(_Item(mark.mark, adapter=numpy, number=1)) is None
    assert conftest.why_not(_Item(mark.mark, adapter=jax, number=2)) is None
    if not THOROUGH:
        assert conftest.why_not(_Item(mark.mark, adapter=jax, number=1)) == "tests/contract: jax takes even numbers"
