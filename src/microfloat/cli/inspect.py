"""`microfloat inspect`: the format, the findings and the sizes of a checkpoint, and its errors in other formats."""

import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microfloat.cli.hub import Hub, Source, read
from microfloat.cli.output import MOST_LINES, Column, Output, by_quality, count, decibel, finding_row, four, size, three
from microfloat.cli.output import together as together_rows
from microfloat.errors import invalid_value

if TYPE_CHECKING:
    from microfloat.checkpoint import Checkpoint, Finding
    from microfloat.cli.survey import Survey
    from microfloat.formats import ScaledFormat

DEFAULT_FORMATS = "nvfp4,mxfp4,mxfp6_e2m3,mxfp8,fp8_128x128"
_COLOURS = {"error": "bold red", "warn": "yellow", "info": "dim"}


_TENSOR_COLUMNS = (
    Column("name", "tensor", prose=True), Column("tensors", "n", right=True), Column("shape"), Column("format"),
    Column("bits", text=four, right=True), Column("bytes", "size", size, right=True),
    Column("activation", "input"),
)  # fmt: skip
_FINDING_COLUMNS = (
    Column("severity", style=lambda severity: _COLOURS[severity]), Column("id"), Column("tensor", prose=True),
    Column("message", prose=True), Column("remedy", prose=True),
)  # fmt: skip


_READER_COLUMNS = (
    Column("reader"), Column("family"), Column("does", style=lambda does: "yellow" if does != "reads" else ""),
    Column("what", "about", prose=True), Column("layers", "n", right=True),
)  # fmt: skip


def inspect(
    output: Output,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A safetensors file, or a folder of them.")],
    format: Annotated[
        str, typer.Option("--format", metavar="NAMES", help=f"Formats to try, such as {DEFAULT_FORMATS}.")
    ] = "",
    layers: Annotated[
        str, typer.Option("--layers", metavar="REGEX", help="Only tensors with this in their name, one by one.")
    ] = "",
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw what was measured.")] = None,
    sample_rows: Annotated[
        int, typer.Option("--sample-rows", min=0, metavar="N", help="Rows of a matrix to measure; 0: all of them.")
    ] = 512,
    strict: Annotated[bool, typer.Option("--strict", help="Exit 1 for warnings too.")] = False,
    source: Source = "auto",
    hub: Hub = False,
) -> int:
    """Show the format of a checkpoint, its sizes, what is wrong with it, and its error in other formats.

    \b
    microfloat inspect model/
    microfloat inspect model/ --format nvfp4,mxfp8 --plot model.png
    microfloat inspect model.safetensors --strict
    """
    from microfloat.cli.survey import chosen_formats, survey

    formats = chosen_formats(format)
    checkpoint = read(path, hub, source, pattern=layers_pattern(layers))
    if layers and not len(checkpoint):
        raise invalid_value("--layers", repr(layers), "a regular expression that matches the name of a tensor")
    together = not layers and len(checkpoint) > MOST_LINES
    _detection(output, checkpoint)
    rows = _tensors(output, checkpoint, together)
    _readers(output, checkpoint)
    matrices = [row["name"] for row in rows if _is_measured(checkpoint, row, bool(layers))]
    is_plain = all(row["family"] is None for row in rows)
    if not formats and is_plain:
        formats = chosen_formats(DEFAULT_FORMATS)
    if not formats and plot is None:
        return _findings(output, checkpoint, strict)
    found = survey(checkpoint, output.each("measuring", matrices), formats, sample_rows)
    bits = _errors(output, rows, found, formats, together)
    if plot is not None:
        _draw(output, plot, checkpoint, found, formats, bits)
    return _findings(output, checkpoint, strict, _lost_weights(checkpoint, found))


def layers_pattern(layers: str) -> str | None:
    """The pattern of `load` for --layers: a regular expression that may match anywhere in a name."""
    if not layers:
        return None
    from microfloat.checkpoint.families.patterns import users_regex

    users_regex("--layers", layers)
    return f"re:.*(?:{layers}).*"


