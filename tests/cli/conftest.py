"""The command line in this process, with the width of a terminal."""

import json
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass(frozen=True)
class Done:
    """Output of a command, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    def refuses(self, named: str) -> None:
        """Check that the question was wrong, and that the answer names what is needed."""
        assert self.code == 2
        assert named in " ".join(self.err.split())


@pytest.fixture
def microfloat(monkeypatch):
    """Run `microfloat WORDS...`; `columns` wide, or in a pipe without an edge."""
    testing = pytest.importorskip("typer.testing", reason="typer is not installed")
    from microfloat.cli.app import app

    def run(*words, columns=None):
        if columns is None:
            monkeypatch.delenv("COLUMNS", raising=False)
        else:
            monkeypatch.setenv("COLUMNS", str(columns))
        result = testing.CliRunner().invoke(app, [str(word) for word in words], prog_name="microfloat")
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run
