"""A checkpoint on this machine; with --hub, the copy of a repository of the Hugging Face Hub."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from microfloat.errors import InvalidValueError, invalid_value, missing_package

if TYPE_CHECKING:
    from microfloat.checkpoint import Checkpoint

Hub = Annotated[bool, typer.Option("--hub", help="Read from the Hugging Face Hub: paths are OWNER/NAME.")]
Source = Annotated[
    str, typer.Option("--from", metavar="FAMILY",
                      help="Family of the source, as load(format=) has it, where its files do not tell.")
]  # fmt: skip
# The files that are read: weights, their index and configurations.
_FILES = ("*.safetensors", "*.safetensors.index.json", "config.json", "hf_quant_config.json", "params.json")


def read(path: Path, hub: bool, source: str, argument: str = "PATH", pattern: str | None = None) -> "Checkpoint":
    """The checkpoint at a path, with its findings as they are, errors among them; `source` is the value of --from."""
    from microfloat.checkpoint.load import opened

    folder = local(path, hub, argument)
    try:
        return opened(folder, format=source, pattern=pattern, strict=False)
    except InvalidValueError as error:
        raise InvalidValueError(str(error).replace("format: got", "--from: got", 1)) from None


def local(path: Path, hub: bool, argument: str = "PATH") -> Path:
    """The path itself, or with `hub` the folder that the Hub's files were downloaded to.

    HF_HUB_OFFLINE is honoured: files that were downloaded before are found, others are an error.
    """
    if not hub:
        if not path.exists():
            fix = "Add --hub to read a repository of the Hugging Face Hub." if len(path.parts) == 2 else ""
            raise invalid_value(argument, path, "a safetensors file or a folder of them that exists", fix)
        if path.is_dir() and not any(path.glob("*.safetensors*")):
            fix = "Convert pickles (.bin, .pt) to safetensors where you trust them; for GGUF take its original."
            raise invalid_value(argument, f"{path} without such a file", "a folder with *.safetensors files", fix)
        return path
    try:
        import huggingface_hub  # pyright: ignore[reportMissingImports]  # of the extra `hub`
    except ModuleNotFoundError:
        raise missing_package("huggingface_hub", "--hub", "hub") from None
    try:
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=list(_FILES)))
    except (OSError, ValueError) as error:  # the bases of huggingface_hub's errors
        needed = "a repository that can be downloaded, or was before"
        raise invalid_value(argument, path, needed, f"{type(error).__name__}: {error}") from error
