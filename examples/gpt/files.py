"""Files that are whole or not there, and the message for those that are not."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from microfloat.errors import CheckpointError

__all__ = ["unusable", "write_atomically"]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`: readers see the old content or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def unusable(path: Path, reason: str) -> CheckpointError:
    """The error for a checkpoint that cannot be read."""
    return CheckpointError(
        f"--resume: cannot read the checkpoint {path} ({reason}). Delete that file to train this recipe from the start "
        f"(the other recipes keep theirs), or put a good copy in its place."
    )
