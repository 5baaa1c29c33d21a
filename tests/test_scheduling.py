"""Under pytest-xdist a test that takes its process down fails by its name, the others run, and the run ends."""

import os
import sys

import pytest

from tests import processes

pytest.importorskip("xdist", reason="pytest-xdist is not installed")

CONFTEST = """
from tests import scheduling

def pytest_xdist_make_scheduler(config, log):
    return scheduling.Groups(config, log)
"""
WATCHED = """
def pytest_configure(config):
    scheduling.SILENCE = 1
    if config.option.numprocesses:
        config.pluginmanager.register(scheduling.Watch())
"""
# Ends with the process that runs it all: pytest-xdist would wait another five seconds for the test.
BLOCKED = """
import os, time

def test_blocked():
    runs_it_all = os.getppid()
    while os.getppid() == runs_it_all:
        time.sleep(0.05)
    os._exit(1)
"""
BRIEF = """
def pytest_configure(config):
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(scheduling.Brief())
"""
OUTCOMES = """
import pytest

@pytest.fixture
def broken():
    assert 1 == 2, "set-up"

@pytest.fixture
def left():
    yield
    assert 1 == 2, "tear-down"

def test_passes(): pass
def test_fails(): assert 1 == 2, "call"
def test_without_set_up(broken): pass
def test_without_tear_down(left): pass
def test_is_skipped(): pytest.skip("no reason")
@pytest.mark.skip("none either")
def test_is_skipped_before(): pass
@pytest.mark.xfail
def test_is_known_to_fail(): assert 1 == 2
"""
GROUP = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.xdist_group("{number}")

@pytest.mark.parametrize("case", range({cases}))
def test_of_group(case):
    time.sleep(0.02)
    flag = pathlib.Path(__file__).with_name("crashed")
    if ({number}, case) == {crash} and not flag.exists():
        flag.touch()
        os._exit(1)
"""


FROM_THE_END = """
def pytest_configure(config):
    if hasattr(config, "workerinput") and scheduling.imports_from_the_end(config):
        config.pluginmanager.register(scheduling.FromTheEnd())
"""
RECORDED = """
import os, pathlib

with open(pathlib.Path(__file__).parents[1] / os.environ["PYTEST_XDIST_WORKER"], "a") as imported:
    imported.write(pathlib.Path(__file__).stem[-1])

def test_first(): pass
def test_second(): pass
"""


def run(folder, repository):
    """pytest over two processes on the tests in a folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = str(repository)
    options = "-n 2 --dist loadgroup --no-loadscope-reorder --max-worker-restart 1"
    quick = "-p no:cacheprovider -p no:hypothesispytest --rootdir ."
    command = [sys.executable, "-m", "pytest", *options.split(), *quick.split(), "-c", os.devnull, "."]
    return processes.run(command, seconds=60, env=environment, cwd=folder)


@pytest.mark.slow("a run of pytest inside of another")
def test_what_went_wrong_anywhere_is_told_briefly(tmp_path, repository) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST + BRIEF)
    (tmp_path / "test_outcomes.py").write_text(OUTCOMES)
    ended = run(tmp_path, repository)
    assert ended.returncode == 1
    assert "1 failed, 2 passed, 2 skipped, 1 xfailed, 2 errors" in ended.stdout
    for said in ("AssertionError: call", "AssertionError: set-up", "AssertionError: tear-down"):
        assert said in ended.stdout
    assert "[100%]" in ended.stdout


@pytest.mark.slow("a run of pytest in processes of its own")
def test_the_second_process_imports_from_the_end_and_reports_the_same_order(tmp_path, repository) -> None:
    """Otherwise pytest-xdist refuses to run anything."""
    (tmp_path / "conftest.py").write_text(CONFTEST + FROM_THE_END)
    for path in ("one/test_a", "one/test_b", "two/test_c", "two/test_d"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / f"{path}.py").write_text(RECORDED)
    ended = run(tmp_path, repository)
    assert (ended.returncode, "8 passed" in ended.stdout) == (0, True), ended.stdout
    assert (tmp_path / "gw0").read_text() == "abcd"
    assert (tmp_path / "gw1").read_text() == "dcba"


@pytest.mark.slow("places of a crash, one run of pytest for each")
@pytest.mark.parametrize("crash", [(6, 2), (8, 0)], ids=["late", "the last"])
def test_the_run_ends_after_a_process_was_replaced(tmp_path, repository, crash) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for number in range(1, 9):
        cases = 1 if number == 8 else 4
        (tmp_path / f"test_{number}.py").write_text(GROUP.format(number=number, cases=cases, crash=crash))
    ended = run(tmp_path, repository)
    assert ended.returncode == 1
    number, case = crash
    assert f"FAILED test_{number}.py::test_of_group[{case}]@{number}" in ended.stdout
    assert "1 failed, 29 passed" in ended.stdout  # 7 groups of 4 and one of 1; the test that failed was tried once more


def test_a_run_of_which_nothing_is_heard_ends(tmp_path, repository) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST + WATCHED)
    (tmp_path / "test_blocked.py").write_text(BLOCKED)
    ended = run(tmp_path, repository)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr
    assert "xdist/dsession.py" in ended.stderr
