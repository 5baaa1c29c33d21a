"""Reader of safetensors files over mmap: bounded, never executing anything, every defect of a header listed.

The reader of the safetensors package knows no FP8, FP4 or FP6 in NumPy (spec of the format: a little-endian u64, the
length of a JSON header, the header, then the bytes of all tensors without gaps).
"""

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from microfloat.checkpoint.records import Finding, Stored
from microfloat.errors import checkpoint_error

# Name in a header -> bits of an element, dtype of its NumPy view. Elements of 4 and 6 bits are viewed as their bytes.
DTYPES: dict[str, tuple[int, np.dtype]] = {
    name: (bits, np.dtype(dtype))
    for name, bits, dtype in (
        ("F4", 4, np.uint8), ("F6_E2M3", 6, np.uint8), ("F6_E3M2", 6, np.uint8),
        ("BOOL", 8, np.bool_), ("U8", 8, np.uint8), ("I8", 8, np.int8), ("F8_E4M3", 8, ml_dtypes.float8_e4m3fn),
        ("F8_E5M2", 8, ml_dtypes.float8_e5m2), ("F8_E8M0", 8, ml_dtypes.float8_e8m0fnu),
        ("F8_E4M3FNUZ", 8, ml_dtypes.float8_e4m3fnuz), ("F8_E5M2FNUZ", 8, ml_dtypes.float8_e5m2fnuz),
        ("U16", 16, np.uint16), ("I16", 16, np.int16), ("F16", 16, np.float16), ("BF16", 16, ml_dtypes.bfloat16),
        ("U32", 32, np.uint32), ("I32", 32, np.int32), ("F32", 32, np.float32),
        ("U64", 64, np.uint64), ("I64", 64, np.int64), ("F64", 64, np.float64), ("C64", 64, np.complex64),
    )
}  # fmt: skip
METADATA = "__metadata__"  # the entry of a header that describes no tensor
_LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors package
_LARGEST_RANK = 32
_LARGEST_COUNT = 1 << 62
_DAMAGED = "The file is damaged or was not finished; download or write it again."
_OTHER_INDEX = "The index belongs to other files, or a file is not the one that was meant: download both again."
_NO_HEADER = "Either it is not a safetensors file, or it is damaged or was not finished."
# First bytes of files that are often taken for safetensors ones.
_OTHERS = {
    b"version ": "It is a pointer of Git LFS in place of the file: run `git lfs pull` where it was cloned.",
    b"PK": "It looks like a file of torch.save, which is never read: convert it to safetensors if you trust it.",
    b"\x80": "It looks like a pickle, which is never read: convert it to safetensors if you trust it.",
    b"GGUF": "It is a GGUF file, which is not read.",
    b"{": "It is text: name the folder of the model, or a safetensors file.",
}


def read_json(text: bytes, tensor: str) -> tuple[Any, list[Finding]]:
    """Value of a JSON text and what is wrong with it: encoding, depth, repeated keys, halves of characters."""
    found: list[Finding] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name[:200] for name in made if names.count(name) > 1}) if len(names) < 1000 else ["..."]
            message = f"the JSON names {', '.join(map(repr, twice[:5]))} twice."
            found.append(Finding("duplicate-name", "error", tensor, message, _DAMAGED))
        return made

    remedy = _DAMAGED
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)  # Infinity too: Python writes it
        if b"\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value, found
    except UnicodeDecodeError as error:
        problem = f"the text is not UTF-8 at byte {error.start}."
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])[1:-1]
        problem = f"the JSON has {half}, one half of a character, which UTF-8 cannot hold."
        remedy = "Write the name or text without it."
    except RecursionError:
        problem = "the JSON is nested too deep to be meant."
    except ValueError as error:
        problem = f"the text is no JSON: {str(error)[:200]}."
    return None, [Finding("json", "error", tensor, problem, remedy)]


