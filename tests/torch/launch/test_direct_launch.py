"""Starting compiled kernels past Triton's call path: what is passed, and when Triton's own way is taken."""

import itertools
import threading
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
FUNCTIONS = itertools.count(1000)  # handles, each of a kernel that no launch has asked for yet
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


class Driver:
    """The driver's answers about functions that declare so many bytes of shared memory."""

    def __init__(self, declared: int, refuses: str = "") -> None:
        self.declared, self.refuses = declared, refuses
        self.allowed: list[tuple[int, int]] = []

    def cuFuncGetAttribute(self, value, attribute: int, function) -> int:
        assert attribute == 1  # CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
        value._obj.value = self.declared
        return int(self.refuses == "get")

    def cuFuncSetAttribute(self, function, attribute: int, size: int) -> int:
        assert attribute == 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self.allowed.append((function.value, size))
        return int(self.refuses == "set")


@pytest.fixture
def asks(compiled, monkeypatch):
    """``asks(driver, needed, spread)``: the bytes that a launch asks for, None where it is refused."""
    monkeypatch.setattr(program.torch.cuda, "current_device", lambda: 0)
    compiled.function = next(FUNCTIONS)

    def ask(answers: Driver, needed: int, spread: int) -> int | None:
        monkeypatch.setattr(program.ctypes, "CDLL", lambda name: answers)
        bind = program.starter(compiled, needed, spread)
        if bind is None:
            return None
        launched(bind)
        return compiled.run.launch.calls[-1][9][2]

    return ask


@needs_known_launcher
def test_a_launch_asks_for_the_shared_memory_that_keeps_programs_apart(compiled, asks) -> None:
    answers = Driver(declared=19520)
    compiled.packed_metadata = (8, 1, 32)
    alone, beside = asks(answers, 66000, 1), asks(answers, 66000, 2)
    assert alone is not None
    assert beside is not None
    of_all, of_system = 228 << 10, 1 << 10  # CUDA C++ Programming Guide, compute capability 9.0
    for size, programs in ((alone, 1), (beside, 2)):
        one = size + answers.declared + of_system
        assert programs * one <= of_all < (programs + 1) * one
    assert asks(answers, 66000, 0) == 66032  # as many as fit, behind what Triton has asked for
    assert asks(answers, 200000, 2) == 200032  # more than that would leave to two of them
    # What was allowed stays so, since other launches of the function ask for more.
    assert answers.allowed == [(compiled.function, alone)] * 4


@needs_known_launcher
def test_a_driver_that_allows_no_more_shared_memory_refuses_the_launch(asks) -> None:
    assert [asks(Driver(0, refuses), 1024, 0) for refuses in ("get", "set")] == [None, None]
    assert asks(Driver(0), 1024, 0) == 1024


@needs_known_launcher
def test_what_a_driver_has_refused_is_not_asked_for_again(asks) -> None:
    answers = Driver(0, "set")
    assert asks(answers, 2048, 0) is None
    answers.refuses = ""
    assert asks(answers, 1024, 0) == 1024
    assert [size for _, size in answers.allowed] == [2048, 1024]


@needs_known_launcher
def test_threads_leave_the_most_that_one_of_them_has_asked_for(monkeypatch) -> None:
    """A second thread asks for more while the driver answers the first."""
    function, begun, answers = next(FUNCTIONS), threading.Event(), Driver(0)
    answer = answers.cuFuncSetAttribute

    def slowly(handle, attribute: int, size: int) -> int:
        if size == 1024:
            begun.set()
            second.join(0.05)
        return answer(handle, attribute, size)

    def ask_for_more() -> None:
        begun.wait(5)
        program.shared_memory(function, 2048, 0)

    monkeypatch.setattr(answers, "cuFuncSetAttribute", slowly)
    monkeypatch.setattr(program.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(program.ctypes, "CDLL", lambda name: answers)
    second = threading.Thread(target=ask_for_more)
    second.start()
    assert program.shared_memory(function, 1024, 0) == 1024
    second.join(5)
    assert [size for _, size in answers.allowed] == [1024, 2048]


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("too many resources requested for launch", True), ("invalid argument", True),
        ("an illegal memory access was encountered", False), ("out of memory", False),
    ],
)  # fmt: skip
def test_only_what_a_driver_does_not_begin_counts_as_refused(monkeypatch, text: str, is_refused: bool) -> None:
    """A kernel that had failed before, and broken the context, had the next one divided otherwise."""
    texts = {1: b"invalid argument", 700: b"an illegal memory access was encountered",
             701: b"too many resources requested for launch"}  # fmt: skip

    def text_of(code: int, pointer) -> int:
        pointer._obj.value = texts.get(code)
        return int(code not in texts)  # as a driver that is older than the code

    def start(*_: object) -> None:
        raise RuntimeError(f"Triton Error [CUDA]: {text}")

    monkeypatch.setattr(program.ctypes, "CDLL", lambda name: types.SimpleNamespace(cuGetErrorString=text_of))
    monkeypatch.setattr(program, "starter", lambda *_: lambda *_: start)
    monkeypatch.setattr(program, "raw_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    kernel = program.PlacedKernel(types.SimpleNamespace(warmup=lambda *_, **__: None), spread=2)
    with pytest.raises(program.PlacingRefused if is_refused else RuntimeError, match=None if is_refused else text):
        kernel.compile((), 1, (), (), (), program.Warps(4))


@needs_known_launcher
def test_without_a_driver_there_is_no_more_shared_memory(compiled, monkeypatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(program.ctypes, "CDLL", missing)
    assert program.starter(compiled, 1024) is None
    assert program.starter(compiled) is not None


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
