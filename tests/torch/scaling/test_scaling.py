"""Delayed scaling: sequences against the oracle, when updates happen, calibration, state, checkpoints, reduction."""

import contextlib
import copy
import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat import formats, recipes, reference  # noqa: E402
from microfloat.errors import CheckpointError, InvalidTypeError, InvalidValueError, NotSupportedError  # noqa: E402
from microfloat.operands import GEMMS  # noqa: E402
from microfloat.recipes import CustomRecipe, DelayedScaling, MXFP8BlockScaling  # noqa: E402
from microfloat.torch.scaling import buffers as layer_state  # noqa: E402
from microfloat.torch.scaling import buffers as rolling  # noqa: E402
from microfloat.torch.scaling import regions as scaling  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402

KEYS = {f"scaling_{slot}_{kind}" for slot in ("x", "w", "dy") for kind in ("scale", "amax_history")}


class OracleSlot:
    """One slot driven by the oracle's pure functions."""

    def __init__(self, recipe: DelayedScaling, element) -> None:
        self.recipe, self.element = recipe, element
        self.history, self.scale = np.zeros(recipe.amax_history_len, np.float32), np.float32(1)

    def record(self, tensor: torch.Tensor) -> None:
        self.history = reference.record_amax(self.history, np.float32(tensor.detach().abs().max()))

    def update(self) -> None:
        self.history, self.scale = reference.update_delayed(
            self.history, self.scale, self.element, margin=self.recipe.margin,
            amax_compute_algo=self.recipe.amax_compute_algo,
        )  # fmt: skip

    def matches(self, layer, slot: str) -> bool:
        scale, history = (layer._buffers[name] for name in layer_state.NAMES[slot])
        return scale.numpy() == self.scale and np.array_equal(history.numpy(), self.history)


@pytest.mark.parametrize("algo", ["max", "most_recent", lambda history: history.max() * 0.5])
@pytest.mark.parametrize(("margin", "length", "fp8_format"), [(0, 4, "HYBRID"), (2, 1, "E4M3"), (-1, 3, "HYBRID")])
def test_sequence_follows_the_oracle(algo, margin, length, fp8_format) -> None:
    recipe = DelayedScaling(margin, fp8_format, length, algo)
    layer = mf.Linear(24, 16, bias=False)
    gradient_element = recipe.dgrad.lhs.format.element
    slots = {
        "x": OracleSlot(recipe, formats.E4M3), "w": OracleSlot(recipe, formats.E4M3),
        "dy": OracleSlot(recipe, gradient_element),
    }  # fmt: skip
    backward_pending = False
    for step in range(7):
        x = torch.randn(8, 24) * 10.0 ** (step - 3)
        if step == 3:
            x.zero_()
        if backward_pending:
            slots["dy"].update()
        x_scale = slots["x"].scale
        with mf.autocast(recipe=recipe):
            y = layer(x)
        quantized = reference.quantize(x.numpy(), recipe.fprop.lhs, scale_enc=x_scale)
        weight = reference.quantize(layer.weight.detach().numpy(), recipe.fprop.rhs, scale_enc=slots["w"].scale)
        expected = reference.scaled_matmul(quantized, weight)
        assert np.linalg.norm(y.detach().numpy() - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-30
        for slot, tensor in (("x", x), ("w", layer.weight)):
            slots[slot].record(tensor)
            slots[slot].update()
            assert slots[slot].matches(layer, slot)
        dy = torch.randn_like(y)
        y.backward(dy)
        slots["dy"].record(dy)
        assert slots["dy"].matches(layer, "dy")
        backward_pending = True
    slots["dy"].update()
    layer.state_dict()
    assert slots["dy"].matches(layer, "dy")


def test_first_step_uses_one_and_documented_series() -> None:
    recipe = DelayedScaling(fp8_format="E4M3", amax_history_len=4)
    layer = mf.Linear(1, 1, bias=False)
    seen = []
    for amax in (2, 8, 1, 0, 4, 1, 1, 1, 1):
        with mf.autocast(recipe=recipe):
            layer(torch.full((1, 1), float(amax)))
        seen.append(float(layer.scaling_x_scale))
    assert seen == [224, 56, 56, 56, 56, 112, 112, 112, 448]


@pytest.mark.parametrize("within", [False, True], ids=["around", "in each step"])
@pytest.mark.parametrize(("recipe", "steps"), [("delayed", 16), ("delayed", 15), ("mxfp8", 16)])
def test_a_training_inside_one_autocast_is_told_that_its_scales_stand(recipe, steps, within) -> None:
    layer = mf.Linear(16, 8)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    is_told = recipe == "delayed" and steps == 16 and not within
    told = (
        pytest.warns(UserWarning, match="16 steps of optimizers inside one autocast")
        if is_told
        else contextlib.nullcontext()
    )
    with told, contextlib.nullcontext() if within else mf.autocast(recipe=recipe):
        for _ in range(steps):
            with mf.autocast(recipe=recipe):  # inside another it opens no region of its own
                layer(torch.ones(2, 16)).sum().backward()
            optimizer.step()


def test_microbatches_in_one_region_equal_one_batch() -> None:  # features S3
    torch.manual_seed(0)
    recipe = DelayedScaling(amax_history_len=4)
    whole = mf.Linear(16, 8, bias=False)
    parts = copy.deepcopy(whole)
    for _step in range(3):
        x = torch.randn(12, 16)
        with mf.autocast(recipe=recipe):
            y = whole(x)
        y.sum().backward()
        with mf.autocast(recipe=recipe):
            outputs = [parts(part) for part in x.split(4)]
        for output in outputs:
            output.sum().backward()
    ours, theirs = parts.state_dict(), whole.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in KEYS)


