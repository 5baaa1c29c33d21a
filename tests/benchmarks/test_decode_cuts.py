"""The sweep over divisions of products of a few rows: its candidates, what it compiles, what it writes."""

import itertools
import json

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import decode_cuts
from benchmarks.decode import SHAPES, WEIGHTS
from microfloat.kernels.constants import DecodeCut
from microfloat.passes import products
from microfloat.passes.matrix import Device
from tests import processes
from tests.benchmarks.test_commands import run

H100 = Device(0, 132, True, warpgroups=True, places=True)


@pytest.mark.parametrize("name", WEIGHTS)
def test_candidates_fit_the_product(name):
    for (n, k), m in itertools.product(SHAPES, decode_cuts.TOKENS):
        stored = decode_cuts.stored_like(name, (n, k))
        cuts = decode_cuts.candidates(stored, (m, k, n), H100, dependent=True)
        if (m > 64 and name == "block") or m > 128:
            assert cuts == []
            continue
        assert cuts[0] == products.cut_of(stored.codes, (m, k, n), stored.strides, False, H100)
        assert len(cuts) == len(set(cuts)) > (10 if m <= 64 else 2)
        assert all(m <= 8 * cut.TOKENS or cut.SPLITS for cut in cuts)
        assert m <= 64 or len(cuts) <= 45
        assert all(cut == products.fitted(cut, stored.codes, k, stored.strides, False) for cut in cuts)
        assert any(cut.SPLITS for cut in cuts) is (m > 8 and name != "block")
        assert any(cut.DEPENDENT for cut in cuts)
        older = decode_cuts.candidates(stored, (m, k, n), H100, dependent=False)
        assert older == [cut for cut in cuts if not cut.DEPENDENT]


def test_divisions_are_the_fastest_that_were_measured(repository):
    """To 1 %, which a measurement differs from the next. Those with codes through shared memory have a table of their
    own, which was measured beside what the other one says."""
    results, found = repository / "benchmarks" / "results", {}
    for file in ("decode_few_cuts.json", "decode_shared_cuts.json"):
        found[file] = chosen = {}
        for row in json.loads((results / file).read_text())["rows"]:
            (m, k, n), name = row["shape"], row["id"].split(".")[2]
            stored = decode_cuts.stored_like(name, (n, k))
            cut = products.cut_of(stored.codes, (m, k, n), stored.strides, False, H100)
            # Parts of K were those of a kernel that is gone, as is the last field.
            measured = {DecodeCut(*one[:13]): ms for one, ms in row["extra"]["first_ms"] if not one[12]}
            ratio = measured.get(cut, float("inf")) / min(measured.values())
            chosen[name, m, n] = cut.STAGES == 0, ratio
    first, second = found.values()
    assert len(first) > 60
    assert all(ratio <= 1.01 for _, ratio in second.values()), second
    assert all(ratio <= 1.01 for is_shared, ratio in first.values() if not is_shared), first
    assert sum(is_shared for is_shared, _ in second.values()) == 13
    assert {key for key, (is_shared, _) in first.items() if is_shared and key[1] in (1, 8, 16)} <= second.keys()


def test_warpgroups_multiply_where_they_were_faster(repository):
    """By more than the hundredth that a measurement differs from the next, and by the fastest division of theirs, or
    one that is within a fiftieth of it."""
    document = json.loads((repository / "benchmarks" / "results" / "decode_warpgroup_cuts.json").read_text())
    compared = 0
    for row in document["rows"]:
        (m, k, n), name = row["shape"], row["id"].split(".")[2]
        stored = decode_cuts.stored_like(name, (n, k))
        cut = products.cut_of(stored.codes, (m, k, n), stored.strides, False, H100)
        own = {
            (one["ROW_WARPS"], one["SPLITS"]): one["ms"] for one in row["first"] if one["kernel"] == "decode_warpgroups"
        }
        before = [one["ms"] for one in row["first"] if one["kernel"] == "decode_gemm"]
        compared += len(before)
        if not before and m <= 64:  # the other was a kernel that is gone
            continue
        wins = not before or min(own.values()) < 0.99 * min(before)
        assert cut.WARPGROUPS is wins, (m, k, n)
        assert not wins or own[cut.ROW_WARPS, cut.SPLITS] <= 1.02 * min(own.values())
    assert compared >= 14


