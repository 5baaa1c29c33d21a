"""Rows about many tensors of one kind, shown as one."""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

__all__ = ["MOST_LINES", "by_quality", "together"]

MOST_LINES = 16  # tensors that are listed one by one; of more, those alike are shown together
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a part of a name between dots
_ADDED = ("bytes", "bytes_before", "bytes_after", "non_finite")
_LARGEST = ("amax", "crest", "bits")


def by_quality(figure: float) -> float:
    """Key of SQNRs in rising order: NaN, of a result that is NaN itself, comes first."""
    return -math.inf if math.isnan(figure) else figure


def together(rows: Iterable[dict[str, Any]], keys: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for all that differ only by numbers in their names and agree in `keys`.

    Bytes are added; of other figures the worst is shown: NaN, the largest amax, the smallest SQNR.
    """
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((_NUMBER.sub("*", row["name"]), *(str(row.get(key)) for key in keys)), []).append(row)
    for (pattern, *_), members in groups.items():
        joined = {**members[0], "name": pattern if len(members) > 1 else members[0]["name"], "tensors": len(members)}
        for key in members[0]:
            values = [row[key] for row in members if isinstance(row[key], float)]
            if key in _ADDED:
                joined[key] = sum(row[key] for row in members)
            elif values:
                joined[key] = max(values) if key in _LARGEST else min(values, key=by_quality)
        yield joined
