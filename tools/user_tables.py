"""Short tables of the pages for users: what to choose and what it costs, in names that a reader of the page knows.

    python tools/user_tables.py --write   # rewrite them; `make tables` rewrites the tables of all tools

Every figure comes from a file under benchmarks/results. Targets, limits and ids of the same figures stand in
docs/laboratory, by `gpu_tables`.
"""

import functools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax_tables
import peers_table
from gpu_tables import RESULTS, Rows, number, rows_of
from marked_block import ROOT, command, table
from wire_table import bytes_of

from microfloat.layout import layout_of
from microfloat.recipes import as_cast

Row = dict[str, Any]
# Recipe of a result file -> what a reader writes.
RECIPES = {
    "bf16": "bf16", "delayed": "`delayed`", "current": "`fp8_current`", "row": "`fp8_row`", "block": "`fp8_block`",
    "mxfp8": "`mxfp8`", "mxfp8.folded": "`mxfp8`", "mxfp8.exact": '`mxfp8`, `path="exact"`', "mxfp6": "`mxfp6`",
    "mxfp4.folded": "`mxfp4`", "nvfp4": "`nvfp4`", "nvfp4.folded": '`nvfp4`, `path="folded"`',
}  # fmt: skip


def sources(*files: str) -> str:
    """The files of a table, with their devices and dates."""
    parts = []
    for name in files:
        rows = [row for row in rows_of(RESULTS / f"{name}.json") if "median_ms" in row or "value" in row]
        devices = ", ".join(dict.fromkeys(row["device"].split()[1] for row in rows))
        dates = sorted({row["date"] for row in rows})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        parts.append(f"`benchmarks/results/{name}.json` ({devices}, {when})")
    return f"From {' and '.join(parts)}."


