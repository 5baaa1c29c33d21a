"""Measure microfloat on this machine and print, beside each figure, the target it is held to.

    python -m benchmarks quantize     casts, dequantize, fused producers: share of a copy          (q.* dq.* sw.* f.*)
    python -m benchmarks matmul       GEMMs of quantized operands against bfloat16                     (m.*)
    python -m benchmarks linear       one Linear, forward and backward, against nn.Linear              (l.*)
    python -m benchmarks grouped      experts over rows of one input, against torch's grouped matmul   (l.grouped.*)
    python -m benchmarks loss         a head and its loss in chunks, against torch's                       (loss.*)
    python -m benchmarks host         host time, launches, recompilations of small layers              (h.* g.*)
    python -m benchmarks block        a transformer block, eager and compiled, time and memory         (b.*)
    python -m benchmarks decoder      decoder layers with attention, also of experts, time and memory    (d.*)
    python -m benchmarks decode       a few rows by weights stored as codes, against bfloat16          (d.*)
                         --cuts       the fastest division of each such product, within --seconds      (d.cuts.*)
    python -m benchmarks train        examples/train_gpt.py, tokens per second                         (t.*)
    python -m benchmarks model        a training step of transformers' Llama: time, memory, kernels (model.*)
    python -m benchmarks peers        model, decoder layer and Linear beside peers, a process each (peers.*)
    python -m benchmarks fsdp         training under FSDP2, a rank for each GPU: time, memory, bytes (fsdp.*)
    python -m benchmarks profile      which kernels one Linear step spends its time in
    python -m benchmarks cpu          casts on a CPU beside torchao                                    (c.*)
    python -m benchmarks convert      a checkpoint of 2 GB converted, with the profile that says what bounds it
    python -m benchmarks qat          held-out loss: trained under a config against quantized afterwards
    python -m benchmarks gptq     errors of layers and perplexity: GPTQ against nearest codes and searched scales
    python -m benchmarks merge FROM INTO       rows of one result file into another

A row is compared with the reference before it is timed; what differs is not timed. Times are medians of CUDA events on
normal-distributed data, with the 10th and 90th percentile; what a ratio compares takes turns in one process. A row
that cannot run here says why. `--only q.fp8 l.delayed` takes ids, or what they begin with before a dot.
"""

import argparse
import importlib
import os
import sys
from pathlib import Path

COMMANDS = {
    "quantize": "benchmarks.quantize", "matmul": "benchmarks.matmul", "linear": "benchmarks.linear",
    "grouped": "benchmarks.grouped", "host": "benchmarks.host", "block": "benchmarks.block",
    "train": "benchmarks.train", "profile": "benchmarks.gpu_profile", "decoder": "benchmarks.decoder",
    "fsdp": "benchmarks.fsdp", "model": "benchmarks.model", "loss": "benchmarks.loss",
    "decode": "benchmarks.decode", "peers": "benchmarks.peers",
}  # fmt: skip
# Commands with options of their own, which need no GPU.
OF_CPU = {
    "cpu": "benchmarks.cpu_quantize",
    "convert": "benchmarks.convert",
    "qat": "benchmarks.qat",
    "gptq": "benchmarks.gptq",
}
DESCRIPTION, DETAILS = __doc__.split("\n\n", 1)  # type: ignore[union-attr]


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; every measuring command has the same options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=DESCRIPTION, epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        command = commands.add_parser(name)
        command.add_argument("--json", metavar="PATH", help="write the rows; rows of an existing file stay")
        command.add_argument("--only", nargs="+", default=[], metavar="ID")
        command.add_argument("--quick", action="store_true", help="tiny sizes, without a GPU too: tries the plumbing")
        command.add_argument("--device", default="", help="cuda or cpu; default: cuda where there is one")
        if name == "quantize":
            command.add_argument("--sweep", action="store_true", help="time tile shapes of the kernels instead")
        if name == "decode":
            command.add_argument("--cuts", action="store_true", help="time the divisions of each product instead")
            command.add_argument("--seconds", type=float, default=600.0, help="no row of --cuts begins later")
            command.add_argument("--compile", action="store_true", help="with --cuts: compile them, without a GPU too")
        if name == "model":
            command.add_argument("--layers", type=int, default=12)
            command.add_argument("--batch", type=int, default=2)
            command.add_argument("--sequence", type=int, default=8192)
            command.add_argument("--profile", action="store_true", help="also a step's time by kind of kernel")
        if name == "profile":
            command.add_argument("--host", action="store_true", help="Python functions of a small step instead")
    for name in OF_CPU:
        commands.add_parser(name, add_help=False)
    merge = commands.add_parser("merge")
    merge.add_argument("source", type=Path)
    merge.add_argument("target", type=Path)
    if arguments[:1] and arguments[0] in OF_CPU:
        return argparse.Namespace(command=arguments[0], rest=arguments[1:])
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.command == "merge":
        from benchmarks._report import merge

        merge(options.source, options.target)
        return 0
    if options.command in OF_CPU:
        return importlib.import_module(OF_CPU[options.command]).main(options.rest)
    import torch

    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cpu":
        if not options.quick and not getattr(options, "compile", False):
            print("no CUDA device: only --quick runs here, on tiny matrices (`python -m benchmarks cpu` times a CPU)")
            return 2
        if options.quick:
            os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported
    return importlib.import_module(COMMANDS[options.command]).main(options, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
