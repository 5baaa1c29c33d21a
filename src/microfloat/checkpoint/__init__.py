"""Low-precision checkpoints: detect their family, read them as records over mapped memory, write and convert them.

One idea per module: `records` (one tensor in the library's words), `container` (safetensors over mmap), `families`
(one row of data each), `config` (what configurations announce), `detect`, `integrity`, `load`.
"""

from microfloat.checkpoint.detect import detect
from microfloat.checkpoint.load import Checkpoint, load
from microfloat.checkpoint.records import Detection, Finding, Record

__all__ = ["Checkpoint", "Detection", "Finding", "Record", "detect", "load"]
