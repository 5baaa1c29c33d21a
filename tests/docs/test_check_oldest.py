"""tools/check_oldest.py: each package has one lower bound, and the tests that it runs are there."""

import importlib

import pytest

from tests.docs.test_code_blocks import ROOT


@pytest.fixture
def check_oldest(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("check_oldest")


def numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_every_package_has_a_lower_bound_not_above_the_version_that_is_pinned(check_oldest):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    for one in check_oldest.SETS.values():
        assert all(numbers(check_oldest.oldest(package)) <= numbers(pinned[package]) for package in one.packages)
        assert all((ROOT / "tests" / tests).exists() for tests in one.tests)


def test_a_package_without_a_bound_is_named(check_oldest):
    with pytest.raises(SystemExit, match=r"nothing: got the bounds \[\]"):
        check_oldest.oldest("nothing")
