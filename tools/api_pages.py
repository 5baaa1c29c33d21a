"""The pages of docs/api: an entry of every public name, in the groups in which a user looks for them.

    python tools/api_pages.py --write   # rewrite them; `make tables` does it too

A name that several modules export has one entry, under the first of them in a group, which lists the others.
`make docs` fills the entries with signatures and docstrings.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from marked_block import ROOT, command

MODULES = (
    "microfloat", "microfloat.formats", "microfloat.recipes", "microfloat.reference", "microfloat.metrics",
    "microfloat.checkpoint", "microfloat.torch", "microfloat.torch.distributed", "microfloat.jax",
)  # fmt: skip
MORE = ("microfloat.errors", "microfloat.jax.scaling", "microfloat.jax.nnx", "microfloat.jax.linen")
FOLDER = ROOT / "docs" / "api"
BLOCK = "entries"


class Page(NamedTuple):
    """A page: its file, and sections of public names; `module.*` stands for all that no other section names."""

    file: str
    sections: dict[str, str]


TORCH, JAX = "microfloat.torch.", "microfloat.jax."
DOOR = "microfloat.integrations.transformers."  # named and not imported: the tables are made without transformers


def _of(prefix: str, names: str) -> str:
    return " ".join(prefix + name for name in names.split())


PAGES = (
    Page("formats.md", {
        "Formats": "microfloat.formats.*",
        "Recipes": "microfloat.recipes.*",
        "What runs here": _of(TORCH, "explain is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
                              "is_nvfp4_available get_align_size_for_quantization")
        + " microfloat.Support",
    }),
    Page("quantize.md", {
        "Quantize": _of(TORCH, "QuantizedTensor quantize dequantize fake_quantize update_quantized"),
        "Multiply": _of(TORCH, "scaled_matmul linear grouped_matmul linear_cross_entropy FLOP_FORMULAS"),
        "Layouts of codes and scales": _of(TORCH, "pack_fp4 unpack_fp4 pack_fp6 unpack_fp6 to_blocked from_blocked"),
        "The NumPy oracle": "microfloat.reference.*",
    }),
    Page("layers.md", {
        "Layers": _of(TORCH, "Linear GroupedLinear LayerNorm RMSNorm LayerNormLinear LayerNormMLP MultiheadAttention "
                      "RotaryEmbedding apply_rotary TransformerLayer LayerOptions"),
        "A recipe for a region of code": _of(TORCH, "autocast is_autocast_enabled get_autocast_recipe "
                                             "get_autocast_state AutocastState fp8_autocast"),
    }),
    Page("models.md", {
        "Convert": _of(TORCH, "convert revert ConversionReport register_experts plain_state_dict quantized_model_init "
                       "fp8_model_init"),
        "State of a training": _of(TORCH, "checkpoint reset_scaling update_scaling set_seed_rank"),
        "Other names of microfloat.torch": "microfloat.torch.*",
        "Models of transformers": _of(DOOR, "MicrofloatConfig MicrofloatQuantizer load_pretrained"),
    }),
    Page("serving.md", {
        "Serve": _of(TORCH, "quantize_ calibrate save_quantized load_quantized KVCache export WeightOnly "
                     "WeightActivation"),
    }),
    Page("files.md", {"Checkpoints": "microfloat.checkpoint.*"}),
    Page("ranks.md", {"Ranks": "microfloat.torch.distributed.*"}),
    Page("watch.md", {"Watch a training": _of(TORCH, "watch Record"), "Metrics": "microfloat.metrics.*"}),
    Page("in_jax.md", {
        "Products": _of(JAX, "dot_general DotGeneral einsum Einsum ragged_dot RaggedDot autocast"),
        "Arrays": _of(JAX, "QuantizedArray quantize dequantize fake_quantize scaled_matmul"),
        "What runs, and what runs here": _of(JAX, "explain Explanation is_autocast_enabled get_autocast_recipe "
                                            "is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
                                            "is_nvfp4_available checkpoint_policies"),
        "Delayed scaling": "microfloat.jax.scaling microfloat.jax.scaling.*",
        "Watch a training in JAX": _of(JAX, "watch_outputs Readings RecordLog"),
        "Layouts in JAX": _of(JAX, "pack_fp4 unpack_fp4 pack_fp6 unpack_fp6 to_blocked from_blocked"),
        "Other names of microfloat.jax": "microfloat.jax.*",
        "Flax nnx": "microfloat.jax.nnx.*",
        "Flax linen": "microfloat.jax.linen.*",
    }),
    Page("errors.md", {"Errors": "microfloat.errors.*"}),
    Page("modules.md", {
        "Modules": _of("microfloat.", "formats recipes reference metrics checkpoint") + " microfloat.*",
    }),
)  # fmt: skip


def public_names(module: str) -> Iterator[tuple[str, Any]]:
    """Name and value of all that a module exports."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name for name, value in vars(found).items() if inspect.isclass(value) and value.__module__ == module
    ]
    for name in names:
        yield f"{module}.{name}", getattr(found, name)


