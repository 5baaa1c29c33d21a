"""compressed-tensors, the format of llm-compressor and vLLM. Global scales are divisors: 448 * 6 / amax."""

from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family
from microfloat.formats import MXFP4, MXFP6_E2M3, MXFP8, NVFP4

_METHOD = "compressed-tensors"
FAMILIES = (
    Family(
        "ct:nvfp4", NVFP4, ("_packed", BYTES), ("_scale", ("F8_E4M3",)), "_global_scale", divides=True,
        input_scales=("input_global_scale",), method=_METHOD, announced=("nvfp4-pack-quantized",), writes=True,
    ),
    Family(
        "ct:mxfp4", MXFP4, ("_packed", BYTES), ("_scale", E8M0), method=_METHOD, announced=("mxfp4-pack-quantized",),
        writes=True,
    ),
    Family(
        "ct:mxfp6", MXFP6_E2M3, ("_packed", ("U8",)), ("_scale", E8M0), method=_METHOD,
        announced=("mxfp6-pack-quantized",), writes=True,
    ),
    Family("ct:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0), method=_METHOD, announced=("mxfp8-quantized",), writes=True),
    Family("ct:fp8", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("float-quantized",), writes=True),
    Family("ct:naive", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("naive-quantized",)),
)  # fmt: skip
