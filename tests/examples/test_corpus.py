"""tools/corpus.py: documents in an order of their own, no near copies, and parts that arrive whole."""

import gzip
import hashlib
import importlib
import io
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import pytest


@pytest.fixture
def corpus(monkeypatch):
    """The module of tools/."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    return importlib.import_module("corpus")


def document(corpus, text, kind="code"):
    """A document of a package."""
    return corpus.Document(hashlib.sha256(text.encode()).digest(), kind, "some", text)


def lines(seed, count=60):
    """Long lines that no other seed has."""
    draw = random.Random(seed)
    return [" ".join(str(draw.random()) for _ in range(3)) for _ in range(count)]


def test_fifteen_packages_have_a_version_and_a_checksum(corpus):
    assert len({package.name for package in corpus.PACKAGES}) == len(corpus.PACKAGES) == 15
    assert all(len(package.sha256) == 64 and package.version and package.licence for package in corpus.PACKAGES)


def test_text_of_a_file(corpus):
    page = "<html><head><title>no</title></head><body><script>no()</script><p>a &lt; b</p>" + "<p>long enough</p>" * 40
    text = corpus.plain("a.html", page.encode())
    assert text.startswith("a < b\n")
    assert "no" not in text.replace("enough", "")
    assert corpus.plain("a.dict.dz", gzip.compress(b"word, a thing said\n" * 40)).startswith("word, a thing")
    assert corpus.plain("a.c", b"short") is None
    assert corpus.plain("a.c", b"x" * 5000) is None  # one line
    assert corpus.plain("a.c", b"\xff\xfe\0a" * 500) is None
    assert corpus.plain("a.c", b"caf\xe9\n" + b"plain text of a line\n" * 100).startswith("caf")  # of another encoding


def test_pieces_are_the_text(corpus):
    text = "\n".join(lines(1, 9000)) + "\n"
    parts = [*corpus.pieces(text)]
    assert "".join(parts) == text
    assert len(parts) > 5
    assert all(part.endswith("\n") and len(part) >= corpus.PIECE for part in parts[:-1])


def test_near_copies_are_left_out(corpus):
    own, other = lines(1), lines(2)
    first = document(corpus, "\n".join(own))
    nearly = document(corpus, "\n".join([*own[:50], *other[:10]]))
    half = document(corpus, "\n".join([*own[:20], *lines(3)]))
    assert [*corpus.distinct([first, nearly, half])] == [first, half]


def test_the_order_does_not_depend_on_the_packages_order(corpus, monkeypatch):
    monkeypatch.setattr(corpus, "CODE_LIMIT", 50)
    found = [
        document(corpus, text * 10, kind)
        for text, kind in (("a", "code"), ("b", "prose"), ("c", "code"), ("d", "code"))
    ]
    ordered = corpus.in_order([*found, found[0]])
    assert ordered == corpus.in_order(found[::-1] + found[:1])
    assert len(ordered) == len(set(ordered))
    monkeypatch.setattr(corpus, "CODE_LIMIT", 20)
    assert sum(one.kind == "code" for one in corpus.in_order(found)) == 2
    assert sum(one.kind == "prose" for one in corpus.in_order(found)) == 1


def test_sources_within_a_package_are_read(corpus):
    def archive(name, content, mode):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode=mode) as made:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            made.addfile(info, io.BytesIO(content))
        return file.getvalue()

    inner = archive("linux/kernel/fork.c", b"int fork;", "w:xz")
    outer = archive("./usr/src/linux.tar.xz", inner, "w")
    assert [*corpus.members(io.BytesIO(outer), "r|")] == [("linux/kernel/fork.c", b"int fork;")]


def test_what_is_packed_arrives_or_is_refused(corpus, tmp_path):
    draw = np.random.default_rng(0)
    streams = {name: draw.integers(0, 999, 4000).astype("<u2") for name in
               ("held_out_code", "held_out_prose", "train_code", "train_prose")}  # fmt: skip
    for name, stream in streams.items():
        stream.tofile(tmp_path / f"{name}.bin")
    (tmp_path / "card.json").write_text(json.dumps({"streams": {name: {"tokens": 4000} for name in streams}}))
    corpus.pack(tmp_path, tmp_path / "part", 2000, 0.25)
    corpus.unpack(tmp_path / "part", tmp_path / "there", None, 0.25)
    lengths = {name: np.fromfile(tmp_path / "there" / f"{name}.bin", "<u2") for name in streams}
    assert [len(one) for one in lengths.values()] == [4000, 4000, 1500, 500]
    assert all(np.array_equal(one, streams[name][: len(one)]) for name, one in lengths.items())
    corpus.pack(tmp_path, tmp_path / "less", 1000, 0.25)  # the same as the beginning of more
    corpus.unpack(tmp_path / "less", tmp_path / "few", None, 0.25)
    corpus.unpack(tmp_path / "part", tmp_path / "cut", 1000, 0.25)
    few, cut = ({file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("few", "cut"))
    assert few == cut
    card = json.loads((tmp_path / "part" / "card.json").read_text())
    card["streams"]["train_code"]["sha256"] = "0" * 64
    (tmp_path / "part" / "card.json").write_text(json.dumps(card))
    with pytest.raises(SystemExit, match=r"got SHA-256 \w+, needed 0000"):
        corpus.unpack(tmp_path / "part", tmp_path / "again", None, 0.25)
