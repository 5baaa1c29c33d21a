"""The JAX benchmarks: what is read out of a compiled program, and a small run of the script itself."""

import json
import sys

import pytest

from tests import processes

pytest.importorskip("jax")
from benchmarks import _jax_measure as measure

# As XLA prints a program for an H200, shortened: one GEMM per way.
PROGRAM = """HloModule jit_step, entry_computation_layout={(bf16[64,32]{1,0})->f32[64,96]{1,0}}

%gemm_fusion_dot (parameter_0: f8e5m2[64,96], parameter_1: f8e4m3fn[32,96]) -> f32[64,32] {
  %parameter_0 = f8e5m2[64,96]{1,0} parameter(0)
  %parameter_1 = f8e4m3fn[32,96]{1,0} parameter(1)
  ROOT %dot.3 = f32[64,32]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%decoding_fusion (parameter_0.1: f8e4m3fn[96,64], parameter_1.1: bf16[32,64]) -> bf16[96,32] {
  %parameter_0.1 = f8e4m3fn[96,64]{1,0} parameter(0)
  %parameter_1.1 = bf16[32,64]{1,0} parameter(1)
  %convert.9 = bf16[96,64]{1,0} convert(%parameter_0.1)
  ROOT %dot.4 = bf16[96,32]{1,0} dot(%convert.9, %parameter_1.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main.20 (x: bf16[64,32], w: bf16[32,96]) -> f32[64,96] {
  %x = bf16[64,32]{1,0} parameter(0)
  %codes = f8e4m3fn[64,32]{1,0} fusion(%x), kind=kLoop, calls=%cast
  %codes.2 = f8e4m3fn[96,32]{1,0} fusion(%x), kind=kLoop, calls=%cast.2
  %scale = f32[] constant(1)
  %custom-call.1 = (f32[64,96]{1,0}, s8[32]{0}) custom-call(%codes, %codes.2, %scale, %scale), custom_call_target="__cublas$lt$matmul$f8", backend_config={"alpha_real":1}
  %fusion.7 = f32[64,32]{1,0} fusion(%dy, %codes.3), kind=kCustom, calls=%gemm_fusion_dot, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %fusion.8 = bf16[96,32]{1,0} fusion(%codes.4, %x), kind=kCustom, calls=%decoding_fusion, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %copy.1 = f8e4m3fn[96,32]{0,1} copy(%codes.2)
  ROOT %get-tuple-element = f32[64,96]{1,0} get-tuple-element(%custom-call.1), index=0
}
"""  # noqa: E501


def test_gemms_of_a_program_by_role():
    roles = {"fprop": ((64, 96),), "dgrad": ((64, 32),), "wgrad": ((96, 32), (32, 96))}
    found = measure.summary(measure.Program(None, PROGRAM, 1.0, 10, 20, 30), roles)
    assert {role: (entry["gemms"], entry["fp8"]) for role, entry in found["gemms"].items()} == {
        "fprop": (1, 1), "dgrad": (1, 1), "wgrad": (1, 0),
    }  # fmt: skip
    assert found["gemms"]["fprop"]["seen"][0]["kind"] == "__cublas$lt$matmul$f8"
    assert found["gemms"]["dgrad"]["seen"][0]["operands"] == ["f8e5m2[64,96]", "f8e4m3fn[32,96]"]
    assert (found["fp8_gemms"], found["fusions"], found["copies"], found["custom_calls"]) == (2, 4, 1, 1)


def test_a_dot_that_no_library_took_is_named():
    dot = "ENTRY %main (a: f8e4m3fn[8,4]) -> f32[8,8] {\n  %a = f8e4m3fn[8,4]{1,0} parameter(0)\n"
    dot += "  ROOT %dot.1 = f32[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={1}\n}\n"
    (found,) = measure.dots(dot)
    assert (found["kind"], found["fp8"], found["result"]) == ("dot", False, "f32[8,8]")


def test_the_command_names_no_place_of_this_machine(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/jax_linear.py", "--json", "/secret/a", "--tiny", "--dump=/secret/b"])
    assert measure.provenance()["command"] == "python benchmarks/jax_linear.py --tiny"


@pytest.mark.slow("most benchmark commands")
def test_a_small_run(tmp_path, repository):
    command = [sys.executable, str(repository / "benchmarks" / "jax_linear.py"), "--tiny", "--only", "j.l.current",
               "j.mxfp8", "--json", str(tmp_path / "result.json"), "--dump", str(tmp_path / "hlo")]  # fmt: skip
    done = processes.run(command, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert str(tmp_path) not in json.dumps(result)
    current, forward = result["rows"]
    assert (current["id"], forward["id"], result["failures"]) == ("j.l.current", "j.mxfp8", {})
    assert current["ratio"] == current["bf16_ms"] / current["median_ms"]
    assert current["passed"] == (current["ratio"] >= current["target"] == 1.4)
    assert current["sqnr_db"]["y"] > 25
    assert set(current["hlo"]["gemms"]) == {"fprop", "dgrad", "wgrad"}
    assert all(role["gemms"] == 1 for role in current["hlo"]["gemms"].values())
    assert max(current["difference"].values()) < 1e-3
    assert (tmp_path / "hlo" / "j.l.current.hlo.txt.gz").stat().st_size > 1000
