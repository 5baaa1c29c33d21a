"""Measurements, a row per target id: `python -m benchmarks --help`. Results are kept in benchmarks/results."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

if importlib.util.find_spec("microfloat") is None:  # a checkout that is not installed
    sys.path.insert(0, str(ROOT / "src"))
