"""`python -m benchmarks COMMAND --quick` runs without a GPU, compares with the reference, and writes its rows."""

import contextlib
import importlib
import io
import json
import os
import runpy
import sys
from unittest import mock

import pytest

from tests import processes
from tests.interpreter import begin, interpreting

pytest.importorskip("torch", reason="torch is not installed")

RESULT = {"id", "mode", "backend", "dtype", "device", "driver", "versions", "date", "command"}


def begin_without_gpus():
    """First thing in the process of quick commands: Triton's interpreter as the tests of kernels have it, no GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    begin()


def _command(arguments):
    """``python -m benchmarks ARGUMENTS`` in this process: exit status, and what it printed."""
    printed, status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), mock.patch.object(sys, "argv", ["benchmarks", *arguments]):
        try:
            runpy.run_module("benchmarks", run_name="__main__", alter_sys=True)
        except SystemExit as left:
            status = left.code or 0
    return status, printed.getvalue()


def run(repository, tmp_path, command, *arguments):
    """The rows that a command wrote, and what it printed; casts are interpreted in a process that has torch already."""
    path = tmp_path / "rows.json"
    words = [command, "--quick", "--json", str(path), *arguments]
    if command == "quantize":
        status, text = interpreting(_command, begin_without_gpus)(words)
        assert status == 0, text[-2000:]
        return json.loads(path.read_text()), text
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", PYTHONPATH=str(repository / "src"))
    done = processes.run([sys.executable, "-m", "benchmarks", *words], cwd=repository, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(path.read_text()), done.stdout


def _import_all():
    from benchmarks.__main__ import COMMANDS, OF_CPU
    from benchmarks.fsdp import GATHERS

    assert all(hasattr(module, name) for module, name in GATHERS), "bytes of a renamed all-gather are not counted"
    return [importlib.import_module(name).main.__name__ for name in {**COMMANDS, **OF_CPU}.values()]


def test_every_command_can_be_imported():
    pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("jax", reason="jax is not installed")
    assert set(processes.other_process()(_import_all)) == {"main"}


@pytest.mark.slow_cases("most benchmark commands", all_but=("quantize-*",))
@pytest.mark.parametrize(
    ("command", "ids", "measured"),
    [
        ("quantize", ["q.amax", "q.mxfp8.row", "q.fp8.delayed", "dq.nvfp4", "sw.scales", "f.swiglu"],
         {"q.amax", "q.mxfp8.row", "q.fp8.delayed", "dq.nvfp4", "sw.scales", "f.swiglu.fp8", "f.swiglu.mxfp8"}),
        ("matmul", ["m.tensor", "m.nvfp4"], {"m.tensor.fast", "m.tensor.split", "m.tensor.e5m2", "m.nvfp4"}),
        ("linear", ["l.current", "l.small", "l.fwd"], {"l.current", "l.small", "l.fwd.fp8"}),
        ("grouped", ["l.grouped.block"], {"l.grouped.block"}),
        ("loss", ["loss.current"], {"loss.current"}),
        ("model", ["model.bf16", "model.current.head"], {"model.bf16", "model.bf16.compiled", "model.bf16.recomputed",
                                                         "model.current.head"}),
        ("peers", ["peers.linear.current", "peers.layer.te"], {"peers.linear.bf16", "peers.linear.current",
                                                               "peers.layer.bf16"}),
        ("host", ["h.fwdbwd.current", "h.region.delayed", "h.fwd", "h.autocast", "h.launches.delayed",
                  "g.compile.current"],
         {"h.fwdbwd", "h.region", "h.fwd", "h.autocast", "g.compile"}),
        ("block", ["b.eager.current", "b.compile"], {"b.eager", "b.compile"}),
        ("train", ["t.eager.fp8_current"], {"t.gpt"}),
        ("fsdp", ["fsdp.mxfp8", "fsdp.current.fused", "tp.delayed"],
         {"fsdp.bf16", "tp.bf16", "tp.delayed", "fsdp.current.fused", "fsdp.current.fused.low",
          *(f"fsdp.mxfp8{path}{way}" for path in ("", ".folded") for way in ("", ".low", ".fused", ".fused.low"))}),
        ("decode", ["d.nvfp4", "d.experts8.mxfp8", "d.kept.nvfp4", "d.prompt.row", "d.prompt.nvfp4"],
         {"d.nvfp4.m3", "d.experts8.mxfp8.m3", "d.kept.nvfp4.m80", "d.prompt.row", "d.prompt.nvfp4"}),
        ("profile", ["current"], set()),
    ],
)  # fmt: skip
def test_a_quick_run(repository, tmp_path, command, ids, measured):
    if command == "quantize":
        pytest.importorskip("triton", reason="triton is not installed")
    document, text = run(repository, tmp_path, command, "--only", *ids)
    rows = document["rows"]
    assert {row["id"] for row in rows if "skipped" not in row} == measured
    for row in rows:
        assert set(row) >= RESULT
        # Every figure was compared with the reference first, unless there is none for it (times of nothing but a host).
        compared = row.get("bytes_equal") or "sqnr_db" in row or row.get("variant") == "unfused"
        assert "skipped" in row or compared or command in ("host", "train", "fsdp"), row
        assert "passed" not in row, "a quick run measures nothing"
        assert "not run" in text or "skipped" not in row
        if command == "fsdp":  # rows of a plan travel as codes in half the bytes, each layer's own
            low = 33 / 64 if "mxfp8" in row["id"] else 0.5
            share = low if row["id"].endswith(".low") else 0.5 if row["id"] == "tp.delayed" else 1.0
            assert row["id"].endswith(".bf16") or row["value"] == pytest.approx(share, abs=4e-3)
    assert document["command"] == f"python -m benchmarks {command} --quick --json benchmarks/results/rows.json " + (
        " ".join(["--only", *ids])
    )
    assert str(tmp_path) not in json.dumps(document)


@pytest.mark.slow("most benchmark commands")
def test_layers_of_mixtures_of_experts(repository, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    document, text = run(repository, tmp_path, "decoder", "--only", "d.mixtral.delayed", "d.deepseek.block")
    rows = {row["id"]: row for row in document["rows"]}
    assert rows.keys() == {"d.mixtral.delayed", "d.deepseek.block"}, text
    for row in rows.values():
        assert row.keys() >= RESULT, text  # a row that was not timed has no figures
        assert row["ratio_of"] == "bf16"
        assert 16 < row["sqnr_db"] < 30  # quantized, and close to bfloat16


@pytest.mark.slow("most benchmark commands")
def test_the_cpu_command(repository, tmp_path):
    document, _ = run(repository, tmp_path, "cpu")
    assert document["command"].startswith("python -m benchmarks cpu --quick --json benchmarks/results/rows.json")
    assert {"c.mm", "c.q.mxfp8", "c.dq.nvfp4"} <= {row["id"] for row in document["rows"]}


@pytest.mark.slow("most benchmark commands")
def test_the_convert_command(repository, tmp_path):
    document, _ = run(repository, tmp_path, "convert")
    ways = [row["way"] for row in document["rows"] if row["target"] == "ct:nvfp4"]
    assert ways == ["no verify", "verify", "verify, cold source", "floor"]
    assert str(tmp_path) not in json.dumps(document)


@pytest.mark.slow("every cast and producer of the benchmarks, interpreted")
def test_every_cast_and_producer_runs(repository, tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    document, _ = run(repository, tmp_path, "quantize")
    assert not [row for row in document["rows"] if "skipped" in row]


def test_without_a_gpu_only_a_quick_run_is_offered():
    pytest.importorskip("triton", reason="triton is not installed")
    status, text = interpreting(_command, begin_without_gpus)(["matmul"])
    assert status == 2
    assert "--quick" in text
