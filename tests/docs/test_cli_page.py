"""docs/cli.md: its commands exist with their options, and what needs no model prints what the page says."""

import shlex

import pytest

from tests.docs.code_blocks import code_blocks

pytest.importorskip("typer", reason="typer is not installed")


@pytest.fixture(scope="module")
def session(repository):
    """Pairs of a command and the lines that the page shows below it."""
    pairs = []
    for block in code_blocks(repository / "docs" / "cli.md", "console"):
        for part in f"\n{block.source}".split("\n$ ")[1:]:
            command, _, printed = part.partition("\n")
            pairs.append((shlex.split(command), printed.strip()))
    return pairs


def test_the_page_shows_every_command(session):
    from microfloat.cli.app import app

    assert {words[1] for words, _ in session} == {command.callback.__name__ for command in app.registered_commands}
    assert {words[0] for words, _ in session} == {"microfloat"}


def test_every_command_line_is_understood(session):
    from typer.main import get_command

    from microfloat.cli.app import app

    group = get_command(app)
    for words, _ in session:
        command = group.commands[words[1]]
        command.make_context(words[1], words[2:]).close()


def test_formats_prints_what_the_page_says(session, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from microfloat.cli.app import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    shown = [(words, printed) for words, printed in session if words[1] == "formats"]
    assert len(shown) >= 3
    for words, printed in shown:
        if "--plot" in words:
            pytest.importorskip("matplotlib", reason="matplotlib is not installed")
        assert CliRunner().invoke(app, words[1:]).stdout.strip() == printed
