"""Low-precision checkpoints: detect their family, read them as records over mapped memory, write and convert them.

One idea per module: `records` (one tensor in the library's words), `container` (safetensors over mmap), `families`
(one file per dialect: rows, reading, writing), `folder` (where files and configurations stand), `detect`, `integrity`,
`load`; to write, `_writer` (files), `_saving` (a folder that one rename makes visible), `_casting` (slabs of rows),
`_planning` (what becomes of each parameter) and `_conversion`.
"""

from microfloat.checkpoint._conversion import Layer, Report, convert
from microfloat.checkpoint._saving import Progress, save
from microfloat.checkpoint.detect import detect
from microfloat.checkpoint.load import Checkpoint, load
from microfloat.checkpoint.records import Detection, Finding, Record

__all__ = [
    "Checkpoint", "Detection", "Finding", "Layer", "Progress", "Record", "Report", "convert", "detect", "load", "save",
]  # fmt: skip