def open_bounded(path: Path, largest: int | None = None) -> tuple[int, int]:
    """File descriptor and size of a regular file of at most `largest` bytes; raises CheckpointError otherwise."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except OSError as error:
        message = f"the file cannot be opened: {error.strerror}."
        raise checkpoint_error(path, [Finding("file", "error", path.name, message, "Check the path.")]) from None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (largest is None or status.st_size <= largest):
        return descriptor, status.st_size
    os.close(descriptor)
    problem = "it is no regular file.", "Check the path."
    if stat.S_ISREG(status.st_mode):
        problem = f"the file has {status.st_size} bytes, at most {largest} make sense.", _DAMAGED
    raise checkpoint_error(path, [Finding("file", "error", path.name, *problem)])


def read_json_file(path: Path) -> tuple[Any, list[Finding]]:
    """Value and findings of a JSON file of bounded size."""
    descriptor, _ = open_bounded(path, _LARGEST_HEADER)
    with os.fdopen(descriptor, "rb") as file:
        return read_json(file.read(_LARGEST_HEADER), path.name)


class Container(Mapping[str, np.ndarray]):
    """The tensors of one or more safetensors files by name: views of mapped memory, nothing is read before it is used.

    `stored` describes every tensor, `metadata` joins the metadata of all headers. Raises CheckpointError, which lists
    what is wrong with every header, when it is made, and when a tensor is asked for that a file no longer holds. A file
    that is cut while somebody reads a view of it ends the process (SIGBUS), as with every reader that maps memory.
    """

    def __init__(self, files: Mapping[str, Path], expected: Mapping[str, str] | None = None, root: object = "") -> None:
        """Map `files`, by the name that an index gives them; `expected`, its weight map, names the file of a tensor."""
        self.stored: dict[str, Stored] = {}
        self.metadata: dict[str, str] = {}
        self._memory: dict[str, mmap.mmap] = {}
        self.findings: list[Finding] = []
        for file, path in files.items():
            self._add(file, path)
        for name, file in (expected or {}).items():
            stored = self.stored.get(name)
            if stored is None or stored.file != file:
                holds = "no file holds it" if stored is None else f"{stored.file} holds it"
                self._fail("index", name, f"the index says {file!r}, but {holds}.", _OTHER_INDEX)
        if self.findings:
            raise checkpoint_error(root or ", ".join(files), self.findings)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.array(self.stored[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def array(self, stored: Stored) -> np.ndarray:
        """Read-only view of a tensor; 4- and 6-bit elements as their bytes along the last axis."""
        _, dtype = DTYPES[stored.dtype]
        shape = byte_shape(stored)
        if not stored.nbytes:
            return np.empty(shape, dtype)
        memory = self._memory[stored.file]
        # The current size of the file; a look beyond its end kills the process.
        if memory.size() < stored.start + stored.nbytes:
            message = f"{stored.file} has become shorter since it was opened: {memory.size()} bytes."
            raise checkpoint_error(stored.file, [Finding("file", "error", stored.name, message, "Load it again.")])
        array = np.frombuffer(memory, dtype, math.prod(shape), stored.start).reshape(shape)
        array.flags.writeable = False
        return array

    def raw(self, stored: Stored) -> np.ndarray:
        """The bytes of a tensor, uint8 in `byte_shape`; its elements have at most 8 bits."""
        return self.array(stored).view(np.uint8)

    def _fail(self, id: str, tensor: str, message: str, remedy: str = _DAMAGED) -> None:
        self.findings.append(Finding(id, "error", tensor, message, remedy))

    def _add(self, file: str, path: Path) -> None:
        """Map one file and check its header."""
        descriptor, size = open_bounded(path)
        try:
            start = os.read(descriptor, 8)
            length = struct.unpack("<Q", start)[0] if size >= 8 else -1
            if not 2 <= length <= min(size - 8, _LARGEST_HEADER):
                what = f"its header would have {length} bytes" if size >= 8 else "it is too short for a header"
                remedy = next((text for first, text in _OTHERS.items() if start.startswith(first)), _NO_HEADER)
                self._fail("header", file, f"the file has {size} bytes, {what}.", remedy)
                return
            # Private memory that may be written, as torch wraps no other without a copy; no write reaches the file.
            memory = mmap.mmap(descriptor, size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        header, found = read_json(memory[8 : 8 + length], file)
        self.findings += found
        if not isinstance(header, dict):
            if not found:
                self._fail("header", file, "the header is no JSON object.")
            return
        metadata = header.pop(METADATA, None)
        if metadata is not None:
            if isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()):
                self.metadata.update(metadata)
            else:
                self._fail("header", file, f"{METADATA} must map names to strings.")
        self._memory[file] = memory
        self._add_tensors(file, header, 8 + length, size)

    def _add_tensors(self, file: str, header: dict[str, Any], base: int, size: int) -> None:
        spans = []
        for name, entry in header.items():
            stored = self._checked(name[:500], entry, file, base, size)
            if stored is None:
                continue
            if name in self.stored:
                self._fail("duplicate-name", name, f"{file} and {self.stored[name].file} both hold it.")
            self.stored[name] = stored
            spans.append(stored)
        end = base
        for stored in sorted(spans, key=lambda one: (one.start, one.nbytes)):
            if stored.start != end:
                what = "overlaps the tensor before it" if stored.start < end else "leaves a gap before it"
                self._fail("offsets", stored.name, f"it starts at byte {stored.start - base} of the data and {what}.")
            end = max(end, stored.start + stored.nbytes)
        if len(spans) == len(header) and end != size:
            self._fail("offsets", file, f"{size - end} bytes at the end of the file belong to no tensor.")

    def _checked(self, name: str, entry: Any, file: str, base: int, size: int) -> Stored | None:
        """One entry of a header, or None after a finding."""
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            return self._fail("header", name, "an entry has exactly dtype, shape and data_offsets.")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            return self._fail("dtype", name, f"unknown dtype {str(dtype)[:50]!r}.", f"Known are {', '.join(DTYPES)}.")
        if not _sizes(shape) or len(shape) > _LARGEST_RANK or math.prod(filter(None, shape)) > _LARGEST_COUNT:
            return self._fail("shape", name, f"{str(shape)[:100]} is no shape.")
        if not _sizes(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - base:
            message = f"data_offsets {str(offsets)[:100]} are not within the {size - base} bytes of data."
            return self._fail("offsets", name, message)
        bits, nbytes = math.prod(shape) * DTYPES[dtype][0], offsets[1] - offsets[0]
        if (of_row := math.prod(shape[-1:]) * DTYPES[dtype][0]) % 8:
            message = f"a row of {dtype}{shape} has {of_row} bits, which are no whole bytes."
            return self._fail("shape", name, message, "Write it as bytes (U8), with the last bits of a row unused.")
        if bits != 8 * nbytes:
            return self._fail("shape", name, f"{dtype}{shape} takes {bits} bits, the file has {8 * nbytes} for it.")
        return Stored(name, dtype, tuple(shape), file, base + offsets[0], nbytes)


def _sizes(values: Any) -> bool:
    """A list of non-negative ints."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def byte_shape(stored: Stored) -> tuple[int, ...]:
    """Shape of the view of a tensor: of its elements, or of its bytes where an element has 4 or 6 bits."""
    bits = DTYPES[stored.dtype][0]
    return stored.shape if bits >= 8 else (*stored.shape[:-1], stored.shape[-1] * bits // 8)
