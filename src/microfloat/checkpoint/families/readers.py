"""What known readers make of the families: the facts behind the notes of `convert` and the table of `inspect`.

A fact stands for what was looked up in the source of a version of its reader, or found by running it
(tests/integrations/test_readers.py); where none stands, nobody has looked. docs/checkpoints.md has them all.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

from microfloat.checkpoint.families.patterns import NUMBERED, STACKED
from microfloat.formats import FP8_TENSOR, ScaledFormat

VLLM, SGLANG, HF, TRTLLM = "vLLM 0.33", "SGLang 0.5.23", "transformers 5.24", "TensorRT-LLM 008e0af"
SOURCES = {  # where each was looked up, in the order in which they are shown
    VLLM: "vllm-project/vllm, vllm/model_executor/layers/quantization",
    SGLANG: "sgl-project/sglang, python/sglang/srt/layers/quantization",
    HF: "huggingface/transformers, src/transformers/quantizers; compressed-tensors 0.20",
    TRTLLM: "NVIDIA/TensorRT-LLM, tensorrt_llm/_torch/model_config.py",
}
# Models of transformers whose initializer asks Linear layers for a `weight`, which packed layers do not have.
_INITIALIZED = ("mamba", "mamba2", "falcon_mamba", "nanochat", "recurrent_gemma", "siglip_text_model", "t5")
_PLAIN = "takes codes of 8 bits for values, fails on others; microfloat.integrations.transformers reads them"
_UNWRITTEN = "scales inputs by memory that nobody wrote, as the scale of the input is missing"


class Layer(NamedTuple):
    """A quantized layer of a file; `inputs`: the scheme of its activations, "unscaled" where a scale is not stored.

    `dtype`: that of the model by its configuration, "" where it tells none.
    """

    family: str
    format: ScaledFormat | None
    name: str
    shape: tuple[int, ...]
    model_type: str
    inputs: str = ""
    dtype: str = ""

    @property
    def is_numbered(self) -> bool:
        """True for a weight of one expert."""
        return NUMBERED.match(self.name) is not None

    @property
    def is_joined(self) -> bool:
        """True for a weight of one expert that transformers joins with others; Llama 4's are layers of their own."""
        return self.is_numbered and self.model_type not in STACKED

    @property
    def has_tiles(self) -> bool:
        """True for scales of tiles of 128 rows."""
        return self.format is not None and self.format.is_tile and self.format.block[0] == 128


class Fact(NamedTuple):
    """A reader "reads", "misreads" or "refuses" layers of these families; `of`: which of them, None for all."""

    reader: str
    does: str
    families: str
    what: str = ""
    of: Callable[[Layer], bool] | None = None


