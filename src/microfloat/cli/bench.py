"""`microfloat bench`: times of casts and products on this machine, beside bfloat16's and an earlier run's."""

import csv
import datetime
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from microfloat.arguments import check_new_file
from microfloat.cli import machine
from microfloat.cli.output import Column, Output, three
from microfloat.errors import invalid_value, unknown_name
from microfloat.formats import FORMATS
from microfloat.recipes import RECIPES, Cast, Gemm, from_name

DEFAULT_FORMATS = "fp8_current,fp8_row,fp8_block,mxfp8,mxfp4,nvfp4"
_TOKENS = 4096


class Shape(NamedTuple):
    """y [M, N] = x [M, K] @ w [N, K].T."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"


# The linear layers of models, for 4096 tokens: queries, keys and values; output; gate and up; down.
SHAPES = {
    "llama8b": [Shape(_TOKENS, n, k) for n, k in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))],
    "llama70b": [Shape(_TOKENS, n, k) for n, k in ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))],
}
_ON_CPU = "256x256x256,512x512x512"


_COLUMNS = (
    Column("shape", "M x N x K"), Column("format"),
    Column("quantize_ms", "quantize\nms", three, right=True), Column("quantize_gbs", "GB/s", three, right=True),
    Column("gemm_ms", "GEMM\nms", three, right=True), Column("spread", "p10 to\np90 ms"),
    Column("tflops", "TFLOP/s", three, right=True), Column("ratio_to_bf16", "x bf16\nspeed", three, right=True),
    Column("change", "against\nbaseline", lambda value: "-" if value is None else f"{100 * value:+.1f} %", right=True),
    Column("problem", prose=True),
)  # fmt: skip


def bench(
    output: Output,
    shapes: Annotated[
        str, typer.Option("--shapes", metavar="LIST", help=f"{', '.join(SHAPES)}, or MxNxK,MxNxK (on a GPU: llama8b).")
    ] = "",
    formats: Annotated[str, typer.Option("--formats", metavar="NAMES", help="Recipes or formats.")] = DEFAULT_FORMATS,
    csv_file: Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the table.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw the roofline.")] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="FILE", help="The --json of an earlier run; exit 1 if slower.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", min=0, metavar="PERCENT", help="A slowdown up to this is no regression.")
    ] = 10.0,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="cuda or cpu; cuda if there is one.")] = "",
    milliseconds: Annotated[
        float, typer.Option("--milliseconds", metavar="MS", min=0, help="Time for each measurement on a CPU.")
    ] = 150.0,
) -> int:  # fmt: skip
    """Time quantize and GEMM in each format on random data, after checking the results against the reference.

    \b
    microfloat bench
    microfloat bench --shapes 4096x4096x4096 --formats fp8_row,mxfp8
    microfloat bench --json > before.json
    microfloat bench --baseline before.json
    """
    gemms = _gemms(formats)
    if csv_file is not None:
        check_new_file("--csv", csv_file)
    earlier = None if baseline is None else _read(baseline)
    import microfloat.torch  # noqa: F401 -- names the extra where torch is missing
    from microfloat.torch import timing as measure

    if device not in ("", "cpu", "cuda") or (device == "cuda" and not measure.has_cuda()):
        raise invalid_value("--device", repr(device), "cpu, or cuda on a machine with an NVIDIA GPU")
    device = device or ("cuda" if measure.has_cuda() else "cpu")
    chosen = shapes_of(shapes or ("llama8b" if device == "cuda" else _ON_CPU))
    _machine(output, device)
    if earlier is not None and earlier.get("device") != output.document["device"]:
        needed = f"a run on {output.document['device']}: times of different devices do not compare"
        raise invalid_value("--baseline", f"{baseline} of {earlier.get('device')}", needed)
    copy = measure.copy_gbs(1 << (30 if device == "cuda" else 24), device)
    output.put(copy_gbs=copy)
    output.say(f"A copy moves {copy:.1f} GB/s, read and written.")
    output.say()
    pairs = [(name, shape) for name in gemms for shape in chosen]
    rows = [
        _measured(name, gemms[name], shape, device, milliseconds)
        for name, shape in output.each("measuring", pairs, lambda pair: f"{pair[0]} {pair[1]}")
    ]
    slower = _compare(rows, earlier, tolerance) if earlier is not None else []
    _report(output, rows, csv_file)
    if plot is not None:
        from microfloat.pictures import roofline, save

        output.drew(save(roofline(rows, copy, output.document["device"]), plot))
    if earlier is not None:
        output.put(regressions=slower)
        output.say(f"Slower than {baseline} by more than {tolerance:g} %: {', '.join(slower) or 'none'}.")
    return int(bool(slower) or any(row["problem"] for row in rows))


def _gemms(text: str) -> dict[str, Gemm]:
    """The forward product of each recipe, or a product of two operands of a format."""
    found = {}
    for name in filter(None, (word.strip().lower() for word in text.split(","))):
        if name in RECIPES:
            gemm = from_name(name).fprop  # its casts shall round to nearest and measure their own scales
            casts = (None if cast is None else Cast(cast.format, cast.scale_rule) for cast in gemm.casts)
            found[name] = Gemm(*casts, accumulate=gemm.accumulate, path=gemm.path)
        elif name in FORMATS:
            found[name] = Gemm(Cast(FORMATS[name]), Cast(FORMATS[name]))
        else:
            raise unknown_name("--formats", name, list(dict.fromkeys([*RECIPES, *FORMATS])))
    if not found:
        raise invalid_value("--formats", repr(text), f"names such as {DEFAULT_FORMATS}")
    return found


def shapes_of(text: str) -> list[Shape]:
    found: list[Shape] = []
    for word in filter(None, (word.strip() for word in text.split(","))):
        if word in SHAPES:
            found += SHAPES[word]
            continue
        sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", word)
        if sizes is None or "0" in sizes.groups():
            raise invalid_value("--shapes", repr(word), f"{', '.join(SHAPES)}, or sizes MxNxK such as 4096x4096x4096")
        found.append(Shape(*map(int, sizes.groups())))
    return list(dict.fromkeys(found))


def _machine(output: Output, device: str) -> None:
    gpus = machine.gpus() if device == "cuda" else []
    facts = {
        "device": gpus[0]["name"] if gpus else machine.processor() if device == "cpu" else device,
        "driver": gpus[0]["driver"] if gpus else None, "threads": machine.threads() if device == "cpu" else None,
        "clocks": machine.clocks() if gpus else None, "date": datetime.date.today().isoformat(),
        "versions": {key: value for key, value in machine.versions("torch", "triton").items() if value},
    }  # fmt: skip
    texts = {"versions": ", ".join(f"{name} {version}" for name, version in facts["versions"].items())}
    if facts["clocks"]:
        texts["clocks"] = ", ".join(f"{name} {value}" for name, value in facts["clocks"].items())
    output.facts(facts, texts=texts, title="Machine")


def _measured(name: str, gemm: Gemm, shape: Shape, device: str, milliseconds: float) -> dict[str, Any]:
    """One row; a format that differs from the reference, or fails, has a problem and no times."""
    from microfloat.torch import timing as measure

    row: dict[str, Any] = {"shape": str(shape), "m": shape.m, "n": shape.n, "k": shape.k, "format": name}
    row |= {"operands": [cast.format.name for cast in gemm.casts if cast is not None], "problem": None}
    maker = measure.Maker(gemm, device)
    try:
        difference = maker.difference((64, 128, 96) if device == "cpu" else (256, 512, 384))
        if difference > machine.LARGEST_DIFFERENCE:
            return row | {"problem": f"differs from the reference by {difference:.1e}: not timed"}
        sizes = (shape.m, shape.k, shape.n)
        operand = shape.m * shape.k + shape.n * shape.k
        times = maker.times(sizes, measure.rotations(operand) if device == "cuda" else 2, milliseconds)
        assert gemm.lhs is not None
        cast = measure.quantize_times((shape.m, shape.k), gemm.lhs, device, milliseconds)
    except Exception as error:  # out of memory, or a kernel that this machine lacks or Triton does not compile
        return row | {"problem": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    ours, bf16, flop = times["ours"], times["bf16"], 2 * shape.m * shape.n * shape.k
    element = gemm.lhs.format.bits_per_element / 8
    moved = shape.m * shape.k * (2 + element)
    return row | {
        "kernel": maker.route.kernel if maker.backend == "native" else "decode to float32, float32 matmul",
        "quantize_ms": cast.median, "quantize_p10_ms": cast.p10, "quantize_p90_ms": cast.p90,
        "quantize_gbs": moved / cast.median / 1e6,
        "gemm_ms": ours.median, "gemm_p10_ms": ours.p10, "gemm_p90_ms": ours.p90,
        "tflops": flop / ours.median / 1e9, "bf16_ms": bf16.median, "bf16_tflops": flop / bf16.median / 1e9,
        "ratio_to_bf16": bf16.median / ours.median,
        "intensity": flop / (operand * element + 2 * shape.m * shape.n),
        "bf16_intensity": flop / (2 * operand + 2 * shape.m * shape.n),
    }  # fmt: skip


def _report(output: Output, rows: list[dict[str, Any]], csv_file: Path | None) -> None:
    for row in rows:
        if row.get("gemm_ms"):
            row["spread"] = f"{row['gemm_p10_ms']:.3g} to {row['gemm_p90_ms']:.3g}"
    output.table("rows", rows, _COLUMNS, "Quantize x and multiply; medians; after the results were compared")
    if csv_file is not None:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            fields = list(dict.fromkeys(key for row in rows for key in row))
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(rows)
        output.say(f"Table: {csv_file}")


def _read(path: Path) -> dict[str, Any]:
    needed = "the output of microfloat bench --json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise invalid_value("--baseline", path, needed, f"It is no JSON: {error}.") from None
    if not isinstance(found, Mapping) or not isinstance(found.get("rows"), list):
        raise invalid_value("--baseline", path, needed)
    return dict(found)


def _compare(rows: list[dict[str, Any]], earlier: Mapping[str, Any], tolerance: float) -> list[str]:
    """Fill in `change`, the time over the baseline's minus 1; returns the rows that are slower beyond their spread."""
    known = {(row.get("shape"), row.get("format")): row for row in earlier["rows"]}
    slower, met = [], 0
    for row in rows:
        base = known.get((row["shape"], row["format"]), {})
        for part in ("gemm", "quantize"):
            before, now = base.get(f"{part}_ms"), row.get(f"{part}_ms")
            if before and now:
                met += 1
                change = now / before - 1
                row[f"{part}_change"] = change
                if change > tolerance / 100 and row[f"{part}_p10_ms"] > before:
                    slower.append(f"{part} {row['format']} {row['shape']}")
        row["change"] = row.get("gemm_change")
    if not met:
        raise invalid_value("--baseline", "a run without any of these shapes and formats", "a run of the same ones")
    return slower
