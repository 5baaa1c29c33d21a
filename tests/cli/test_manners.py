"""Manners that all commands have in common: features O10 and O11."""

import json
import os
import select
import subprocess
import sys
import time

import pytest

from microfloat.cli.output import Column, Output, decibel, jsonable, size, words
from tests import processes

COMMANDS = ("bench", "convert", "diff", "doctor", "formats", "inspect", "plan")


def test_help_names_every_command_and_the_exit_codes(microfloat):
    done = microfloat("--help", columns=200)
    assert done.code == 0
    assert all(f" {name} " in done.out for name in COMMANDS)
    assert "--json" in done.out
    assert "Exit codes: 0 fine, 1" in done.out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_common_options_and_an_example(microfloat, command):
    text = microfloat(command, "--help", columns=200).out
    assert all(option in text for option in ("--json", "--no-color", "--quiet"))
    assert f"microfloat {command}" in text.replace("Usage: microfloat", "")


def test_the_version(microfloat):
    from microfloat import __version__

    assert microfloat("--version").out.split() == ["microfloat", __version__]


def test_an_unknown_command_or_option_is_wrong_usage(microfloat):
    assert microfloat("fromats").code == 2
    assert microfloat("doctor", "--chek").code == 2


@pytest.mark.parametrize(
    ("command", "argument"), [("inspect", "PATH"), ("convert", "SRC"), ("diff", "A"), ("plan", "PATH")]
)
def test_a_command_without_its_arguments_says_which_on_stderr(microfloat, command, argument):
    done = microfloat(command)
    assert (done.code, done.out) == (2, "")
    assert f"Missing argument '{argument}'" in done.err


def test_json_is_one_document_and_nothing_else(microfloat):
    done = microfloat("formats", "--json")
    assert done.err == ""
    assert done.json["command"] == "formats"
    failed = microfloat("formats", "nvpf4", "--json")
    assert failed.code == 2
    assert failed.json["type"] == "InvalidValueError"
    assert "nvfp4" in failed.json["error"]
    assert "nvfp4" in failed.err


def test_quiet_prints_nothing_but_errors(microfloat):
    done = microfloat("formats", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert "NAME" in microfloat("formats", "nvpf4", "--quiet").err


def test_an_error_of_the_system_is_a_sentence(microfloat, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    name = tmp_path / ("x" * 300 + ".png")
    done = microfloat("formats", "--plot", name, columns=800)
    done.refuses(f"error: {name}: file name too long.")


def test_a_folder_in_place_of_a_picture_is_named_before_anything_is_printed(microfloat, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "x.png").mkdir()
    done = microfloat("formats", "--plot", tmp_path / "x.png", columns=400)
    done.refuses(f"error: --plot: got {tmp_path}/x.png, needed the name of a file. This is a folder.")
    assert not done.out


def test_a_pipe_gets_whole_lines_without_colours(microfloat):
    text = microfloat("formats").out
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line != line.rstrip()]
    (line,) = (line for line in text.splitlines() if line.startswith("nvfp4_2d"))
    assert line.split() == ["nvfp4_2d", "E2M1", "16x16", "E4M3", "tensor", "two_level", "4.03125"]


@pytest.mark.parametrize("columns", [40, 80, 160])
def test_no_line_is_wider_than_the_terminal(microfloat, columns):
    for command in (["formats"], ["formats", "e4m3", "--values"], ["formats", "encode", "1.7", "--as", "e2m1"]):
        done = microfloat(*command, columns=columns)
        assert max(map(len, done.out.splitlines())) <= columns
        assert "…" not in done.out


def test_a_narrow_terminal_gets_a_row_as_lines(microfloat):
    lines = microfloat("formats", "nvfp4", columns=40).out.splitlines()
    assert "  bits per element  4.5" in lines


def test_cells(capsys):
    assert [decibel(value) for value in (None, float("inf"), 20.456)] == ["-", "exact", "20.46"]
    assert [size(value) for value in (None, 12, 999, 1e6, 1.5e9, 3e15)] == [
        "-", "12 B", "999 B", "1 MB", "1.5 GB", "3e+03 TB"
    ]  # fmt: skip
    assert [words(value) for value in (True, [4, 8], ["a", "b"], (), None)] == ["yes", "4x8", "a, b", "-", "-"]
    output = Output("test")
    output.table("rows", [{"a": 1, "b": None}], [Column("a"), Column("b", "empty")])
    assert "empty" not in capsys.readouterr().out  # a column without a single cell tells nothing
    assert output.document["rows"] == [{"a": 1, "b": None}]


def test_json_has_words_for_figures_that_are_no_numbers():
    import numpy as np

    assert jsonable({"a": [float("inf"), float("nan"), np.float32(0.5), np.int64(2)]}) == {"a": ["inf", "nan", 0.5, 2]}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--json", "formats"], "error: --json: got it before the command, needed it behind."),
        (["-q", "doctor"], "error: -q: got it before the command, needed it behind."),
        (["plan", "model", "--bits", "abc"], "error: Invalid value for '--bits': "),
        (["plan"], "error: Missing argument 'PATH'. Try: microfloat plan --help"),
        (["formulas"], "error: No such command 'formulas'"),
        (["bench", "--devise", "cpu"], "(Possible options: --device)"),
        (["formats", "--plot"], "error: Option '--plot' requires an argument."),
    ],
)
def test_wrong_words_are_answered_as_wrong_values_are(microfloat, words, named):
    done = microfloat(*words, columns=80)
    done.refuses(named)
    assert not done.out
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert "╭" not in done.err


