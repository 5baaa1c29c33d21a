"""Draw the pictures of the documentation: python docs/make_pictures.py

Every line, block and label comes from `microfloat.formats` and `microfloat.recipes`, so a changed format changes its
picture; every figure from a file under benchmarks/results, or a training of seconds. Files go to docs/pictures; give
another folder as the only argument.
"""

import copy
import json
import sys
import textwrap
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from microfloat import reference
from microfloat.formats import FORMATS, ScaledFormat
from microfloat.pictures import compare, number_lines
from microfloat.pictures.style import BLUE, GREEN, GREY, ORANGE, clean, colors_of, new_figure, save

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))
import evidence_table  # noqa: E402
import peers_table  # noqa: E402
import served_table  # noqa: E402
from evidence_table import chance, gaps_to, verdict  # noqa: E402

FOLDER = ROOT / "docs" / "pictures"


def blocks() -> Figure:
    """Elements that share a scale: the scales that one and the same matrix gets under eight formats."""
    names = ("fp8_tensor", "fp8_row", "fp8_1x128", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d")
    x_RC = example_matrix(160, 256)
    figure = new_figure(12, 5.2)
    for axes, name in zip(figure.subplots(2, 4).flat, names, strict=True):
        fmt = FORMATS[name]
        image = axes.imshow(scale_picture(x_RC, fmt), cmap="viridis", aspect="equal", interpolation="nearest")
        image.set_clim(-3.5, 6.5)
        draw_grid(axes, fmt, x_RC.shape)
        axes.set_title(
            f"{name}: {fmt.element}, {fmt.block_text}\n{fmt.bits_per_element:.4g} bits per element", size=9.5
        )
        axes.set(xticks=[], yticks=[])
    figure.axes[0].set_ylabel("rows")
    figure.axes[4].set(ylabel="rows")
    for axes in figure.axes[4:]:
        axes.set_xlabel("contraction axis")
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.75, pad=0.01)
    bar.set_label("log2 of the largest value that the block's scale allows")
    return figure


def example_matrix(rows: int, cols: int) -> np.ndarray:
    """Gaussian data whose magnitude drifts along both axes, with a few outlier columns."""
    random = np.random.default_rng(1)
    x_RC = random.normal(size=(rows, cols)) * 2.0 ** (1.5 * np.sin(np.arange(rows) / 25))[:, None]
    x_RC *= 2.0 ** (1.2 * np.cos(np.arange(cols) / 40))
    x_RC[:, random.integers(cols, size=3)] *= 12
    return x_RC.astype(np.float32)


def scale_picture(x_RC: np.ndarray, fmt: ScaledFormat) -> np.ndarray:
    """Per element: log2(element max x scale x tensor scale), read off the oracle's scales."""
    ones = reference.Quantized(*ones_with_scales_of(reference.quantize(x_RC, fmt)), fmt, 1, x_RC.shape)
    return np.log2(reference.dequantize(ones) * fmt.element.max)


