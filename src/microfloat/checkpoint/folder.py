"""The files of a checkpoint: one file, a directory, or an index of shards; with the configurations beside them.

Of a configuration: where its descriptions of a quantization stand, and which dialect reads each of them.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from microfloat.arguments import as_path
from microfloat.checkpoint.container import Container, read_json_file
from microfloat.checkpoint.families import DIALECTS, Announcement, Read
from microfloat.checkpoint.records import Finding, some
from microfloat.errors import checkpoint_error

_INDEX = ".safetensors.index.json"
_CONFIG = "config.json"
FILES = (_CONFIG, *(dialect.document[0] for dialect in DIALECTS if dialect.document))
_KEYS = ("quantization_config", "compression_config")
_INNER = re.compile(r"(^|_)(text|llm|language|language_model|thinker|decoder|model)_config$")
_DEPTH = 3


class Folder(NamedTuple):
    """Files by the name that an index gives them, the weight map of the index, and the configurations by file name."""

    path: Path
    files: dict[str, Path]
    weight_map: dict[str, str] | None
    configs: dict[str, Any]
    findings: list[Finding]

    def open(self) -> Container:
        """All tensors; raises CheckpointError with the errors of all files."""
        return Container(self.files, self.weight_map, self.path)


def locate(path: str | os.PathLike[str]) -> Folder:
    """The files behind `path`: a safetensors file, an index, or a directory. Raises CheckpointError where none are."""
    path = as_path("path", path, "a str or a pathlib.Path, that of a checkpoint")
    found: list[Finding] = []
    root = path if path.is_dir() else path.parent
    if path.is_dir():
        files, weight_map = _in_directory(path, found)
    elif path.name.endswith(_INDEX):
        files, weight_map = _of_index(path, found)
    else:
        files, weight_map = {path.name: path}, None
        if missing := _missing_parts([path.name]):
            message = f"it is one of several files; {some(missing)} is not read with it."
            remedy = "Name the folder, or its index, to read all of them."
            found.append(Finding("part", "warn", path.name, message, remedy))
    others = () if any(name.startswith("consolidated") for name in files) else ("params.json",)  # of those alone
    read = {name: _json(root, name, found) for name in FILES if name not in others and (root / name).exists()}
    configs = {name: value for name, value in read.items() if isinstance(value, dict)}
    if any(finding.severity == "error" for finding in found):
        raise checkpoint_error(path, found)
    return Folder(path, files, weight_map, configs, found)


def _in_directory(path: Path, found: list[Finding]) -> tuple[dict[str, Path], dict[str, str] | None]:
    indices = sorted(
        entry.name for entry in path.iterdir()
        if entry.name.endswith(_INDEX) and entry.name.removesuffix(_INDEX) not in _BESIDE
    )  # fmt: skip
    preferred = f"model{_INDEX}"
    if indices:  # the name of a variant is longer than that of the model
        index = preferred if preferred in indices else min(indices, key=len)
        files, weight_map = _of_index(path / index, found)
        _name_others([name for name in indices if name != index], index, found)
        if left := [name for name in _missing_parts(list(files)) if (path / name).exists()]:
            message = f"it does not name {some(left)}, a part of the same files, which is not read."
            found.append(Finding("part", "warn", index, message, "Write the index again, if the part belongs to it."))
        return files, weight_map
    names = _one_set([entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors")], found)
    if not names:
        others = sorted(entry.name for entry in path.iterdir() if entry.suffix in _NOT_READ)
        beside = f", but {some(others)}" if others else ""
        message = f"no *.safetensors file and no *.safetensors.index.json stands in it{beside}."
        remedy = "Other files are not read. Convert pickles (.bin, .pt) that you trust; for GGUF take its original."
        raise checkpoint_error(path, [Finding("file", "error", path.name, message, remedy)])
    return {name: inside(path, name, found) for name in names}, None


_NOT_READ = (".gguf", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz")
_SHARD = re.compile(r"(?P<stem>.*?)[-_](?P<number>\d{1,6})-of-(?P<count>\d{1,6})\.safetensors")
_MODELS = ("model", "consolidated", "pytorch_model", "diffusion_pytorch_model")  # the most usual one first
_BESIDE = ("adapter_model", "adapter", "optimizer")  # stems of files that are no part of the model beside them


def _one_set(names: list[str], found: list[Finding]) -> list[str]:
    """The files of one model where no index lists them; findings name other weights in the folder, and lost parts."""
    sets: dict[str, list[str]] = {}
    for name in sorted(names):
        shard = _SHARD.fullmatch(name)
        sets.setdefault(shard["stem"] if shard else name.removesuffix(".safetensors"), []).append(name)
    numbered = [stem for stem, files in sets.items() if any(map(_SHARD.fullmatch, files))]
    known = [stem for stem in (*_MODELS, *(numbered if len(numbered) == 1 else ())) if stem in sets]
    others = [stem for stem in sets if stem not in (*_MODELS, *numbered, *_BESIDE)]
    if known and (numbered or "model" in known or not others):
        first, *_ = known
        whole = f"{first}.safetensors"
        made = [whole] if whole in sets[first] else sets[first]
        if made != [whole]:  # a file of a name of its own is a part that has no number
            made = [*made, *(file for stem in others for file in sets[stem])]
    else:
        made = [file for stem, files in sets.items() if stem not in _BESIDE for file in files] or sorted(names)
    if missing := _missing_parts(made):
        are = "is" if len(missing) == 1 else "are"
        message = f"no index stands beside it, and of its parts {some(missing)} {are} missing."
        remedy = "Download the missing files; to read a part of a model, name the file."
        found.append(Finding("file", "error", made[0], message, remedy))
    _name_others([name for name in sorted(names) if name not in made], "".join(made[:1]), found)
    return made


def _name_others(left: list[str], read: str, found: list[Finding]) -> None:
    """Add a finding about the weights, or indices, that are not read."""
    if left:
        message = f"the folder holds other weights too, which are not read: {some(left)}."
        found.append(Finding("other-weights", "info", read, message, "To read them, name the file."))


def _missing_parts(names: list[str]) -> list[str]:
    """The names of the other parts of shards that say how many there are."""
    others: dict[str, None] = {}
    for shard in filter(None, map(_SHARD.fullmatch, names)):
        start, digits = shard.start("number"), len(shard["number"])
        before, after = shard.string[:start], shard.string[start + digits :]
        others |= {f"{before}{i:0{digits}d}{after}": None for i in range(1, min(int(shard["count"]), _MOST_PARTS) + 1)}
    return [name for name in others if name not in names]


_MOST_PARTS = 10_000


def _of_index(path: Path, found: list[Finding]) -> tuple[dict[str, Path], dict[str, str] | None]:
    index = _json(path.parent, path.name, found)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(one, str) for one in weight_map.values())
    ):
        if not any(finding.tensor == path.name for finding in found):  # the text has a finding of its own
            message = "weight_map must map names of tensors, one at least, to names of files."
            remedy = "Write it again, or name the file with the weights."
            found.append(Finding("index", "error", path.name, message, remedy))
        return {}, None
    files = {}
    for name in sorted(set(weight_map.values())):
        if not name or "\0" in name or os.path.isabs(name) or PureWindowsPath(name).drive or ".." in Path(name).parts:
            message = f"the index names {name[:200]!r}, which is no file inside the checkpoint."
            found.append(Finding("path", "error", path.name, message, "Do not trust this checkpoint."))
        else:
            files[name] = inside(path.parent, name, found)
    return files, weight_map


def _json(root: Path, name: str, found: list[Finding]) -> Any:
    path = inside(root, name, found)
    if any(finding.id == "path" for finding in found):
        return None
    value, problems = read_json_file(path)
    found += problems
    return value


def inside(root: Path, name: str, found: list[Finding]) -> Path:
    """The path of a file; a link out of the directory is a finding, but for the `blobs` of a Hugging Face cache."""
    path = root / name
    try:
        real, home = path.resolve(), root.resolve()
        allowed = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
        if not any(real.is_relative_to(folder) for folder in allowed):
            message = f"it is a link to {real}, outside of the checkpoint."
            found.append(Finding("path", "error", name, message, "Copy the file, if you trust the link."))
        elif not stat.S_ISREG(real.stat().st_mode):
            found.append(Finding("file", "error", name, "it is no regular file."))
    except (OSError, RuntimeError) as error:
        message = f"the file cannot be opened: {getattr(error, 'strerror', None) or error}."
        found.append(Finding("file", "error", name, message, "Download the missing file, or mend the index."))
    return path


def announced(configs: Mapping[str, Any]) -> list[Announcement]:
    """The announcements of config.json, of the models inside it, and of the files of single dialects, in this order."""
    return [read(place, value) for place, _, value, read in _described(configs) if isinstance(value, dict) and value]


def misread(configs: Mapping[str, Any]) -> list[Finding]:
    """A warning for each description of a quantization that is no object, so that nothing of it is read."""
    return [
        Finding("config-disagrees", "warn", place, f"{key}: {type(value).__name__}, needed an object; it is not read.")
        for place, key, value, _ in _described(configs) if value is not None and not isinstance(value, dict)
    ]  # fmt: skip


def has_cache(configs: Mapping[str, Any]) -> bool:
    """True where the configurations speak of scales for a KV cache of FP8, the one that families announce."""
    found = [value for _, _, value, _ in _described(configs) if isinstance(value, dict)]
    schemes = [value.get("kv_cache_scheme") for value in found]
    bits = [one.get("num_bits", 8) if isinstance(one, dict) else 8 for one in schemes if one]
    return 8 in bits or any(value.get("kv_cache_quant_algo") == "FP8" for value in found)


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model, and of the models inside it, without descriptions of a quantization."""
    return {
        key: without_quantization(value) if _INNER.search(key) and isinstance(value, dict) else value
        for key, value in config.items() if key not in _KEYS
    }  # fmt: skip


