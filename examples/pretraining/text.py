"""Token streams of each kind of text, and the batches of a run: a function of (seed, step) alone.

tools/corpus.py makes the text of the study; without it there are the bytes of the running Python's own library.
"""

import functools
import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from microfloat.errors import invalid_value

SHARES = {"code": 0.75, "prose": 0.25}  # of a batch


class Text(NamedTuple):
    """Training and held-out tokens by kind, the number of entries of the tokenizer, and what names the text."""

    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    entries: int
    facts: dict[str, Any]

    def batch(self, seed: int, step: int, batch: int, context: int) -> np.ndarray:
        """Windows of a step, int64 [batch, context + 1]: each kind's windows once in the seed's order, then anew."""
        parts, left = [], batch
        for kind, stream in self.train.items():
            last = kind == [*self.train][-1]
            rows = left if last else min(left, round(batch * SHARES[kind]))
            left -= rows
            count = count_windows(stream, context)
            places = np.arange(step * rows, (step + 1) * rows)
            orders = [order(seed, kind, int(epoch), count) for epoch in places // count]
            starts = [one[place] for one, place in zip(orders, places % count, strict=True)]
            parts.append(windows(stream, np.array(starts, dtype=np.int64), context))
        return np.concatenate(parts)

    def held_out_batches(self, kind: str, batch: int, context: int, limit: int | None = None) -> list[np.ndarray]:
        """The first `limit` batches of the windows that no run trains on, by default all of them."""
        count = count_windows(self.held_out[kind], context)
        starts = range(0, count if limit is None else min(count, limit * batch), batch)
        indices = [np.arange(first, min(first + batch, count)) for first in starts]
        return [windows(self.held_out[kind], one, context) for one in indices]


def count_windows(stream: np.ndarray, context: int) -> int:
    """Number of windows side by side."""
    count = (len(stream) - 1) // context
    if count < 1:
        raise invalid_value("context", context, f"less than the {len(stream)} tokens of the text")
    return count


@functools.lru_cache(maxsize=8)
def order(seed: int, kind: str, epoch: int, count: int) -> np.ndarray:
    """The windows of one pass over a kind of text."""
    number = int.from_bytes(kind.encode(), "little")
    return np.random.default_rng([seed, number, epoch]).permutation(count)


def windows(stream: np.ndarray, indices: np.ndarray, context: int) -> np.ndarray:
    """int64 [len(indices), context + 1]: a window, and the first token after it."""
    return stream[(indices * context)[:, None] + np.arange(context + 1)].astype(np.int64)


def load_text(folder: Path | None) -> Text:
    """The text that tools/corpus.py left in a folder; None: bytes of the running Python's library."""
    if folder is None:
        from gpt.data import load_corpus

        corpus = load_corpus(4_000_000)
        facts = {"text": "bytes of Python's standard library", "sha256": corpus.digest}
        return Text({"code": corpus.train}, {"code": corpus.held_out}, 256, facts)
    if not (folder / "card.json").is_file():
        raise invalid_value("--text", str(folder), "a folder with a card.json", "Make it with `make corpus`.")
    card = json.loads((folder / "card.json").read_text())
    train, held_out = (
        {kind: np.memmap(folder / f"{part}_{kind}.bin", "<u2", "r") for kind in SHARES}
        for part in ("train", "held_out")
    )
    names = [f"{part}_{kind}" for part in ("train", "held_out") for kind in SHARES]
    digest = hashlib.sha256("".join(card["streams"][name]["sha256"] for name in names).encode()).hexdigest()
    counts = {name: card["streams"][name]["tokens"] for name in names}
    return Text(train, held_out, card["entries"], {"text": card["what"], "tokens": counts, "sha256": digest})
