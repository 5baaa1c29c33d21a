"""Every feature that a release is not made without is named by a test, as ``features M5``."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
MODULES = ("M1", "M2", "M3", "M4", "M5", "M6", "M7", "M8", "M10", "M12", "M13", "M17", "M18")
TRAINING = ("S1", "S2", "S3", "S4", "S5", "S6", "S7", "S8", "S9", "S10", "S11", "S12", "S13", "S14")
COMPILED = ("G1", "G2", "G3", "G4", "G5", "G7")
POLICIES = (
    "P1",
    "P2",
    "P3",
    "P4",
    "P5",
    "P6",
    "P7",
    "P8",
    "P9",
    "P10",
    "P11",
    "P12",
    "P13",
    "P14",
    "P15",
    "P16",
    "P17",
)
RECIPES = (
    *("R1", "R2", "R3", "R4", "R5", "R6", "R8", "R9", "R10", "R11", "R12", "R13"),
    *("R16", "R17", "R18", "R19", "R20", "R21", "R22", "R24", "R25", "R26"),
)
TENSORS = (
    *("Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7", "Q8", "Q9", "Q10"),
    *("Q11", "Q12", "Q13", "Q14", "Q15", "Q16", "Q17"),
)
JAX = (
    *("J1", "J2", "J3", "J4", "J5", "J6", "J7", "J8", "J9", "J10", "J11", "J12", "J13", "J14"),
    *("J15", "J16", "J17", "J18", "J19", "J22", "J23", "J24"),
)
COMMANDS = ("O3", "O4", "O5", "O6", "O7", "O8", "O9", "O10", "O11")
INFERENCE = ("I1", "I2", "I3", "I4", "I5", "I6", "I8", "I9", "I10", "K1", "K2", "K3")
SHARDED = ("D1", "D2", "D3", "D4", "D5", "D6", "D7", "D9", "D11", "D12", "D13")
CHECKPOINTS = ("K4", "K5", "K6", "K7", "K8", "K9", "K10", "U14", "I7")
OTHERS = ("O1", "O2", "U9", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B9", "B10")


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
    "feature",
    [
        *(*POLICIES, *RECIPES, *TENSORS, *MODULES, *TRAINING, *COMPILED, *SHARDED),
        *(*INFERENCE, *CHECKPOINTS, *COMMANDS, *JAX, *OTHERS),
    ],
)
def test_a_test_names_the_feature(named, feature):
    assert feature in named