def pivoted(rows: Rows, column: Callable[[Row], str | None]) -> dict[str, dict[str, Row]]:
    """Recipe -> column -> row, of the recipes that the page names."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        title = column(row)
        if title is not None and row.get("recipe") in RECIPES and "ratio" in row:
            found.setdefault(RECIPES[row["recipe"]], {})[title] = row
    return found


def ratios(found: dict[str, dict[str, Row]], first: str, columns: Sequence[str], digits: int = 2) -> str:
    """A row for each recipe, with a ratio in each column that was measured."""
    cells = [
        [recipe, *(number(by_column[title]["ratio"], digits) if title in by_column else "" for title in columns)]
        for recipe, by_column in found.items()
    ]
    return table([first, *columns], cells, right=range(1, len(columns) + 1))


def choice_table() -> str:
    """Hardware and goal -> recipe, with the speed of a decoder layer, the memory of a model, the loss of the demo."""
    demo = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))["recipes"]
    linear = {(row["id"], row["mode"]): row["ratio"] for row in rows_of(RESULTS / "linear.json") if "ratio" in row}
    peaks = {row["id"].removeprefix("model."): row["extra"]["peak_gib"] for row in rows_of(RESULTS / "model.json")}
    ids = {"delayed": "delayed", "fp8_current": "current", "fp8_row": "row", "fp8_block": "block",
           "mxfp8": "mxfp8.folded", "nvfp4": "nvfp4", "folded": "nvfp4.folded"}  # fmt: skip
    memory = {name: number(peaks[one] / peaks["bf16.compiled"]) for name, one in ids.items()}
    rows = [
        ("Hopper", "the fastest training", "delayed"),
        ("", "nearly the same speed, without state", "fp8_current"),
        ("", "a scale for each row, robust to outlying tokens", "fp8_row"),
        ("", "a scale for each block, as DeepSeek-V3 trains", "fp8_block"),
        ("", "what a Blackwell trains in eight bits, fast", "mxfp8"),
        ("", "what a Blackwell trains in four bits", "nvfp4"),
    ]
    cells = [[has, wants, f"`{take}`", number(peers_table.layer_ratio(take)), memory[take], _gap(demo, take)]
             for has, wants, take in rows]  # fmt: skip
    exact = number(linear["l.mxfp8.exact", "eager"])
    small, graph = number(linear["l.small", "eager"]), number(linear["l.small", "graph"])
    cells += [
        ["", "the same codes, their products folded to FP8", '`NVFP4BlockScaling(path="folded")`',
         number(peers_table.layer_ratio("nvfp4, folded")), memory["folded"], "not measured"],
        ["", "MXFP8 with its exact products", '`MXFP8BlockScaling(path="exact")`', f"{exact} (a Linear)",
         "not measured", _gap(demo, "mxfp8")],
        ["", "layers below about 2048 x 2048, or few tokens", "bf16 for them, or a CUDA graph of the step",
         f"{small}, {graph} in a graph (a Linear)", "", ""],
        ["Blackwell", "FP8, MX and NVFP4 on its own units", "any", "not yet run", "not yet run", "as above"],
        ["Ada", "FP8", "`fp8_current`, `delayed`, `fp8_row`", "not yet run", "not yet run", "as above"],
        ["Ampere, CPU", "to see what a recipe does to a model", "any", "below 1", "not measured", "as above"],
    ]  # fmt: skip
    config = demo_config()
    text = (
        "Speed: forward and backward of a Llama decoder layer (4096 wide, 4 x 4096 tokens) under "
        "`mf.convert(..., fuse=True)`, compiled bf16 = 1 (`benchmarks/results/peers/one_run.json`, one H200); a Linear "
        "alone: `benchmarks/results/linear.json`. Memory: peak of a training step of 12 layers and the head of Llama 3 "
        "8B, with AdamW, 2 x 8192 tokens, bf16 = 1, which is transformers' model with every layer compiled "
        f"({number(peaks['bf16.compiled'], 1)} GiB); part of the gain is the loss in chunks of tokens "
        "(`benchmarks/results/model.json`, one H200). Loss: held-out loss of the demo (`make demo`) less that of bf16, "
        "in nats "
        f"per byte ({config}, on a CPU, "
        "whose products are exact; `benchmarks/results/demo.json`). One seed and a short run: a gap of this size says "
        "that the recipe trains, and differences of some thousandths are chance."
    )
    return f"{table(['you have', 'you want', 'take', 'speed', 'memory', 'loss'], cells, right=(3, 4, 5))}\n\n{text}"


def demo_config() -> str:
    """Size and length of the demo."""
    config = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))["config"]
    return f"{config['steps']} steps, {config['layers']} layers of width {config['dim']}"


def _gap(demo: dict[str, Any], name: str) -> str:
    return f"{demo[name]['gap_to_bf16']:+.3f}" if name in demo else "not measured"


def linear_table() -> str:
    """One Linear: milliseconds of the first shape, ratios of all."""
    columns = {(14336, None): "4096 to 14336", (14336, "outliers"): "with outliers", (8192, None): "8192 to 8192"}

    def column(row: Row) -> str | None:
        other = row["id"].startswith(("l.fwd", "l.small", "l.torchao"))
        return None if other else columns.get((row["shape"][2], row.get("variant")))

    rows = rows_of(RESULTS / "linear.json")
    found = pivoted(rows, column)
    first, *others = columns.values()
    cells = []
    for recipe, by_column in found.items():
        main = by_column[first]
        more = [number(by_column[title]["ratio"]) if title in by_column else "" for title in others]
        cells.append([recipe, number(main["base_ms"]), number(main["median_ms"]), number(main["ratio"]), *more])
    header = ["recipe", "bf16, ms", "ms", f"times as fast, {first}", *others]
    return f"{table(header, cells, right=range(1, 6))}\n\n16384 tokens, eager. {sources('linear')}"


def grouped_table() -> str:
    """Experts: ratios by the mixture."""
    titles = {"64": "64 x 7168 to 2048", "wide": "8 x 4096 to 14336"}

    def title(row: dict) -> str:
        return titles.get(row["id"].split(".")[2], "ragged" if row.get("variant") else "8 x 7168 to 2048")

    found = pivoted(rows_of(RESULTS / "grouped.json"), title)
    return f"{ratios(found, 'recipe', ['8 x 7168 to 2048', 'ragged', *titles.values()])}\n\n{sources('grouped')}"


def models_table() -> str:
    """A decoder layer and steps of a model: ratios by recipe, and memory of the layer."""
    titles = {
        "d.layer": "`TransformerLayer`", "d.llama.eager": "Llama, fused", "d.llama.eager.apart": "Llama, not fused",
        "d.llama.compiled": "Llama, fused, compiled", "d.mixtral": "a layer of Mixtral",
        "d.deepseek": "a layer like DeepSeek-V3's",
    }  # fmt: skip

    def column(row: Row) -> str | None:
        parts = row["id"].split(f".{row['recipe']}")
        return titles.get("".join(parts))

    rows = rows_of(RESULTS / "decoder.json")
    found = pivoted([row for row in rows if row["backend"] != "torchao"], column)
    columns = [title for title in titles.values() if any(title in by_column for by_column in found.values())]
    cells = []
    for recipe, by_column in found.items():
        extra = by_column[columns[0]]["extra"]
        share = extra["peak_gib_above_weights"] / extra["bf16_peak_gib_above_weights"]
        cells.append([recipe, *(number(by_column[title]["ratio"]) if title in by_column else "" for title in columns),
                      number(share)])  # fmt: skip
    header = ["times as fast as bf16", *columns, "memory of the layer, of bf16"]
    return f"{table(header, cells, right=range(1, len(header)))}\n\n{sources('decoder')}"


def train_table() -> str:
    """The training example: tokens per second and their ratio."""
    cells = [
        [f"`{row['recipe']}`", number(row["extra"]["bf16_tokens_per_s"], 0), number(row["value"], 0),
         number(row["ratio"])]
        for row in rows_of(RESULTS / "train.json") if "median_ms" in row
    ]  # fmt: skip
    header = ["recipe, compiled", "bf16, tokens/s", "tokens/s", "times as fast"]
    return f"{table(header, cells, right=(1, 2, 3))}\n\n{sources('train')}"


def host_table() -> str:
    """Host time of a small Linear, times that of nn.Linear."""
    rows = [row for row in rows_of(RESULTS / "host.json") if row["id"] == "h.fwdbwd"]
    columns = ["torch's threads", "one thread"]
    found = pivoted(rows, lambda row: row.get("variant") or columns[0])
    return f"{ratios(found, 'host time, nn.Linear = 1', columns, 1)}\n\n{sources('host')}"


def span(values: Sequence[float], digits: int = 2) -> str:
    """The smallest and the largest, or the one that both are."""
    low, high = (number(value, digits) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


FORMATS = ("nvfp4", "mxfp4", "mxfp8", "fp8_row", "fp8_128x128")


def decode_ratios(name: str, prefix: str, suffix: str) -> dict[str, list[float]]:
    """Format -> ratios of all shapes, of the rows whose id begins and ends so."""
    found: dict[str, list[float]] = {}
    for row in rows_of(RESULTS / f"{name}.json"):
        parts = row["id"].split(".")
        if "ratio" in row and parts[-1] == suffix and ".".join(parts[:-2]) == prefix:
            found.setdefault(row["recipe"], []).append(row["ratio"])
    return found


def decode_table(name: str) -> str:
    """Weights that are stored as codes: ratios to bf16 by rows of x and format, the range over the shapes."""
    cells = []
    for prefix, sizes, words in (
        ("d", ("m1", "m4", "m16", "m32", "m64", "m128", "m256", "prefill"), "{}"),
        ("d.experts8", ("m1", "m16", "m64"), "{}, 8 experts, 2 a token"),
        ("d.experts64", ("m1", "m16", "m64"), "{}, 64 experts, 8 a token"),
    ):
        for size in sizes:
            found = decode_ratios(name, prefix, size)
            title = words.format("4096" if size == "prefill" else size[1:])
            cells.append([title, *(span(found[fmt]) if fmt in found else "" for fmt in FORMATS)])
    header = ["tokens", *(f"`{fmt}`" for fmt in FORMATS)]
    return f"{table(header, cells)}\n\n{sources(name)}"


def bits(fmt: str) -> float:
    """Bits that a weight takes for each element, scales included."""
    return 8 * bytes_of(layout_of(as_cast(fmt), 4096, 4096)) / 4096**2


def served_table() -> str:
    """Layers as `quantize_` makes them without further options: ratios to bf16 by rows of x and config."""
    rows = [row for row in rows_of(RESULTS / "served_h200.json") if row["id"].startswith("d.served.")]
    configs = list(dict.fromkeys(row["recipe"] for row in rows))
    cells = [
        [
            str(m),
            *(span([row["ratio"] for row in rows if (row["shape"][0], row["recipe"]) == (m, one)]) for one in configs),
        ]
        for m in dict.fromkeys(row["shape"][0] for row in rows)
    ]
    named = [f"FP8 x `{one.removeprefix('a8.')}`" if one.startswith("a8.") else f"`{one}`" for one in configs]
    return f"{table(['tokens', *named], cells)}\n\n{sources('served_h200')}"


def serving_table() -> str:
    """What calls are like -> a config, with its bits and its speed on an H100 and an H200."""

    def speeds(fmt: str, size: str) -> str:
        found = [decode_ratios(name, "d", size).get(fmt) for name in ("decode", "decode_h200")]
        return "; ".join(span(one, 1) if one else "not measured" for one in found)

    def by_id(prefix: str, **extra: Any) -> list[float]:
        return [row["ratio"] for row in rows_of(RESULTS / "decode_h200.json") if row["id"].startswith(prefix)
                and "ratio" in row and all(row["extra"][key] == value for key, value in extra.items())]  # fmt: skip

    def weight_only(fmt: str) -> list[str]:
        name = f'`WeightOnly("{fmt}", prefill=None)`'
        return [name, f"{bits(fmt):.2f}", *(speeds(fmt, size) for size in ("m1", "m64", "prefill"))]

    kept = [row["ratio"] for row in rows_of(RESULTS / "decode_h200.json") if row["id"].startswith("d.kept.nvfp4")]
    few, many = (speeds("nvfp4", size) for size in ("m1", "m64"))
    codes = bits("nvfp4")
    cells = [
        ["a few tokens at a time, least memory", *weight_only("nvfp4")],
        ["the same, with the error of eight bits", *weight_only("fp8_row")],
        ["any number of tokens, memory to spare", '`WeightOnly("nvfp4")`', f"{codes:.2f} + 16", few, many,
         span(kept, 1)],
        ["batches of tens to thousands of tokens", '`WeightActivation("nvfp4", activation="fp8_row")`',
         f"{codes:.2f} + 8", *(span(decode_ratios("served_h200", "d.served.a8", size)["a8.nvfp4"], 1)
                               for size in ("m1", "m64", "m4096"))],
        ["long prompts, and few tokens after them", '`WeightOnly("nvfp4", prefill="folded")`', f"{codes:.2f} + 8", few,
         many, span(by_id("d.prompt.nvfp4"), 1)],
        ["mostly prompts or large batches", '`WeightActivation("fp8_row")`', f"{bits('fp8_row'):.2f}", "", "",
         span(by_id("d.prompt.row"), 1)],
        ["the same in MX formats", '`WeightActivation("mxfp8")`', f"{bits('mxfp8'):.2f}", "", "",
         span(by_id("d.prompt.mxfp8"), 1)],
    ]  # fmt: skip
    header = ["your calls have", "take", "bits per weight", "1 token", "64 tokens", "4096 tokens"]
    text = (
        "Speed of a product, `F.linear` in bfloat16 = 1, over three sizes of weights: on an H100; on an H200. A single "
        f"range is that of an H200. Empty: not measured. {sources('decode', 'decode_h200', 'served_h200')}"
    )
    return f"{table(header, cells)}\n\n{text}"


def whole_models_table() -> str:
    """Training steps of transformers' Llama: twelve layers on one GPU, and the 8B on several."""
    words = {"head": "FP8 head", "recomputed": "every layer recomputed", "compiled": "compiled"}
    files = [{row["id"]: row for row in rows_of(RESULTS / f"{name}.json") if "median_ms" in row}
             for name in ("model", "model_8b")]  # fmt: skip
    cells = []
    for name in dict.fromkeys(name for rows in files for name in rows):
        kind = name.removeprefix("model.")
        known = max((one for one in (*RECIPES, "nvfp4.folded", "torchao.tensorwise", "torchao.rowwise")
                     if kind == one or kind.startswith(f"{one}.")), key=len)  # fmt: skip
        shown = {"nvfp4.folded": '`nvfp4`, `path="folded"`', "torchao.tensorwise": "torchao 0.18, tensorwise",
                 "torchao.rowwise": "torchao 0.18, rowwise"}.get(known) or RECIPES[known]  # fmt: skip
        of_head = kind.removeprefix(known).strip(".").split(".")
        cells.append([", ".join([shown, *(words[one] for one in of_head if one)])])
        for number_of_file, rows in enumerate(files):
            row = rows.get(name)
            tokens = f"{row['extra']['tokens_per_s_gpu']:,}" if row else ""
            cells[-1] += [number(row and row["median_ms"], 0)] if number_of_file == 0 else []
            cells[-1] += [tokens, number(row and row["extra"]["peak_gib"], 0)]
    gpus = next(iter(files[1].values()))["extra"]["ranks"]
    header = ["training step", "12 layers, ms", "tokens/s", "GiB", f"8B, {gpus} GPUs, tokens/s a GPU", "GiB a GPU"]
    return f"{table(header, cells, right=range(1, 6))}\n\n{sources('model', 'model_8b')}"


