"""Statements of a source: where imports and functions stand. Expressions, most of its nodes, are not looked into."""

import ast
from collections.abc import Iterator

_HOLDS_STATEMENTS = ast.stmt | ast.excepthandler | ast.match_case


def statements_in(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements below a node, those of functions included."""
    nodes: list[ast.AST] = [tree]
    for node in nodes:
        found = [one for one in ast.iter_child_nodes(node) if isinstance(one, _HOLDS_STATEMENTS)]
        nodes += found
        yield from found
