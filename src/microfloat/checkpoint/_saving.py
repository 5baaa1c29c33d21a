"""`save`, and the writing of a whole checkpoint: everything beside the destination, which one rename makes visible."""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from microfloat._version import __version__
from microfloat.arguments import as_path
from microfloat.checkpoint import _writer
from microfloat.checkpoint._writer import Entry, Put, Shard
from microfloat.checkpoint.container import DTYPES
from microfloat.checkpoint.families import DIALECTS, FAMILIES, WRITTEN, Family, dialect_of, family_named, unknown_target
from microfloat.checkpoint.families.patterns import module_of
from microfloat.checkpoint.families.writing import Kind, Manifest, kind_of_layer, lacks_scale
from microfloat.checkpoint.folder import has_cache, without_quantization
from microfloat.checkpoint.records import NO_ACTIVATION, Record
from microfloat.errors import CheckpointError, checkpoint_error, invalid_type, invalid_value, kind_of

JOURNAL = ".microfloat.json"
PARTIAL = ".partial"


class Progress(NamedTuple):
    """Position of a running save or conversion, in bytes of output; `name` is the tensor, `shard` counts from one.

    While `convert` measures the weights, before it writes, `shard` is 0, and while it verifies, afterwards, it is
    `shards` + 1; the bytes are then bytes of weights.
    """

    done: int
    total: int
    name: str
    shard: int
    shards: int


@dataclass(frozen=True)
class Job:
    """The tensors of one module: their entries, and `fill`, which hands their data to a `Put`, in pieces."""

    entries: tuple[Entry, ...]
    fill: Callable[[Put], None]


@dataclass(frozen=True)
class Plan:
    """A checkpoint to be written.

    `documents`: JSON files by name; `copies`: other files by name. `identity`: everything that decides the bytes; with
    None an interrupted attempt is not continued. `prepare` is called once before anything is written.
    """

    jobs: Sequence[Job]
    documents: Mapping[str, Any] = field(default_factory=dict)
    copies: Mapping[str, Path] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    identity: Any = None
    prepare: Callable[[], object] = lambda: None


class Written(NamedTuple):
    """Result of `write`: names of the shards, how many of them an earlier attempt had finished, bytes of tensors."""

    shards: list[str]
    resumed: int
    nbytes: int


def write(
    path: str | os.PathLike, plan: Plan, *, max_shard_size: int, resume: bool = True,
    progress: Callable[[Progress], object] | None = None, check: Callable[[Path], None] | None = None,
) -> Written:  # fmt: skip
    """Write a checkpoint to a folder that does not exist yet or, for a name that ends in ".safetensors", to one file.

    The result grows in the folder ``<path>.partial`` and gets its name when it is whole and `check`, called with it,
    raises nothing. An attempt that was interrupted leaves complete shards there, which the next one keeps, with
    `resume`. Raises CheckpointError where the destination exists, another process writes it, or the disk is full.
    """
    target = as_path("path", path, "a str or a pathlib.Path, that of a folder or a .safetensors file to be written")
    if progress is not None and not callable(progress):
        raise invalid_type("progress", kind_of(progress), "a function of a Progress, or None")
    if target.name in ("", ".."):
        raise invalid_value("path", target, "the name of a folder that is made", f"Such as {target / 'model'}.")
    is_file = target.suffix == ".safetensors"
    groups, copies = [job.entries for job in plan.jobs], {} if is_file else plan.copies
    if is_file:
        _check_beside(target, plan.documents)
    shards = _writer.plan_shards(groups, max_shard_size, plan.metadata, target.name if is_file else "")
    _check_absent(target)
    partial = target.with_name(target.name + PARTIAL)
    if os.path.lexists(partial) and not partial.is_dir():
        raise _in_the_way(partial)
    digest = hashlib.sha256(json.dumps(plan.identity, sort_keys=True, default=str).encode())
    for shard in shards:
        digest.update(shard.name.encode() + shard.header)
    journal = {"identity": digest.hexdigest()}
    resume = resume and plan.identity is not None and _journal(partial) == journal
    _check_room(target, sum(one.size for one in shards if not (resume and _writer.is_complete(partial, one))))
    plan.prepare()
    partial.mkdir(parents=True, exist_ok=True)
    with _locked(partial):
        if not resume:
            _clear(partial)
        _writer.write_json(partial / JOURNAL, journal)
        resumed = _write_shards(partial, plan, shards, progress)
        documents = dict(plan.documents)
        if len(shards) > 1:
            documents[_writer.INDEX] = _writer.index_of(shards)
        for name, document in documents.items():
            _writer.write_json(partial / name, document)
        for name, source in copies.items():
            _writer.copy_file(source, partial / name)
        _remove_others(partial, {JOURNAL, *documents, *copies, *(shard.name for shard in shards)})
        if check is not None:
            check(partial / target.name if is_file else partial)
        if target.is_dir():
            target.rmdir()
        for name in documents if is_file else ():  # a single file is never seen without its configurations
            os.replace(partial / name, target.with_name(name))
        os.rename(partial / target.name if is_file else partial, target)
        _writer.sync_folder(target.parent)
        if is_file:
            _clear(partial)
            partial.rmdir()
        else:
            (target / JOURNAL).unlink()
    return Written([shard.name for shard in shards], resumed, sum(shard.size for shard in shards))


