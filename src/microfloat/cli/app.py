"""The typer application: the list of commands."""

import shutil
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from microfloat._version import __version__
from microfloat.cli.bench import bench
from microfloat.cli.convert import convert
from microfloat.cli.diff import diff
from microfloat.cli.doctor import doctor
from microfloat.cli.formats import formats
from microfloat.cli.inspect import inspect
from microfloat.cli.output import command
from microfloat.cli.plan import plan

__all__ = ["app"]

_COLUMNS = shutil.get_terminal_size().columns
# In a narrow terminal the panels of rich cut names of options, and plain help takes 50 columns unless it is told.
_MARKUP, _WIDTH = ("rich", None) if _COLUMNS >= 60 else (None, _COLUMNS)

app = typer.Typer(
    name="microfloat", no_args_is_help=True, add_completion=False, rich_markup_mode=_MARKUP,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _WIDTH},
    help="FP8, MXFP8, MXFP6, MXFP4 and NVFP4: formats, checkpoints and speed, from a terminal.",
    epilog="Every command takes --json, --no-color and --quiet. "
    "Exit codes: 0 fine, 1 a problem was found, 2 wrong usage or environment.",
)  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"microfloat {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


class _Values(TyperCommand):
    """A command that takes negative numbers as arguments; the "--" that other commands need before them is ignored."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, [word for word in args if word != "--"])


def _add(run: Callable[..., int | None], **options: Any) -> None:
    """Add a command; without `short_help` the list of commands cuts its sentence off in a narrow terminal."""
    app.command(short_help=(run.__doc__ or "").partition("\n\n")[0], **options)(command(run))


_add(doctor)
_add(formats, cls=_Values, context_settings={"ignore_unknown_options": True})
for _run in (inspect, convert, diff, plan, bench):
    _add(_run)