def one_run_table() -> str:
    """README's: whole model, decoder layer and Linear beside peers in one run, a row for each recipe."""
    by_name: dict[str, dict[str, Row]] = {}
    for (work, name), row in peers_table.rows().items():
        by_name.setdefault(name, {})[work] = row
    cells = []
    for name, rows in by_name.items():
        of_library = next(iter(rows.values()))["extra"]["library"]
        words = {"bf16": "bf16, compiled", "torchao.tensorwise": f"{of_library}, tensorwise, compiled"}
        if name.startswith("te."):
            words[name] = f"{of_library.replace('transformer_engine', 'TransformerEngine')}, {name[3:]}"
        model = rows.get("model", {}).get("extra", {})
        tokens = f"{model['tokens_per_s_gpu']:,}" if model else ""
        times = [number(rows[work]["median_ms"], digits) if work in rows else ""
                 for work, digits in (("model", 0), ("layer", 1), ("linear", 2))]  # fmt: skip
        cells.append([words.get(name) or RECIPES[name], times[0], tokens, number(model.get("peak_gib"), 0), *times[1:]])
    header = ["forward + backward", "a model's step, ms", "tokens/s", "GiB", "a decoder layer, ms", "a Linear, ms"]
    text = (
        "Model: twelve layers and the head of Llama 3 8B (bf16 head), 2 x 8192 tokens, with AdamW. Layer: 4 x 4096 "
        "tokens; microfloat's is transformers' own under `convert(..., fuse=True)`. Linear: 16384 tokens, 4096 to "
        "14336. microfloat runs eagerly. Each candidate had a process of its own; layers and Linears took turns. "
    )
    return f"{table(header, cells, right=range(1, 6))}\n\n{text}{sources('peers/one_run')}"


