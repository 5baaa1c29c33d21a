"""Parts that all commands share: common options, tables that fit any terminal, one JSON document, exit codes.

Results go to stdout, progress and errors to stderr. Every table is a list of rows with the keys that `--json` prints.
"""

import functools
import inspect
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from microfloat.errors import CheckpointError, MicrofloatError
from microfloat.support import alike

if TYPE_CHECKING:
    from microfloat.checkpoint import Finding

_Item = TypeVar("_Item")
_WIDE = 100_000  # a pipe has no edge
_PROSE = 100
_LEAST_TEXT = 24  # columns that a column of prose needs to stand in a table
MOST_LINES = 16  # more tensors than this are shown by kind, not one by one
_ADDED = ("bytes", "bytes_before", "bytes_after", "non_finite")
_LARGEST = ("amax", "crest", "bits")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours (also with NO_COLOR set, and in a pipe).")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors: the exit code is the answer.")]
_COMMON = {"as_json": Json, "no_color": NoColor, "quiet": Quiet}


def _digits(most: int) -> Callable[[float | None], str]:
    """The function that shows a figure with so many significant digits at most, and "-" for None."""
    return lambda value: "-" if value is None else f"{value:.{most}g}"


number, four = _digits(6), _digits(4)


def three(value: float | None) -> str:
    """Three significant digits, or all of a whole number: more is noise."""
    return "-" if value is None else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def decibel(value: float | None) -> str:
    """Two places; "exact" for infinity."""
    if value is None:
        return "-"
    return "exact" if value == math.inf else f"{value:.2f}"


def percent(value: float | None) -> str:
    """Of a fraction."""
    return "-" if value is None else f"{100 * value:.3g} %"


def count(value: int | None) -> str:
    """Digits in groups of three."""
    return "-" if value is None else f"{value:,}"


def size(value: float | None) -> str:
    """Bytes in decimal units, as disks and checkpoints count them."""
    if value is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.3g} {unit}"


def words(value: Any) -> str:
    """Lists joined, sizes as 4x8, yes and no, "-" for nothing."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ("x" if value and all(isinstance(one, int) for one in value) else ", ").join(map(str, value)) or "-"
    return "-" if value is None or value == "" else str(value)


class _Breaking(Text):
    """Text whose long words, names of layers and files, break behind a dot or a slash."""

    def __rich_measure__(self, console: Console, options: Any) -> Measurement:
        return Measurement(1, super().__rich_measure__(console, options).maximum)

    def wrap(self, console: Console, width: int, **options: Any) -> Any:  # type: ignore[override]
        """The lines of the text."""
        piece = rf"(?=\S{{{width + 1}}})(\S{{,{width - 1}}}[./]|\S{{,{width - 1}}}[_-]|\S{{{width}}})"
        return Text(re.sub(piece, "\\1\n", self.plain), self.style).wrap(console, width, **options)


def safe(text: str, style: str = "") -> Text:
    """Text with its control characters escaped: names from files must not drive the terminal."""
    plain = "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
    return _Breaking(plain, style)


def by_quality(figure: float) -> float:
    """Key of SQNRs in rising order: NaN, of a result that is NaN itself, comes first."""
    return -math.inf if math.isnan(figure) else figure


def together(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for all that differ only by numbers in their names and agree in `keys`.

    Bytes are added; of other figures the worst is shown: NaN, the largest amax, the smallest SQNR.
    """
    for name, members in alike(rows, lambda row: (row["name"], *(str(row.get(key)) for key in keys))):
        joined = {**members[0], "name": name, "tensors": len(members)}
        for key in members[0]:
            values = [row[key] for row in members if isinstance(row[key], float)]
            if key in _ADDED:
                joined[key] = sum(row[key] for row in members)
            elif values:
                joined[key] = max(values) if key in _LARGEST else min(values, key=by_quality)
        yield joined


@dataclass(frozen=True)
class Column:
    """A column: its key in the rows and in JSON, header, cell text, and `prose` for one that may break its lines."""

    key: str
    header: str = ""
    text: Callable[[Any], str] = words
    right: bool = False
    prose: bool = False
    style: Callable[[Any], str] | None = None

    @property
    def title(self) -> str:
        """The header; the key unless there is one."""
        return self.header or self.key.replace("_", " ")

    def cell(self, row: Mapping[str, Any]) -> Text:
        """The cell of a row."""
        value = row.get(self.key)
        return safe(self.text(value), self.style(value) if self.style else "")


