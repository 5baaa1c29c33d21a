"""examples/equinox_linear.py, where equinox is installed."""

import runpy

import pytest


def test_layers_are_swapped_and_train(repository, capsys):
    pytest.importorskip("equinox", reason="equinox is not installed")
    runpy.run_path(str(repository / "examples" / "equinox_linear.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("loss ")
    assert "nan" not in printed