def _described(configs: Mapping[str, Any]) -> Iterator[tuple[str, str, Any, Read]]:
    """The place, the key and the value of every description of a quantization, and the function that reads it."""
    stated = [(file, configs.get(file)) for file in (_CONFIG, "params.json")]
    for place, config in (one for file, found in stated for one in _places(file, found, _DEPTH)):
        yield from ((place, key, config[key], _announcement) for key in _KEYS if key in config)
    for dialect in DIALECTS:
        file, key = dialect.document or ("", "")
        second = configs.get(file)
        keys = (key, *dialect.entries)
        if dialect.read is not None and isinstance(second, dict) and any(one in second for one in keys):
            value = second.get(key, second)  # or the entries stand in the file themselves
            value = {"producer": second.get("producer"), **value} if isinstance(value, dict) else value
            yield file, key, value, dialect.read


def _places(place: str, config: Any, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A configuration, and the configurations of the models inside it."""
    if not isinstance(config, dict) or not depth:
        return
    yield place, config
    for key, inner in config.items():
        if _INNER.search(key):
            yield from _places(f"{place} ({key})" if place == _CONFIG else place, inner, depth - 1)


def _announcement(file: str, config: dict[str, Any]) -> Announcement:
    """The announcement of the dialect that has this quant_method, or without one these entries; else a refusal."""
    method, producer = config.get("quant_method"), config.get("producer")
    producer = producer.get("name") if isinstance(producer, dict) else None
    name = str(method).lower().replace("_", "-")
    for dialect in DIALECTS:
        known = any(fnmatchcase(name, one.replace("_", "-")) for one in dialect.methods)
        if method is None:  # its entries, or its producer, tell
            known = producer in dialect.methods or any(entry in config for entry in dialect.entries)
        if known and dialect.read is not None:
            return dialect.read(file, config)
    if method is None:
        keys = ", ".join(repr(key[:40]) for key in list(config)[:8])
        refusal = f"a quantization without quant_method is not read where its entries are {keys}."
        return Announcement(file, "unknown", "no quant_method", refusal=refusal)
    shown = str(method)[:100]
    methods = ", ".join(repr(one) for dialect in DIALECTS for one in dialect.methods if "*" not in one)
    refusal = f"quant_method {shown!r} is not read; read are {methods}."
    return Announcement(file, shown, f"quant_method {shown!r}", refusal=refusal)
