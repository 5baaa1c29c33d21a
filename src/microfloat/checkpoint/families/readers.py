"""What known readers make of the files that `convert` writes: a note for each kind of layer that one reads wrongly.

Each rule was found by running the reader (tests/integrations/test_readers.py). Readers: transformers 5.24 with
compressed-tensors 0.20.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from microfloat.checkpoint._modules import NUMBERED, STACKED

# Models of transformers whose initializer asks Linear layers for a `weight`, which packed layers do not have.
_INITIALIZED = (
    "mamba", "mamba2", "falcon_mamba", "nanochat", "recurrent_gemma", "siglip_text_model", "t5",
)  # fmt: skip
_DYNAMIC = "those of ct:fp8_dynamic rightly"


class Written(NamedTuple):
    """A layer as it is written: its target, its module's name, its shape and the model's type."""

    target: str
    name: str
    shape: tuple[int, ...]
    model_type: str

    @property
    def is_numbered(self) -> bool:
        """True for a weight of one expert."""
        return NUMBERED.match(self.name) is not None

    @property
    def is_joined(self) -> bool:
        """True for a weight of one expert that transformers joins with others; Llama 4's are layers of their own."""
        return self.is_numbered and self.model_type not in STACKED

    @property
    def has_ragged_tiles(self) -> bool:
        """True for a matrix of several tiles of 128 of which the last is short."""
        return any(size > 128 and size % 128 for size in self.shape[-2:])


_RULES: Mapping[str, Callable[[Written], bool]] = {
    f"transformers 5.24 reads the numbered experts of ct:nvfp4 with wrong values, {_DYNAMIC}; experts": (
        lambda one: one.target == "ct:nvfp4" and one.is_joined
    ),
    f"transformers 5.24 fails on the numbered experts of ct:mxfp8, and reads {_DYNAMIC}; experts": (
        lambda one: one.target == "ct:mxfp8" and one.is_joined
    ),
    f"transformers 5.24 fails on numbered experts of ct:fp8_block that are larger than one tile, and reads {_DYNAMIC}; "
    "experts": (
        lambda one: one.target == "ct:fp8_block" and one.is_joined and max(one.shape[-2:]) > 128
    ),
    "compressed-tensors 0.20 fails when it runs layers of ct:fp8_block whose inputs are no multiple of 128, and runs "
    "those of ct:fp8_dynamic; layers": (
        lambda one: one.target == "ct:fp8_block" and not one.is_numbered and one.shape[-1] % 128 != 0
    ),
    "transformers 5.24 fails on packed layers of this model, whose initializer asks for their weight, and reads "
    "ct:mxfp8 and ct:fp8_dynamic; layers": (
        lambda one: one.target in ("ct:nvfp4", "ct:mxfp4", "ct:mxfp6") and one.model_type in _INITIALIZED
    ),
    "transformers 5.24 misplaces the tiles, or fails, where it dequantizes matrices that end in part of a tile of 128; "
    "ct:fp8_dynamic has no tiles; layers": (
        lambda one: one.target in ("deepseek:fp8", "hf:finegrained_fp8") and one.has_ragged_tiles
    ),
    "transformers 5.24 does not read numbered experts of this model, whose plain ones are one tensor; experts": (
        lambda one: one.model_type == "gpt_oss" and one.is_numbered and not one.target.startswith("modelopt:")
    ),
}  # fmt: skip


def complaints(target: str, name: str, shape: tuple[int, ...], model_type: str) -> list[str]:
    """The kinds of failure of known readers at one layer, as notes."""
    layer = Written(target, name, shape, model_type)
    return [text for text, applies in _RULES.items() if applies(layer)]
