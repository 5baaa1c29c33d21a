"""The typer application: the list of commands."""

import shutil
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from microfloat._version import __version__
from microfloat.cli.bench import bench
from microfloat.cli.convert import convert
from microfloat.cli.diff import diff
from microfloat.cli.doctor import doctor
from microfloat.cli.formats import formats
from microfloat.cli.inspect import inspect
from microfloat.cli.output import command
from microfloat.cli.plan import plan

_COLUMNS = shutil.get_terminal_size().columns
# In a narrow terminal the panels of rich cut names of options, and plain help takes 50 columns unless it is told.
_MARKUP, _WIDTH = ("rich", None) if _COLUMNS >= 60 else (None, _COLUMNS)

# The base of errors about the words of a command line, which typer takes from click or keeps a copy of.
_UsageError: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "UsageError")
_BEHIND = ("--json", "--no-color", "--quiet", "-q")


class _WithoutTypes:
    """Flags show no type in the help, as if they took a value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for one in params:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return params


class _Command(_WithoutTypes, TyperCommand):
    pass


class _Group(_WithoutTypes, TyperGroup):
    """The commands; wrong words are answered as wrong values are: one line after "error:", and exit code 2."""

    def main(self, *arguments: Any, standalone_mode: bool = True, **options: Any) -> Any:
        if not standalone_mode:
            return super().main(*arguments, standalone_mode=False, **options)
        try:
            code = super().main(*arguments, standalone_mode=False, **options)
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                print(error.ctx.get_help())
            else:
                print(f"error: {_in_words(error)}", file=sys.stderr)
            code = error.exit_code
        except typer.Abort:
            code = 130
        sys.exit(code or 0)


def _in_words(error: Any) -> str:
    """The message of a usage error, and the command that shows the help."""
    path = error.ctx.command_path if error.ctx is not None else "microfloat"
    option = getattr(error, "option_name", "")
    if path == "microfloat" and option in _BEHIND:
        return f"{option}: got it before the command, needed it behind. Try, say: microfloat formats {option}"
    text = error.format_message()
    return f"{text}{'' if text.endswith(('.', '?', '!')) else '.'} Try: {path} --help"


app = typer.Typer(
    name="microfloat", cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=_MARKUP,
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


class _Values(_Command):
    """A command that takes negative numbers as arguments; the "--" that other commands need before them is ignored."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, [word for word in args if word != "--"])


def _add(run: Callable[..., int | None], cls: type[_Command] = _Command, **options: Any) -> None:
    """Add a command; without `short_help` the list of commands cuts its sentence off in a narrow terminal."""
    app.command(short_help=(run.__doc__ or "").partition("\n\n")[0], cls=cls, **options)(command(run))


_add(doctor)
_add(formats, cls=_Values, context_settings={"ignore_unknown_options": True})
for _run in (inspect, convert, diff, plan, bench):
    _add(_run)
