"""Tables of docs/evidence.md and README.md: gaps and verdicts, the rows, the text. Nothing is trained here."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from marked_block import ROOT, command, table

sys.path.append(str(ROOT / "examples"))
from pretraining.rows import AGAIN, BASELINE, ROWS
from pretraining.verdicts import Gap, chance, gaps_to, loss_of, verdict

PAGE = ROOT / "docs" / "evidence.md"
RESULTS = ROOT / "benchmarks" / "results" / "evidence.json"
LONGER = ROOT / "benchmarks" / "results" / "evidence_longer.json"
CARD = ROOT / "benchmarks" / "results" / "evidence_text.json"
# Failures first: what costs, what is open, what does no harm; then rows of one seed.
FAILED = "did not train"
ORDER = (FAILED, "costs", "undecided", "within chance", "gains", "one seed: no verdict")


# Hypotheses of the page: a row, the row it is compared with, and what is expected of their difference.
PAIRS = (
    ("nvfp4_forward", "nvfp4", "the backward has its share of the gap", "gains"),
    ("nvfp4_folded", "nvfp4", "folding costs nothing more", "within chance"),
    ("mxfp4", "nvfp4", "MXFP4 costs more", "costs"),
    ("nvfp4_late_bf16", "nvfp4", "late bf16 narrows the gap", "gains"),
    ("nvfp4_no_sr", "nvfp4", "stochastic rounding of dy helps", "costs"),
    ("nvfp4_no_rht", "nvfp4", "Hadamard on wgrad helps", "costs"),
    ("nvfp4_no_2d", "nvfp4", "two-dimensional weights help", "costs"),
    ("nvfp4_four_over_six", "nvfp4_no_2d", "four over six helps 1x16 blocks", "gains"),
    ("mxfp8_floor", "mxfp8", "scales rounded up beat scales rounded down", "costs"),
    ("mxfp8_e5m2", "mxfp8", "E4M3 suffices for gradients", "within chance"),
    ("fp8_delayed", "fp8_current", "scales of earlier steps cost", "costs"),
)


def results(file: Path = RESULTS) -> dict[str, Any]:
    """What the study left; no runs where it has not run yet."""
    return json.loads(file.read_text()) if file.exists() else {"runs": []}


def cells_of(gap: Gap, kinds: Sequence[dict[str, Gap]], yardstick: float) -> list[str]:
    """A row of the table: the gap with its interval, each seed, each kind of text, the verdict."""
    width = "" if gap.half is None else f" ± {gap.half:.4f}"
    seeds = ", ".join(f"{value:+.4f}" for value in gap.gaps.values())
    word = "the yardstick" if gap.row == AGAIN else verdict(gap, yardstick)
    of_kinds = [f"{kind[gap.row].mean:+.4f}" for kind in kinds]
    return [
        f"`{gap.row}`",
        f"{gap.mean:+.4f}{width}",
        seeds,
        *of_kinds,
        f"**{word}**" if word in (FAILED, "costs") else word,
    ]


def verdicts_table() -> str:
    """Gaps to bf16, those that cost first."""
    found = results()
    if not found["runs"]:
        return "No run has ended yet."
    runs = found["runs"]
    gaps, names = gaps_to(runs), [*runs[0]["held_out"]]
    kinds = [gaps_to(runs, kind=kind) for kind in names]
    yardstick = chance(gaps)
    ordered = sorted(gaps.values(), key=lambda gap: (ORDER.index(verdict(gap, yardstick)), -gap.mean))
    header = ["row", "gap to bf16, nats per token", "of each seed", *names, "verdict"]
    lines = [table(header, [cells_of(gap, kinds, yardstick) for gap in ordered], right=range(1, 3 + len(names)))]
    losses = ", ".join(f"{loss_of(run):.4f}" for run in runs if run["row"] == BASELINE)
    size = found["size"]
    tokens = found["steps"] * size["batch"] * size["context"]
    lines.append(
        f"Held-out loss minus that of bf16 with the same seed; ±: half of the 95 % interval over the seeds. bf16 "
        f"itself: {losses}. Chance, the largest gap of `{AGAIN}` in one seed: {yardstick:.4f}. Each run: "
        f"{tokens / 1e6:.1f} million tokens in {found['steps']} steps. {found['environment']['device']}, torch "
        f"{found['environment']['torch']}, {found['date']}: `{found['command']}`."
    )
    anew = {(run["command"], run["date"]): [] for run in runs if "command" in run}
    for run in runs:
        if "command" in run:
            anew[run["command"], run["date"]].append(f"`{run['row']}`")
    lines += [
        f"Of a later call, with the same text, GPU and torch: {', '.join(rows)} ({date}: `{one}`)."
        for (one, date), rows in anew.items()
    ]
    return "\n\n".join(lines)


def pairs_table() -> str:
    """Each hypothesis with the difference of its two rows, in the words of the rule for gaps to bf16."""
    runs = results()["runs"]
    if not runs:
        return "No run has ended yet."
    yardstick = chance(gaps_to(runs))
    lines = []
    for row, base, statement, expected in PAIRS:
        gap = gaps_to(runs, base).get(row)
        if gap is None:
            lines.append([statement, f"`{row}` - `{base}`", "not run", "", ""])
            continue
        seen = verdict(gap, yardstick)
        if seen == FAILED:
            lines.append([statement, f"`{row}` - `{base}`", f"{gap.mean:+.4f}", "one seed", f"**{FAILED}**"])
            continue
        if gap.half is None:  # a direction
            seen = "within chance" if abs(gap.mean) <= yardstick else "costs" if gap.mean > 0 else "gains"
        is_open = seen in ("undecided", "within chance")
        word = "as expected" if seen == expected else "open" if is_open else "**contradicted**"
        width = "one seed" if gap.half is None else f"± {gap.half:.4f}"
        lines.append([statement, f"`{row}` - `{base}`", f"{gap.mean:+.4f}", width, word])
    lines.sort(key=lambda line: (line[3] == "one seed", not line[4].startswith("**"), line[4]))
    return table(["hypothesis", "difference", "nats per token", "interval", "seen"], lines, [2, 3])


def longer_table() -> str:
    """Gaps of one seed at the length of all runs, and at a longer one."""
    short, long = results(), results(LONGER)
    if not long["runs"]:
        return "Not run yet."
    gaps = [gaps_to(found["runs"]) for found in (short, long)]
    tokens = [
        f"{found['steps'] * found['size']['batch'] * found['size']['context'] / 1e6:.0f}" for found in (short, long)
    ]
    lines = []
    for row, gap in sorted(gaps[1].items(), key=lambda item: -item[1].mean):
        for seed, after in gap.gaps.items():
            before = gaps[0][row].gaps[seed]
            lines.append([f"`{row}`", f"{before:+.4f}", f"{after:+.4f}", f"{after - before:+.4f}"])
    losses = ", ".join(
        f"{loss_of(run):.4f}"
        for found in (short, long)
        for run in found["runs"]
        if (run["row"], run["seed"]) == (BASELINE, 0)
    )
    header = ["row, seed 0", *(f"gap at {count} million tokens" for count in tokens), "change"]
    return "\n\n".join((
        table(header, lines, [1, 2, 3]),
        f"bf16 itself: {losses}. Chance of one seed at the shorter length: {chance(gaps[0]):.4f}. "
        f"{long['environment']['device']}, torch {long['environment']['torch']}, {long['date']}: `{long['command']}`.",
    ))  # fmt: skip


def short_table() -> str:
    """The rows that have a verdict, for README."""
    runs = results()["runs"]
    gaps = gaps_to(runs)
    yardstick = chance(gaps)
    rows = sorted((gap for gap in gaps.values() if gap.half is not None and gap.row != AGAIN), key=lambda gap: gap.mean)
    lines = [[f"`{gap.row}`", f"{gap.mean:+.3f} ± {gap.half:.3f}", verdict(gap, yardstick)] for gap in rows]
    return table(["row, three paired seeds", "gap to bf16, nats per token", "verdict"], lines, [1])


def rows_table() -> str:
    """What each row computes, and how many runs of it ended."""
    counts = [run["row"] for run in results()["runs"]]
    return table(
        ["row", "what it is", "runs"], [[f"`{n}`", r.about, str(counts.count(n))] for n, r in ROWS.items()], [2]
    )


def text_table() -> str:
    """The card of the text: packages, licences, counts, checksums."""
    if not CARD.exists():
        return "The card is written by `make corpus`."
    card = json.loads(CARD.read_text())
    packages = [
        [f"`{name}`", one["version"], one["licence"], str(one["kept"]), f"{one['tokens'] / 1e6:.1f}"]
        for name, one in card["packages"].items()
    ]
    streams = [[f"`{name}`", f"{one['tokens']:,}", f"`{one['sha256'][:16]}`"] for name, one in card["streams"].items()]
    parts = [
        table(["package of Debian 12", "version", "licence", "documents", "million tokens"], packages, [3, 4]),
        table(["stream", "tokens", "SHA-256 begins"], streams, [1]),
    ]
    used = results().get("text", {}).get("tokens")
    if used:
        parts.append(
            f"The runs above read the beginning of each training stream: {used['train_code'] / 1e6:.1f} million "
            f"tokens of code, {used['train_prose'] / 1e6:.1f} million of prose."
        )
    return "\n\n".join(parts)


BLOCKS = (
    (ROOT / "README.md", "evidence", short_table),
    (PAGE, "evidence verdicts", verdicts_table),
    (PAGE, "evidence hypotheses", pairs_table),
    (PAGE, "evidence longer", longer_table),
    (PAGE, "evidence rows", rows_table),
    (PAGE, "evidence text", text_table),
)

if __name__ == "__main__":
    sys.exit(command("The tables of docs/evidence.md.", BLOCKS))
