"""Checkpoints of nnx modules as npz files: plain arrays and one JSON text, every byte checked when they are read."""

import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from gpt.files import unusable, write_atomically

from microfloat.errors import CheckpointError

__all__ = ["arrays_of", "load_checkpoint", "save_checkpoint", "set_arrays"]

_FORMAT = "microfloat examples/train_gpt_jax.py, version 1"


def save_checkpoint(path: Path, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    """Write JSON-like facts and arrays."""
    text = np.frombuffer(json.dumps({"format": _FORMAT, **facts}).encode(), np.uint8)

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, facts=text, **arrays)

    write_atomically(path, write)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """The facts, and the arrays under "arrays"; no code in the file is run.

    Raises CheckpointError, with the file's name and what to do, for a truncated, corrupted or foreign file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise unusable(path, f"the checksum of its part {damaged!r} is wrong")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        facts = json.loads(arrays.pop("facts").tobytes())
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file can fail anywhere below (zipfile, zlib, numpy, json), with many types of exception.
        reason = (str(error).splitlines() or [""])[0]
        raise unusable(path, f"{type(error).__name__}: {reason}") from error
    if not isinstance(facts, dict) or facts.get("format") != _FORMAT:
        raise unusable(path, "it was not written by this program")
    return {**facts, "arrays": arrays}


def arrays_of(prefix: str, module: nnx.Module) -> dict[str, np.ndarray]:
    """All state of a module by path, random keys as their words."""
    return {f"{prefix}/{_name(path)}": _plain(variable) for path, variable in nnx.to_flat_state(nnx.state(module))}


def set_arrays(prefix: str, module: nnx.Module, arrays: dict[str, np.ndarray]) -> None:
    """The inverse of `arrays_of`, for a module of the same structure."""
    flat = []
    for path, variable in nnx.to_flat_state(nnx.state(module)):
        array = jnp.asarray(arrays[f"{prefix}/{_name(path)}"])
        if jnp.issubdtype(variable.get_value().dtype, jax.dtypes.prng_key):
            array = jax.random.wrap_key_data(array)
        flat.append((path, variable.replace(array)))
    nnx.update(module, nnx.from_flat_state(flat))


def _name(path: tuple) -> str:
    return ".".join(map(str, path))


def _plain(variable: nnx.Variable) -> np.ndarray:
    value = variable.get_value()
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    return np.asarray(value)
