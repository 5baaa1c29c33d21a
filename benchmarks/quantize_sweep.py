"""Times of kernels under other tile shapes: how `TILES` of the triton backend was chosen."""

import argparse

import torch

from benchmarks.quantize_rows import Case
from microfloat.passes import tables
from microfloat.torch.launch import program
from microfloat.torch.timing import copy_gbs, in_turn

# Name in TILES -> ids that run it, and tiles to try: rows, columns, warps, registers of a thread (0: any).
SWEEPS = {
    "cast_once": (  # of 256 rows
        ("q.fp8.delayed", "q.fp8.current"),
        ((256, 128, 8, 96), (256, 128, 8, 128), (256, 128, 16, 64), (256, 64, 4, 128)),
    ),
    "cast_tiles": (("q.fp8.128x128",), ((128, 128, 4, 0), (128, 128, 8, 0), (128, 128, 8, 48), (128, 128, 16, 0))),
    "axes": (("q.fp8.row",), ((128, 128, 4, 0), (128, 128, 8, 0), (64, 128, 4, 0), (128, 64, 4, 0))),
    "blocks": (
        ("q.mxfp8.rowcol",),
        (
            (128, 128, 8, 96), (128, 128, 8, 80), (128, 128, 8, 112), (128, 128, 16, 64), (128, 64, 4, 96),
            (64, 128, 4, 96),
        ),
    ),
    "blocks_long": (("q.fp8.1x128",), ((128, 128, 8, 112), (128, 128, 8, 0), (128, 128, 16, 64), (128, 256, 8, 0))),
    "block_rows": (
        ("q.mxfp8.row", "q.mxfp4.row"),
        ((32, 256, 8, 64), (16, 512, 8, 64), (8, 1024, 8, 64), (32, 256, 4, 64), (128, 128, 4, 0)),
    ),
    "block_values": (("q.mxfp8.qdq",), ((32, 128, 8, 64), (64, 64, 8, 64), (64, 128, 8, 64), (128, 128, 4, 0))),
    "fold": (("q.mxfp8.fold",), ((128, 128, 8, 64), (128, 128, 4, 0), (128, 128, 16, 64))),
    "nvfp4": (
        ("q.nvfp4.train",),
        ((64, 128, 4, 0), (128, 64, 4, 0), (64, 128, 8, 64), (32, 256, 4, 0), (64, 64, 4, 64)),
    ),
    "nvfp4_2d": (("q.nvfp4.2d",), ((128, 128, 4, 0), (64, 64, 1, 0), (256, 64, 4, 0), (64, 128, 2, 0))),
    "nvfp4_rows": (("q.nvfp4.row",), ((32, 256, 4, 0), (16, 512, 4, 0), (64, 128, 4, 0))),
    "nvfp4_values": (("q.nvfp4.qdq",), ((32, 256, 8, 0), (16, 256, 8, 64), (32, 128, 4, 0), (64, 128, 4, 0))),
    "nvfp4_folded": (
        ("q.nvfp4.fold", "q.nvfp4.fold.2d"), ((128, 128, 8, 0), (128, 128, 16, 64), (128, 128, 8, 104)),
    ),
    "nvfp4_amax": (("q.nvfp4.train", "q.nvfp4.qdq"), ((64, 128, 4, 0), (32, 256, 4, 0), (128, 128, 8, 64))),
    "dequantize": (("dq.mxfp8", "dq.nvfp4"), ((64, 128, 4, 0), (32, 128, 4, 0), (32, 256, 4, 0), (16, 256, 4, 0))),
    "fused_scaled": (("f.swiglu.fp8",), ((64, 128, 8, 0), (64, 128, 4, 96), (128, 64, 8, 64), (128, 128, 16, 64))),
    "fused_gradients": (("f.swiglu_bwd.fp8",), ((64, 64, 4, 128), (32, 128, 4, 96), (64, 128, 8, 128))),
    "fused_blocks": (("f.swiglu.mxfp8",), ((128, 128, 8, 0), (128, 128, 8, 80), (128, 64, 4, 80), (64, 128, 8, 64))),
}  # fmt: skip


def sweep(cases: list[Case], options: argparse.Namespace) -> int:
    """Print the share of a copy at every shape of the chosen ids under every tile; what does not compile says so."""
    chosen = {case.id: case for case in cases}
    copy = copy_gbs(1 << 10 if options.quick else 1 << 30, options.device)
    for name, (ids, tiles) in SWEEPS.items():
        usual = tables.TILES[name]
        for case in (chosen[row_id] for row_id in ids if row_id in chosen):
            for shape in ((32, 64),) if options.quick else case.shapes:
                matrices = [torch.randn(shape, device=options.device).bfloat16() for _ in range(3)]
                state = case.state(matrices[0])
                for tile in tiles:
                    rows, columns, warps, registers = tile
                    tables.TILES[name] = (rows, columns, tables.Warps(warps, registers or None))
                    program.forget_programs()
                    calls = {"ours": lambda i, run=case.run, x=matrices, s=state: run(x[i % 3], s)}
                    try:
                        median = in_turn(calls, options.device, 40)["ours"].median
                    except Exception as error:
                        print(f"{case.id:16} {tile!s:16} {type(error).__name__}: {str(error)[:120]}", flush=True)
                        continue
                    ratio = case.bytes_per_element * shape[0] * shape[1] / median / 1e6 / copy
                    print(f"{case.id:16} {shape!s:16} {tile!s:16} {median:8.4f} ms  {ratio:5.3f} of copy", flush=True)
        tables.TILES[name] = usual
    return 0
