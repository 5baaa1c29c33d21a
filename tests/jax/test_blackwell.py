"""Blackwell's block-scaled dots, as far as a machine without one can tell: what is lowered, and what `explain` says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import microfloat.jax as mj
from microfloat.errors import NotSupportedError
from microfloat.jax.backends import gemms
from microfloat.recipes import MXFP6BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling

PLAIN = (((1,), (1,)), ((), ()))


@pytest.fixture
def blackwell(monkeypatch):
    """JAX says that there is a chip of compute capability 10.0; nothing is run on it."""
    monkeypatch.setattr(gemms, "capability", lambda: (10, 0))


def lowered(recipe, sizes, backend="native", **given):
    """StableHLO for CUDA of all three GEMMs of x [M, K] and w [N, K]."""
    rows, inner, outputs = sizes
    op = mj.dot_general(recipe, backend=backend)

    def run(x, w, dy):
        y, back = jax.vjp(lambda x, w: op(x, w, PLAIN, **given), x, w)
        return y, *back(dy)

    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, inner), (outputs, inner), (rows, outputs))]
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow_cases("further JAX programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize(
    ("recipe", "element", "scale", "given"),
    [
        (MXFP8BlockScaling(), "f8E4M3FN", "f8E8M0FNU", {}),
        (MXFP8BlockScaling(fp8_format="HYBRID"), "f8E5M2", "f8E8M0FNU", {}),
        (NVFP4BlockScaling(), "f4E2M1FN", "f8E4M3FN", {"seed": np.array([1, 2], np.uint32)}),
    ],
    ids=["mxfp8", "mxfp8_hybrid", "nvfp4"],
)
def test_three_block_scaled_dots(recipe, element, scale, given):
    """Each GEMM is one call with codes of the element, scales of the block, float32 out; contractions whole blocks."""
    sizes = (300, 136, 72)  # different after padding, so that no two calls share a function
    text = lowered(recipe, sizes, **given)
    calls = re.findall(r"custom_call @\S*(?:scaled_dot|scaled_matmul)\S*\(.*?\) .*?: \((.*?)\) -> (\S+)", text)
    assert len(calls) == 3, "fprop, dgrad, wgrad"
    for operands, result in calls:
        kinds = re.findall(r"tensor<([0-9x]+)x(\w+)>", operands)
        assert [kind for _, kind in kinds].count(scale) >= 2
        assert "f32" in result
        data, scales = kinds[0][0].split("x"), kinds[2][0].split("x")
        assert int(data[-1]) == int(scales[-1]) * (16 if element == "f4E2M1FN" else 32)
    assert any(element in operands for operands, _ in calls)


@pytest.mark.usefixtures("blackwell")
def test_explain_says_that_it_was_never_run():
    for name in ("mxfp8", "nvfp4"):
        table = mj.explain(name, "cuda")
        assert table.accelerated
        assert all("not yet run on the hardware" in row.support.reason for row in table.rows)
        assert {row.kernel for row in table.rows} == {"jax.nn.scaled_matmul"}
    emulated = mj.explain("mxfp6", "cuda")
    assert not emulated.accelerated
    assert "no block-scaled GEMM for mxfp6" in emulated.rows[0].support.reason


@pytest.mark.usefixtures("blackwell")
def test_strict_mode_gives_the_reason():
    reason = mj.explain("mxfp6", "cuda").rows[0].support.reason.removeprefix("emulated: ")
    with pytest.raises(NotSupportedError) as caught:
        lowered(MXFP6BlockScaling(), (40, 64, 56))
    assert reason in str(caught.value)
