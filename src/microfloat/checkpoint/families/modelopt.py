"""ModelOpt, the format of TensorRT-LLM, also read by vLLM and SGLang. Global scales multiply: amax / (448 * 6)."""

from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family
from microfloat.formats import MXFP4, MXFP8, NVFP4

_METHOD = "modelopt"
FAMILIES = (
    Family(
        "modelopt:nvfp4", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2", method=_METHOD,
        announced=("NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "NVFP4_SVD"), writes=True,
    ),
    Family(
        "modelopt:w4a8_nvfp4_fp8", NVFP4, ("", BYTES), ("_scale", ("F8_E4M3",)), "_scale_2", method=_METHOD,
        announced=("W4A8_NVFP4_FP8",),
    ),
    Family("modelopt:fp8", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("FP8",), writes=True),
    Family(
        "modelopt:fp8_pc_pt", None, ("", FP8), ("_scale", REAL), method=_METHOD,
        announced=("FP8_PER_CHANNEL_PER_TOKEN",),
    ),
    Family("modelopt:fp8_pb_wo", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("FP8_PB_WO",)),
    Family("modelopt:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0), method=_METHOD, announced=("MXFP8",), writes=True),
    Family(
        "modelopt:mxfp4", MXFP4, ("", BYTES), ("_scale", E8M0), method=_METHOD,
        announced=("MXFP4", "W4A8_MXFP4_FP8", "W4A16_MXFP4"),
    ),
)  # fmt: skip
