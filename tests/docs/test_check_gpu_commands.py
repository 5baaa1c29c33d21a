"""tools/check_gpu_commands.py: it names every command, example and page, and says how each one ended."""

import importlib
import json
from pathlib import Path

import pytest

from tests.docs.test_code_blocks import ROOT


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("check_gpu_commands")


def test_every_command_every_example_and_every_page_is_in_a_chain(tool, tmp_path):
    pytest.importorskip("typer", reason="typer is not installed")
    from microfloat.cli.app import app

    chains = tool.chains(tmp_path, "cuda")
    words = [command.arguments for chain in chains.values() for command in chain.commands]
    named = {one[2] for one in words if one[:2] == ("-m", "microfloat")}
    assert named == {command.callback.__name__ for command in app.registered_commands}
    examples = {Path(word).stem for one in words for word in one if word.startswith("examples/")}
    assert examples == {path.stem for path in (ROOT / "examples").glob("*.py")}
    pages = {one[2] for one in words if one[1:2] == ("--page",)}
    assert pages == {"README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))}
    assert all((ROOT / word).is_file() for one in words for word in one if word.startswith(("examples/", "tools/")))


@pytest.mark.parametrize(
    ("ended", "said", "outcome"),
    [
        ("passed", "", "passed"),
        ("failed with status 1", "Traceback ...", "failed with status 1"),
        ("failed with status 1", "No module named 'equinox'", "left out: equinox is not installed"),
        ("failed with status 2", "needs the package rich, which is not installed", "left out: rich is not installed"),
        ("failed with status 1", "No module named 'microfloat.torch.launch.program'", "failed with status 1"),
        ("failed with status 1", "No module named 'nothing'", "failed with status 1"),
        ("ended after 60 seconds", "No module named 'jax'", "ended after 60 seconds"),
    ],
)
def test_outcomes(tool, ended, said, outcome):
    assert tool.outcome_of(ended, (0,), said) == outcome


def test_a_page_goes_on_behind_a_block_that_fails(tool, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\n1 / 0\n```\n\n```python\nimport nothing_there\n```\n")
    assert tool.run_page(page, "stands") == 1
    assert "1 blocks ran, failed at lines [6], lacking ['nothing_there']" in capsys.readouterr().out


def test_a_chain_says_what_ran_where_and_when(tool, tmp_path, monkeypatch):
    pytest.importorskip("typer", reason="typer is not installed")
    command, fails = tool.Command(("-c", "print('well')")), tool.Command(("-c", "raise SystemExit(3)"))
    chains = {"good": tool.Chain(60, (command,)), "files": tool.Chain(60, (fails, command))}
    monkeypatch.setattr(tool, "chains", lambda out, device: chains)
    assert tool.main(["--device", "cpu", "--out", str(tmp_path / "out")]) == 1
    document = json.loads((tmp_path / "out" / "check_gpu_commands.json").read_text())
    assert document["machine"]
    assert document["date"]
    outcomes = sorted((row["chain"], row["outcome"]) for row in document["commands"])
    assert outcomes == [
        ("files", "failed with status 3"), ("files", "left out: the command before it: failed with status 3"),
        ("good", "passed"),
    ]  # fmt: skip
    assert tool.main(["--device", "cpu", "--only", "good", "--out", str(tmp_path / "out")]) == 0