def _detection(output: Output, checkpoint: "Checkpoint") -> None:
    found = checkpoint.detection
    output.facts(
        {
            "path": str(checkpoint.path), "family": found.family, "format": found.format and found.format.name,
            "confidence": found.confidence, "candidates": list(found.candidates) if len(found.candidates) > 1 else [],
            "evidence": list(found.evidence), "files": len(checkpoint.files),
        },
        texts={"evidence": "\n".join(found.evidence) or "-", "confidence": f"{found.confidence:.0%}"},
    )  # fmt: skip


def _tensors(output: Output, checkpoint: "Checkpoint", together: bool) -> list[dict[str, Any]]:
    rows = []
    for name in checkpoint:
        record = checkpoint[name]
        elements = math.prod(record.logical_shape)
        rows.append({
            "name": name, "shape": list(record.logical_shape),
            "format": record.format.name if record.format else record.codes.dtype.name,
            "family": record.source.family if record.source else None, "elements": elements,
            "bits": 8 * record.nbytes / elements if elements else 0.0, "bytes": record.nbytes,
            "activation": None if record.format is None else record.activation.get("scheme"),
        })  # fmt: skip
    output.put(tensors=rows)
    shown = list(together_rows(rows, ("shape", "format", "activation"))) if together else rows
    output.table(None, shown, _TENSOR_COLUMNS, "Tensors")
    elements, stored = sum(row["elements"] for row in rows), sum(row["bytes"] for row in rows)
    totals = {"tensor_count": len(rows), "parameters": elements, "bytes": stored, "bits": 8 * stored / max(elements, 1)}
    texts = {"parameters": count(elements), "bytes": size(stored), "bits": f"{totals['bits']:.4g} per parameter"}
    output.facts(totals, texts=texts)
    return rows


def _readers(output: Output, checkpoint: "Checkpoint") -> None:
    """Say whether the engines whose sources were read load the quantized layers."""
    from microfloat.checkpoint.detect import lacks_input_scale
    from microfloat.checkpoint.families.readers import Layer, readers_of

    kind = str(checkpoint.config.get("model_type"))
    dtype = str(checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "").removeprefix("torch.")
    layers = []
    for name, entry in checkpoint.contents.entries.items():
        if name in checkpoint:
            record = checkpoint[name]
            inputs = "unscaled" if lacks_input_scale(entry) else record.activation.get("scheme", "")
            layers.append(Layer(entry.family.name, record.format, name, record.logical_shape, kind, inputs, dtype))
    rows = readers_of(layers)
    output.put(readers=rows)
    if rows:
        output.table(None, rows, _READER_COLUMNS, "Who reads it")


def _is_measured(checkpoint: "Checkpoint", row: dict[str, Any], chosen: bool) -> bool:
    """True for quantized parameters, and for plain ones that a conversion would cast; or that were `chosen`."""
    from microfloat.checkpoint.families.patterns import module_of
    from microfloat.recipes.placement import is_kept

    if row["family"] is not None:
        return checkpoint[row["name"]].problem is None
    if len(row["shape"]) < 2 or "float" not in row["format"] or not row["elements"]:
        return False
    return chosen or not is_kept(module_of(row["name"]))


