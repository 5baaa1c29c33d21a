"""Names of recipes and of formats: an error says which argument is wrong, and whose name was given for it."""

import pytest

from microfloat import reference
from microfloat.errors import InvalidTypeError, InvalidValueError
from microfloat.formats import E2M1, FORMATS, FP8_TENSOR, SCALE_E8M0, ScaledFormat, get_format
from microfloat.recipes import RECIPES, Cast, Gemm, MXFP8BlockScaling, NVFP4BlockScaling, Placement, Recipe, from_name
from microfloat.recipes.cast import as_scaled_format
from microfloat.recipes.core import NamedRecipe
from microfloat.recipes.names import as_recipe


@pytest.mark.parametrize("name", sorted(set(FORMATS) - set(RECIPES)))
def test_a_formats_name_for_a_recipe(name):
    with pytest.raises(
        InvalidValueError, match=f"^recipe: got '{name}', needed one of 'delayed', .*'{name}' is a format"
    ):
        as_recipe(name)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - set(FORMATS)))
def test_a_recipes_name_for_a_format(name):
    for call, argument in (
        (lambda: Cast(name), r"Cast\.format"),
        (lambda: Gemm("mxfp8", name), r"Gemm\.rhs"),
        (lambda: as_scaled_format(name), "format"),
        (lambda: reference.quantize([1.0], name), "cast"),
    ):
        with pytest.raises(
            InvalidValueError, match=f"^{argument}: got '{name}', needed .*'{name}' is a recipe; the form"
        ):
            call()


def test_whose_name_it_is():
    assert str(_error(lambda: as_recipe("fp8_tensor"))).endswith(
        "'fp8_tensor' is a format; the recipes that use it: 'delayed', 'fp8_current'."
    )
    assert str(_error(lambda: as_recipe("mxfp6_e2m3"))).endswith(
        "'mxfp6_e2m3' is a format that no stock recipe uses. Under one of your own it trains: with gemm = Gemm(format, "
        "format), CustomRecipe(gemm, gemm, gemm) takes it for all six operands."
    )
    for name in ("e3m1:e8m0:1x16", "int8:fp32:row"):
        assert f"'{name}' is a format that no stock recipe uses" in str(_error(lambda name=name: as_recipe(name)))
    assert "is a format" not in str(_error(lambda: as_recipe("e3m1:e9m0:1x16")))
    assert str(_error(lambda: Cast("fp8_current"))).endswith(
        "'fp8_current' is a recipe; the formats that it uses: 'fp8_tensor', 'fp8_tensor_e5m2'."
    )
    assert "the formats that it uses: 'mxfp6_e3m2'." in str(_error(lambda: Cast("mxfp6")))
    assert "the formats that it uses: 'fp8_row'." in str(_error(lambda: Cast("rowwise")))
    assert str(_error(lambda: as_recipe("mxfp9"))).endswith("Did you mean 'mxfp8'?")
    assert str(_error(lambda: as_recipe("MXFP8BlockScaling"))).endswith("MXFP8BlockScaling is the class of 'mxfp8'.")
    assert str(_error(lambda: Cast("mxfp9"))).endswith("Did you mean 'mxfp8'?")
    # What begins a name is nearer than a name of other letters ("mxfp8").
    assert str(_error(lambda: as_recipe("fp8"))).endswith("Did you mean 'fp8_current', 'fp8_row' or 'fp8_block'?")


def _error(call):
    with pytest.raises(InvalidValueError) as caught:
        call()
    return caught.value


class Mine(NamedRecipe):
    """A recipe of a user's own."""


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (MXFP8BlockScaling, r"got the class MXFP8BlockScaling, .*Call the class: MXFP8BlockScaling\(\)\."),
        (NVFP4BlockScaling, r"Call the class: NVFP4BlockScaling\(\)\."),
        (Mine, r"Call the class: Mine\(\)\."),
        (dict, "got the class dict, needed a Recipe, such as .* or its name.$"),
        (FP8_TENSOR, "got ScaledFormat, .*the recipes that use it: 'delayed', 'fp8_current'"),
        (Cast("nvfp4_2d"), "got Cast, .*the recipes that use it: 'nvfp4'"),
        (ScaledFormat("mine", E2M1, SCALE_E8M0, (1, 8)), r"'mine' is .* no stock recipe uses.*CustomRecipe\(gemm"),
        (Placement([("*", None)]), "A Placement goes to convert"),
        (None, "got NoneType"),
        (8, "got int"),
    ],
)
def test_what_is_no_recipe(value, message):
    with pytest.raises(InvalidTypeError, match=f"^recipe: .*{message}"):
        as_recipe(value)


def test_recipes_come_back():
    assert as_recipe("nvfp4") == from_name("nvfp4")
    mixed = Recipe(*[Gemm(None, None)] * 3)
    assert as_recipe(mixed) is mixed


@pytest.mark.parametrize("name", [None, 3, ["mxfp8"], b"mxfp8"])
def test_a_name_is_a_string(name):
    for call in (get_format, from_name):
        with pytest.raises(InvalidTypeError, match=r"^name: got "):
            call(name)


def test_the_torch_front_end_names_its_own_argument():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import microfloat.torch as mf

    for call, argument in (
        (lambda: mf.Linear(4, 4, recipe="mxfp9"), "recipe"),
        (lambda: mf.autocast(recipe="mxfp9"), "recipe"),
        (lambda: mf.convert(torch.nn.Linear(4, 4), "mxfp9"), "recipe"),
        (lambda: mf.explain("mxfp9"), "recipe"),
        (lambda: mf.quantized_model_init(recipe="mxfp9"), "recipe"),
        (lambda: mf.quantize(torch.ones(4), "mxfp9"), "cast"),
        (lambda: mf.QuantizedTensor.from_parts(torch.ones(1), torch.ones(1), None, "mxfp9"), "format"),
    ):
        with pytest.raises(InvalidValueError, match=f"^{argument}: got 'mxfp9'"):
            call()
