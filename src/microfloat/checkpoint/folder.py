"""The files of a checkpoint: one file, a directory, or an index of shards; with the configurations beside them."""

import os
import stat
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from microfloat.arguments import as_path
from microfloat.checkpoint.container import Container, read_json_file
from microfloat.checkpoint.records import Finding
from microfloat.errors import checkpoint_error

__all__ = ["Folder", "locate"]

CONFIGS = ("config.json", "hf_quant_config.json")
_INDEX = ".safetensors.index.json"


class Folder(NamedTuple):
    """Files by the name that an index gives them, the weight map of the index, and the configurations by file name."""

    path: Path
    files: dict[str, Path]
    weight_map: dict[str, str] | None
    configs: dict[str, Any]
    findings: list[Finding]

    def open(self) -> Container:
        """All tensors; raises CheckpointError with what is wrong with any of the files."""
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
    read = {name: _json(root, name, found) for name in CONFIGS if (root / name).exists()}
    configs = {name: value for name, value in read.items() if isinstance(value, dict)}
    if any(finding.severity == "error" for finding in found):
        raise checkpoint_error(path, found)
    return Folder(path, files, weight_map, configs, found)


def _in_directory(path: Path, found: list[Finding]) -> tuple[dict[str, Path], dict[str, str] | None]:
    indices = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(_INDEX))
    preferred = f"model{_INDEX}"
    if indices:
        return _of_index(path / (preferred if preferred in indices else indices[0]), found)
    names = sorted(entry.name for entry in path.iterdir() if entry.name.endswith(".safetensors"))
    names = ["model.safetensors"] if "model.safetensors" in names else names
    if not names:
        message = "no *.safetensors file and no *.safetensors.index.json stands in it."
        remedy = "Files with pickles (.bin, .pt) are not read: convert them to safetensors where you trust them."
        raise checkpoint_error(path, [Finding("file", "error", path.name, message, remedy)])
    return {name: _inside(path, name, found) for name in names}, None


def _of_index(path: Path, found: list[Finding]) -> tuple[dict[str, Path], dict[str, str] | None]:
    index = _json(path.parent, path.name, found)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        found.append(Finding("index", "error", path.name, "weight_map must map names of tensors to names of files."))
        return {}, None
    files = {}
    for name in sorted(set(weight_map.values())):
        if not name or "\0" in name or os.path.isabs(name) or PureWindowsPath(name).drive or ".." in Path(name).parts:
            message = f"the index names {name[:200]!r}, which is no file inside the checkpoint."
            found.append(Finding("path", "error", path.name, message, "Do not trust this checkpoint."))
        else:
            files[name] = _inside(path.parent, name, found)
    return files, weight_map


def _json(root: Path, name: str, found: list[Finding]) -> Any:
    path = _inside(root, name, found)
    if any(finding.id == "path" for finding in found):
        return None
    value, problems = read_json_file(path)
    found += problems
    return value


def _inside(root: Path, name: str, found: list[Finding]) -> Path:
    """The path of a file of the checkpoint; a link out of its directory is a finding.

    A snapshot of a Hugging Face cache links to the `blobs` of its own repository, which is allowed.
    """
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
