"""The rules of the marker `slow`: what `make test` leaves to `make test-all`, why, and what it may not leave out."""

from collections import Counter
from fnmatch import fnmatchcase

import pytest

# The contract of the oracle, torch and JAX: `make test` runs every case of it.
CONTRACT = (
    "tests/contract/",
    "tests/jax/test_every_cast.py::test_every_cast",
    "tests/jax/test_every_cast.py::test_pinned_digests",
)


def mark(items):
    """Mark slow what `mostly_slow` says: the cases of a parametrized test whose ids match none of `keep`."""
    for item in items:
        mostly = item.get_closest_marker("mostly_slow")
        if mostly and not any(fnmatchcase(item.callspec.id, pattern) for pattern in mostly.kwargs["keep"]):
            item.add_marker(pytest.mark.slow(*mostly.args))


def reasons(items):
    """How many of these items are marked slow, by the reason that the marker gives."""
    marks = (item.get_closest_marker("slow") for item in items)
    return Counter(mark.args[0] for mark in marks if mark)


def problems(items, whole_files=True):
    """Sentences about items whose marker breaks a rule; `whole_files` says that no file was collected in part."""
    slow = [item for item in items if item.get_closest_marker("slow")]
    found = []
    for item in slow:
        mark = item.get_closest_marker("slow")
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
            found.append(f"{item.nodeid}: write pytest.mark.slow(why), with one sentence that says what is left out")
        if item.nodeid.startswith(CONTRACT):
            found.append(f"{item.nodeid}: make test runs every case of the contract, this one is marked slow")
    if whole_files:
        files = {item.nodeid.split("::")[0] for item in items}
        quick = {item.nodeid.split("::")[0] for item in items if item not in slow}
        found += [f"{file}: make test runs nothing of it; leave one test of it unmarked" for file in files - quick]
        kept = {}
        for item in items:
            mostly = item.get_closest_marker("mostly_slow")
            for pattern in mostly.kwargs["keep"] if mostly else ():
                test = (item.nodeid.split("[")[0], pattern)
                kept[test] = kept.get(test, False) or fnmatchcase(item.callspec.id, pattern)
        found += [f"{test}: no case has an id like {pattern!r}" for (test, pattern), there in kept.items() if not there]
    return sorted(found)
