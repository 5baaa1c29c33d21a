"""`convert`: one checkpoint into another format, module by module, verified, and the report about it."""

import contextlib
import functools
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from microfloat._version import __version__
from microfloat.arguments import as_bool, as_path
from microfloat.checkpoint import _casting as casting
from microfloat.checkpoint._arrays import energies, pieces_of
from microfloat.checkpoint._casting import experts_of, slabs, tile_rows, values
from microfloat.checkpoint._planning import PLAIN, QUANTIZED, Notes, Step, Target, decide, lines_of, target_of
from microfloat.checkpoint._recoding import largest_scales, recode
from microfloat.checkpoint._saving import Job, Plan, Progress, documents, metadata_for, put_all, write
from microfloat.checkpoint._writer import Entry, Put, byte_count
from microfloat.checkpoint.families import WRITTEN
from microfloat.checkpoint.families.patterns import check_ignore
from microfloat.checkpoint.folder import FILES, inside, locate
from microfloat.checkpoint.load import Checkpoint, load, opened
from microfloat.checkpoint.records import Finding, Record
from microfloat.errors import CheckpointError, checkpoint_error
from microfloat.metrics import decibels
from microfloat.recipes import Placement
from microfloat.recipes.placement import DEFAULT_FUSE, check_fuse
from microfloat.support import Printed

_ACTIONS = ("cast", "recoded", "carried", "dequantized", "kept", "dropped")
_MEND = "Mend the weights, or keep the layer as it is with ignore= (--ignore)."


@dataclass(frozen=True)
class Layer:
    """One parameter of a conversion.

    `action`: "cast", "recoded" (the same values), "carried" (the same codes), "dequantized", "kept" (as it was) or
    "dropped" (a scale of a KV cache that the target has no place for). `reason`: the reason why it was not cast.
    `sqnr_db`: the written values against the source; None where they were not verified or are the same.
    `inexact_blocks`: blocks of 32 of a recoded parameter that did not fit exactly.
    """

    name: str
    action: str
    source: str
    format: str
    reason: str = ""
    sqnr_db: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0
    inexact_blocks: int | None = None


@dataclass(repr=False)
class Report(Printed):
    """Result of `convert`. `layers`: every parameter; `notes`: a sentence for each kind of remark; sizes in bytes."""

    source: str
    destination: str
    format: str
    layers: list[Layer] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_read: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    peak_bytes: int | None = None
    shards: list[str] = field(default_factory=list)
    resumed_shards: int = 0
    verified: bool = False

    @property
    def converted(self) -> list[Layer]:
        """Parameters that were cast, carried over or dequantized."""
        return [layer for layer in self.layers if layer.action in (*QUANTIZED, "dequantized")]

    @property
    def skipped(self) -> list[Layer]:
        """Weights that stayed as they were although others were cast, each with its reason."""
        return [layer for layer in self.layers if layer.action == "kept" and layer.reason]

    @property
    def worst(self) -> Layer | None:
        """The layer of the lowest SQNR, None where nothing was cast or verified."""
        measured = [layer for layer in self.layers if layer.sqnr_db is not None]
        return min(measured, key=lambda layer: (layer.sqnr_db == layer.sqnr_db, layer.sqnr_db), default=None)

    def summary(self) -> dict[str, str]:
        """The lines of a summary: their titles and texts."""
        counts = {action: sum(layer.action == action for layer in self.layers) for action in _ACTIONS}
        made = ", ".join(f"{count} {action}" for action, count in counts.items() if count)
        speed = self.bytes_read / max(self.seconds, 1e-9) / 1e6
        files = "1 file" if len(self.shards) == 1 else f"{len(self.shards)} files"
        rows = {
            "parameters": made,
            "size": f"{_megabytes(self.bytes_read)} -> {_megabytes(self.bytes_written)}, {files}",
            "time": f"{self.seconds:.1f} s, {speed:.0f} MB/s read",
        }
        if self.resumed_shards:
            rows["resumed"] = f"{self.resumed_shards} of {len(self.shards)} files were complete"
        if self.peak_bytes is not None:
            rows["peak memory"] = _megabytes(self.peak_bytes)
        if self.worst is not None:
            is_exact = self.worst.sqnr_db == math.inf
            rows["worst layer"] = "all are exact" if is_exact else f"{self.worst.name}: {self.worst.sqnr_db:.2f} dB"
        rows["verified"] = "read back from disk" if self.verified else "no"
        return rows

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        worst = None if self.worst is None else asdict(self.worst)
        return {**asdict(self), "worst": worst, "skipped": [asdict(layer) for layer in self.skipped]}

    def __str__(self) -> str:
        rows = [f"{self.source} -> {self.destination} ({self.format})"]
        rows += [f"  {title:12} {text}" for title, text in self.summary().items()]
        rows += [f"  kept         {layer.name}: {layer.reason}" for layer in self.skipped]
        return "\n".join(rows + [f"  note         {note}" for note in self.notes])


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


