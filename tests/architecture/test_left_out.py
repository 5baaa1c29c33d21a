"""Tests that `make test` leaves to `make test-all` are listed, and the contract is never among them."""

from types import SimpleNamespace

import pytest

from tests.architecture import left_out


def item(nodeid, *arguments, slow=True):
    mark = pytest.mark.slow(*arguments).mark if slow else None
    return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: mark if name == "slow" else None)


QUICK = item("tests/torch/test_x.py::test_quick", slow=False)
SLOW = item("tests/torch/test_x.py::test_slow", "takes a minute")


def test_all_that_was_collected_keeps_the_rules(request):
    assert request.config.stash[left_out.PROBLEMS] == []


def test_reasons_are_counted():
    assert left_out.reasons([QUICK, SLOW, SLOW]) == {"takes a minute": 2}
    assert left_out.problems([QUICK, SLOW, SLOW]) == []


@pytest.mark.parametrize("test", ["contract/test_bytes.py::test_one", "jax/test_every_cast.py::test_every_cast[mxfp8]"])
def test_the_contract_is_never_left_out(test):
    items = [item(f"tests/{test}", "too long"), item(f"tests/{test.split('::')[0]}::test_two", slow=False)]
    (problem,) = left_out.problems(items)
    assert "the contract is thinned out by pairs" in problem
    assert problem.startswith(f"tests/{test}")


def test_the_contract_is_where_the_rule_looks_for_it(repository):
    for place in left_out.CONTRACT:
        path, _, function = place.partition("::")
        assert (repository / path).exists()
        assert not function or f"def {function}(" in (repository / path).read_text()


def test_a_reason_is_given():
    (problem,) = left_out.problems([QUICK, item("tests/torch/test_x.py::test_y")])
    assert "pytest.mark.slow(why)" in problem


def test_every_file_keeps_a_test():
    (problem,) = left_out.problems([SLOW])
    assert problem.startswith("tests/torch/test_x.py: make test runs nothing of it")
    assert left_out.problems([SLOW], whole_files=False) == []
    assert left_out.problems([item("tests/integrations/test_x.py::test_y", "needs a package")]) == []


@pytest.mark.parametrize(
    ("patterns", "count"), [({"all_but": ("mxfp8-*", "nvfp5")}, 2), ({"cases": ("mxfp8-*", "nvfp5")}, 1)]
)
def test_cases_are_named_by_patterns(patterns, count):
    def case(name):
        one = SimpleNamespace(nodeid=f"tests/x.py::test_y[{name}]", callspec=SimpleNamespace(id=name), marks={})
        one.get_closest_marker = one.marks.get
        one.add_marker = lambda added: one.marks.update({added.mark.name: added.mark})
        one.add_marker(pytest.mark.slow_cases("further recipes", **patterns))
        return one

    items = [case(name) for name in ("mxfp8-True", "mxfp4-True", "mxfp4-False")]
    left_out.mark(items)
    assert left_out.reasons(items) == {"further recipes": count}
    assert left_out.problems(items) == ["tests/x.py::test_y: no case has an id like 'nvfp5'"]
    assert left_out.problems(items, whole_files=False) == []
