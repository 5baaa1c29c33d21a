"""Checkpoints and other files are whole, or refused with a message that helps."""

import numpy as np
import pytest

pytest.importorskip("safetensors")
from gpt.files import load_checkpoint, save_checkpoint, write_atomically

from microfloat.errors import CheckpointError, MicrofloatError

STATE = np.arange(4096, dtype=np.float32).tobytes()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "checkpoints" / "mxfp8.zip"
    save_checkpoint(path, {"step": 3, "loss": 0.1}, STATE)
    return path


def test_what_was_saved_comes_back(saved):
    assert load_checkpoint(saved) == ({"step": 3, "loss": 0.1}, STATE)
    assert list(saved.parent.iterdir()) == [saved]


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_a_truncated_file_is_refused(saved, keep):
    saved.write_bytes(saved.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"cannot read the checkpoint .*mxfp8\.zip \(.*Delete that file"):
        load_checkpoint(saved)


def test_one_changed_bit_is_found(saved):
    content = bytearray(saved.read_bytes())
    content[bytes(content).index(STATE) + 5000] ^= 1
    saved.write_bytes(content)
    with pytest.raises(CheckpointError, match="CRC"):
        load_checkpoint(saved)


def test_foreign_files_are_refused(tmp_path):
    np.savez(tmp_path / "other.zip.npz", weight=np.ones(2))
    with pytest.raises(CheckpointError, match=r"facts\.json"):
        load_checkpoint(tmp_path / "other.zip.npz")


def test_a_failed_write_leaves_the_old_file(saved):
    before = saved.read_bytes()

    def fail(temporary):
        temporary.write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(MicrofloatError, match="disk full"):
        write_atomically(saved, fail)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
