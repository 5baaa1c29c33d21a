"""Attention: sinks, and packed sequences with tokens between them."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.torch import attention  # noqa: E402
from microfloat.torch.attention import attend  # noqa: E402


def _sink_reference(q, k, v, seen, offset, bias=0.0):
    """A softmax with one more score, in float64; `seen` [.., S, S']."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) / q.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~seen, float("-inf")).exp()
    weights = weights / (offset.double().exp()[:, None, None] + weights.sum(-1, keepdim=True))
    return torch.einsum("bhst,bthd->bshd", weights, v.double())


def _sinks_of(case):
    """q, k and v, options of `attend`, which tokens are seen [.., S, S'], and what is added to scores."""
    batch, length, other, options, bias = 2, 12, 12, {"causal": True}, 0.0
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    if case == "window":
        options["window"], seen = 3, seen.triu(-2)
    if case == "padding":
        options["mask"] = torch.arange(12)[None] < torch.tensor([[12], [7]])
        seen = seen & options["mask"][:, None, None]
    if case == "added":
        options["mask"] = bias = torch.randn(1, 4, 12, 12)
    if case == "later":
        length, seen = 5, torch.ones(5, 12, dtype=torch.bool).tril(7)
    if case in ("packed", "gaps"):
        batch, ids = 1, torch.tensor([0] * 5 + [2] * 7)
        options["cu_seqlens"] = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
        if case == "gaps":
            options["cu_seqlens"] = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
            options["cu_seqlens_padded"] = torch.tensor([0, 4, 5, 11], dtype=torch.int32)
            ids = torch.tensor([0] * 3 + [-1, -2] + [2] * 6 + [-3])
        seen = seen & (ids[:, None] == ids) & (ids >= 0)
    return [torch.randn(batch, n, h, 8) for n, h in ((length, 4), (other, 2), (other, 2))], options, seen, bias


@pytest.mark.parametrize("case", ["causal", "window", "padding", "added", "later", "packed", "gaps"])
def test_a_sink_takes_its_share_of_every_softmax(case):
    torch.manual_seed(0)
    parts, options, seen, bias = _sinks_of(case)
    leaves = [part.requires_grad_() for part in (*parts, torch.tensor([-2.0, 0.0, 1.0, 3.0]))]
    *qkv, offset = leaves
    y, want = attend(*qkv, softmax_offset=offset, **options), _sink_reference(*qkv, seen, offset, bias)
    # Products of 8 and of 12 terms of float32: far within 2^-16 of the values, which are below 4.
    assert torch.allclose(y.double(), want, atol=2**-14)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    got, wanted = (torch.autograd.grad((x * dy).sum(), leaves) for x in (y, want))
    for one, other in zip(got, wanted, strict=True):
        assert torch.allclose(one, other, atol=2**-14)


def test_an_autocast_does_not_round_the_scores_of_a_sink():
    torch.manual_seed(0)
    q, k, offset = torch.randn(1, 9, 4, 8), torch.randn(1, 9, 2, 8), torch.randn(4)
    want = attend(q, k, k, causal=True, softmax_offset=offset)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(attend(q, k, k, causal=True, softmax_offset=offset), want)
    on_meta = [one.to("meta") for one in (q, k, k)]  # for which there is no autocast
    assert attend(*on_meta, causal=True, softmax_offset=offset.to("meta")).shape == q.shape


def test_sinks_have_the_scale_and_the_dropout_that_are_given():
    torch.manual_seed(0)
    q, offset = torch.randn(1, 6, 2, 8), torch.ones(2)
    want = attend(q * 0.5, q, q, softmax_offset=offset)
    torch.testing.assert_close(attend(q, q, q, scale=0.5 * 8**-0.5, softmax_offset=offset), want)
    assert not attend(q, q, q, softmax_offset=offset, dropout=1.0).any()


def test_sinks_of_float16_are_rounded_once():
    """Scores of 4096 and 4097: float16 has steps of 4 there, and both would have the same weight."""
    q = torch.tensor([64.0, 1.0]).half().view(1, 1, 1, 2)
    k = torch.tensor([[64.0, 0.0], [64.0, 1.0]]).half().view(1, 2, 1, 2)
    v = torch.tensor([[0.0, 0.0], [1.0, 0.0]]).half().view(1, 2, 1, 2)
    y = attend(q, k, v, scale=1.0, softmax_offset=torch.zeros(1))
    assert y[..., 0].item() == torch.tensor(1.0).sigmoid().half().item()


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


@pytest.mark.parametrize("softmax_type", ["vanilla", "off-by-one", "learnable"])
def test_layers_have_the_softmax_of_their_name(softmax_type):
    torch.manual_seed(0)
    options = {"softmax_type": softmax_type, "cross_attention": True, "window": 4}
    layer = mf.TransformerLayer(32, 48, 4, 2, **options)
    keys = ["self_attn.softmax_offset", "cross_attn.softmax_offset"]
    learned = [key for key in layer.state_dict() if "softmax" in key]
    assert sorted(learned) == (sorted(keys) if softmax_type == "learnable" else [])
    assert ("softmax_type" in repr(layer.self_attn)) == (softmax_type != "vanilla")
    x, context, heads = torch.randn(2, 6, 32), torch.randn(2, 3, 32), torch.zeros(4)
    if softmax_type == "learnable":
        heads = nn.init.normal_(layer.self_attn.softmax_offset).detach().clone()
    attention = layer.self_attn
    q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj))
    seen = torch.ones(6, 6, dtype=torch.bool).tril().triu(-3)
    offset = heads if softmax_type != "vanilla" else torch.full((4,), -float("inf"))
    want = attention.o_proj(_sink_reference(q, k, v, seen, offset).flatten(-2).float())
    torch.testing.assert_close(attention(x), want, rtol=1e-4, atol=1e-5)
    layer(x, context=context).square().sum().backward()
    if softmax_type == "learnable":
        assert all(layer.get_parameter(key).grad.abs().min() > 0 for key in keys)
        layer.reset_parameters()
        assert not any(layer.get_parameter(key).any() for key in keys)


