"""The rooms of `microfloat.torch`: a room imports itself and those below it, in functions and annotations too."""

import ast
from collections import Counter

from tests.architecture.syntax import statements_in

# Further up in this list is further down in the house. Two names in one row do not see each other.
ROOMS = (
    ("_typing", "_upper"), ("backends",), ("reference",), ("tensor",), ("launch",), ("scaling",), ("context",),
    ("autocast",), ("linear",), ("compile",), ("nn",), ("convert",), ("inference", "watch"), ("distributed",),
    ("attention", "fused", "timing"),
)  # fmt: skip
MOST_FILES, MOST_LINES = 16, 57_000


def imports_of(tree):
    """The dotted names that a module imports from `microfloat.torch`, also in functions and for annotations."""
    for node in statements_in(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("microfloat.torch."):
            yield from (f"{node.module}.{name.name}" for name in node.names)
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("microfloat.torch."))


def graph_of(torch):
    """File -> the files that it imports, by their names in `microfloat.torch`."""
    trees = {".".join(path.relative_to(torch).with_suffix("").parts): ast.parse(path.read_text())
             for path in sorted(torch.rglob("*.py"))}  # fmt: skip
    graph = {}
    for file, tree in trees.items():
        graph[file] = set()
        for name in imports_of(tree):
            name = name.removeprefix("microfloat.torch.")
            module = name.rpartition(".")[0]
            places = name, f"{name}.__init__", module, f"{module}.__init__"
            graph[file] |= {next((one for one in places if one in trees), file)} - {file}
    return graph


def circles_in(graph):
    """Sets of files each of which imports all others, by others of them too."""
    reached = {}
    for file in graph:
        seen, waiting = set(), [file]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[file] = seen
    sets = {frozenset(one for one in seen if file in reached[one]) for file, seen in reached.items() if file in seen}
    return sorted(map(sorted, sets))


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"f", "a"}, "f": {"e"}, "g": {"d"}}
    assert circles_in(graph) == [["a", "b", "c"], ["e", "f"]]


def test_files_import_each_other_in_no_circle(repository):
    assert circles_in(graph_of(repository / "src" / "microfloat" / "torch")) == []


def test_no_room_imports_one_above_it(repository):
    torch = repository / "src" / "microfloat" / "torch"
    height = {name: number for number, names in enumerate(ROOMS) for name in names}
    upwards = []
    for path in sorted(torch.rglob("*.py")):
        own = path.relative_to(torch).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        assert own in height, f"{own} has no place in ROOMS"
        for name in imports_of(ast.parse(path.read_text())):
            other = name.split(".")[2]
            if other in height and other != own and height[other] >= height[own]:
                upwards.append(f"{path.relative_to(torch)}: {name}")
    assert upwards == []


def test_folders_and_sources_stay_small(repository):
    sources = list((repository / "src").rglob("*.py"))
    folders = Counter(path.parent.relative_to(repository).as_posix() for path in sources)
    large = {name: count for name, count in folders.items() if count > MOST_FILES}
    assert large == {}
    assert sum(len(path.read_text().splitlines()) for path in sources) <= MOST_LINES
