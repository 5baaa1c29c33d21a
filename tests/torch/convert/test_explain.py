"""`explain` and the availability queries: answers about devices, without running anything."""

import json
import sys

import pytest
import torch

import microfloat.torch as mf
from microfloat.errors import InvalidTypeError, InvalidValueError, NotSupportedError
from microfloat.formats import E2M1, SCALE_E8M0, SCALE_FP32, ElementFormat, ScaledFormat
from microfloat.recipes import RECIPES, CustomRecipe, Gemm, MXFP8BlockScaling, NVFP4BlockScaling, from_name
from microfloat.torch import backends
from tests import processes


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_a_cpu_unaccelerated(name):
    explanation = mf.explain(name, device="cpu")
    assert [row.gemm for row in explanation.rows] == ["fprop", "dgrad", "wgrad"]
    assert {(row.backend, row.support.available, row.support.accelerated) for row in explanation.rows} == {
        ("reference", True, False)
    }
    assert not explanation.accelerated
    assert all(row.support.reason in " ".join(str(explanation).split()) for row in explanation.rows)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "auto"), ("h200", "triton"), ("h200", "auto")])
def test_a_fold_that_rounds_is_told(device, backend):
    """Features R26: wherever it is made, and nowhere else."""
    rounds, exact = (mf.explain(NVFP4BlockScaling(path=path), device, backend=backend) for path in ("folded", "exact"))
    assert all("elements rounded by at most 1/21" in row.support.reason for row in rounds.rows)
    assert not any("rounded" in row.support.reason for row in exact.rows)


def test_a_high_precision_gemm_is_told_apart():
    recipe = CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm("mxfp8", None), Gemm(None, None))
    backends = [row.backend for row in mf.explain(recipe, device="cpu").rows]
    assert backends == ["reference", "reference", "torch"]


def test_a_gpu_that_is_not_there_is_answered_and_not_raised(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    explanation = mf.explain("nvfp4", device="cuda")
    assert not any(row.support.available for row in explanation.rows)
    assert "no CUDA device" in str(explanation) == repr(explanation)
    available, reason = mf.is_nvfp4_available("cuda")
    assert not available
    assert "no CUDA device" in reason
    assert mf.is_nvfp4_available()
    with pytest.raises(InvalidValueError, match="backend"):
        mf.explain("nvfp4", device="cuda", backend="tritn")


@pytest.mark.parametrize(
    ("device", "architecture", "accelerated", "tried"),
    [
        ("h200", "sm_90", True, True),
        ("Hopper", "sm_90", True, True),
        ("sm_90a", "sm_90", True, True),
        ("a100", "sm_80", False, False),
        ("RTX 4090", "sm_89", False, False),
        ("sm_100", "sm_100", True, False),
        ("b200", "sm_100", True, False),
        ("rtx5090", "sm_120", True, False),
    ],
)
def test_a_gpu_by_name_is_answered_without_it(monkeypatch, device, architecture, accelerated, tried):
    monkeypatch.setattr(torch.cuda, "get_device_capability", None)  # nothing asks for hardware
    monkeypatch.setattr(torch.version, "hip", "7.0")  # nor for what is installed here
    monkeypatch.setattr(backends.importlib.util, "find_spec", lambda name: None)
    explanation = mf.explain("mxfp8", device)
    assert architecture in explanation.device
    assert explanation.to_dict()["device"].startswith(device)
    assert explanation.accelerated is accelerated
    assert all(row.support.available for row in explanation.rows)
    assert all(("not yet run on the hardware" in row.support.reason) is not tried for row in explanation.rows)
    assert mf.is_mxfp8_available(device).accelerated is accelerated
    assert mf.explain("mxfp8", device, backend="reference").rows[0].backend == "reference"


@pytest.mark.parametrize("device", ["h9000", "sm_6", "sm_61", "sm", "cuda:x", ""])
def test_other_words_are_no_gpus(device):
    with pytest.raises(InvalidValueError, match="'h200' or 'sm_100'"):
        mf.explain("mxfp8", device)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"device": 3}, InvalidTypeError),
        ({"device": "no such device"}, InvalidValueError),
        ({"shape": (1, 2)}, InvalidValueError),
        ({"shape": (1, 2, -3)}, InvalidValueError),
        ({"backend": "tritn"}, InvalidValueError),
    ],
)
def test_wrong_arguments_are_named(arguments, error):
    with pytest.raises(error, match=next(iter(arguments))):
        mf.explain("mxfp8", **arguments)