class Output:
    """The output of a command: tables on the terminal, or the keys of one JSON document."""

    def __init__(self, name: str, *, as_json: bool = False, no_color: bool = False, quiet: bool = False) -> None:
        self.as_json, self.quiet = as_json, quiet
        self.document: dict[str, Any] = {"command": name}
        self.console = _console(sys.stdout, no_color)
        self.errors = _console(sys.stderr, no_color)

    @property
    def shows(self) -> bool:
        """True if tables and text are printed."""
        return not (self.as_json or self.quiet)

    def put(self, **values: Any) -> None:
        """Values of the JSON document that no table shows."""
        self.document.update(values)

    def say(self, text: str = "", style: str = "", indent: str = "") -> None:
        """A paragraph on stdout; its lines but the first are indented."""
        if self.shows:
            width = min(self.console.width, _PROSE)
            for line in textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]:
                self._print(safe(line, style))

    def _print(self, what: Any, width: int | None = None) -> None:
        """Print without the spaces that tables leave at the ends of lines."""
        with self.console.capture() as captured:
            self.console.print(what, width=width)
        self.console.file.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))

    def table(
        self, key: str | None, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str = ""
    ) -> None:
        """Rows under `key` of the document, and as a table if there are any; each in its lines if that is too wide."""
        if key is not None:
            self.document[key] = [dict(row) for row in rows]
        if not (self.shows and rows):
            return
        if title:
            self.say(title, "bold")
        cells = [[column.cell(row) for column in columns] for row in rows]
        shown = [i for i in range(len(columns)) if i == 0 or any(line[i].plain != "-" for line in cells)]
        columns, cells = [columns[i] for i in shown], [[line[i] for i in shown] for line in cells]
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
        for i, column in enumerate(columns):
            width = max(map(len, [*column.title.split("\n"), *(line[i].plain for line in cells)]))
            table.add_column(
                column.title, justify="right" if column.right else "left", no_wrap=not column.prose, overflow="fold",
                min_width=min(width, _LEAST_TEXT) if column.prose else width,
            )  # fmt: skip
        for line in cells:
            table.add_row(*line)
        wide = self.console.options.update(max_width=_WIDE)
        if Measurement.get(self.console, wide, table).minimum > self.console.width:
            self._print_stacked(columns, cells)
        else:
            self._print(table)
            self._print("")

    def _print_stacked(self, columns: Sequence[Column], cells: Sequence[Sequence[Text]]) -> None:
        """The first cell as a heading, the others below it."""
        for line in cells:
            self._print(Text(line[0].plain, "bold", overflow="fold"))
            pairs = {column.title.replace("\n", " "): cell for column, cell in zip(columns[1:], line[1:], strict=True)}
            self._print_pairs({title: cell for title, cell in pairs.items() if cell.plain != "-"}, indent=2)
        self._print("")

    def facts(self, values: Mapping[str, Any], *, texts: Mapping[str, str] | None = None, title: str = "") -> None:
        """Keys of the document, and as lines of key and value; `texts` says some of them in words."""
        self.document.update(values)
        if self.shows:
            if title:
                self.say(title, "bold")
            shown = {key: (texts or {}).get(key, words(value)) for key, value in values.items()}
            self.pairs({key.replace("_", " "): text for key, text in shown.items() if text != "-"})

    def pairs(self, texts: Mapping[str, str]) -> None:
        """Lines of title and text."""
        self._print_pairs({title: safe(text) for title, text in texts.items()})
        self._print("")

    def _print_pairs(self, pairs: Mapping[str, Text], indent: int = 0) -> None:
        grid = Table.grid(padding=(0, 2, 0, 0))
        grid.add_column(no_wrap=True, style="dim")
        grid.add_column(overflow="fold")
        for title, cell in pairs.items():
            grid.add_row(" " * indent + title, cell)
        self._print(grid, min(self.console.width, 160))

    def notes(self, texts: Iterable[str]) -> None:
        """Numbered remarks below a table."""
        for index, text in enumerate(texts, 1):
            self.say(f"{index}. {text}", indent="   ")
        self.say()

    def warn(self, text: str) -> None:
        """A remark on stderr."""
        if not self.quiet:
            self.errors.print(Text("note: ", "yellow") + safe(text))

    def fail(self, error: BaseException) -> None:
        """An error on stderr; in the document, where there is one."""
        message = with_options(str(error))
        self.document = {"command": self.document["command"], "error": message, "type": type(error).__name__}
        if isinstance(error, CheckpointError):
            self.document["findings"] = [finding_row(one) for one in error.findings]
        label = "stopped: " if isinstance(error, KeyboardInterrupt) else "error: "
        for number, line in enumerate(message.split("\n")):
            # A command to copy stays one line for the terminal to break.
            text = Text(label, "bold red") + safe(line) if number == 0 else safe(line)
            self.errors.print(text, soft_wrap=line.startswith("    "))

    def drew(self, path: Path) -> None:
        """Name the picture that was written."""
        self.document["plot"] = str(path)
        self.say(f"Picture: {path}")

    @contextmanager
    def progress(self, title: str, total: float | None, of_bytes: bool = False) -> Iterator[Callable[..., None]]:
        """A bar with the time left, on stderr where that is a terminal; yields ``show(done, total=None, title=None)``.

        `of_bytes`: amounts are bytes, shown with their rate. A position before the last one begins another stage.
        """
        from rich import progress as rich

        rate = (rich.DownloadColumn(), rich.TransferSpeedColumn()) if of_bytes else (rich.TaskProgressColumn(),)
        columns = (rich.TextColumn("{task.description}"), rich.BarColumn(None), *rate, rich.TimeRemainingColumn())
        is_hidden = self.quiet or not self.errors.is_terminal
        with rich.Progress(*columns, console=self.errors, transient=True, disable=is_hidden) as bar:
            task = bar.add_task(title, total=total)

            def show(done: float, total: float | None = None, title: str | None = None) -> None:
                if done < bar.tasks[0].completed:
                    bar.reset(task)
                bar.update(task, completed=done, total=total, description=title)

            yield show

    def each(self, title: str, items: Sequence[_Item], text: Callable[[_Item], str] = str) -> Iterator[_Item]:
        """The items, while a bar shows how many are done and the `text` of the present one."""
        with self.progress(title, len(items)) as show:
            for done, item in enumerate(items):
                show(done, title=text(item))
                yield item

    def close(self) -> None:
        """Print the document if it was asked for."""
        if self.as_json:
            sys.stdout.write(json.dumps(jsonable(self.document), indent=1, allow_nan=False) + "\n")
        sys.stdout.flush()


