"""Build the text of examples/study.py from fifteen packages of Debian, fixed by version and checksum: `make corpus`.

    python tools/corpus.py --out .data/corpus    # fetch, extract, train the tokenizer, encode: half an hour
    python tools/corpus.py --out .data/corpus --pack .data/part0 --tokens 66000000   # the beginning, to carry elsewhere
    python tools/corpus.py --unpack .data/part0 --out .data/corpus                   # there; checked against the card

Code and prose are two streams. A document is a file, or 64 kB of a longer one; documents come in the order of their
SHA-256, so every beginning of a stream is a fair sample of it and the same packages give the same bytes. The first
documents of each stream are held out, a million tokens of each. A later document is left out if three fifths of its
lines stand in an earlier one. The tokenizer is byte-level BPE of 32,768 entries, trained on documents that are not held
out. card.json holds counts, licences, versions and the checksums. Nothing of it is committed.

Needs apt-get and dpkg-deb, and the package `tokenizers`, except for --unpack.
"""

import argparse
import gzip
import hashlib
import html
import json
import lzma
import re
import subprocess
import sys
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np


class Package(NamedTuple):
    """A package of Debian, what of it is read, and the licence that its copyright file names first."""

    name: str
    version: str
    sha256: str
    licence: str
    code: str = "(?!)"  # regular expressions of the paths in the package, or in the archive of sources within it
    prose: str = "(?!)"


SOURCES = r"\.(c|h|S|py|sh|pl|rs|go|y|l)$"
PACKAGES = (
    Package(
        "linux-source-6.12", "6.12.117-1~deb12u1", "e849faf31ca3555757f3a8877cb01af92122f744f75d1f3102734651c4e14703",
        "GPL-2", rf"^(?!.*(/amd/include/|/translations/)).*{SOURCES}", r"/Documentation/(?!translations).*\.(rst|txt)$",
    ),
    Package(
        "glibc-source", "2.36-9+deb12u14", "8e9f57b1df23396b05cf5b1561fd83bd53dc01b86432fd2dc75ab7b48645c3b2",
        "LGPL-2.1", SOURCES, r"/manual/.*\.texi$",
    ),
    Package(
        "golang-1.19-src", "1.19.8-2", "2dfa82fe4f08f4e0193c532e561af4c91871f5235608f04f2bb8d57bb288df5a",
        "BSD-3-clause", r"\.go$",
    ),
    Package(
        "rust-src", "1.63.0+dfsg1-2", "410b8c6d464cabbe5fb3154ab8c3d374980dd597fbe7e3b7bb3ed8dd1bf11e25",
        "MIT or Apache-2.0", r"\.rs$", r"\.md$",
    ),
    Package(
        "libpython3.11-stdlib", "3.11.2-6+deb12u9", "10f13e000ee757f5f2d2d3569f9e30546214a0c850acd78695feae373bfa3e53",
        "PSF-2", r"\.py$",
    ),
    Package(
        "vim-runtime", "2:9.0.1378-2+deb12u2", "6a3dd2317a593742cb247f3494d986b3127887dbe1449253b8efa6112289854e",
        "Vim", r"\.vim$", r"/doc/.*\.txt$",
    ),
    Package(
        "llvm-19-doc", "1:19.1.7-3~deb12u1", "00428729820daa2e9f5d189675ce61cfa8dc5a6d1672bfc3a1be426836fd757c",
        "Apache-2.0 with LLVM exception", prose=r"/_sources/.*\.txt$",
    ),
    Package(
        "python3.11-doc", "3.11.2-6+deb12u9", "5b3594189d6ef9a6963ce0347fd307a1cc67620ad697e144db366070e2e146be",
        "PSF-2", prose=r"/_sources/.*\.txt$",
    ),
    Package(
        "perl-doc", "5.36.0-7+deb12u4", "f4269cff4576d6f02a6756df842988e58451c7e945b08517dd235531b24e48f8",
        "Artistic or GPL-1+", prose=r"\.pod$",
    ),
    Package(
        "postgresql-doc-15", "15.20-0+deb12u1", "4c44bf2c599f208b3f46454a6cf7a72e25ec46ff74d37b59dd31ad76b00eebb7",
        "PostgreSQL", prose=r"\.html$",
    ),
    Package(
        "dict-gcide", "0.48.5+nmu2", "7b0af5cfde3cbdef5e9d6e78f92ec335ced7c2790f37a40f49bebc6f7347ac0f",
        "GPL-2+", prose=r"\.dict\.dz$",
    ),
    Package(
        "libreoffice-help-en-us", "4:7.4.7-1+deb12u14",
        "8faa840285734d6cfe1ed25537b48f07e74bd6412e3917bf8e5f8a653f7b3712", "MPL-2.0", prose=r"/text/.*\.html$",
    ),
    Package(
        "git-doc", "1:2.39.5-0+deb12u3", "3c89668a11053a6bafade3de1f611f4613db31e082af63f43d8c5b69ad8795ec",
        "GPL-2", prose=r"\.(txt|adoc)$",
    ),
    Package(
        "sqlite3-doc", "3.40.1-2+deb12u2", "466e30d7066e2641fa13e56bc662a2ad521b8cc9c17dde9c9dac3d4f105e32f2",
        "public domain", prose=r"\.html$",
    ),
    Package(
        "debian-handbook", "11.20220922", "3d5dbeac1f1afc9c094eab9d0f701f6ecff99c4927d5a4794cf6c85678134faa",
        "CC-BY-SA-3.0 or GPL-2+", prose=r"/html/en-US/.*\.html$",
    ),
)  # fmt: skip
ENTRIES, END = 1 << 15, 0  # of the tokenizer; the token between documents
PIECE, SHORTEST, WIDEST = 1 << 16, 256, 200  # characters of a document, and on average of its lines
CODE_LIMIT, TOKENIZER_TEXT, HELD_OUT = 640_000_000, 24_000_000, 1_000_000  # characters; of each kind; tokens of each
KINDS = ("code", "prose")


