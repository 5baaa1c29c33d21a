"""Attention: a function in its place, and packed sequences."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.torch.nn import sdpa as attention  # noqa: E402
from microfloat.torch.nn.sdpa import attend  # noqa: E402


def _sink_reference(q, k, v, seen, offset, bias=0.0):
    """A softmax with one more score, in float64; `seen` [.., S, S']."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    weights = weights / (offset.double().exp()[:, None, None] + weights.sum(-1, keepdim=True))
    return torch.einsum("bhst,bthd->bshd", weights, v.double())


def sunk(q, k, v, *, causal, mask, window, dropout):
    """Attention by plain operations, with the score 0 in every softmax, to which no value belongs."""
    assert mask is None
    assert dropout == 0.0
    shared = q.shape[2] // k.shape[2]
    k, v = (one.repeat_interleave(shared, 2) for one in (k, v))
    at, of = torch.arange(k.shape[1])[-q.shape[1] :, None], torch.arange(k.shape[1])
    seen = (of <= at) & (of > at - window) if causal else torch.ones_like(of <= at)
    scores = torch.einsum("bshd,bthd->bhst", q, k) / q.shape[-1] ** 0.5
    scores = torch.nn.functional.pad(scores.masked_fill(~seen, float("-inf")), (0, 1))
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1)[..., :-1], v)


class Sinks(nn.Module):
    """A softmax with one more score for each head."""

    def __init__(self, heads):
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(heads))

    def reset_parameters(self):
        nn.init.zeros_(self.sinks)

    def forward(self, q, k, v, *, causal, **others):
        seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(k.shape[1] - q.shape[1]) if causal else True
        scores = torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))
        scores = (scores / q.shape[-1] ** 0.5).masked_fill(~torch.as_tensor(seen), float("-inf"))
        sink = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        return torch.einsum("bhst,bthd->bshd", weights, v.repeat_interleave(q.shape[2] // v.shape[2], 2))


def test_a_function_takes_the_place_of_attention():
    torch.manual_seed(0)
    layer, x = mf.TransformerLayer(32, 48, 4, 2, window=4, attention=sunk, recipe="fp8_row"), torch.randn(2, 6, 32)
    part = layer.self_attn
    h = layer.input_layernorm(x)
    q, k, v = (proj(h).unflatten(-1, (-1, 8)) for proj in (part.q_proj, part.k_proj, part.v_proj))
    seen = torch.ones(6, 6, dtype=torch.bool).tril().triu(-3)
    want = part.o_proj(_sink_reference(q, k, v, seen, torch.zeros(4)).flatten(-2).float())
    torch.testing.assert_close(part(x, norm=layer.input_layernorm), want, rtol=1e-2, atol=1e-3)  # casts of o_proj
    layer(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in layer.parameters())
    assert layer.state_dict().keys() == mf.TransformerLayer(32, 48, 4, 2).state_dict().keys()


def test_a_module_in_the_place_of_attention_is_a_child():
    torch.manual_seed(0)
    layer, x = mf.MultiheadAttention(32, 4, 2, attention=Sinks(4)), torch.randn(2, 6, 32)
    assert "attention.sinks" in layer.state_dict()
    nn.init.normal_(layer.attention.sinks)
    q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (layer.q_proj, layer.k_proj, layer.v_proj))
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    want = layer.o_proj(_sink_reference(q, k, v, seen, layer.attention.sinks).flatten(-2).float())
    torch.testing.assert_close(layer(x), want, rtol=1e-4, atol=1e-5)
    layer(x).square().sum().backward()
    assert layer.attention.sinks.grad.abs().min() > 0
    cache = mf.KVCache(2, 8, 2, 8)
    with torch.no_grad():
        pieces = [layer(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x), rtol=1e-4, atol=1e-5)
    layer.reset_parameters()
    assert not layer.attention.sinks.any()


def test_a_function_is_told_what_the_call_was():
    told = []

    def told_of(q, k, v, **options):
        told.append(options)
        return q

    layer = mf.MultiheadAttention(16, 2, attention=told_of, window=3, options=mf.LayerOptions(dropout=0.25))
    packed, mask = {"cu_seqlens": torch.tensor([0, 2, 5]), "max_seqlen": 3}, torch.ones(1, 5)
    layer(torch.randn(5, 16), **packed)
    layer.eval()(torch.randn(1, 5, 16), attention_mask=mask, context=torch.randn(1, 5, 16))
    assert told == [
        {"causal": True, "mask": None, "window": 3, "dropout": 0.25, **packed},
        {"causal": False, "mask": mask, "window": 3, "dropout": 0.0},
    ]
    with pytest.raises(InvalidTypeError, match="attention: got str, needed a function of q, k and v"):
        mf.MultiheadAttention(16, 2, attention="flex")


def test_cross_attention_stays_that_of_torch():
    layer = mf.TransformerLayer(
        16, 24, 2, attention=lambda q, k, v, **options: q, options=mf.LayerOptions(cross_attention=True)
    )
    assert layer.cross_attn.attention is None
    assert layer(torch.randn(1, 3, 16), context=torch.randn(1, 5, 16)).shape == (1, 3, 16)


def test_flash_attention_is_not_for_transforms_of_torch_func():
    """Its autograd function, and torch's operator, have no rule for them."""
    x, asked = types.SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, shape=(1, 3, 2, 8)), []

    def ask(one):
        asked.append(attention.is_for_flash(x, x, 0.0))
        return one.sum()

    torch.func.grad(ask)(torch.ones(2))
    assert asked == [False]
    assert attention.is_for_flash(x, x, 0.0)
    assert not attention.is_for_flash(x, x, 0.5)


