"""`convert`: one checkpoint into another format, module by module, and the report about it."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from microfloat._version import __version__
from microfloat.arguments import as_bool, check_name
from microfloat.checkpoint._casting import (
    cast_slab,
    experts_of,
    matrix_of,
    measure,
    needs_amax,
    outline,
    slabs,
    values,
)
from microfloat.checkpoint._modules import (
    DEFAULT_FUSE,
    check_fuse,
    check_ignore,
    fused_group,
    ignored_by,
    is_kept,
    module_of,
)
from microfloat.checkpoint._saving import Job, Plan, Progress, Put, documents, is_linear, producer_of, write
from microfloat.checkpoint._verification import check_unchanged, verify_written
from microfloat.checkpoint._writer import Entry, byte_count
from microfloat.checkpoint.families import WRITTEN, Family, torchao
from microfloat.checkpoint.families.writing import Member, Written
from microfloat.checkpoint.folder import CONFIGS, locate
from microfloat.checkpoint.load import Checkpoint, load
from microfloat.checkpoint.records import NO_ACTIVATION, Activation, Finding, Record
from microfloat.errors import CheckpointError, checkpoint_error, invalid_value, unknown_name
from microfloat.recipes import Cast

PLAIN = {"bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16), "f32": np.dtype(np.float32)}


@dataclass(frozen=True)
class Layer:
    """One parameter of a conversion.

    `action`: "cast", "carried" (the same codes), "kept" (as it was) or "dequantized". `reason`: why it was not cast.
    `sqnr_db`: of what was written against the source; None where it was not verified or is the same.
    """

    name: str
    action: str
    source: str
    format: str
    reason: str = ""
    sqnr_db: float | None = None
    bytes_before: int = 0
    bytes_after: int = 0


@dataclass
class Report:
    """Result of `convert`. `layers`: every parameter; `notes`: sentences about groups and scales; sizes in bytes."""

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
        return [layer for layer in self.layers if layer.action != "kept"]

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
            rows["worst layer"] = f"{self.worst.name}: {self.worst.sqnr_db:.2f} dB"
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


_ACTIONS = ("cast", "carried", "dequantized", "kept")


def _megabytes(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"


# ---- what becomes of each parameter ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One parameter: its record, what happens to it, and under which cast, family and group of one tensor scale."""

    record: Record
    action: str
    reason: str = ""
    family: Family | None = None
    cast: Cast | None = None
    dtype: np.dtype = PLAIN["f32"]
    group: str | None = None
    activation: Activation = field(default_factory=NO_ACTIVATION.copy)
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    turned: bool = False

    @property
    def made(self) -> Record:
        """The record that will be written: the source itself, or one without data."""
        if self.cast is None:
            return self.record
        return replace(outline(self.record, self.cast.format), activation=self.activation, extras=self.extras)

    def encode(self, record: Record) -> dict[str, np.ndarray]:
        """The tensors of a record, or of a slab of it, in the target's family."""
        if self.family is None:
            return {record.name: record.codes}
        if self.cast is not None:
            record = replace(record, activation=self.activation, extras=self.extras)
        return self.family.encode(self.family, record, self.dtype)


@dataclass(frozen=True)
class Target:
    """The format of a conversion: a family and a cast, or a plain dtype."""

    name: str
    family: Family | None = None
    written: Written | None = None
    dtype: np.dtype | None = None

    @property
    def cast(self) -> Cast | None:
        """The cast of the weights."""
        return None if self.written is None else self.written.cast


