"""convert, revert, Placement on models, plain_state_dict, quantized_model_init."""

import contextlib
import copy
import functools
import pickle

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrizations, parametrize  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError, PlacementError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    CustomRecipe,
    DelayedScaling,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Placement,
)
from microfloat.torch.nn import functional as fused  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3))
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.special = nn.Bilinear(32, 32, 32)
        self.lm_head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.lm_head(x)


def test_convert_is_in_place_and_shares_parameters() -> None:  # features M10
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layer, weight = model.blocks[0][0], model.blocks[0][0].weight
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    report = mf.convert(model, MXFP8BlockScaling())
    assert model.blocks[0][0] is layer
    assert type(layer) is mf.Linear
    assert layer.weight is weight
    assert report.converted == [f"blocks.{block}.{index}" for block in range(3) for index in (0, 2)]
    assert "lm_head" in report.skipped["lm_head"]
    assert "without calling it" in report.skipped["attention.out_proj"]
    assert "6 of 8 linear layers" in str(report) == repr(report)  # a notebook shows its last value by repr
    before = weight.detach().clone()
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    assert calls == [1]
    assert not torch.equal(weight, before)


def test_revert_gives_nn_linear_back() -> None:
    model = Model()
    x = torch.randn(4, 32)
    expected, keys = model(x), set(model.state_dict())
    mf.convert(model, DelayedScaling())
    assert set(model.state_dict()) > keys
    assert not torch.equal(model(x), expected)
    assert mf.revert(model) is model
    assert set(model.state_dict()) == keys
    assert all(type(module) is not mf.Linear for module in model.modules())
    assert torch.equal(model(x), expected)


def test_revert_between_backward_and_the_next_step() -> None:
    model = Model()
    mf.convert(model, DelayedScaling())
    with mf.autocast(recipe=DelayedScaling()):
        y = model(torch.randn(4, 32))
    y.sum().backward()  # records dy; its update would run when the next autocast is entered
    mf.revert(model)
    with mf.autocast(recipe=DelayedScaling()):
        model(torch.randn(4, 32)).sum().backward()
    mf.convert(model, DelayedScaling())
    assert model.blocks[0][0].scaling_dy_scale == 1
    assert not model.blocks[0][0].scaling_dy_amax_history.any()


def test_one_gemm_of_a_converted_layer_is_switched() -> None:
    """features S13: at run time, with a report that says which pattern decided; the layer's gradient is exact then."""
    model, recipe = Model(), MXFP8BlockScaling()
    mf.convert(model, recipe)
    report = mf.convert(model, Placement([("blocks.1.*:wgrad", None)]))
    rows = {row.name: row for row in report}
    assert rows["blocks.0.0"].action == "kept"
    assert model.blocks[0][0].pinned == recipe
    assert rows["blocks.1.0"].reason == "wgrad: high precision by 'blocks.1.*:wgrad'"
    assert "wgrad: high precision by 'blocks.1.*:wgrad'" in str(report)
    layer = model.blocks[1][0]
    assert layer.pinned == CustomRecipe(recipe.fprop, recipe.dgrad, Gemm(None, None))
    x, dy = torch.randn(8, 32), torch.randn(8, 64)
    layer(x).backward(dy)
    torch.testing.assert_close(layer.weight.grad, dy.T @ x)
    with pytest.raises(PlacementError, match=r"'blocks\.7\.\*:wgrad'"):
        mf.convert(model, Placement([("blocks.7.*:wgrad", None)]))


