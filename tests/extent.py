"""How much of what tests sample a run takes: `quick` in `make test`, `all` in `make test-all`, or `thorough`."""

import os

_taken = {"extent": "all"}


def begin(markexpr):
    """Find the extent of this run, before tests are imported; HYPOTHESIS_PROFILE takes the place of the marker's."""
    _taken["extent"] = os.environ.get("HYPOTHESIS_PROFILE", "quick" if markexpr == "not slow" else "all")
    return _taken["extent"]


def is_quick():
    """True if `make test-all` runs the rest of what is thinned out here."""
    return _taken["extent"] == "quick"