def test_the_data_says_what_the_table_says():
    """Features P11."""
    data = mf.explain("mxfp8", device="cpu").to_dict()
    assert [gemm["gemm"] for gemm in data["gemms"]] == ["fprop", "dgrad", "wgrad"]
    assert data["gemms"][0]["operands"] == "mxfp8 x mxfp8"


def test_a_shape_says_whose_gemm_runs():
    """`explain` says of GEMMs with 1x128 scales what `is_faster` decides by, for each GEMM's own sizes."""

    def own(recipe, shape, device="h200"):
        return ["microfloat's" in row.kernel for row in mf.explain(recipe, device, shape=shape).rows]

    large = (16384, 4096, 14336)
    for recipe in ("fp8_block", "mxfp8", "mxfp4"):
        assert own(recipe, large) == [True, True, True]
        assert own(recipe, (4096, 2048, 2048)) == [False, False, False]
        assert own(recipe, (16384, 2048, 14336))[0] is False  # fprop contracts 2048
        assert own(recipe, (16384, 14336, 2048))[1] is False  # dgrad 2048
        assert all("large ones by" in row.kernel for row in mf.explain(recipe, "h200").rows)
        assert own(recipe, (16381, 4096, 14331)) == [True, True, True]  # padded
    hybrid = MXFP8BlockScaling("HYBRID")
    assert own(hybrid, (4096, 2048, 2048)) == [False, True, True]  # torch multiplies E4M3 alone
    for recipe in ("fp8_current", "nvfp4", MXFP8BlockScaling(path="exact")):
        assert own(recipe, large) == [False, False, False]
    assert own("fp8_block", large, "b200") == [False, False, False]


def words(explanation):
    return " ".join(str(explanation).split())


def _forget_triton():
    """First thing in a process that has not imported triton: now it cannot."""
    assert "triton" not in sys.modules
    sys.modules["triton"] = None


def _without_triton():
    """The reason that `explain` gives, and the refusal of the native backend."""
    there, here = mf.explain("mxfp8", "h200", shape=(8192, 4096, 4096)), mf.explain("mxfp8", "cuda")
    assert there.accelerated, there
    assert [row.backend for row in there.rows] == ["native"] * 3
    assert "triton" not in str(there).replace("Triton 3.6", "")
    assert {row.kernel.split()[0] for row in there.casts} == {"kernels.fold"}
    torch.cuda.is_available = lambda: True
    here = mf.explain("mxfp8", "cuda", shape=(8192, 4096, 4096))
    assert not here.accelerated, here
    try:
        mf.autocast(recipe="mxfp8", backend="native")
        assert not mf.explain("mxfp8", "cuda", backend="native").rows[0].support
        backends.choose("native", torch.device("cuda"))
    except RuntimeError as error:
        return here.rows[0].support.reason, str(error)
    raise AssertionError("the native backend was chosen without triton")


def test_without_triton_this_machine_is_told_what_to_install_and_another_one_is_complete():
    """Features B3."""
    reason, refusal = processes.other_process(_forget_triton)(_without_triton)
    for text in (reason, refusal):
        assert 'the package triton, which is not installed (on Linux: pip install ".[triton]" in a checkout' in text
    assert refusal.startswith("backend='native'")


