"""The public names of the library with their signatures, as text: `python -m tests.architecture.public_api --write`.

Annotations are left out: Python versions print them differently, and pyright looks after them.
"""

import argparse
import enum
import importlib
import inspect
import sys
import types
from pathlib import Path

MODULES = (
    "microfloat",
    "microfloat.formats",
    "microfloat.recipes",
    "microfloat.reference",
    "microfloat.metrics",
    "microfloat.checkpoint",
    "microfloat.torch",
    "microfloat.torch.distributed",
    "microfloat.jax",
)
SNAPSHOT = Path(__file__).with_name("public_api.txt")
COMMAND = "python -m tests.architecture.public_api --write"


def _default(value: object) -> str:
    if value is inspect.Parameter.empty:
        return ""
    if repr(value) == "<factory>":  # the default of a dataclass field with a default_factory
        return "=<factory>"
    text = repr(value)
    # Functions, classes and default objects print an address or a module path; their name says enough.
    readable = " at 0x" not in text and "\n" not in text and not text.startswith("<")
    if isinstance(value, enum.Enum):
        text = str(value)
    elif not readable:
        text = getattr(value, "__qualname__", type(value).__qualname__)
    return f"={text}"


def _signature(target: object, *, skip_first: bool = False) -> str:
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return "(...)"
    words: list[str] = []
    previous = None
    for parameter in list(signature.parameters.values())[skip_first:]:
        kind = parameter.kind
        if previous == inspect.Parameter.POSITIONAL_ONLY and kind != previous:
            words.append("/")
        star_is_due = previous not in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        if kind == inspect.Parameter.KEYWORD_ONLY and star_is_due:
            words.append("*")
        prefix = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(kind, "")
        words.append(f"{prefix}{parameter.name}{_default(parameter.default)}")
        previous = kind
    if previous == inspect.Parameter.POSITIONAL_ONLY:
        words.append("/")
    return f"({', '.join(words)})"


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "microfloat"


def _constructor(cls: type) -> str:
    """Signature of the library's own __init__ or __new__; one inherited from elsewhere is not ours to pin."""
    if issubclass(cls, enum.Enum):
        return ""
    for base in cls.__mro__:
        for method in ("__init__", "__new__"):
            if method in vars(base):
                return _signature(getattr(base, method), skip_first=True) if _is_ours(base) else ""
    return ""


def _member_rows(name: str, cls: type) -> list[str]:
    """Public attributes that the library itself defines on a class, inherited ones of the library included."""
    rows = {}
    for base in reversed(cls.__mro__):
        if not _is_ours(base):
            continue
        for member, value in vars(base).items():
            if member.startswith("_"):
                continue
            static = isinstance(value, staticmethod | classmethod)
            target = value.__func__ if static else value
            if inspect.isfunction(target):
                rows[member] = f"{name}.{member}{_signature(target)}"
            else:
                rows[member] = f"{name}.{member}"
        for member in inspect.get_annotations(base):  # fields, and attributes that a constructor sets
            if not member.startswith("_"):
                rows.setdefault(member, f"{name}.{member}")
    return [f"    {rows[member]}" for member in sorted(rows)]


def describe(module: types.ModuleType) -> list[str]:
    """One row per public name of `module` (its `__all__`), and one per public member of a public class."""
    rows = []
    for name in sorted(module.__all__):
        value = getattr(module, name)
        if inspect.ismodule(value):
            rows.append(f"{name}: module")
        elif inspect.isclass(value):
            rows.append(f"class {name}{_constructor(value)}")
            rows += _member_rows(name, value)
        elif callable(value) and hasattr(value, "__name__"):
            rows.append(f"{name}{_signature(value)}")
        else:
            rows.append(f"{name}: {type(value).__qualname__}")
    return rows


def parse(text: str) -> dict[str, list[str]]:
    """Sections of a snapshot: module name -> rows."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("## "):
            rows = sections.setdefault(line[3:], [])
        elif line.strip() and not line.startswith("# "):
            rows.append(line)
    return sections


def is_absent(error: ModuleNotFoundError, module: str) -> bool:
    """True if `module` itself is not there, as opposed to something that it needs."""
    return error.name is not None and (module == error.name or module.startswith(f"{error.name}."))


def generate(previous: dict[str, list[str]]) -> str:
    """The snapshot as text; the section of a module whose framework is missing is taken over from `previous`."""
    blocks = [f"# The public names of microfloat. Regenerate with: {COMMAND}\n"]
    for name in MODULES:
        try:
            module = importlib.import_module(name)
            if not hasattr(module, "__all__"):
                print(f"{name} has no __all__: left out", file=sys.stderr)
                continue
            rows = describe(module)
        except ModuleNotFoundError as error:
            if is_absent(error, name):
                continue
            if (error.name or "").startswith("microfloat"):
                raise
            if name not in previous:
                continue
            rows = previous[name]
        blocks.append("\n".join([f"## {name}", *rows]) + "\n")
    return "\n".join(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help=f"write {SNAPSHOT.name} instead of printing")
    options = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    text = generate(parse(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {})
    if options.write:
        SNAPSHOT.write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