def test_placement_first_match_wins_and_none_is_high_precision() -> None:
    model = Model()
    placement = Placement([("blocks.0.*", None), ("re:blocks\\.1\\..*", NVFP4BlockScaling()), ("blocks.*", "x")][:2]
                          + [("blocks.*", MXFP8BlockScaling())])  # fmt: skip
    report = mf.convert(model, placement)
    assert type(model.blocks[0][0]) is nn.Linear
    assert model.blocks[1][0].pinned == NVFP4BlockScaling()
    assert model.blocks[2][2].pinned == MXFP8BlockScaling()
    assert report.skipped["blocks.0.0"] == "the placement says None"
    again = mf.convert(model, Placement([("blocks.1.0", None), ("blocks.*", MXFP8BlockScaling())]))
    assert model.blocks[1][0].pinned is None
    assert {row.action for row in again if row.name == "blocks.2.0"} == {"repinned"}
    assert {row.action for row in again if row.name == "blocks.0.0"} == {"converted"}


def test_a_dictionary_is_a_placement_of_its_rules_in_their_order() -> None:
    rules = {"blocks.0.*": None, "blocks.1.*": "nvfp4", "blocks.*": MXFP8BlockScaling()}
    model, other = Model(), Model()
    assert list(mf.convert(model, rules)) == list(mf.convert(other, Placement(list(rules.items()))))
    assert model.blocks[1][0].pinned == NVFP4BlockScaling()
    for refused, match in (({}, "rules: got none"), ({"block.*": None}, "match no layer"), ({"*": "x"}, "got 'x'")):
        with pytest.raises(ValueError, match=match):
            mf.convert(Model(), refused)


def test_pattern_without_match_is_an_error_and_changes_nothing() -> None:
    model = Model()
    with pytest.raises(PlacementError, match=r"encoder\.\*"):
        mf.convert(model, Placement([("blocks.*", MXFP8BlockScaling()), ("encoder.*", None)]))
    assert all(type(module) is not mf.Linear for module in model.modules())


def test_filter_exclude_subclasses_and_root() -> None:
    model = Model()
    report = mf.convert(model, "mxfp8", filter=lambda name, module: module.in_features == 32, exclude=())
    assert report.converted == ["blocks.0.0", "blocks.1.0", "blocks.2.0", "lm_head"]

    class Special(nn.Linear):
        pass

    holder = nn.Sequential(Special(4, 4), nn.Linear(4, 4))
    report = mf.convert(holder, "mxfp8")
    assert report.converted == ["1"]
    assert "subclass" in report.skipped["0"]
    root = nn.Linear(8, 8)
    assert mf.convert(root, "mxfp8").converted == [""]
    assert type(root) is mf.Linear


class WrittenOut(nn.Linear):
    def forward(self, input):
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states + self.bias


class Scaled(nn.Linear):
    def forward(self, input):
        hidden_states = input @ self.weight.T
        if self.bias is None:
            return hidden_states
        return hidden_states * self.bias


class Normed(nn.Linear):
    forward = WrittenOut.forward

    def extra_repr(self):
        return "normed"


@pytest.mark.parametrize("bias", [True, False])
def test_a_subclass_that_writes_the_product_out_is_converted_and_comes_back(bias) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(WrittenOut(48, 32, bias), nn.GELU(), WrittenOut(32, 16, bias)), torch.randn(4, 48)
    same = nn.Sequential(nn.Linear(48, 32, bias), nn.GELU(), nn.Linear(32, 16, bias))
    same.load_state_dict(model.state_dict())
    mf.convert(same, "mxfp8")
    assert mf.convert(model, "mxfp8").converted == ["0", "2"]
    model = pickle.loads(pickle.dumps(model))
    for one in (model, same):
        one(x).square().sum().backward()
    assert torch.equal(model(x), same(x))
    assert torch.equal(model[0].weight.grad, same[0].weight.grad)
    assert model.state_dict().keys() == same.state_dict().keys()
    mf.revert(model)
    assert [type(one) for one in model] == [WrittenOut, nn.GELU, WrittenOut]
    assert not {"_original", "_pinned"} & vars(model[0]).keys()
    assert mf.quantize_(model, mf.WeightOnly("mxfp8")).converted == ["0", "2"]