@pytest.mark.parametrize("words", [[], ["formats"], ["convert"], ["doctor"]])
def test_a_flag_takes_no_value(microfloat, words):
    done = microfloat(*words, "--help", columns=90)
    assert done.code == 0
    assert "bool" not in done.out.lower()


FRESH = """
import sys
import time
for name in {hidden!r}:
    sys.modules[name] = None
from microfloat.cli import main
sys.exit(main({words!r}))
"""


def fresh(repository, words, hidden=(), **variables):
    """A command in a fresh process that cannot import `hidden`."""
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), **variables}
    command = [sys.executable, "-W", "error", "-c", FRESH.format(words=words, hidden=list(hidden))]
    return processes.run(command, env=environment)


@pytest.mark.slow("further processes of the command line")
def test_formats_needs_no_framework_and_no_matplotlib(repository):
    pytest.importorskip("typer", reason="typer is not installed")
    hidden = ("torch", "jax", "triton", "matplotlib")
    done = fresh(repository, ["formats", "--json"], hidden)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["formats"]
    done = fresh(repository, ["formats", "--plot", "lines.png"], hidden)
    assert done.returncode == 2
    assert 'pip install ".[plot]"' in done.stderr


@pytest.mark.slow_cases("further processes of the command line", all_but=("typer",))
@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_its_packages_the_command_names_the_extra(repository, missing):
    done = fresh(repository, ["formats"], [missing])
    assert done.returncode == 2
    assert missing in done.stderr
    assert 'pip install ".[cli]"' in done.stderr


HELP = """
import runpy, sys
sys.argv = ["microfloat", "--help"]
try:
    runpy.run_module("microfloat", None, "__main__")
except SystemExit as end:
    print({"torch", "jax", "matplotlib"} & set(sys.modules), end.code)
"""


def test_the_module_runs_and_imports_no_framework(repository):
    pytest.importorskip("typer", reason="typer is not installed")
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "COLUMNS": "80"}
    done = processes.run([sys.executable, "-c", HELP], env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "set() 0"


@pytest.mark.slow_cases("further processes of the command line", all_but=("words1",))
@pytest.mark.parametrize("words", [[], ["convert"]])
def test_help_fits_a_narrow_terminal(repository, words):
    pytest.importorskip("typer", reason="typer is not installed")
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "COLUMNS": "40"}
    done = processes.run([sys.executable, "-m", "microfloat", *words, "--help"], env=environment)
    assert done.returncode == 0, done.stderr
    if not words:  # what each command does is said to its end
        assert "and why." in done.stdout
        assert not any(line.endswith("...") for line in done.stdout.splitlines() if "[ARGS]" not in line)
    # Commands to copy stay whole.
    wide = [line for line in done.stdout.splitlines() if len(line) > 40 and "microfloat convert model" not in line]
    assert wide == []


def test_a_reader_that_leaves_early_is_no_error(repository):
    pytest.importorskip("typer", reason="typer is not installed")
    environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
    words = [sys.executable, "-m", "microfloat", "formats", "e4m3", "--values", "--json"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        try:
            assert process.communicate(timeout=processes.SECONDS)[1] == ""
        finally:
            process.kill()
    assert process.returncode == 0


@pytest.mark.slow_cases("further processes of the command line", all_but=("options0-*",))
@pytest.mark.parametrize(("options", "colours"), [([], True), (["--no-color"], False)])
def test_a_terminal_gets_colours_unless_they_are_not_wanted(repository, options, colours):
    pytest.importorskip("typer", reason="typer is not installed")
    pty = pytest.importorskip("pty", reason="there are no pseudo-terminals here")
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(repository / "src"), "TERM": "xterm", "COLUMNS": "80"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-m", "microfloat", "formats", "nvfp4", *options]
    deadline = time.monotonic() + 60
    text = b""
    # Read while the command writes: a terminal holds a few kilobytes, and some end with an error, some with silence.
    with subprocess.Popen(command, env=environment, stdout=follower, stderr=follower) as process:
        os.close(follower)
        try:
            while True:
                ended = process.poll() is not None
                if select.select([leader], [], [], 0 if ended else 0.1)[0]:
                    try:
                        part = os.read(leader, 65536)
                    except OSError:  # Linux's way to say that the other end is closed
                        break
                    if not part:
                        break
                    text += part
                elif ended:
                    break
                assert time.monotonic() < deadline, f"still running after {len(text)} bytes"
        finally:
            process.kill()
            os.close(leader)
    assert process.returncode == 0, text
    assert b"nvfp4" in text
    assert (b"\x1b[" in text) == colours
