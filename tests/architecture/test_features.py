"""The codes that tests name, as ``Features M5``, are the rows of docs/features.md, each with its tests."""

import importlib

import pytest


@pytest.fixture(scope="module")
def table(repository):
    """The tool that fills the page."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(repository / "tools")
        return importlib.import_module("features_table")


def test_every_feature_is_shown_by_the_tests_that_its_row_lists(table):
    """A release is not made without them."""
    rows, found = table.rows_of_page(), table.files_of_features()
    assert len(rows) >= 165
    gone = {code: files for code, files in rows.items() if not files or not set(files) <= set(found.get(code, []))}
    assert not gone, f"no test shows them, or another file does; run: python tools/features_table.py --write\n{gone}"


def test_every_code_that_a_test_names_has_a_row(table):
    unknown = table.files_of_features().keys() - table.rows_of_page().keys()
    assert not unknown, f"docs/features.md says nothing about {sorted(unknown)}"


def test_a_range_of_codes_is_read_as_all_of_them(table, monkeypatch, tmp_path):
    (tmp_path / "tests").mkdir()
    named = "Features " + "Z1, Z3 to Z5 and\n    Z9."  # in two parts, so that this file names none of them
    (tmp_path / "tests" / "test_of_it.py").write_text(f'"""{named}"""')
    monkeypatch.setattr(table, "ROOT", tmp_path)
    assert sorted(table.files_of_features()) == ["Z1", "Z3", "Z4", "Z5", "Z9"]