class Document(NamedTuple):
    """Text of one kind, and the package that it is from."""

    digest: bytes
    kind: str
    package: str
    text: str


def fetch(package: Package, folder: Path) -> Path:
    """The package's file below `folder`, fetched if it is not there. Exits where its checksum is another."""
    file = folder / f"{package.name}.deb"
    if not file.exists():
        for old in folder.glob(f"{package.name}_*.deb"):
            old.unlink()
        subprocess.run(["apt-get", "download", f"{package.name}={package.version}"], cwd=folder, check=True)
        next(folder.glob(f"{package.name}_*.deb")).rename(file)
    found = hashlib.sha256(file.read_bytes()).hexdigest()
    if found != package.sha256:
        sys.exit(
            f"{file}: got SHA-256 {found}, needed {package.sha256}. Delete it and fetch version {package.version}."
        )
    return file


def members(stream: IO[bytes], mode: str) -> Iterator[tuple[str, bytes]]:
    """Paths and bytes of the files of an archive, with those of an archive of sources within it."""
    with tarfile.open(fileobj=stream, mode=mode) as archive:
        for member in archive:
            if not member.isfile():
                continue
            file = archive.extractfile(member)
            assert file is not None
            if member.name.endswith(".tar.xz"):
                yield from members(file, "r|xz")
            else:
                yield member.name, file.read()


def plain(path: str, raw: bytes) -> str | None:
    """Text of a file: decoded, without the tags of HTML; None for one that is no text or has very long lines."""
    text = (gzip.decompress(raw) if path.endswith(".dz") else raw).decode("utf-8", "replace")
    if "\0" in text or text.count("\ufffd") > len(text) / 1000:
        return None
    if path.endswith(".html"):
        text = re.sub(r"(?is)<(script|style|head|nav)\b.*?</\1>|<!--.*?-->", " ", text)
        text = re.sub(r"(?i)</?(p|div|h\d|li|tr|dt|dd|pre|table|ul|ol)\b[^>]*>|<br[^>]*>", "\n", text)
        text = html.unescape(re.sub(r"<[^>]*>", "", text))
    text = re.sub(r"[ \t]+\n", "\n", text.replace("\r\n", "\n"))
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return text if len(text) >= SHORTEST and len(text) / text.count("\n") <= WIDEST else None