def test_nested_autocasts_update_once_at_the_outermost_exit() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    layer = mf.Linear(8, 8)
    with mf.autocast(recipe=recipe):
        with mf.autocast(recipe=recipe):
            layer(torch.ones(2, 8))
        assert float(layer.scaling_x_scale) == 1.0
        assert float(layer.scaling_x_amax_history[0]) == 1.0
        with mf.autocast(enabled=False):
            layer(torch.full((2, 8), 100.0))
    assert float(layer.scaling_x_scale) == 448.0
    assert layer.scaling_x_amax_history.tolist() == [0.0, 0.0, 1.0]


def test_no_update_without_gradients_and_none_after_an_exception() -> None:
    layer = mf.Linear(8, 8)
    with torch.no_grad(), mf.autocast(recipe=DelayedScaling()):
        layer(torch.ones(2, 8))
    assert float(layer.scaling_x_scale) == 1.0
    assert not layer.scaling_x_amax_history.any()

    @mf.autocast(recipe=DelayedScaling())
    def interrupted() -> None:
        layer(torch.ones(2, 8))
        raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert float(layer.scaling_x_scale) == 1.0


def test_several_backwards_give_one_dy_update_and_none_gives_none() -> None:  # features S5
    recipe = DelayedScaling(amax_history_len=3)
    layer = mf.Linear(8, 8, bias=False)
    x = torch.ones(2, 8)
    with mf.autocast(recipe=recipe):
        first, second = layer(x), layer(x)
    first.backward(torch.full_like(first, 2.0))
    second.backward(torch.full_like(second, 4.0))
    assert layer.scaling_dy_amax_history.tolist() == [4.0, 0.0, 0.0]
    with mf.autocast(recipe=recipe):
        assert layer.scaling_dy_amax_history.tolist() == [0.0, 0.0, 4.0]
        layer(x)
    with mf.autocast(recipe=recipe):
        pass
    assert layer.scaling_dy_amax_history.tolist() == [0.0, 0.0, 4.0]
    assert float(layer.scaling_dy_scale) == 57344 / 4


def test_pinned_layer_without_autocast_is_its_own_region() -> None:
    layer = mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=3))
    for amax in (2.0, 4.0):
        layer(torch.full((2, 8), amax)).sum().backward()
    assert layer.scaling_x_amax_history.tolist() == [0.0, 2.0, 4.0]
    assert layer.state_dict()["scaling_dy_amax_history"].tolist() == [0.0, 1.0, 1.0]