def prompt_table() -> str:
    """Prompts whose activations are quantized too."""
    found: dict[str, list[float]] = {}
    for row in rows_of(RESULTS / "decode_h200.json"):
        if row["id"].startswith("d.prompt."):
            key = f"`{row['extra']['weight']}`, multiplied as `{row['extra']['read_as']}`"
            found.setdefault(key, []).append(row["ratio"])
    cells = [[name, span(values)] for name, values in found.items()]
    return f"{table(['a prompt of 4096 tokens', 'times as fast'], cells)}\n\n{sources('decode_h200')}"


def ranks_table(*files: str) -> str:
    """A step on two GPUs of each kind, beside bf16's; bytes and memory are those of the last file, the newest."""
    by_file = [{row["id"]: row for row in rows_of(RESULTS / f"{name}.json") if "median_ms" in row} for name in files]
    devices = [next(iter(rows.values()))["device"].split()[1] for rows in by_file]
    plain = next(row for name, row in by_file[-1].items() if name.endswith(".bf16"))
    cells = []
    for name, row in by_file[-1].items():
        if row.get("recipe") == "mxfp8.folded" and name.startswith("tp."):
            continue  # `mxfp8` folds by itself
        words = [RECIPES[row.get("recipe") or "bf16"]]
        words += ["fused"] if ".fused" in name else []
        words += ["codes gathered"] if name.endswith(".low") else []
        times = [cell for rows in by_file for cell in (number(rows[name]["median_ms"], 1),
                                                       number(rows[name].get("ratio")) or "1.00")]  # fmt: skip
        shares = [number(row["extra"][key] / plain["extra"][key]) for key in ("gathered_bytes", "peak_bytes")]
        cells.append([", ".join(words), *times, *shares])
    header = ["recipe", *(title for device in devices for title in (f"{device}, ms", "times as fast")),
              "bytes gathered, of bf16", "peak memory, of bf16"]  # fmt: skip
    return f"{table(header, cells, right=range(1, len(header)))}\n\n{sources(*files)}"


