"""Reads from the syntax tree what a module of the library imports, and says which imports the layering forbids."""

import ast
import graphlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.architecture.syntax import statements_in

# A layer imports itself and what stands below it (further up in this list). Two names in one row do not see each other.
LAYERS = (
    ("_version",),
    ("errors",),
    ("_environment", "arguments", "chips", "support"),
    ("formats", "operands"),
    ("scale_rules",),
    ("recipes",),
    ("layout",),
    ("metrics", "reference"),
    ("pictures",),
    ("watching",),
    ("kernels", "checkpoint", "routes"),
    ("passes",),
    ("torch", "jax"),
    ("cli", "integrations"),
    ("__main__",),
)
# The root package re-exports the framework-free core and nothing above it.
ROOT_IMPORTS_BELOW = "torch"

NUMERIC = frozenset({"numpy", "ml_dtypes"})
# What a layer may import from outside the standard library, where it is not just NUMERIC.
THIRD_PARTY = {
    "kernels": frozenset({"triton"}),
    "pictures": NUMERIC | {"matplotlib"},
    "checkpoint": NUMERIC | {"safetensors"},
    "torch": NUMERIC | {"torch", "triton"},
    "jax": NUMERIC | {"jax", "jaxlib", "flax", "optax", "triton"},
    "integrations": NUMERIC | {"torch", "torchtitan", "transformers", "vllm"},
    "cli": NUMERIC | {"typer", "rich", "matplotlib", "safetensors", "huggingface_hub", "torch", "transformers"},
}


def rank(layer: str) -> int | None:
    """Height of a layer, or None for a module that has no place in LAYERS."""
    return next((height for height, names in enumerate(LAYERS) if layer in names), None)


def layer_of(module: str) -> str:
    """`microfloat.recipes.nvfp4` -> `recipes`; `microfloat` itself -> ``."""
    return module.split(".")[1] if "." in module else ""


def _absolute(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    if node.level == 0:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + (1 if is_package else 0)]
    return ".".join([*base, node.module] if node.module else base)


def imported_modules(source: str, module: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of every import in `source`, also those inside functions.

    ``from microfloat import formats`` yields ``microfloat.formats``; a constant given to ``import_module`` counts.
    """
    tree, calls = ast.parse(source), "import_module" in source or "__import__" in source
    for node in ast.walk(tree) if calls else statements_in(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, module, is_package)
            if base == "microfloat":
                yield from ((node.lineno, f"microfloat.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, base
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _why_forbidden(imported: str, layer: str) -> str | None:
    top = imported.split(".")[0]
    if top in sys.stdlib_module_names:
        return None
    if top != "microfloat":
        allowed = THIRD_PARTY.get(layer, NUMERIC)
        return None if top in allowed else f"{layer or 'the root package'} may import {sorted(allowed)} only"
    target = layer_of(imported)
    height = rank(target)
    if height is None:
        return "no layer of that name; inside the package import from the submodule, never from the root"
    if layer == "":
        ceiling = rank(ROOT_IMPORTS_BELOW)
        return None if height < ceiling else "the root package re-exports the framework-free core only"
    if target == layer or height < rank(layer):
        return None
    return f"{layer} stands below or beside {target}"


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """One line per import of `source` (the text of `module`) that the layering forbids."""
    layer = layer_of(module)
    if layer and rank(layer) is None:
        return [f"{module}: has no place in LAYERS of tests/architecture/imports.py; give it one"]
    rows = []
    for line, imported in imported_modules(source, module, is_package=is_package):
        reason = _why_forbidden(imported, layer)
        if reason:
            rows.append(f"{module}:{line} imports {imported}: {reason}")
    return rows


def modules_under(source_root: Path) -> Iterator[tuple[Path, str, bool]]:
    """Yield (path, module name, whether it is a package) of every module under `source_root`."""
    for path in sorted(source_root.rglob("*.py")):
        parts = path.relative_to(source_root).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        yield path, ".".join(parts[:-1] if is_package else parts), is_package


def file_graph(source_root: Path, is_wanted: Callable[[str], bool]) -> dict[str, set[str]]:
    """Module -> the wanted modules that it imports anywhere: at the top, in functions, for type checkers only."""
    known = {name: (path, is_package) for path, name, is_package in modules_under(source_root) if is_wanted(name)}
    graph: dict[str, set[str]] = {}
    for name, (path, is_package) in known.items():
        found = set()
        for node in statements_in(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = _absolute(node, name, is_package)
                of_names = {f"{base}.{alias.name}" for alias in node.names}
                # A package is imported for its own names, and not where only its modules are.
                found |= of_names if of_names <= known.keys() else {base, *of_names}
        graph[name] = (found & known.keys()) - {name}
    return graph


def circle_of(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one circle of imports, in turn; none where the graph has no circle."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []
