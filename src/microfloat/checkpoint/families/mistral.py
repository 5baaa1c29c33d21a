"""FP8 under the names of Mistral's own files: `qscale_weight` and `qscale_act`, described by params.json."""

from typing import Any

from microfloat.checkpoint.families.dialect import Announcement, Dialect, unknown_entries
from microfloat.checkpoint.families.row import FP8, REAL, Family, Scheme
from microfloat.formats import FP8_TENSOR

_WEIGHTS = "fp8_e4m3"
_DYNAMIC = {"TENSOR": False, None: False, "NO_SCALES": True, "DYNAMIC": True}  # by `qscheme_act`


def read(file: str, config: dict[str, Any]) -> Announcement:
    """One scheme for all layers; those in high precision are not listed."""
    weights, inputs = config.get("qformat_weight"), config.get("qscheme_act")
    words = f"qformat_weight {str(weights)[:40]!r}, qscheme_act {str(inputs)[:40]!r}"
    known = inputs is None or isinstance(inputs, str)
    if weights != _WEIGHTS or not known or inputs not in _DYNAMIC:
        refusal = f"{words} is not read; read are {_WEIGHTS!r} with {', '.join(filter(None, _DYNAMIC))}."
        return Announcement(file, "mistral", words, ignore=None, refusal=refusal)
    dynamic = _DYNAMIC[inputs]
    scheme = Scheme(("mistral:fp8",), None, "dynamic" if dynamic else "static", FP8_TENSOR, needs_scale=not dynamic)
    findings = unknown_entries(file, config, ("qformat_weight", "qscheme_act", "producer"))
    return Announcement(file, "mistral", words, general=scheme, ignore=None, findings=findings)


FAMILIES = (Family("mistral:fp8", None, ("", FP8), (".qscale_weight", REAL), input_scales=("qscale_act",)),)
DIALECT = Dialect(FAMILIES, entries=("qformat_weight",), document=("params.json", "quantization"), read=read)
