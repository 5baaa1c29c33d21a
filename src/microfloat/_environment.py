"""The only place that reads the environment: documented toggles, read when a recipe is constructed."""

import os

from microfloat.errors import invalid_value

__all__ = ["toggle"]


def toggle(name: str) -> bool:
    """True if the environment variable `name` is switched on: "1" is on; unset, "" and "0" are off.

    Raises InvalidValueError for any other value, so that a typing mistake never changes numerics in silence.
    """
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise invalid_value(f"environment variable {name}", repr(text), "'0' or '1'", "Unset it, or set it to 1.")
    return text == "1"