def target_of(to: str, scale_rule: str | None, four_over_six: bool) -> Target:
    """The target of a name such as "ct:nvfp4"; ValueError for an unknown one, or a scale rule that does not fit it."""
    check_name("to", to)
    if to in PLAIN:
        if scale_rule is not None or four_over_six:
            raise invalid_value("scale_rule", scale_rule or "four_over_six", f"None, as {to} has no scales")
        return Target(to, dtype=PLAIN[to])
    if to not in WRITTEN:
        raise unknown_name("to", to, [*WRITTEN, *PLAIN], _hint_of(to))
    if four_over_six and scale_rule is not None:
        raise invalid_value("four_over_six", f"True with scale_rule={scale_rule!r}", "one of them")
    family, written = WRITTEN[to]
    rule = "four_over_six" if four_over_six else written.cast.scale_rule if scale_rule is None else scale_rule
    cast = Cast(written.cast.format, rule)
    if cast.tensor_scale != written.cast.tensor_scale:  # the format has a tensor for it, or has none
        needed = f"a rule with {'a' if written.cast.tensor_scale else 'no'} tensor scale, as {to} stores it"
        raise invalid_value("scale_rule", repr(rule), needed)
    return Target(to, family, written._replace(cast=cast))


def _hint_of(to: str) -> str:
    """A hint for a format without its family, or for our own container without a format; "" for other names."""
    if to.lower() in ("native", "microfloat:native"):
        return "That is the container alone; its targets name the format in it, such as microfloat:nvfp4_row."
    *first, last = [repr(name) for name in WRITTEN if name.partition(":")[2] == to.lower()] or [""]
    return f"Did you mean {', '.join(first) + ' or ' if first else ''}{last}?" if last else ""


def decide(
    checkpoint: Checkpoint, target: Target, ignore: Sequence[str], fuse: Sequence[str], notes: list[str]
) -> list[Step]:
    """A step for each parameter, in the order of the files."""
    model_dtype = _model_dtype(checkpoint)
    turned = checkpoint.config.get("model_type") in _TURNED_EXPERTS
    steps = [_step(record, target, ignore, model_dtype, turned) for record in checkpoint.values()]
    modules = [module_of(name) for name in checkpoint]
    unused = [pattern for pattern in ignore if not any(ignored_by(module, [pattern]) for module in modules)]
    if unused:
        notes.append(f"ignore: no parameter is covered by {', '.join(map(repr, unused))}")
    groups: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        key = fused_group(module_of(step.record.name), fuse)
        if key is not None and step.action in ("cast", "carried"):
            groups.setdefault(key, []).append(index)
    for key, members in groups.items():
        _share(steps, members, key, target, notes)
    announced = target.written is not None and target.written.activation == "static"
    bare = sum(step.action == "cast" and step.made.activation.get("scale") is None for step in steps)
    if announced and bare:
        notes.append(
            f"{target.name} announces static input scales, but the source has none for {bare} layers, and none are "
            "written: an engine has to measure them itself. ct:fp8_dynamic needs none; mf.calibrate measures them."
        )
    return steps


_TURNED_EXPERTS = {"gpt_oss", "llama4", "llama4_text"}  # their experts are stored [E, K, N]


def _model_dtype(checkpoint: Checkpoint) -> np.dtype:
    """The dtype of the model: that of its configuration, bfloat16 without one."""
    config = checkpoint.config
    name = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    return next((dtype for dtype in PLAIN.values() if dtype.name == name), PLAIN["bf16"])


def _step(record: Record, target: Target, ignore: Sequence[str], model_dtype: np.dtype, turned: bool) -> Step:
    module = module_of(record.name)
    pattern = ignored_by(module, ignore)
    if record.format is None:
        return _step_of_plain(record, target, module, pattern, turned)
    if _LOW_RANK & set(record.extras):
        raise CheckpointError(
            f"{record.name}: a low-rank branch (SVDQuant) cannot be converted; no other format has it."
        )
    if target.written is None or target.cast is None or pattern is not None:
        reason = "" if pattern is None else f"ignored by {pattern!r}"
        return _dequantized(record, reason, target.dtype or model_dtype)
    unsuitable = _why_not(record, target)
    if not unsuitable and record.format == target.cast.format and "pre_quant_scale" not in record.extras:
        return Step(record, "carried", family=target.family, dtype=_scale_dtype(record, model_dtype))
    if unsuitable:
        return _dequantized(record, unsuitable, model_dtype)
    return _cast_step(record, target, model_dtype)


