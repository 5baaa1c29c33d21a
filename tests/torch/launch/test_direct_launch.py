"""Starting compiled kernels past Triton's call path: what is passed, and when Triton's own way is taken."""

import types

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from triton import knobs  # noqa: E402
from triton.backends.nvidia import driver  # noqa: E402

from microfloat.torch.launch import program  # noqa: E402

needs_known_launcher = pytest.mark.skipif(
    not hasattr(driver, "_BASE_ARGS_FORMAT"), reason="this Triton's launcher is not the one that is called directly"
)
ADDRESSES, REST = [16, None, 32], (5, 2.0, (3, 7), True)


class Recorder:
    """Keeps the arguments of every call."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def __call__(self, *arguments: object) -> None:
        self.calls.append(arguments)


@pytest.fixture
def compiled():
    """A compiled kernel as Triton 3.6 has it, whose C function is a Recorder."""
    launcher = object.__new__(driver.CudaLauncher)
    launcher.launch, launcher.num_ctas = Recorder(), 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    return types.SimpleNamespace(
        run=launcher, function=99, packed_metadata=(4, 1, 0), launch_metadata=lambda grid, stream, *arguments: "about"
    )


def launched(bind: program.Bind) -> None:
    bind(6, REST)(1234, *ADDRESSES)


def launched_under_a_hook(bind: program.Bind) -> None:
    hook = lambda about: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        launched(bind)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)


@needs_known_launcher
def test_the_launcher_gets_what_triton_would_give_it(compiled) -> None:
    bind = program.starter(compiled)
    assert bind is not None
    launched(bind)
    # Triton's own call, by its wrapper.
    compiled.run(6, 1, 1, 1234, 99, (4, 1, 0), None, None, None, *ADDRESSES, *REST)
    direct, ordinary = compiled.run.launch.calls
    assert direct == ordinary


@needs_known_launcher
def test_installed_hooks_are_called_tritons_way(compiled) -> None:
    bind = program.starter(compiled)
    assert bind is not None
    launched_under_a_hook(bind)
    for call in compiled.run.launch.calls:
        assert call[9:13] == ((4, 1, 0), "about", knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook)
        assert call[13:] == (*ADDRESSES, *REST)
    launched(bind)
    assert compiled.run.launch.calls[-1][10:13] == (None, None, None)


def test_scratch_memory_and_other_launchers_go_through_their_wrapper(compiled) -> None:
    compiled.run = Recorder()  # some other version's launcher
    bind = program.starter(compiled)
    assert bind is not None
    launched(bind)
    assert len(compiled.run.calls) == 1
    assert compiled.run.calls[0][:6] == (6, 1, 1, 1234, 99, (4, 1, 0))


@needs_known_launcher
def test_a_launcher_of_another_signature_is_not_called_directly(compiled, monkeypatch) -> None:
    monkeypatch.setattr(driver, "_BASE_ARGS_FORMAT", "iiiKK")
    assert not program.is_known(compiled.run)
    monkeypatch.undo()
    assert program.is_known(compiled.run)
    compiled.run.global_scratch_size = 64
    assert not program.is_known(compiled.run)


@pytest.mark.parametrize("missing", ["run", "function", "packed_metadata", "launch_metadata"])
def test_without_its_parts_tritons_way_remains(compiled, missing: str) -> None:
    delattr(compiled, missing)
    assert program.starter(compiled) is None
