"""`quantize` of a DTensor: the bytes of one process, on the rank that has them."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.formats import FORMATS  # noqa: E402
from microfloat.recipes import Cast, Hadamard  # noqa: E402
from tests.torch.distributed.ranks import of, run_ranks  # noqa: E402

WORLD = 2
CASTS = [*map(Cast, FORMATS.values()), Cast("fp8_row", "amax"), Cast("nvfp4", "four_over_six"), Cast("mxfp4", "floor")]


def values(*shape: int) -> torch.Tensor:
    """The largest element is the last one, so that each rank by itself would have another scale."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    made.view(-1)[-1] = 9.0
    return made


def pieces(rank: int) -> list[str]:
    """The casts, placements and shapes of which a rank has not its part of the whole."""
    mesh, wrong = init_device_mesh("cpu", (WORLD,)), []
    for cast in CASTS:
        for dim in (0, 1, None):
            # Along the contraction axis, rows have no part of their scale; tiles of 128 are cut at 128.
            if dim == 1 and cast.format.block == (1, None):
                continue
            x = values(256, 512)
            placement = Replicate() if dim is None else Shard(dim)
            q = mf.quantize(distribute_tensor(x, mesh, [placement]).requires_grad_(), cast)
            whole = mf.quantize(x, cast)
            part = whole if dim is None else whole.narrow(dim, rank * x.shape[dim] // 2, x.shape[dim] // 2)
            own = q.to_local()
            same = isinstance(q, DTensor) and q.shape == x.shape and q.placements == (placement,)
            same &= isinstance(own, mf.QuantizedTensor) and torch.equal(own.dequantize(), part.dequantize())
            same &= all(torch.equal(one, other) for one, other in zip(raw(own), raw(part), strict=True))
            wrong += [] if same else [f"{cast.format.name} {cast.scale_rule} {placement}"]
    return wrong


def raw(q: mf.QuantizedTensor) -> list[torch.Tensor]:
    return [part.contiguous().view(torch.uint8) if part.dim() else part for part in q.part_list()]


def further(rank: int) -> list[str]:
    """Uneven and empty parts, the other axis, three dimensions, a given amax, and bf16."""
    mesh, wrong = init_device_mesh("cpu", (WORLD,)), []
    for name, shape, dim, axis, options in (
        ("uneven", (37, 64), 0, -1, {}), ("empty", (1, 64), 0, -1, {}), ("axis -2", (64, 48), 1, -2, {}),
        ("axis -2 cut along it", (64, 48), 0, -2, {}), ("experts", (4, 6, 32), 1, -1, {}),
        ("amax", (32, 64), 0, -1, {"amax": 20.0}), ("vector", (128,), 0, -1, {}),
    ):  # fmt: skip
        x = values(*shape).bfloat16()
        for fmt in ("nvfp4", "fp8_tensor", "mxfp8"):
            given = {} if fmt == "mxfp8" else options
            q = mf.quantize(distribute_tensor(x, mesh, [Shard(dim)]), fmt, axis=axis, **given)
            whole = mf.quantize(x, fmt, axis=axis, **given).dequantize()
            parts = whole.chunk(WORLD, dim)
            part = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
            own = q.to_local()
            if not (torch.equal(own.dequantize(), part) and own.dtype == torch.bfloat16 and q.shape == x.shape):
                wrong.append(f"{name} {fmt}")
    return wrong


def refused(rank: int) -> dict[str, str]:
    mesh, x = init_device_mesh("cpu", (WORLD,)), values(32, 64)
    rows, columns = distribute_tensor(x, mesh, [Shard(0)]), distribute_tensor(x[:, :48], mesh, [Shard(1)])
    said = {}
    for name, call in {
        "block": lambda: mf.quantize(columns, "mxfp8"), "tile": lambda: mf.quantize(rows, "fp8_128x128"),
        "row": lambda: mf.quantize(columns, "fp8_row"),
        "sum": lambda: mf.quantize(DTensor.from_local(x, mesh, [Partial()]), "mxfp8"),
        "noise": lambda: mf.quantize(rows, Cast("nvfp4", rounding="stochastic"), seed=1),
        "transform": lambda: mf.quantize(rows, Cast("nvfp4", hadamard=Hadamard())),
        "pair": lambda: mf.quantize(rows, "mxfp8", axis=(-1, -2)),
    }.items():  # fmt: skip
        try:
            call()
        except (InvalidValueError, NotSupportedError) as error:
            said[name] = str(error)
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks([pieces, further, refused], str(tmp_path_factory.mktemp("ranks") / "store"), WORLD, seconds=30)


def test_each_rank_has_its_part_of_the_whole(ranks) -> None:
    assert of(ranks, pieces) == [[], []]


def test_uneven_parts_other_axes_and_given_amaxes(ranks) -> None:
    assert of(ranks, further) == [[], []]


def test_what_a_part_cannot_know_is_named(ranks) -> None:
    for said in of(ranks, refused):
        assert (
            "in parts of 24 along dimension 1, needed parts of whole blocks of mxfp8, multiples of 32" in said["block"]
        )
        assert "multiples of 128" in said["tile"]
        assert "whole scopes of scales on one rank" in said["row"]
        assert "x.redistribute(placements=...)" in said["sum"]
        assert "stochastic rounding, whose noise counts" in said["noise"]
        assert "a Hadamard transform before an amax" in said["transform"]
        assert "got a pair of axes for a DTensor" in said["pair"]
