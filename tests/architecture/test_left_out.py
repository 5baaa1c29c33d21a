"""What `make test` leaves to `make test-all` is said, and the contract is never part of it."""

from types import SimpleNamespace

import pytest

from tests.architecture import left_out


def item(nodeid, *arguments, slow=True):
    mark = pytest.mark.slow(*arguments).mark if slow else None
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: mark)


QUICK = item("tests/torch/test_x.py::test_quick", slow=False)
SLOW = item("tests/torch/test_x.py::test_slow", "takes a minute")


def test_reasons_are_counted():
    assert left_out.reasons([QUICK, SLOW, SLOW]) == {"takes a minute": 2}
    assert left_out.problems([QUICK, SLOW, SLOW]) == []


@pytest.mark.parametrize("path", ["tests/contract/test_bytes.py", "tests/jax/test_every_cast.py"])
def test_the_contract_is_never_left_out(path):
    items = [item(f"{path}::test_one", "too long"), item(f"{path}::test_two", slow=False)]
    (problem,) = left_out.problems(items)
    assert "every case of the contract" in problem
    assert (path + "::test_one") in problem


def test_the_contract_is_where_the_rule_looks_for_it(repository):
    assert all((repository / path).exists() for path in left_out.CONTRACT)


def test_a_reason_is_given():
    (problem,) = left_out.problems([QUICK, item("tests/torch/test_x.py::test_y")])
    assert "pytest.mark.slow(why)" in problem


def test_every_file_keeps_a_test():
    (problem,) = left_out.problems([SLOW])
    assert problem.startswith("tests/torch/test_x.py: make test runs nothing of it")
    assert left_out.problems([SLOW], whole_files=False) == []
