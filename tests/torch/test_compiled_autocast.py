"""`with mf.autocast(...)` inside functions of torch.compile: one graph, the bits of eager, and what ends the graph."""

import contextlib
import functools

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402

import microfloat.torch as mf  # noqa: E402
from microfloat.errors import InvalidTypeError, InvalidValueError  # noqa: E402
from microfloat.recipes import (  # noqa: E402
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    Gemm,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from microfloat.torch import context  # noqa: E402

# What torch says of its own code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]

FREE, ROW = mf.Linear(32, 32), mf.Linear(32, 32, recipe="fp8_row")
SEEDED = NVFP4BlockScaling()
CUSTOM = CustomRecipe(Gemm("mxfp8", "mxfp8"), Gemm("mxfp8", "mxfp8"), Gemm(None, None))
ISLAND = mf.autocast(enabled=False)
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    assert (context.TRACED, context.ambient()) == (None, None)
    torch._dynamo.reset()


def results(function) -> list[torch.Tensor]:
    """y and dx; the backward runs when every autocast has been left."""
    x = X.clone().requires_grad_()
    torch.manual_seed(7)
    y = function(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), x)]


def same(function, backend="eager", **options) -> int:
    """Assert that the compiled function gives the bits of eager mode; the number of its graphs.

    Dynamo alone knows of autocasts: what other backends make of the operators in its graph, test_compile shows.
    """
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(function, backend=counter, **options)
    assert all(map(torch.equal, results(function), results(compiled)))
    return counter.frame_count


def test_numbers_of_recipes_are_constants_for_any_shape():
    """Dynamo takes numbers of objects for variables, under dynamic=True or once another value was seen."""

    def one_of(x, recipe):
        with mf.autocast(recipe=recipe):
            return FREE(mf.linear(x, FREE.weight, recipe=recipe))

    compiled = torch.compile(one_of, backend="eager", fullgraph=True, dynamic=True)
    for epsilon in (0.0, 50.0, 80.0):
        recipe = Float8CurrentScaling(amax_epsilon=epsilon)
        assert all(
            map(
                torch.equal,
                results(lambda x, recipe=recipe: one_of(x, recipe)),
                results(lambda x, recipe=recipe: compiled(x, recipe)),
            )
        )


def by_name(x):
    with mf.autocast(recipe="mxfp8"):
        return FREE(x)


def default_of_a_part(x):
    x = FREE(x)
    with mf.autocast():
        x = FREE(x)
    return FREE(x)


def made_inside(x):
    with mf.autocast(recipe=MXFP8BlockScaling(scale_rule="floor")):
        x = FREE(x)
    with mf.autocast(recipe=NVFP4BlockScaling(disable_rht=True, backward="dequantized")):
        return mf.linear(x, FREE.weight)


def made_outside(x):
    with mf.autocast(recipe=CUSTOM):
        x = FREE(x)
    with mf.autocast(recipe=SEEDED):
        return FREE(x)


def nested(x):
    with mf.autocast(recipe="mxfp8"):
        x = ROW(FREE(x))
        with mf.autocast(enabled=False):
            x = ROW(FREE(x))
        with mf.autocast(recipe=SEEDED, backend="reference"):
            x = FREE(x)
        return FREE(x)


def left_by_an_exception(x):
    try:
        with mf.autocast(recipe="mxfp8"):
            x = FREE(x)
            raise ValueError
    except ValueError:
        return FREE(x)


def around_a_checkpoint(x):
    with mf.autocast(recipe="mxfp8"):
        return mf.checkpoint(lambda y: FREE(FREE(y)).relu(), x)


def inside_a_checkpoint(x):
    return mf.checkpoint(lambda y: by_name(y).relu(), x)


def asks(x):
    with mf.autocast(recipe="mxfp8"):
        return FREE(x) * (2 if mf.is_autocast_enabled() else 3)


def by_the_old_name(x):
    with mf.fp8_autocast(fp8_recipe=SEEDED):
        return FREE(x)


FUNCTIONS = [
    by_name, default_of_a_part, made_inside, made_outside, nested, left_by_an_exception, around_a_checkpoint,
    inside_a_checkpoint, asks,
]  # fmt: skip


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("nested",))
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_one_graph_gives_the_bits_of_eager(function) -> None:  # features G3
    backend = "aot_eager" if function in (made_inside, around_a_checkpoint, inside_a_checkpoint) else "eager"
    assert same(function, backend, fullgraph=True) == 1


@pytest.mark.slow("further programs of a checked kind")
def test_a_decorated_layer_and_the_old_name_are_one_graph() -> None:
    assert same(mf.autocast(recipe="mxfp8")(FREE), fullgraph=True) == 1
    with pytest.warns(DeprecationWarning, match="fp8_autocast"):
        assert same(by_the_old_name, fullgraph=True) == 1


@pytest.mark.slow("further programs of a checked kind")
def test_grouped_layers_follow_it() -> None:
    experts = mf.GroupedLinear(2, 32, 16)

    def function(x):
        with mf.autocast(recipe="mxfp8"):
            y = experts(x, [3, 5])
        with mf.autocast(enabled=False):
            return y + experts(x, [3, 5])

    assert same(function, fullgraph=True) == 1


def test_it_wins_over_the_autocast_of_the_caller() -> None:
    function = torch.compile(nested, backend="eager", fullgraph=True)
    for around in (MXFP8BlockScaling(scale_rule="floor"), DelayedScaling(), None):
        with mf.autocast(recipe=around, enabled=around is not None):
            assert all(map(torch.equal, results(nested), results(function)))


