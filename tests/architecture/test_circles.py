"""The files of a front end import each other without a circle, in functions and annotations too."""

import ast
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.architecture.imports import modules_under


def graph_of(sources):
    """{module: the modules among `sources` that it imports}; `sources`: {module: text}."""
    graph = {}
    for module, text in sources.items():
        names = graph[module] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(sources)
                names.update(submodules or {node.module})
        names &= set(sources)
    return graph


def circle_in(sources):
    """The modules of one circle of imports, or None."""
    try:
        TopologicalSorter(graph_of(sources)).prepare()
    except CycleError as error:
        return error.args[1]
    return None


@pytest.mark.parametrize("front_end", ["jax"])
def test_files_import_each_other_without_a_circle(repository, front_end):
    sources = {
        name: path.read_text()
        for path, name, _ in modules_under(repository / "src")
        if name.startswith(f"microfloat.{front_end}.")
    }
    assert len(sources) > 20
    assert circle_in(sources) is None


@pytest.mark.parametrize(
    "back",
    [
        "def f():\n    from package.a import x",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package import a",
        "import package.a",
    ],
)
def test_a_circle_is_found_wherever_its_import_stands(back):
    sources = {"package.a": "from package.b import y", "package.b": back, "package.c": "import package.a"}
    assert set(circle_in(sources)) == {"package.a", "package.b"}
    assert circle_in({**sources, "package.b": ""}) is None
