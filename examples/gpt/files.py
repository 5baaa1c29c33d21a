"""Files that are whole or not there, and the messages for those that cannot be written or read."""

import contextlib
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from microfloat import checkpoint
from microfloat.checkpoint import Record
from microfloat.errors import CheckpointError, MicrofloatError, invalid_value

Arrays = dict[str, np.ndarray]


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file, then rename it to `path`: readers see the old content or the new."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        raise MicrofloatError(f"cannot write {path} ({error}).") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(flag: str, path: Path) -> None:
    """Raise InvalidValueError, which names `flag`, where no file can be written at `path`."""
    try:
        write_atomically(path.with_name(f"{path.name}.check"), Path.touch)
        path.with_name(f"{path.name}.check").unlink()
        if path.is_dir():
            raise MicrofloatError("it is a folder")
    except MicrofloatError as error:
        raise invalid_value(flag, path, f"a file that can be written: {error}") from None


def save_checkpoint(path: Path, facts: dict[str, Any], state: bytes) -> None:
    """Write JSON-like facts and the framework's state to a zip file, which has a checksum of each."""

    def write(temporary: Path) -> None:
        with zipfile.ZipFile(temporary, "w") as archive:
            archive.writestr("facts.json", json.dumps(facts))
            archive.writestr("state", state)

    write_atomically(path, write)


_ANEW = (
    "Delete that file to train this recipe from the start (the other recipes keep theirs), or put a good copy in its "
    "place."
)


def load_checkpoint(path: Path, option: str = "--resume", remedy: str = _ANEW) -> tuple[dict[str, Any], bytes]:
    """Read what `save_checkpoint` wrote; CheckpointError, with what to do, for a damaged or foreign file."""
    try:
        with zipfile.ZipFile(path) as archive:
            return json.loads(archive.read("facts.json")), archive.read("state")
    except Exception as error:  # a damaged file can fail in many ways, with many types of exception
        raise CheckpointError(
            f"{option}: cannot read the checkpoint {path} ({type(error).__name__}: {error}). {remedy}"
        ) from error


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write a safetensors file, under the names of the torch model's parameters: weights, or a record of one step."""
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    write_atomically(path, lambda temporary: save_file(whole, temporary))


def save_model(folder: Path, arrays: Arrays, config: dict[str, Any]) -> None:
    """Write trained weights as bfloat16, in four files or so, as large models come, with a config.json."""
    records = [
        Record(name, array.astype(ml_dtypes.bfloat16), logical_shape=array.shape) for name, array in arrays.items()
    ]
    size = sum(record.nbytes for record in records)
    checkpoint.save(records, folder, format="plain", config=config, max_shard_size=max(size // 4, 1))


def load_weights(path: Path, model: Arrays) -> Arrays:
    """Read what --export-weights wrote. Raises InvalidValueError unless it has the names and shapes of `model`."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise invalid_value("--initial-weights", f"{path} ({error})", "a file of --export-weights") from error
    found, needed = ({name: array.shape for name, array in arrays.items()} for arrays in (weights, model))
    for name in sorted({*found, *needed}):
        if found.get(name) != needed.get(name):
            got, wanted = (f"{name} of shape {shapes.get(name)}" for shapes in (found, needed))
            remedy = "Give the sizes (--dim, --layers, ...) of the run that exported it."
            raise invalid_value("--initial-weights", f"{path} with {got}", f"the model's {wanted}", remedy)
    return weights
