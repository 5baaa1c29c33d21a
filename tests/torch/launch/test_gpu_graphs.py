"""features G4: CUDA graphs of whole training steps, through torch's own helpers, give the bits of eager steps."""

import copy
import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import RECIPES, CustomRecipe, NVFP4BlockScaling  # noqa: E402

pytestmark = pytest.mark.gpu


def recipe_of(name):
    """The stock recipe; of NVFP4 without noise, which is drawn anew in every replay."""
    return NVFP4BlockScaling(disable_stochastic_rounding=True) if name == "nvfp4" else RECIPES[name]()


def make(recipe) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).to("cuda", torch.bfloat16)
    if recipe is not None:
        mf.convert(model, recipe)
    return model


def batches(count=4):
    torch.manual_seed(1)
    return [torch.randn(128, 256, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


class Step:
    """Forward, backward and optimizer step of a model on one static input."""

    def __init__(self, model, recipe) -> None:
        self.model, self.recipe = model, recipe
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True)
        self.x = batches(1)[0].clone()

    def __call__(self) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with mf.autocast(recipe=self.recipe):
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        return loss

    def warm_up(self) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self()
        torch.cuda.current_stream().wait_stream(side)


@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_step_trains_as_an_eager_one(name) -> None:
    recipe = recipe_of(name)
    captured, eager = Step(make(recipe), recipe), Step(make(recipe), recipe)
    captured.warm_up()
    eager.warm_up()
    graph = torch.cuda.CUDAGraph()
    # Not state_dict(), which would bring the update of dy's scales forward that the capture is to contain.
    before = [parameter.detach().clone() for parameter in captured.model.parameters()]
    with torch.cuda.graph(graph):
        loss = captured()
    assert all(torch.equal(a, b) for a, b in zip(captured.model.parameters(), before, strict=True))  # nothing ran
    for x in batches():
        for step in (captured, eager):
            step.x.copy_(x)
        graph.replay()
        expected = eager()
        assert torch.equal(loss, expected)
        for one, other in zip(captured.model.parameters(), eager.model.parameters(), strict=True):
            assert torch.equal(one, other)
    buffers = zip(captured.model.named_buffers(), eager.model.buffers(), strict=True)
    for (key, one), other in buffers:
        if "dy" not in key:  # whose latest update waits for the next step
            assert torch.equal(one, other), key


def graphed_and_plain_results(model: nn.Module) -> tuple[list, set[str]]:
    """For each batch, the output and the gradients of the module as a graphed callable and as it is; the warnings seen.

    torch's helper keeps its captured outputs, and with them nodes of parameters that were made on the capture's
    stream, so a backward on another stream can warn of it (torch 2.10 and newer, pytorch/pytorch pull 166136).
    """
    twin, results = copy.deepcopy(model), []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphed = torch.cuda.make_graphed_callables(model, (batches(1)[0].clone().requires_grad_(),))
        for x in batches():
            for run, module in ((graphed, model), (twin, twin)):
                value = x.clone().requires_grad_()
                module.zero_grad(set_to_none=True)
                y = run(value)
                y.float().square().mean().backward()
                gradients = [value.grad, *[parameter.grad for parameter in module.parameters()]]
                results.append([tensor.clone() for tensor in (y, *gradients)])
    return list(zip(results[::2], results[1::2], strict=True)), {str(warning.message) for warning in caught}


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_graphed_callables_give_the_bits_of_the_module(name) -> None:
    recipe = recipe_of(name)
    # torch's helper warms up with gradients of uninitialised memory, which must not decide whether operands fold.
    gemms = (recipe.fprop, recipe.dgrad, recipe.wgrad)
    fixed = [replace(gemm, path="folded") if gemm.path == "auto" else gemm for gemm in gemms]
    _, of_torch_itself = graphed_and_plain_results(make(None))
    results, warned = graphed_and_plain_results(make(CustomRecipe(*fixed)))
    for graphed, plain in results:
        assert all(torch.equal(a, b) for a, b in zip(graphed, plain, strict=True))
    assert warned <= of_torch_itself


def test_replays_draw_noise_of_their_own() -> None:
    layer = mf.Linear(256, 512, bias=False, dtype=torch.bfloat16, device="cuda", recipe="nvfp4")
    x, graph, found = batches(1)[0].requires_grad_(), torch.cuda.CUDAGraph(), []
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    x.grad = layer.weight.grad = None
    with torch.cuda.graph(graph):
        layer(x).square().sum().backward()
    for seed in (1, 1, 2, None):
        if seed is not None:
            torch.manual_seed(seed)
        graph.replay()
        found.append(x.grad.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert not torch.equal(found[2], found[3])


def test_a_flag_on_the_device_skips_a_write() -> None:
    """features Q14: inside a graph."""
    q = mf.quantize(torch.ones(256, 256, device="cuda"), "mxfp8")
    values, flag = torch.randn(256, 256, device="cuda"), torch.zeros((), device="cuda")
    mf.update_quantized(q, values, noop_flag=flag)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mf.update_quantized(q, values, noop_flag=flag)
    for skips in (True, False):
        before = mf.quantize(values, "mxfp8")
        values.normal_()
        flag.fill_(skips)
        graph.replay()
        assert torch.equal(q, before if skips else mf.quantize(values, "mxfp8"))
        mf.update_quantized(q, values)


def test_a_captured_step_adds_to_main_grad() -> None:
    layer = mf.Linear(256, 512, bias=False, dtype=torch.bfloat16, device="cuda", recipe="fp8_current")
    layer.fuse_wgrad_accumulation = True
    layer.weight.main_grad = torch.zeros(512, 256, device="cuda")
    x, graph = batches(1)[0], torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            layer(x).square().sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    layer.weight.main_grad.zero_()
    layer(x).square().sum().backward()
    once = layer.weight.main_grad.clone()
    with torch.cuda.graph(graph):
        layer(x).square().sum().backward()
    layer.weight.main_grad.zero_()
    for _ in range(4):
        graph.replay()
    torch.testing.assert_close(layer.weight.main_grad, once * 4, rtol=1e-6, atol=0)


FORMATS = ("nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8", "fp8_tensor", "fp8_row", "fp8_128x128")


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_dequantized_weight_gives_the_bits_of_calls_that_dequantize(fmt) -> None:  # features I2
    """Of more rows than any kernel takes codes with, eagerly and captured before and after the weight is kept."""
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Linear(480, 384), nn.Linear(384, 72)).to("cuda", torch.bfloat16).requires_grad_(False)
    kept, x = copy.deepcopy(usual), torch.randn(300, 480, device="cuda", dtype=torch.bfloat16)
    mf.quantize_(usual, mf.WeightOnly(fmt), exclude=())
    mf.quantize_(kept, mf.WeightOnly(fmt, prefill="dequantized"), exclude=())
    expected, results = usual(x), []
    for layer in kept:
        assert "decode" not in str(layer.schedule(torch.empty(65, layer.in_features, device="cuda").bfloat16()))
    for _ in range(2):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            usual(x)  # compiles what both launch
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            captured = kept(x)
        results.append(kept(x))  # before the graph has run
        graph.replay()
        results.append(captured)
    assert all(torch.equal(y, expected) for y in results)
