"""Checkpoints that are whole or not there: written beside the target and renamed, checked before they are read."""

import zipfile
from pathlib import Path
from typing import Any

import torch

from gpt.files import unusable, write_atomically
from microfloat.errors import CheckpointError

__all__ = ["generator_states", "load_checkpoint", "restore_generators", "save_checkpoint"]

_FORMAT = "microfloat examples/train_gpt.py, version 1"


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Save a dictionary of tensors and plain Python values."""
    write_atomically(path, lambda temporary: torch.save({"format": _FORMAT, **state}, temporary))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Load what `save_checkpoint` wrote; every byte is checked and no code in the file is run.

    Raises CheckpointError, with the file's name and what to do, for a truncated, corrupted or foreign file.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            # torch.save writes a zip file with a checksum per tensor, which torch.load does not compare.
            damaged = archive.testzip()
        if damaged is not None:
            raise unusable(path, f"the checksum of its part {damaged!r} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except CheckpointError:
        raise
    except Exception as error:
        # A damaged file can fail anywhere below (zipfile, zlib, pickle, torch), with many types of exception.
        reason = (str(error).splitlines() or [""])[0]
        raise unusable(path, f"{type(error).__name__}: {reason}") from error
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise unusable(path, "it was not written by this program")
    return state


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of the default generators, from which stochastic rounding draws its call seeds."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_generators(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put back what `generator_states` returned."""
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