@pytest.mark.parametrize("kind", [Scaled, Normed])
def test_other_subclasses_are_told_the_way_out(kind) -> None:
    with pytest.raises(InvalidValueError, match=f"{kind.__name__} is a subclass .*derive it from"):
        mf.convert(nn.Sequential(kind(48, 32)), "mxfp8")


@pytest.mark.parametrize(
    ("model", "recipe", "options", "words"),
    [
        (torch.ones(2), "mxfp8", {}, "Module"),
        (nn.Linear(2, 2), None, {}, "Recipe"),
        (None, "mxfp8", {}, "model: got NoneType"),
        (nn.Linear, "mxfp8", {}, "model: got the class Linear.*instance"),
        (nn.Linear(2, 2), "mxfp8", {"exclude": "lm_head"}, "sequence"),
        (nn.Linear(2, 2), "mxfp8", {"exclude": 3}, r"^exclude: got int.*exclude=\(\)"),
        (nn.Linear(2, 2), "mxfp8", {"exclude": [3]}, "^exclude: got 3 in it"),
        (nn.Linear(2, 2), "mxfp8", {"exclude": None}, r"^exclude: got NoneType.*exclude=\(\)"),
        (nn.Linear(2, 2), "mxfp8", {"exclude": lambda name, module: True}, "^exclude: .*filter="),
        (nn.Linear(2, 2), "mxfp8", {"filter": "x"}, "callable"),
        (nn.Linear(2, 2), "mxfp8", {"filter": ["x"]}, "^filter: .*exclude="),
        (
            nn.Linear(2, 2),
            "mxfp8",
            {"filter": lambda module, name: module.in_features > 3},
            "^filter: .*name comes first",
        ),
        (nn.Linear(2, 2), "mxfp8", {"filter": lambda name: True}, "^filter: .*name comes first"),
        (nn.Linear(2, 2), "mxfp8", {"filter": lambda mod, fqn: fqn != "output"}, "^filter: .*name comes first"),
    ],
)
def test_bad_arguments(model, recipe, options, words) -> None:
    with pytest.raises(InvalidTypeError, match=words):
        mf.convert(model, recipe, **options)


def test_other_bad_arguments() -> None:
    for verb in (mf.plain_state_dict, mf.revert):
        for wrong in (None, nn.Linear, "x"):
            with pytest.raises(InvalidTypeError, match=r"^model: "):
                verb(wrong)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(InvalidTypeError, match=r"^filter: "):
        mf.convert(model, "mxfp8", filter=lambda name, module: name == "0" or name.weight)
    assert type(model[0]) is nn.Linear  # not half of it


def test_fused_encoder_path_does_not_bypass_converted_layers() -> None:
    encoder = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        plain = encoder(x)
        mf.convert(encoder, NVFP4BlockScaling())
        converted = encoder(x)
        mf.revert(encoder)
        assert not torch.equal(converted, plain)
        assert torch.equal(encoder(x), plain)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_an_encoder_passes_no_nested_tensors_to_converted_layers() -> None:
    """torch packs padded batches into nested tensors in inference."""
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, dropout=0.0)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 32)
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        plain = encoder(x, src_key_padding_mask=padding)
        mf.convert(encoder, "mxfp8")
        converted = encoder(x, src_key_padding_mask=padding)
        assert not torch.equal(converted[~padding], plain[~padding])
        mf.revert(encoder)
        assert torch.equal(encoder(x, src_key_padding_mask=padding), plain)


LEFT_ALONE = (
    "lm_head", "model.lm_head", "lm_head.dense", "embed_out", "classifier", "score", "output", "module.output",
    "cls.predictions.decoder", "router", "router.classifier", "layers.1.ffn.router.layer", "layers.0.mlp.gate",
    "layers.0.mlp.shared_expert_gate", "q_proj.lora_A.default", "q_proj.lora_B", "layers.0.lora_a",
)  # fmt: skip
CONVERTED = (
    "layers.0.mlp.gate_proj", "layers.0.mlp.gate_up_proj", "layer.0.output.dense", "layers.0.attention.output",
    "q_proj.base_layer", "score_proj", "layers.0.gated",
)  # fmt: skip