def _errors(
    output: Output, rows: list[dict[str, Any]], found: "Survey", formats: Sequence["ScaledFormat"], together: bool
) -> dict[str, float]:
    """SQNR of every layer under every format, and a line for each format; returns bits per parameter."""
    elements = max(sum(row["elements"] for row in rows), 1)
    bits, summary = {"as stored": 8 * sum(row["bytes"] for row in rows) / elements}, []
    if not formats:
        return bits
    output.put(sqnr=found.rows)
    shown = list(together_rows(found.rows, ("shape",))) if together else found.rows
    columns = [
        Column("name", "layer", prose=True), Column("tensors", "n", right=True),
        Column("amax", text=three, right=True),
        Column("crest", text=three, right=True),
        Column("non_finite", "not\nfinite", lambda found: count(found or None), right=True, style=lambda _: "bold red"),
        *(Column(fmt.name, fmt.name.replace("_", "\n"), decibel, right=True) for fmt in formats),
    ]  # fmt: skip
    of = "" if len(shown) == len(found.rows) else ", the worst of n layers"
    output.table(None, shown, columns, f"SQNR in dB against what is stored{of}")
    for fmt in formats:
        cast = {row["name"]: row[fmt.name] for row in found.rows if row[fmt.name] is not None}
        stored = sum(
            row["elements"] * fmt.bits_per_element / 8 if row["name"] in cast else row["bytes"] for row in rows
        )
        bits[fmt.name] = 8 * stored / elements
        worst = min(cast, key=lambda name: by_quality(cast[name]), default=None)
        middle = sorted(cast.values(), key=by_quality)[len(cast) // 2] if cast else None
        summary.append({
            "format": fmt.name, "bits": bits[fmt.name], "bytes": round(stored), "median_db": middle,
            "worst_db": None if worst is None else cast[worst], "worst_layer": worst, "layers": len(cast),
        })  # fmt: skip
    columns = (
        Column("format"), Column("bits", text=four, right=True), Column("bytes", "size", size, right=True),
        Column("median_db", "median\ndB", decibel, right=True), Column("worst_db", "worst\ndB", decibel, right=True),
        Column("worst_layer", prose=True),
    )  # fmt: skip
    output.table("formats", summary, columns, "If these layers were converted")
    return bits


def _draw(
    output: Output, plot: Path, checkpoint: "Checkpoint", found: "Survey", formats: Sequence["ScaledFormat"],
    bits: dict[str, float],
) -> None:  # fmt: skip
    from microfloat.pictures import save
    from microfloat.pictures.checkpoints import Layer, overview

    layers = [
        Layer(row["name"], row["amax"], row["crest"], {fmt.name: row[fmt.name] for fmt in formats})
        for row in found.rows
    ]
    title = f"{checkpoint.path.name}: {checkpoint.detection.family}, {len(checkpoint)} tensors"
    output.drew(save(overview(layers, bits, found.shares(), title), plot))


def _lost_weights(checkpoint: "Checkpoint", found: "Survey") -> list["Finding"]:
    """A warning for each plain matrix with elements that are NaN or infinite, which `convert` refuses to cast."""
    from microfloat.checkpoint import Finding

    remedy = "Mend the weights: a cast spreads them over their blocks, and convert refuses it."
    return [
        Finding("nan-weight", "warn", row["name"], f"{row['non_finite']} of the elements measured are NaN or infinite.",
                remedy)
        for row in found.rows if row["non_finite"] and checkpoint[row["name"]].format is None
    ]  # fmt: skip


def _findings(output: Output, checkpoint: "Checkpoint", strict: bool, more: Sequence["Finding"] = ()) -> int:
    """Show the findings, `more` among them, and return the exit code."""
    with output.progress("checking codes and scales", None):
        findings = [*checkpoint.findings, *more]
    rows = [finding_row(finding) for finding in findings]
    if strict:  # serving engines use one scale for a fused group, whatever its members say
        for row in rows:
            row["severity"] = "error" if row["id"] == "fused-mismatch" else row["severity"]
    rows.sort(key=lambda row: ("error", "warn", "info").index(row["severity"]))
    output.put(findings=rows)
    if rows:
        output.table(None, list(_one_of_each_kind(rows)), _FINDING_COLUMNS, "Findings")
    else:
        output.say("No findings: names, shapes, scales and codes are as they should be.")
    bad = ("error", "warn") if strict else ("error",)
    return int(any(row["severity"] in bad for row in rows))


def _one_of_each_kind(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rows; of the rows for information with the same id the first, with the number of the others."""
    kinds: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        alone = () if row["severity"] == "info" else (row["tensor"], row["message"])
        kinds.setdefault((row["severity"], row["id"], *alone), []).append(row)
    for first, *others in kinds.values():
        more = f" and {len(others)} more" if others else ""
        yield {**first, "tensor": first["tensor"] + more}
