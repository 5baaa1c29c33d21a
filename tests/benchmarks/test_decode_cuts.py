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

H100 = Device(0, 132, True, is_hopper=True)


@pytest.mark.slow_cases("further formats of a checked kind", all_but=("nvfp4", "row"))
@pytest.mark.parametrize("name", WEIGHTS)
def test_candidates_fit_the_product(name):
    for (n, k), m in itertools.product(SHAPES, decode_cuts.TOKENS):
        stored = decode_cuts.stored_like(name, (n, k))
        cuts = decode_cuts.candidates(stored, (m, k, n), H100, dependent=True)
        assert cuts[0] == products.cut_of(stored.codes, (m, k, n), stored.strides, False, H100)
        assert len(cuts) == len(set(cuts)) > 10
        assert all(m <= 8 * cut.TOKENS for cut in cuts)
        assert all(cut == products.fitted(cut, stored.codes, k, stored.strides, False) for cut in cuts)
        assert any(cut.DEPENDENT for cut in cuts)
        older = decode_cuts.candidates(stored, (m, k, n), H100, dependent=False)
        assert older == [cut for cut in cuts if not cut.DEPENDENT]


def test_divisions_are_the_fastest_that_were_measured(repository):
    """To 1 %, which a measurement differs from the next. Those with codes through shared memory have a table of their
    own, which was measured beside what the other one says."""
    results, found = repository / "benchmarks" / "results", {}
    for file in ("decode_few_cuts.json", "decode_shared_cuts.json", "decode_few_cuts_h200.json"):
        found[file] = chosen = {}
        for row in json.loads((results / file).read_text())["rows"]:
            (m, k, n), name = row["shape"], row["id"].split(".")[2]
            stored = decode_cuts.stored_like(name, (n, k))
            cut = products.cut_of(stored.codes, (m, k, n), stored.strides, False, H100)
            # Parts of K were those of kernels that are gone, as are the last fields.
            measured = {DecodeCut(*one[:12]): ms for one, ms in row["extra"]["first_ms"] if not one[12]}
            ratio = measured.get(cut, float("inf")) / min(measured.values())
            chosen[name, m, n] = cut.STAGES == 0, ratio
    first, second, of_h200 = found.values()
    assert len(first) > 60
    assert all(ratio <= 1.01 for _, ratio in second.values()), second
    assert all(ratio <= 1.01 for is_shared, ratio in first.values() if not is_shared), first
    assert sum(is_shared for is_shared, _ in second.values()) == 13
    assert {key for key, (is_shared, _) in first.items() if is_shared and key[1] in (1, 8, 16)} <= second.keys()
    many = {key: ratio for key, (_, ratio) in of_h200.items() if key[0] == "mxfp4" and key[1] > 16}
    assert len(many) == 6
    assert all(ratio <= 1.01 for ratio in many.values()), many


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("rows", [8, 64, 128, 256, 1024])
def test_experts_are_multiplied_in_one_launch_that_does_not_begin_early(name, rows):
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
    assert not is_shared(device=H100._replace(is_hopper=False))
    assert not is_shared(codes._replace(BITS=8))
    assert not is_shared(codes._replace(WIDTH=32))


def _compile_some():
    """Reasons of candidates that compile and of one that cannot."""
    stored = decode_cuts.stored_like("nvfp4", (256, 1024))
    usual = products.cut_of(stored.codes, (16, 1024, 256), stored.strides, False, H100)
    cuts = usual._replace(DEPENDENT=True), usual._replace(ROW_WARPS=3)
    jobs = [decode_cuts.Job(stored, (16, 1024, 256), cut, (9, 0)) for cut in cuts]
    return [decode_cuts.compile_one(job) for job in jobs]


@pytest.mark.slow("compiles")
def test_what_compiles_and_what_does_not():
    early, bad = processes.other_process()(_compile_some)
    assert early == ""
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
