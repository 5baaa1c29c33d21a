"""The examples import their own parts as `gpt.*`, as they do when they are run as scripts."""

import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))


@pytest.fixture
def curves():
    """The test looks at the picture of a run; without this fixture none is drawn."""


@pytest.fixture(autouse=True)
def no_curves(request, monkeypatch):
    """Drawing takes half the time of a small run."""
    report = sys.modules.get("gpt.report")
    if report is not None and "curves" not in request.fixturenames:
        monkeypatch.setattr(report, "draw_curves", lambda *_: None)