def _check_beside(target: Path, documents: Mapping[str, Any]) -> None:
    """Raise CheckpointError where the folder of a single file has a configuration that says something else."""
    for name, document in documents.items():
        beside = target.with_name(name)
        if beside.exists() and json.loads(beside.read_text(encoding="utf-8")) != json.loads(json.dumps(document)):
            raise CheckpointError(
                f"{beside} exists and says something else than the configuration of {target.name}. "
                "Save into a folder of its own, or with config=False."
            )


def _write_shards(
    folder: Path, plan: Plan, shards: Sequence[Shard], progress: Callable[[Progress], object] | None
) -> int:
    """Write the shards that are missing; returns the number of shards that were there."""
    written, total = 0, sum(shard.size for shard in shards)

    def count(number: int, name: str, nbytes: int) -> None:
        nonlocal written
        written += nbytes
        if progress is not None:
            progress(Progress(written, total, name, number, len(shards)))

    resumed = 0
    for number, shard in enumerate(shards, 1):
        if _writer.is_complete(folder, shard):
            resumed += 1
            count(number, shard.name, shard.size)
        else:
            jobs = (job for job in plan.jobs if job.entries and job.entries[0].name in shard.starts)
            _write_shard(folder, shard, jobs, functools.partial(count, number))
    return resumed


def _write_shard(folder: Path, shard: Shard, jobs: Iterable[Job], count: Callable[[str, int], None]) -> None:
    with _writer.writing(folder, shard) as put:
        count(shard.name, len(shard.header))

        def put_and_count(name: str, array: np.ndarray, start: int) -> None:
            put(name, array, start)
            count(name, array.nbytes)

        for job in jobs:
            job.fill(put_and_count)


