"""features P13, S8, Q14: quantized parameters under compilers, optimizers, averages, copies, files and shards."""

import copy
import io
import warnings

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import swa_utils  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.passes import CastInputs  # noqa: E402
from microfloat.recipes import RECIPES  # noqa: E402
from microfloat.routes import entries_of, routes_of  # noqa: E402
from microfloat.torch import backends  # noqa: E402
from microfloat.torch.linear.quantized_weight import StoredCast  # noqa: E402
from microfloat.torch.linear.schedule import CastStep  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning"),
]
every_recipe = pytest.mark.parametrize("recipe", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])


def make(recipe="mxfp8", device=None, pinned=True) -> nn.Sequential:
    torch.manual_seed(0)
    options = {"dtype": torch.bfloat16, "device": device, "recipe": recipe if pinned else None}
    with mf.quantized_model_init(recipe=recipe):
        return nn.Sequential(mf.Linear(64, 96, **options), nn.GELU(), mf.Linear(96, 32, **options))


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 96, dtype=torch.bfloat16), nn.GELU(), nn.Linear(96, 32, dtype=torch.bfloat16))


def batch(rows=16) -> torch.Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).bfloat16()


def gradients(model, call=None):
    model.zero_grad()
    torch.manual_seed(3)
    y = (call or model)(batch().requires_grad_())
    (y.float() - 1).square().mean().backward()
    return [y.detach(), *[parameter.grad.clone() for parameter in model.parameters()]]


def compiled(model, **options):
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend="aot_eager", **options)


@pytest.mark.slow("further programs of a checked kind")
@every_recipe
def test_compiled_code_gives_the_bits_of_eager(recipe) -> None:
    model = make(recipe)
    expected = gradients(model)
    actual = gradients(model, compiled(model))
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow("further programs of a checked kind")
def test_compiled_code_in_high_precision_under_an_autocast_and_on_an_island() -> None:
    model = make(pinned=False)
    torch._dynamo.reset()
    call = torch.compile(model, fullgraph=True, backend="eager")  # Dynamo alone says what runs under an autocast
    for context in (None, mf.autocast(recipe="mxfp8"), mf.autocast(recipe="nvfp4"), mf.autocast(enabled=False)):
        if context is None:
            assert torch.equal(call(batch()), model(batch()))
        else:
            with context:
                assert torch.equal(call(batch()), model(batch()))


