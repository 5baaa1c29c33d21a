"""Functions of upper rooms that lower ones call: named here, told by `microfloat.torch`, imported at their first call.

A room imports only rooms below it. Where it hands a call on to one above, such as a Linear whose tensors are sharded to
`distributed`, it asks for the function by a name of its own: ``upper("run_sharded")(...)``.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

_PLACES: dict[str, str] = {}


def tell(places: dict[str, str]) -> None:
    """Say where functions are: ``{name: "module:function"}``."""
    _PLACES.update(places)


@functools.cache
def upper(name: str) -> Callable[..., Any]:
    """The function of this name, of a room above the caller's."""
    module, _, function = _PLACES[name].partition(":")
    return getattr(importlib.import_module(module), function)