def pieces(text: str) -> Iterator[str]:
    """The text in parts of `PIECE` characters or a little more, each ending with a line."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE)
        end = len(text) if end < 0 or len(text) - end < SHORTEST else end + 1
        yield text[start:end]
        start = end


def documents(package: Package, file: Path) -> Iterator[Document]:
    """All documents of a package."""
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", file], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for path, raw in members(process.stdout, "r|"):
            kind = next((kind for kind in KINDS if re.search(getattr(package, kind), f"/{path}")), None)
            text = plain(path, raw) if kind else None
            for part in pieces(text) if text else ():
                yield Document(hashlib.sha256(part.encode()).digest(), kind, package.name, part)
        process.stdout.read()


def in_order(found: list[Document]) -> list[Document]:
    """The documents by their digests, each once, and the beginning of the code."""
    ordered, last, code = [], b"", 0
    for document in sorted(found):
        code += len(document.text) * (document.kind == "code")
        if document.digest != last and (document.kind != "code" or code <= CODE_LIMIT):
            ordered.append(document)
        last = document.digest
    return ordered


def distinct(found: list[Document]) -> Iterator[Document]:
    """Those of which less than three fifths stand in earlier ones, by a sample of one in four of their longer lines."""
    seen: set[int] = set()
    for document in found:
        lines = {zlib.crc32(line) for line in document.text.encode().split(b"\n") if len(line) >= 24}
        sample = {line for line in lines if line % 4 == 0}
        if len(sample) < 8 or len(sample & seen) < 0.6 * len(sample):
            yield document
        seen |= sample


def train_tokenizer(texts: list[str], file: Path) -> None:
    """Write a byte-level BPE tokenizer of `ENTRIES` entries; token 0 ends a document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=ENTRIES, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(file))


def build(out: Path) -> None:
    """Write the streams, the tokenizer and the card below `out`."""
    fetched = out / "packages"
    fetched.mkdir(parents=True, exist_ok=True)
    found: list[Document] = []
    read: dict[str, int] = {}
    for package in PACKAGES:
        before = len(found)
        found += documents(package, fetch(package, fetched))
        read[package.name] = len(found) - before
        print(f"{package.name}: {read[package.name]} documents", flush=True)
    kept = list(distinct(in_order(found)))
    del found
    print(f"kept {len(kept)} documents", flush=True)
    # Held out are some six million characters of each kind; their tokens are counted below.
    tokenizer_file = out / "tokenizer.json"
    if not tokenizer_file.exists():
        texts = []
        for kind in KINDS:
            begin = 6_000_000
            for document in kept:
                if document.kind == kind:
                    begin -= len(document.text)
                    if -TOKENIZER_TEXT < begin < 0:
                        texts.append(document.text)
        train_tokenizer(texts, tokenizer_file)
        print("tokenizer trained", flush=True)
    encode(kept, out, read)