@pytest.mark.parametrize("name", [*LEFT_ALONE, *CONVERTED])
def test_heads_routers_and_adapters_are_excluded_by_default(name: str) -> None:
    model = nn.Module()
    *path, last = name.split(".")
    parent = model
    for part in path:
        parent.add_module(part, nn.Module())
        parent = getattr(parent, part)
    parent.add_module(last, nn.Linear(4, 4))
    model.add_module("beside", nn.Linear(4, 4))
    assert set(mf.convert(model, "mxfp8").converted) == {"beside", *([] if name in LEFT_ALONE else [name])}
    assert set(mf.convert(model, "mxfp8", exclude=()).converted) == {"beside", name}


def test_the_gate_of_a_gated_mlp_is_no_router() -> None:
    """A `gate` beside an `up` of its shape is converted; one of another shape is a router, and so is what one names."""

    def block(rows: int, up: str) -> nn.Module:
        return nn.ModuleDict({"gate": nn.Linear(8, rows), up: nn.Linear(8, 32), "down": nn.Linear(32, 8)})

    model = nn.ModuleDict({"mlp": block(32, "up"), "other": block(32, "up_proj"), "moe": block(4, "up")})
    report = mf.convert(model, "mxfp8")
    assert list(report.skipped) == ["moe.gate"]
    assert mf.convert(block(32, "up"), "mxfp8").skipped == {}
    assert list(mf.convert(block(32, "up"), "mxfp8", exclude=("gate",)).skipped) == ["gate"]


def test_tied_and_parametrized_layers() -> None:
    embedding, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = embedding.weight
    model = nn.ModuleDict({"embedding": embedding, "head": head})
    mf.convert(model, "mxfp8", exclude=())
    assert model["head"].weight is model["embedding"].weight
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    report = mf.convert(normed, "mxfp8")
    assert report.converted == [""]


def test_deepcopy_of_a_converted_model_computes_the_same() -> None:
    model = Model()
    mf.convert(model, DelayedScaling(amax_history_len=3))
    model(torch.randn(4, 32)).sum().backward()
    other = copy.deepcopy(model)
    x = torch.randn(4, 32)
    with torch.no_grad():
        assert torch.equal(model(x), other(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("inside", [False, True])
def test_copies_between_two_steps_train_on_as_the_original(copied, inside) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 8)), torch.randn(4, 32)
    mf.convert(model, DelayedScaling(amax_history_len=3))

    def gradients(one, factor):
        one.zero_grad()
        with mf.autocast(recipe="delayed") if inside else contextlib.nullcontext():
            loss = one(x).square().sum() * factor
        loss.backward()
        return [parameter.grad for parameter in one.parameters()]

    gradients(model, 3.0)
    other = copied(model)  # the amaxes of dy are recorded, and not in its scale yet
    for factor in (1.0, 0.3):
        pairs = zip(gradients(model, factor), gradients(other, factor), strict=True)
        assert all(torch.equal(one, same) for one, same in pairs)


# ------------------------------------------------------------------------ layers that others have changed meanwhile

X = torch.randn(4, 64)


def _assert_plain(model: nn.Module) -> None:
    assert torch.equal(model(X), nn.functional.linear(X, model[0].weight, model[0].bias))


