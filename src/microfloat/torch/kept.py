"""Operands of a weight that are kept between the microbatches of a step (`is_first_microbatch`).

A flag that the caller forgot must cost time and never correctness, so what is kept says what it was made from. torch
counts the writes to a tensor (`_version`), but not those of its fused optimizers; these are seen by a hook that every
optimizer runs after its step. Writes that neither counts (through ``.data``, by a collective, by a kernel of one's own,
in the replay of a CUDA graph) cannot be seen.
"""

import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["KeptWeight"]

# Stands for the latest step of any optimizer. An object and not a number, so that no two steps can make the same one.
_latest_step = object()


def _note_step(*_: Any) -> None:
    global _latest_step
    _latest_step = object()


register_optimizer_step_post_hook(_note_step)


class KeptWeight:
    """The operands of one weight, and what they were made from."""

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Keep nothing."""
        self._entry: Any = None  # replaced as a whole, so that threads see one or the other

    def find(self, weight: torch.Tensor, key: tuple) -> Any:
        """The operands if `weight` is the tensor that they were made from, unchanged, and `key` is equal; else None."""
        entry = self._entry
        if entry is None:
            return None
        made_from, stamp, operands = entry
        return operands if made_from() is weight and stamp == _stamp(weight, key) else None

    def keep(self, weight: torch.Tensor, key: tuple, operands: Any) -> None:
        """Keep `operands`, made from `weight` and from what `key` says."""
        if not weight.is_inference():  # their writes are not counted
            self._entry = weakref.ref(weight), _stamp(weight, key), operands


def _stamp(weight: torch.Tensor, key: tuple) -> tuple:
    # Operands that were made in inference mode cannot be saved for a backward.
    return weight.data_ptr(), weight._version, _latest_step, torch.is_inference_mode_enabled(), *key