@pytest.mark.parametrize(("device", "named"), [("cuda", "ROCm build"), ("xpu", "on xpu"), ("mps", "on mps")])
def test_gpus_of_other_makers_run_the_reference_backend_and_are_told_so(monkeypatch, device, named):
    """A ROCm build of torch calls its devices cuda, and an MI300 reports compute capability 9.4."""
    monkeypatch.setattr(torch.version, "hip", "7.0" if device == "cuda" else None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 4))
    monkeypatch.setattr(backends, "CHOSEN", {})
    explanation = mf.explain("mxfp8", device, shape=(8192, 4096, 4096))
    assert {row.backend for row in explanation.rows} == {"reference"}
    assert {row.kernel for row in explanation.casts} == {"plain torch ops"}
    assert not explanation.accelerated
    assert "NVIDIA GPU" in words(explanation)
    assert named in words(explanation)
    assert backends.choose("auto", torch.device(device)).__name__.endswith("reference")
    for backend in ("native", "triton"):
        assert not mf.explain("mxfp8", device, backend=backend).rows[0].support.available
        with pytest.raises(NotSupportedError, match=f"^backend='{backend}': the {backend} backend needs an NVIDIA GPU"):
            backends.choose(backend, torch.device(device))


def test_every_operand_is_told_what_casts_it():
    def casts(recipe, device, **options):
        rows = mf.explain(recipe, device, **options).casts
        return {(row.gemm, row.tensor): row.kernel for row in rows}

    assert set(casts("nvfp4", "cpu").values()) == {"plain torch ops"}
    assert casts("nvfp4", "b200") == dict.fromkeys(casts("nvfp4", "cpu"), "kernels.nvfp4")
    assert set(casts("nvfp4", "h200").values()) == {"kernels.nvfp4 (decoded to bfloat16)"}
    folded = casts("mxfp8", "h200")
    assert folded["fprop", "x"] == "kernels.fold (FP8, 1x128 scales)"
    assert folded["fprop", "w"] == "kernels.fold (FP8, 128x128 scales)"
    mixed = CustomRecipe(Gemm("fp8_tensor", "fp8_tensor"), Gemm("mxfp8", None), Gemm(None, None))
    assert casts(mixed, "h200") == {
        ("fprop", "x"): "kernels.scaled", ("fprop", "w"): "kernels.scaled", ("dgrad", "dy"): "kernels.blocks",
    }  # fmt: skip
    data = mf.explain("fp8_block", "cpu").to_dict()["casts"]
    assert data[1] == {
        "gemm": "fprop", "tensor": "w", "format": "fp8_128x128", "kernel": "plain torch ops", "reason": ""
    }  # fmt: skip
    assert len(data) == 6


E3M4 = ElementFormat("E3M4", 3, 4, bias=3, max=31.0, has_inf=False, has_nan=False)


