"""Updates of dy's scale and CUDA graphs: a graph rolls its own layers once in each replay, and nobody else's.

Without a GPU a flag takes the place of the capture: what is rolled meanwhile is what the graph would hold.
`test_gpu_graphs` replays real graphs.
"""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf  # noqa: E402
from microfloat.recipes import DelayedScaling  # noqa: E402
from microfloat.torch import context  # noqa: E402
from microfloat.torch.scaling import regions as scaling  # noqa: E402

RECIPE = DelayedScaling(amax_history_len=8)


@pytest.fixture
def capture(monkeypatch):
    """``capture(True)``: the stream records from now on."""
    state = {"now": False}
    monkeypatch.setattr(scaling, "capturing", lambda: state["now"])
    return lambda now: state.update(now=now)


def layer():
    torch.manual_seed(0)
    return mf.Linear(32, 32, dtype=torch.bfloat16)


def step(one, factor):
    with mf.autocast(recipe=RECIPE):
        y = one(torch.ones(32, 32).bfloat16())
    y.backward(torch.full_like(y, factor))


def rolled(one):
    """Amaxes of dy in the history that have been rolled; the first entry is live."""
    return sorted(value for value in one.scaling_dy_amax_history[1:].tolist() if value)


def test_a_capture_rolls_its_own_layer_and_leaves_others(capture):
    mine, other = layer(), layer()
    step(mine, 2.0)
    step(other, 3.0)  # rolls what `mine` has recorded
    step(other, 4.0)
    assert rolled(mine) == [2.0]
    assert rolled(other) == [3.0]
    mine.scaling_dy_amax_history[0] = 5.0  # as a backward of an earlier replay has left it
    capture(True)
    step(mine, 6.0)
    assert rolled(mine) == [2.0, 5.0]  # although nothing was pending
    assert rolled(other) == [3.0]
    capture(False)
    step(other, 7.0)
    assert rolled(other) == [3.0, 4.0]
    assert rolled(mine) == [2.0, 5.0]  # 6 is rolled by the graph's next replay


def test_a_layer_that_a_capture_calls_twice_is_rolled_once(capture):
    one = layer()
    step(one, 2.0)
    capture(True)
    with mf.autocast(recipe=RECIPE):
        x = torch.ones(32, 32).bfloat16()
        y = one(x) + one(x)
    before = one.scaling_dy_amax_history.clone()
    assert rolled(one) == [2.0]
    y.backward(torch.ones_like(y))
    assert torch.equal(one.scaling_dy_amax_history[1:], before[1:])


def test_reading_the_state_leaves_what_a_graph_rolls(capture):
    one = layer()
    capture(True)
    step(one, 2.0)
    capture(False)
    state = one.state_dict()
    assert rolled(one) == []
    mf.update_scaling(one)
    assert rolled(one) == []
    assert any(torch.is_tensor(value) and (value == 2.0).any() for value in state.values())  # live, so nothing is lost


def test_a_pinned_layer_outside_any_autocast(capture):
    one = mf.Linear(32, 32, dtype=torch.bfloat16, recipe=RECIPE)
    x = torch.ones(32, 32).bfloat16()

    def step(factor):
        y = one(x)
        y.backward(torch.full_like(y, factor))

    step(2.0)
    one(x)  # rolls it
    assert rolled(one) == [2.0]
    one.scaling_dy_amax_history[0] = 5.0
    capture(True)
    step(6.0)
    assert rolled(one) == [2.0, 5.0]
    capture(False)
    one(x)
    assert rolled(one) == [2.0, 5.0]


@pytest.mark.slow("compiles a layer")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_a_compiled_layer_is_rolled_in_each_replay_too(capture):
    """The gradients of a captured step of compiled code would else be cast with the scale 1 for ever."""
    mine, other = layer(), layer()
    for one in (mine, other):
        scaling.layer_state.ensure_buffers(one, RECIPE.fprop.lhs.scaling)
    compiled, elsewhere = (torch.compile(one, fullgraph=True, backend="aot_eager") for one in (mine, other))
    step(compiled, 2.0)
    step(elsewhere, 3.0)
    step(elsewhere, 4.0)
    mine.scaling_dy_amax_history[0] = 5.0  # as a backward of an earlier replay has left it
    capture(True)
    step(compiled, 6.0)
    assert rolled(mine) == [2.0, 5.0]
    assert rolled(other) == [3.0]
    capture(False)
    step(elsewhere, 7.0)
    assert rolled(mine) == [2.0, 5.0]
    assert rolled(other) == [3.0, 4.0]


def test_a_compiled_forward_rolls_dy_where_a_graph_is_captured(capture):
    one = layer()
    step(one, 2.0)
    casts = {"x": RECIPE.fprop.lhs, "w": RECIPE.fprop.rhs}
    number = scaling.state_of(one).number
    scales = []
    for now in (False, True):  # outside of a capture the autocast has rolled it
        capture(now)
        one.scaling_dy_amax_history[0] = 5.0
        with mf.autocast(recipe=RECIPE):
            scaling.record_compiled(number, casts, context.ambient().region, None)

        scales.append(rolled(one))
    assert scales == [[5.0], [5.0, 5.0]]


def refuse():
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")


def test_without_a_driver_nothing_asks_for_captures(monkeypatch):
    """Features B3. As below, in this process, which has imported the library before."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", refuse)
    one = layer()
    for _ in range(2):
        step(one, 2.0)
    assert float(one.scaling_x_scale) != 1.0


WITHOUT_A_DRIVER = """
import torch

def refuse():
    raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

torch.backends.cuda.is_built = lambda: True
torch.cuda.is_current_stream_capturing = refuse
import microfloat.torch as mf

layer = mf.Linear(32, 32)
for _ in range(2):
    with mf.autocast(recipe="delayed"):
        y = layer(torch.randn(4, 32))
    y.sum().backward()
print(float(layer.scaling_x_scale) != 1.0)
"""


@pytest.mark.slow("a process that imports torch anew")
def test_a_cuda_build_of_torch_without_a_driver_is_not_asked_for_captures(fresh_python):
    """Features B3. The default wheel for Linux is a CUDA build, and raises when it is asked."""
    done = fresh_python(WITHOUT_A_DRIVER)
    assert (done.returncode, done.stdout) == (0, "True\n"), done.stderr
