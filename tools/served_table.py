"""Tables of docs/evidence.md on a trained model: what each format for serving costs, and the errors of gradients."""

import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from marked_block import ROOT, command, table

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results" / "post_training.json"
STORED = {"weights": "weights", "both": "weights, activations", "cache": "keys and values"}
GEMMS = ("fprop", "dgrad", "wgrad")


def results() -> dict[str, Any]:
    """What examples/post_training.py left; nothing where it has not run yet."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"served": [], "gradients": []}


def mean(values: Mapping[str, list[float]]) -> float:
    """Over the kinds of text."""
    return float(np.mean([value for value, _ in values.values()]))


def served() -> list[dict[str, Any]]:
    """All ways to serve the model but the plain one, the farthest from it first."""
    ways = [way for way in results()["served"] if way["group"]]
    return sorted(ways, key=lambda way: -mean(way["divergence"]))


def told(found: dict[str, Any]) -> str:
    """Where the figures are from."""
    environment = found["environment"]
    return f"{environment['device']}, torch {environment['torch']}, {found['date']}: `{found['command']}`."


def served_table() -> str:
    """What each way to serve the model costs."""
    found = results()
    if not found["served"]:
        return "Not measured yet."
    plain = next(way for way in found["served"] if not way["group"])
    kinds = [*plain["loss"]]
    header = [
        "served as",
        "in low precision",
        "bits",
        *(f"loss, {kind}" for kind in kinds),
        *(f"KL, {k}" for k in kinds),
    ]
    lines = [
        [
            f"`{way['name']}`",
            STORED[way["group"]],
            f"{way['bits']:.2f}",
            *("{:+.4f} ± {:.4f}".format(*way["above"][kind]) for kind in kinds),
            *(f"{way['divergence'][kind][0]:.5f}" for kind in kinds),
        ]
        for way in served()
    ]
    losses = ", ".join(f"{kind} {loss:.4f}" for kind, loss in plain["loss"].items())
    tokens = found["run"]["steps"] * found["run"]["size"]["batch"] * found["run"]["size"]["context"]
    return "\n\n".join((
        table(header, lines, right=range(2, 3 + 2 * len(kinds))),
        f"Nats per token, above the model in bfloat16 ({losses}), on {found['tokens']:,} held-out tokens of each kind; "
        f"±: twice the standard error over windows of {found['run']['size']['context']} tokens. Bits: of an element in "
        f"memory, where codes of six bits take a byte. The model: `{found['run']['row']}`, {tokens / 1e6:.0f} million "
        f"tokens. {told(found)}",
    ))  # fmt: skip


def gradients_table() -> str:
    """Medians over the Linears of the blocks."""
    found = results()
    if not found["gradients"]:
        return "Not measured yet."
    lines = []
    for row in sorted(found["gradients"], key=lambda row: np.median([*row["cosine"].values()])):
        cosines = [*row["cosine"].values()]
        decibels = [f"{np.median([*row['sqnr'][gemm].values()]):.1f}" if gemm in row["sqnr"] else "" for gemm in GEMMS]
        lines.append([f"`{row['row']}`", f"{np.median(cosines):.4f}", f"{min(cosines):.4f}", *decibels])
    header = ["row", "cosine of dw, median", "worst layer", *(f"{gemm}, dB" for gemm in GEMMS)]
    windows = f"{found['batch']} windows of {found['run']['size']['context']} tokens"
    return "\n\n".join((
        table(header, lines, right=range(1, 6)),
        f"Medians over {len(found['gradients'][0]['cosine'])} Linears, one batch of {windows}. dB: signal to noise of "
        f"a product, against the same operands before their casts. {told(found)}",
    ))  # fmt: skip


BLOCKS = ((PAGE, "evidence served", served_table), (PAGE, "evidence gradients", gradients_table))

if __name__ == "__main__":
    sys.exit(command("The tables of a trained model in docs/evidence.md.", BLOCKS))