def _dequantized(record: Record, reason: str, dtype: np.dtype) -> Step:
    """A step to a plain tensor; transformers stores the plain experts of gpt-oss the other way round, [E, K, N]."""
    turned = record.source is not None and record.source.family == "gptoss:hf" and len(record.logical_shape) == 3
    return Step(record, "dequantized", reason, dtype=dtype, turned=turned)


_LOW_RANK = {"svdquant_lora_a", "svdquant_lora_b"}
_CAPACITY = {True: 2688.0, False: 448.0}  # of a format with a tensor scale, and of FP8


def _cast_step(record: Record, target: Target, dtype: np.dtype) -> Step:
    """A cast; a static input scale is kept where the target has such scales, in the unit of its format."""
    assert target.written is not None
    cast, scheme, fmt, _ = target.written
    stored, of_input = record.activation.get("scale"), record.activation.get("format")
    activation: Activation = {"scheme": scheme, "scale": None, "format": fmt}
    takes = cast.format.tensor_scale is not None or cast.format.is_per_tensor
    if stored is not None and takes and record.format is not None:
        two_level = (of_input or record.format).tensor_scale is not None
        unit = np.float32(_CAPACITY[two_level] / _CAPACITY[cast.format.tensor_scale is not None])
        activation = {"scheme": "static", "scale": np.asarray(stored * unit, np.float32), "format": cast.format}
    extras = {name: array for name, array in record.extras.items() if name in _CACHE_SCALES}
    return Step(record, "cast", "", target.family, cast, dtype, activation=activation, extras=extras)


_CACHE_SCALES = ("k_scale", "v_scale", "q_scale", "prob_scale")


def _step_of_plain(record: Record, target: Target, module: str, pattern: str | None, turned: bool) -> Step:
    floating = record.codes.dtype in (*PLAIN.values(), np.dtype(np.float64))
    if target.cast is None:
        same = not floating or record.codes.dtype == target.dtype
        return Step(record, "kept") if same else Step(record, "dequantized", dtype=target.dtype or PLAIN["f32"])
    stacked = record.codes.ndim == 3 and ".experts." in f".{record.name}."
    is_weight = floating and (stacked or (record.codes.ndim == 2 and record.name.rpartition(".")[2] == "weight"))
    if not is_weight:
        return Step(record, "kept")
    turned = turned and stacked
    if turned:
        codes = np.swapaxes(record.codes, 1, 2)
        record = replace(record, codes=codes, logical_shape=codes.shape)
    reason = "kept by default" if is_kept(module) else _why_not(record, target)
    if pattern is not None:
        reason = f"ignored by {pattern!r}"
    if reason:
        return Step(replace(record, codes=np.swapaxes(record.codes, 1, 2)) if turned else record, "kept", reason)
    dtype = record.codes.dtype if record.codes.dtype in PLAIN.values() else PLAIN["f32"]
    return Step(record, "cast", "", target.family, target.cast, dtype)


def _why_not(record: Record, target: Target) -> str:
    """The reason why the target cannot store a parameter, or nothing."""
    assert target.cast is not None
    assert target.family is not None
    fmt, length = target.cast.format, record.logical_shape[-1]
    block = fmt.block[1]
    if target.family.experts_only and len(record.logical_shape) != 3:
        return f"{target.family.name} quantizes stacked experts alone"
    if fmt.scale.bits == 8 and block is not None and length % block:
        return f"{length} columns are no multiple of {block}"
    return "it has no elements" if not record.codes.size else ""


