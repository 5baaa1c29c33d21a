"""Settings of every test. torch and jax are imported by the tests that need them, never here."""

import functools
import gc
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from tests import extent
from tests.architecture import left_out
from tests.bounds import Bound

# How many tests were left out, by reason.
LEFT_OUT = pytest.StashKey[Counter]()

if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores: one thread each. Read by torch, NumPy and XLA when they are first imported.
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(variable, "1")
    # And the memory of a GPU, three quarters of which the first process with JAX would take.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


# Dynamo has Python's collector run after each function that it compiles. Read when torch is first imported.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")


def _measure_no_guards():
    """Dynamo measures how long the guards of a function take, for its log, once it has emptied the CPU's caches.

    That is 30 ms for each function that is compiled. Where Dynamo measures nothing, nothing changes.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda root, scope, iterations: 0.0


def _look_for_no_constants():
    """Hypothesis parses all of the library for constants, one of which it draws in place of one value in twenty.

    That is 2 s in each process, for five examples of a test. Where it looks for none, nothing changes.
    """
    from hypothesis.internal.conjecture import providers

    found = getattr(providers, "_local_constants", None)
    if found is not None:
        providers._get_local_constants = lambda: found


def _wait_for_no_disk():
    """Files of checkpoints that are written need not survive a power failure, for which each waits two or three times.

    Other processes, and `make test-all`, do wait.
    """
    os.fsync = lambda file: None


def _compile_equal_programs_once(config):
    """XLA programs that several tests compile are kept for the rest of the run; on CPUs, where most of them run.

    In a folder for this process and those that it starts: JAX writes files in place, where another process might read
    half of one. A limit of the folder's size would have JAX look through all of them for each new one.
    """
    starts_workers = getattr(config.option, "numprocesses", None)
    if starts_workers or "JAX_COMPILATION_CACHE_DIR" in os.environ or shutil.which("nvidia-smi"):
        return
    folder = tempfile.TemporaryDirectory(prefix="microfloat-xla-", ignore_cleanup_errors=True)
    config.add_cleanup(folder.cleanup)
    os.environ.update(
        JAX_COMPILATION_CACHE_DIR=folder.name,
        JAX_COMPILATION_CACHE_MAX_SIZE="-1",
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )


def pytest_configure(config):
    config.stash[LEFT_OUT], config.stash[left_out.HERE] = Counter(), Counter()
    profile = extent.begin(config.option.markexpr)
    _compile_equal_programs_once(config)
    config.pluginmanager.register(Bound())
    if extent.is_quick():
        _wait_for_no_disk()
    if getattr(config.option, "numprocesses", None):
        from tests.scheduling import Watch

        config.pluginmanager.register(Watch())
    from tests.scheduling import FromTheEnd, imports_from_the_end

    if imports_from_the_end(config):
        config.pluginmanager.register(FromTheEnd())
    # Files of results and tables of durations are made of all reports, and -v says when a test begins.
    wants_all = config.option.xmlpath or config.option.durations is not None or config.option.verbose > 0
    if hasattr(config, "workerinput") and not wants_all:
        from tests.scheduling import Brief

        config.pluginmanager.register(Brief())
    try:
        from hypothesis import HealthCheck, settings
    except ModuleNotFoundError:  # an environment that is already there (make test-installed) may run a part without it
        return
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large]
    for name, examples in (("quick", 5), ("all", 30)):
        settings.register_profile(
            name, deadline=None, derandomize=True, max_examples=examples, suppress_health_check=quiet
        )
    settings.register_profile(
        "thorough", deadline=None, max_examples=1000, suppress_health_check=quiet, print_blob=True
    )
    settings.load_profile(profile)
    if profile == "quick":
        _look_for_no_constants()


def _why_no_gpu():
    """The reason why GPU tests cannot run here, or None where they can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _sort_by_effort(items):
    """Tests that compile as users do, after the others of their file: with another effort JAX makes everything anew."""
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (files[item.path], item.get_closest_marker("as_users_compile") is not None))