def test_a_cache_and_sinks_give_the_outputs_of_the_whole():
    torch.manual_seed(0)
    layer = mf.MultiheadAttention(32, 4, 2, softmax_type="learnable", window=3)
    nn.init.normal_(layer.softmax_offset)
    x, cache = torch.randn(2, 6, 32), mf.KVCache(2, 8, 2, 8)
    with torch.no_grad():
        pieces = [layer(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
        torch.testing.assert_close(torch.cat(pieces, 1), layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [None, "fp8_row"])
def test_tokens_between_packed_sequences_belong_to_none(name):
    torch.manual_seed(0)
    layer = mf.TransformerLayer(32, 48, 4, 2, cross_attention=True, window=3, recipe=name)
    x, context = torch.randn(9, 32), torch.randn(7, 32)
    want = layer(x, context=context, cu_seqlens=torch.tensor([0, 3, 3, 9]), cu_seqlens_kv=torch.tensor([0, 2, 6, 7]))
    at, of = torch.tensor([0, 1, 2, 5, 6, 7, 8, 9, 10]), torch.tensor([0, 1, 2, 3, 4, 5, 8])
    spread, other = torch.full((13, 32), 5.0), torch.full((9, 32), -5.0)
    spread[at], other[of] = x, context
    leaves = spread.requires_grad_(), other.requires_grad_()
    options = {
        "cu_seqlens": torch.tensor([0, 3, 3, 9]), "cu_seqlens_padded": torch.tensor([0, 4, 5, 12]), "max_seqlen": 6,
        "cu_seqlens_kv": torch.tensor([0, 2, 6, 7]), "cu_seqlens_kv_padded": torch.tensor([0, 2, 8, 9]),
    }  # fmt: skip
    y = layer(leaves[0], context=leaves[1], **options)
    torch.testing.assert_close(y[at], want, rtol=1e-4, atol=1e-5)
    y[at].square().sum().backward()
    for leaf, used in zip(leaves, (at, of[[0, 1, 6]]), strict=True):  # no token sees the second sequence of the context
        assert leaf.grad[used].abs().sum(1).min() > 0
        leaf.grad[used] = 0
        assert not leaf.grad.any()
    q = torch.randn(1, 13, 4, 8)
    ends = {key: options[key] for key in ("cu_seqlens", "cu_seqlens_padded")}
    y = attend(q, q, q, **ends)[0]
    y[at] = 0
    assert not y.any()
    q[0, 4] = float("nan")  # of no sequence
    y = attend(q.requires_grad_(), q, q, **ends)
    y.sum().backward()
    assert y.isfinite().all()
    assert q.grad.isfinite().all()


def test_a_row_without_sequences_is_all_padding():
    none, x = torch.zeros(1, dtype=torch.int32), torch.randn(1, 3, 2, 8)
    assert not attend(x, x, x, cu_seqlens=none, cu_seqlens_padded=none, max_seqlen=0).any()
    assert attend(x[:, :0], x[:, :0], x[:, :0], cu_seqlens=none, max_seqlen=0).shape == (1, 0, 2, 8)


def test_gaps_are_left_out_with_the_sequence_before_them():
    torch.manual_seed(0)
    layer = mf.TransformerLayer(16, 24, 2, drop_path_rate=0.5, parallel=True)  # one draw
    ends = {"cu_seqlens": torch.arange(0, 193, 3), "cu_seqlens_padded": torch.arange(0, 257, 4)}
    x = torch.randn(258, 16)  # two more tokens behind the last gap
    made = layer(x, **ends) - x
    is_left = (made == 0).all(1)
    assert torch.equal(is_left[:256].view(64, 4).all(1), is_left[:256].view(64, 4).any(1))
    assert is_left[-2:].all() == is_left[255]
    assert 0 < int(is_left.sum()) < 258


def test_a_path_is_dropped_of_sequences_alone():
    layer, x = mf.TransformerLayer(16, 24, 2, drop_path_rate=0.5), torch.randn(4, 16)
    none = torch.zeros(1, dtype=torch.int32)
    assert layer(x, cu_seqlens=none, cu_seqlens_padded=none).shape == x.shape
    with pytest.raises(InvalidTypeError, match="cu_seqlens: got list"):
        layer(x, cu_seqlens=[0, 4])


HEADS = [torch.ones(1, 3, 2, 8)] * 3
ENDS, GAPS = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 10])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_seqlen": 5}, "max_seqlen: got 5 without cu_seqlens, needed None, or both"),
        ({"cu_seqlens": ENDS, "max_seqlen_kv": 5}, "max_seqlen_kv: got 5"),
        ({"cu_seqlens_padded": GAPS}, "cu_seqlens_padded: got a tensor without cu_seqlens"),
        ({"cu_seqlens_kv": ENDS}, "cu_seqlens_kv: got a tensor without c"),
        ({"cu_seqlens": ENDS, "cu_seqlens_kv_padded": GAPS}, "cu_seqlens_kv_padded: got "),
        ({"cu_seqlens": ENDS}, "cu_seqlens: .* ascend from 0 to 10, the number of tokens"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": GAPS[:2]}, "cu_seqlens_padded: got 2 numbers, needed 3"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": torch.tensor([0, 4, 11])}, "padded: .* 0 to at most 10"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": torch.tensor([0, 2, 10])}, "padded: .* as far apart as"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": torch.tensor([1, 4, 10])}, "padded: .* numbers from 0"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": [0, 4, 10]}, "cu_seqlens_padded: got list"),
        ({"cu_seqlens": torch.tensor([0, 12, 10])}, "cu_seqlens: .* ascend from 0 to 10"),
        ({"cu_seqlens": ENDS[:0]}, r"cu_seqlens: got shape \(0,\)"),
        ({"cu_seqlens": ENDS, "cu_seqlens_padded": GAPS.bool()}, "cu_seqlens_padded: got dtype torch.bool"),
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
        with pytest.raises((InvalidTypeError, InvalidValueError), match=match if "kv" not in match else match[:13]):
            call()


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mf.MultiheadAttention(8, 2, softmax_type="sink"), "softmax_type: .*learnable"),
        (lambda: mf.TransformerLayer(8, 8, 2, softmax_type=None), "softmax_type: got NoneType"),
        (lambda: attend(*HEADS, softmax_offset=torch.ones(3)), r"softmax_offset: got shape \(3,\)"),
        (lambda: attend(*HEADS, softmax_offset=1.0), "softmax_offset: got float"),
    ],
)  # fmt: skip
def test_errors_name_the_softmax(call, match):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=match):
        call()