def ones_with_scales_of(q: reference.Quantized) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The parts of a tensor of ones under the scales of `q`, so that dequantizing it shows the scales."""
    element = q.format.element
    one = np.uint8(element.bias << element.mantissa_bits)
    codes = np.full((q.rows, q.length), one)
    packed = reference.pack_fp4(codes) if element.codes_per_byte == 2 else codes
    return packed, q.scale, q.tensor_scale


def draw_grid(axes: Axes, fmt: ScaledFormat, shape: tuple[int, int]) -> None:
    """Block boundaries, where they are far enough apart to be seen."""
    for size, extent, line in zip(fmt.block, shape, (axes.axhline, axes.axvline), strict=True):
        if size is not None and size >= 16:
            for position in range(size, extent, size):
                line(position - 0.5, color="white", linewidth=0.7)


# name -> (equation, contracted axis, operands as the GEMM reads them: (label, rows, columns), result)
GEMM_PICTURES = {
    "fprop": ("y = x @ w.T", "K", (("x", "M", "K"), ("w", "N", "K")), ("y", "M", "N")),
    "dgrad": ("dx = dy @ w", "N", (("dy", "M", "N"), ("w.T", "K", "N")), ("dx", "M", "K")),
    "wgrad": ("dw = dy.T @ x", "M", (("dy.T", "N", "M"), ("x.T", "K", "M")), ("dw", "N", "K")),
}
EXTENT = {"M": 2.4, "N": 1.8, "K": 1.2}
TENSOR_COLORS = {"x": BLUE, "w": GREEN, "d": ORANGE}
GAP = 1.0


def three_gemms() -> Figure:
    """The three products of a linear layer: every operand in its operand form, blocks along the contracted axis."""
    figure = Figure(figsize=(12, 2.5))  # its parts have fixed positions
    figure.subplots_adjust(left=0.01, right=0.99, top=0.88, bottom=0.12, wspace=0.02)
    for axes, (name, (equation, contracted, operands, result)) in zip(
        figure.subplots(1, 3), GEMM_PICTURES.items(), strict=True
    ):
        left = 0.0
        for operand, sign in zip(operands, ("@", "="), strict=True):
            left = draw_operand(axes, left, *operand)
            if sign == "=":
                axes.text(left + 0.06, 0.02, "T", size=12, weight="bold")
            axes.text(left + 0.42, -0.9, sign, ha="center", va="center", size=15)
            left += GAP
        draw_matrix(axes, left, *result, GREY)
        axes.set_title(f"{name}: {equation}, contracts {contracted}", size=12)
        axes.set(xlim=(-0.5, 8.2), ylim=(-2.75, 0.78), aspect="equal")
        axes.axis("off")
    figure.text(
        0.5, 0.03, "Operands as the GEMM reads them, the contracted axis last. Stripes are blocks that share a scale: "
        "x, w and dy are each quantized along two axes.", ha="center", size=10,
    )  # fmt: skip
    return figure


def draw_operand(axes: Axes, left: float, label: str, rows: str, cols: str) -> float:
    """A matrix striped by its blocks, with an arrow along the contracted axis; returns its right edge."""
    height, width, color = EXTENT[rows], EXTENT[cols], TENSOR_COLORS[label[0]]
    for top in np.arange(0.0, height - 1e-9, 0.15):
        for start in np.arange(0.0, width - 1e-9, 0.6):
            corner = left + start + 0.02, -top - 0.13
            axes.add_patch(Rectangle(corner, 0.56, 0.11, facecolor=color, alpha=0.55, edgecolor="none"))
    arrow = FancyArrowPatch((left, -height - 0.16), (left + width, -height - 0.16), arrowstyle="<->", color=color)
    arrow.set_mutation_scale(9)
    axes.add_patch(arrow)
    return draw_matrix(axes, left, label, rows, cols, color)


def draw_matrix(axes: Axes, left: float, label: str, rows: str, cols: str, color: str) -> float:
    """A matrix with its top at y = 0, its name and its extents; returns its right edge."""
    height, width = EXTENT[rows], EXTENT[cols]
    corner = left, -height
    axes.add_patch(Rectangle(corner, width, height, facecolor=color, alpha=0.15, edgecolor="none"))
    axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=color, linewidth=1.6))
    axes.text(left + width / 2, 0.52, label, ha="center", va="center", size=12, color=color, weight="bold")
    axes.text(left + width / 2, 0.16, cols, ha="center", va="center", size=9)
    axes.text(left - 0.18, -height / 2, rows, ha="center", va="center", size=9)
    return left + width


RANK_COLORS = (BLUE, ORANGE)
# Kind of parallelism -> of x, w and y: the axis along which two ranks hold halves ("" for both all of it); and what the
# ranks reduce or exchange.
CUTS = {
    "data": (("rows", "", "rows"), "dw: sum over ranks"),
    "fully sharded": (("rows", "rows", "rows"), "w: gathered before use\ndw: sum over ranks, scattered"),
    "column-parallel": (("rows", "rows", "columns"), "x: gathered (sequence parallelism)\namax of x: maximum"),
    "row-parallel": (("columns", "columns", "rows"), "y: sum over ranks, scattered\namax of x, w and dy: maximum"),
    "expert": (("rows", "rows", "rows"), "x to its expert, y back\namax of each expert's x: maximum"),
}


def across_ranks() -> Figure:
    """The halves of x, w and y that two ranks hold under each kind of parallelism, and their reductions."""
    figure = Figure(figsize=(12.6, 2.9))  # its parts have fixed positions
    figure.subplots_adjust(left=0.005, right=0.985, top=0.88, bottom=0.02, wspace=0.05)
    for axes, (title, (cuts, text)) in zip(figure.subplots(1, len(CUTS)), CUTS.items(), strict=True):
        left = 0.3
        for name, cut, rows, cols in zip("xwy", cuts, (1.6, 1.2, 1.6), (0.9, 0.9, 1.2), strict=True):
            for rank, color in enumerate(RANK_COLORS):
                height, width = (rows / 2 if cut == "rows" else rows), (cols / 2 if cut == "columns" else cols)
                x, y = left + rank * width * (cut == "columns"), -height - rank * height * (cut == "rows")
                if cut or not rank:
                    color = color if cut else GREY
                    axes.add_patch(Rectangle((x, y), width, height, facecolor=color, alpha=0.45, edgecolor=color))
            axes.text(left + cols / 2, 0.16, name, ha="center", size=12, weight="bold")
            left += cols + 0.35
        axes.text(left / 2, -1.85, text, ha="center", va="top", size=8.5)
        axes.set_title(title, size=12)
        axes.set(xlim=(0, left), ylim=(-2.75, 0.5), aspect="equal")
        axes.axis("off")
    figure.text(0.5, 0.02, "blue: rank 0, orange: rank 1, grey: both; y = x @ w.T", ha="center", size=10)
    return figure


LIBRARY_COLORS = dict(zip(peers_table.LIBRARIES, ("#004B7A", "#8A8A8A", "#3A3A3A"), strict=True))


def speed_and_loss() -> Figure:
    """Speed over bf16's on an H200 beside peers, and the loss of the demo under each recipe."""
    figure = new_figure(12, 4.4)
    speed, loss = figure.subplots(1, 2, width_ratios=(2.5, 1))
    draw_speed(speed)
    draw_loss(loss)
    return figure