def _journal(folder: Path) -> Any:
    """The contents of the journal of a partial folder, None without one."""
    try:
        return json.loads((folder / JOURNAL).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _check_absent(target: Path) -> None:
    if target.is_dir() and not any(target.iterdir()):
        if target.is_symlink() or os.path.ismount(target):
            kind = "a link" if target.is_symlink() else "a mount point"
            raise CheckpointError(
                f"{target} is {kind}, in whose place no folder can be put. Choose a folder inside it, such as "
                f"{target / 'model'}."
            )
        return
    if target.exists() or target.is_symlink():
        raise CheckpointError(f"{target} exists already. Choose another destination, or remove it first.")


def _check_room(target: Path, size: int) -> None:
    """Raise CheckpointError where the folder that will hold a destination cannot be written, or has no space for it."""
    folder = next(parent for parent in target.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK | os.X_OK):
        raise CheckpointError(f"{folder} cannot be written. Choose another destination, or change its permissions.")
    if shutil.disk_usage(folder).free < size:
        raise _writer.disk_full(target, size, folder)


def _remove_others(folder: Path, names: set[str]) -> None:
    """Remove the files of other attempts; a partial folder holds nothing else."""
    for entry in folder.iterdir():
        if entry.name not in names and not entry.is_dir():
            entry.unlink()


def _clear(partial: Path) -> None:
    """Empty a partial folder; CheckpointError for one that no journal marks as ours."""
    if not _journal(partial) and {entry.name for entry in partial.iterdir()} - {JOURNAL + ".tmp"}:
        raise _in_the_way(partial)
    _remove_others(partial, set())


def _in_the_way(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} is in the way: it was not made by this library. Remove or rename it.")


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Refuse a second process; the system frees the lock of one that was killed."""
    try:
        import fcntl
    except ImportError:  # systems without it have no such lock
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"Another process writes {folder}. Wait until it has finished.") from None
        yield
    finally:
        os.close(handle)


def save(
    records: Mapping[str, Record] | Iterable[Record], path: str | os.PathLike, *, format: str,
    config: bool | Mapping[str, Any] = True, max_shard_size: int | str = "5GB",
    producer: Mapping[str, str] | None = None, progress: Callable[[Progress], object] | None = None,
) -> list[str]:  # fmt: skip
    """Write records as a checkpoint of the family `format`, and return the names of its shards.

    * `records`: a Checkpoint, a dictionary, or records one after the other; plain ones are written as they are.
    * `path`: a folder, or a name that ends in ".safetensors"; it must not exist. A folder appears when it is whole.
    * `format`: a family that is written, such as "ct:nvfp4"; a target of `convert`, such as "ct:fp8_dynamic", for
      records of its format; "ct:mixed" for several formats of compressed-tensors; "microfloat:native" for every format;
      "plain" for records without one.
    * `config`: write the configurations of the family. A dictionary is the model's own config.json to be completed;
      True takes that of a Checkpoint.
    * `producer`: name and version of who writes; microfloat's own by default.

    Raises ValueError for a record that the family cannot hold, which names the families that can, and CheckpointError
    for a destination that exists or a full disk.
    """
    limit = _writer.byte_count(max_shard_size)
    return write(path, planned(records, format, config, producer), max_shard_size=limit, progress=progress).shards


def planned(
    records: Mapping[str, Record] | Iterable[Record], format: str, config: bool | Mapping[str, Any] = True,
    producer: Mapping[str, str] | None = None,
) -> Plan:  # fmt: skip
    """The plan of the files that `save` writes for these records."""
    if format not in (*SAVED, *WRITTEN, "plain"):
        raise unknown_target("format", str(format), [*SAVED, *WRITTEN, "plain"])
    every = list(records.values() if isinstance(records, Mapping) else records)
    for record in every:
        if not isinstance(record, Record):
            raise invalid_type("records", type(record), "Records, as load(path).values() gives them")
    families = [family_for(record, format) for record in every]
    dtype = next((one.codes.dtype for one in every if one.format is None and one.codes.dtype.name in _FLOATS), None)
    jobs = []
    for record, family in zip(every, families, strict=True):
        tensors = {record.name: record.codes}
        if record.tensor_scale is not None and not has_divisor(record, family):
            got, needed = f"a tensor scale of {np.min(record.tensor_scale):g}", f"its reciprocal, which {format} stores"
            raise invalid_value(
                record.name, got, needed, "Quantize the values again, or choose a format that multiplies."
            )
        if family is not None:
            tensors = dict(family.encode(family, record, scale_dtype(record, dtype)))
        entries = tuple(Entry.of(name, array) for name, array in tensors.items())
        jobs.append(Job(entries, functools.partial(put_all, tensors)))
    made: dict[str, Any] = {}
    if config is not False:
        existing = getattr(records, "configs", {}) if config is True else {"config.json": dict(config)}
        named = next((family.name for family in families if family is not None), "")
        made = documents(named, _with_known_inputs(every, families, format), existing, producer)
    return Plan(jobs, made, {}, metadata_for(family_named(format), every))


_FLOATS = ("bfloat16", "float16", "float32")


def put_all(tensors: Mapping[str, np.ndarray], put: Put) -> None:
    """Hand whole tensors to a `Put`."""
    for name, array in tensors.items():
        put(name, array, 0)


def _with_known_inputs(records: Sequence[Record], families: Sequence[Family | None], format: str) -> list[Record]:
    """The records as configurations describe them: weight-only, with a warning, without an input scale to store."""
    lost = [one.name for one, family in zip(records, families, strict=True) if family and _loses_inputs(one, family)]
    if lost:
        warnings.warn(
            f"save: {len(lost)} layers, such as {module_of(lost[0])}, quantize their inputs with a scale that {format} "
            "stores, and have none: they are written as weight-only. WeightActivation(..., scales='static') and "
            "mf.calibrate measure such scales.", UserWarning, stacklevel=4,
        )  # fmt: skip
    bare = set(lost)
    return [replace(one, activation=NO_ACTIVATION) if one.name in bare else one for one in records]


def _loses_inputs(record: Record, family: Family) -> bool:
    """True where the configurations of a family cannot say how the input of a layer is quantized."""
    if dialect_of(family.name).write is None or record.format is None:
        return False
    is_static = any(one.activation == "static" for one in family.writes.values())
    if is_static and record.activation.get("scheme") == "dynamic":
        return True
    return record.source is None and lacks_scale(record.format, record.activation)


def scale_dtype(record: Record, dtype: np.dtype | None = None) -> np.dtype:
    """The dtype of FP32 scales in a family that stores the model's: the stored one, or `dtype` if no scale changes."""
    stored = record.source.tensors.get("scale") if record.source else None
    if stored is not None and stored.dtype in ("F32", "F16", "BF16"):
        return DTYPES[stored.dtype][1]
    if dtype is None or record.scale is None or record.scale.dtype != np.float32:
        return np.dtype(np.float32)
    with np.errstate(all="ignore"):
        exact = np.array_equal(record.scale.astype(dtype).astype(np.float32), record.scale, equal_nan=True)
    return dtype if exact else np.dtype(np.float32)


def has_divisor(record: Record, family: Family | None) -> bool:
    """False where the family divides by a tensor scale of which float32 has no reciprocal: 0, or almost 0."""
    level = record.tensor_scale if family is not None and family.divides else None
    return level is None or bool((np.abs(level) > 2.0**-128).all())


def family_for(record: Record, format: str) -> Family | None:
    """The family under which `save` stores a record; None for a plain one. ValueError where none of `format` can."""
    if record.problem is not None:
        raise checkpoint_error(record.name, [record.problem])
    if record.format is None:
        return None
    able = [name for name, families in SAVED.items() if any(family.holds(record.format) for family in families)]
    if format not in SAVED and WRITTEN[format][1].cast.format == record.format:
        return WRITTEN[format][0]
    if format not in able:
        raise invalid_value(
            record.name, f"the format {record.format.name} for {format}", f"a format that {format} can hold",
            f"Families that can: {', '.join(able) or 'none, as it is a format of your own'}.",
        )  # fmt: skip
    return next(family for family in SAVED[format] if family.holds(record.format))


# The families of each name that `save` takes.
SAVED: dict[str, list[Family]] = {family.name: [family] for family in FAMILIES if family.writes} | {
    dialect.mixed: [family for family in dialect.families if family.writes] for dialect in DIALECTS if dialect.mixed
}


def is_linear(record: Record) -> bool:
    """True for a matrix of a layer that consumers would look for among quantized ones."""
    shape = record.logical_shape
    return record.name.endswith(".weight") and len(shape) == 2 and not re.search(r"embed(?!_out)|norm", record.name)


def documents(
    family: str, records: Iterable[Record], existing: Mapping[str, Any], producer: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The JSON files of a checkpoint: the model's configuration (`existing`, by file name), completed by the family's
    description of `records`; `producer` is microfloat unless it is named.

    Layers in high precision are listed, with the output layer among them, since it often shares the embedding's matrix
    and then has no tensor of its own.
    """
    base = existing.get("config.json")
    base = without_quantization(base) if isinstance(base, dict) else {}
    kinds: dict[Kind, list[str]] = {}
    kept = {"lm_head"}
    for record in records:
        if record.format is not None:
            kinds.setdefault(kind_of_layer(record.format, record.activation), []).append(module_of(record.name))
        elif is_linear(record):
            kept.add(module_of(record.name))
    params = existing.get("params.json")  # of the model, where hf_quant_config.json describes a quantization alone
    params = without_quantization(params) if isinstance(params, dict) else {}
    params = {name: value for name, value in params.items() if name != "quantization"}
    others = {"params.json": params} if params else {}
    write = dialect_of(family).write
    if write is None or not kinds:
        return {**({"config.json": base} if base else {}), **others}
    ignore = sorted(kept.difference(*kinds.values()))
    producer = {"name": "microfloat", "version": __version__} if producer is None else dict(producer)
    made = write(Manifest(family, kinds, ignore, has_cache(existing), producer))
    return {"config.json": {**base, "quantization_config": made.quantization}, **others, **made.documents}


def metadata_for(family: str, records: Iterable[Record]) -> dict[str, str]:
    """The metadata of the files of a checkpoint that is written in a family."""
    describe = dialect_of(family).metadata
    return {"format": "pt", **(describe(records) if describe is not None else {})}
