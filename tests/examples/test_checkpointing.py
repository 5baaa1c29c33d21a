"""Checkpoints are whole or refused with a message that helps."""

import pytest

torch = pytest.importorskip("torch")
from gpt.checkpointing import load_checkpoint, save_checkpoint  # noqa: E402
from gpt.files import write_atomically  # noqa: E402

from microfloat.errors import CheckpointError  # noqa: E402


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoints" / "mxfp8.pt"
    save_checkpoint(path, {"step": 3, "model": {"weight": torch.arange(4096.0)}})
    return path


def test_what_was_saved_comes_back(saved):
    state = load_checkpoint(saved)
    assert state["step"] == 3
    assert state["model"]["weight"].equal(torch.arange(4096.0))
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*mxfp8\.pt \(.*Delete that file"):
        load_checkpoint(saved)


def test_one_changed_bit_in_a_tensor_is_found(saved):
    content = bytearray(saved.read_bytes())
    weight = torch.arange(4096.0).numpy().tobytes()
    content[bytes(content).index(weight) + 5000] ^= 1
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        load_checkpoint(saved)


def test_foreign_files_are_refused(tmp_path):
    torch.save({"weight": torch.ones(2)}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match="not written by this program"):
        load_checkpoint(tmp_path / "other.pt")


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Payload:
        def __reduce__(self):
            return (tmp_path.joinpath("ran").touch, ())

    torch.save({"format": "?", "step": Payload()}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(tmp_path / "bad.pt")
    assert not (tmp_path / "ran").exists()


def test_a_failed_write_leaves_the_old_file(saved):
    before = saved.read_bytes()

    def fail(temporary):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(saved, fail)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