def test_calibration_records_only() -> None:
    """Features P7."""
    recipe = DelayedScaling(amax_history_len=3)
    layer = mf.Linear(8, 8)
    x = torch.full((2, 8), 7.0)
    with torch.no_grad(), mf.autocast(enabled=False, calibrating=True, recipe=recipe):
        y = layer(x)
    assert torch.equal(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert layer.scaling_x_amax_history.tolist() == [7.0, 0.0, 0.0]
    assert float(layer.scaling_x_scale) == 1.0
    mf.update_scaling(layer)
    assert float(layer.scaling_x_scale) == 64.0
    mf.reset_scaling(layer)
    assert float(layer.scaling_x_scale) == 1.0
    assert not layer.scaling_x_amax_history.any()


def test_state_dict_both_ways(recwarn) -> None:  # features K1, K2
    plain = torch.nn.Linear(8, 8)
    ours = mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=4))
    ours(torch.ones(2, 8)).sum().backward()
    assert set(ours.state_dict()) == {"weight", "bias"} | KEYS
    with pytest.warns(UserWarning, match="starts fresh"):
        ours.load_state_dict(plain.state_dict())
    assert float(ours.scaling_x_scale) == 1.0
    assert torch.equal(ours.weight, plain.weight)
    ours(torch.ones(2, 8)).sum().backward()
    fresh = mf.Linear(8, 8)
    fresh.load_state_dict(ours.state_dict())
    assert all(torch.equal(fresh.state_dict()[key], ours.state_dict()[key]) for key in KEYS)
    plain.load_state_dict(mf.plain_state_dict(ours))
    assert torch.equal(plain.weight, ours.weight)
    unscaled = mf.Linear(8, 8, recipe=MXFP8BlockScaling())
    plain.load_state_dict(unscaled.state_dict())
    unscaled.load_state_dict(plain.state_dict())


def test_one_warning_per_load_not_per_layer() -> None:
    model = torch.nn.Sequential(*[mf.Linear(8, 8, recipe=DelayedScaling()) for _ in range(3)])
    blobs = {f"{index}.{name}": torch.randn(shape) for index in range(3) for name, shape in
             (("weight", (8, 8)), ("bias", (8,)))}  # fmt: skip
    for _ in range(2):
        with pytest.warns(UserWarning, match="starts fresh") as caught:
            model.load_state_dict(blobs)
        assert len(caught) == 1


@pytest.mark.parametrize("kind", ["Linear", "LayerNorm", "RMSNorm"])
def test_blobs_of_transformer_engine_are_left_out(kind) -> None:
    """Features K2: modules whose parameters have the same names there take a checkpoint of theirs as it is."""
    sizes = (8, 8) if kind == "Linear" else (8,)
    plain, module = getattr(torch.nn, kind)(*sizes), getattr(mf, kind)(*sizes)
    torch.nn.init.normal_(plain.weight)
    with pytest.warns(UserWarning, match="_extra_state"):
        module.load_state_dict({**plain.state_dict(), "_extra_state": torch.zeros(3)})
    assert torch.equal(module.weight, plain.weight)


