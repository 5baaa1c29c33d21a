"""The corpus: real text, a stable order, disjoint files, batches that depend on (seed, step) alone."""

import numpy as np
import pytest
from gpt.data import HELD_OUT_EVERY, load_corpus, standard_library_files

from microfloat.errors import InvalidValueError, MicrofloatError


@pytest.fixture
def library(tmp_path):
    """Sixty source files, and folders that must not be read."""
    for index in range(60):
        folder = tmp_path / ("package" if index % 2 else ".")
        folder.mkdir(exist_ok=True)
        (folder / f"module{index:02}.py").write_bytes(f"<{index:02}>".encode() * 10)
    for skipped in ("site-packages", "test", "package/__pycache__", "config-3.11"):
        (tmp_path / skipped).mkdir(parents=True)
        (tmp_path / skipped / "aaa.py").write_bytes(b"must not be read")
    (tmp_path / "_sysconfigdata_linux.py").write_bytes(b"must not be read")
    return tmp_path


def test_the_standard_library_is_text_enough():
    corpus = load_corpus(4_000_000)
    assert len(corpus.train) > 1_000_000
    assert len(corpus.train) + len(corpus.held_out) <= 4_000_000
    assert b"import" in corpus.train.tobytes()
    assert corpus.digest == load_corpus(4_000_000).digest


def test_files_are_sorted_and_only_the_librarys(library):
    names = [path.relative_to(library).as_posix() for path in standard_library_files(library)]
    assert names == sorted(names)
    assert len(names) == 60


def test_every_twentieth_file_is_held_out_and_in_no_training_window(library):
    corpus = load_corpus(10**6, library)
    files = [path.read_bytes() for path in standard_library_files(library)]
    held_out = files[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    assert corpus.held_out.tobytes() == b"".join(held_out)
    assert corpus.train.tobytes() == b"".join(file for file in files if file not in held_out)


def test_the_cap_cuts_between_files(library):
    corpus = load_corpus(1000, library)  # forty bytes each
    assert (corpus.files, len(corpus.train), len(corpus.held_out)) == (25, 24 * 40, 40)


def test_batches_are_windows_that_depend_on_seed_and_step(library):
    corpus = load_corpus(10**6, library)
    tokens = corpus.batch(seed=7, step=3, batch=5, context=24)
    assert tokens.shape == (5, 25)
    assert all(bytes(window.tolist()) in corpus.train.tobytes() for window in tokens)
    assert np.array_equal(tokens, corpus.batch(seed=7, step=3, batch=5, context=24))
    assert not np.array_equal(tokens, corpus.batch(seed=7, step=4, batch=5, context=24))
    assert not np.array_equal(tokens, corpus.batch(seed=8, step=3, batch=5, context=24))


def test_held_out_windows_are_spread_over_the_stream(library):
    corpus = load_corpus(10**6, library)
    batches = corpus.held_out_batches(5, batch=2, context=8)
    assert [len(batch) for batch in batches] == [2, 2, 1]
    first, last = batches[0][0].tolist(), batches[-1][-1].tolist()
    assert bytes(first) == corpus.held_out[:9].tobytes()
    assert bytes(last) == corpus.held_out[-9:].tobytes()
    few = corpus.held_out_batches(10**6, batch=1, context=8)
    assert len(few) == (len(corpus.held_out) - 1) // 8


def test_too_little_text_is_said(library, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(MicrofloatError, match="found 0 Python source files"):
        load_corpus(10**6, tmp_path / "empty")
    # Twenty files of forty bytes each.
    with pytest.raises(InvalidValueError, match="--corpus-bytes: got 799, needed at least 800"):
        load_corpus(799, library)
    assert load_corpus(800, library).files == 20
    corpus = load_corpus(10**6, library)
    with pytest.raises(InvalidValueError, match="--context: got 1000"):
        corpus.held_out_batches(4, 2, 1000)
    with pytest.raises(InvalidValueError, match=f"the {len(corpus.train)} bytes"):
        corpus.batch(0, 0, 2, len(corpus.train))


def test_the_last_window_of_a_stream_can_be_drawn(library):
    corpus = load_corpus(10**6, library)
    context = len(corpus.train) - 1
    assert np.array_equal(corpus.batch(0, 0, 1, context)[0], corpus.train)
