"""`refit`: the weights of a trainer as a server stores them, one group of layers in memory at a time.

Every decision and every byte is that of `microfloat.checkpoint.convert`: which weights are quantized, which of them
share a scale, and how the tensors are called. Nothing is written to a disk.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from microfloat.errors import invalid_value
from microfloat.torch.convert.swap import plain_state_dict
from microfloat.torch.inference.joined import alternate_in, taken_apart
from microfloat.torch.inference.load import as_tensor
from microfloat.torch.inference.save import config_of_model, record_of
from microfloat.torch.tensor.checks import check_model

if TYPE_CHECKING:
    from microfloat.checkpoint import Checkpoint, Record
    from microfloat.checkpoint._planning import Step


def refit(model: nn.Module, target: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Give (name, tensor) of everything that a server stores of `model`, as codes and scales on the CPU.

    `target`: a format of `microfloat.checkpoint.convert`, such as "ct:nvfp4". The tensors are those of `convert` of the
    folder that ``model.save_pretrained`` writes. Sharded weights are gathered one by one, so that every rank has to go
    through the result; a group that shares a scale is in memory at once. Raises as `convert` does for targets, models
    without a weight to quantize, and weights that are not finite. Source: docs/qat.md.
    """
    from microfloat.checkpoint._planning import Facts, Notes, arranged, decide, step_of, target_of
    from microfloat.recipes.placement import DEFAULT_FUSE

    check_model(model)
    wanted = target_of(target, None, False)
    tied = getattr(model, "all_tied_weights_keys", {})  # of a model of transformers, whose files leave them out
    state = {name: value for name, value in plain_state_dict(model).items() if name not in tied}
    if meta := [name for name, value in state.items() if value.is_meta]:
        raise invalid_value("model", f"{meta[0]} on the meta device", "a model with its weights")
    described = _described(model, [one for name, value in state.items() for one in _records(model, name, value, True)])
    steps = {step.record.name: step for step in decide(described, wanted, (), DEFAULT_FUSE, Notes(list))}

    def steps_of(name: str) -> "list[Step]":
        """The steps of one parameter of the model, with its values."""
        records = arranged(_records(model, name, state.pop(name), False), wanted, source)
        made = (step_of(record, wanted, (), source) for record in records)
        return [replace(steps[step.record.name], record=step.record) for step in made]

    source = Facts(described)
    return _tensors(model, list(state), steps, steps_of)


def _tensors(
    model: nn.Module, names: list[str], steps: "dict[str, Step]", steps_of: "Callable[[str], list[Step]]"
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of all steps; a step waits for the others of its group."""
    waiting = Counter(step.group or name for name, step in steps.items())
    ready: dict[str, list[Step]] = {}
    for name in names:
        for step in steps_of(name):
            key = step.group or step.record.name
            ready.setdefault(key, []).append(step)
            if len(ready[key]) == waiting[key]:
                yield from _written(ready.pop(key), model)


def _written(steps: "list[Step]", model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    from microfloat.checkpoint._conversion import amaxes_of, job_of

    amaxes = amaxes_of(steps, f"the {type(model).__name__}", None)
    for step in steps:
        job = job_of(step, amaxes)
        made = {entry.name: np.empty(entry.shape, entry.dtype) for entry in job.entries}
        flat = {name: array.reshape(-1).view(np.uint8) for name, array in made.items()}

        def put(name: str, array: np.ndarray, start: int, flat: dict[str, np.ndarray] = flat) -> None:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            flat[name][start : start + data.size] = data

        job.fill(put)
        for name, array in made.items():
            yield name, as_tensor(array)


@torch.no_grad()
def _records(model: nn.Module, name: str, value: torch.Tensor, is_outline: bool) -> "list[Record]":
    """The records of a parameter under the names of files; an outline has no values, and takes no memory."""
    if is_outline:
        record = record_of(model, name, torch.zeros((), dtype=value.dtype))
        record = replace(record, codes=np.broadcast_to(record.codes, value.shape), logical_shape=tuple(value.shape))
    else:
        record = record_of(model, name, value.full_tensor() if isinstance(value, DTensor) else value)
    # Stacked experts of such models are `arranged` as those of their files are.
    return [record] if alternate_in(model) is not None else taken_apart(model, [record])


def _described(model: nn.Module, outlines: "list[Record]") -> "Checkpoint":
    """The facts about a folder of plain weights that decide about a conversion."""
    from microfloat.checkpoint.detect import Contents
    from microfloat.checkpoint.records import Stored

    config, name = config_of_model(model, True) or {}, f"the {type(model).__name__}"
    plain = {one.name: Stored(one.name, one.codes.dtype.name, one.logical_shape, "", 0, 0) for one in outlines}
    fields = {"config": config, "configs": {"config.json": config}, "contents": Contents({}, plain, [], [])}
    return cast("Checkpoint", SimpleNamespace(values=lambda: outlines, path=name, scale_findings=(), **fields))
