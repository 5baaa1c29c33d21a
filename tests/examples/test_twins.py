"""The torch and the JAX training are twins: what is cast from the same bits gives the same bytes in both.

Sums (norms, attention, GEMMs) differ in their last place between frameworks, so only operands that are equal are
compared byte by byte: the weights both start from, and the operands that one of them recorded.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
pytest.importorskip("flax")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402
from gpt.files import load_weights  # noqa: E402
from gpt.model_jax import GPT, set_weights, weights_of  # noqa: E402
from safetensors.numpy import load_file  # noqa: E402

import microfloat.jax as mj  # noqa: E402
import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import RECIPES, from_name  # noqa: E402
from tests.examples.small_run import trainer_of  # noqa: E402
from tests.jax.effort import cheaper_passes, effort_of  # noqa: E402

pytestmark = pytest.mark.xdist_group("twins")

# One with stochastic rounding, a Hadamard transform and two-dimensional blocks; one that XLA compiles sooner.
FURTHER = pytest.mark.slow("examples: runs with further settings")
RUNS = [*(pytest.param(name, marks=FURTHER) for name in ("nvfp4", "mxfp8")), "fp8_current"]
# The six casts: operand of a GEMM -> (recorded tensor, transposed, stream of the random bits)
CASTS = {
    ("fprop", "lhs"): ("x", False, 0), ("fprop", "rhs"): ("w", False, 1), ("dgrad", "lhs"): ("dy", False, 2),
    ("dgrad", "rhs"): ("w", True, 3), ("wgrad", "lhs"): ("dy", True, 4), ("wgrad", "rhs"): ("x", True, 5),
}  # fmt: skip
LAYERS = ("qkv", "out", "gate_up", "down")
WEIGHTS = "weights.safetensors"
SCRIPTS = {"torch": "train_gpt", "jax": "train_gpt_jax"}


@pytest.fixture(autouse=True)
def compile_effort(request):
    with effort_of(request.node):
        yield


@pytest.fixture(scope="module", params=RUNS)
def run(request):
    """The recipe that is trained with."""
    return request.param


class Twins:
    """Both trainings' first step from one set of weights, each of which runs when it is asked for."""

    def __init__(self, folder, run):
        self.folder, self.run = folder, run
        self.loss, self.baseline = functools.cache(self._loss), functools.cache(self._baseline)

    def _trainer(self, name, run):
        if name == "jax":
            self.loss("torch")  # which writes the weights
        flag = "--export-weights" if name == "torch" else "--initial-weights"
        more = f"--recipe {self.run} --steps 1 --context 32 {flag} {self.folder / WEIGHTS}"
        return trainer_of(self.folder, f"{more} --record {self.folder / name}.safetensors", run, SCRIPTS[name])

    def _loss(self, name):
        """Of a framework's first step by the recipe, which is recorded."""
        with cheaper_passes():
            if name == "torch":
                self._trainer(name, "bf16")  # which writes the weights
            return self._trainer(name, self.run).train(lambda: False, lambda step: None).train_loss[0]

    def _baseline(self, name):
        """Of the same step in bf16."""
        with cheaper_passes():
            trainer = self._trainer(name, "bf16")
            return trainer.held_out_loss(trainer.batch())

    def record(self, name):
        """Layer -> name -> array of a framework's step."""
        self.loss(name)
        return load_record(self.folder / f"{name}.safetensors")


@pytest.fixture(scope="module")
def twins(run, tmp_path_factory):
    return Twins(tmp_path_factory.mktemp("twins"), run)


def load_record(path):
    """Layer -> name -> array."""
    layers = {}
    for key, array in load_file(path).items():
        layer, _, name = key.rpartition(".")
        layers.setdefault(layer, {})[name] = array
    return layers


@pytest.mark.slow("trains in torch and in JAX")
def test_losses_of_the_first_step_agree(twins):
    assert abs(twins.loss("jax") - twins.loss("torch")) < 1e-3


@pytest.mark.slow("a program of JAX more")
def test_losses_of_the_first_step_in_bf16_agree(twins):
    assert abs(twins.baseline("jax") - twins.baseline("torch")) < 1e-3
    assert twins.baseline("jax") != twins.loss("jax")