def _scale_dtype(record: Record, model_dtype: np.dtype) -> np.dtype:
    """The dtype of the scales of a record that is carried over: the one it has."""
    stored = record.source.tensors.get("scale") if record.source else None
    return {"BF16": PLAIN["bf16"], "F16": PLAIN["f16"]}.get(stored.dtype if stored else "", PLAIN["f32"])


def _share(steps: list[Step], members: list[int], key: str, target: Target, notes: list[str]) -> None:
    """Give the members of a fused group one tensor scale, or one scale, and one input scale."""
    assert target.cast is not None
    assert target.written is not None
    if target.cast.format.tensor_scale == "tensor":
        levels = {np.asarray(steps[i].record.tensor_scale).tobytes() for i in members if steps[i].action == "carried"}
        mixed = len({steps[i].action for i in members}) > 1
        if len(levels) > 1 or mixed:
            notes.append(f"{key}: its members had tensor scales of their own and were quantized again under one")
            for i in members:
                if steps[i].action == "carried":
                    steps[i] = _cast_step(steps[i].record, target, steps[i].dtype)
    if target.written.joint or target.cast.format.tensor_scale == "tensor":
        for i in members:  # of which those that are carried keep their scales: another would round them twice
            steps[i] = replace(steps[i], group=key)
    scales = [steps[i].made.activation.get("scale") for i in members]
    found = [scale for scale in scales if scale is not None]
    if found and len({None if scale is None else scale.tobytes() for scale in scales}) > 1:
        largest = max(found, key=lambda scale: float(np.max(scale)))
        notes.append(f"{key}: its members had input scales of their own; they share the largest")
        for i in members:
            record, activation = steps[i].record, steps[i].made.activation
            activation = Activation(scheme="static", scale=largest, format=activation.get("format"))
            source = record.source and record.source._replace(
                divisors={role: array for role, array in record.source.divisors.items() if role != "input_scale"}
            )
            steps[i] = replace(
                steps[i], activation=activation, record=replace(record, activation=activation, source=source)
            )


# ---- the data ----------------------------------------------------------------------------------------------------


def _measured(
    steps: Sequence[Step], src: object, progress: Callable[[Progress], object] | None
) -> dict[str, np.ndarray]:
    """float32 [E], the amax of each matrix of every parameter to be cast, that of its fused group where it has one.

    Raises CheckpointError, before anything is written, for weights that are NaN or infinite: each would take the other
    elements of its block with it.
    """
    amaxes, findings = {}, []
    groups: dict[str, np.float32] = {}
    casts = [step for step in steps if step.action == "cast"]
    done, total = 0, sum(step.record.nbytes for step in casts)
    for step in casts:
        name = step.record.name
        amaxes[name], lost = measure(step.record)
        if lost:
            message = f"{lost} of {np.prod(step.record.logical_shape)} weights are NaN or infinite."
            findings.append(Finding("nan-weight", "error", name, message, _MEND))
        if step.group is not None:
            largest = amaxes[name].max(initial=np.float32(0))
            groups[step.group] = max(groups.get(step.group, np.float32(0)), largest)
        done += step.record.nbytes
        if progress is not None:
            progress(Progress(done, total, name, 0, 0))
    if findings:
        raise checkpoint_error(src, findings)
    for step in casts:
        if step.group is not None:
            amaxes[step.record.name] = np.full(experts_of(step.record), groups[step.group], np.float32)
    return amaxes


_MEND = "Mend the weights, or keep the layer as it is with ignore= (--ignore)."


