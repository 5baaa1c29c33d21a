"""Target, stretch and physical limit of each row, by id (all measured or derived for an NVIDIA H200).

`of`: what the ratio is taken of. `at_most`: smaller is better (counts, memory, host time). A figure beyond the limit is
a fault of the measurement, or of what the limit was derived from, and is shown as such.
"""

from dataclasses import dataclass

__all__ = ["TARGETS", "Target", "target_of"]


@dataclass(frozen=True)
class Target:
    """One line of the list of targets."""

    of: str
    target: float
    stretch: float | None = None
    limit: float | None = None
    at_most: bool = False
    peer: str = ""
    in_ms: bool = False  # the median in milliseconds is judged, not a ratio


def _copy(target: float, stretch: float, peer: str = "") -> Target:
    return Target("copy", target, stretch, 1.0, peer=peer)


def _bf16(target: float, stretch: float, limit: float | None, peer: str = "") -> Target:
    return Target("bf16", target, stretch, limit, peer=peer)


TARGETS: dict[str, Target] = {
    # Casts: share of a device copy, by bytes that must move.
    # Reading alone comes faster than a copy: memory's 4.8 TB/s over those of a copy.
    "q.amax": Target("copy", 0.90, 0.98, 1.12, peer="eager torch 0.30"),
    "q.fp8.delayed": _copy(0.88, 0.94, "TransformerEngine 0.86"),
    "q.fp8.current": _copy(0.90, 0.94, "TransformerEngine 0.88"),
    "q.fp8.row": _copy(0.75, 0.88),
    "q.fp8.1x128": _copy(0.85, 0.94, "TransformerEngine 0.66"),
    "q.fp8.128x128": _copy(0.91, 0.94),
    "q.fp8.128x128.large": _copy(0.91, 0.94, "TransformerEngine 0.90 at 16384 x 8192"),
    "q.mxfp8.row": _copy(0.85, 0.92, "torchao compiled 0.71, eager 0.035"),
    "q.mxfp8.rowcol": _copy(0.85, 0.92),
    "q.mxfp8.qdq": _copy(0.85, 0.92),
    "q.mxfp8.fold": _copy(0.80, 0.90),
    "q.mxfp4.row": _copy(0.70, 0.85, "torchao compiled 0.29"),
    "q.nvfp4.row": _copy(0.70, 0.85, "torchao compiled 0.16 (one level)"),
    "q.nvfp4.train": _copy(0.60, 0.75),
    "q.nvfp4.2d": _copy(0.60, 0.80),
    "q.nvfp4.qdq": _copy(0.60, 0.80),
    "q.nvfp4.fold": _copy(0.60, 0.80),
    "q.nvfp4.fold.2d": _copy(0.60, 0.80),
    "dq.mxfp8": _copy(0.85, 0.95),
    "dq.nvfp4": _copy(0.85, 0.95),
    "sw.scales": _copy(0.50, 0.80),
    # Fused producers: share of a copy, and the time of the same work unfused over ours.
    "f.rmsnorm.fp8": _copy(0.80, 0.90),
    "f.rmsnorm.mxfp8": _copy(0.75, 0.88),
    "f.swiglu.fp8": _copy(0.80, 0.90),
    "f.swiglu.mxfp8": _copy(0.75, 0.88),
    "f.swiglu_bwd.fp8": _copy(0.75, 0.88),
    "f.rmsnorm.fp8.unfused": Target("unfused", 1.6),
    "f.rmsnorm.mxfp8.unfused": Target("unfused", 1.5),
    "f.swiglu.fp8.unfused": Target("unfused", 1.4),
    "f.swiglu.mxfp8.unfused": Target("unfused", 1.3),
    "f.swiglu_bwd.fp8.unfused": Target("unfused", 1.3),
    # One Linear, forward and backward; limits with the vendor's GEMMs.
    # A decoder layer and three of them in a model with head and AdamW: milliseconds.
    # A few rows by weights stored as codes, inside CUDA graphs.
    **{
        f"d.{name}.m{m}": _bf16(*((2.6, 3.0) if m <= 16 else (1.3, 2.3)), 3.56, "int4 kernels on other cards 2.2")
        for name in ("nvfp4", "mxfp4")
        for m in (1, 4, 16, 32)
    },
    **{f"d.{name}.m64": Target("bf16", 0.95) for name in ("nvfp4", "mxfp4")},
    **{f"d.{name}.m{m}": _bf16(1.7, 1.8, 1.94) for name in ("mxfp8", "row", "block") for m in (1, 4, 16)},
    **{f"d.kept.{name}.m{m}": Target("bf16", 0.95) for name in ("nvfp4", "row") for m in (65, 128, 256, 4096)},
    **{f"d.prompt.{name}": Target("bf16", least) for name, least in (("row", 1.6), ("mxfp8", 1.5), ("nvfp4", 1.4))},
    "d.layer.delayed": Target("", 23.2, at_most=True, in_ms=True, peer="TransformerEngine 24.4"),
    "d.layer.current": Target("", 23.6, at_most=True, in_ms=True, peer="TransformerEngine 24.7"),
    "d.layer.block": Target("", 26.5, at_most=True, in_ms=True, peer="TransformerEngine 29.6"),
    "d.layer.nvfp4.folded": Target("bf16", 1.55),
    "d.llama.eager.delayed": Target("", 112.0, at_most=True, in_ms=True, peer="TransformerEngine's Linear 143"),
    "d.llama.eager.current": Target("", 112.0, at_most=True, in_ms=True, peer="TransformerEngine's Linear 143"),
    # A training step of twelve layers of an 8B and its head, batch 2.
    **{
        f"model.{name}": Target("", ms, at_most=True, in_ms=True, peer="torchao compiled 532")
        for name, ms in (("delayed", 475.0), ("current", 485.0), ("row", 505.0), ("block", 510.0),
                         ("mxfp8.folded", 510.0), ("nvfp4.folded", 560.0), ("delayed.head", 450.0),
                         ("current.head", 460.0))
    },
    # Whole decoder layers of transformers' mixtures of experts.
    **{f"d.mixtral.{name}": Target("bf16", 1.4) for name in ("delayed", "current", "block", "mxfp8.folded")},
    **{f"d.deepseek.{name}": Target("bf16", 1.2) for name in ("delayed", "current", "block", "mxfp8.folded")},
    "l.delayed": _bf16(1.70, 1.75, 1.72, "TransformerEngine 1.70"),
    "l.current": _bf16(1.63, 1.68, 1.66, "TransformerEngine 1.62"),
    "l.row": _bf16(1.40, 1.52, 1.62),
    "l.block": _bf16(1.40, 1.55, 1.42, "TransformerEngine 1.37"),
    "l.square.delayed": _bf16(1.82, 1.88, None, "TransformerEngine 1.82"),
    "l.square.current": _bf16(1.77, 1.83, None, "TransformerEngine 1.76"),
    "l.square.block": _bf16(1.52, 1.70, None, "TransformerEngine 1.49"),
    "l.mxfp8.folded": _bf16(1.30, 1.50, 1.42),
    "l.mxfp8.exact": _bf16(0.90, 0.93, 0.94),
    "l.mxfp4.folded": _bf16(1.20, 1.40, 1.42),
    "l.nvfp4": _bf16(0.80, 0.90, 0.93),
    "l.nvfp4.folded": _bf16(1.50, 1.60, 1.65),
    "l.square.nvfp4.folded": _bf16(1.55, 1.65, None),
    "l.fwd.fp8": _bf16(1.55, 1.65, 1.73),
    "l.small.eager": _bf16(0.40, 0.6, 1.27, "TransformerEngine 0.12"),
    "l.small.graph": _bf16(1.00, 1.15, 1.27),
    "l.grouped.delayed": _bf16(1.55, 1.60, None, "TransformerEngine 1.31"),
    "l.grouped.current": _bf16(1.50, 1.55, None, "TransformerEngine 1.24"),
    "l.grouped.row": _bf16(1.45, 1.50, None),
    "l.grouped.block": _bf16(1.45, 1.50, 1.6, "TransformerEngine 1.12"),
    "l.grouped.mxfp8.folded": _bf16(1.50, 1.55, 1.6),
    "l.grouped.nvfp4.folded": _bf16(1.25, 1.35, None),
    "l.grouped.wide.nvfp4.folded": _bf16(1.30, 1.40, None),
    "l.grouped.64.delayed": _bf16(1.30, 1.40, None, "TransformerEngine 0.68"),
    "l.grouped.64.current": _bf16(1.25, 1.35, None, "TransformerEngine 0.51"),
    "l.grouped.64.row": _bf16(1.20, 1.30, None),
    "l.grouped.64.block": _bf16(1.25, 1.35, None, "TransformerEngine 0.58"),
    "l.grouped.64.mxfp8.folded": _bf16(1.25, 1.35, None),
    "l.grouped.wide.delayed": _bf16(1.65, 1.70, None, "TransformerEngine 1.54"),
    "l.grouped.wide.current": _bf16(1.60, 1.65, None, "TransformerEngine 1.50"),
    "l.grouped.wide.row": _bf16(1.50, 1.55, None),
    "l.grouped.wide.block": _bf16(1.55, 1.60, None, "TransformerEngine 1.27"),
    "l.grouped.wide.mxfp8.folded": _bf16(1.60, 1.65, None),
    **{f"loss.{name}": Target("torch", 1.50) for name in ("current", "row", "block", "mxfp8.folded")},
    # The block.
    "b.eager": _bf16(1.57, 1.63, 1.62, "TransformerEngine 1.57, torchao 0.58"),
    "b.eager.fused": _bf16(1.67, 1.77, 1.77, "TransformerEngine 1.67"),
    "b.compile": _bf16(1.60, 1.66, 1.63, "torchao 1.50"),
    "b.delayed": _bf16(1.65, 1.72, 1.72),
    "b.row": _bf16(1.30, 1.45, 1.5, "torchao 1.16"),
    "b.mxfp8.folded": _bf16(1.30, 1.42, 1.5),
    "b.nvfp4.folded": _bf16(1.38, 1.48, None),
    "b.nvfp4": _bf16(0.80, 0.88, 0.93),
    "b.mem.eager": Target("bf16", 1.00, 0.92, 0.91, True, "TransformerEngine 1.22 / 1.42, torchao 1.36"),
    "b.mem.compile": Target("bf16", 1.05, 1.00, None, True, "torchao 1.07"),
    # Four blocks on two ranks. Under FSDP2 plain modules had 1.55, 1.56 and 1.35 on two H200s.
    "fsdp.current.low": _bf16(1.62, 1.70, 1.77),
    "fsdp.delayed.low": _bf16(1.62, 1.70, 1.77),
    "fsdp.mxfp8.folded.low": _bf16(1.50, 1.55, 1.6),
    **dict.fromkeys(
        ("fsdp.current.fused", "fsdp.delayed.fused", "fsdp.current.fused.low", "fsdp.delayed.fused.low"),
        _bf16(1.70, 1.77, 1.77),
    ),
    **dict.fromkeys(("tp.current", "tp.delayed", "tp.mxfp8"), _bf16(1.40, 1.50, 1.77)),
    # Host.
    "h.fwd": Target("nn.Linear", 4.0, 2.5, 1.0, True),
    "h.fwdbwd": Target("nn.Linear", 2.5, 1.8, 1.0, True, "TransformerEngine 5.0 to 5.6"),
    "h.region": Target("nn.Linear", 2.6, 2.0, 1.0, True, "TransformerEngine 4.6 to 5.8"),
    "h.launches.delayed.forward": Target("", 3, 2, 1, True),
    "h.launches.delayed.cached": Target("", 2, 1, 1, True),
    "h.launches.delayed.backward": Target("", 3, 2, 2, True),
    "h.launches.current.forward": Target("", 5, 4, 1, True),
    "h.launches.current.cached": Target("", 3, 2, 1, True),
    "h.launches.current.backward": Target("", 4, 3, 2, True),
    "h.autocast": Target("", 10, 4, None, True),
    "g.compile": Target("", 0, 0, 0, True),
}  # fmt: skip


def target_of(label: str) -> Target | None:
    """The line for a row's label (id and qualifiers), or None where it has none."""
    return TARGETS.get(label)