WITH_BLOBS = {
    "norm and Linear": (lambda: mf.LayerNormLinear(16, 8, split={"q": 4, "k": 4}), ["", "q."]),
    "MLP": (lambda: mf.LayerNormMLP(16, 32), [""]),
    "attention": (lambda: mf.MultiheadAttention(16, 2), ["core_attention.", ""]),
    "decoder layer": (
        lambda: mf.TransformerLayer(16, 32, 2), ["self_attn.core_attention.", "self_attn.", "mlp.", "layernorm."]
    ),
    "experts": (lambda: mf.GroupedLinear(2, 16, 8), [""]),
    "a model": (
        lambda: torch.nn.Sequential(mf.LayerNorm(16), torch.nn.Sequential(mf.TransformerLayer(16, 32, 2))),
        ["0.", "1.0.self_attn.core_attention.", "1.0.mlp.", "1.0.unknown.deeper."],
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", WITH_BLOBS)
def test_blobs_are_left_out_of_every_module_with_one_warning(kind) -> None:
    """Features K2: also where another library has a module, with a blob of its own, and this one has none."""
    make, owners = WITH_BLOBS[kind]
    source, module = make(), make()
    blobs = {f"{owner}_extra_state": torch.zeros(3) for owner in owners}
    with pytest.warns(UserWarning, match="_extra_state") as caught:
        module.load_state_dict({**source.state_dict(), **blobs})
    assert len(caught) == 1
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in source.state_dict().items())


def test_blobs_do_not_hide_that_delayed_scaling_starts_fresh() -> None:
    module = mf.LayerNormMLP(16, 32, recipe=DelayedScaling())
    with pytest.warns(UserWarning, match="_extra_state|starts fresh") as caught:
        module.load_state_dict({**mf.LayerNormMLP(16, 32).state_dict(), "_extra_state": torch.zeros(3)})
    assert len(caught) == 2


def test_a_child_with_an_extra_state_of_its_own_keeps_it() -> None:
    class Counting(torch.nn.Identity):
        count = 0

        def get_extra_state(self) -> int:
            return self.count

        def set_extra_state(self, state: int) -> None:
            self.count = state

    source, module = mf.MultiheadAttention(16, 2), mf.MultiheadAttention(16, 2)
    source.extra, module.extra = Counting(), Counting()
    source.extra.count = 3
    module.load_state_dict(source.state_dict())
    assert module.extra.count == 3


def test_partial_scaling_state_is_named() -> None:
    state = mf.Linear(8, 8, recipe=DelayedScaling()).state_dict()
    del state["scaling_dy_scale"]
    with pytest.raises(CheckpointError, match="scaling_dy_scale"):
        mf.Linear(8, 8).load_state_dict(state)


BAD_ENTRIES = {
    "NaN scale": ("x_scale", torch.tensor(float("nan")), "value nan, needed a positive"),
    "zero scale": ("dy_scale", torch.tensor(0.0), "value 0.0, needed a positive"),
    "negative scale": ("w_scale", torch.tensor(-2.0), "value -2.0"),
    "infinite scale": ("x_scale", torch.tensor(float("inf")), "value inf"),
    "vector scale": ("x_scale", torch.ones(3), r"shape \(3,\), needed a positive, finite number"),
    "no scale": ("x_scale", None, "got None"),
    "text": ("x_scale", "1.0", "got '1.0'"),
    "integers": ("x_amax_history", torch.ones(4, dtype=torch.int64), "tensor of torch.int64"),
    "NaN history": ("w_amax_history", torch.tensor([0.0, 1.0, float("nan"), 1.0]), "value nan, needed a tensor"),
    "negative history": ("dy_amax_history", torch.tensor([0.0, -1.0]), "value -1.0"),
    "infinite history": ("x_amax_history", torch.tensor([float("inf"), 1.0]), "value inf"),
    "matrix": ("x_amax_history", torch.zeros(2, 2), r"shape \(2, 2\)"),
    "empty history": ("x_amax_history", torch.zeros(0), r"shape \(0,\)"),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_scaling_state_that_cannot_be_is_refused_at_load(case, assign) -> None:
    name, value, message = BAD_ENTRIES[case]
    model = torch.nn.Sequential(mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=4)))
    model(torch.ones(2, 8)).sum().backward()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    key = f"0.scaling_{name}"
    with pytest.raises(CheckpointError, match=rf"{key}.*{message}"):
        model.load_state_dict({**before, key: value}, assign=assign)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_a_checkpoint_in_bfloat16_keeps_the_state_float32(assign) -> None:
    layer = mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=4))
    state = {key: tensor.bfloat16() for key, tensor in layer.state_dict().items()}
    state["scaling_x_scale"].fill_(3.0)
    layer.load_state_dict(state, assign=assign)
    assert layer.weight.dtype == (torch.bfloat16 if assign else torch.float32)
    assert all(buffer.dtype == torch.float32 for buffer in layer.buffers())
    assert float(layer.scaling_x_scale) == 3.0
    layer(torch.ones(2, 8)).sum().backward()


def test_loading_forgets_what_was_pending() -> None:
    layer = mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=4))
    saved = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    layer(torch.ones(2, 8)).sum().backward()
    layer.load_state_dict(saved)
    mf.update_scaling(layer)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in layer.state_dict().items())


