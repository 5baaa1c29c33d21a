"""Golden files of other libraries as the checkpoints they stand for, and small files made by hand."""

import json
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from microfloat.checkpoint.container import DTYPES

GOLDEN = Path(__file__).parent.parent / "golden" / "checkpoints"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.safetensors"))
# Stem of a golden file -> the family that its configuration and tensors are.
FAMILIES = {
    "ct_fp8": "ct:fp8", "ct_mxfp4": "ct:mxfp4", "ct_mxfp6": "ct:mxfp6", "ct_mxfp8": "ct:mxfp8", "ct_nvfp4": "ct:nvfp4",
    "deepseek": "deepseek:fp8", "gptoss": "gptoss:hf", "hf_finegrained_fp8_float": "hf:finegrained_fp8",
    "hf_finegrained_fp8_ue8m0": "hf:ue8m0", "hf_fp4": "hf:ue8m0", "modelopt_fp8": "modelopt:fp8",
    "modelopt_mxfp4": "modelopt:mxfp4", "modelopt_mxfp8": "modelopt:mxfp8", "modelopt_nvfp4": "modelopt:nvfp4",
    "torchao_safetensors_flat": "torchao",
}  # fmt: skip
QUANTIZED = [name for name in NAMES if any(map(name.startswith, FAMILIES)) and not name.endswith("_expected")]
BY_DTYPE = {dtype: name for name, (bits, dtype) in reversed(DTYPES.items()) if bits >= 8}


def family_of(name: str) -> str:
    """The family of a golden file."""
    return next(family for stem, family in FAMILIES.items() if name.startswith(stem))


def as_checkpoint(name: str, folder: Path) -> Path:
    """A golden file and its configurations as the directory that its producer would write."""
    shutil.copyfile(GOLDEN / f"{name}.safetensors", folder / "model.safetensors")
    path = GOLDEN / f"{name}.config.json"
    for key, value in (json.loads(path.read_text()) if path.exists() else {}).items():
        file, _, inner = key.partition(":")
        if not file.endswith(".json"):
            file, inner = "config.json", key
        (folder / file).write_text(json.dumps({inner: value} if inner else value))
    return folder


def header_of(tensors: dict, metadata: dict | None = None) -> tuple[dict, bytes]:
    """Header and data of named arrays; a pair (dtype, array) names a dtype that NumPy has no type for."""
    header, data = {}, b""
    if metadata:
        header["__metadata__"] = metadata
    for name, value in tensors.items():
        dtype, array = value if isinstance(value, tuple) else (BY_DTYPE[np.asarray(value).dtype], np.asarray(value))
        per_byte = 8 // DTYPES[dtype][0] if DTYPES[dtype][0] == 4 else 1
        shape = [*array.shape[:-1], array.shape[-1] * per_byte] if array.ndim else []
        raw = array.tobytes()
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def write(path: Path, tensors: dict, metadata: dict | None = None, config: dict | None = None) -> Path:
    """A safetensors file, and a config.json beside it."""
    header, data = header_of(tensors, metadata)
    path.write_bytes(container(json.dumps(header).encode(), data))
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def container(header: bytes, data: bytes) -> bytes:
    """The bytes of a file with this header."""
    return struct.pack("<Q", len(header)) + header + data


def nvfp4(rows: int = 4, length: int = 32, seed: int = 0) -> dict:
    """Codes and scales of an NVFP4 weight, by role."""
    rng = np.random.default_rng(seed)
    return {
        "codes": rng.integers(0, 256, (rows, length // 2), np.uint8),
        "scale": rng.uniform(0.5, 2, (rows, length // 16)).astype(ml_dtypes.float8_e4m3fn),
        "global": np.float32(0.25),
    }