def _fill(step: Step, amaxes: Mapping[str, np.ndarray], meter: "_Peak") -> Callable[[Put], None]:
    """The writing of one parameter."""

    def put_whole(put: Put) -> None:
        for name, array in step.encode(step.record).items():
            put(name, array, 0)

    def put_cast(put: Put) -> None:
        assert step.cast is not None
        sizes = {name: Entry.of(name, array).nbytes for name, array in step.encode(step.made).items()}
        written = dict.fromkeys(sizes, 0)
        found = amaxes[step.record.name] if needs_amax(step.cast) else None
        count = experts_of(step.record)
        rounded = step.dtype if step.family is not None and step.family.model_scales else PLAIN["f32"]
        for expert, _, slab in slabs(step.record, step.cast.format.block[0] or 1):
            made = cast_slab(slab, step.cast, None if found is None else found[expert], rounded)
            for name, array in step.encode(made).items():
                # One scale per matrix comes with each of its slabs, and is written with the first.
                if written[name] < sizes[name] * (expert + 1) // count:
                    put(name, array, written[name])
                    written[name] += array.nbytes
            meter.look()
        assert written == sizes, (written, sizes)

    def decoded() -> Iterator[np.ndarray]:
        if step.turned:
            for expert in range(experts_of(step.record)):
                yield np.ascontiguousarray(matrix_of(step.record, expert).dequantize(step.dtype).T)
        else:
            for _, _, slab in slabs(step.record):
                yield values(slab).astype(step.dtype)

    @np.errstate(all="ignore")
    def put_decoded(put: Put) -> None:
        start = 0
        for array in decoded():
            put(step.record.name, array, start)
            start += array.nbytes
            meter.look()

    return {"cast": put_cast, "dequantized": put_decoded}.get(step.action, put_whole)


def _entries(step: Step) -> tuple[Entry, ...]:
    """The tensors that a step writes."""
    if step.action == "dequantized":
        shape = step.record.logical_shape
        return (Entry(step.record.name, step.dtype, (shape[0], shape[2], shape[1]) if step.turned else shape),)
    return tuple(Entry.of(name, array) for name, array in step.encode(step.made).items())


class _Peak:
    """The most memory that the process held beside mapped files, looked at while arrays are alive."""

    def __init__(self) -> None:
        self.bytes: int | None = None

    def look(self) -> None:
        try:
            with open("/proc/self/status", encoding="ascii") as file:
                line = next((line for line in file if line.startswith("RssAnon:")), None)
        except OSError:
            return
        if line is not None:
            self.bytes = max(self.bytes or 0, int(line.split()[1]) * 1024)


# ---- the call ----------------------------------------------------------------------------------------------------


