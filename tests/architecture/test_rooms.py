"""The rooms of `microfloat.torch`: a room imports itself and those below it, in functions and annotations too."""

import ast
from collections import Counter

# Further up in this list is further down in the house. Two names in one row do not see each other.
ROOMS = (
    ("_typing", "_upper"), ("backends",), ("reference",), ("tensor",), ("launch",), ("scaling",), ("context",),
    ("autocast",), ("linear",), ("compile",), ("nn",), ("convert",), ("inference", "watch"), ("distributed",),
    ("attention", "fused", "timing"),
)  # fmt: skip
# Annotations that still name a class above their room: of layers, of runs and of gathers. No code imports them when it
# runs. A line that goes is taken out here, and none may come.
ANNOTATIONS = {
    "_typing -> distributed": 2, "_typing -> linear": 3, "compile -> nn": 1, "linear -> distributed": 2,
    "linear -> nn": 5,
}  # fmt: skip
MOST_FILES, MOST_LINES = 16, 57_000


def imports_of(tree):
    """(module, name, whether only a type checker reads it) of the imports from `microfloat.torch` in a module."""
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            child.parent = node
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("microfloat.torch"):
            inside = node
            while inside is not tree and not (isinstance(inside, ast.If) and "TYPE_CHECKING" in ast.dump(inside.test)):
                inside = inside.parent
            for name in node.names:
                yield node.module, name.name, inside is not tree


def test_no_room_imports_one_above_it(repository):
    torch = repository / "src" / "microfloat" / "torch"
    height = {name: number for number, names in enumerate(ROOMS) for name in names}
    at_run_time, annotations = [], Counter()
    for path in sorted(torch.rglob("*.py")):
        own = path.relative_to(torch).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in height, f"{own} has no place in ROOMS"
        for module, name, is_annotation in imports_of(ast.parse(path.read_text())):
            parts = [*module.split(".")[2:], name]
            other = parts[0]
            if other not in height or other == own or height[other] < height[own]:
                continue
            if is_annotation:
                annotations[f"{own} -> {other}"] += 1
            else:
                at_run_time.append(f"{path.relative_to(torch)}: {module}.{name}")
    assert at_run_time == []
    assert annotations == ANNOTATIONS


def test_folders_and_sources_stay_small(repository):
    sources = list((repository / "src").rglob("*.py"))
    folders = Counter(path.parent.relative_to(repository).as_posix() for path in sources)
    large = {name: count for name, count in folders.items() if count > MOST_FILES}
    assert large == {}
    assert sum(len(path.read_text().splitlines()) for path in sources) <= MOST_LINES