def test_fresh_parameters_come_with_fresh_scaling_state() -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(mf.Linear(8, 8), torch.nn.Linear(8, 8))
    mf.convert(model, DelayedScaling(amax_history_len=4))
    model = model.to_empty(device="cpu")
    for layer in model:
        for buffer in layer.buffers():
            buffer.fill_(1e12)  # what uninitialised memory may hold
        layer.reset_parameters()
        for slot in layer_state.SLOTS:
            assert float(layer_state.encode_scale(layer, slot)) == 1.0
            assert not layer_state.amax_history(layer, slot).any()
    assert torch.isfinite(model(torch.randn(2, 8))).all()


def test_state_made_in_inference_mode_serves_training() -> None:
    recipe, x = DelayedScaling(amax_history_len=4), torch.ones(2, 8)
    layer, loaded = mf.Linear(8, 8), mf.Linear(8, 8)
    with torch.inference_mode(), mf.autocast(recipe=recipe):
        layer(x)
        loaded.load_state_dict(layer.state_dict())
    for trained in (layer, loaded):
        for _ in range(2):
            with mf.autocast(recipe=recipe):
                y = trained(x)
            y.sum().backward()
            with torch.inference_mode(), mf.autocast(recipe=recipe):  # rolls dy
                trained(x)
        assert trained.scaling_dy_amax_history.tolist() == [0.0, 0.0, 1.0, 1.0]
        assert float(trained.scaling_x_scale) == 448.0


def test_state_goes_with_the_recipe() -> None:
    plain, model = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.nn.Sequential(torch.nn.Linear(8, 8))
    for drop in (
        lambda: mf.convert(model, MXFP8BlockScaling()), lambda: model[0].pin(None), lambda: model[0].unpin(),
        lambda: mf.revert(model),
    ):  # fmt: skip
        mf.convert(model, DelayedScaling(amax_history_len=4))
        model(torch.ones(2, 8)).sum().backward()
        saved = model.state_dict()
        drop()
        plain.load_state_dict(model.state_dict())
        if isinstance(model[0], mf.Linear):
            mf.Linear(8, 8).load_state_dict(saved, strict=False)
        with mf.autocast():  # nothing of it is left to be rolled
            pass
    mf.convert(model, MXFP8BlockScaling())
    model.load_state_dict(saved)  # of delayed scaling, for which this recipe has no use
    plain.load_state_dict(model.state_dict())


@pytest.mark.parametrize("inside", [True, False])
def test_a_recipe_that_changes_before_the_backward_is_named(inside) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8))
    mf.convert(model, DelayedScaling(amax_history_len=4))
    with mf.autocast():
        y = model(torch.ones(2, 8))
        if inside:
            mf.revert(model)
    mf.revert(model)
    with pytest.raises(NotSupportedError, match=r"dropped since its forward.*Change recipes between two steps"):
        y.sum().backward()
    assert type(model[0]) is torch.nn.Linear
    with mf.autocast():
        model(torch.ones(2, 8))


def _raises(history):
    raise ZeroDivisionError("no amax")


