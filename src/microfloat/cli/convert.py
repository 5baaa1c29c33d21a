"""`microfloat convert`: a checkpoint in another format, with progress, verified, and resumable."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microfloat.cli.hub import Hub, Source, local
from microfloat.cli.machine import load_casts
from microfloat.cli.output import MOST_LINES, Column, Output, decibel, size, together
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, NotSupportedError

if TYPE_CHECKING:
    from microfloat.checkpoint import Progress, Report

_CONVERTED = (
    Column("name", "tensor", prose=True), Column("tensors", "n", right=True), Column("action"), Column("source"),
    Column("format"), Column("sqnr_db", "worst\ndB", decibel, right=True),
    Column("bytes_before", "before", size, right=True), Column("bytes_after", "after", size, right=True),
)  # fmt: skip
_SKIPPED = (
    Column("name", "tensor", prose=True), Column("tensors", "n", right=True), Column("reason", prose=True),
)  # fmt: skip


def convert(
    output: Output,
    src: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint in any format.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="A folder, or a .safetensors file, that does not exist.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help="ct:nvfp4, modelopt:fp8, deepseek:fp8, bf16, ...")],
    source: Source = "auto",
    scale_rule: Annotated[
        str | None, typer.Option("--scale-rule", metavar="RULE", help="Instead of the format's own: rceil, even, ...")
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="PATTERN", help="Keep these modules as they are; may be given several times: "
                     "a part of a name, a wildcard, or a regular expression after re:"),
    ] = None,
    fuse: Annotated[
        str, typer.Option("--fuse", metavar="KINDS", help="Groups with one global scale: qkv, gate_up, experts, none.")
    ] = "qkv,gate_up",
    four_over_six: Annotated[
        bool, typer.Option("--four-over-six", help="NVFP4: choose 4 or 6 as the largest value of each block.")
    ] = False,
    placement: Annotated[
        Path | None,
        typer.Option("--placement", metavar="FILE", help="A format for each layer, as plan --out wrote it; with --to "
                     "ct:mixed, modelopt:mixed, quark:mixed or microfloat:native."),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Read the result back and compare it.")] = True,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Continue the same conversion where it stopped.")
    ] = True,
    max_shard_size: Annotated[
        str, typer.Option("--max-shard-size", metavar="SIZE", help="Largest file, such as 5GB or 500MB.")
    ] = "5GB",
    hub: Hub = False,
) -> int:  # fmt: skip
    """Convert a checkpoint to another format; one piece of a tensor is in memory at a time.

    Exits with 1 where nothing was converted, since every tensor has the target's dtype already.

    \b
    microfloat convert model/ model-nvfp4/ --to ct:nvfp4
    microfloat convert model/ model-fp8/ --to deepseek:fp8 --ignore 're:.*layers\\.0\\.'
    microfloat convert model-nvfp4/ model-bf16/ --to bf16
    microfloat convert model/ model-mixed/ --to ct:mixed --placement placement.json
    """
    from microfloat import checkpoint

    if load_casts() == "numpy":
        output.say("The NumPy oracle casts, some 30 million elements a second; torch or jax, installed, cast faster.")
    kinds = [kind.strip() for kind in fuse.split(",") if kind.strip() not in ("", "none")]
    seen: Progress | None = None
    with output.progress(f"to {to}", None, of_bytes=True) as show:

        def follow(progress: "Progress") -> None:
            nonlocal seen
            seen = progress
            show(progress.done, progress.total, stage(progress))

        try:
            report = checkpoint.convert(
                local(src, hub, "SRC"), dst, to=to, scale_rule=scale_rule, ignore=ignore or (), fuse=kinds,
                four_over_six=four_over_six, verify=verify, resume=resume, max_shard_size=max_shard_size,
                format=source, progress=follow, placement=placement,
            )  # fmt: skip
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_stopped(dst, seen)) from None
        except CheckpointError as error:
            is_written = seen is not None and seen.shard > 0 and (seen.done == seen.total or seen.shard > seen.shards)
            if error.findings or is_written:
                raise  # the source is damaged, or the result is not what was written
            raise NotSupportedError(str(error)) from None  # no space, or a destination that exists
        except (InvalidTypeError, InvalidValueError) as error:
            argument, colon, rest = str(error).partition(":")  # an argument has the words of the option it came from
            raise type(error)(f"{_OPTIONS.get(argument, argument)}{colon}{rest}") from None
    _show(output, report)
    return 0 if report.converted else 1


def stage(progress: "Progress") -> str:
    """The work that is going on, in words."""
    if progress.shard > progress.shards:
        return "verifying"
    return f"writing file {progress.shard} of {progress.shards}" if progress.shard else "measuring"


# Arguments of `checkpoint.convert`, and the words of the command line that they come from.
_OPTIONS = {"path": "DST", "src": "SRC", "format": "--from"} | {
    name: f"--{name.replace('_', '-')}"
    for name in ("to", "scale_rule", "ignore", "fuse", "four_over_six", "max_shard_size", "placement")
}


def _stopped(dst: Path, seen: "Progress | None") -> str:
    """The message after Ctrl-C: the files that are left, and the command that goes on."""
    again = shlex.join(["microfloat", *(word for word in sys.argv[1:] if word != "--no-resume")])
    if seen is None or not seen.shard:
        return f"before writing. To go on:\n    {again}"
    if seen.shard > seen.shards:
        return f"while the result was verified. Its files stay in {dst}.partial. To go on:\n    {again}"
    where = f"at {seen.done / max(seen.total, 1):.0%}, file {seen.shard} of {seen.shards}"
    if seen.shards == 1 and seen.done < seen.total:
        return f"{where}, which is not complete. To start again:\n    {again}"
    return f"{where}. Complete files stay in {dst}.partial. To go on:\n    {again}"


def _show(output: Output, report: "Report") -> None:
    document = report.to_dict()
    output.put(**document)
    if not output.shows:
        return
    names = {layer.name for layer in report.converted}
    converted = [row for row in document["layers"] if row["name"] in names]
    if converted:
        many = len(document["layers"]) > MOST_LINES
        shown = list(together(converted, ("action", "source", "format"))) if many else converted
        output.table(None, shown, _CONVERTED, f"{report.source} -> {report.destination}")
    skipped: list[dict[str, Any]] = document["skipped"]
    if skipped:
        output.table(None, list(together(skipped, ("reason",))), _SKIPPED, "Kept as they are")
    output.pairs(report.summary())
    for note in report.notes:
        if converted or not note.startswith("nothing was converted"):  # which the last line says
            output.warn(note)
    if not converted:
        output.say(f"Nothing was converted: every tensor of {report.source} is as {report.format} has it already.")
        return
    output.say(f"Next: microfloat inspect {report.destination}; microfloat diff {report.source} {report.destination}")
