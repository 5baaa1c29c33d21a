"""The look at a converted checkpoint after it was written: carried bytes, and the error of every cast parameter."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from microfloat.checkpoint._arrays import energies
from microfloat.checkpoint._casting import slabs, values
from microfloat.checkpoint._saving import Progress
from microfloat.checkpoint.load import Checkpoint, opened
from microfloat.checkpoint.records import Record
from microfloat.errors import CheckpointError

if TYPE_CHECKING:
    from microfloat.checkpoint._planning import Notes, Step, Target


def check_unchanged(files: Mapping[Path, os.stat_result]) -> None:
    """Raise CheckpointError where a source was written to in place since it had this status.

    Files that were replaced or removed are still mapped as they were. A time that goes back by less than two seconds is
    the same one, rounded down when a file system that keeps whole seconds reads it from the disk again.
    """
    for path, before in files.items():
        now = path.stat() if path.exists() else before
        is_same_file = (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
        is_rounded = now.st_size == before.st_size and 0 <= before.st_mtime_ns - now.st_mtime_ns < 2_000_000_000
        if is_same_file and not is_rounded:
            raise CheckpointError(
                f"{path} was written to while it was converted. Convert it again when it is complete; to replace a "
                "checkpoint, rename the new one over it."
            )


def verify_written(
    steps: Sequence["Step"], path: Path, target: "Target", notes: "Notes",
    progress: Callable[[Progress], object] | None = None,
) -> dict[str, float]:  # fmt: skip
    """SQNR of every cast parameter, read back from disk; raises CheckpointError where carried bytes are others.

    `notes` take what the written configuration gets wrong, such as a name in its list of ignored modules that is part
    of the name of a quantized one.
    """
    written = opened(path, format="auto" if target.family is None else target.family.name)
    disagreeing = [str(finding) for finding in written.findings if finding.id == "config-disagrees"]
    for finding in disagreeing:
        notes.add("the configuration that was written may be read otherwise", finding)
    found, wrong = {}, []
    done, total, beyond = 0, sum(step.record.nbytes for step in steps), len(written.files) + 1
    for step in (one for one in steps if one.action != "dropped"):
        again = _read_back(written, step.record.name)
        if step.action in ("kept", "carried"):
            parts = [(getattr(step.record, name), getattr(again, name)) for name in ("codes", "scale")]
            if any(a is not None and not _same_bytes(a, b) for a, b in parts):
                wrong.append(f"{step.record.name} does not have the bytes of the source")
        else:
            if step.turned:
                codes = np.swapaxes(again.codes, 1, 2)
                again = replace(again, codes=codes, logical_shape=codes.shape)
            found[step.record.name] = _sqnr_db(step, again)
            if found[step.record.name] != found[step.record.name]:
                lost = _not_finite(again)
                wrong.append(
                    f"{step.record.name} has {lost} values that are NaN or infinite, beyond the range of the target: "
                    "keep it as it is with ignore= (--ignore), or choose another target" if lost
                    else f"{step.record.name} has other values than zero, where the source is all zero"
                )  # fmt: skip
        done += step.record.nbytes
        if progress is not None:
            progress(Progress(done, total, step.record.name, beyond, beyond - 1))
    if wrong:
        raise CheckpointError("\n  ".join([f"{path}: {len(wrong)} parameters were not written well.", *wrong]))
    return found


def _read_back(written: Checkpoint, name: str) -> Record:
    """A parameter as it was written. A plain tensor such as `k_scale` may be read as an extra of a quantized weight."""
    if name in written:
        return written[name]
    array = written.tensors.array(written.tensors.stored[name])
    return Record(name, array, logical_shape=array.shape)


def _same_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    if a.nbytes != b.nbytes:
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    piece = 1 << 24
    return all(np.array_equal(first[i : i + piece], second[i : i + piece]) for i in range(0, len(first), piece))


def _sqnr_db(step: "Step", again: Record) -> float:
    """Signal to quantization noise of a parameter in decibels, over the finite elements of the source."""
    signal = noise = 0.0
    tile = step.cast.format.block[0] or 1 if step.cast is not None else 1
    for (_, _, a), (_, _, b) in zip(slabs(step.record, tile), slabs(again, _tile_of(step.record)), strict=True):
        more = energies(values(a), b.dequantize())
        signal, noise = signal + more[0], noise + more[1]
    if noise == 0:
        return float("inf")
    if noise == float("inf"):
        return float("nan")
    return 10 * float(np.log10(signal / noise)) if signal else float("nan")


def _not_finite(record: Record) -> int:
    return sum(int((~np.isfinite(slab.dequantize())).sum()) for _, _, slab in slabs(record, _tile_of(record)))


def _tile_of(record: Record) -> int:
    return record.format.block[0] or 1 if record.format else 1
