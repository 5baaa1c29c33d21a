"""Collectives that fail, and the order of what they have gathered."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from microfloat.errors import RankError  # noqa: E402
from microfloat.layout import Part  # noqa: E402
from microfloat.torch.distributed import collectives  # noqa: E402
from microfloat.torch.distributed.tp_shards import Axis  # noqa: E402
from tests.torch.distributed.world import world_of_one  # noqa: E402


def test_a_collective_that_fails_is_named(monkeypatch) -> None:
    def broken(*tensors, group) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    monkeypatch.setattr(collectives, "all_gather", broken)
    with world_of_one():
        axis = Axis("G", torch.distributed.group.WORLD.group_name, 1, 0)
        parts = [(torch.zeros((4, 4), dtype=torch.uint8), Part((5, 4), (4, 1), "uint8"))]
        with pytest.raises(RankError, match="the all-gather of codes and scales of a sharded layer failed"):
            collectives.gather_parts(parts, 1, axis)


@pytest.mark.parametrize("outer", [1, 2])
@pytest.mark.parametrize("strides", [(6, 1), (1, 24)])
def test_gathered_rows_stand_in_the_order_of_the_whole(monkeypatch, outer, strides) -> None:
    """Each of three ranks has rows of every outer part, in either memory order."""
    whole = torch.arange(24 * 6, dtype=torch.int16).view(outer, 3, -1, 6)
    shares = [whole[:, rank].reshape(-1, 6) for rank in range(3)]
    shares = [one.t().contiguous().t() if strides[0] == 1 else one for one in shares]

    def gather(received, sent, group) -> None:
        lying = [one.t() if strides[0] == 1 else one for one in shares]
        received[0].copy_(torch.cat([one.reshape(-1).view(torch.uint8) for one in lying]))

    monkeypatch.setattr(collectives, "group_of", lambda axis: None)
    monkeypatch.setattr(collectives, "all_gather_together", gather)
    goal = Part((24, 6), strides, "int16")
    (made,) = collectives.gather_parts([(shares[0], goal)], outer, Axis("G", "", 3, 0))
    assert torch.equal(made, whole.reshape(24, 6))
    assert made.stride() == strides
