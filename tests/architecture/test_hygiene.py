"""No large files, no paths of somebody's machine, no hosts of package registries, no test that may wait for ever."""

import ast
import re
import shutil

import pytest

from tests import processes

LARGEST = 1_000_000  # bytes, outside tests/golden
# Written so that this file does not match itself.
MACHINE_PATH = re.compile(
    r"""(?:(?<=file://)|(?<![\w.~$}/-]))  # the beginning of a path, not a part of a longer one or of an address
    (?:/(?:home|Users|root|work|opt|mnt|private|scratch)/[\w.-]+
    |  /tmp/[\w-]*(?:venv|bash|notes)
    |  [A-Z]:\\Users\\)""",
    re.VERBOSE,
)
REGISTRY_HOST = re.compile(r"pypi\.(?:org)|files\.python(?:hosted)|registry\.npm(?:js)|download\.py(?:torch)")
# Prose may name them in a sentence about what they are; nothing does so far.
ALLOWED: dict[str, str] = {}


def offences(text):
    """Yield (line number, what) of each machine path and registry host in `text`."""
    for number, line in enumerate(text.splitlines(), start=1):
        for pattern in (MACHINE_PATH, REGISTRY_HOST):
            found = pattern.search(line)
            if found:
                yield number, found[0]


@pytest.fixture(scope="module")
def tracked(repository):
    """Files under version control, as paths; and what is about to be (untracked, not ignored)."""
    if shutil.which("git") is None or not (repository / ".git").exists():
        pytest.skip("not a git checkout, or git is not installed")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    done = processes.run(command, cwd=repository)
    if done.returncode != 0:
        pytest.skip(f"git ls-files does not answer: {done.stderr.strip()}")
    files = [repository / name for name in done.stdout.split("\0") if name]
    return [path for path in files if path.is_file()]


def test_no_large_files(tracked, repository):
    golden = repository / "tests" / "golden"
    large = [
        f"{path.relative_to(repository)}: {path.stat().st_size} bytes"
        for path in tracked
        if not path.is_relative_to(golden) and path.stat().st_size > LARGEST
    ]
    assert not large, "\n".join(large)


def test_no_machine_paths_and_no_registry_hosts(tracked, repository):
    rows = []
    for path in tracked:
        name = path.relative_to(repository).as_posix()
        content = path.read_bytes()
        if b"\0" in content[:8192] or name in ALLOWED:
            continue
        rows += [f"{name}:{line}: {what}" for line, what in offences(content.decode(errors="replace"))]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    "path", ["home/ann/x", "root/.cache", "work/main/x.py", "Users/ann/x", "tmp/venv0/bin", "opt/wheels"]
)
@pytest.mark.parametrize("before", ["", "see ", '"', "file://", "("])
def test_a_machine_path_is_found(before, path):
    assert list(offences(f"{before}/{path}"))


def test_hints_install_from_a_checkout(tracked, repository):
    """No package index has microfloat: whoever takes the name there would own whoever follows the hint."""
    named = re.compile(r"pip install (?:-\S+ )*[\"']?micro" + r"float\b|\bmicro" + r"float\[[a-z]")
    assert all(map(named.search, ['pip install "micro' + 'float[cli]"', "pip install -U micro" + "float"]))
    rows = [
        f"{path.relative_to(repository)}:{number}: {line.strip()}"
        for path in tracked
        if path.suffix in (".py", ".md", ".toml") and path.name != "CHANGELOG.md"
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if named.search(line)
    ]
    assert not rows, "write errors.install_hint(extra):\n" + "\n".join(rows)


def test_a_registry_host_is_found():
    assert list(offences("https://" + "pypi" + ".org/simple"))


@pytest.mark.parametrize(
    "text",
    ["docs/opt/plan.md", "https://example.com/home/page", "$HOME/opt/x", "./opt/x", "a/opt/b", "the /tmp folder"],
)
def test_harmless_text_passes(text):
    assert not list(offences(text))


def talking(source):
    """Yield (line number, what) of each print, and of each logger of another name or with a handler."""
    names = ("print", "getLogger", "addHandler", "basicConfig")
    for node in ast.walk(ast.parse(source)) if any(name in source for name in names) else ():
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            is_ours = name == "getLogger" and [ast.unparse(one) for one in node.args] == ["'microfloat'"]
            if name in names and not is_ours:
                yield node.lineno, name


def test_the_library_speaks_through_one_logger_without_handlers(repository):
    """Features B10. The command line prints."""
    sources = repository / "src" / "microfloat"
    rows = [
        f"{path.relative_to(repository)}:{line}: {what}"
        for path in sorted(sources.rglob("*.py"))
        if not path.is_relative_to(sources / "cli")
        for line, what in talking(path.read_text(encoding="utf-8"))
    ]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize(
    "source", ["print(1)", "logging.getLogger(__name__)", "logging.basicConfig()", "log.addHandler(one)"]
)
def test_talk_is_found(source):
    assert [what for _, what in talking(source)]


STARTS, WAITS = {"run", "call", "check_call", "check_output"}, {"join", "communicate", "result"}


def unbounded_waits(source):
    """Yield (line number, call) of each wait for a process or a thread that may last for ever."""
    may_wait = "subprocess" in source or any(f".{name}()" in source for name in WAITS)
    for node in ast.walk(ast.parse(source)) if may_wait else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, words = node.func.attr, {word.arg for word in node.keywords}
            starts = name in STARTS and isinstance(node.func.value, ast.Name) and node.func.value.id == "subprocess"
            if (starts and "timeout" not in words) or (name in WAITS and not node.args and not words):
                yield node.lineno, name


def test_no_test_waits_for_ever(repository):
    """tests/processes.py has waits that end; its own without a bound is for a process that it has killed."""
    rows = [
        f"{path.relative_to(repository)}:{line}: {call} without a bound of time"
        for path in sorted((repository / "tests").rglob("*.py"))
        if path.name != "processes.py"
        for line, call in unbounded_waits(path.read_text())
    ]
    assert not rows, "\n".join(rows)


@pytest.mark.parametrize("source", ["subprocess.run(['x'])", "thread.join()", "future.result()"])
def test_an_unbounded_wait_is_found(source):
    assert list(unbounded_waits(source))
