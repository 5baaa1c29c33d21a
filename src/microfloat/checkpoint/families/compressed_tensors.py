"""compressed-tensors, the format of llm-compressor and vLLM. Global scales are divisors: 448 * 6 / amax."""

from typing import Any

from microfloat.checkpoint.families.row import BYTES, E8M0, FP8, REAL, Family
from microfloat.checkpoint.families.writing import Configuration, Manifest, Written
from microfloat.formats import (
    FP8_ROW,
    FP8_TENSOR,
    MXFP4,
    MXFP6_E2M3,
    MXFP8,
    NVFP4,
    FP8_1x128,
    FP8_128x128,
    ScaledFormat,
)
from microfloat.recipes import Cast

_METHOD = "compressed-tensors"
_WRONG = "transformers 5.24 reads the numbered experts of ct:nvfp4 with wrong values, those of ct:fp8_dynamic rightly"
_FAILS = "transformers 5.24 fails on the numbered experts of ct:mxfp8, and reads those of ct:fp8_dynamic"
_SCALE_DTYPES = {"E4M3": "torch.float8_e4m3fn", "E8M0": "torch.uint8"}


def _arguments(fmt: ScaledFormat, dynamic: bool | str, of_input: bool) -> dict[str, Any]:
    """The entry of a group about its weights or its inputs; the package refuses keys that it does not know."""
    rows, columns = fmt.block
    strategy = "group" if fmt.tensor_scale is None else "tensor_group"
    if fmt.is_tile:
        strategy = "block"
    elif columns is None:
        strategy = "tensor" if rows is None else "token" if of_input else "channel"
    made: dict[str, Any] = {
        "num_bits": fmt.element.bits, "type": "float", "symmetric": True,
        "group_size": columns if "group" in strategy else None, "strategy": strategy, "dynamic": dynamic,
    }  # fmt: skip
    if strategy == "block":
        made["block_structure"] = [rows, columns]
    if fmt.scale.bits == 8:
        made["scale_dtype"] = _SCALE_DTYPES[fmt.scale.name]
    if of_input and dynamic is not True:
        made["observer"] = "static_minmax"
    return made


def _word(fmt: ScaledFormat) -> str:
    """The name of a compression format."""
    return next((family.announced[0] for family in FAMILIES if family.format == fmt), "float-quantized")


def configure(manifest: Manifest) -> Configuration:
    """One group for each kind of layer; modules are named only where there are several kinds."""
    groups = {}
    for number, ((fmt, scheme, inputs), modules) in enumerate(manifest.kinds.items()):
        made = None
        if inputs is not None:
            # The block scales of NVFP4 inputs are always computed on the way, their global scale is stored.
            made = _arguments(inputs, "local" if inputs.tensor_scale else scheme == "dynamic", True)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(manifest.kinds) == 1 else sorted(modules), "format": _word(fmt),
            "weights": _arguments(fmt, False, False), "input_activations": made, "output_activations": None,
        }  # fmt: skip
    words = {group["format"] for group in groups.values()}
    cache = {
        "num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "strategy": "tensor", "dynamic": False,
    }  # fmt: skip
    return Configuration(
        {
            "quant_method": _METHOD, "format": words.pop() if len(words) == 1 else "mixed-precision",
            "quantization_status": "compressed", "global_compression_ratio": None, "ignore": manifest.ignore,
            "kv_cache_scheme": cache if manifest.kv_cache else None, "moe_sparsity_config": None,
            "config_groups": groups,
        },
        {},
    )  # fmt: skip


FAMILIES = (
    Family(
        "ct:nvfp4", NVFP4, ("_packed", BYTES), ("_scale", ("F8_E4M3",)), "_global_scale", divides=True,
        input_scales=("input_global_scale",), method=_METHOD, announced=("nvfp4-pack-quantized",),
        writes={"ct:nvfp4": Written(Cast(NVFP4), experts=_WRONG)}, configure=configure, scalars=(1,),
    ),
    Family(
        "ct:mxfp4", MXFP4, ("_packed", BYTES), ("_scale", E8M0), method=_METHOD, announced=("mxfp4-pack-quantized",),
        writes={"ct:mxfp4": Written(Cast(MXFP4))}, configure=configure,
    ),
    Family(
        "ct:mxfp6", MXFP6_E2M3, ("_packed", ("U8",)), ("_scale", E8M0), method=_METHOD,
        announced=("mxfp6-pack-quantized",), writes={"ct:mxfp6": Written(Cast(MXFP6_E2M3))}, configure=configure,
    ),
    Family(
        "ct:mxfp8", MXFP8, ("", FP8), ("_scale", E8M0), method=_METHOD, announced=("mxfp8-quantized",),
        writes={"ct:mxfp8": Written(Cast(MXFP8), "dynamic", MXFP8, experts=_FAILS)}, configure=configure,
    ),
    Family(
        "ct:fp8", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("float-quantized",),
        writes={
            "ct:fp8": Written(Cast(FP8_TENSOR, "amax"), "dynamic", FP8_ROW),
            "ct:fp8_dynamic": Written(Cast(FP8_ROW, "amax"), "dynamic", FP8_ROW),
            "ct:fp8_block": Written(Cast(FP8_128x128, "amax"), "dynamic", FP8_1x128),
        },
        configure=configure, scalars=(1,), model_scales=True,
    ),
    Family("ct:naive", None, ("", FP8), ("_scale", REAL), method=_METHOD, announced=("naive-quantized",)),
)  # fmt: skip