def cpu_table() -> str:
    """Casts of stock formats on a CPU, in millions of elements a second: a row for each format."""
    path = RESULTS / "cpu_quantize.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    kinds = ("quantize rows", "quantize columns", "dequantize to bfloat16")
    found: dict[str, dict[str, float]] = {}
    for row in data["rows"]:
        found.setdefault(row["cast"], {})[row["operation"]] = row["melem_per_s"]
    cells = [[f"`{cast.split()[0]}`", *(number(by_kind[kind], 0) for kind in kinds)]
             for cast, by_kind in found.items() if set(kinds) <= set(by_kind)]  # fmt: skip
    machine, shape = data["machine"], " x ".join(str(size) for size in data["shape"])
    copy = number(found[data["dtype"]]["copy"], 0) if "copy" in found.get(data["dtype"], {}) else ""
    text = f"{shape} {data['dtype']}, {machine['threads']} threads of {machine['processor']}, {data['date'][:10]}"
    text += f"; a copy: {copy}." if copy else "."
    return f"{table(['million elements / s', *kinds], cells, right=(1, 2, 3))}\n\n{text}"


def jax_table() -> str:
    """A Linear in JAX, in the recipe's name: time beside bf16's, the GEMMs that XLA chose, and temporary memory."""
    data, own = (json.loads((RESULTS / name).read_text(encoding="utf-8"))
                 for name in ("jax_linear.json", "jax_linear_own.json"))  # fmt: skip
    names = {"flax_direct": "Flax's `Fp8DirectDotGeneralOp`"}
    names |= {f"{recipe}.folded": f'`{recipe}` `path="folded"`' for recipe in ("mxfp8", "nvfp4")}
    by_id = {entry["id"]: entry for entry in (*data["rows"], *own["rows"])}  # microfloat's own GEMM came later
    cells = []
    for entry in by_id.values():
        name = entry["id"].removeprefix("j.l.")
        who = names.get(name) or RECIPES.get(name)
        if who is None or "bf16_ms" not in entry:
            continue
        memory = number(entry.get("temporary_ratio"), 1)
        times = [number(entry[key]) for key in ("bf16_ms", "median_ms", "ratio")]
        cells.append([who.partition(",")[0], *times, jax_tables.gemms(entry.get("hlo")), memory])
    header = ["16384 tokens, 4096 to 14336", "bf16, ms", "ms", "times as fast", "GEMMs", "temporary memory, of bf16"]
    versions = ", ".join(f"{name} {data['versions'][name]}" for name in ("jax", "flax"))
    machine = data["machine"].split()[1]
    where = f"From `benchmarks/results/jax_linear.json` ({machine}, {data['date']}; {versions}); rows of microfloat's "
    where += f"own GEMM from `benchmarks/results/jax_linear_own.json` ({own['date']})."
    return f"{table(header, cells, right=(1, 2, 3, 5))}\n\n{where}"