def test_warpgroups_take_bfloat16_and_whole_chunks():
    stored = decode_cuts.stored_like("nvfp4", (28672, 8192))
    codes, strides = stored.codes, stored.strides

    def is_taken(codes=codes, m=64, k=8192, n=28672, strides=strides, device=H100, **halves):
        cut = products.cut_of(codes, (m, k, n), strides, False, device, **halves)
        return cut and cut.WARPGROUPS

    assert is_taken()
    assert is_taken(k=8192 + 256)
    assert not is_taken(k=8192 + 128)
    assert not is_taken(halves=True)
    assert not is_taken(m=32)
    assert is_taken(m=128)
    assert not is_taken(m=129)
    assert is_taken(n=8192)
    assert not is_taken(strides=(strides[0], 2))
    mxfp4 = decode_cuts.stored_like("mxfp4", (28672, 8192)).codes
    assert is_taken(codes=mxfp4)
    assert [is_taken(codes=mxfp4, m=32, n=n) for n in (4096, 8192, 28672)] == [False, True, True]
    assert not is_taken(codes=mxfp4, m=16)
    mxfp8, fp8 = (decode_cuts.stored_like(name, (28672, 8192)) for name in ("mxfp8", "row"))
    for other in (mxfp8, fp8):
        assert [is_taken(codes=other.codes, strides=other.strides, m=m) for m in (64, 65, 128)] == [False, True, True]
    assert not is_taken(codes=decode_cuts.stored_like("block", (28672, 8192)).codes, m=128)
    eight = products.fitted(products.by_warpgroups(8, 8), mxfp8.codes, 8192, mxfp8.strides, False)
    assert (eight.STAGES, eight.WARPGROUPS) == (0, True)
    torn = products.fitted(eight, mxfp8.codes, 8192 + 32, mxfp8.strides, False)
    assert (torn.STAGES, torn.WARPGROUPS, torn.SPLITS) == (1, False, 0)
    alone = products.fitted(eight._replace(WARPGROUPS=False), mxfp8.codes, 8192, mxfp8.strides, False)
    assert alone.STAGES == 1  # `gemm.decode` takes codes of four bits alone through shared memory
    assert not is_taken(device=H100._replace(places=False))
    assert not is_taken(device=H100._replace(warpgroups=False))


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [8, 64, 128, 256, 1024])
def test_experts_are_multiplied_in_one_launch_that_does_not_begin_early(name, rows):
    """Also where groups of x have as many rows as warpgroups multiply of one weight."""
    stored = decode_cuts.stored_like(name, (1024, 2048))
    passes = products.decode_passes(
        stored.codes,
        (rows, 2048, 1024),
        ("bfloat16", "bfloat16", None),
        stored.strides,
        stored.level_stride,
        H100,
        products.DecodedExperts(8, stored.strides[0] * 1024, 1),
    )
    *_, last = passes.launches
    assert last.kernel.__name__ == "decode_gemm"
    assert not any(launch.dependent for launch in passes.launches)