def test_a_parametrization_between_convert_and_revert() -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    mf.convert(model, "mxfp4")
    parametrizations.weight_norm(model[0])
    in_mxfp4 = model(X)
    report = mf.convert(model, "mxfp8")
    assert [row.action for row in report] == ["repinned"]
    assert report.share == 1.0
    in_mxfp8, copied = model(X), copy.deepcopy(model)
    assert not torch.equal(in_mxfp4, in_mxfp8)
    mf.revert(model)
    _assert_plain(model)
    assert torch.equal(copied(X), in_mxfp8)  # though both had one class
    for each, kind in ((model, nn.Linear), (copied, mf.Linear)):
        parametrize.remove_parametrizations(each[0], "weight")
        assert type(each[0]) is kind
    assert torch.equal(copied(X), in_mxfp8)


def test_fsdp2_around_each_layer_between_convert_and_revert() -> None:
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    with world_of_one():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        plain = model(X)
        mf.convert(model, "mxfp4")
        in_mxfp4 = model(X)
        for module in (*model, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        assert torch.equal(model(X), in_mxfp4)
        assert mf.convert(model, "mxfp8").converted == ["0", "1"]
        in_mxfp8 = model(X)
        in_mxfp8.sum().backward()
        assert not torch.equal(in_mxfp8, in_mxfp4)
        mf.revert(model)
        assert torch.equal(model(X), plain)
        assert not any(isinstance(module, mf.Linear) for module in model)
        report = mf.convert(model, "mxfp8")
        assert [row.action for row in report] == ["converted", "converted"]
        assert torch.equal(model(X), in_mxfp8)
        model(X).sum().backward()
        assert all(isinstance(module, FSDPModule) for module in model)


def test_ddp_around_a_model_without_other_buffers() -> None:
    """The scaling buffers are left out of DDP's broadcasts, which fail when nothing is left."""
    distributed = torch.distributed
    if not distributed.is_available():
        pytest.skip("this build of torch has no torch.distributed")
    with world_of_one():
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        mf.convert(model, DelayedScaling(amax_history_len=4))
        wrapped = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            wrapped(X).sum().backward()
        assert mf.convert(wrapped, "mxfp8").converted == ["module.0", "module.1"]
        wrapped(X).sum().backward()


class Doubling(mf.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_a_subclass_is_pinned_and_named_by_revert() -> None:
    model = nn.Sequential(Doubling(64, 64))
    assert [row.action for row in mf.convert(model, DelayedScaling())] == ["repinned"]
    with pytest.warns(UserWarning, match=r"revert: .*0 \(Doubling\)"):
        mf.revert(model)
    with mf.autocast(recipe="mxfp8"):
        assert torch.equal(model(X), 2 * nn.functional.linear(X, model[0].weight, model[0].bias))
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def _add_hook(module: nn.Module) -> None:
    """As accelerate's hooks do: `forward` on the instance, the old one beside it."""

    def forward(module, *arguments):
        return module._old_forward(*arguments)

    module._hf_hook, module._old_forward = object(), module.forward
    module.forward = functools.partial(forward, module)


def test_hooks_that_keep_the_forward_beside_their_own() -> None:
    """Layers with accelerate's hooks are converted and reverted, and work when the hooks are taken off."""
    for first in ("hook", "convert"):
        model = nn.Sequential(nn.Linear(64, 64))
        plain = model(X)
        if first == "hook":
            _add_hook(model[0])
        assert mf.convert(model, "mxfp4").converted == ["0"]
        if first == "convert":
            _add_hook(model[0])
        in_mxfp4 = model(X)
        assert not torch.equal(in_mxfp4, plain)
        mf.revert(model)
        assert torch.equal(model(X), plain)
        mf.convert(model, "mxfp4")
        assert torch.equal(model(X), in_mxfp4)
        del model[0]._hf_hook
        model[0].forward = model[0].__dict__.pop("_old_forward")
        assert torch.equal(model(X), in_mxfp4)
        mf.revert(model)
        assert torch.equal(model(X), plain)


def test_a_forward_replaced_on_the_instance() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    inner = model[0].forward
    model[0].forward = lambda x: inner(x) + 1
    assert "replaced on the instance" in mf.convert(model, "mxfp4").skipped["0"]
    model = nn.Sequential(nn.Linear(64, 64))
    mf.convert(model, "mxfp4")
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) + 1
    with pytest.warns(UserWarning, match="revert: .*forward replaced"):
        mf.revert(model)
    assert torch.equal(model(X), nn.functional.linear(X, model[0].weight, model[0].bias) + 1)


def test_what_a_second_convert_leaves_out_is_not_called_skipped() -> None:
    model = nn.ModuleDict({"up": nn.Linear(64, 64), "lm_head": nn.Linear(64, 64)})
    mf.convert(model, "mxfp4", exclude=())
    report = mf.convert(model, "mxfp8")
    assert [(row.name, row.action) for row in report] == [("up", "repinned"), ("lm_head", "kept")]
    assert report.converted == ["up", "lm_head"]
    assert report.skipped == {}
    assert "MXFP4BlockScaling" in str(report)


# ------------------------------------------------------------------------------------------------------- the report


class Conv1D(nn.Module):
    """As transformers has it: the weight is [in, out]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 128))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(8, 64, 128))
        self.position = nn.Parameter(torch.ones(1, 64, 128))


def test_the_report_names_what_convert_cannot_see_and_the_share_it_converted() -> None:
    model = nn.ModuleDict(
        {"c_attn": Conv1D(), "experts": Experts(), "attention": nn.MultiheadAttention(64, 4), "up": nn.Linear(64, 64)}
    )
    report = mf.convert(model, "mxfp8")
    names = [row.name for row in report.unseen]
    assert names == ["c_attn.weight", "experts", "attention.in_proj_weight"]
    for name in names:
        assert name in str(report)
        assert name not in report.skipped
    total = sum(parameter.numel() for parameter in model.parameters())
    assert report.share == (64 * 64 + 64) / total
    assert str(report).endswith(
        f"1 of 2 linear layers run in low precision: {report.share:.1%} of the model's parameters."
    )


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (nn.Sequential(nn.ReLU()), {}, "it has no nn.Linear"),
        (nn.Sequential(nn.LazyLinear(4)), {}, "call the model once"),
        (nn.ModuleDict({"lm_head": nn.Linear(8, 8)}), {}, "exclude=.. excludes nothing"),
        (nn.Sequential(nn.Linear(8, 8)), {"filter": lambda name, layer: False}, "filter returned False.*name first"),
        (nn.Sequential(nn.Bilinear(4, 4, 4)), {"fuse": True}, "needed an nn.Linear"),
        (nn.MultiheadAttention(8, 2), {}, "multiplies with it without calling a Linear"),
        (nn.Sequential(nn.Linear(8, 8)).double(), {}, "its weight has torch.float64, .*model.float.. first"),
        (nn.Sequential(nn.Linear(8, 8, dtype=torch.complex64)), {}, "its weight has torch.complex64, which no recipe"),
        (mf.Linear(8, 8, dtype=torch.float64), {}, "its weight has torch.float64"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_a_conversion_of_nothing_is_an_error_as_quantizing_nothing_is(model, options, reason) -> None:
    before = copy.deepcopy(model)
    with pytest.raises(InvalidValueError, match=f"without a layer to convert.*{reason}"):
        mf.convert(model, "mxfp8", **options)
    assert str(model) == str(before)
    options.pop("fuse", None)
    with pytest.raises(InvalidValueError, match=f"without a layer to quantize.*{reason}"):
        mf.quantize_(model, mf.WeightOnly("mxfp8"), **options)
    # What a placement leaves in high precision by name is no mistake, nor is a part of another dtype.
    mixed = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).half())
    assert mf.convert(mixed, "mxfp8").converted == ["0", "2"]
    layers = nn.Sequential(nn.Linear(8, 8))
    assert mf.convert(layers, mf.Placement([("*", None)])).converted == []


def test_the_printed_report_has_a_row_for_layers_alike() -> None:
    layers = [nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}) for _ in range(12)]
    layers[11]["up"] = nn.Linear(8, 24)
    model = nn.ModuleDict({"layers": nn.ModuleList(layers), "lm_head": nn.Linear(8, 8)})
    report = mf.convert(model, "mxfp8", fuse=True)
    assert len(report) == 25
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[0] == "layer layers in -> out action recipe reason"
    assert "layers.*.up 11 8 -> 16 converted MXFP8BlockScaling" in lines
    assert "layers.11.up 1 8 -> 24 converted MXFP8BlockScaling" in lines
    assert "layers.*.down 12 16 -> 8 converted MXFP8BlockScaling" in lines
    assert lines[-2] == "0 of 12 blocks are fused: ModuleDict is not a block that is known."
    assert lines[-1] == f"24 of 25 linear layers run in low precision: {report.share:.1%} of the model's parameters."
    short = str(mf.convert(nn.Sequential(nn.Linear(8, 8)), "mxfp8")).splitlines()
    assert short[0].split() == ["layer", "in", "->", "out", "action", "recipe"]  # no column of blanks


def test_a_tied_weight_counts_once() -> None:
    embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embedding.weight
    assert mf.convert(nn.ModuleDict({"in": embedding, "out": head}), "mxfp8").share == 1.0


def test_errors_name_the_layer_of_a_converted_model() -> None:
    model = Model()
    mf.convert(model, "mxfp8")
    with pytest.raises(InvalidTypeError, match=r"^x: .*float64.*layer 'blocks\.0\.0'"):
        model(torch.randn(4, 32).double())
    down = model.blocks[0][2]
    down.bias = nn.Parameter(torch.ones(1, 32))
    with pytest.raises(InvalidValueError, match=r"^bias: .*layer 'blocks\.0\.2'"):
        fused.norm_mlp(torch.randn(4, 32), nn.RMSNorm(32), model.blocks[0][0], down)
    copied = pickle.loads(pickle.dumps(model.blocks[0][0]))  # which is no part of that model
    with pytest.raises(InvalidTypeError, match=r"float64(?!.*blocks)"):
        copied(torch.randn(4, 32).double())


def test_weights_that_were_stored_as_codes_work_after_revert() -> None:
    with mf.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(mf.Linear(64, 64))
    stored = model[0].weight.dequantize()
    mf.revert(model)
    assert type(model[0].weight) is nn.Parameter
    assert torch.equal(model[0].weight, stored)
    model(X).sum().backward()


def test_revert_keeps_the_parameters_of_stored_weights() -> None:
    with mf.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(mf.Linear(64, 64), mf.Linear(64, 64))
    model[1].weight = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    model(X).sum().backward()
    gradient = model[0].weight.grad
    mf.revert(model)
    assert model[1].weight is model[0].weight, "tied layers stay tied"
    assert model[0].weight.grad is gradient
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before), "the optimizer holds the same parameter"

    with mf.quantized_model_init(recipe="mxfp8"):
        model = nn.Sequential(mf.Linear(64, 64))
    rows = model[0].weight[:32]
    with pytest.warns(UserWarning, match="new parameters, because views.*: 0"):
        mf.revert(model)
    assert torch.equal(model[0].weight[:32], rows.dequantize())


def test_scaling_state_made_on_meta_follows_weights_that_were_assigned() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64))
    weights = {name: value.clone() for name, value in plain.state_dict().items()}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64))
    for each in (plain, model):
        mf.convert(each, DelayedScaling(amax_history_len=4))
    with pytest.warns(UserWarning, match="starts fresh"):
        model.load_state_dict(weights, assign=True)
    for _ in range(3):
        results = [each(X) for each in (plain, model)]
        assert torch.equal(*results)
        for y in results:
            y.sum().backward()
    assert model[0].scaling_x_scale == plain[0].scaling_x_scale != 1