def _put_long_files_first(items):
    """Tests of torch, whose files take longest, before the others: no process is left with one while others wait."""
    items.sort(key=lambda item: "torch" not in item.path.parts)


@functools.cache
def _group_of(path, root):
    """One process runs a file: others would make its fixtures and compile its programs once more."""
    return path.relative_to(root).as_posix()


def _leave_out_without_gpu(config, items):
    """Tests that need a GPU are counted where there is none: they are a thousand, and each takes a while to skip."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _why_no_gpu() if marked else None
    if reason:
        folders = Counter(item.path.parent.relative_to(config.rootpath).as_posix() for item in marked)
        config.stash[left_out.HERE].update(
            {f"{folder}: needs a CUDA device, {reason}": n for folder, n in folders.items()}
        )
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    left_out.mark(items)
    _sort_by_effort(items)
    _put_long_files_first(items)
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(_group_of(item.path, config.rootpath)))
    # A path with "::" collects a part of a file, of which nothing can be said.
    config.stash[left_out.PROBLEMS] = left_out.problems(items, not any("::" in argument for argument in config.args))
    _leave_out_without_gpu(config, items)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session):
    """Python's collector would look through all tests again and again while they become more; none is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_runtest_setup(item):
    _measure_no_guards()


def pytest_collection_finish(session):
    """Refuse versions under which pytest-xdist scatters the tests of a group, which then make everything twice.

    Modules and collected tests live as long as the process: Python's collector looks at them no more, and seldom at
    the rest. It takes an eighth of the time of tests that trace programs otherwise.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
    grouped = next((item for item in session.items if item.get_closest_marker("xdist_group")), None)
    if session.config.getoption("loadgroup", False) and grouped is not None and "@" not in grouped.nodeid:
        raise pytest.UsageError("this pytest-xdist groups no tests under this pytest: install those of constraints.txt")


def pytest_deselected(items):
    # `-k` deselects tests of both kinds, `-m "not slow"` nothing but slow ones.
    if all(item.get_closest_marker("slow") for item in items):
        items[0].config.stash[LEFT_OUT].update(left_out.reasons(items))


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = [dict(session.config.stash[key]) for key in (LEFT_OUT, left_out.HERE)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from tests.scheduling import Groups

    return Groups(config, log) if config.getvalue("dist") == "loadgroup" else None


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take the counts of a pytest-xdist process; all of them collect, and leave out, the same tests."""
    for key, counts in zip(
        (LEFT_OUT, left_out.HERE), getattr(node, "workeroutput", {}).get("left out", ()), strict=False
    ):
        node.config.stash[key] |= Counter(counts)


def pytest_terminal_summary(terminalreporter):
    """Report what `make test` leaves out, and what outgrew the house's size caps: remarks, not failures."""
    for key, title in ((LEFT_OUT, "left to make test-all"), (left_out.HERE, "left out here")):
        counts = terminalreporter.config.stash[key]
        if counts:
            terminalreporter.section(f"{title}: {sum(counts.values())} tests")
            for reason, count in sorted(counts.items(), key=lambda row: -row[1]):
                terminalreporter.line(f"{count:5d}  {reason}")
    properties = [one for report in terminalreporter.stats.get("passed", []) for one in report.user_properties]
    rows = [row for name, row in properties if name == "size cap"]
    if rows:
        terminalreporter.section("size caps (a remark, not a failure)")
        for row in rows:
            terminalreporter.line(row)


@pytest.fixture(scope="session")
def repository():
    """The repository's root folder."""
    return Path(__file__).parents[1]


@pytest.fixture
def fresh_python(repository, tmp_path):
    """Run a piece of code in a new interpreter that sees the sources; returns the finished process."""
    from tests import processes

    def run(code, *arguments):
        environment = {**os.environ, "PYTHONPATH": str(repository / "src")}
        command = [sys.executable, "-W", "error", "-c", code, *arguments]
        return processes.run(command, cwd=tmp_path, env=environment)

    return run