def draw_speed(axes: Axes) -> None:
    """A group of bars per piece of work and recipe, a bar per library; the line at 1 is compiled bf16."""
    left, ticks, labels, ratios = 0.0, [], [], peers_table.ratios()
    for work in peers_table.WORKS.values():
        start = left
        for recipe in dict.fromkeys(bar.recipe for bar in ratios if bar.work == work):
            bars = [bar for bar in ratios if (bar.work, bar.recipe) == (work, recipe)]
            for offset, bar in enumerate(bars):
                x = left + offset
                axes.bar(x, bar.value, 0.92, color=LIBRARY_COLORS[bar.library])
                axes.text(x, 0.05, f"{bar.value:.2f}", ha="center", va="bottom", size=10, color="white",
                          rotation=90)  # fmt: skip
            ticks.append(left + (len(bars) - 1) / 2)
            labels.append(recipe)
            left += len(bars) + 0.7
        axes.text((start + left - 1.7) / 2, 2.32, textwrap.fill(work, 22), ha="center", va="top", size=10,
                  weight="bold")  # fmt: skip
        left += 1.1
    libraries = {bar.library for bar in ratios}
    for library, color in LIBRARY_COLORS.items():
        if library in libraries:
            axes.bar(0, 0, color=color, label=f"{library}, compiled" if library == "torchao" else library)
    axes.axhline(1, color="black", linestyle="--", linewidth=1)
    axes.text(left - 1.5, 1.02, "bf16", size=9, ha="left", va="bottom")
    axes.set_xticks(ticks, labels, size=9, rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(bottom=False)
    axes.set(ylim=(0, 2.35), xlim=(-0.8, left - 0.6), ylabel="times as fast as compiled bf16")
    axes.set_title("Speed on one H200, forward + backward, one run", size=11)
    axes.legend(frameon=False, ncols=3, fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.2))
    clean(axes)