@pytest.mark.parametrize("in_region", [True, False])
@pytest.mark.parametrize(
    ("algo", "error", "message"),
    [
        (_raises, InvalidValueError, "a function that raised ZeroDivisionError: no amax"),
        (lambda history: history, InvalidValueError, r"returned shape \(4,\), needed a function from a history"),
        (lambda history: "max", InvalidTypeError, "returned 'max'"),
        (lambda history: None, InvalidTypeError, "returned None"),
        (lambda history: 10**400, InvalidTypeError, "returned 1000"),
        (lambda history: history.max() * 1j, InvalidTypeError, "returned tensor"),
    ],
)
def test_an_amax_algorithm_that_gives_no_amax_is_named(algo, error, message, in_region) -> None:
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algo)
    layer = mf.Linear(8, 8)
    layer.pin(recipe)
    step = mf.autocast(recipe=recipe)(layer) if in_region else layer
    with pytest.raises(error, match=f"amax_compute_algo.*{message}"):
        step(torch.ones(2, 8))
    assert float(layer.scaling_x_scale) == float(layer.scaling_w_scale) == 1.0
    assert not layer.scaling_x_amax_history[1:].any()
    layer.pin(DelayedScaling(amax_history_len=4))(torch.ones(2, 8))  # with a function that can, all goes on
    assert layer.scaling_x_amax_history.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_arguments_are_checked() -> None:
    for function in (mf.update_scaling, mf.reset_scaling):
        for model in (None, "x", [mf.Linear(8, 8)]):
            with pytest.raises(InvalidTypeError, match=r"model: got .*, needed a torch\.nn\.Module"):
                function(model)
    for group in ("world", 0, [0, 1]):
        with pytest.raises(
            InvalidTypeError, match=r"amax_reduction_group: got .*, needed a torch\.distributed\.Process"
        ):
            mf.autocast(recipe=DelayedScaling(), amax_reduction_group=group)
    mf.autocast(amax_reduction_group=torch.distributed.GroupMember.NON_GROUP_MEMBER)
    for rank, error in (("0", InvalidTypeError), (True, InvalidTypeError), (-1, InvalidValueError)):
        with pytest.raises(error, match="rank: got"):
            mf.set_seed_rank(rank)


def test_casting_the_model_keeps_the_state_float32() -> None:
    layer = mf.Linear(8, 8, recipe=DelayedScaling(amax_history_len=2))
    layer(torch.full((1, 8), 3.3)).sum().backward()
    before = layer.scaling_x_scale.clone()
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    assert layer.scaling_x_scale.dtype == torch.float32
    assert torch.equal(layer.scaling_x_scale, before)


def test_history_length_follows_the_recipe() -> None:
    layer = mf.Linear(8, 8)
    for length in (4, 2, 5):
        for _ in range(3):
            with mf.autocast(recipe=DelayedScaling(amax_history_len=length)):
                layer(torch.full((1, 8), float(length)))
        assert layer.scaling_x_amax_history.shape == (length,)
    assert layer.scaling_x_amax_history.tolist() == [0.0, 2.0, 5.0, 5.0, 5.0]


def test_non_finite_amax_records_nothing() -> None:
    layer = mf.Linear(2, 2)
    for value in (float("inf"), float("nan"), 2.0):
        with mf.autocast(recipe=DelayedScaling(amax_history_len=2)):
            layer(torch.tensor([[value, value]]))
    assert float(layer.scaling_x_scale) == 224.0


class _PlayedKernel:
    """In the place of the kernel that updates many slots at once."""

    def __init__(self) -> None:
        self.lives: list[torch.Tensor | None] = []
        self.counts: list[int] = []  # of the slots of each launch
        self.tables = 0

    def slots_of(self, histories, scales, maxima):
        self.tables += 1
        return _PlayedSlots(histories)

    def update_delayed(self, slots, delayed, live) -> torch.Tensor:
        self.lives.append(live)
        self.counts.append(len(slots.histories))
        return torch.ones(len(slots.histories))


class _PlayedSlots:
    def __init__(self, histories) -> None:
        self.histories = histories

    def gather_live(self) -> torch.Tensor:
        return torch.stack([history[0] for history in self.histories])


@pytest.fixture
def two_ranks(monkeypatch):
    """A process group that is told to have a second rank, whose amaxes are twice those of this one."""
    distributed = torch.distributed
    with world_of_one():
        monkeypatch.setattr(distributed, "get_world_size", lambda group: 2)
        monkeypatch.setattr(distributed, "all_reduce", lambda live, op, group: live.mul_(2))
        monkeypatch.setattr(
            distributed,
            "all_gather_object",
            lambda told, own, group: told.__setitem__(0, own) or told.__setitem__(1, own),
        )
        yield


