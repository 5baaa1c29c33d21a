"""A weight that was gathered as codes, in the forms that the GEMMs of a GPU read, against the kernels that cast it."""

import pytest
import torch

from tests.interpreter import interpreting

pytest.importorskip("triton", reason="triton is not installed")


class Whole:
    """The source of a gather that has the whole weight here."""

    def __init__(self, weight):
        self.weight = weight

    def operand(self, gather, transposed):
        from microfloat.torch import backends

        casts = [None, gather.casts[1]] if transposed else [gather.casts[0], None]
        return backends.choose("reference", self.weight.device).quantize_both(self.weight, *casts)[transposed]

    def values(self):
        raise AssertionError("the gathered codes serve every operand")


def _both(case):
    """Forms, and operands of fprop and dgrad: from gathered codes, and as kernels cast them."""
    from microfloat import recipes
    from microfloat.passes import CastInputs
    from microfloat.routes import entries_of, routes_of
    from microfloat.torch import backends
    from microfloat.torch.linear.gathered_weight import Gather, Gathered
    from microfloat.torch.linear.quantized_weight import GatheredCast
    from microfloat.torch.linear.schedule import CastStep

    name, options, shape = case
    torch.manual_seed(0)
    weight = torch.randn(shape, device="cpu") * torch.exp2(torch.randint(-6, 6, (shape[0], 1), device="cpu"))
    weight = weight.bfloat16()
    recipe = getattr(recipes, name)(**options)
    with backends.pretend(chip="h200"):
        backend = backends.choose("native", weight.device)
        entries = entries_of(recipe, routes_of(recipe, backend.chip_of(weight.device)), "w", True, True)
        gather = Gather((recipe.fprop.rhs, recipe.dgrad.rhs), weight.dtype, Whole(weight))
        gathered = Gathered(gather, weight.shape, weight.device)
        words = backend.programs.scratch(-1)
        made = GatheredCast(backend, weight.shape, entries, weight.dtype, CastStep)(gathered, 0, words, CastInputs())
        wanted = CastStep(backend, weight, entries)(weight, 0, words, CastInputs())
    return [entry and entry.form for entry in entries], made.flat(), wanted.flat()


both = interpreting(_both)


@pytest.mark.slow_cases("further shapes of gathered codes", all_but=("*-oblong",))
@pytest.mark.xdist_group("triton-interpreter")
@pytest.mark.parametrize("shape", [(256, 256), (128, 384)], ids=["square", "oblong"])
@pytest.mark.parametrize(
    ("name", "options", "forms"),
    [
        ("MXFP8BlockScaling", {}, {"folded", "tiles"}),
        ("MXFP8BlockScaling", {"path": "folded"}, {"folded", "tiles"}),
        ("Float8BlockScaling", {}, {"codes"}),
    ],
)
def test_gathered_codes_lie_as_kernels_cast_them(name, options, forms, shape):
    found, made, wanted = both((name, options, shape))
    assert set(found) <= forms
    for a, b in zip(made, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
            assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (a, b)))