def draw_loss(axes: Axes) -> None:
    """Training loss of each recipe minus bf16's on the same batches, smoothed."""
    recipes = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))["recipes"]
    window, baseline = 25, np.array(recipes["bf16"]["train_loss"])
    axes.axhline(0, color="black", linestyle="--", linewidth=1, label="bf16")
    colors = colors_of(recipes)
    for name, result in list(recipes.items())[1:]:
        gap = np.convolve(result["train_loss"] - baseline, np.full(window, 1 / window), mode="valid")
        axes.plot(np.arange(len(gap)) + (window + 1) / 2, gap, color=colors[name], label=name, linewidth=1.8)
    axes.set(xlabel="step", ylabel="training loss - bf16's, nats per byte")
    axes.set_title("Loss that it costs: make demo", size=11)
    axes.legend(frameon=False, fontsize=9)
    clean(axes)


def evidence() -> Figure:
    """Gaps of the pretraining study to bf16 with their intervals, and how they came about over the steps."""
    figure = new_figure(12, 4.8)
    found = evidence_table.results()
    for draw, axes in zip((draw_gaps, draw_gap_curves), figure.subplots(1, 2), strict=True):
        draw(axes, found)
        axes.legend(frameon=False, fontsize=9)
        clean(axes)
    return figure


def draw_gaps(axes: Axes, found: dict) -> None:
    """A line per row: its seeds and the interval of their mean; grey: what chance does."""
    gaps = gaps_to(found["runs"])
    yardstick = chance(gaps)
    axes.axvspan(-yardstick, yardstick, color=GREY, alpha=0.25, linewidth=0, label="chance: bf16 again")
    axes.axvline(0, color="black", linestyle="--", linewidth=1, label="bf16")
    shown = [gap for gap in gaps.values() if gap.mean < 0.2]  # a row that did not train would flatten all others
    ordered = sorted(shown, key=lambda gap: (gap.half is not None, -gap.mean))
    for height, gap in enumerate(ordered):
        color = ORANGE if verdict(gap, yardstick) == "costs" else GREY if gap.half is None else BLUE
        if gap.half is not None:
            axes.plot([gap.mean - gap.half, gap.mean + gap.half], [height, height], color=color, linewidth=2)
        axes.plot([*gap.gaps.values()], [height] * len(gap.gaps), "o", color=color, markersize=4)
    axes.set_yticks(range(len(ordered)), [gap.row for gap in ordered], size=9)
    beyond = "".join(f"; not shown: {gap.row} {gap.mean:+.2f}" for gap in gaps.values() if gap not in shown)
    axes.set(xlabel=f"held-out loss - bf16's, nats per token{beyond}")
    axes.set_title("Each seed, and 95 % intervals of their means", size=11)


def draw_gap_curves(axes: Axes, found: dict) -> None:
    """Training loss minus bf16's on the same batches, its mean over the seeds smoothed; rows with several seeds."""
    losses = {(run["row"], run["seed"]): np.array(run["train"]) for run in found["runs"]}
    rows = [row for row, gap in gaps_to(found["runs"]).items() if gap.half is not None]
    colors, window = colors_of(["bf16", *rows]), 15
    axes.axhline(0, color="black", linestyle="--", linewidth=1, label="bf16")
    for row in rows:
        seeds = [seed for name, seed in losses if name == row and ("bf16", seed) in losses]
        gap = np.mean([losses[row, seed] - losses["bf16", seed] for seed in seeds], axis=0)
        gap = np.convolve(gap, np.full(window, 1 / window), mode="valid")
        steps = (np.arange(len(gap)) + window / 2) * found["steps_of_a_mean"]
        axes.plot(steps, gap, color=colors[row], label=row, linewidth=1.6)
    axes.set(xlabel="step", ylabel="training loss - bf16's, nats per token")
    axes.set_title("Over the steps, mean of the seeds", size=11)


