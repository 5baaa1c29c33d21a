"""Files of a folder import each other without circles, in functions and annotations too."""

import ast
import graphlib

import pytest

from tests.architecture.imports import modules_under
from tests.architecture.syntax import statements_in


def imports_between(modules):
    """Module -> the modules of a folder that it imports; a package counts where a name of its own is imported."""
    names = {name for _, name, _ in modules}
    graph = {}
    for path, name, _ in modules:
        graph[name] = set()
        for node in statements_in(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                wanted = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[name] |= (wanted & names) or ({node.module} & names)
            elif isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names} & names
        graph[name].discard(name)
    return graph


@pytest.mark.parametrize("folder", ["checkpoint", "cli"])
def test_files_import_each_other_in_one_direction(repository, folder):
    prefix = f"microfloat.{folder}"
    modules = [one for one in modules_under(repository / "src") if f"{one[1]}.".startswith(f"{prefix}.")]
    graph = imports_between(modules)
    assert sum(map(len, graph.values())) > 10
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(graph)  # CycleError names a circle


def test_a_circle_by_an_annotation_is_found(tmp_path):
    (tmp_path / "a.py").write_text("from microfloat.x.b import B")
    (tmp_path / "b.py").write_text("def f():\n    from microfloat.x import a")
    modules = [(tmp_path / f"{name}.py", f"microfloat.x.{name}", False) for name in "ab"]
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(imports_between(modules)).prepare()
