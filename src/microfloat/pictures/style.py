"""The style that all pictures share: colours, a new figure, and saving it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from microfloat.arguments import as_path, check_new_file
from microfloat.errors import invalid_value, missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "CYCLE", "GREEN", "GREY", "ORANGE", "clean", "new_figure", "save", "short"]

# Okabe and Ito's palette, which stays apart for colour-blind readers.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
CYCLE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A900", "#8C510A", "#542788")
SUFFIXES = (".pdf", ".png", ".svg")
_MOST_LETTERS = 32


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches whose parts arrange themselves.

    Raises MissingPackageError without matplotlib.
    """
    _need_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _need_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError:
        raise missing_package("matplotlib", "A picture", "plot") from None


def clean(axes: "Axes", *sides: str) -> None:
    """Remove the spines that carry no figures: top and right, and those named in `sides`."""
    for side in ("top", "right", *sides):
        axes.spines[side].set_visible(False)


def check_path(path: str | Path, argument: str = "path") -> Path:
    """The path of a picture, if its ending is one of `SUFFIXES`, its folder exists and matplotlib can draw it."""
    checked = as_path(argument, path)
    if checked.suffix.lower() not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        raise invalid_value(argument, checked, f"a file that ends in one of {endings}", f"Try {checked.name}.png.")
    check_new_file(argument, checked)
    _need_matplotlib()
    return checked


def save(figure: "Figure", path: str | Path, dpi: int = 100) -> Path:
    """Write the picture as PNG, SVG or PDF, by the ending of `path`; the same figure gives the same bytes."""
    checked = check_path(path)
    # Dates and versions of programs would make equal pictures differ.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    smaller: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if checked.suffix.lower() == ".png" else {}
    figure.savefig(checked, dpi=dpi, metadata=metadata[checked.suffix.lower()], **smaller)
    return checked


def short(name: str) -> str:
    """A name for a label: where it is long its middle is left out, as beginnings and ends tell layers apart."""
    if len(name) <= _MOST_LETTERS:
        return name
    first = _MOST_LETTERS // 3
    return f"{name[:first]}...{name[first + 3 - _MOST_LETTERS :]}"
