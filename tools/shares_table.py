"""The share of mixtures of experts that `mf.convert` converts, in README.md: counted on models without values.

    python tools/shares_table.py --write   # rewrite the block in the page

Needs transformers; without it the block stays as it is.
"""

import importlib.util
import sys

from marked_block import ROOT, command, read_block, table

import microfloat.torch as mf

PAGE, BLOCK = ROOT / "README.md", "shares of experts"
# Title -> name of transformers' configuration, and where its defaults are not the published model.
MODELS: dict[str, tuple[str, dict[str, int]]] = {
    "Mixtral 8x7B": ("Mixtral", {}),
    "Qwen3-30B-A3B": ("Qwen3Moe", {"num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128}),
    "gpt-oss 120B": ("GptOss", {}),
    "DeepSeek-V3": ("DeepseekV3", {}),
    "Qwen3-Next-80B-A3B": ("Qwen3Next", {}),
}
LEFT = ("embed_tokens.", "lm_head.")


def counted(kind: str, sizes: dict[str, int]) -> dict[str, int]:
    """Parameters of a model: in all, in converted experts, in other converted layers, in embeddings and head."""
    import torch
    import transformers

    config = getattr(transformers, f"{kind}Config")(**sizes)
    with torch.device("meta"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    converted = [model.get_submodule(name) for name in mf.convert(model, "mxfp8").converted]
    parts = {"experts": [], "others": []}
    for module in converted:
        parts["experts" if hasattr(module, "products") else "others"].extend(module.parameters())
    found = {part: sum(one.numel() for one in held) for part, held in parts.items()}
    left = [one for name, one in model.named_parameters() if any(part in name for part in LEFT)]
    return {"all": model.num_parameters(), **found, "left": sum(one.numel() for one in left)}


def shares_table() -> str:
    """A row for each model: its size, and the shares of what converts and of embeddings and head."""
    if importlib.util.find_spec("transformers") is None:
        return read_block(PAGE.read_text(encoding="utf-8"), BLOCK).strip()
    rows = []
    for title, (kind, sizes) in MODELS.items():
        found = counted(kind, sizes)
        total = found["all"]
        shares = [(found["experts"] + found["others"]), found["experts"], found["others"], found["left"]]
        rows.append([title, f"{total / 1e9:.1f}", *(f"{share / total:.1%}" for share in shares)])
    header = ["model", "parameters, 10^9", "converted", "experts", "other layers", "left: embeddings and head"]
    return table(header, rows, right=range(1, len(header)))


BLOCKS = ((PAGE, BLOCK, shares_table),)

if __name__ == "__main__":
    sys.exit(command("The share of mixtures of experts that converts.", BLOCKS))
