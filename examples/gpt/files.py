"""Files that are whole or not there, and the messages for those that cannot be written or read."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from microfloat.errors import CheckpointError, MicrofloatError, invalid_value

__all__ = ["UnwritableError", "check_writable", "unusable", "write_atomically"]

_NEARLY_NOTHING = 1 << 16


class UnwritableError(MicrofloatError, OSError):
    """A file could not be written."""


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`: readers see the old content or the new.

    Raises UnwritableError, with the path and the reason, where that fails.
    """
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UnwritableError(f"cannot write {path}: {_reason(error, path.parent)}.") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(flag: str, path: Path, size: int = 0) -> None:
    """Raise InvalidValueError, which names `flag`, where no file of `size` bytes can be written at `path`.

    Makes the folder that it would lie in.
    """
    needed = "a file that can be written" if size == 0 else "a folder that can be written"
    shown = path if size == 0 else path.parent
    if path.is_dir():
        raise invalid_value(flag, f"{str(shown)!r} (it is a folder)", needed)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise invalid_value(flag, f"{str(shown)!r} ({_reason(error, path.parent)})", needed) from None
    free = shutil.disk_usage(path.parent).free
    if free < size:
        raise invalid_value(
            flag, f"{str(shown)!r} ({free / 1e6:.1f} MB are free there)", f"about {size / 1e6:.1f} MB for its files"
        )


def _reason(error: Exception, folder: Path) -> str:
    """The system's reason in one line; torch does not pass it on when a disk is full."""
    if isinstance(error, FileExistsError):  # `mkdir` met a file
        return os.strerror(errno.ENOTDIR)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    with contextlib.suppress(OSError):
        if shutil.disk_usage(folder).free < _NEARLY_NOTHING:
            return os.strerror(errno.ENOSPC)
    return (str(error).splitlines() or [type(error).__name__])[0]


def unusable(path: Path, reason: str) -> CheckpointError:
    """The error for a checkpoint that cannot be read."""
    return CheckpointError(
        f"--resume: cannot read the checkpoint {path} ({reason}). Delete that file to train this recipe from the start "
        f"(the other recipes keep theirs), or put a good copy in its place."
    )
