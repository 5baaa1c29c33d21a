"""`microfloat convert`: a checkpoint in another format, with progress, verified, and resumable."""

import contextlib
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from microfloat import errors
from microfloat.arguments import check_choice
from microfloat.checkpoint._planning import target_of
from microfloat.checkpoint.families.patterns import ignored_by
from microfloat.cli.hub import Hub, Source, local
from microfloat.cli.machine import load_casts
from microfloat.cli.output import MOST_LINES, Column, Output, decibel, size, together
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.recipes.inference import WeightActivation, WeightOnly

if TYPE_CHECKING:
    from microfloat.checkpoint import Progress, Report

_CONVERTED = (
    Column("name", "tensor", prose=True), Column("tensors", "n", right=True), Column("action"), Column("source"),
    Column("format"), Column("sqnr_db", "worst\ndB", decibel, right=True),
    Column("bytes_before", "before", size, right=True), Column("bytes_after", "after", size, right=True),
)  # fmt: skip
_SKIPPED = (Column("name", "tensor", prose=True), Column("tensors", "n", right=True), Column("reason", prose=True))


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
    method: Annotated[str, typer.Option("--method", metavar="NAME", help="nearest, or gptq.")] = "nearest",
    calibrate: Annotated[Path | None, typer.Option("--calibrate", metavar="TEXT", help="A file, for gptq.")] = None,
    hub: Hub = False,
) -> int:  # fmt: skip
    """Convert a checkpoint to another format; one piece of a tensor is in memory at a time.

    Exits with 1 where nothing was converted, since every tensor has the target's dtype already.

    \b
    microfloat convert model/ model-nvfp4/ --to ct:nvfp4
    microfloat convert model/ model-fp8/ --to deepseek:fp8 --ignore 're:.*layers\\.0\\.'
    microfloat convert model-nvfp4/ model-bf16/ --to bf16
    microfloat convert model/ model-mixed/ --to ct:mixed --placement placement.json
    microfloat convert model/ model-nvfp4/ --to ct:nvfp4 --method gptq --calibrate text.txt
    """
    from microfloat import checkpoint

    check_choice("--method", method, ("nearest", "gptq"))
    kinds = [kind.strip() for kind in fuse.split(",") if kind.strip() not in ("", "none")]
    if method == "nearest" and load_casts() == "numpy":
        output.say("The NumPy oracle casts, some 30 million elements a second; torch or jax, installed, cast faster.")
    report: Report | None = None
    rows: list[dict[str, str]] = []
    seen: list[Progress] = []  # the last one
    with output.progress(f"to {to}", None, of_bytes=method == "nearest") as show, _in_words(dst, seen):

        def follow(progress: "Progress") -> None:
            seen[:] = [progress]
            show(progress.done, progress.total, stage(progress))

        if method == "gptq":
            config = placement or _config_of(to, scale_rule, four_over_six)
            folder = src if hub else local(src, hub, "SRC")  # transformers finds all files that it needs
            rows = _by_gptq(folder, dst, calibrate, config, show, to, ignore or (), kinds, max_shard_size)
        else:
            report = checkpoint.convert(
                local(src, hub, "SRC"), dst, to=to, scale_rule=scale_rule, ignore=ignore or (), fuse=kinds,
                four_over_six=four_over_six, verify=verify, resume=resume, max_shard_size=max_shard_size,
                format=source, progress=follow, placement=placement,
            )  # fmt: skip
    if report is not None:
        _show(output, report)
        return 0 if report.converted else 1
    output.put(source=str(src), destination=str(dst), format=to, layers=rows)
    output.table(None, list(together(rows, ("reason",))), _SKIPPED, f"{src} -> {dst}")
    output.say(f"Next: microfloat inspect {dst}")
    return 0


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


@contextlib.contextmanager
def _in_words(dst: Path, seen: "list[Progress]") -> Iterator[None]:
    """Errors of a conversion in the words of the command line; `seen`: the last progress, if any."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_stopped(dst, seen[-1] if seen else None)) from None
    except CheckpointError as error:
        last = seen[-1] if seen else None
        is_written = last is not None and last.shard > 0 and (last.done == last.total or last.shard > last.shards)
        if error.findings or is_written:
            raise  # the source is damaged, or the result is not what was written
        raise NotSupportedError(str(error)) from None  # no space, or a destination that exists
    except (InvalidTypeError, InvalidValueError) as error:
        argument, colon, rest = str(error).partition(":")  # an argument has the words of the option it came from
        raise type(error)(f"{_OPTIONS.get(argument, argument)}{colon}{rest}") from None


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


_LENGTH, _SEQUENCES = 2048, 128  # of tokens, at most, and how many of the text


def _config_of(to: str, scale_rule: str | None, four_over_six: bool) -> WeightOnly | WeightActivation:
    """The config under which `quantize_` stores weights, and multiplies them, as a target announces it."""
    written = target_of(to, None, four_over_six).written
    if written is None or scale_rule is not None:
        raise errors.invalid_value("--method", "'gptq'", "a target of codes, and no --scale-rule but --four-over-six")
    name, search = written.cast.format.name, "four_over_six" if four_over_six else None
    if written.activation_format is None:
        return WeightOnly(name, search)
    return WeightActivation(written.activation_format.name, None, name, written.activation, search)


def _by_gptq(
    src: Path, dst: Path, text: Path | None, config: Any, show: Callable[..., None], to: str, ignore: Sequence[str],
    fuse: Sequence[str], max_shard_size: str,
) -> list[dict[str, str]]:  # fmt: skip
    """Load a model by transformers, call it on the text, choose its codes, and save it; a row for each layer."""
    if text is None or not text.is_file():
        raise errors.invalid_value("--calibrate", text, "a file of text like that which the model will read")
    if dst.exists():
        raise errors.invalid_value("DST", f"{dst}, which exists", "a folder that does not")
    try:
        import torch
        import transformers
    except ModuleNotFoundError as error:
        raise errors.missing_package(str(error.name), "--method gptq", "torch,integrations") from None
    from microfloat import torch as mf
    from microfloat.torch.inference.quantize import plan_storage

    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(src)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(src, dtype="auto").eval()
    except (OSError, ValueError) as error:
        raise errors.invalid_value(
            "SRC", src, "a language model of transformers, with tokenizer", str(error)
        ) from error
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt", verbose=False)["input_ids"].to(model.device)
    length = min(_LENGTH, getattr(model.config, "max_position_embeddings", _LENGTH))
    batches = ids[:, : length * _SEQUENCES].split(length, 1)
    with mf.calibrate(model), torch.no_grad():
        for done, batch in enumerate(batches):
            show(done, len(batches), "calibrating")
            model(batch, use_cache=False)
    plan = plan_storage(model, config, lambda name, _: not ignored_by(name, ignore), fuse=fuse, method="gptq")
    for done, members in enumerate(groups := plan.groups()):
        show(done, len(groups), f"quantizing {members[0]}")
        plan.store(members)
    rows = [{"name": row.name, "reason": row.reason} for row in plan.complete(model)]
    mf.save_quantized(model, dst, format=to, max_shard_size=max_shard_size)
    tokenizer.save_pretrained(dst)
    return rows
