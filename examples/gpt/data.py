"""Real text that every machine has: the bytes of the running Python's own standard-library sources.

Nothing is downloaded. Files come in sorted order of their path, so one Python version gives one stream; every twentieth
file is held out. A batch is a function of (seed, step) alone, so the data position of a run is its step number.
"""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

__all__ = ["HELD_OUT_EVERY", "Corpus", "CorpusError", "load_corpus", "standard_library_files"]

HELD_OUT_EVERY = 20
# What is installed beside the library, what varies from build to build, and the tests (often packaged separately).
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


class CorpusError(ValueError):
    """There is no text to train on, or not enough of it."""


@dataclass(frozen=True)
class Corpus:
    """Two byte streams, uint8: `train`, and `held_out` from other files."""

    train: np.ndarray
    held_out: np.ndarray
    files: int

    @cached_property
    def digest(self) -> str:
        """SHA-256 of both streams: two runs with the same digest saw the same text."""
        digest = hashlib.sha256(self.train.tobytes())
        digest.update(self.held_out.tobytes())
        return digest.hexdigest()

    def batch(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """Training windows of step `step`, uniformly drawn: int64 [batch, context + 1]."""
        self._require(self.train, context)
        starts = np.random.default_rng([seed, step]).integers(0, len(self.train) - context, size=batch)
        return _windows(self.train, starts, context)

    def held_out_batches(self, windows: int, batch: int, context: int) -> list[np.ndarray]:
        """`windows` evenly spaced held-out windows (fewer where the stream is short), always the same ones."""
        self._require(self.held_out, context)
        windows = min(windows, (len(self.held_out) - 1) // context)
        starts = np.linspace(0, len(self.held_out) - context - 1, windows).astype(np.int64)
        return [_windows(self.held_out, starts[first : first + batch], context) for first in range(0, windows, batch)]

    @staticmethod
    def _require(stream: np.ndarray, context: int) -> None:
        if len(stream) <= context:
            raise CorpusError(
                f"--context: got {context}, needed less than the {len(stream)} bytes of the text. Choose a smaller one."
            )


def _windows(stream: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return stream[starts[:, None] + np.arange(context + 1)].astype(np.int64)


def standard_library_files(root: Path | None = None) -> list[Path]:
    """The library's ``.py`` files below `root` (default: the running Python's), in sorted order of their path."""
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and not _varies(name)]
        found += [Path(folder, name) for name in names if name.endswith(".py") and not _varies(name)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _varies(name: str) -> bool:
    return name.startswith(_SKIPPED_PREFIXES)


def load_corpus(max_bytes: int, root: Path | None = None) -> Corpus:
    """Read at most `max_bytes` of the sources, every `HELD_OUT_EVERY`-th file held out.

    Raises CorpusError where `max_bytes` is too small for one held-out file, or the library's sources are not installed
    (some minimal builds ship only bytecode).
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    streams: tuple[list[bytes], list[bytes]] = ([], [])
    total = files = 0
    paths = standard_library_files(root)
    for index, path in enumerate(paths):
        content = path.read_bytes()
        if total + len(content) > max_bytes:
            break
        streams[index % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].append(content)
        total, files = total + len(content), files + 1
    train, held_out = (np.frombuffer(b"".join(stream), dtype=np.uint8) for stream in streams)
    if not (len(train) and len(held_out)):
        if len(paths) >= HELD_OUT_EVERY:
            needed = sum(path.stat().st_size for path in paths[:HELD_OUT_EVERY])
            raise CorpusError(
                f"--corpus-bytes: got {max_bytes}, needed at least {needed}: the size of the first {HELD_OUT_EVERY} "
                f"Python source files in {root}, of which the last one is held out."
            )
        raise CorpusError(
            f"found {len(paths)} Python source files in {root}, needed at least {HELD_OUT_EVERY}: this Python was "
            f"installed without its library's sources. Run with another Python."
        )
    return Corpus(train, held_out, files)