def test_another_recipe_compiles_again_and_an_equal_one_does_not() -> None:
    counter = CompileCounterWithBackend("eager")

    def function(x, recipe):
        with mf.autocast(recipe=recipe):
            return FREE(x)

    compiled = torch.compile(function, backend=counter, fullgraph=True)
    recipes = [MXFP8BlockScaling, SEEDED.__class__, functools.partial(MXFP8BlockScaling, scale_rule="floor")]
    for make in (*recipes, *recipes):
        recipe = make()
        expected, actual = (results(functools.partial(run, recipe=recipe)) for run in (function, compiled))
        assert all(map(torch.equal, expected, actual))
    assert counter.frame_count == 3


@pytest.mark.slow("further programs of torch.compile")
def test_a_graph_that_ends_inside_runs_the_autocast_in_eager_mode() -> None:
    def breaks(x):
        with mf.autocast(recipe="mxfp8"):
            x = FREE(x)
            torch._dynamo.graph_break()
            assert context.ambient() is not None
            assert context.TRACED is None
            return FREE(x)

    def breaks_before(x):
        context = mf.autocast(recipe=MXFP8BlockScaling(scale_rule="floor"))
        torch._dynamo.graph_break()
        with context:
            x = FREE(x)
        return FREE(x)

    def made_by_the_caller(x):
        with ISLAND:
            return ROW(x)

    for function in (breaks, breaks_before, made_by_the_caller):
        assert same(function) >= 1


def test_state_stays_in_eager_mode_and_is_named_under_fullgraph() -> None:
    recipe, states = DelayedScaling(amax_history_len=3), []
    layers = mf.Linear(32, 32), mf.Linear(32, 32, recipe=recipe)

    def delayed(x, layers):
        with mf.autocast(recipe=recipe):
            x = layers[1](layers[0](x))
        with mf.autocast(recipe="mxfp8"):
            x = layers[1](layers[0](x))
        with mf.autocast(enabled=False, calibrating=True, recipe=recipe):
            return layers[0](x)

    for compile_it in (False, True):
        torch.manual_seed(0)
        layers = mf.Linear(32, 32), mf.Linear(32, 32, recipe=recipe)
        function = torch.compile(delayed, backend="aot_eager") if compile_it else delayed
        made = [results(functools.partial(function, layers=layers)) for _ in range(3)][-1]
        mf.update_scaling(layers[1])
        states.append([*made, *(value for layer in layers for value in layer.state_dict().values())])
    assert all(map(torch.equal, *states))

    def pinned(x):
        with mf.autocast(recipe="mxfp8"):
            return layers[1](x)

    for function in (functools.partial(delayed, layers=layers), pinned):
        with pytest.raises(Exception, match="got delayed scaling, calibrating or a group of processes"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(X)


def test_wrong_arguments_raise_what_they_raise_in_eager_mode() -> None:
    for error, options in ((InvalidTypeError, {"enabled": "mxfp8"}), (InvalidValueError, {"recipe": "mxfp9"})):

        def function(x, options=options):
            with mf.autocast(**options):
                return FREE(x)

        with pytest.raises(Exception, match="arguments that eager mode refuses"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(X)
        with pytest.raises(error):
            torch.compile(function, backend="aot_eager")(X)


@pytest.mark.slow_cases("further programs of a checked kind", all_but=("False",))
@pytest.mark.filterwarnings("ignore:.*certain side effects:UserWarning")  # of a value that only Dynamo sees
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_holds_its_autocasts(strict: bool) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free, self.row = mf.Linear(32, 32), mf.Linear(32, 32, recipe="fp8_row")

        def forward(self, x):
            with mf.autocast(recipe=Float8CurrentScaling()):
                x = self.row(self.free(x))
                with mf.autocast(enabled=False):
                    return self.row(x)

    model = Model()
    program = torch.export.export(model, (X,), strict=strict).module()
    for caller in ({"enabled": False}, {"recipe": SEEDED}):
        with mf.autocast(**caller):
            assert torch.equal(program(X), model(X))
    assert torch.equal(program(X), model(X))


@pytest.mark.slow("further programs of a checked kind")
def test_a_program_of_plain_operations_holds_its_autocasts() -> None:  # features G5
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.free, self.row = mf.Linear(32, 32), mf.Linear(32, 32, recipe="fp8_row")

        def forward(self, x):
            with mf.autocast(recipe=Float8CurrentScaling()):
                x = self.free(x)
                with mf.autocast(enabled=False):
                    return self.row(x)

    model = Model()
    assert torch.equal(mf.export(model, (X,)).module()(X), model(X))


def test_the_state_is_that_of_the_call_and_of_the_code():
    """`get_autocast_state`: its caller's autocasts, which may change, and those of the compiled function itself."""

    def asked(x):
        outside = mf.get_autocast_state()
        with mf.autocast(enabled=False), mf.autocast(recipe="fp8_row", backend="reference"):
            inside = mf.get_autocast_state()
        return x + 1, outside, inside

    compiled = torch.compile(asked, backend="eager", fullgraph=True)
    for names in ([], ["mxfp8"], ["mxfp8", "nvfp4"], [None], []):
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(mf.autocast(enabled=name is not None, recipe=name, calibrating=name is None))
            assert compiled(X)[1:] == asked(X)[1:]


def test_the_state_names_the_group_of_its_caller():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = [torch.distributed.new_group([0]), None, torch.distributed.new_group([0])]

        def asked(x):
            return x + 1, mf.get_autocast_state()

        compiled = torch.compile(asked, backend="eager", fullgraph=True)
        for group in groups:
            with mf.autocast(recipe="delayed", amax_reduction_group=group):
                assert compiled(X)[1].amax_reduction_group is asked(X)[1].amax_reduction_group is group
    finally:
        torch.distributed.destroy_process_group()
