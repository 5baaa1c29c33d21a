"""Collectives that are started and waited for."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat.errors import RankError  # noqa: E402
from microfloat.torch.distributed import collectives  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402


def test_a_collective_that_fails_while_it_is_waited_for_is_named(monkeypatch) -> None:
    class Broken:
        def wait(self) -> None:
            raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(collectives, "all_gather", lambda *tensors, group, async_op: Broken())
    with world_of_one():
        under_way = collectives.gather_bytes([torch.zeros(4, dtype=torch.uint8)], 1, torch.distributed.group.WORLD)
        for _ in range(2):  # a caller that goes on must not read what has not come
            with pytest.raises(RankError, match="the all-gather of codes and scales of a sharded layer failed"):
                under_way.wait()