def test_a_rank_with_some_of_the_heads_needs_their_offsets():
    layer = mf.MultiheadAttention(16, 4, softmax_type="learnable")
    for name in "qkv":
        setattr(layer, f"{name}_proj", mf.Linear(16, 8, False))  # two heads, as ColwiseParallel leaves on a rank
    layer.o_proj = mf.Linear(8, 16, False)
    with pytest.raises(InvalidValueError, match=r"softmax_offset: got 4 numbers for 2 heads.*Shard\(0\)"):
        layer(torch.randn(1, 3, 16))
    layer.softmax_type = "off-by-one"  # zeros for whichever heads there are
    assert layer(torch.randn(1, 3, 16)).shape == (1, 3, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("ends", [None, torch.tensor([0, 4, 9])])
def test_transforms_of_torch_func_take_sinks_and_packed_sequences_on_a_gpu(ends):
    torch.manual_seed(0)
    q, k, offset = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((1, 9, 4, 8), (1, 9, 2, 8), (4,)))
    options = {"causal": True, "softmax_offset": offset, "cu_seqlens": None if ends is None else ends.cuda()}

    def loss(q):
        return attend(q, k, k, **options).float().square().sum()

    leaf = q.clone().requires_grad_()
    (want,) = torch.autograd.grad(loss(leaf), leaf)
    got = torch.func.grad(loss)(q)
    assert (got - want).abs().max() < 2**-6 * want.abs().max()  # as below


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["causal", "window", "later", "packed", "gaps", "padding"])
def test_sinks_of_flash_attention_are_those_of_the_definition(case):
    torch.manual_seed(0)
    parts, options, seen, _ = _sinks_of(case)
    options = {key: one.cuda() if isinstance(one, torch.Tensor) else one for key, one in options.items()}
    if case == "gaps":
        options["max_seqlen"] = 6
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    leaves = [part.to(**bf16).detach().requires_grad_() for part in parts]
    leaves.append(torch.tensor([-2.0, 0.0, 1.0, 3.0], device="cuda", requires_grad=True))
    *qkv, offset = leaves
    y, want = attend(*qkv, softmax_offset=offset, **options), _sink_reference(*qkv, seen.cuda(), offset)
    assert y.dtype == torch.bfloat16
    dy = torch.linspace(-1, 1, y.numel(), device="cuda").view(y.shape)
    got, wanted = (torch.autograd.grad((x * dy).sum(), leaves) for x in (y, want))
    for one, other in zip((y, *got), (want, *wanted), strict=True):
        # bfloat16 keeps 8 bits of weights, values and results: some units of 2^-9 of the largest value.
        assert (one.double() - other.double()).abs().max() < 2**-6 * other.double().abs().max()
