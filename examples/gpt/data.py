"""Real text that every machine has: the bytes of the running Python's own standard-library sources.

Nothing is downloaded. Files come in sorted order of their path, so one Python version gives one stream; every twentieth
file is held out. A batch is a function of (seed, step) alone, so the data position of a run is its step number.
"""

import hashlib
import os
import sysconfig
from pathlib import Path
from typing import NamedTuple

import numpy as np

from microfloat.errors import MicrofloatError, invalid_value

HELD_OUT_EVERY = 20
# What is installed beside the library, what varies from build to build, and the tests (often packaged separately).
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class Corpus(NamedTuple):
    """Two byte streams, uint8: `train`, and `held_out` from other files; and the SHA-256 of both."""

    train: np.ndarray
    held_out: np.ndarray
    files: int
    digest: str

    def batch(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """Training windows of step `step`, uniformly drawn: int64 [batch, context + 1]."""
        count = count_windows(self.train, context)
        return windows(self.train, np.random.default_rng([seed, step]).integers(0, count, size=batch), context)

    def held_out_batches(self, number: int, batch: int, context: int) -> list[np.ndarray]:
        """`number` evenly spaced held-out windows (fewer where the stream is short), always the same ones."""
        number = min(number, (len(self.held_out) - 1) // context)
        starts = np.linspace(0, count_windows(self.held_out, context) - 1, number).astype(np.int64)
        return [windows(self.held_out, starts[first : first + batch], context) for first in range(0, number, batch)]


def count_windows(stream: np.ndarray, context: int) -> int:
    """Number of places where a window can start."""
    if len(stream) <= context:
        needed = f"less than the {len(stream)} bytes of the text"
        raise invalid_value("--context", context, needed, "Choose a smaller one.")
    return len(stream) - context


def windows(stream: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    """int64 [len(starts), context + 1]."""
    return stream[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def standard_library_files(root: Path) -> list[Path]:
    """The library's ``.py`` files below `root`, in sorted order of their path."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.startswith(SKIPPED_PREFIXES)]
        found += [Path(folder, name) for name in names if not name.startswith(SKIPPED_PREFIXES)]
    return sorted(path for path in found if path.suffix == ".py")


def load_corpus(max_bytes: int, root: Path | None = None) -> Corpus:
    """At most `max_bytes` of the sources below `root`, by default the running Python's library."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    paths = standard_library_files(root)
    if len(paths) < HELD_OUT_EVERY:  # some minimal builds ship only bytecode
        raise MicrofloatError(
            f"found {len(paths)} Python source files in {root}, needed at least {HELD_OUT_EVERY}: this Python was "
            f"installed without its library's sources. Run with another Python."
        )
    sizes = np.cumsum([path.stat().st_size for path in paths])
    texts = [path.read_bytes() for path in paths[: np.searchsorted(sizes, max_bytes, side="right")]]
    held_out = b"".join(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    train = b"".join(text for index, text in enumerate(texts, 1) if index % HELD_OUT_EVERY)
    if not held_out:
        needed = f"at least {sizes[HELD_OUT_EVERY - 1]}: the size of the first {HELD_OUT_EVERY} Python source files"
        raise invalid_value("--corpus-bytes", max_bytes, f"{needed} in {root}, of which the last one is held out")
    digest = hashlib.sha256(train + held_out).hexdigest()
    return Corpus(np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), len(texts), digest)
