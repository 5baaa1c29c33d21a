"""``torch.utils.flop_counter`` counts the products of layers as it counts those of nn.Linear."""

import functools
import sys

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import microfloat.torch as mf
from microfloat.recipes import from_name
from microfloat.torch.compile.linear import compiled_grouped
from microfloat.torch.context import token_of

M, K, N = 33, 70, 50  # multiples of nothing that a GEMM or a block would be filled up to
ONE = 2 * M * K * N
RECIPES = ["delayed", "fp8_current", "fp8_row", "fp8_block", "mxfp8", "mxfp6", "mxfp4", "nvfp4"]
CONFIGS = [mf.WeightOnly("nvfp4"), mf.WeightOnly("mxfp8"), mf.WeightActivation("mxfp8"),
           mf.WeightActivation("fp8_tensor")]  # fmt: skip


def flops(call):
    with FlopCounterMode(display=False, custom_mapping=mf.FLOP_FORMULAS) as counter:
        call()
    return counter.get_total_flops()


def of_step(layer, width=K, device="cpu"):
    """Of a forward with its backward, and of a forward alone."""
    x = torch.randn(3, 11, width, device=device, requires_grad=True)
    return flops(lambda: layer(x).sum().backward()), flops(torch.no_grad()(lambda: layer(x)))


@pytest.mark.parametrize("name", RECIPES)
def test_a_linear_counts_as_in_high_precision(name):
    assert of_step(nn.Linear(K, N)) == (3 * ONE, ONE)
    assert of_step(mf.Linear(K, N, recipe=name)) == (3 * ONE, ONE)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: f"{type(config).__name__}-{config.format}")
def test_stored_weights_count_as_in_high_precision(config):
    model = nn.Sequential(nn.Linear(K, N))
    mf.quantize_(model, config, exclude=())
    model.requires_grad_(False)
    assert of_step(model) == (2 * ONE, ONE)


def test_a_model_counts_as_it_did_before_it_was_converted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, K), nn.LayerNorm(K), nn.Linear(K, N))
    plain = of_step(model)
    mf.convert(model, recipe="nvfp4")
    assert of_step(model) == plain
    with mf.autocast(enabled=False):
        assert of_step(model) == plain


def test_fused_layers_and_experts():
    assert of_step(mf.LayerNormLinear(K, N, recipe="mxfp8")) == (3 * ONE, ONE)
    assert of_step(mf.LayerNormMLP(K, N, activation="swiglu", recipe="fp8_current")) == (9 * ONE, 3 * ONE)
    experts, x = mf.GroupedLinear(2, K, N, recipe="mxfp8"), torch.randn(M, K, requires_grad=True)
    assert flops(lambda: experts(x, [20, 13]).sum().backward()) == 3 * ONE
    assert flops(torch.no_grad()(lambda: experts(x, [20, 13]))) == ONE


def test_a_product_of_tensors():
    a, b = (mf.quantize(torch.randn(rows, K), "mxfp8") for rows in (M, N))
    assert flops(lambda: mf.scaled_matmul(a, b)) == ONE


def test_operators_of_compiled_code():
    """As a compiler's own estimates count them; the counter has torch.compile run in eager mode."""
    assert of_step(mf.Linear(K, N, recipe="nvfp4", device="meta"), device="meta") == (3 * ONE, ONE)
    weight, x = torch.randn(2, N, K, requires_grad=True), torch.randn(M, K, requires_grad=True)
    token = token_of(from_name("mxfp8"))
    for products in (3, 2):
        call = functools.partial(compiled_grouped, None, x, weight, None, [20, 13], token, "auto")
        assert flops(lambda: call().sum().backward()) == products * ONE  # noqa: B023
        weight.requires_grad_(False)


def test_the_library_leaves_the_import_system_alone():
    """Nothing of ours waits for torch's counter to be imported; it takes the formulas from the caller."""
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("microfloat")]
