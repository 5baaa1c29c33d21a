"""Routes of products whose operands are cut over ranks."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed as dist  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.chips import chip_named  # noqa: E402
from microfloat.errors import InvalidValueError  # noqa: E402
from microfloat.recipes import MXFP8BlockScaling  # noqa: E402
from microfloat.routes import routes_of  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch.distributed.tp_shards import Axis, Rows, Shards, routes_of_shards  # noqa: E402

CHIP = chip_named("h200")


def routed(path: str, case: str, part: int, ranks: int = 2):
    """The routes of one process, and those of a rank that has `part` elements along the axis of the case."""
    recipe, rows = MXFP8BlockScaling(path=path), None
    if case == "M":
        rows = Rows(1, part * ranks, part, part)
    shards = Shards(Axis(case, "a group", ranks, 0), rows, (0, 0, 0))
    one_process = routes_of(recipe, CHIP)
    sizes = {"N": 256, "K": 256} | {case: part * ranks}
    return one_process, routes_of_shards(recipe, one_process, CHIP, shards, sizes)


@pytest.mark.parametrize(
    ("case", "torn"),
    [("N", ("fprop", "dgrad")), ("K", ("fprop", "dgrad", "wgrad")), ("M", ("wgrad",))],
)
def test_ranks_fold_only_what_one_of_them_has_all_of(case: str, torn: tuple[str, ...]) -> None:
    """A rank folded its 96 rows, of which one process folds 128 with some of the next rank."""
    one_process, whole = routed("auto", case, 128)
    assert whole == one_process
    assert one_process.fprop.forms == ("folded", "tiles")
    _, cut = routed("auto", case, 96)
    for gemm in ("fprop", "dgrad", "wgrad"):
        route = getattr(cut, gemm)
        if gemm in torn:
            assert route.forms == ("values", "values")
            assert "parts of 96 of" in route.reason
        else:
            assert route == getattr(one_process, gemm)


def test_a_single_rank_cuts_nothing() -> None:
    one_process, whole = routed("folded", "N", 96, ranks=1)
    assert whole == one_process


def test_rows_of_every_run_are_whole_folds() -> None:
    """Two runs of 192 rows, the last rank with 64 of each: chunks are whole folds, but a run ends inside of one."""
    recipe = MXFP8BlockScaling()
    one_process, sizes = routes_of(recipe, CHIP), {"N": 256, "K": 256}
    for whole, is_torn in ((192, True), (256, False)):
        shards = Shards(Axis("M", "a group", 2, 0), Rows(2, whole, 128, 128), (0, 0, 0))
        made = routes_of_shards(recipe, one_process, CHIP, shards, sizes)
        assert (made.wgrad != one_process.wgrad) is is_torn


def test_dgrad_of_a_served_weight_reads_what_fprop_has_read() -> None:
    recipe = mf.WeightActivation("mxfp8")
    one_process = routes_of(recipe, CHIP)
    assert one_process.dgrad.rhs == one_process.fprop.rhs == "tiles"
    shards = Shards(Axis("N", "a group", 2, 0), None, (0, 0, 0))
    cut = routes_of_shards(recipe, one_process, CHIP, shards, {"N": 192, "K": 256})
    assert cut.dgrad.rhs == cut.fprop.rhs == "values"
    assert cut.dgrad.kind == one_process.dgrad.kind


def test_what_is_gathered_after_its_cast_is_not_cut() -> None:
    """`why_not_gathered` looks at that: 96 rows of x of each rank, of which the wgrad operand is gathered as codes."""
    recipe, rows = MXFP8BlockScaling(), Rows(1, 192, 96, 96)
    shards = Shards(Axis("G", "a group", 2, 0), rows, (0, 0, 0))
    one_process = routes_of(recipe, CHIP)
    assert routes_of_shards(recipe, one_process, CHIP, shards, {"N": 256, "K": 256}) == one_process


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("N", r"w, sharded along N \(out_features\): got 192 over 2 ranks, in parts of 96, and path='folded', needed "
              r"parts that are multiples of 128"),
        ("K", r"x, sharded along K \(in_features\): got 192 over 2 ranks"),
        ("M", r"dy, sharded along M \(the rows of x\): got 192 over 2 ranks"),
    ],
)  # fmt: skip
def test_a_recipe_that_asks_for_folding_is_refused(case: str, says: str) -> None:
    with pytest.raises(InvalidValueError, match=says):
        routed("folded", case, 96)
    assert routed("folded", case, 256)[0] == routed("folded", case, 256)[1]


@pytest.fixture
def mesh():
    """Two ranks, of which this process is the first and the other does not exist: nothing may be sent."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("part", "kind"), [(96, "values"), (128, "blocks")])
def test_layers_fold_as_their_parts_allow(mesh, part: int, kind: str) -> None:
    """features D4"""
    x = torch.zeros(128, 128, dtype=torch.bfloat16)
    trained = mf.Linear(128, part, bias=False, dtype=torch.bfloat16, recipe="mxfp8")
    whole = DTensor.from_local(trained.weight.detach(), mesh, [Shard(0)], run_check=False)
    trained.weight = torch.nn.Parameter(whole)
    with backends.pretend(chip="h200", interpreted=False):
        x_whole = DTensor.from_local(x, mesh, run_check=False)
        assert trained.schedule(x_whole).routes.fprop.kind == kind