def amaxes_of(
    steps: Sequence[Step], src: object, progress: Callable[[Progress], object] | None
) -> dict[str, np.ndarray]:
    """float32 [E], the amax of each matrix of every parameter to be cast, or of its fused group where it has one; of
    those to be recoded, the largest scale.

    Raises CheckpointError, before anything is written, for weights that are NaN or infinite: each would take the other
    elements of its block with it.
    """
    amaxes, findings = {}, []
    groups: dict[str, np.float32] = {}
    casts = [step for step in steps if step.action in ("cast", "recoded")]
    done, total = 0, sum(step.record.nbytes for step in casts)
    for step in casts:
        name = step.record.name
        is_cast = step.action == "cast"
        amaxes[name], lost = casting.measure(step.record) if is_cast else (largest_scales(step.record), 0)
        if lost:
            message = f"{lost} of {np.prod(step.record.logical_shape)} weights are NaN or infinite."
            findings.append(Finding("nan-weight", "error", name, message, _MEND))
        if step.group is not None:
            groups[step.group] = amaxes[name].max(initial=groups.get(step.group, np.float32(0)))
        done += step.record.nbytes
        if progress is not None:
            progress(Progress(done, total, name, 0, 0))
    if findings:
        raise checkpoint_error(src, findings)
    for step in casts:
        if step.group is not None:
            amaxes[step.record.name] = np.full(experts_of(step.record), groups[step.group], np.float32)
    return amaxes


def _inexact(steps: Sequence[Step], amaxes: Mapping[str, np.ndarray], to: str, notes: Notes) -> dict[str, int]:
    """By the name of each parameter to be recoded, the number of its blocks that do not fit exactly."""
    found = {}
    for step in (one for one in steps if one.action == "recoded"):
        assert step.cast is not None
        fmt, largest = step.cast.format, amaxes[step.record.name]
        parts = slabs(step.record, fmt.block[0] or 1)
        found[step.record.name] = sum(recode(slab, fmt, largest[expert])[1] for expert, slab in parts)
    if any(found.values()):
        text = f"{sum(found.values())} blocks of 32 are rounded, as {to} has no scale for them beside the others"
        notes[text] += [name for name, count in found.items() if count]
    return found


def job_of(step: Step, amaxes: Mapping[str, np.ndarray]) -> Job:
    """The tensors that a step writes, and the writing of them."""
    if step.action == "dropped":
        return Job((), lambda put: None)
    if step.action == "dequantized":
        entry = Entry(step.record.name, step.dtype, step.shape)
        beside = [Entry.of(name, array) for name, array in step.beside.items()]
        return Job((entry, *beside), functools.partial(_put_decoded, step))
    tensors = step.encode(step.made)
    entries = tuple(Entry.of(name, array) for name, array in tensors.items())
    if step.cast is not None:
        return Job(entries, functools.partial(_put_cast, step, entries, amaxes))
    return Job(entries, functools.partial(put_all, tensors))


def _put_cast(step: Step, entries: Sequence[Entry], amaxes: Mapping[str, np.ndarray], put: Put) -> None:
    """Cast or recode a parameter slab by slab, and write each."""
    assert step.cast is not None
    sizes = {entry.name: entry.nbytes for entry in entries}
    written = dict.fromkeys(sizes, 0)
    is_whole = step.cast.format.is_per_tensor or step.cast.format.tensor_scale == "tensor"
    found = amaxes[step.record.name] if is_whole else None  # the scale of a block depends on the whole matrix
    count = experts_of(step.record)
    rounded = step.dtype if step.family is not None and step.family.model_scales else PLAIN["f32"]
    for expert, slab in slabs(step.record, step.cast.format.block[0] or 1):
        amax = None if found is None else found[expert]
        if step.action == "recoded":
            made, _ = recode(slab, step.cast.format, amax)
        else:
            made = casting.cast_slab(slab, step.cast, amax, rounded)
        for name, array in step.encode(made).items():
            # One scale per matrix comes with each of its slabs, and is written with the first.
            if written[name] < sizes[name] * (expert + 1) // count:
                put(name, array, written[name])
                written[name] += array.nbytes
    assert written == sizes, (written, sizes)


@np.errstate(all="ignore")
def _put_decoded(step: Step, put: Put) -> None:
    """Write the values of a parameter slab by slab, then the tensors beside it."""
    record, start = step.record, 0
    parts = (values(slab).astype(step.dtype) for _, slab in slabs(record))
    if step.turned:
        parts = casting.turned_matrices(record, step.dtype)
    for array in parts:
        put(record.name, array, start)
        start += array.nbytes
    put_all(step.beside, put)


