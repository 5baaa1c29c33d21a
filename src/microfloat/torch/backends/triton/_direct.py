"""Starting a compiled Triton kernel without Triton's own call path: all that depends on Triton's version is here.

A launch through a JITFunction examines every argument; a compiled kernel takes raw addresses and sizes and costs a
third of that. Which of its private parts exist differs between versions, so every form is checked before it is used,
and the ordinary path remains where none fits.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["Start", "starter"]


class Start(NamedTuple):
    """How to start a compiled kernel. `rest`: scalars and constants in the kernel's order, after all addresses."""

    start: Callable[[int, int, Sequence[int | None], tuple], None]  # (programs, stream, addresses, rest)
    bind: Callable[[int, tuple], Callable[..., None]]  # (programs, rest) -> (stream, *addresses) -> None


# The arguments before the kernel's own in the launcher of Triton 3.5 and 3.6: grid (3), stream, function, cooperative
# and dependent launch, both scratch buffers, metadata, launch metadata, both hooks.
_LAUNCHER_FORMAT = "iiiKKppOOOOOO"
_LAUNCHER_PARTS = ("launch", "launch_cooperative_grid", "launch_pdl")


def starter(compiled: Any, cluster: int = 1) -> Start | None:
    """How to start a compiled kernel with raw addresses on the current device; None where only Triton's way is safe.

    Launch hooks (a profiler's) are called as Triton calls them: while any is installed, `Start` goes its way.
    `cluster`: so many programs run at once as a cluster, and `programs` counts clusters.
    """
    launcher = getattr(compiled, "run", None)  # loads the binary on first use
    function, metadata = getattr(compiled, "function", None), getattr(compiled, "packed_metadata", None)
    if launcher is None or function is None or metadata is None or not callable(launcher):
        return None
    enter, leave = _hooks()
    if enter is None or leave is None or not hasattr(compiled, "launch_metadata"):
        return None

    def ordinary(programs: int, stream: int, addresses: Sequence[int | None], rest: tuple) -> None:
        about = compiled.launch_metadata((programs, 1, 1), stream, *addresses, *rest)
        launcher(programs, 1, 1, stream, function, metadata, about, enter, leave, *addresses, *rest)

    def bind_ordinary(programs: int, rest: tuple) -> Callable[..., None]:
        return lambda stream, *addresses: ordinary(programs, stream, addresses, rest)

    is_known = _is_known(launcher)
    if cluster > 1:
        # Triton's launcher takes the size of a cluster from the number that a kernel was compiled for, which is 1.
        if not is_known or not isinstance(metadata, tuple) or len(metadata) != 3 or metadata[1] != 1:
            return None
        metadata = (metadata[0], cluster, metadata[2])
    if not is_known:
        return Start(ordinary, bind_ordinary)
    launch, cooperative, dependent = (getattr(launcher, name) for name in _LAUNCHER_PARTS)
    entering, leaving = enter.calls, leave.calls  # the chains' own lists: hooks come and go in place

    def start(programs: int, stream: int, addresses: Sequence[int | None], rest: tuple) -> None:
        if entering or leaving:
            ordinary(programs, stream, addresses, rest)
            return
        launch(
            programs, 1, 1, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
            *addresses, *rest,
        )  # fmt: skip

    def bind(programs: int, rest: tuple) -> Callable[..., None]:
        def at(stream: int, *addresses: int | None) -> None:
            if entering or leaving:
                ordinary(programs, stream, addresses, rest)
                return
            launch(
                programs, 1, 1, stream, function, cooperative, dependent, None, None, metadata, None, None, None,
                *addresses, *rest,
            )  # fmt: skip

        return at

    return Start(start, bind)


def _hooks() -> tuple[Any, Any]:
    """Triton's chains of launch hooks, or None for one that is no such chain."""
    try:
        from triton import knobs
    except ImportError:
        return None, None
    chains = (getattr(knobs.runtime, name, None) for name in ("launch_enter_hook", "launch_exit_hook"))
    enter, leave = (chain if isinstance(getattr(chain, "calls", None), list) else None for chain in chains)
    return enter, leave


def _is_known(launcher: Any) -> bool:
    """Whether a launcher is the one of Triton 3.5 and 3.6, for a kernel that needs no scratch memory."""
    try:
        from triton.backends.nvidia import driver
    except ImportError:
        return False
    return (
        getattr(driver, "_BASE_ARGS_FORMAT", None) == _LAUNCHER_FORMAT
        and type(launcher) is getattr(driver, "CudaLauncher", None)
        and getattr(launcher, "global_scratch_size", None) == 0
        and getattr(launcher, "profile_scratch_size", None) == 0
        and all(hasattr(launcher, name) for name in _LAUNCHER_PARTS)
    )
