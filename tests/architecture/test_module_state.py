"""What `microfloat.torch` keeps between calls in its modules: each object has a line here that says what bounds it."""

import ast
import functools
import re

import pytest

from tests.architecture.syntax import statements_in

# Module, name -> what bounds it.
STATE = {
    "_upper": {"_PLACES": "functions of upper rooms, told once at import", "upper": "one for each of these"},
    "backends.__init__": {
        "_PRETENDED": "a stack of the `pretend` that are entered", "CHOSEN": "backend names x devices",
        "_chip_of": "devices",
    },
    "compile.export": {"PLAINLY": "a flag"},
    "context": {
        "_AMBIENT": "a stack of the autocasts that are entered", "_RECIPES": "distinct recipes of the program",
        "_TOKENS": "distinct recipes of the program", "_FIRST": "distinct recipes of the program", "TRACED": "a flag",
    },
    "convert.fuse": {"_fused_class": "classes of blocks in the program"},
    "launch.block_gemm": {
        "_COMPILED": "compiled forms of one kernel", "_assembler": "one path", "_imported": "three modules",
    },
    "launch.gemms": {"stored_product": "1,024 shapes, the least recently used go"},
    "launch.program": {
        "_SCRATCH": "64 bytes for each stream", "_CAPTURED": "65,536 sets of 128 bytes in all",
        "_made_for_captures": "a number", "DEVICES": "devices",
        "_PROGRAMS": "4,096 programs, then emptied",
        "kernel_of": "kernels of the library", "_splitter": "devices",
    },
    "linear.fold_counts": {"_POOL": "256 words for each 256 layers with folded operands that lived at once"},
    "linear.observer": {"OBSERVERS": "watches that are on"},
    "linear.schedule": {"SCHEDULES": "1,024 schedules, then emptied"},
    "linear.weight_cache": {"_latest_step": "one object"},
    "nn.experts": {
        "_FORMS": "classes of experts that are registered", "experts_class": "classes of experts in the program",
    },
    "nn.forward_rules": {"instructions_of": "256 functions, the least recently used go"},
    "nn.options": {"_WARNED_LOADS": "distinct warnings about state dicts"},
    "nn.quantized_init": {"_MODEL_INIT": "a stack of the contexts that are entered"},
    "reference._elements": {"_TABLES": "element formats x devices", "_shifts": "64 element formats"},
    "reference._grid": {"_kept": "buffers of one chunk for each thread"},
    "reference._values": {
        "_inside": "a number", "_put_back": "one function", "_has_bfloat16_units": "one answer",
    },
    "scaling.amax_reduction": {
        "_TABLES": "process groups that live", "_header": "4,096 points, the least recently used go",
    },
    "scaling.buffers": {
        "_STATES": "layers that live", "_NUMBERS": "a number", "_COPIES": "a number for each layer that was copied",
    },
    "scaling.rank_errors": {"_SAID": "errors that were told, until the exit", "_AGREED": "groups that live"},
    "scaling.regions": {
        "_LOCAL": "layers that live, for each thread", "LATE": "layers that live", "CLOSED_REGION": "takes nothing",
    },
    "tensor.aten_table": {"_TABLE": "operators that QuantizedTensor knows, filled at import"},
    "tensor.dispatch_modes": {"_CALLS": "operators that run now", "_NUMBERS": "a number"},
    "tensor.quantized_tensor": {"PRODUCTS": "functions of torch, filled at import"},
}  # fmt: skip
CONTAINERS = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
STATEFUL = {"ContextVar", "count", "local"}  # which change whatever is done with them
CLASSES = {
    "Counter", "OrderedDict", "WeakKeyDictionary", "WeakSet", "WeakValueDictionary", "defaultdict", "deque", "dict",
    "list", "set",
}  # fmt: skip
# A name, and behind it what changes what it holds.
CHANGES = (
    r"\b(\w+)"
    r"(?=\[[^\]\n]*\]\s*(=[^=]|\|=)|\.(append|add|pop|clear|setdefault|update|extend|remove|discard|insert)\b)"
)


def _called(node):
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _holds_containers(node):
    """True for a class whose objects make containers of their own, and are no data that a decorator describes."""
    return not node.decorator_list and any(
        isinstance(one, ast.Assign | ast.AnnAssign) and isinstance(one.value, CONTAINERS)
        for method in node.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"
        for one in method.body
    )  # fmt: skip


@functools.cache
def set_in(package):
    """Names that code sets in other modules, or in objects that are not its own."""
    return set(re.findall(r"(?<!self)\.(\w+) = ", package))


@functools.cache
def changed_in(package):
    """Names whose containers code changes."""
    return {match.group(1) for match in re.finditer(CHANGES, package)}


def state_in(source, package=""):
    """Names of a module's mutable objects and of its cached functions; `package`: text that may change them too."""
    tree = ast.parse(source)
    statements = list(statements_in(tree))
    written = {name for node in statements if isinstance(node, ast.Global) for name in node.names}
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef) and _holds_containers(node)}
    for node in (one for one in tree.body if isinstance(one, ast.Assign | ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for name in (target.id for target in targets if isinstance(target, ast.Name)):
            called = _called(node.value)
            is_container = isinstance(node.value, CONTAINERS) or called in CLASSES
            is_set = name.isupper() and name in set_in(package)  # by another module
            if name in written or is_set or called in STATEFUL or called in classes or (
                is_container and name in changed_in(source) | changed_in(package)
            ):  # fmt: skip
                yield name
    for node in statements:
        if isinstance(node, ast.FunctionDef):
            decorators = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
            if any(ast.unparse(one).rpartition(".")[2] in ("cache", "lru_cache") for one in decorators):
                yield node.name


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("A = {}\ndef f(k): A[k] = 1", {"A"}), ("A: list[int] = []\ndef f(): A.append(1)", {"A"}),
        ("A = {1: 2}\ndef f(k): return A[k] == 1", set()), ("import m\nB = m.ContextVar('b')", {"B"}),
        ("n = 0\ndef f():\n    global n\n    n = 1", {"n"}),
        ("import functools\n@functools.lru_cache(4)\ndef f(): ...\n@property\ndef g(): ...", {"f"}),
        ("class P:\n    def __init__(self):\n        self.free = []\nPOOL = P()", {"POOL"}),
    ],
)  # fmt: skip
def test_state_is_found(source, found):
    assert set(state_in(source)) == found


def test_every_object_that_is_kept_says_what_bounds_it(repository):
    torch = repository / "src" / "microfloat" / "torch"
    sources = {
        ".".join(path.relative_to(torch).with_suffix("").parts): path.read_text() for path in torch.rglob("*.py")
    }
    package = "\n".join(sources.values())
    found = {(module, name) for module, source in sources.items() for name in state_in(source, package)}
    listed = {(module, name) for module, names in STATE.items() for name in names}
    assert found - listed == set(), "say in STATE what bounds it, or do without it"
    assert listed - found == set(), "no longer kept: take its line out"
