"""The only place that reads the environment: documented toggles, read when a recipe is constructed."""

import os
import warnings
from collections.abc import Iterable

from microfloat.errors import invalid_value

_WARNED: set[str] = set()  # variables of TransformerEngine that this process was told of


def toggle(name: str) -> bool:
    """True if the environment variable `name` is switched on: "1" is on; unset, "" and "0" are off.

    Where it is unset and TransformerEngine's variable of that name is on, one warning says that only ours is read.
    Raises InvalidValueError for any other value, so that a typing mistake never changes numerics in silence.
    """
    text = os.environ.get(name)
    if text is None:
        warn_of_peer(name.replace("MICROFLOAT", "NVTE", 1), f"Set {name}=1.")
        return False
    if text not in ("", "0", "1"):
        raise invalid_value(f"environment variable {name}", repr(text), "'0' or '1'", "Unset it, or set it to 1.")
    return text == "1"


def state_of(names: Iterable[str]) -> tuple[str | None, ...]:
    """The values of these variables, None for one that is not set."""
    return tuple([os.environ.get(name) for name in names])


def warn_of_peer(name: str, remedy: str) -> None:
    """Warn once if TransformerEngine's variable `name`, which changes numerics there and nothing here, is on."""
    text = os.environ.get(name, "")
    if text in ("", "0", "none") or name in _WARNED:
        return
    _WARNED.add(name)
    needed = "This library does not read it, and the recipe is made without what it asks for."
    warnings.warn(f"environment variable {name}: got {text!r}. {needed} {remedy}", UserWarning, stacklevel=2)


warn_of_peer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # compiled code traces no warning
