"""`convert(fuse=True)` on plain torch models; transformers' are in tests/integrations."""

import copy
import pickle
import sys
import textwrap
import types
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError  # noqa: E402
from microfloat.torch.convert import fuse as fusing  # noqa: E402
from microfloat.torch.convert.fuse import Fused  # noqa: E402


def _model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.LayerNorm(32), nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.Dropout(0.0), nn.RMSNorm(32),
        nn.Linear(32, 16), nn.SiLU(),
    )  # fmt: skip


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_norms_and_activations_before_linears(recipe):
    apart, fused = _model(), _model()
    mf.convert(apart, recipe)
    report = mf.convert(fused, recipe, fuse=True)
    assert [(row.name, row.action) for row in report.blocks] == [("", "fused")]
    assert type(fused).__name__ == "Sequential"
    x = torch.randn(5, 32)
    results = []
    for model in (apart, fused):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(1)
        y = model(leaf)
        y.sum().backward()
        results.append((y.detach(), leaf.grad, [layer.weight.grad for layer in (model[1], model[3], model[6])]))
    # A norm may differ in its last bit, and few codes with it.
    for got, want in zip((*results[1][:2], *results[1][2]), (*results[0][:2], *results[0][2]), strict=True):
        assert float((got - want).norm() / want.norm()) < 0.02


def test_a_changed_block_runs_its_own_forward():
    model = _model()
    mf.convert(model, "mxfp8", fuse=True)
    x = torch.randn(5, 32)
    want, seen = model(x), []
    handle = model[0].register_forward_hook(lambda *arguments: seen.append(1))
    assert torch.equal(model(x), want)
    assert seen == [1]
    handle.remove()
    assert torch.equal(model(x), want)
    assert seen == [1]
    model[2] = nn.Tanh()
    with pytest.raises(AssertionError):
        torch.testing.assert_close(model(x), want)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert isinstance(other, Fused)
        assert torch.equal(other(x), model(x))
    mf.revert(model)
    assert type(model) is nn.Sequential
    assert type(model[1]) is nn.Linear


def test_a_sequential_without_such_pairs_stays():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 8))
    report = mf.convert(model, "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["not fused"]
    assert type(model) is nn.Sequential
    with pytest.raises(InvalidTypeError, match="fuse"):
        mf.convert(model, "mxfp8", fuse="yes")


def _gated(product):
    """A class as transformers' models have it, whose forward is the given one."""

    def init(self):
        nn.Module.__init__(self)
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(32, 48), nn.Linear(32, 48), nn.Linear(48, 32)
        self.act_fn = nn.SiLU()

    names = {"__module__": "transformers.models.own.modeling_own", "__init__": init, "forward": product}
    return type("OwnMLP", (nn.Module,), names)()


@pytest.mark.parametrize(
    ("product", "fused"),
    [
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)), True),
        (lambda self, x: self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x)), False),
        (lambda self, x: self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x)), False),
    ],
)
def test_an_mlp_is_known_by_what_it_computes(product, fused):
    torch.manual_seed(0)
    model, x = nn.ModuleList([_gated(product)]), torch.randn(4, 32)
    plain = model[0](x).detach()
    report = mf.convert(model, "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["fused" if fused else "not fused"]
    if not fused:
        assert report.blocks[0].reason == "OwnMLP is not a block that is known"
    assert float((model[0](x).detach() - plain).norm() / plain.norm()) < 0.1


def test_an_mlp_with_more_arguments_keeps_them():
    def forward(self, x, scale=1.0):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    report = mf.convert(nn.ModuleList([_gated(forward)]), "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["not fused"]

    def by_another_name(self, hidden):
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))

    model, x = nn.ModuleList([_gated(by_another_name)]), torch.randn(4, 32)
    report = mf.convert(model, "mxfp8", fuse=True)
    assert [row.action for row in report.blocks] == ["fused"]
    torch.testing.assert_close(model[0](hidden=x), model[0](x), rtol=0.1, atol=0.05)


# A decoder layer as a package writes it; a version of it has other names and arguments.
_SOURCE = """
import torch
from torch import nn


class Functions:
    def get_interface(self, name, default):
        return default


ALL_ATTENTION_FUNCTIONS = Functions()


def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def eager_attention_forward(module, q, k, v, attention_mask, dropout, scaling, **kwargs):
    module.heard.append(kwargs)
    weights = q @ k.transpose(-1, -2) * scaling
    return (weights.softmax(-1) @ v).transpose(1, 2), None


class LlamaRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(size)), 1e-6

    def forward(self, hidden_states):
        dtype, x = hidden_states.dtype, hidden_states.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(dtype)


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(32, 64), nn.Linear(32, 64)
        self.down_proj, self.act_fn = nn.Linear(64, 32), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class LlamaAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.v_proj, self.o_proj = nn.Linear(32, 32), nn.Linear(32, 32)
        self.head_dim, self.scaling, self.attention_dropout, self.layer_idx = 16, 0.25, 0.0, 0
        self.config, self.heard = type("Config", (), {"_attn_implementation": "eager"}), []

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, CACHE=None, **kwargs):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k, v = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
        q, k, v = q.view(shape).transpose(1, 2), k.view(shape).transpose(1, 2), v.view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if CACHE is not None:
            k, v = CACHE.update(k, v, self.layer_idx TELLS)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        y, weights = attend(
            self, q, k, v, attention_mask, dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling, **kwargs,
        )
        return self.o_proj(y.reshape(*hidden_states.shape[:-1], -1)), weights


class LlamaDecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(), LlamaMLP()
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(32), LlamaRMSNorm(32)

    def forward(
        self, hidden_states, attention_mask=None, position_ids=None, CACHE=None, use_cache=False,
        position_embeddings=None MORE, **kwargs,
    ):
        y, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states), attention_mask=attention_mask, CACHE=CACHE,
            position_ids=position_ids, use_cache=use_cache, position_embeddings=position_embeddings, **kwargs,
        )
        y = hidden_states + y
        return y + self.mlp(self.post_attention_layernorm(y)) TIMES
"""
VERSIONS = {
    "old": {"CACHE": "past_key_values", "TELLS": "", "MORE": "", "TIMES": ""},
    "new": {"CACHE": "cache", "TELLS": ", kwargs=kwargs", "MORE": "", "TIMES": ""},
    "renamed": {"CACHE": "key_value_store", "TELLS": "", "MORE": "", "TIMES": ""},
    "with a gain": {"CACHE": "cache", "TELLS": "", "MORE": ", gain=1.0", "TIMES": "* gain"},
}