def test_both_recorded_the_same_layers_and_weights(twins, run):
    ours, theirs = twins.record("jax"), twins.record("torch")
    assert set(ours) == set(theirs) == {f"blocks.0.{layer}" for layer in LAYERS}
    for layer, arrays in theirs.items():
        assert {name: array.shape for name, array in ours[layer].items()} == {
            name: array.shape for name, array in arrays.items()
        }
        assert (ours[layer]["w"] == arrays["w"]).all()
    for record in (ours, theirs):
        seeds = {seed_of(arrays) for arrays in record.values()}
        assert len(seeds) == (4 if run == "nvfp4" else 1)  # a stream of its own per layer


def bytes_of(array):
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def assert_same_bytes(operand, cast, **options):
    """torch and JAX quantize a float32 array that holds bfloat16 values."""
    if cast.is_delayed:
        options["scale_enc"] = 1.0
    q = mf.quantize(torch.from_numpy(np.array(operand)).bfloat16(), cast, **options)
    p = mj.quantize(jnp.asarray(operand, jnp.bfloat16), cast, **options)
    assert (bytes_of(q.codes.view(torch.uint8)) == bytes_of(p.codes)).all()
    assert (bytes_of(q.scale) == bytes_of(p.scale)).all()
    if q.tensor_scale is not None:
        assert (bytes_of(q.tensor_scale) == bytes_of(p.tensor_scale)).all()
    return q, p


@pytest.mark.slow("examples: runs with further settings")
@pytest.mark.parametrize("name", RECIPES)
def test_every_weight_quantizes_to_the_same_bytes(twins, name):
    """Features J24."""
    recipe = from_name(name)
    model = GPT(SimpleNamespace(dim=32, layers=1, heads=2, hidden=32, context=32), nnx.Rngs(0))
    twins.loss("torch")
    weights = load_weights(twins.folder / WEIGHTS, weights_of(model))
    set_weights(model, weights)
    matrices = {key: array for key, array in weights_of(model).items() if key.startswith("blocks.")}
    for key, array in matrices.items():
        assert (array == weights[key]).all()
        if array.ndim == 2:
            for use, operand in ((("fprop", "rhs"), array), (("dgrad", "rhs"), array.T)):
                assert_same_bytes(operand, recipe.cast(*use))


@pytest.mark.slow("examples: runs with further settings")
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("source", SCRIPTS)
@pytest.mark.parametrize("name", RECIPES)
def test_six_casts_of_recorded_operands_give_the_same_bytes(twins, source, name, layer):
    recipe, arrays = from_name(name), twins.record(source)[f"blocks.0.{layer}"]
    for use, (tensor, transposed, stream) in CASTS.items():
        cast = recipe.cast(*use)
        noise = {"seed": seed_of(arrays), "stream": stream} if cast.is_stochastic else {}
        assert_same_bytes(arrays[tensor].T if transposed else arrays[tensor], cast, **noise)


def seed_of(arrays):
    low, high = (int(word) for word in arrays.get("seed", (5, 6)))  # a run without noise has none
    return low | high << 32


@pytest.mark.parametrize("source", SCRIPTS)
def test_the_record_is_of_the_step_itself(twins, run, source):
    """The recorded operands and seed give the layer's recorded result and weight gradient.

    Another seed would change dw by the noise of four bits, another x or w would change y. The last place may differ:
    sums run in another order, and JAX's dw has w's bfloat16.
    """
    recipe = from_name(run)
    library = {"torch": mf, "jax": mj}[source]
    for arrays in twins.record(source).values():
        quantized = {}
        for use, (tensor, transposed, stream) in CASTS.items():
            q, p = assert_same_bytes(
                arrays[tensor].T if transposed else arrays[tensor], recipe.cast(*use),
                **({"seed": seed_of(arrays), "stream": stream} if recipe.cast(*use).is_stochastic else {}),
            )  # fmt: skip
            quantized[use] = q if library is mf else p
        wide = torch.float32 if library is mf else jnp.float32
        for gemm, name in (("fprop", "y"), ("wgrad", "dw")):
            product = library.scaled_matmul(quantized[gemm, "lhs"], quantized[gemm, "rhs"], out_dtype=wide)
            difference = np.linalg.norm(np.asarray(product) - arrays[name]) / np.linalg.norm(arrays[name])
            assert difference < 4e-3, f"{gemm}: {difference}"
