"""The examples import their own parts as `gpt.*`, as they do when they are run as scripts."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))
