"""Every feature that a release is not made without is named by a test of torch, as ``features M5``."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
MODULES = ("M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8", "M10", "M12", "M13", "M17", "M18")
TRAINING = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S9", "S10", "S11", "S12", "S13", "S14")
COMPILED = ("G1", "G2", "G3", "G4", "G5", "G7")
TENSORS = ("Q3", "Q4", "Q5", "Q7", "Q8", "Q15")
COMMANDS = ("O3", "O4", "O5", "O6", "O7", "O8", "O9", "O10", "O11")
INFERENCE = ("I1", "I2", "I3", "I4", "I5", "I6", "I8", "I9", "I10", "K3")
SHARDED = ("D1", "D2", "D3", "D4", "D5", "D6", "D7", "D9", "D11", "D12", "D13")
CHECKPOINTS = ("K4", "K5", "K6", "K7", "K8", "K9", "K10", "U14", "I7")
OTHERS = ("O1", "O2", "U9", "P14", "P17", "J4", "J13", "J14", "J19", "J22", "J23")


@pytest.fixture(scope="module")
def named():
    """The features that tests name."""
    found = set()
    for path in TESTS.rglob("*.py"):
        if path != Path(__file__):
            text = path.read_text(encoding="utf-8")
            for listed in re.findall(r"[Ff]eatures ((?:[A-Z]\d+(?:, | and | to )?)+)", text):
                numbers = re.findall(r"[A-Z]\d+", listed)
                found |= set(numbers)
                for first, last in re.findall(r"([A-Z]\d+) to ([A-Z]\d+)", listed):
                    found |= {f"{first[0]}{number}" for number in range(int(first[1:]), int(last[1:]) + 1)}
    return found


@pytest.mark.parametrize(
    "feature", [*MODULES, *TRAINING, *COMPILED, *TENSORS, *COMMANDS, *INFERENCE, *SHARDED, *CHECKPOINTS, *OTHERS]
)
def test_a_test_names_the_feature(named, feature):
    assert feature in named
