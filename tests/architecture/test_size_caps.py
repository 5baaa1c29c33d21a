"""The report of size caps sees what it claims to see. What is over a cap is printed after a run, not failed."""

import ast

from tests.architecture.size_caps import CAPS, KERNEL_CAPS, count_parameters, overgrown
from tests.architecture.syntax import statements_in


def _write(folder, name, source):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def _function(lines):
    return "def grow():\n" + "    pass\n" * (lines - 1)


def test_a_module_at_its_caps_is_not_reported(tmp_path):
    _write(tmp_path, "fine.py", _function(CAPS.function_lines) + "x = 1\n" * (CAPS.module_lines - CAPS.function_lines))
    assert overgrown(tmp_path) == []


def test_long_modules_long_functions_and_wide_signatures_are_reported(tmp_path):
    _write(tmp_path, "module.py", "x = 1\n" * (CAPS.module_lines + 1))
    _write(tmp_path, "function.py", _function(CAPS.function_lines + 1))
    parameters = ", ".join(f"p{i}" for i in range(CAPS.parameters))
    _write(tmp_path, "signature.py", f"async def wide({parameters}, *, one_more): ...\n")
    rows = overgrown(tmp_path)
    assert [row.split(":")[0] for row in rows] == ["function.py", "module.py", "signature.py"]
    assert f"{CAPS.function_lines + 1} lines" in rows[0]
    assert f"{CAPS.module_lines + 1} lines" in rows[1]
    assert "11 parameters" in rows[2]


def test_kernels_have_caps_of_their_own(tmp_path):
    _write(tmp_path, "package/kernels/cast.py", _function(KERNEL_CAPS.function_lines))
    assert overgrown(tmp_path) == []
    _write(tmp_path, "package/kernels/cast.py", _function(KERNEL_CAPS.function_lines + 1))
    assert len(overgrown(tmp_path)) == 1


def test_what_outgrew_a_cap_is_named_after_the_run_and_no_module_by_much(repository, record_property):
    rows = overgrown(repository / "src")
    for row in rows:
        record_property("size cap", row)
    modules = [row for row in rows if row.split(": ")[0].endswith(".py")]
    assert all(int(row.split()[1]) <= 1.05 * int(row.split()[-1]) for row in modules), modules


# Of a constructor of a module, besides `self`; what is more goes into `LayerOptions`.
MOST_OF_A_CONSTRUCTOR = 16


def test_constructors_of_modules_are_not_wide(repository):
    made = {}
    for path in (repository / "src" / "microfloat" / "torch" / "nn").rglob("*.py"):
        for node in statements_in(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                made[f"{path.name}:{node.lineno}"] = count_parameters(node) - 1
    assert len(made) > 8
    assert {where: count for where, count in made.items() if count > MOST_OF_A_CONSTRUCTOR} == {}


# `Any` stands where torch, transformers or Triton have no type of their own. A smaller number may replace this one.
MOST_ANY = 104


def test_any_stays_at_the_untyped_edges_of_torch(repository):
    modules = (repository / "src" / "microfloat" / "torch").rglob("*.py")
    sources = [text for path in modules if "Any" in (text := path.read_text())]
    nodes = [node for text in sources for node in ast.walk(ast.parse(text))]
    count = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    assert 0 < count <= MOST_ANY, f"{count} annotations are Any, at most {MOST_ANY} were: name the type"