def with_options(text: str) -> str:
    """A remedy for callers of `checkpoint.load` and `convert` in the words of the commands: `--from` for `format=`."""
    text = re.sub(r'\bformat="([^"]+)"', r"--from \1", text)
    return re.sub(r"\b(format|fuse)=(?![\w\"'])", lambda word: {"format": "--from", "fuse": "--fuse"}[word[1]], text)


def finding_row(finding: "Finding") -> dict[str, str]:
    """A finding as a row of a table."""
    return {**finding._asdict(), "remedy": with_options(finding.remedy)}


def _console(file: Any, no_color: bool) -> Console:
    """A console as wide as its terminal, or as COLUMNS says; without an edge in a pipe."""
    columns = shutil.get_terminal_size((0, 0)).columns
    width = columns or (80 if file.isatty() else _WIDE)
    colours = None if no_color else "auto"
    return Console(file=file, width=width, color_system=colours, highlight=False, emoji=False)


def jsonable(value: Any) -> Any:
    """The same as JSON has it: figures that are no numbers become the strings "inf", "-inf" and "nan"."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(one) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(one) for one in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, str | int):
        return value
    return jsonable(value.item()) if hasattr(value, "item") else str(value)


def _in_words(error: Exception) -> Exception:
    """The system's errors as "file: reason", without their numbers."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return type(error)(f"{error.filename}: {error.strerror[0].lower()}{error.strerror[1:]}.")
    return error


def _run(output: Output, run: Callable[..., int | None], options: dict[str, Any]) -> int:
    """The exit code of a command; its errors are printed."""
    try:
        if options.get("plot") is not None:  # a picture that cannot be drawn is named before anything is done
            from microfloat.pictures.style import check_path

            check_path(options["plot"], "--plot")
        return run(output, **options) or 0
    except BrokenPipeError:
        raise
    except CheckpointError as error:
        output.fail(error)
        return 1
    except (MicrofloatError, OSError) as error:
        output.fail(_in_words(error))
        return 2
    except KeyboardInterrupt as interrupt:
        output.fail(KeyboardInterrupt(str(interrupt) or "interrupted"))
        return 130


def command(run: Callable[..., int | None]) -> Callable[..., None]:
    """`run(output, ...)` as a command of typer: it gets --json, --no-color and --quiet, and errors become exit codes.

    What it returns is the exit code, None for 0. CheckpointError is a problem that was found: 1. Other errors of
    microfloat's and the system's are those of the question or the environment: 2. Ctrl-C ends with 130.
    """
    own = list(inspect.signature(run).parameters.values())[1:]
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        for name, annotation in _COMMON.items()
    ]
    name = run.__name__.rstrip("_")

    @functools.wraps(run)
    def called(**options: Any) -> None:
        output = Output(name, **{key: options.pop(key) for key in _COMMON})
        try:
            code = _run(output, run, options)
            output.close()
        except BrokenPipeError:  # the reader of the pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = 0
        raise typer.Exit(code)

    called.__signature__ = inspect.Signature([*own, *common])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *common]}
    return called
