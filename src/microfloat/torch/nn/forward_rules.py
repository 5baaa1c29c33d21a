"""Forwards of other packages that a fused one can replace, recognised by the names that they use."""

import dis
import functools
import inspect
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import NamedTuple

# Modules whose wrappers a fused forward may leave out: they rename an argument, or wrap the fused forward as well.
_WRAPPERS = ("transformers.utils.deprecation", "transformers.modeling_layers")

# Classes of transformers and torch -> the activation that they compute.
ACTIVATION_OF = {
    "SiLU": "silu", "SiLUActivation": "silu", "GELUActivation": "gelu", "PytorchGELUTanh": "gelu_tanh",
    "GELUTanh": "gelu_tanh", "NewGELUActivation": "gelu_tanh", "ReLU": "relu", "QuickGELUActivation": "qgelu",
    "ReLUSquaredActivation": "srelu",
}  # fmt: skip


class Forward(NamedTuple):
    """The names that a forward takes, reads and passes on, if a fused forward can replace it.

    A forward that uses another name belongs to another version, or is a user's own, and may compute something else.
    """

    needs: frozenset[str]
    may_use: frozenset[str] = frozenset()
    wrappers: tuple[str, ...] = _WRAPPERS  # modules whose wrappers the fused forward does the work of

    def why_not(self, function: object) -> str:
        """The reason why a function is another forward, or ""."""
        own, wrappers = _unwrapped(function)
        where = getattr(own, "__qualname__", "a forward")
        foreign = [one for one in wrappers if one not in self.wrappers]
        if foreign or not isinstance(own, FunctionType):
            return f"{where} is wrapped by {' and '.join(foreign) or 'an object'}, which ours would leave out"
        names = _names_in(own)
        if unknown := sorted(names - self.needs - self.may_use):
            return f"{where} has {', '.join(map(repr, unknown))}, which the fused form does not know"
        if missing := sorted(self.needs - names):
            return f"{where} does without {', '.join(map(repr, missing))}, which the fused form computes"
        return ""


def names_of(names: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(names.split())


@functools.lru_cache(256)
def instructions_of(function: FunctionType) -> list[tuple[str, object]]:
    """The instructions of a function, which say nothing of the names of its variables."""
    by_value, made = {*dis.hasconst, *dis.hasname}, dis.get_instructions(function)
    return [(one.opname, one.argval if one.opcode in by_value else one.arg) for one in made]


def _unwrapped(function: object) -> tuple[object, list[str]]:
    """The function below its wrappers, and the modules of the wrappers."""
    modules = []
    while hasattr(function, "__wrapped__"):
        modules.append(getattr(function, "__globals__", {}).get("__name__", type(function).__module__))
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function, modules


def arguments_of(function: Callable) -> tuple[str, ...]:
    """The names of the arguments of a function, but for `*args` and `**kwargs`."""
    code = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _names_in(function: FunctionType) -> frozenset[str]:
    """The names that a function takes, reads, and passes by keyword; "<function>" for functions inside of it."""
    code: CodeType = function.__code__
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    names = {*code.co_names, *code.co_freevars, *code.co_varnames[: len(arguments_of(function)) + several]}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.add("<function>")
        elif isinstance(constant, tuple) or (isinstance(constant, str) and constant != function.__doc__):
            words = constant if isinstance(constant, tuple) else (constant,)
            names |= {word for word in words if isinstance(word, str) and "\n" not in word}  # no replaced docstring
    return frozenset(names)