def convert(
    src: str | os.PathLike, dst: str | os.PathLike, *, to: str, scale_rule: str | None = None,
    ignore: Iterable[str] | str = (), fuse: Iterable[str] | str | None = DEFAULT_FUSE, four_over_six: bool = False,
    verify: bool = True, resume: bool = True, max_shard_size: int | str = "5GB",
    progress: Callable[[Progress], object] | None = None,
) -> Report:  # fmt: skip
    """Convert a checkpoint to another format, and report what became of every parameter.

    * `src`: a file or folder that `load` reads. `dst`: a folder, or a name that ends in ".safetensors".
    * `to`: a format that can be written, such as "ct:nvfp4" or "deepseek:fp8", or "bf16", "f16" or "f32".
    * `scale_rule`: the rule of the cast in place of the format's own; `four_over_six`: that rule, for NVFP4.
    * `ignore`: modules that stay in high precision beside `lm_head`, embeddings, routers, norms and biases: parts of
      names ("layers.0"), wildcards ("*.layers.0.*") or regular expressions ("re:.*down_proj").
    * `fuse`: groups that share one tensor scale, or under "modelopt:fp8" the scale of a matrix: "qkv", "gate_up", and
      "experts" (those of one layer).
    * `verify`: read the result back from disk and compare it. `max_shard_size`: bytes, or text such as "5GB".
    * `resume`: go on where the same conversion was interrupted; False starts again.
    * `progress` is called with a `Progress` now and then.

    Codes that the source has already are carried over byte for byte; all others are dequantized to float32 and cast.
    One slab of a tensor is in memory at a time. Until the result is whole it grows as ``<dst>.partial``. Raises
    ValueError for arguments, and CheckpointError for a source that is damaged or has NaN or infinite weights where they
    would be cast (found before anything is written), a destination that exists, a full disk, and a result that is not
    read back as it was written.
    """
    started = time.perf_counter()
    verify, resume = as_bool("verify", verify), as_bool("resume", resume)
    four_over_six = as_bool("four_over_six", four_over_six)
    target = target_of(to, scale_rule, four_over_six)
    patterns, kinds, limit = check_ignore(ignore), check_fuse(fuse), byte_count(max_shard_size)
    checkpoint = load(src)
    report = Report(str(src), str(dst), to)
    steps = decide(checkpoint, target, patterns, kinds, report.notes)
    peak, amaxes = _Peak(), dict[str, np.ndarray]()
    jobs = [Job(_entries(step), _fill(step, amaxes, peak)) for step in steps]
    files = {path: path.stat() for path in sorted(locate(src).files.values())}
    identity = {
        "version": __version__, "to": to, "scale_rule": scale_rule, "four_over_six": four_over_six,
        "ignore": patterns, "fuse": kinds,
        "files": [(str(path.resolve()), found.st_size, found.st_mtime_ns) for path, found in files.items()],
    }  # fmt: skip
    measured: dict[str, float] = {}
    members = [
        Member(module_of(made.name), made.format, made.activation)
        for step in steps if step.family is not None and (made := step.made).format is not None
    ]  # fmt: skip
    kept = [module_of(layer.record.name) for layer in steps if layer.family is None and is_linear(layer.record)]
    made = documents(target.family, members, kept, checkpoint.configs, producer_of())
    if target.dtype is not None:
        made["config.json"] = _with_dtype(made.get("config.json", {}), target.dtype)
    metadata = {"format": "pt"}
    if target.family is torchao.NATIVE:
        about = {step.record.name: step.made for step in steps if step.family is not None}
        metadata[torchao.NATIVE_KEY] = torchao.native_metadata(about)

    def prepare() -> None:
        amaxes.update(_measured(steps, src, progress))

    plan = Plan(jobs, made, _copies(Path(src)), metadata, identity, prepare)

    def check(path: Path) -> None:
        check_unchanged(files)
        if verify:
            measured.update(verify_written(steps, path, target, report.notes))

    written = write(dst, plan, max_shard_size=limit, resume=resume, progress=progress, check=check)
    report.layers = [_layer(step, job, measured) for step, job in zip(steps, jobs, strict=True)]
    report.bytes_read = sum(found.st_size for found in files.values())
    report.bytes_written, report.shards, report.resumed_shards = written.nbytes, written.shards, written.resumed
    report.verified, report.peak_bytes, report.seconds = verify, peak.bytes, time.perf_counter() - started
    return report


def _layer(step: Step, job: Job, measured: Mapping[str, float]) -> Layer:
    """The line of the report about one parameter."""
    record, made = step.record, step.made.format
    before = "plain" if record.source is None else record.source.family
    dtype = step.dtype if step.action == "dequantized" else record.codes.dtype
    return Layer(
        record.name, step.action, before, dtype.name if made is None or step.family is None else made.name, step.reason,
        measured.get(record.name), record.nbytes, sum(entry.nbytes for entry in job.entries),
    )  # fmt: skip


def _with_dtype(config: dict[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """The configuration of a model whose weights have another dtype now."""
    return {key: dtype.name if key in ("dtype", "torch_dtype") else value for key, value in config.items()}


_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack", ".pkl", ".ckpt")
_LARGEST_COPY = 1 << 28


def _copies(src: Path) -> dict[str, Path]:
    """Tokenizer, templates and licences: small files of a folder that hold no weights."""
    if not src.is_dir():
        return {}
    return {
        path.name: path
        for path in sorted(src.iterdir())
        if path.is_file() and path.stat().st_size <= _LARGEST_COPY and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHTS) and path.name not in CONFIGS
    }  # fmt: skip
