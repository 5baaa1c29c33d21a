"""Collectives on a stream of their own, with streams that only write down what they are told."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat.errors import RankError  # noqa: E402
from microfloat.torch.distributed import collectives  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True
    kept_for: list = []  # noqa: RUF012

    def get_device(self) -> int:
        return 0

    def record_stream(self, stream) -> None:
        self.kept_for.append(stream.name)


class Stream:
    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told, self.events = name, told, 0

    def wait_stream(self, other) -> None:
        self.told.append(f"{self.name} waits for {other.name}")

    def record_event(self) -> str:
        self.events += 1
        self.told.append(f"{self.name} records {self.events}")
        return f"{self.name} {self.events}"

    def wait_event(self, event: str) -> None:
        self.told.append(f"{self.name} waits for {event}")


@pytest.fixture
def told(monkeypatch) -> list[str]:
    told: list[str] = []
    current, beside = Stream("current", told), Stream("beside", told)

    @contextlib.contextmanager
    def entered(stream):
        told.append(f"on {stream.name}")
        yield
        told.append("on current")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: beside)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(collectives, "reduce_scatter", lambda *tensors, group: told.append("scatter"))
    collectives.stream_beside.cache_clear()
    yield told
    collectives.stream_beside.cache_clear()


def test_a_collective_begins_before_the_kernels_that_follow(told) -> None:
    under_way = collectives.scatter_sum(torch.ones(4, 2).as_subclass(OnGpu), 0, 2, None, apart=True)
    begun = ["beside waits for current", "beside records 1", "on beside", "scatter", "on current", "beside records 2"]
    assert told == [*begun, "current waits for beside 1"]
    assert under_way.is_awaited
    assert under_way.wait().shape == (2, 2)
    assert told[7:] == ["current waits for beside 2"]
    under_way.wait()
    assert len(told) == 8
    assert not under_way.is_awaited


def test_memory_of_a_collective_that_nobody_waits_for_is_not_used_again(told, monkeypatch) -> None:
    monkeypatch.setattr(OnGpu, "kept_for", [])
    collectives.scatter_sum(torch.ones(4, 2).as_subclass(OnGpu), 0, 2, None, apart=True).wait()
    assert OnGpu.kept_for == []
    collectives.scatter_sum(torch.ones(4, 2).as_subclass(OnGpu), 0, 2, None, apart=True)
    assert OnGpu.kept_for == ["beside", "beside"]  # what it reads and what it writes


def test_products_leave_room_as_long_as_they_have_company() -> None:
    before = torch._C._get_sm_carveout_experimental()
    for under_way, device, room in ((True, 0, collectives.ROOM), (False, 0, before), (True, -1, before)):
        with contextlib.suppress(KeyError), collectives.leaving_room(under_way, device):
            assert torch._C._get_sm_carveout_experimental() == room
            raise KeyError
        assert torch._C._get_sm_carveout_experimental() == before


def test_a_collective_that_fails_while_it_is_waited_for_is_named(monkeypatch) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(collectives, "all_gather", lambda *tensors, group, async_op: Broken())
    with world_of_one():
        under_way = collectives.gather_bytes([torch.zeros(4, dtype=torch.uint8)], 1, torch.distributed.group.WORLD)
        with pytest.raises(RankError, match="the all-gather of codes and scales of a sharded layer failed"):
            under_way.wait()
