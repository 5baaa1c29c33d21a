"""Triton's interpreter in a process of its own, without the work whose results it throws away.

Nine tenths of what Triton 3.6 does for an operation on a small block serve no result: every integer operation is done
once more in 64 bits for an assertion that is off, every call of a function looks through all of `triton.language`, and
every value describes its type anew. Without that the same operations run on the same data, five times as fast.
"""

import functools
import inspect
import math
import os
import sys
from dataclasses import replace

from tests.processes import other_process


def interpreting(run, first=None):
    """``call(case)`` does ``run(case)`` in a process that interprets kernels; its exceptions are raised here.

    `first`: what the process does first, if not `begin`.
    """
    return functools.partial(other_process(first or begin), run)


def begin():
    """First thing in a process, before anything imports triton: whether it interprets is decided there."""
    assert "triton" not in sys.modules, "triton was imported before: it compiles kernels and would interpret none"
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    if triton.__version__.startswith("3.6."):  # another one is interpreted as it comes
        _check_no_overflows()
        _replace_builtins_once()
        _describe_types_once()


def _check_no_overflows():
    """The check of integer operations ends in a `device_assert`, which does nothing unless `debug` is on."""
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def _replace_builtins_once():
    """Interpreted builtins stay in `triton.language`: nothing else runs in this process that would need the others."""
    import triton.language as tl
    from triton.runtime import interpreter

    replace_builtins, replaced = interpreter._patch_lang, set()

    @functools.cache
    def languages(function):
        values = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return frozenset(value.__name__ for value in values if value in (tl, tl.core))

    def once(function):
        if languages(function) not in replaced:
            replaced.add(languages(function))
            replace_builtins(function)
        return interpreter._LangPatchScope()  # with nothing to restore

    interpreter._patch_lang = once


def _describe_types_once():
    """Types of blocks and the shapes of their values are read only: equal ones share what describes them."""
    from triton.language import core

    describe, known = core.block_type.__init__, {}
    no_axes = core.tuple([]), core.constexpr(1)

    def describe_once(self, element_ty, shape):
        key = (str(element_ty), *map(core._unwrap_if_constexpr, shape))
        if key not in known or known[key]["element_ty"] != element_ty:
            describe(self, element_ty, shape)
            axes = core.tuple([core.constexpr(size) for size in self.shape])
            known[key] = {**self.__dict__, "of_values": (axes, core.constexpr(math.prod(self.shape)))}
        self.__dict__.update(known[key])

    def begin(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.of_values if type.is_block() else no_axes

    core.block_type.__init__, core.tensor.__init__ = describe_once, begin