ENDS = torch.tensor([0, 3, 8])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_seqlen": 5}, "max_seqlen: got 5 without cu_seqlens, needed None, or both"),
        ({"cu_seqlens": ENDS}, "cu_seqlens: .* ascend from 0 to 10, the number of tokens"),
        ({"cu_seqlens": torch.tensor([0, 12, 10])}, "cu_seqlens: .* ascend from 0 to 10"),
        ({"cu_seqlens": [0, 10]}, "cu_seqlens: got list"),
        ({"cu_seqlens": ENDS.float()}, "cu_seqlens: got dtype torch.float32"),
        ({"cu_seqlens": ENDS[:0]}, r"cu_seqlens: got shape \(0,\)"),
    ],
)  # fmt: skip
def test_what_is_said_of_sequences_is_not_ignored(options, match):
    q, x = torch.randn(1, 10, 2, 8), torch.randn(10, 16)
    calls = [
        lambda: attend(q, q, q, **options),
        lambda: mf.MultiheadAttention(16, 2)(x, **options),
        lambda: mf.TransformerLayer(16, 24, 2)(x, **options),
    ]
    for call in calls:
        with pytest.raises((InvalidTypeError, InvalidValueError), match=match):
            call()


@pytest.mark.gpu
def test_transforms_of_torch_func_take_packed_sequences_on_a_gpu():
    torch.manual_seed(0)
    q, k = (torch.randn(1, 9, heads, 8, device="cuda").bfloat16() for heads in (4, 2))
    options = {"causal": True, "cu_seqlens": torch.tensor([0, 4, 9]).cuda()}

    def loss(q):
        return attend(q, k, k, **options).float().square().sum()

    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    got = torch.func.grad(loss)(q)
    # bfloat16 keeps 8 bits of weights, values and results: some units of 2^-9 of the largest value.
    assert (got - want).abs().max() < 2**-6 * want.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 3])
def test_packed_sequences_of_flash_attention_are_those_of_float32(window):
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 12, heads, 8) for heads in (4, 2, 2))
    options = {"causal": True, "window": window, "cu_seqlens": torch.tensor([0, 5, 5, 12])}
    want = attend(q, k, v, **options)
    moved = [one.bfloat16().cuda() for one in (q, k, v)]
    y = attend(*moved, **{**options, "cu_seqlens": options["cu_seqlens"].cuda()})
    assert (y.float().cpu() - want).abs().max() < 2**-6 * want.abs().max()
