"""Writer of safetensors files: shards laid out before any data exists, each finished by one rename.

The layout of every shard, its header included, follows from names, dtypes and shapes alone. Tensors may therefore be
written in any order and in pieces, and an interrupted writer finds out by the headers which shards are complete.
"""

import contextlib
import errno
import json
import os
import shutil
import string
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from microfloat.checkpoint.container import DTYPES, METADATA
from microfloat.errors import CheckpointError, invalid_type, invalid_value

INDEX = "model.safetensors.index.json"
# Names of dtypes in a file. FP4 and FP6 codes are bytes: readers refuse the dtypes F4 and F6.
_NAMES = {dtype.name: name for name, (bits, dtype) in DTYPES.items() if bits >= 8}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PIECE = 1 << 26  # bytes of a write
# Writes data of a tensor, C order, so many bytes after its beginning: put(name, array, start).
Put = Callable[[str, np.ndarray, int], None]


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
    text = str(max_shard_size).strip()
    digits = text.rstrip(string.ascii_letters)
    try:
        count = int(float(digits) * _UNITS[text[len(digits) :].upper()])
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1 or isinstance(max_shard_size, bool):
        needed = "a positive number of bytes, such as 5000000000, '5GB' or '2GiB'"
        raise invalid_value("max_shard_size", repr(max_shard_size), needed)
    return count


def plan_shards(
    groups: Iterable[Sequence[Entry]], limit: int, metadata: Mapping[str, str], single: str = ""
) -> list[Shard]:  # fmt: skip
    """Entries over files of at most `limit` bytes, each group in one, or all in the file `single`.

    Raises CheckpointError for a name that occurs twice, and for the one that the format has for metadata.
    """
    files: list[list[Entry]] = [[]]
    filled = 0
    for group in groups:
        size = sum(entry.nbytes for entry in group)
        if files[-1] and filled + size > limit and not single:
            files.append([])
            filled = 0
        files[-1] += group
        filled += size
    for name, count in Counter(entry.name for entries in files for entry in entries).items():
        if count > 1:
            raise CheckpointError(f"Two tensors have the name {name!r}; a file holds each name once.")
        if name == METADATA:
            raise CheckpointError(f"A tensor has the name {name!r}, which safetensors keeps for itself. Rename it.")
    count = len(files)
    names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [single or "model.safetensors"]
    return [lay_out(name, entries, metadata) for name, entries in zip(names, files, strict=True)]


def lay_out(name: str, entries: Sequence[Entry], metadata: Mapping[str, str]) -> Shard:
    """One file: wide dtypes come first, so that every tensor is aligned without gaps, which the format forbids."""
    ordered = tuple(sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name)))
    table: dict[str, object] = {METADATA: dict(sorted(metadata.items()))} if metadata else {}
    starts, end = {}, 0
    for entry in ordered:
        starts[entry.name] = end
        table[entry.name] = {
            "dtype": _NAMES[entry.dtype.name], "shape": list(entry.shape), "data_offsets": [end, end + entry.nbytes],
        }  # fmt: skip
        end += entry.nbytes
    text = _utf8(f"{name}: the name", json.dumps(table, separators=(",", ":"), ensure_ascii=False))
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    starts = {tensor: len(header) + start for tensor, start in starts.items()}
    return Shard(name, ordered, header, starts, len(header) + end)


def _utf8(subject: str, text: str) -> bytes:
    """The text in UTF-8; CheckpointError where it has half a character, with the word around it as escapes."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        before, after = text[: error.start], text[error.start :]
        word = ascii(before.rpartition('"')[2] + after.partition('"')[0])
        raise CheckpointError(
            f"{subject} {word} has a character that UTF-8 cannot hold. Rename the tensor, or write the text without it."
        ) from None


def index_of(shards: Sequence[Shard]) -> dict:
    """The index of several files, as transformers writes and reads it."""
    placed = {entry.name: shard.name for shard in shards for entry in shard.entries}
    total = sum(entry.nbytes for shard in shards for entry in shard.entries)
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}


@contextlib.contextmanager
def _replacing(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file under a temporary name, which gets its own when the context ends without an error, and is safe on disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path, size, path.parent) from error
        raise
    os.replace(temporary, path)
    sync_folder(path.parent)


@contextlib.contextmanager
def writing(folder: Path, shard: Shard) -> Iterator[Put]:
    """Yield the function that writes the tensors of a shard; its file gets its name when the context ends well."""
    entries = {entry.name: entry for entry in shard.entries}
    with _replacing(folder / shard.name, shard.size) as file:

        def write(data: bytes | memoryview, start: int) -> None:
            view = memoryview(data)
            while len(view):
                count = os.pwrite(file.fileno(), view[:_PIECE], start)
                view, start = view[count:], start + count

        def put(name: str, array: np.ndarray, start: int) -> None:
            entry = entries[name]
            assert array.dtype == entry.dtype, (name, array.dtype, entry)
            assert start + array.nbytes <= entry.nbytes, (name, start, array.shape, entry)
            if array.nbytes:
                write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, shard.starts[name] + start)

        write(shard.header, 0)
        yield put


def is_complete(folder: Path, shard: Shard) -> bool:
    """True where the finished file of a shard is there, with the size and the header of the plan."""
    try:
        with open(folder / shard.name, "rb") as file:
            return os.fstat(file.fileno()).st_size == shard.size and file.read(len(shard.header)) == shard.header
    except FileNotFoundError:
        return False


def write_json(path: Path, data: object) -> None:
    """Write a JSON file."""
    text = _utf8(f"{path.name}:", json.dumps(data, indent=2, ensure_ascii=False)) + b"\n"
    with _replacing(path, len(text)) as file:
        file.write(text)


def copy_file(source: Path, path: Path) -> None:
    """Copy a file so that it survives a power failure as the others do."""
    with open(source, "rb") as old, _replacing(path, source.stat().st_size) as new:
        shutil.copyfileobj(old, new)


def sync_folder(folder: Path) -> None:
    """Make renames within a folder survive a power failure, where the system can open folders."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def disk_full(path: Path, needed: int, folder: Path) -> CheckpointError:
    """The error for a file or folder that its disk, that of `folder`, has no space for."""
    free = shutil.disk_usage(folder).free
    return CheckpointError(
        f"{path}: the disk is full: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free. Free some space "
        "and repeat the call, which continues with the files that are complete, or choose another destination."
    )
