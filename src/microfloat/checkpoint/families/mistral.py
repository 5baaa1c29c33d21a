"""FP8 under the names of Mistral's own files: `qscale_weight` and `qscale_act`, described by params.json."""

from typing import Any

from microfloat.checkpoint.families.dialect import Announcement, Dialect, unknown_entries
from microfloat.checkpoint.families.row import FP8, REAL, Family, Scheme
from microfloat.formats import FP8_TENSOR

_DYNAMIC = {"TENSOR": False, "None": False, "NO_SCALES": True, "DYNAMIC": True}  # by `qscheme_act`


def read(file: str, config: dict[str, Any]) -> Announcement:
    """One scheme for all layers; those in high precision are not listed."""
    weights, inputs = str(config.get("qformat_weight"))[:40], str(config.get("qscheme_act"))[:40]
    words = f"qformat_weight {weights!r}, qscheme_act {inputs!r}"
    if weights != "fp8_e4m3" or inputs not in _DYNAMIC:
        refusal = f"{words} is not read; read are 'fp8_e4m3' with {', '.join(_DYNAMIC)}."
        return Announcement(file, "mistral", words, ignore=None, refusal=refusal)
    dynamic = _DYNAMIC[inputs]
    scheme = Scheme(("mistral:fp8",), None, "dynamic" if dynamic else "static", FP8_TENSOR, None, not dynamic)
    findings = unknown_entries(file, config, ("qformat_weight", "qscheme_act", "producer"))
    return Announcement(file, "mistral", words, general=scheme, ignore=None, findings=findings)


FAMILIES = (Family("mistral:fp8", None, ("", FP8), (".qscale_weight", REAL), input_scales=("qscale_act",)),)
DIALECT = Dialect(FAMILIES, entries=("qformat_weight",), document=("params.json", "quantization"), read=read)
