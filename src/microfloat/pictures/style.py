"""The style that all pictures share: colours, a new figure, and saving it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from microfloat.arguments import as_path, check_new_file
from microfloat.errors import invalid_value, missing_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which stays apart for colour-blind readers.
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#7F7F7F"
CYCLE = (BLUE, ORANGE, GREEN, "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#B8A900", "#8C510A", "#542788")
# The colour of a recipe, or of its format, in every picture: of names that begin alike, the longest counts.
_COLORS = {
    "bf16": "#000000", "delayed": "#56B4E9", "fp8": BLUE, "fp8_row": "#CC79A7", "fp8_block": "#E69F00",
    "fp8_1x128": "#E69F00", "fp8_128x128": "#E69F00", "mxfp8": GREEN, "mxfp6": "#8C510A", "mxfp4": "#542788",
    "nvfp4": ORANGE,
}  # fmt: skip
DPI = 200
SUFFIXES = (".pdf", ".png", ".svg")
_MOST_LETTERS = 32


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure of `width` x `height` inches; MissingPackageError without matplotlib."""
    return _figure_class()(figsize=(width, height), layout="constrained")


def _figure_class() -> type["Figure"]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise missing_package("matplotlib", "A picture", "plot") from None
    return Figure


def color_of(name: str) -> str | None:
    """The colour of a recipe or a format in every picture; None for other names."""
    found = max((known for known in _COLORS if name.startswith(known)), key=len, default=None)
    return None if found is None else _COLORS[found]


def colors_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: recipes and formats have their own, and no colour comes twice while others are left."""
    found: dict[str, str] = {}
    for name in names:
        color = color_of(name)
        if color is None or color in found.values():
            color = next((one for one in CYCLE if one not in found.values()), CYCLE[len(found) % len(CYCLE)])
        found.setdefault(name, color)
    return found


def clean(axes: "Axes", *sides: str) -> None:
    """Remove the top and right spines, and those named in `sides`."""
    for side in ("top", "right", *sides):
        axes.spines[side].set_visible(False)


def check_path(path: str | Path, argument: str = "path") -> Path:
    """The path of a picture, if its ending is one of `SUFFIXES`, its folder exists and matplotlib can draw it."""
    checked = as_path(argument, path)
    if checked.suffix.lower() not in SUFFIXES:
        endings = ", ".join(SUFFIXES)
        raise invalid_value(argument, checked, f"a file that ends in one of {endings}", f"Try {checked.name}.png.")
    check_new_file(argument, checked)
    _figure_class()
    return checked


def save(figure: "Figure", path: str | Path, dpi: int = DPI) -> Path:
    """Write the picture as PNG, SVG or PDF, by the ending of `path`; the same figure gives the same bytes."""
    checked = check_path(path)
    # Dates and versions of programs would make equal pictures differ.
    metadata: dict[str, Any] = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
    smaller: dict[str, Any] = {"pil_kwargs": {"optimize": True}} if checked.suffix.lower() == ".png" else {}
    figure.savefig(checked, dpi=dpi, metadata=metadata[checked.suffix.lower()], **smaller)
    return checked


def short(name: str) -> str:
    """A name for a label, without its middle where it is long: beginnings and ends tell layers apart."""
    if len(name) <= _MOST_LETTERS:
        return name
    first = _MOST_LETTERS // 3
    return f"{name[:first]}...{name[first + 3 - _MOST_LETTERS :]}"