_QUARK = "quark:mxfp4 quark:mxfp6_e2m3 quark:mxfp6_e3m2 quark:mxfp8 quark:fp8 quark:nvfp4"
_MODELOPT = "modelopt:nvfp4 modelopt:fp8 modelopt:fp8_pc_pt modelopt:mxfp8"
_OTHERS = "modelopt:w4a8_nvfp4_fp8 modelopt:mxfp4"
_FOUROVERSIX = "fouroversix:nvfp4 fouroversix:static_6 fouroversix:static_4 fouroversix:mxfp4"
_TILES = "deepseek:fp8 hf:finegrained_fp8"
_ALL_CT = "ct:nvfp4 ct:mxfp4 ct:mxfp6 ct:mxfp8 ct:fp8"
_UNLISTED, _BETTER = "algorithms that it does not list", "(ct:fp8_dynamic is read rightly)"
_OF_STACKED = f"{_ALL_CT} {_TILES} hf:mxfp8 {_QUARK}"
FACTS = (  # the first one counts that fits a layer
    Fact(HF, "misreads", "ct:nvfp4", f"numbered experts, without global scales {_BETTER}", lambda one: one.is_joined),
    Fact(HF, "refuses", "ct:mxfp8", f"numbered experts {_BETTER}", lambda one: one.is_joined),
    Fact(
        HF, "refuses", "ct:fp8", f"numbered experts of more than one tile {_BETTER}",
        lambda one: one.has_tiles and one.is_joined and max(one.shape[-2:]) > 128,
    ),
    Fact(
        HF, "refuses", "ct:fp8", f"tiles where inputs are no multiple of 128, by compressed-tensors 0.20 {_BETTER}",
        lambda one: one.has_tiles and not one.is_numbered and one.shape[-1] % 128 != 0,
    ),
    Fact(
        HF, "refuses", "ct:nvfp4 ct:mxfp4 ct:mxfp6", f"models whose initializer asks for a weight {_BETTER}",
        lambda one: one.model_type in _INITIALIZED,
    ),
    Fact(
        HF, "refuses", "ct:nvfp4 ct:mxfp4 ct:mxfp6 ct:mxfp8",
        "models in another dtype than bfloat16, which it makes of blocks: read with dtype=torch.bfloat16",
        lambda one: one.dtype not in ("", "bfloat16"),
    ),
    Fact(
        HF, "misreads", _TILES, f"matrices that end in part of a tile of 128, where it dequantizes {_BETTER}",
        lambda one: one.has_tiles and any(size > 128 and size % 128 for size in one.shape[-2:]),
    ),
    Fact(
        HF, "refuses", _OF_STACKED, "numbered experts of a model whose plain ones are one tensor",
        lambda one: one.model_type == "gpt_oss" and one.is_numbered,
    ),
    Fact(HF, "misreads", f"{_MODELOPT} {_OTHERS} modelopt:fp8_pb_wo", _PLAIN),
    Fact(HF, "refuses", _QUARK, "without the package amd-quark 0.12"),
    Fact(HF, "refuses", "mistral:fp8", "folders without config.json"),
    Fact(HF, "reads", f"{_ALL_CT} {_TILES} hf:ue8m0 hf:mxfp8 gptoss:hf deepseek:v4"),
    Fact(HF, "reads", "torchao", "with the package torchao"),
    Fact(HF, "reads", "fbgemm:fp8", "with a GPU and the package fbgemm-gpu"),
    Fact(HF, "reads", "fp_quant:nvfp4 fp_quant:mxfp4", "on Blackwell, with the packages fp_quant and qutlass"),
    Fact(HF, "reads", _FOUROVERSIX, "with the package fouroversix"),
    Fact(VLLM, "misreads", "modelopt:nvfp4 ct:nvfp4", _UNWRITTEN, lambda one: one.inputs == "unscaled"),
    Fact(
        VLLM, "misreads", "modelopt:fp8", "divides inputs by a placeholder, as the scale of the input is missing",
        lambda one: one.inputs in ("none", "unscaled"),
    ),
    Fact(VLLM, "refuses", f"{_OTHERS} ct:mxfp6", _UNLISTED),
    Fact(VLLM, "refuses", "hf:mxfp8", "all but MiniMax-M3", lambda one: not one.model_type.startswith("minimax_m3")),
    Fact(VLLM, "reads", f"{_MODELOPT} modelopt:fp8_pb_wo ct:nvfp4 ct:mxfp4 ct:mxfp8 ct:fp8 ct:naive {_QUARK}"),
    Fact(VLLM, "reads", f"{_TILES} hf:mxfp8 gptoss:hf deepseek:v4 mistral:fp8 torchao"),
    Fact(VLLM, "reads", "fp_quant:nvfp4 fp_quant:mxfp4", "on Blackwell"),
    Fact(VLLM, "refuses", _FOUROVERSIX, "without the plug-in of fouroversix"),
    Fact(VLLM, "reads", "fbgemm:fp8", "layers that are no experts", lambda one: len(one.shape) == 2),
    Fact(SGLANG, "refuses", f"{_OTHERS} modelopt:fp8_pc_pt modelopt:fp8_pb_wo fbgemm:fp8 torchao", _UNLISTED),
    Fact(SGLANG, "refuses", "ct:mxfp4", "layers that are no experts", lambda one: not one.is_numbered),
    Fact(SGLANG, "refuses", "ct:mxfp6 ct:mxfp8 quark:mxfp6_e2m3 quark:mxfp6_e3m2 quark:mxfp8", _UNLISTED),
    Fact(SGLANG, "refuses", f"fp_quant:nvfp4 fp_quant:mxfp4 {_FOUROVERSIX}", _UNLISTED),
    Fact(SGLANG, "refuses", "quark:nvfp4", "unless it requantizes it to MXFP4"),
    Fact(SGLANG, "reads", f"modelopt:nvfp4 modelopt:fp8 modelopt:mxfp8 ct:nvfp4 ct:mxfp4 ct:fp8 {_TILES} hf:mxfp8"),
    Fact(SGLANG, "reads", "quark:mxfp4 quark:fp8 gptoss:hf mistral:fp8 deepseek:v4"),
    Fact(TRTLLM, "refuses", "ct:fp8", "scales of whole tensors", lambda one: one.format == FP8_TENSOR),
    Fact(TRTLLM, "refuses", "ct:nvfp4 ct:fp8", "weights without activations", lambda one: one.inputs == "none"),
    Fact(TRTLLM, "refuses", "ct:mxfp4 ct:mxfp6 ct:mxfp8", _UNLISTED),
    Fact(TRTLLM, "reads", f"{_MODELOPT} {_OTHERS} ct:nvfp4 ct:fp8 {_TILES} hf:mxfp8 gptoss:hf deepseek:v4"),
)  # fmt: skip


def _facts_of(layer: Layer) -> list[Fact]:
    return [one for one in FACTS if layer.family in one.families.split() and (one.of is None or one.of(layer))]


def complaints(layer: Layer) -> list[str]:
    """The kinds of failure of readers at one layer that were found by running them, as notes."""
    ran = (one for one in _facts_of(layer) if one.of is not None and one.reader == HF)
    return [f"{one.reader} {one.does} {layer.family}: {one.what}" for one in ran]


def readers_of(layers: Iterable[Layer]) -> list[dict[str, object]]:
    """A row for each reader, family and answer, with the number of layers that it is about."""
    counts: Counter[tuple[str, ...]] = Counter()
    for layer in layers:
        found = {one.reader: one for one in reversed(_facts_of(layer))}
        for reader in SOURCES:
            does, what = (found[reader].does, found[reader].what) if reader in found else ("not known", "")
            counts[reader, layer.family, does, what] += 1
    keys = sorted(counts, key=lambda key: [*SOURCES].index(key[0]))
    return [dict(reader=key[0], family=key[1], does=key[2], what=key[3], layers=counts[key]) for key in keys]