def identity(name: str, value: Any) -> Any:
    """A key that names of one object share; plain values are objects of their own."""
    return name if isinstance(value, str | int | float) else id(value)


@functools.cache
def entries() -> dict[str, dict[str, list[tuple[str, Any, list[str]]]]]:
    """File -> section -> name, value and other names of each entry."""
    values = {name: value for module in (*MODULES, *MORE) for name, value in public_names(module)}
    values |= {name: name for page in PAGES for text in page.sections.values() for name in text.split()
               if name.startswith(DOOR)}  # fmt: skip
    same: dict[Any, list[str]] = {}
    for name, value in values.items():
        same.setdefault(identity(name, value), []).append(name)
    chosen = [name for page in PAGES for text in page.sections.values() for name in text.split() if name[-1] != "*"]
    taken = {identity(name, values[name]) for name in chosen}
    if len(taken) != len(chosen):
        raise ValueError(f"PAGES names an object twice: {sorted(chosen)}")
    found: dict[str, dict[str, list[tuple[str, Any, list[str]]]]] = {}
    for page in PAGES:
        for title, text in page.sections.items():
            names = text.split()
            for pattern in [name for name in names if name.endswith(".*")]:
                names.remove(pattern)
                for name in values:
                    if name.rpartition(".")[0] == pattern[:-2] and identity(name, values[name]) not in taken:
                        taken.add(identity(name, values[name]))
                        names.append(name)
            rows = found.setdefault(page.file, {}).setdefault(title, [])
            for name in names:
                others = [other for other in same[identity(name, values[name])] if other != name]
                rows.append((name, values[name], others))
    return found


def source_of(name: str, value: Any) -> str:
    """Where the object is defined, as a folder of the library may have the name of a function that it exports."""
    if isinstance(value, ModuleType):
        return value.__name__
    if (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__.startswith("microfloat."):
        return f"{value.__module__}.{value.__qualname__}"
    return name


def entry(name: str, value: Any, others: list[str]) -> str:
    """The lines of an entry."""
    options = [f"heading: {name}", f"toc_label: {name.rpartition('.')[2]}"]
    options += ["members: false"] if isinstance(value, ModuleType) else []
    lines = [f"::: {source_of(name, value)}", "    options:", *(f"      {option}" for option in options)]
    also = f"\n\nThe same as {', '.join(f'`{other}`' for other in others)}." if others else ""
    return "\n".join(lines) + also


def page_text(file: str) -> str:
    """The sections of a page."""
    sections = [f"## {title}\n\n" + "\n\n".join(entry(*row) for row in rows)
                for title, rows in entries()[file].items() if rows]  # fmt: skip
    return "\n\n".join(sections)


BLOCKS: list[tuple[Path, str, Callable[[], str]]] = [
    (FOLDER / page.file, BLOCK, functools.partial(page_text, page.file)) for page in PAGES
]

if __name__ == "__main__":
    sys.exit(command("Pages of the API.", BLOCKS))
