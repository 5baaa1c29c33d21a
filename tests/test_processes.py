"""Processes that tests start do not outlive the one that started them."""

import os
import sys
import time
from pathlib import Path

import pytest

from tests import processes

STARTS_ONE = """
import os
from tests import processes

print(processes.other_process()(os.getpid), flush=True)
os._exit(0)
"""


def lives(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow("a process that starts others and is killed")
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="there is no /proc to look for a process in")
def test_a_process_ends_with_one_that_is_killed(repository) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (repository / "src", repository)))}
    ended = processes.run([sys.executable, "-c", STARTS_ONE], env=environment)
    assert ended.returncode == 0, ended.stderr
    waited_until = time.monotonic() + 30
    while lives(int(ended.stdout)) and time.monotonic() < waited_until:
        time.sleep(0.05)
    assert not lives(int(ended.stdout))


def path_of_the_library() -> str:
    import microfloat

    return microfloat.__file__


def test_a_process_imports_the_library_from_where_this_one_has_it() -> None:
    assert processes.other_process()(path_of_the_library) == path_of_the_library()
