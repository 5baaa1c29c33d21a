"""Writer of safetensors files: shards laid out before any data exists, each finished by one rename.

The layout of every shard, its header included, follows from names, dtypes and shapes alone. Tensors may therefore be
written in any order and in pieces, and an interrupted writer finds out by the headers which shards are complete.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from microfloat.checkpoint.container import DTYPES
from microfloat.errors import CheckpointError, invalid_type, invalid_value

INDEX = "model.safetensors.index.json"
# Names of dtypes in a file. FP4 and FP6 codes are bytes: readers refuse the dtypes F4 and F6.
_NAMES = {dtype.name: name for name, (bits, dtype) in DTYPES.items() if bits >= 8}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PIECE = 1 << 26  # bytes of a write


class Entry(NamedTuple):
    """One tensor of a file: its name, NumPy dtype and shape."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @staticmethod
    def of(name: str, array: np.ndarray) -> "Entry":
        """The entry of an array, whose memory is not looked at."""
        if array.dtype.name not in _NAMES:
            raise invalid_type(name, array.dtype, "a dtype of safetensors: " + ", ".join(_NAMES))
        return Entry(name, array.dtype, array.shape)

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


@dataclass(frozen=True)
class Shard:
    """One file: its name, its entries in the order of the file, the first byte of each, and the header."""

    name: str
    entries: tuple[Entry, ...]
    header: bytes = field(repr=False)
    starts: Mapping[str, int] = field(repr=False)
    size: int


def byte_count(max_shard_size: int | str) -> int:
    """A number of bytes given as an int or as text such as "5GB" (decimal) or "2GiB" (binary)."""
    number, unit = str(max_shard_size).strip(), ""
    if isinstance(max_shard_size, str):
        digits = number.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
        number, unit = digits.strip(), number[len(digits) :].upper()
    try:
        count = int(float(number) * _UNITS[unit])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1 or isinstance(max_shard_size, bool):
        needed = "a positive number of bytes, such as 5000000000, '5GB' or '2GiB'"
        raise invalid_value("max_shard_size", repr(max_shard_size), needed)
    return count


def plan_shards(groups: Iterable[Sequence[Entry]], limit: int, metadata: Mapping[str, str]) -> list[Shard]:
    """Entries laid out over files of at most `limit` bytes; a group, the tensors of one module, is never divided.

    A single group above the limit makes a file of its own. Raises CheckpointError for a name that occurs twice.
    """
    files: list[list[Entry]] = [[]]
    filled = 0
    names: set[str] = set()
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1] += group
        filled += size
        for entry in group:
            if entry.name in names:
                raise CheckpointError(f"Two tensors have the name {entry.name!r}; a file holds each name once.")
            names.add(entry.name)
    count = len(files)
    named = (
        ["model.safetensors"]
        if count == 1
        else [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    )
    return [lay_out(name, entries, metadata) for name, entries in zip(named, files, strict=True)]


def lay_out(name: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Shard:
    """One file: wide dtypes come first, so that every tensor is aligned without gaps, which the format forbids."""
    ordered = tuple(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)))
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    starts, end = {}, 0
    for entry in ordered:
        starts[entry.name] = end
        table[entry.name] = {
            "dtype": _NAMES[entry.dtype.name], "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes],
        }  # fmt: skip
        end += entry.nbytes
    try:
        text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{name}: the name {_around(error)} has a character that UTF-8 cannot hold, and safetensors cannot store. "
            "Rename the tensor."
        ) from None
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(
        name, ordered, header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
    )


def _around(error: UnicodeEncodeError) -> str:
    """The word in which a text cannot be encoded, with its characters as escapes."""
    before, after = error.object[: error.start], error.object[error.start :]
    return ascii(before.rpartition('"')[2] + after.partition('"')[0])


