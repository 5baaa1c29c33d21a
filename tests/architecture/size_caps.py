"""Size caps of modules, functions and signatures; `overgrown` lists what is above them."""

import ast
from dataclasses import dataclass
from pathlib import Path

from tests.architecture.syntax import statements_in


@dataclass(frozen=True)
class Caps:
    module_lines: int
    function_lines: int
    parameters: int


CAPS = Caps(module_lines=600, function_lines=80, parameters=10)
KERNEL_CAPS = Caps(module_lines=700, function_lines=120, parameters=24)


def count_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)


def _overgrown_module(name: str, source: str) -> list[str]:
    caps = KERNEL_CAPS if "/kernels/" in f"/{name}" else CAPS
    lines = source.count("\n")
    rows = [f"{name}: {lines} lines, cap {caps.module_lines}"] if lines > caps.module_lines else []
    for node in statements_in(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        where = f"{name}:{node.lineno} {node.name}"
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > caps.function_lines:
            rows.append(f"{where}: {length} lines, cap {caps.function_lines}")
        if count_parameters(node) > caps.parameters:
            rows.append(f"{where}: {count_parameters(node)} parameters, cap {caps.parameters}")
    return rows


def overgrown(source_root: Path) -> list[str]:
    """One line per module, function or signature under `source_root` that is larger than its cap."""
    rows = []
    for path in sorted(source_root.rglob("*.py")):
        rows += _overgrown_module(path.relative_to(source_root).as_posix(), path.read_text())
    return rows