def encode(kept: list[Document], out: Path, read: dict[str, int]) -> None:
    """Write NAME.bin (little-endian uint16) of each stream, and card.json."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    packages = {
        package.name: {
            "version": package.version, "licence": package.licence, "sha256": package.sha256,
            "documents": read[package.name], "kept": 0, "tokens": 0,
        } for package in PACKAGES
    }  # fmt: skip
    streams: dict[str, dict[str, object]] = {}
    for kind in KINDS:
        ours = [document for document in kept if document.kind == kind]
        files = {name: (out / f"{name}_{kind}.bin").open("wb") for name in ("held_out", "train")}
        counts, characters = dict.fromkeys(files, 0), dict.fromkeys(files, 0)
        for first in range(0, len(ours), 512):
            some = ours[first : first + 512]
            for document, one in zip(some, tokenizer.encode_batch_fast([d.text for d in some]), strict=True):
                name = "held_out" if counts["held_out"] < HELD_OUT else "train"
                files[name].write(np.array([*one.ids, END], dtype="<u2").tobytes())
                counts[name] += len(one.ids) + 1
                characters[name] += len(document.text)
                packages[document.package]["kept"] += 1
                packages[document.package]["tokens"] += len(one.ids) + 1
        for name, file in files.items():
            file.close()
            digest = hashlib.sha256((out / f"{name}_{kind}.bin").read_bytes()).hexdigest()
            streams[f"{name}_{kind}"] = {
                "tokens": counts[name], "characters": characters[name], "sha256": digest,
            }  # fmt: skip
            print(f"{name}_{kind}: {counts[name]} tokens", flush=True)
    card = {
        "what": "Sources and documentation of fifteen packages of Debian 12, code and prose apart.",
        "command": "make corpus",
        "entries": ENTRIES,
        "tokenizer_sha256": hashlib.sha256((out / "tokenizer.json").read_bytes()).hexdigest(),
        "streams": streams,
        "packages": packages,
    }
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def pack(out: Path, folder: Path, tokens: int, prose_share: float) -> None:
    """Write the card and the first `tokens` of training with all that is held out below `folder`, compressed."""
    folder.mkdir(parents=True, exist_ok=True)
    card = json.loads((out / "card.json").read_text())
    prose = round(tokens * prose_share)
    for name in card["streams"]:
        count = -1 if name.startswith("held_out") else prose if name.endswith("prose") else tokens - prose
        array = np.fromfile(out / f"{name}.bin", "<u2", count)
        card["streams"][name] |= {"tokens": len(array), "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
        filters = [
            {
                "id": lzma.FILTER_LZMA2,
                "preset": 6,
                "dict_size": min(max(array.nbytes, 1 << 16), 1 << 26),
                "lc": 0,
                "lp": 1,
                "pb": 1,
            }
        ]
        (folder / f"{name}.xz").write_bytes(lzma.compress(array.tobytes(), filters=filters))
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir()) / 2**20:.1f} MiB")


def unpack(folder: Path, out: Path, tokens: int | None, prose_share: float) -> None:
    """Write the streams of a packed folder below `out`, or the first `tokens` of training. Exits at a wrong checksum.

    The card is the one of a folder into which so many tokens were packed.
    """
    out.mkdir(parents=True, exist_ok=True)
    card = json.loads((folder / "card.json").read_text())
    for name, stream in card["streams"].items():
        raw = lzma.decompress((folder / f"{name}.xz").read_bytes())
        found = hashlib.sha256(raw).hexdigest()
        if found != stream["sha256"]:
            sys.exit(f"{folder / name}.xz: got SHA-256 {found}, needed {stream['sha256']}. Pack and carry it again.")
        if tokens is not None and not name.startswith("held_out"):
            prose = round(tokens * prose_share)
            raw = raw[: 2 * (prose if name.endswith("prose") else tokens - prose)]
            stream |= {"tokens": len(raw) // 2, "sha256": hashlib.sha256(raw).hexdigest()}
        (out / f"{name}.bin").write_bytes(raw)
    (out / "card.json").write_text(json.dumps(card, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="The text of the pretraining study.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the streams")
    parser.add_argument("--pack", type=Path, help="write the beginning of the streams below this folder, compressed")
    parser.add_argument("--tokens", type=int, help="training tokens to pack (66 million) or to unpack (all)")
    parser.add_argument("--prose", type=float, default=0.25, help="share of prose in them")
    parser.add_argument("--unpack", type=Path, help="read a packed folder")
    options = parser.parse_args()
    if options.pack:
        pack(options.out, options.pack, options.tokens or 66_000_000, options.prose)
    elif options.unpack:
        unpack(options.unpack, options.out, options.tokens, options.prose)
    else:
        build(options.out)


if __name__ == "__main__":
    main()
