"""The command `microfloat`: one file per command; `output` holds what they share.

Typer and Rich draw it (extra `cli`). A command is a function of an Output and its options that returns its exit code:
0 fine, 1 it ran and found a problem, 2 the question or the environment is wrong. Frameworks, matplotlib and the
checkpoint readers are imported by the commands that need them, when they run.
"""

import sys

from microfloat.errors import missing_package

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line, on `sys.argv` unless `arguments` are given; the exit code."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(f"error: {missing_package(error.name, 'The command line', 'cli')}", file=sys.stderr)
        return 2
    from microfloat.cli.app import app

    return app(args=arguments, prog_name="microfloat", standalone_mode=True)