def test_compiled_code_takes_any_batch_and_keeps_weights_as_codes() -> None:
    model = make()
    call = compiled(model, dynamic=True)
    for rows in (3, 8, 16):
        assert torch.equal(call(batch(rows)), model(batch(rows)))
    step, saved = compiled(model), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        step(batch().requires_grad_())
    assert not any(tensor.shape in ((96, 64), (32, 96)) and tensor.dtype == torch.bfloat16 for tensor in saved)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05, foreach=False),
    "adamw by default": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.5, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_optimizers_train_them(name) -> None:
    """features S7."""
    model = make()
    optimizer, losses = OPTIMIZERS[name](model.parameters()), []
    for _ in range(6):
        losses.append(float((gradients(model)[0].float() - 1).square().mean()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < losses[0]
    assert isinstance(model[0].weight, mf.QuantizedTensor)
    again = OPTIMIZERS[name](model.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adafactor_steps_by_the_norm_of_the_values(dtype) -> None:
    q = mf.quantize(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype), "mxfp8")
    parameters = [nn.Parameter(q.clone()), nn.Parameter(q.dequantize())]
    for parameter in parameters:
        parameter.grad = torch.ones(32, 64, dtype=dtype)
        torch.optim.Adafactor([parameter], lr=0.5).step()
    assert torch.equal(q.norm(), q.dequantize().norm())
    if dtype == torch.float32:  # a step on plain bfloat16 rounds to it
        assert torch.equal(parameters[0], mf.quantize(parameters[1].detach(), "mxfp8"))
    for other in (lambda: parameters[0].norm(), lambda: q.norm(dim=1), lambda: q.norm(p=2, dim=(0, 1))):
        with pytest.raises(InvalidTypeError, match=r"norm.*Call .dequantize\(\) first"):
            other()


def test_asgd_is_refused_by_name() -> None:
    model = make()
    gradients(model)
    with pytest.raises(InvalidTypeError, match=r"Where the optimizer ASGD did: step with another one, and average by"):
        torch.optim.ASGD(model.parameters()).step()


@pytest.mark.parametrize("recipe", ["fp8_current", "nvfp4"])
def test_a_fused_optimizer_steps_on_master_weights(recipe) -> None:
    """Codes are those of the masters, whose steps below half of a code's add up; a plain step of that size is lost."""
    with mf.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        layer = mf.Linear(64, 32, bias=False, recipe=recipe)
    weight = layer.weight
    master = nn.Parameter(weight.get_high_precision_init_val().clone())
    optimizer, first = torch.optim.AdamW([master], lr=1e-4, weight_decay=0.0, fused=True), weight.dequantize()
    for step in range(30):
        master.grad = torch.ones_like(master)
        optimizer.step()
        mf.update_quantized(weight, master)
        assert torch.equal(weight.detach(), mf.quantize(master.detach(), weight.cast)), step
    moved = (first - weight.dequantize()).mean()
    assert 0.5 * 30e-4 < moved < 1.5 * 30e-4


def test_averages_of_weights() -> None:
    """AveragedModel with an average of values; the other forms, of lists, say so."""
    model = make()

    def mean(averaged, current, count):
        values = [q.dequantize().float() if isinstance(q, mf.QuantizedTensor) else q for q in (averaged, current)]
        return torch.lerp(*values, 0.5)

    average = swa_utils.AveragedModel(model, avg_fn=mean)
    by_list = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    first = model[0].weight.dequantize().float()
    for one in (average, by_list):
        one.update_parameters(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    gradients(model)
    optimizer.step()
    average.update_parameters(model)
    expected = mf.quantize((first + model[0].weight.dequantize().float()) / 2, "mxfp8")
    assert torch.equal(average.module[0].weight.dequantize(), expected.dequantize(torch.bfloat16))
    with pytest.raises(InvalidTypeError, match=r"Where AveragedModel did: give it an avg_fn"):
        by_list.update_parameters(model)


def test_tied_weights_stay_tied() -> None:
    first = make()[0]
    second = mf.Linear(64, 96, dtype=torch.bfloat16, recipe="mxfp8")
    second.weight = first.weight
    both = nn.ModuleList([first, second])
    (first(batch()) + second(batch())).sum().backward()
    alone = first.weight.grad.clone()
    copied = copy.deepcopy(both)
    assert copied[0].weight is copied[1].weight
    assert torch.equal(copied[0].weight, first.weight)
    mf.revert(both)
    assert first.weight is second.weight
    assert not isinstance(first.weight, mf.QuantizedTensor)
    assert torch.equal(first.weight.grad, alone)


def test_files_copies_and_distributed_checkpoints(tmp_path) -> None:
    model, other = make(), make()
    with torch.no_grad():
        model[0].weight.mul_(3)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    other.load_state_dict(torch.load(buffer))
    assert torch.equal(other(batch()), model(batch()))
    with torch.no_grad():
        other[0].weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of a process that is alone
        dcp.save(model.state_dict(), checkpoint_id=tmp_path)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(copy.deepcopy(model)(batch()), model(batch()))


def test_a_quantized_state_dict_in_a_plain_model_says_what_to_do() -> None:
    quantized, target = make(), plain()
    remedy = r"Where load_state_dict asked for it: load microfloat.torch.plain_state_dict\(model\), or .* assign=True"
    with pytest.raises(RuntimeError, match=remedy):
        target.load_state_dict(quantized.state_dict())
    target.load_state_dict(mf.plain_state_dict(quantized))
    assert torch.equal(target[0].weight, quantized[0].weight.dequantize())
    mf.convert(target, "mxfp8")
    target.load_state_dict(quantized.state_dict(), assign=True)
    assert torch.equal(target(batch()), quantized(batch()))


def test_the_meta_device() -> None:
    """features M12: codes without memory, which `to_empty` gives them, and `reset_parameters` values."""
    model = make(device="meta")
    assert model(batch().to("meta")).shape == (16, 32)
    model.to_empty(device="cpu")
    assert all(isinstance(model[index].weight, mf.QuantizedTensor) for index in (0, 2))
    assert all(isinstance(model[index].weight, nn.Parameter) for index in (0, 2))
    for index in (0, 2):
        model[index].reset_parameters()
    assert 0.05 < float(model[0].weight.detach().dequantize().abs().max()) <= 0.125
    gradients(model)


def test_inference_mode_reads_them() -> None:
    model = make().requires_grad_(False).eval()
    expected = model(batch())
    with torch.inference_mode():
        assert torch.equal(model(batch()), expected)
        assert not model[0].weight.detach().is_inference()
        assert torch.equal(model[0].weight.t().dequantize(), model[0].weight.dequantize().t())


@pytest.mark.parametrize("name", ["fp8_tensor", "fp8_row", "fp8_128x128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_2d"])
def test_values_are_quantized_into_a_parameter(name) -> None:
    """features Q14 and S8: a whole tensor, rows of it, and a flag by which the device skips."""
    values = torch.randn(40, 48)
    q = nn.Parameter(mf.quantize(torch.ones(40, 48), name))
    version, codes = q._version, q.codes
    mf.update_quantized(q, values)
    assert torch.equal(q, mf.quantize(values, name))
    assert q.codes is codes
    assert q._version >= version
    mf.update_quantized(q, torch.zeros(40, 48), noop_flag=torch.ones(()))
    assert torch.equal(q, mf.quantize(values, name))
    mf.update_quantized(q, torch.zeros(40, 48), noop_flag=torch.zeros(1))
    assert not q.dequantize().any()
    mf.update_quantized(q, values)
    if not q.format.is_tile:
        q.detach()[4:20].copy_(torch.full((16, 48), 0.25))
        assert torch.equal(q[20:].dequantize(), mf.quantize(values, name)[20:].dequantize())
        assert torch.allclose(q[4:20].dequantize(), torch.full((16, 48), 0.25), rtol=0.2)


def test_one_expert_is_written_among_others() -> None:
    q, one = mf.quantize(torch.ones(3, 4, 32), "mxfp8"), torch.full((4, 32), 2.0)
    q[1].copy_(one)
    assert torch.equal(q.dequantize(), torch.stack([one / 2, one, one / 2]))


def test_what_cannot_be_written_into_a_parameter_is_named() -> None:
    q = mf.quantize(torch.ones(4, 32), "mxfp8")
    for arguments, error, message in (
        ((torch.ones(4, 32), torch.ones(4, 32)), InvalidTypeError, "param: got .*Tensor.*needed a QuantizedTensor"),
        ((q, q), InvalidTypeError, "src: got"),
        ((q, torch.ones(4, 32, dtype=torch.int32)), InvalidTypeError, "src: got torch.int32"),
        ((q, torch.ones(32, 4)), InvalidValueError, r"src: got shape \(32, 4\), needed shape \(4, 32\)"),
        ((q, torch.ones(4, 16)), InvalidValueError, r"src: got shape \(4, 16\).*\[rows\].copy_\(src\)"),
        ((q, torch.ones(())), InvalidValueError, "src: got shape"),
    ):
        with pytest.raises(error, match=message):
            mf.update_quantized(*arguments)


SIZES = [10, 0, 14]


def experts(recipe, features: int = 128, dtype=torch.float32) -> tuple[mf.GroupedLinear, mf.GroupedLinear]:
    """Experts of different sizes stored under a recipe, and the same with the values before they were quantized."""
    plain = mf.GroupedLinear(3, 64, features, bias=True, dtype=dtype)
    with torch.no_grad():
        plain.weight.mul_(torch.tensor([1.0, 3.0, 0.7])[:, None, None])
    with mf.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        stored = mf.GroupedLinear(3, 64, features, bias=True, dtype=dtype)
    stored.load_state_dict(plain.state_dict())
    return stored, plain


# Under delayed scaling the plain twin would begin at scale 1.
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_experts_are_quantized_each_alone_and_compute_the_same(name) -> None:
    torch.manual_seed(0)
    stored, plain = experts(name)
    cast = RECIPES[name]().fprop.rhs
    assert isinstance(stored.weight, mf.QuantizedTensor)
    assert stored.weight.get_high_precision_init_val().shape == (3, 128, 64)
    for own, values in zip(stored.weight.detach(), plain.weight.detach(), strict=True):
        assert torch.equal(own, mf.quantize(values, cast))
    x = torch.randn(24, 64)
    results = []
    for layer in (stored, plain):
        torch.manual_seed(1)
        with mf.autocast(recipe=name):
            y = layer(x, SIZES)
        y.square().sum().backward()
        results.append((y, layer.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def _at_an_odd_address(part: torch.Tensor) -> torch.Tensor:
    """The same in memory of another library, whose first byte is at no multiple of 16."""
    memory = torch.zeros(part.numel() * part.itemsize + 32, dtype=torch.uint8).numpy()
    start = -memory.ctypes.data % 16 + part.itemsize
    foreign = torch.from_numpy(memory[start : start + part.numel() * part.itemsize])
    assert foreign.storage_offset() == 0
    return foreign.view(part.dtype).view(part.shape).copy_(part)


@pytest.mark.parametrize("in_foreign_memory", [False, True])
@pytest.mark.parametrize("name", ["delayed", "fp8_current", "nvfp4"])
def test_parts_of_one_expert_begin_where_gemms_read_them(name, in_foreign_memory) -> None:
    """At multiples of 16 bytes: cuBLAS refuses the scale of the second expert as it lies."""
    weight, recipe = experts(name)[0].weight.detach(), RECIPES[name]()
    if in_foreign_memory:
        weight = weight.map_parts(_at_an_odd_address)
    entries = entries_of(recipe, routes_of(recipe, None), "w", True, False)
    backend = backends.choose("reference", weight.device)
    operand = weight[1].to_operand()
    stored = [operand.codes, operand.scale, operand.tensor_scale]
    assert any(part is not None and part.data_ptr() % 16 for part in stored)
    made = StoredCast(backend, weight[1], entries, torch.float32, CastStep)(weight[1], 0, None, CastInputs())
    for part, own in zip(made.row, stored, strict=True):
        assert (part is None) == (own is None)
        if part is not None:
            assert part.data_ptr() % 16 == 0
            assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (part, own)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "delayed"])
def test_stored_experts_multiply_on_a_gpu(name) -> None:
    with torch.device("cuda"):
        stored, plain = experts(name, 384, torch.bfloat16)
        x = torch.randn(24, 64).bfloat16()
    made = []
    for layer in (stored, plain):
        own = x.clone().requires_grad_()
        with mf.autocast(recipe=name):
            y = layer(own, SIZES)
        y.float().square().mean().backward()
        assert own.grad.isfinite().all()
        made.append(y.double())
    for own, other in zip(made[0].split(SIZES), made[1].split(SIZES), strict=True):
        # Of the same operands, each within 6e-3 of their product (docs/numerics.md 8.3).
        assert (own - other).norm() <= 2 * 6e-3 / (1 - 6e-3) * other.norm()


@pytest.mark.parametrize("recipe", ["delayed", "fp8_block", "nvfp4"])
def test_stored_experts_train_save_and_are_reverted(recipe) -> None:
    torch.manual_seed(0)
    layer, _ = experts(recipe)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    x, target = torch.randn(24, 64), torch.randn(24, 128)
    losses = []
    for _ in range(6):
        with mf.autocast(recipe=recipe):
            loss = (layer(x, SIZES) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    buffer = io.BytesIO()
    torch.save(layer.state_dict(), buffer)
    buffer.seek(0)
    other, _ = experts(recipe)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.weight.dequantize(), layer.weight.dequantize())
    values = layer.weight.dequantize()
    mf.revert(torch.nn.Sequential(layer))
    assert torch.equal(layer.weight, values)


def test_stored_experts_have_a_gradient_outside_an_autocast() -> None:
    torch.manual_seed(0)
    stored, plain = experts("nvfp4")
    with torch.no_grad():
        plain.weight.copy_(stored.weight.dequantize())
    x = torch.randn(24, 64)
    for layer in (stored, plain):
        layer(x, SIZES).square().sum().backward()
    assert torch.equal(stored.weight.grad, plain.weight.grad)


@pytest.mark.slow("further programs of a checked kind")
def test_compiled_code_reads_stored_experts() -> None:
    torch.manual_seed(0)
    layer = experts("nvfp4")[0].pin("nvfp4")
    x = torch.randn(24, 64)
    results = []
    for function in (layer, compiled(layer)):
        torch.manual_seed(1)
        y = function(x, SIZES)
        results.append((y, *torch.autograd.grad(y.square().sum(), (layer.weight, layer.bias))))
    assert all(torch.equal(eager, compiled) for eager, compiled in zip(*results, strict=True))


def test_stored_experts_on_the_meta_device() -> None:
    with mf.quantized_model_init(recipe="nvfp4"):
        layer = mf.GroupedLinear(3, 64, 128, device="meta")
    assert layer.weight.is_meta
    layer.to_empty(device="cpu").reset_parameters()
    assert layer.weight.dequantize().abs().max() > 0.1  # of at most 1 / 8


def test_experts_whose_tiles_would_touch_are_named() -> None:
    with mf.quantized_model_init(recipe="fp8_block"), pytest.raises(InvalidValueError, match="multiples of 128 rows"):
        mf.GroupedLinear(2, 64, 96)


@pytest.mark.parametrize("fmt", ["fp8_tensor", "nvfp4_2d", "mxfp8"])
def test_pieces_of_a_checkpoint_keep_their_bytes_whatever_was_there_before(fmt) -> None:
    """features S8: what a distributed checkpoint of other ranks does, in its order, to a model with other values."""
    generator = torch.Generator().manual_seed(1)
    source, target = (mf.quantize(torch.randn(64, 32, generator=generator) * size, fmt) for size in (1, 5))
    for first in (32, 0):
        piece = target.__get_tensor_shard__(None).narrow(0, first, 32)
        piece.copy_(source.narrow(0, first, 32))
    assert torch.equal(source, target)
    before = target.clone()
    target[:32].copy_(mf.quantize(torch.ones(32, 32), fmt))  # outside of a checkpoint the rest keeps its values
    assert torch.equal(target[32:].dequantize(), before[32:].dequantize())