def _page(name: str) -> Path:
    return ROOT / "docs" / name


BLOCKS = [
    (_page("index.md"), "choosing a recipe", choice_table),
    (_page("performance.md"), "choosing a recipe", choice_table),
    (_page("performance.md"), "measured: linear", linear_table),
    (_page("performance.md"), "measured: grouped", grouped_table),
    (_page("performance.md"), "measured: decoder", models_table),
    (_page("performance.md"), "measured: whole models", whole_models_table),
    (ROOT / "README.md", "measured: beside peers", one_run_table),
    (_page("performance.md"), "measured: train", train_table),
    (_page("performance.md"), "measured: host", host_table),
    (_page("inference.md"), "choosing for serving", serving_table),
    (_page("inference.md"), "measured: decode", functools.partial(decode_table, "decode")),
    (_page("inference.md"), "measured: decode_h200", functools.partial(decode_table, "decode_h200")),
    (_page("inference.md"), "measured: prompts", prompt_table),
    (_page("inference.md"), "measured: served", served_table),
    (_page("recipes.md"), "measured: cpu_quantize", cpu_table),
    (_page("jax.md"), "measured: jax_linear", jax_table),
    (_page("distributed.md"), "measured: fsdp", functools.partial(ranks_table, "fsdp", "fsdp_h100")),
    (_page("distributed.md"), "measured: tp", functools.partial(ranks_table, "tp", "tp_h100")),
]

if __name__ == "__main__":
    sys.exit(command("Short tables of the pages for users.", BLOCKS))