def test_parts_of_k_fill_the_chip():
    """Programs of 128 rows, in as few rounds for a whole of K as at most two on each of 132 multiprocessors make."""
    for n, k, splits in (
        (4096, 14336, 4), (8192, 8192, 2), (28672, 8192, 1), (11008, 4096, 3), (1024, 8192, 8), (1024, 256, 1),
        (1024, 3072, 3), (60000, 8192, 1),
    ):  # fmt: skip
        stored = decode_cuts.stored_like("nvfp4", (n, k))
        cut = products.cut_of(stored.codes, (64, k, n), stored.strides, False, H100)
        assert (True, splits) == (cut.WARPGROUPS, cut.SPLITS), (n, k)
        _, launch, *sums = stored.passes((64, k, n), H100, cut).launches
        assert [one.kernel.__name__ for one in sums] == ["sum_parts"] * (splits > 1)
        each = -(-launch.programs // 132)
        assert launch.programs == -(-n // 128) * splits
        assert launch.spread == (each if each <= 2 else 0)
        assert launch.shared_bytes == 128 + 4 * 128 * 64 * 2  # four times half a chunk of x, and to a multiple of 128


def test_codes_come_through_shared_memory_where_it_takes_them():
    """Whole chunks of every warp along K, scales of whole words without gaps, four bits, and a Hopper."""
    stored = decode_cuts.stored_like("nvfp4", (8192, 8192))
    codes, strides = stored.codes, stored.strides

    def is_shared(codes=codes, k=8192, strides=strides, device=H100):
        return products.cut_of(codes, (1, k, 8192), strides, False, device).STAGES == 0

    assert is_shared()
    assert not is_shared(k=8192 + 256)
    assert not is_shared(strides=(strides[0], 2))
    assert not is_shared(strides=(strides[0] + 1, 1))
    assert not is_shared(device=H100._replace(warpgroups=False))
    assert not is_shared(codes._replace(BITS=8))
    assert not is_shared(codes._replace(WIDTH=32))


@pytest.mark.parametrize("name", WEIGHTS)
def test_no_kernel_takes_more_rows_than_warpgroups(name):
    """More than 128 rows of x, and more than 64 of what warpgroups do not multiply, go to the vendor."""
    stored = decode_cuts.stored_like(name, (8192, 8192))
    for m, device in ((129, H100), (65, H100._replace(warpgroups=False)), (65, H100._replace(places=False))):
        assert products.cut_of(stored.codes, (m, 8192, 8192), stored.strides, False, device) is None
        assert decode_cuts.candidates(stored, (m, 8192, 8192), device, dependent=True) == []
        about = stored.codes, (m, 8192, 8192), ("bfloat16", "bfloat16", None), stored.strides, stored.level_stride
        assert products.decode_passes(*about, device) is None
    assert (products.cut_of(stored.codes, (128, 8192, 8192), stored.strides, False, H100) is None) is (name == "block")


def _compile_some():
    """Reasons of candidates that compile and of one that cannot."""
    stored = decode_cuts.stored_like("nvfp4", (256, 1024))
    usual = products.cut_of(stored.codes, (16, 1024, 256), stored.strides, False, H100)
    groups = products.fitted(products.by_warpgroups(8, 2), stored.codes, 1024, stored.strides, False)
    cuts = groups, usual._replace(DEPENDENT=True), usual._replace(ROW_WARPS=3)
    jobs = [decode_cuts.Job(stored, (16, 1024, 256), cut, (9, 0)) for cut in cuts]
    return [decode_cuts.compile_one(job) for job in jobs]


@pytest.mark.slow("compiles")
def test_what_compiles_and_what_does_not():
    groups, early, bad = processes.other_process()(_compile_some)
    assert groups == early == ""
    assert "Error" in bad


@pytest.mark.slow("a benchmark command in Triton's interpreter")
def test_a_quick_sweep_writes_its_rows(repository, tmp_path):
    document, text = run(repository, tmp_path, "decode", "--cuts", "--only", "d.cuts.nvfp4")
    (row,) = document["rows"]
    assert row["id"] == "d.cuts.nvfp4.m20"
    assert row["ratio_of"] == "bf16"
    assert {"cut", "usual_cut", "usual_ms", "first_ms"} <= row["extra"].keys()
    assert len(row["extra"]["first_ms"]) == 2
    assert not row["extra"].get("failed")
    assert "2 cuts ran, 0 did not" in text


@pytest.mark.slow("most benchmark commands")
def test_no_row_begins_when_the_time_is_over(repository, tmp_path):
    document, text = run(repository, tmp_path, "decode", "--cuts", "--only", "d.cuts.nvfp4", "--seconds", "0")
    assert document["rows"] == []
    assert "no row begins any more" in text
