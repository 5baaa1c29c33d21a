"""Delayed scaling: what is recorded in a step and what the next step's scale becomes (docs/numerics.md 3.3)."""

from collections.abc import Callable

import numpy as np

from microfloat.errors import invalid_type, invalid_value, unknown_name
from microfloat.formats import ElementFormat, get_element
from microfloat.recipes import Delayed


def record_amax(history: np.ndarray, amax: float | np.ndarray) -> np.ndarray:
    """``history[0] = max(history[0], amax)``; slot 0 is live. A non-finite amax records nothing.

    `history`: float32 [L]; `amax`: the amax of the unscaled input. Returns a new history.
    """
    updated = _check_history(history).copy()
    value = _number("amax", amax)
    if value < 0:
        raise invalid_value("amax", value, "a number >= 0", "An amax is a maximum of magnitudes.")
    if np.isfinite(value):
        updated[0] = max(updated[0], value)
    return updated


def update_delayed(
    history: np.ndarray, scale_enc: float | np.ndarray, element: ElementFormat | str, *, margin: int = 0,
    amax_compute_algo: str | Callable[[np.ndarray], float] = "max",
) -> tuple[np.ndarray, np.float32]:  # fmt: skip
    """End of a step: the next encode scale from the history of amaxes, then the history rolls.

    ``scale_enc = min(f32(f32(max / max(A, max * 2^-126)) * 2^-margin), 2^126)`` with ``A = max(history)``,
    ``history[0]`` ("most_recent") or ``algo(history)``; an A that is zero or not finite keeps the scale. After the roll
    the newest amax is last, the oldest at 1, and slot 0 is 0 again. `history`: float32 [L], already reduced over the
    amax group; `element` gives max. Returns (new history, new scale_enc).
    """
    history = _check_history(history)
    largest = np.float32(get_element(element).max)
    margin = Delayed(margin=int(margin) if isinstance(margin, np.integer) else margin).margin  # its range, its errors
    scale = _number("scale_enc", scale_enc)
    if callable(amax_compute_algo):
        amax = _number("amax_compute_algo(history)", amax_compute_algo(history.copy()))
    elif amax_compute_algo in ("max", "most_recent"):
        amax = history.max() if amax_compute_algo == "max" else history[0]
    else:
        raise unknown_name("amax_compute_algo", amax_compute_algo, ["max", "most_recent"])
    with np.errstate(all="ignore"):
        if amax > 0 and np.isfinite(amax):
            ratio = largest / np.maximum(amax, np.ldexp(largest, -126))
            scale = np.minimum(np.ldexp(ratio, -margin), np.float32(2.0**126))
    rolled = np.roll(history, -1)
    rolled[0] = 0
    return rolled, np.float32(scale)


def _check_history(history: np.ndarray) -> np.ndarray:
    array = np.asarray(history)
    if array.dtype.kind != "f":
        raise invalid_type("history", array.dtype, "float32")
    if array.ndim != 1 or array.size == 0:
        raise invalid_value("history", f"shape {array.shape}", "[L] with L >= 1 (amax_history_len)")
    with np.errstate(all="ignore"):
        return array.astype(np.float32)


def _number(argument: str, value: float | np.ndarray) -> np.float32:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu" or array.size != 1:
        raise invalid_type(argument, f"{type(value).__name__} {value!r}", "one number")
    with np.errstate(all="ignore"):
        return np.float32(array.reshape(()))
