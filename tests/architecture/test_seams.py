"""How many test files reach into modules of the library: such a test breaks when code moves that still does its work.

What counts is the import of a name or of a module with a leading underscore, and a name with one that is read from, or
patched into, something that was imported from the library. Tests of private modules by their own kind
(`tests/checkpoint` reads `microfloat.checkpoint._arrays`) count as all others do.
"""

import ast
import re

# The seams are `backends.pretend`, `layer.schedule(x)` and public functions; a smaller number may replace this one.
MOST_FILES = 15
_OF_NAMED_TUPLES = ("_replace", "_asdict", "_fields", "_make")


# Where a private name of the library may stand, for sources that need no parser: after a dot, first in a string, before
# the value of an argument, alone in a line of an import, and in a line that imports.
_MAY_NAME = re.compile(
    r"""\._[A-Za-z]|["']_[A-Za-z]|\b_[A-Za-z]\w*\s*=[^=]|^\s+_[A-Za-z]\w*(?: as \w+)?,?$|\bimport\b.*\b_[A-Za-z]""",
    re.MULTILINE,
)


def _is_private(name):
    return name.startswith("_") and not name.startswith("__") and name not in _OF_NAMED_TUPLES


def internals_of(source):
    """The private names of the library that a test names, in order."""
    if "microfloat" not in source or not _MAY_NAME.search(source):
        return []
    nodes, imported, found = list(ast.walk(ast.parse(source))), set(), []
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "microfloat":
            imported |= {alias.asname or alias.name for alias in node.names}
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            found += [part for part in parts if _is_private(part)]
        elif isinstance(node, ast.Import):
            own = [alias for alias in node.names if alias.name.split(".")[0] == "microfloat"]
            imported |= {alias.asname or "microfloat" for alias in own}
            found += [part for alias in own for part in alias.name.split(".") if _is_private(part)]

    def is_of_library(node):
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in imported

    for node in nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and is_of_library(node.value):
            found.append(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) > 1 and is_of_library(node.args[0]):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and _is_private(name.value):
                found.append(name.value)
            found += [word.arg for word in node.keywords if word.arg and _is_private(word.arg)]
    return found


def test_few_tests_reach_into_modules_of_the_library(repository):
    files = {path: internals_of(path.read_text()) for path in (repository / "tests").rglob("*.py")}
    reaching = {path.relative_to(repository).as_posix(): names for path, names in sorted(files.items()) if names}
    listed = "\n".join(f"{path}: {', '.join(dict.fromkeys(names))}" for path, names in reaching.items())
    print(listed)
    assert 0 < len(reaching) <= MOST_FILES, f"{len(reaching)} test files, at most {MOST_FILES} did:\n{listed}"