def index_of(shards: Sequence[Shard]) -> dict:
    """The index of several files, as transformers writes and reads it."""
    placed = {entry.name: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


class ShardFile:
    """A shard under a temporary name, filled by `write`; leaving the context without an error gives it its name.

    The disk space is claimed at the start, so that a full disk is found before any work is done.
    """

    def __init__(self, folder: Path, shard: Shard, name: str | None = None) -> None:
        self.shard = shard
        self.path = folder / (name or shard.name)
        self._temporary = self.path.with_name(self.path.name + ".tmp")
        self._entries = {entry.name: entry for entry in shard.entries}
        self._file = -1

    def __enter__(self) -> "ShardFile":
        with _disk(self.path, self.shard.size):
            self._file = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                if self.shard.size:
                    _allocate(self._file, self.shard.size)
                self._put(self.shard.header, 0)
            except BaseException:  # what was claimed of a full disk is given back
                os.close(self._file)
                self._temporary.unlink(missing_ok=True)
                raise
        return self

    def write(self, name: str, array: np.ndarray, start: int = 0) -> None:
        """Put data of a tensor, C order, `start` bytes after its beginning."""
        entry = self._entries[name]
        assert array.dtype == entry.dtype, (name, array.dtype, entry)
        assert start + array.nbytes <= entry.nbytes, (name, start, array.shape, entry)
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            with _disk(self.path, self.shard.size):
                self._put(flat.data, self.shard.starts[name] + start)

    def _put(self, data: bytes | memoryview, start: int) -> None:
        view = memoryview(data)
        while len(view):
            count = os.pwrite(self._file, view[:_PIECE], start)
            view, start = view[count:], start + count

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                with _disk(self.path, self.shard.size):
                    os.fsync(self._file)
        finally:
            os.close(self._file)
        if kind is None:
            os.replace(self._temporary, self.path)
            sync_folder(self.path.parent)
        else:
            self._temporary.unlink(missing_ok=True)


def is_complete(folder: Path, shard: Shard) -> bool:
    """True where the finished file of a shard is there: its size and its header are those of the plan."""
    try:
        with open(folder / shard.name, "rb") as file:
            return os.fstat(file.fileno()).st_size == shard.size and file.read(len(shard.header)) == shard.header
    except FileNotFoundError:
        return False


def write_json(path: Path, data: object) -> None:
    """Write a JSON file under a temporary name, then rename it."""
    try:
        text = json.dumps(data, indent=2, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(
            f"{path.name}: {_around(error)} has a character that UTF-8 cannot hold. Write the text without it."
        ) from None
    write_bytes(path, text + b"\n")


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, then rename it."""
    temporary = path.with_name(path.name + ".tmp")
    with _disk(path, len(data)), open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file so that it survives a power failure as the others do."""
    with _disk(path, source.stat().st_size), open(source, "rb") as old, open(path, "wb") as new:
        shutil.copyfileobj(old, new)
        new.flush()
        os.fsync(new.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power failure, where the system can open folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def check_space(folder: Path, needed: int) -> None:
    """Raise CheckpointError where the disk of `folder` has less than `needed` bytes left."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise _disk_full(folder, needed, free)


def _disk_full(path: Path, needed: int, free: int | None) -> CheckpointError:
    left = "" if free is None else f", {free / 1e9:.2f} GB are free"
    return CheckpointError(
        f"{path}: the disk is full: {needed / 1e9:.2f} GB are needed{left}. Free some space and repeat the call, "
        "which continues with the files that are complete, or choose another destination."
    )


class _disk:
    """Turns the system's "no space" and "quota exceeded" into a CheckpointError that says what is needed."""

    def __init__(self, path: Path, needed: int) -> None:
        self.path, self.needed = path, needed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            try:
                free = shutil.disk_usage(self.path.parent).free
            except OSError:
                free = None
            raise _disk_full(self.path, self.needed, free) from error


def _allocate(file: int, size: int) -> None:
    """Claim disk space; file systems that cannot do that claim it write by write."""
    try:
        os.posix_fallocate(file, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
        os.ftruncate(file, size)
