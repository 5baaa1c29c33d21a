"""The examples in the docstrings of the framework-free core."""

import doctest
import importlib
import pkgutil

import pytest

import microfloat.recipes
import microfloat.reference

PACKAGES = (microfloat.reference, microfloat.recipes)
MODULES = [
    f"{package.__name__}.{module.name}" for package in PACKAGES for module in pkgutil.iter_modules(package.__path__)
]


@pytest.mark.parametrize("name", ["microfloat.formats", "microfloat.metrics", "microfloat.scale_rules", *MODULES])
def test_examples_run_as_printed(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_is_an_example():
    assert doctest.testmod(importlib.import_module("microfloat.reference._quantize")).attempted > 0