@pytest.mark.parametrize(
    "fmt",
    [
        ScaledFormat("mx_e3m4", E3M4, SCALE_E8M0, (1, 32)),
        ScaledFormat("e3m4_tensor", E3M4, SCALE_FP32, (None, None)),
        ScaledFormat("e3m4_1x128", E3M4, SCALE_FP32, (1, 128)),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", ["a100", "h200", "b200"])
def test_an_element_of_a_users_own_is_cast_and_multiplied_by_torch_on_every_gpu(fmt, device):
    """No tensor core and no kernel knows its codes."""
    explanation = mf.explain(CustomRecipe(*[Gemm(fmt, fmt)] * 3), device)
    assert not explanation.accelerated
    assert {row.kernel for row in explanation.rows} == {"decode to float32, float32 GEMM"}
    assert {row.kernel for row in explanation.casts} == {"plain torch ops"}
    assert "element E3M4" in words(explanation)
    insisting = mf.explain(CustomRecipe(*[Gemm(fmt, fmt)] * 3), device, backend="triton")
    assert not insisting.rows[0].support.available
    assert "no kernel for element E3M4" in words(insisting)


def test_a_block_without_a_kernel_is_told():
    fmt = ScaledFormat("e2m1_1x8", E2M1, SCALE_E8M0, (1, 8))
    explanation = mf.explain(CustomRecipe(*[Gemm(fmt, fmt)] * 3), "h200")
    assert {(row.kernel, row.reason) for row in explanation.casts} == {
        ("plain torch ops", "no kernel for block 1x8 of e2m1_1x8")
    }


def test_a_model_is_answered_with_a_line_for_each_layer():
    model = torch.nn.ModuleDict({
        "quantized": torch.nn.Linear(64, 32), "plain": torch.nn.Linear(32, 16), "free": mf.Linear(16, 8),
        "reference": mf.Linear(8, 4, recipe="nvfp4", backend="reference"), "norm": torch.nn.LayerNorm(4),
    })  # fmt: skip
    mf.convert(model, "mxfp8", filter=lambda name, layer: name == "quantized")
    answer = mf.explain(model)
    assert repr(answer) == str(answer)
    assert [(row.name, row.shape, row.backend, row.accelerated) for row in answer] == [
        ("quantized", (64, 32), "reference", False), ("plain", (32, 16), "torch", False),
        ("free", (16, 8), "torch", False), ("reference", (8, 4), "reference", False),
    ]  # fmt: skip
    assert [row.recipe for row in answer] == [MXFP8BlockScaling(), None, None, NVFP4BlockScaling()]
    lines = str(answer).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == ["quantized", "plain", "free", "reference"]
    assert lines[-1] == "2 of 4 linear layers run in low precision."
    with mf.autocast(recipe="fp8_current", backend="reference"):
        inside = mf.explain(model, "h200", backend="native")
        assert inside.rows[2].recipe == from_name("fp8_current")
        assert [row.backend for row in inside] == ["reference", "torch", "reference", "reference"]  # as a call runs
    hopper = mf.explain(model, "h200")
    assert [row.accelerated for row in hopper] == [True, False, False, False]
    assert [row.backend for row in hopper] == ["native", "torch", "torch", "reference"]
    assert not hopper.accelerated
    assert not mf.explain(torch.nn.LayerNorm(4)).accelerated
    data = json.loads(json.dumps(answer.to_dict()))["layers"]
    assert data[0]["explanation"]["recipe"]["recipe"] == "MXFP8BlockScaling"
    assert data[1]["explanation"] is None
    with pytest.raises(InvalidValueError, match=r"^shape: "):
        mf.explain(model, shape=(1, 2, 3))


@pytest.mark.parametrize("device", ["cpu", "h200", "b200"])
@pytest.mark.parametrize("name", [*RECIPES, "custom"])
def test_what_is_printed_fits_a_terminal(name, device):
    mixed = CustomRecipe(Gemm("nvfp4_row", "nvfp4_2d"), Gemm("fp8_1x128_e5m2", "fp8_128x128"), Gemm(None, "mxfp8"))
    text = str(mf.explain(mixed if name == "custom" else name, device, shape=(8192, 4096, 4096)))
    assert max(map(len, text.splitlines())) <= 110


def test_alignment_is_said_and_never_needed():  # features P17
    sizes = {name: mf.get_align_size_for_quantization(name) for name in RECIPES}
    assert set(sizes.values()) == {16, 32, 128}
    assert (sizes["fp8_current"], sizes["fp8_block"], sizes["mxfp8"], sizes["nvfp4"]) == (16, 16, 32, 128)
    mixed = CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm("fp8_row", "fp8_row"), Gemm(None, None))
    assert mf.get_align_size_for_quantization(mixed) == 32
    assert mf.get_align_size_for_quantization(CustomRecipe(*[Gemm(None, None)] * 3)) == 1
    with pytest.raises(InvalidTypeError, match="recipe: got NoneType"):
        mf.get_align_size_for_quantization(None)
    assert mf.Linear(33, 7, recipe=MXFP8BlockScaling())(torch.ones(5, 33)).shape == (5, 7)


def test_a_model_with_an_input_says_what_its_sizes_need():
    model = torch.nn.Sequential(mf.Linear(40, 24), torch.nn.Dropout(), mf.Linear(24, 8), torch.nn.Linear(8, 8))
    mf.convert(model[:3], "delayed")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with backends.pretend(chip="h200", interpreted=False):
        rows = {row.name: row for row in mf.explain(model, torch.randn(3, 40))}
    assert "not converted" in rows["3"].reason
    assert "not called" not in rows["0"].reason
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert model.training
    assert model[1].training