@pytest.mark.parametrize("reduce_amax", [True, False])
@pytest.mark.parametrize("pinned", [True, False], ids=["alone", "autocast"])
def test_the_kernel_is_given_what_all_processes_have_seen(monkeypatch, two_ranks, reduce_amax, pinned) -> None:
    kernel = _PlayedKernel()
    monkeypatch.setattr(rolling, "update_kernel", lambda device: kernel)
    recipe = DelayedScaling(amax_history_len=4, reduce_amax=reduce_amax)
    layer = mf.Linear(8, 8, recipe=recipe if pinned else None)
    with contextlib.nullcontext() if pinned else mf.autocast(recipe=recipe):
        layer(torch.full((2, 8), 3.0))
        if pinned:  # what follows a forward by plan
            scaling.roll_alone(layer, recipe.fprop.lhs, recipe.fprop.rhs, records=True)
    assert len(kernel.lives) == 1 + pinned
    for live in kernel.lives:
        assert (live is not None) is reduce_amax
    if reduce_amax:
        assert 6.0 in kernel.lives[0].tolist()


@pytest.mark.parametrize("layers", [1, 3])
def test_a_region_updates_all_its_layers_in_one_launch_prepared_once(monkeypatch, layers) -> None:
    kernel = _PlayedKernel()
    monkeypatch.setattr(rolling, "update_kernel", lambda device: kernel)
    recipe = DelayedScaling(amax_history_len=4)
    model = torch.nn.Sequential(*[mf.Linear(8, 8) for _ in range(layers)])
    for _ in range(4):
        with mf.autocast(recipe=recipe):
            y = model(model(torch.ones(2, 8)))  # every layer twice
        y.sum().backward()
    # At an entry dy of the step before, at an exit x and w: each prepared once.
    assert kernel.counts == [2 * layers, *[layers, 2 * layers] * 3]
    assert kernel.tables == 2
    model[0].scaling_x_scale = model[0].scaling_x_scale.clone()  # as a move to another device makes them
    with mf.autocast(recipe=recipe):
        model(torch.ones(2, 8))
    assert kernel.tables == 3


def test_what_a_capture_prepares_is_not_kept(monkeypatch) -> None:
    """Its memory belongs to the graph, and holds nothing before the first replay."""
    kernel = _PlayedKernel()
    monkeypatch.setattr(rolling, "update_kernel", lambda device: kernel)
    layer, recipe, tables = mf.Linear(8, 8), DelayedScaling(amax_history_len=4), []
    for captures in (True, True, False, False):
        monkeypatch.setattr(rolling, "capturing", lambda captures=captures: captures)
        with mf.autocast(recipe=recipe):
            layer(torch.ones(2, 8))
        tables.append(kernel.tables)
    assert tables == [1, 2, 3, 3]


