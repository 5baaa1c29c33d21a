"""docs/recipes.md agrees with the library: its recipes, aliases, toggles, and the table that it shows printed."""

import re

import pytest

from microfloat import recipes
from tests.docs.code_blocks import code_blocks


@pytest.fixture
def page(repository):
    return repository / "docs" / "recipes.md"


def test_the_table_names_every_recipe(page):
    """Features R25."""
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", page.read_text(), re.MULTILINE)
    assert dict(rows) == {name: type(make()).__name__ for name, make in recipes.RECIPES.items()}


def test_the_names_of_other_libraries_resolve_as_the_page_says(page):
    pairs = re.findall(r"`(\w+)` is `([^`]+)`", " ".join(page.read_text().split()))
    assert {alias for alias, _ in pairs} == set(recipes.names.ALIASES)
    for alias, meaning in pairs:
        meant = eval(meaning, vars(recipes)) if "(" in meaning else recipes.from_name(meaning)
        assert recipes.from_name(alias) == meant, alias


def test_the_printed_recipe_is_what_is_printed(page, monkeypatch):
    for variable in ("RHT", "STOCHASTIC_ROUNDING", "2D_QUANTIZATION"):
        monkeypatch.delenv(f"MICROFLOAT_NVFP4_DISABLE_{variable}", raising=False)
    (block,) = code_blocks(page, "text")
    assert block.source.rstrip("\n") == str(recipes.NVFP4BlockScaling())


def test_the_toggles_are_those_that_are_read(page, repository):
    toggles = set(re.findall(r"MICROFLOAT_\w+", page.read_text()))
    source = (repository / "src/microfloat/recipes/nvfp4.py").read_text().split("@dataclass", 1)[0]
    assert toggles == set(re.findall(r"MICROFLOAT_\w+", source))
