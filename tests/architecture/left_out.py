"""The rules of the marker `slow`: what `make test` leaves to `make test-all`, why, and what it may not leave out."""

from collections import Counter
from fnmatch import fnmatchcase

import pytest

# The contract of the oracle, torch and JAX: `make test` takes pairs of what cases are (tests/extent.py), of every test.
CONTRACT = (
    "tests/contract/",
    "tests/jax/test_every_cast.py::test_every_cast",
    "tests/jax/test_every_cast.py::test_pinned_digests",
)

# Tests of packages that `make test` does not install: whole files of them may be slow.
INTEGRATIONS = "tests/integrations/"

# How many tests cannot run here, by reason: they are counted, since each of thousands takes a while to be skipped.
HERE = pytest.StashKey[Counter]()

# Of all collected items, the slow ones among them; test_left_out.py fails where there are any.
PROBLEMS = pytest.StashKey[list[str]]()


def slow_cases(item):
    """``(why, patterns, kept)`` of the marker `slow_cases`, or None; `kept` says that the patterns name what stays."""
    marker = item.get_closest_marker("slow_cases")
    if marker is None:
        return None
    (kind, patterns), *more = marker.kwargs.items()
    if len(marker.args) != 1 or more or kind not in ("cases", "all_but"):
        raise ValueError(f"{item.nodeid}: write pytest.mark.slow_cases(why, cases=...) or (why, all_but=...)")
    return marker.args[0], patterns, kind == "all_but"


def is_like(item, patterns):
    """True if the id of a parametrized test's case matches a pattern."""
    return any(fnmatchcase(item.callspec.id, pattern) for pattern in patterns)


def mark(items):
    """Mark slow what `slow_cases` names."""
    for item in items:
        if named := slow_cases(item):
            why, patterns, kept = named
            if is_like(item, patterns) != kept:
                item.add_marker(pytest.mark.slow(why))


def reasons(items):
    """Number of these items that are marked slow, by the reason that the marker gives."""
    marks = (item.get_closest_marker("slow") for item in items)
    return Counter(mark.args[0] for mark in marks if mark)


def problems(items, whole_files=True):
    """Sentences about items whose marker breaks a rule; `whole_files` says that no file was collected in part."""
    marks = [item.get_closest_marker("slow") for item in items]
    found = []
    for item, mark in zip(items, marks, strict=True):
        if mark is None:
            continue
        if len(mark.args) != 1 or not isinstance(mark.args[0], str) or mark.kwargs:
            found.append(f"{item.nodeid}: write pytest.mark.slow(why), with one sentence that says what is left out")
        if item.nodeid.startswith(CONTRACT):
            found.append(f"{item.nodeid}: the contract is thinned out by pairs (tests/extent.py), not by a marker")
    if whole_files:
        files = {item.nodeid.split("::")[0] for item in items}
        quick = {item.nodeid.split("::")[0] for item, mark in zip(items, marks, strict=True) if mark is None}
        found += [
            f"{file}: make test runs nothing of it; leave one test of it unmarked"
            for file in files - quick
            if not file.startswith(INTEGRATIONS)
        ]
        matched = {}
        for item in items:
            _, patterns, _ = slow_cases(item) or (None, (), None)
            for pattern in patterns:
                test = (item.nodeid.split("[")[0], pattern)
                matched[test] = matched.get(test, False) or is_like(item, [pattern])
        found += [f"{test}: no case has an id like {pattern!r}" for (test, pattern), met in matched.items() if not met]
    return sorted(found)
