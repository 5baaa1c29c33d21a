"""Errors that a user can cause, each naming the argument, what was got, what is needed and what to do.

All derive from :class:`MicrofloatError` and from the built-in class a PyTorch or JAX user would expect
(`ValueError`, `TypeError`, `RuntimeError`), so existing ``except`` clauses keep working.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class MicrofloatError(Exception):
    """Base of every error that microfloat raises on purpose."""


class InvalidValueError(MicrofloatError, ValueError):
    """An argument has the right type but a value that has no meaning here."""


class InvalidTypeError(MicrofloatError, TypeError):
    """An argument has a type (or dtype) that is not accepted."""


class PlacementError(InvalidValueError):
    """A Placement does not fit the model it is applied to."""


class NotSupportedError(MicrofloatError, RuntimeError):
    """The thing that was explicitly asked for cannot run here; the message is the `Support.reason`."""


class RankError(MicrofloatError, RuntimeError):
    """A collective failed because a rank died, hangs or raised; the message names the rank."""


class MissingPackageError(MicrofloatError, ModuleNotFoundError):
    """A part of microfloat was imported without the package that it is for."""


class CheckpointError(MicrofloatError, ValueError):
    """A file is truncated, corrupted, or not what it claims to be; `findings` lists all that is wrong with it."""

    def __init__(self, message: str, findings: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.findings = list(findings)


_MOST_SHOWN = 200
_MOST_LISTED = 20
_MOST_NEAR = 4


def _shown(got: object) -> str:
    """A value as text, cut in the middle where it is long: what is wrong with a file stands behind its path."""
    try:
        text = str(got)
    except ValueError:  # an int of more digits than Python prints
        return f"an int of {got.bit_length()} bits" if isinstance(got, int) else type(got).__name__
    half = _MOST_SHOWN // 2
    return text if len(text) <= _MOST_SHOWN else f"{text[:half]} ... {text[-half:]}"


def _compose(argument: str, got: object, needed: str, remedy: str) -> str:
    text = f"{argument}: got {_shown(got)}, needed {needed}."
    return f"{text} {remedy}" if remedy else text


def invalid_value(argument: str, got: object, needed: str, remedy: str = "") -> InvalidValueError:
    """Build (not raise) the error for a bad value of `argument`."""
    return InvalidValueError(_compose(argument, got, needed, remedy))


def invalid_type(argument: str, got: object, needed: str, remedy: str = "") -> InvalidTypeError:
    """Build (not raise) the error for a bad type of `argument`; `got` that is a class is shown by its name."""
    shown = got.__name__ if isinstance(got, type) else got
    return InvalidTypeError(_compose(argument, shown, needed, remedy))


def checkpoint_error(path: object, findings: Iterable[Any]) -> CheckpointError:
    """Build the error for a checkpoint: one line for each finding (its text is `str(finding)`), all of them kept."""
    findings = list(findings)
    lines = [str(finding) for finding in findings[:_MOST_LISTED]]
    if len(findings) > _MOST_LISTED:
        lines.append(f"... and {len(findings) - _MOST_LISTED} more; all stand in the error's `findings`")
    count = "1 problem" if len(findings) == 1 else f"{len(findings)} problems"
    return CheckpointError("\n  ".join([f"{_shown(path)}: {count} found.", *lines]), findings)


def kind_of(value: object) -> object:
    """The class of a value, for a message; of a class itself, words that say so."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value)


def install_hint(*extras: str) -> str:
    """The command that installs extras of microfloat, which is installed from a checkout."""
    return f'pip install ".[{",".join(extras)}]" in a checkout of microfloat'


def missing_package(package: str, part: str, extra: str) -> MissingPackageError:
    """Build the error for a `part` of microfloat whose package is not installed; it names the extra to install."""
    return MissingPackageError(
        f"{part} needs the package {package}, which is not installed. Install it with: {install_hint(extra)}.",
        name=package,
    )


def unknown_name(
    argument: str, got: object, known: Iterable[str], remedy: str = "", *, or_none: bool = False, listed: str = ""
) -> InvalidValueError:
    """Build the error for an unknown name: the whole list, then `remedy`, or the nearest known names.

    `or_none`: None is accepted too. `listed`: the list as text, where it is long.
    """
    names = list(known)
    originals, lower = {name.lower(): name for name in names}, str(got).lower()
    # "fp8" begins three names, each nearer in meaning than "mxfp8", which is nearer in letters.
    near = [name for name in originals if len(lower) > 2 and name.startswith(lower)][:_MOST_NEAR]
    near = near or difflib.get_close_matches(lower, originals, n=1, cutoff=0.5)
    *first, last = (repr(originals[name]) for name in near) if near else ("",)
    meant = f"{', '.join(first)} or {last}" if first else last
    hint = remedy or (f"Did you mean {meant}?" if near else "")
    needed = ("None or " if or_none else "") + "one of " + (listed or ", ".join(repr(name) for name in names))
    return invalid_value(argument, repr(got), needed, hint)
