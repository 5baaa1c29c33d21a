"""Buffers that no checkpoint holds, such as tables of rotary angles, of a model that was built on the meta device.

A model of transformers writes them in its `_init_weights`, a module without parameters may make them when it is moved.
"""

from collections.abc import Mapping

import torch
from torch import nn

from microfloat.errors import CheckpointError

__all__ = ["initialize_tables"]


@torch.no_grad()
def initialize_tables(model: nn.Module, device: torch.device, strict: bool) -> None:
    """Give buffers on the meta device that no state dict holds their values, on `device`, by the model's own means.

    Buffers with values move there from a model whose parameters are on the meta device.

    Raises CheckpointError, and changes nothing, where `strict` and one of them cannot be made.
    """
    saved = model.state_dict().keys()
    lost: dict[str, dict[str, torch.Tensor]] = {}
    for name, buffer in model.named_buffers():
        if buffer.is_meta and name not in saved:
            parent, _, key = name.rpartition(".")
            lost.setdefault(parent, {})[key] = buffer
    left = {name: buffers for name, buffers in lost.items() if not _is_initialized(model, name, buffers, device)}
    for name, buffers in (lost if strict else left).items() if left else ():
        _put(model.get_submodule(name), buffers)
    if left and strict:
        names = [f"{name}.{key}".lstrip(".") for name, buffers in left.items() for key in buffers]
        raise CheckpointError(
            f"load_quantized: got buffers on the meta device, which no checkpoint holds: {', '.join(names)}. "
            "Build it under accelerate.init_empty_weights(), which makes buffers with their values and only parameters "
            "on the meta device, or give them values first."
        )
    if all(parameter.is_meta for parameter in model.parameters()):  # and its buffers were made where torch makes them
        for name, buffer in model.named_buffers():
            parent, _, key = name.rpartition(".")
            if not buffer.is_meta:
                _put(model.get_submodule(parent), {key: buffer.to(device)})


def _put(module: nn.Module, buffers: Mapping[str, torch.Tensor]) -> None:
    for key, buffer in buffers.items():
        setattr(module, key, buffer)


def _is_initialized(model: nn.Module, name: str, buffers: Mapping[str, torch.Tensor], device: torch.device) -> bool:
    """Make the buffers of a module; True where its initialization has written every element, whatever was there."""
    module, parts, made = model.get_submodule(name), name.split(".") if name else [], []
    # The innermost module around it, or itself, that initializes modules as those of transformers do.
    around = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), -1, -1))
    owner = next((one for one in around if callable(getattr(one, "_init_weights", None))), None)
    for fill in (0, 1):
        _put(module, {key: torch.full_like(buffer, fill, device=device) for key, buffer in buffers.items()})
        try:
            with torch.random.fork_rng(devices=[]):
                if owner is not None and all(parameter.is_meta for parameter in module.parameters()):
                    owner._init_weights(module)  # type: ignore[operator]
                if next(module.parameters(), None) is None:
                    module.to(device)
        except Exception:  # of code that somebody else wrote for another purpose
            return False
        made.append([getattr(module, key) for key in buffers])
    return all(torch.equal(*pair) for pair in zip(*made, strict=True))
