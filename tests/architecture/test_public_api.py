"""The public names and signatures are those of the committed snapshot; a change of them is a change of that file."""

import difflib
import importlib
import types

import pytest

from tests.architecture.public_api import COMMAND, MODULES, SNAPSHOT, describe, generate, is_absent, parse


def _import_or_skip(name, is_expected):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if is_absent(error, name) and not is_expected:
            pytest.skip(f"{name} does not exist")
        if missing.startswith("microfloat"):
            raise
        pytest.skip(f"{name} needs {missing}, which is not installed")


@pytest.mark.parametrize("name", MODULES)
def test_public_api_is_that_of_the_snapshot(name):
    expected = parse(SNAPSHOT.read_text()).get(name)
    module = _import_or_skip(name, expected is not None)
    assert hasattr(module, "__all__"), f"{name} has no __all__"
    diff = list(difflib.unified_diff(expected or [], describe(module), SNAPSHOT.name, name, lineterm="", n=0))
    assert not diff, f"public API of {name} changed; if that is meant, run `{COMMAND}`\n" + "\n".join(diff)


def test_every_name_of_the_snapshot_is_looked_at():
    assert set(parse(SNAPSHOT.read_text())) <= set(MODULES)


def _module_of(source):
    module = types.ModuleType("microfloat_example")
    module.__dict__["__name__"] = "microfloat.example"
    exec(source, module.__dict__)
    return module


def test_signatures_show_kinds_and_defaults():
    module = _module_of(
        "import dataclasses\n"
        "__all__ = ['f', 'g', 'C', 'D', 'E', 'VALUE']\n"
        "VALUE = 1.5\n"
        "sentinel = object()\n"
        "def f(a, /, b, c=1, *, d: int = None, **e): ...\n"
        "def g(*a, b=sentinel, c=int): ...\n"
        "class C:\n"
        "    def __init__(self, width): ...\n"
        "    def area(self, scale=2): ...\n"
        "    @property\n"
        "    def name(self): ...\n"
        "    @classmethod\n"
        "    def make(cls): ...\n"
        "    def _private(self): ...\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class D:\n"
        "    width: int\n"
        "    height: int = 2\n"
        "class E(ValueError): ...\n"
    )
    rows = describe(module)
    assert "f(a, /, b, c=1, *, d=None, **e)" in rows
    assert "g(*a, b=object, c=int)" in rows
    assert "class C(width)" in rows
    assert "class D(width, height=2)" in rows
    assert "class E" in rows
    assert "VALUE: float" in rows
    members = [row.strip() for row in rows if row.startswith("    ")]
    assert {"C.area(self, scale=2)", "C.make(cls)", "C.name", "D.width", "D.height"} <= set(members)
    assert not any("_private" in row for row in rows)


def test_a_renamed_parameter_changes_the_description():
    before = describe(_module_of("__all__ = ['f']\ndef f(x, axis=-1): ...\n"))
    after = describe(_module_of("__all__ = ['f']\ndef f(x, dim=-1): ...\n"))
    assert before != after


def test_the_snapshot_reads_back():
    text = generate({})
    sections = parse(text)
    assert list(sections) == [name for name in MODULES if name in sections]
    assert sections["microfloat"]
