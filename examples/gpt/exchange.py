"""Files that both frameworks' examples read and write: the weights that a run starts from, and a record of one step.

Both are safetensors files of float32 arrays (a bfloat16 is a float32 with zeros below) under the names of the torch
model's parameters, matrices as ``[outputs, inputs]``.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from gpt.files import write_atomically
from microfloat.errors import invalid_value

__all__ = ["load_record", "load_weights", "save_record", "save_weights"]

Arrays = dict[str, np.ndarray]


def save_weights(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write the parameters a run starts from."""
    _save(path, dict(weights))


def load_weights(path: Path, wanted: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Read what `save_weights` wrote. Raises InvalidValueError unless it holds exactly `wanted` (name -> shape)."""
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise invalid_value("--initial-weights", f"{str(path)!r} ({error})", "a file of --export-weights") from error
    found = {name: array.shape for name, array in weights.items()}
    differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    if differing:
        name = differing[0]
        raise invalid_value(
            "--initial-weights", f"{str(path)!r} with {name} of shape {found.get(name)}",
            f"the model's {len(wanted)} parameters, {name} of shape {wanted.get(name)}",
            "Give the sizes (--dim, --layers, ...) of the run that exported it.",
        )  # fmt: skip
    return weights


def save_record(path: Path, layers: Mapping[str, Mapping[str, np.ndarray]]) -> None:
    """Write operands per layer: x [M, K], w [N, K], dy and y [M, N], dw [N, K]; `seed`, uint32 [2], if stochastic."""
    _save(path, {f"{layer}.{name}": array for layer, arrays in layers.items() for name, array in arrays.items()})


def load_record(path: Path) -> dict[str, Arrays]:
    """Read what `save_record` wrote: layer -> name -> array."""
    layers: dict[str, Arrays] = {}
    for key, array in load_file(path).items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = array
    return layers


def _save(path: Path, arrays: Arrays) -> None:
    whole = {
        name: np.ascontiguousarray(array if array.dtype == np.uint32 else array.astype(np.float32))
        for name, array in arrays.items()
    }
    write_atomically(path, lambda temporary: save_file(whole, temporary))