def post_training() -> Figure:
    """How far each format for serving moves the distribution of the next token, and the error of every product."""
    figure = new_figure(11.4, 6)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    draw_served(left)
    draw_products(right, figure)
    return figure


def draw_served(axes: Axes) -> None:
    """A line for each way to serve the model, the nearest at the bottom; a mark for each kind of text."""
    ways = served_table.served()[::-1]
    colors = {"weights": BLUE, "both": ORANGE, "cache": GREEN}
    for height, way in enumerate(ways):
        values = [value for value, _ in way["divergence"].values()]
        axes.plot([min(values), max(values)], [height, height], color=colors[way["group"]], linewidth=1)
        for value, mark in zip(values, ("o", "s"), strict=False):
            axes.plot([value], [height], mark, color=colors[way["group"]], markersize=4)
    axes.set_yticks(range(len(ways)), [way["name"] for way in ways], size=7)
    for group, color in colors.items():
        axes.plot([], [], "o", color=color, label=served_table.STORED[group])
    axes.set(xscale="log", xlabel="KL from the model in bfloat16, nats per token")
    axes.set_title("Served in low precision (circle: code, square: prose)", size=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    clean(axes)


def draw_products(axes: Axes, figure: Figure) -> None:
    """Signal to noise of every product: a line for each recipe and GEMM, a column for each layer."""
    rows = [row for row in served_table.results()["gradients"] if row["sqnr"]]
    layers = [*rows[0]["cosine"]]
    lines = [(row, gemm) for row in rows for gemm in served_table.GEMMS if gemm in row["sqnr"]]
    image = axes.imshow([[row["sqnr"][gemm][layer] for layer in layers] for row, gemm in lines], aspect="auto")
    axes.set_yticks(range(len(lines)), [f"{row['row']} {gemm}" for row, gemm in lines], size=7)
    axes.set_xticks(range(len(layers)), [layer.removeprefix("blocks.") for layer in layers], size=7, rotation=90)
    axes.set_title("Signal to noise of each product in training, dB", size=10)
    figure.colorbar(image, ax=axes, pad=0.01)


def own_formats() -> Figure:
    """Formats of the page about their design on a tensor with channels of very different size."""
    draws = np.random.default_rng(0)
    x = draws.normal(size=(256, 1024)) * np.exp(draws.normal(size=1024))
    names = ["nvfp4", "mxfp4", "e2m1:ue5m3:1x16", "int4:fp32:1x32", "e3m0:e8m0:1x16", "mxfp8", "int8:e8m0:1x32"]
    return compare(x.astype(np.float32), names).draw()


def watching() -> Figure:
    """Records of mf.watch of a small NVFP4 training, with MXFP8 as the format that might be used instead."""
    import torch

    import microfloat.torch as mf
    from microfloat.pictures import watch

    torch.manual_seed(0)
    blocks = [[torch.nn.LayerNorm(64), torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64)]] * 2
    model = torch.nn.Sequential(*(copy.deepcopy(layer) for block in blocks for layer in block))
    mf.convert(model, "nvfp4")
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    mixing = torch.randn(64, 64) / 8
    with mf.watch(model, every=3, what_if=("mxfp8",)) as w:
        for _ in range(16):
            x = torch.randn(128, 64) * torch.logspace(-1, 1, 64)
            (model(x) - torch.tanh(x @ mixing)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    figure = watch.sheet(w.records)
    figure.set_size_inches(11, 6)
    return figure


def main(folder: Path = FOLDER) -> None:
    """Write the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    for draw in (
        number_lines, blocks, three_gemms, across_ranks, speed_and_loss, evidence, post_training, own_formats, watching,
    ):  # fmt: skip
        save(draw(), folder / f"{draw.__name__}.png")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