def _held() -> int | None:
    """Bytes that the process holds beside mapped files; None where there is no /proc."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:")), None)
    return None


def _observed(job: Job, held: list[int | None]) -> Job:
    """The same job, which notes the memory that is held whenever a piece was written."""

    def fill(put: Put) -> None:
        def put_and_look(name: str, array: np.ndarray, start: int) -> None:
            put(name, array, start)
            held.append(_held())

        job.fill(put_and_look)

    return Job(job.entries, fill)


def convert(
    src: str | os.PathLike, dst: str | os.PathLike, *, to: str, scale_rule: str | None = None,
    ignore: Iterable[str] | str = (), fuse: Iterable[str] | str | None = DEFAULT_FUSE, four_over_six: bool = False,
    verify: bool = True, resume: bool = True, max_shard_size: int | str = "5GB", format: str = "auto",
    progress: Callable[[Progress], object] | None = None, placement: Placement | str | os.PathLike | None = None,
) -> Report:  # fmt: skip
    """Convert a checkpoint to another format, and report the result for every parameter.

    * `src`: a file or folder that `load` reads. `dst`: a folder, or a name that ends in ".safetensors".
    * `to`: a format that can be written, such as "ct:nvfp4" or "deepseek:fp8", or "bf16", "f16" or "f32".
    * `scale_rule`: the rule of the cast in place of the format's own; `four_over_six`: that rule, for NVFP4.
    * `ignore`: modules that stay in high precision beside heads, embeddings, routers, norms and biases, and beside all
      that a quantized source leaves plain: parts of names ("layers.0"), wildcards ("*.layers.0.*") or regular
      expressions ("re:.*down_proj").
    * `fuse`: groups that share one tensor scale, or under "modelopt:fp8" the scale of a matrix: "qkv", "gate_up", and
      "experts" (those of one layer).
    * `format`: the family of the source, where that is ambiguous, as for `load`.
    * `verify`: read the result back from disk and compare it. `max_shard_size`: bytes, or text such as "5GB".
    * `resume`: go on where the same conversion was interrupted; False starts again.
    * `progress` is called with a `Progress` now and then.
    * `placement`: a Placement, or the file of one that ``microfloat plan`` wrote; `to` is then "ct:mixed",
      "modelopt:mixed", "quark:mixed" or "microfloat:native". The recipe of a layer decides in which format its weight
      is stored, that of w in fprop (16x16 and 32x32 tiles as blocks along K); its inputs are announced as the target of
      that format does, and not at all where the recipe leaves x in high precision. None, and no pattern, keep a layer
      as it is stored. A layer that a pattern names in full is not left out by default.

    Codes that the source has already are carried over byte for byte, and values of MX formats are recoded where the
    target has their scales; all others are dequantized to float32 and cast.
    One slab of a tensor is in memory at a time. Until the result is whole it grows as ``<dst>.partial``. Raises
    ValueError for arguments, and where nothing would be stored in the format `to`, and CheckpointError for a source
    that is damaged or has NaN or infinite weights where they would be cast (found before anything is written), a
    destination that exists, a full disk, and a result that is not read back as it was written.
    """
    started = time.perf_counter()
    verify, resume = as_bool("verify", verify), as_bool("resume", resume)
    four_over_six = as_bool("four_over_six", four_over_six)
    if placement is not None and not isinstance(placement, Placement):
        placement = Placement.from_json(as_path("placement", placement))
    target = target_of(to, scale_rule, four_over_six, placement is not None)
    patterns, kinds, limit = check_ignore(ignore), check_fuse(fuse), byte_count(max_shard_size)
    checkpoint = load(src, format=format)
    report, notes = Report(str(src), str(dst), to), Notes(list)
    steps = decide(checkpoint, target, patterns, kinds, notes, placement)
    amaxes, measured, inexact = dict[str, np.ndarray](), dict[str, float](), dict[str, int]()
    held: list[int | None] = []
    jobs = [_observed(job_of(step, amaxes), held) for step in steps]
    files = {path: path.stat() for path in sorted(locate(src).files.values())}
    identity = {
        "version": __version__, "to": to, "scale_rule": scale_rule, "four_over_six": four_over_six,
        "ignore": patterns, "fuse": kinds, "format": format, "placement": placement and placement.to_dict(),
        "files": [(str(path.resolve()), found.st_size, found.st_mtime_ns) for path, found in files.items()],
    }  # fmt: skip
    name = target.family.name if target.family is not None else ""
    made = [step.made for step in steps]
    configs = documents(name, made, checkpoint.configs)
    if target.dtype is not None:
        config = configs.setdefault("config.json", {})
        config |= {key: target.dtype.name for key in ("dtype", "torch_dtype") if key in config}

    def prepare() -> None:
        amaxes.update(amaxes_of(steps, src, progress))
        inexact.update(_inexact(steps, amaxes, to, notes))

    def check(path: Path) -> None:
        check_unchanged(files)
        if verify:
            measured.update(_verify(steps, path, target, notes, progress))

    plan = Plan(jobs, configs, _copies(Path(src), notes), metadata_for(name, made), identity, prepare)
    written = write(dst, plan, max_shard_size=limit, resume=resume, progress=progress, check=check)
    report.notes = lines_of(notes)
    report.layers = [_layer(step, job, measured, inexact) for step, job in zip(steps, jobs, strict=True)]
    report.bytes_read = sum(found.st_size for found in files.values())
    report.bytes_written, report.shards, report.resumed_shards = written.nbytes, written.shards, written.resumed
    report.verified, report.seconds = verify, time.perf_counter() - started
    report.peak_bytes = max((size for size in held if size is not None), default=None)
    return report


def _layer(step: Step, job: Job, measured: Mapping[str, float], inexact: Mapping[str, int]) -> Layer:
    """The line of the report about one parameter."""
    record, made = step.record, step.made.format
    before = "plain" if record.source is None else record.source.family
    dtype = step.dtype if step.action == "dequantized" else record.codes.dtype
    return Layer(
        record.name, step.action, before, dtype.name if made is None else made.name, step.reason,
        measured.get(record.name), record.nbytes, sum(entry.nbytes for entry in job.entries), inexact.get(record.name),
    )  # fmt: skip


_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".pkl", ".ckpt")
_LARGEST_COPY = 1 << 28


def _copies(src: Path, notes: Notes) -> dict[str, Path]:
    """Tokenizer, templates and licences: small files of a folder that hold no weights."""
    if not src.is_dir():
        return {}
    found = {
        path.name: path
        for path in sorted(src.iterdir())
        if path.is_file() and path.stat().st_size <= _LARGEST_COPY and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS) and path.name not in FILES
    }  # fmt: skip
    away: list[Finding] = []
    for name in found:
        inside(src, name, away)
    for one in away:
        del found[one.tensor]
        notes["a file is not copied, as it is a link out of the checkpoint"].append(one.tensor)
    return found


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


def _verify(
    steps: Sequence[Step], path: Path, target: Target, notes: Notes, progress: Callable[[Progress], object] | None
) -> dict[str, float]:
    """SQNR of every cast parameter, read back from disk; raises CheckpointError where carried bytes are others.

    `notes` get the contradictions of the written configuration, such as an ignored name that is also a part of the
    name of a quantized module.
    """
    is_one = target.family is not None and target.name in WRITTEN
    written = opened(path, format=target.family.name if is_one else "auto")  # type: ignore[union-attr]
    for finding in written.scale_findings:
        if finding.id == "config-disagrees":
            notes["the configuration that was written may be read otherwise"].append(str(finding))
    found, wrong = {}, []
    done, total, beyond = 0, sum(step.record.nbytes for step in steps), len(written.files) + 1
    for step in (one for one in steps if one.action != "dropped"):
        again = _read_back(written, step.record.name)
        if step.action in ("kept", "carried"):
            parts = [(getattr(step.record, name), getattr(again, name)) for name in ("codes", "scale")]
            if any(a is not None and not _same_bytes(a, b) for a, b in parts):
                wrong.append(f"{step.record.name} does not have the bytes of the source")
        else:
            found[step.record.name] = _sqnr_db(step, again)
            if found[step.record.name] != found[step.record.name]:
                parts = (slab.dequantize() for _, slab in slabs(again, tile_rows(again)))
                lost = sum(int((~np.isfinite(part)).sum()) for part in parts)
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
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (a, b))
    pieces = zip(pieces_of(first), pieces_of(second), strict=True)
    return len(first) == len(second) and all(np.array_equal(*pair) for pair in pieces)


def _sqnr_db(step: Step, again: Record) -> float:
    """Signal to quantization noise of a parameter in decibels, over the finite elements of the source."""
    signal = noise = 0.0
    pairs = zip(slabs(step.record, tile_rows(again)), slabs(again, tile_rows(step.record)), strict=True)
    compared = ((values(a), b.dequantize()) for (_, a), (_, b) in pairs)
    if step.turned:
        compared = zip(casting.turned_matrices(step.record, PLAIN["f32"]), again.codes, strict=True)
    for a, b in compared:
        more = energies(np.atleast_2d(a), np.atleast_2d(b).astype(np.float32, copy=False))
        signal, noise = signal + more[0], noise + more[1]
    return decibels(signal, noise if noise < math.inf else math.nan)
