"""Weights that FSDP2 gathers as codes, in the forms that GEMMs of a Hopper read."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

_FURTHER = pytest.mark.slow("every form of every family, interpreted")
pytestmark = pytest.mark.xdist_group("triton-interpreter")


@pytest.mark.parametrize(
    "name",
    [
        "fp8_block",
        *(pytest.param(name, marks=_FURTHER) for name in ("fp8_current", "mxfp8", "mxfp6", "mxfp4", "nvfp4")),
    ],
)
def test_gathered_codes_become_the_bytes_of_a_cast_in_that_form(interpreted, name) -> None:
    """Folded to FP8 with larger blocks, decoded to bfloat16, or as they are."""
    interpreted(("forms_of_gathered_weights", ([name],), {}))