class _Cache:
    """Keys and values of earlier calls, and the further arguments of `update`."""

    def __init__(self):
        self.states, self.told = None, []

    def update(self, k, v, layer, **kwargs):
        self.told.append((layer, kwargs))
        if self.states is not None:
            k, v = torch.cat((self.states[0], k), -2), torch.cat((self.states[1], v), -2)
        self.states = k, v
        return k, v


def _decoder(monkeypatch, version):
    """A decoder layer of a version, plain and fused, arguments of a call, and what fusing says."""
    name = "transformers.models.llama.modeling_llama"
    source = _SOURCE
    for word, text in VERSIONS[version].items():
        source = source.replace(word, text)
    module = types.ModuleType(name)
    exec(compile(textwrap.dedent(source), name, "exec"), vars(module))
    monkeypatch.setitem(sys.modules, name, module)
    torch.manual_seed(0)
    plain = nn.ModuleList([module.LlamaDecoderLayer()])
    fused = copy.deepcopy(plain)
    report = mf.convert(fused, "mxfp8", fuse=True)
    angles = torch.arange(5.0)[None, :, None] * torch.ones(16)
    options = {"position_embeddings": (angles.cos(), angles.sin()), "position_ids": torch.arange(5)[None]}
    return plain[0], fused[0], torch.randn(2, 5, 32), options, report


@pytest.mark.parametrize("version", ["old", "new"])
def test_a_cache_reaches_a_fused_layer_by_either_name(monkeypatch, version):
    plain, fused, x, options, report = _decoder(monkeypatch, version)
    assert [row.action for row in report.blocks] == ["fused"]
    name, told = VERSIONS[version]["CACHE"], []
    with mock.patch.object(fusing, "project", wraps=fusing.project) as project, mf.autocast(enabled=False):
        for layer in (plain, fused):
            cache = _Cache()
            for _ in range(2):
                y = layer(x, **{name: cache}, use_cache=True, max_length_q=7, **options)
            told.append((y, *cache.states, cache.told, layer.self_attn.heard))
    assert project.call_count == 2
    for got, want in zip(told[1][:3], told[0][:3], strict=True):
        torch.testing.assert_close(got, want)
    assert told[1][2].shape[-2] == 10
    assert str(told[1][3:]) == str(told[0][3:])  # what the cache and the function of attention are told
    assert ("kwargs" in told[1][3][0][1]) == (version == "new")


def test_arguments_by_position_and_unknown_ones(monkeypatch):
    plain, fused, x, options, _ = _decoder(monkeypatch, "new")
    with mock.patch.object(fusing, "project", wraps=fusing.project) as project, mf.autocast(enabled=False):
        cache, own = _Cache(), _Cache()
        want = plain(x, None, options["position_ids"], own, False, options["position_embeddings"])
        got = fused(x, None, options["position_ids"], cache, False, options["position_embeddings"])
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(cache.states, own.states)
        assert project.call_count == 1
        # An argument of another version: the layer's own forward runs, whatever that does with it.
        for more in ({"compressed_cache": 3}, {"past_key_values": None}):
            torch.testing.assert_close(fused(x, **more, **options), plain(x, **more, **options))
            assert fused.self_attn.heard[-1].keys() >= more.keys()
        with pytest.raises(TypeError, match="multiple values"):
            fused(x, None, attention_mask=None, **options)
        with pytest.raises(TypeError):
            fused(*[x] * 12)
    assert project.call_count == 1


@pytest.mark.parametrize(("version", "named"), [("renamed", "key_value_store"), ("with a gain", "gain")])
def test_a_layer_of_another_version_is_left_alone_and_its_mlp_fused(monkeypatch, version, named):
    plain, fused, x, options, report = _decoder(monkeypatch, version)
    assert {row.name: row.action for row in report.blocks} == {"0": "not fused", "0.mlp": "fused"}
    assert f"'{named}', which the fused form does not know" in report.blocks[0].reason
    more = {named: 2.0} if named == "gain" else {}
    with mf.autocast(enabled=False):
        torch.testing.assert_close(fused(x, **more, **options), plain(x, **more, **options))


def test_a_replaced_function_or_norm_of_the_package_is_not_passed_over(monkeypatch):
    *_, report = _decoder(monkeypatch, "new")
    module = sys.modules["transformers.models.llama.modeling_llama"]

    def rotary(q, k, cos, sin, unsqueeze_dim=1):
        return q * cos.unsqueeze(unsqueeze_dim), k.clone()

    def unscaled(self, hidden_states):
        return torch.nn.functional.rms_norm(hidden_states, (32,))

    for owner, name, value in ((module, "apply_rotary_pos_emb", rotary), (module.LlamaRMSNorm, "forward", unscaled)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            report = mf.convert(nn.ModuleList([module.LlamaDecoderLayer()]), "mxfp8", fuse=True)
        assert report.blocks[0].action == "not fused"
        assert value.__qualname__ in report.blocks[0].reason