def test_tables_of_a_capture_are_filled_without_a_copy_from_the_host(monkeypatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from microfloat.torch.launch import triton

    histories, scales = [torch.zeros(4), torch.zeros(4)], [torch.ones(()), torch.ones(())]
    monkeypatch.setattr(triton, "capturing", lambda: True)
    monkeypatch.setattr(torch, "tensor", None)  # on a GPU a capture refuses a copy of such a one
    slots = triton.slots_of(histories, scales, [448.0, 57344.0])
    pairs = zip(histories, scales, strict=True)
    assert slots.addresses.tolist() == [part.data_ptr() for pair in pairs for part in pair]
    assert slots.maxima.tolist() == [448.0, 57344.0]


@pytest.mark.parametrize("inside", [False, True])
def test_a_recipe_that_delays_the_weight_alone_records_it(inside) -> None:
    delayed = DelayedScaling()
    recipe = CustomRecipe(
        fprop=dataclasses.replace(delayed.fprop, lhs=None), dgrad=delayed.dgrad,
        wgrad=dataclasses.replace(delayed.wgrad, rhs=None),
    )  # fmt: skip
    layer = mf.Linear(32, 32, recipe=None if inside else recipe)
    with mf.autocast(recipe=recipe) if inside else contextlib.nullcontext():
        layer(torch.ones(32, 32)).sum().backward()
    amax = layer.weight.detach().abs().max().numpy()
    assert layer.scaling_w_scale.numpy() == np.float32(448) / amax  # torch's own quotient may be off by a bit
    assert layer.scaling_x_scale == 1


def _delayed_in(*usages: tuple[str, str]) -> recipes.CustomRecipe:
    def cast(gemm: str, side: str) -> recipes.Cast:
        return recipes.Cast("fp8_tensor", scaling=recipes.Delayed() if (gemm, side) in usages else recipes.Current())

    return recipes.CustomRecipe(*(recipes.Gemm(cast(gemm, "lhs"), cast(gemm, "rhs")) for gemm in GEMMS))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("usage", [("fprop", "rhs"), ("dgrad", "rhs"), ("wgrad", "rhs"), ("dgrad", "lhs")])
@pytest.mark.parametrize("frozen", ["", "x", "weight"])
def test_only_casts_that_run_record(usage, frozen, alone) -> None:
    """One delayed cast among current ones: its slot alone has an amax, and only where its product will run."""
    layer, recipe = mf.Linear(32, 16), _delayed_in(usage)
    if alone:
        layer.pin(recipe)
    layer.weight.requires_grad_(frozen != "weight")
    x = torch.randn(8, 32, requires_grad=frozen != "x")
    for _ in range(2):
        with contextlib.nullcontext() if alone else mf.autocast(recipe=recipe):
            y = layer(x)
        y.sum().backward()
    mf.update_scaling(layer)
    slot = {"fprop": "w", "dgrad": "w" if usage[1] == "rhs" else "dy", "wgrad": "x"}[usage[0]]
    runs = usage[0] == "fprop" or frozen != {"dgrad": "x", "wgrad": "weight"}[usage[0]]
    recorded = {name for name in layer_state.SLOTS if layer_state.amax_history(layer, name).any()}
    assert recorded == ({slot} if runs else set())


def test_a_stored_weight_records_where_its_transpose_is_cast() -> None:
    with mf.quantized_model_init(recipe=DelayedScaling()):
        layer = mf.Linear(32, 16, recipe=DelayedScaling())
    layer(torch.randn(8, 32)).sum().backward()
    assert not layer_state.amax_history(layer, "w").any()
    assert layer_state.encode_scale(layer, "w") == 1
    layer(torch.randn(8, 32, requires_grad=True)).sum().backward()
    assert layer_state.amax_history(layer, "w").max() == layer.weight.dequantize().abs().max()


def _scales_of_steps(step) -> list[float]:
    """dy's encode scale of a layer in the backward of three steps, and at the end; `step` runs one."""
    layer, used = mf.Linear(8, 8, bias=False), []
    for number in range(3):
        step(layer, 2.0 ** (2 - number), lambda: used.append(float(layer.scaling_dy_scale)))
    mf.update_scaling(layer)
    return [*used, float(layer.scaling_dy_scale)]


def test_dy_uses_the_scale_of_the_step_before_wherever_its_backward_runs() -> None:
    """The update of an entry reaches the backward of its own step, wherever it runs."""
    recipe = DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")

    def after(model, amax, note):
        with mf.autocast(recipe=recipe):
            y = model(torch.ones(2, 8))
        note()
        y.backward(torch.full_like(y, amax))

    def inside(model, amax, note):
        with mf.autocast(recipe=recipe):
            y = model(torch.ones(2, 8))
            y.backward(torch.full_like(y, amax))
            note()

    def of_the_region_before(model, amax, note):
        with mf.autocast(recipe=recipe):
            y = model(torch.ones(2, 8))
        with mf.autocast(recipe=recipe):
            y.backward(torch.full_like(y, amax))
            note()

    def after_a_failure(model, amax, note):
        with contextlib.suppress(KeyError), mf.autocast(recipe=recipe):
            model(torch.ones(2, 8))
            raise KeyError
        after(model, amax, note)

    first, *rest = [_scales_of_steps(step) for step in (after, inside, of_the_region_before, after_a_failure)]
    assert first == [1.0, 57344.0 / 4, 57344.0 / 2, 57344.0]
    assert rest == [first] * 3


def test_an_entry_that_is_never_left_delays_no_update() -> None:
    recipe = DelayedScaling(amax_history_len=3)
    layer = mf.Linear(8, 8, bias=False)
    with mf.autocast(recipe=recipe):
        layer(torch.ones(2, 8)).sum().backward()

    def left_open():
        with mf.autocast(recipe=recipe):
            yield layer(torch.ones(2, 8))

    steps = left_open()
    next(steps).sum().backward()
    assert float(layer.scaling_dy_scale) == 57344.0
    steps.close()
