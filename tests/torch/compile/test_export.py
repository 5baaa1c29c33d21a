"""features G5: `mf.export`, programs of torch's own operations that give the bits of a converted model."""

import io
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, NotSupportedError  # noqa: E402
from microfloat.recipes import RECIPES, Cast, CustomRecipe, Gemm  # noqa: E402

# torch's own, of itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
X = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def make(recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 33), nn.GELU()).bfloat16()
    mf.convert(model, recipe)
    return model.eval()


def operators(program) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("mxfp8",))
@pytest.mark.parametrize("name", RECIPES)
def test_plain_operations_give_the_bits_of_the_layers(name) -> None:
    model = make(name)
    program = mf.export(model, (X,))
    assert all(operator.startswith(("aten.", "<built-in")) for operator in operators(program))
    run = program.module()
    assert torch.equal(run(X), model(X))
    strange = X.clone()
    strange[0, :5] = torch.tensor([0.0, float("inf"), float("nan"), 1e-38, -3e38])
    torch.testing.assert_close(run(strange), model(strange), rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow("further programs of a checked kind")
@pytest.mark.parametrize(
    "name", ["fp8_current", pytest.param("mxfp8", marks=pytest.mark.slow("further programs of a checked kind"))]
)
def test_batches_of_any_size(name) -> None:
    model = make(name)[:1]
    program = mf.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=512)},))
    run = program.module()
    for rows in (2, 7, 300):
        x = torch.randn(rows, 64, dtype=torch.bfloat16)
        assert torch.equal(run(x), model(x))


@pytest.mark.slow("further programs of a checked kind")
def test_stored_weights_and_layers_in_high_precision() -> None:
    torch.manual_seed(0)
    with mf.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(mf.Linear(64, 32, recipe="mxfp8"), mf.Linear(32, 16))
    program = mf.export(model, (X.float(),))
    assert not any("microfloat" in operator for operator in operators(program))
    torch.testing.assert_close(program.module()(X.float()), model(X.float()), rtol=0, atol=0)
    assert "microfloat" in " ".join(operators(torch.export.export(model, (X.float(),))))


@pytest.mark.slow("a process that imports torch anew")
def test_a_program_runs_where_the_library_is_not() -> None:
    model, file = make("nvfp4"), io.BytesIO()
    torch.export.save(mf.export(model, (X,)), file)
    script = (
        "import io, sys, torch\n"
        "program = torch.export.load(io.BytesIO(sys.stdin.buffer.read()))\n"
        "x = torch.randn(16, 64, generator=torch.Generator().manual_seed(2)).bfloat16()\n"
        "assert not any('microfloat' in name for name in sys.modules)\n"
        "print(float(program.module()(x).float().sum()))\n"
    )
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        input=file.getvalue(),
        capture_output=True,
        check=True,
        timeout=240,
    )
    assert float(run.stdout) == float(model(X).detach().float().sum())


def test_what_cannot_be_exported_is_named() -> None:
    noisy = Cast("mxfp8", rounding="stochastic")
    with pytest.raises(NotSupportedError, match="export: got a recipe whose fprop rounds stochastically"):
        mf.export(make(CustomRecipe(Gemm(noisy, "mxfp8"), Gemm(None, None), Gemm(None, None))), (X,))
    with pytest.raises(InvalidTypeError, match="model"):
        mf.export(len, (X,))
    with pytest.raises(NotSupportedError, match=r"export: got a GroupedLinear.*torch\.export\.export keeps it"):
        mf.export(mf.GroupedLinear(2, 64, 16, recipe="mxfp8").eval(), (X.float(), torch.tensor([6, 10])))


# Each with a call of 2 sequences of 8 tokens, or of their 16.
MODULES = {
    "linear": lambda recipe: (mf.Linear(64, 32, recipe=recipe), {}),
    "norm_linear": lambda recipe: (mf.LayerNormLinear(64, 32, split={"a": 16, "b": 16}, recipe=recipe), {}),
    "mlp": lambda recipe: (mf.LayerNormMLP(64, 96, activation="swiglu", recipe=recipe), {}),
    "attention": lambda recipe: (
        mf.MultiheadAttention(64, 4, 2, qk_norm=True, recipe=recipe),
        {"position_embeddings": mf.RotaryEmbedding(16)(8)},
    ),
    "packed": lambda recipe: (
        mf.TransformerLayer(64, 96, 4, 2, recipe=recipe),
        {"cu_seqlens": torch.tensor([0, 6, 16])},
    ),
    "experts": lambda recipe: (mf.GroupedLinear(2, 64, 32, recipe=recipe), {"group_sizes": torch.tensor([6, 10])}),
}


@pytest.mark.slow_cases(
    "further recipes of a checked module", all_but=("attention-mxfp8", "packed-mxfp8", "experts-mxfp8")
)
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
@pytest.mark.parametrize("module", list(MODULES))
def test_torch_export_takes_every_module(module, name) -> None:
    torch.manual_seed(0)
    model, options = MODULES[module](name)
    model, x = model.bfloat16().eval(), X if module in ("experts", "packed") else X.view(2, 8, 64)
    with torch.no_grad():
        want = model(x, **options)
        program = torch.export.export(model, (x,), options)
        assert torch.equal(program.module()(x, **options), want)
    assert any("microfloat" in operator for operator in operators(program))


def test_an_exported_program_has_no_region_of_delayed_scaling() -> None:
    layer = make("delayed")  # kept: a program holds the number of its layer, not the layer
    program = torch.export.export(layer, (X,)).module()
    with pytest.raises(NotSupportedError, match=r"for inference, microfloat\.torch\.export makes a program"):
        program(X)
    with mf.autocast():
        assert program(X).shape == (16, 33)
