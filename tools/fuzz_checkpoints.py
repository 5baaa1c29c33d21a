"""Feed damaged checkpoints to `microfloat.checkpoint.load`: anything but a result or a CheckpointError is a defect.

``make fuzz SECONDS=600``. Each input is a golden file with bytes of its header, its data or its length changed. One
that fails is kept in the current directory as ``fuzz-crash-<n>.safetensors``.
"""

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

from microfloat.checkpoint import load
from microfloat.errors import CheckpointError

GOLDEN = Path(__file__).parent.parent / "tests" / "golden" / "checkpoints"
WORDS = (
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b"0",
    b"-1",
    b"9" * 20,
    b"F4",
    b"F8_E4M3",
    b"U8",
    b"null",
    b"1e9",
    b"\\ud800",
)
LARGEST = 40_000  # bytes of an input; larger ones only slow the search


def damaged(data: bytes, rng: random.Random) -> bytes:
    """`data` with one to four changes, most of them in its header."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        end = min(len(made), 8 + int.from_bytes(data[:8], "little")) if rng.random() < 0.8 else len(made)
        position = rng.randrange(max(end, 1))
        kind = rng.randrange(5)
        if kind == 0 and made:
            made[position % len(made)] = rng.randrange(256)
        elif kind == 1:
            made[position : position + rng.randint(1, 8)] = rng.choice(WORDS)
        elif kind == 2:
            del made[position : position + rng.randint(1, 64)]
        elif kind == 3 and made:
            made[position % len(made)] = ord(rng.choice("0123456789"))
        else:
            made[8:end] = bytes(made[8:end]).replace(rng.choice(WORDS), rng.choice(WORDS), 1)
    if rng.random() < 0.7:  # a header length that fits, so that the rest is reached
        closing = made.rfind(b"}}", 0, min(len(made), 8 + 2 * int.from_bytes(data[:8], "little")))
        if closing > 8:
            made[:8] = (closing + 2 - 8).to_bytes(8, "little")
    return bytes(made)


def read_all(path: Path) -> None:
    """Everything that a reader of this file may ask for."""
    for options in ({}, {"strict": False, "nan": "zero"}):
        try:
            checkpoint = load(path, **options)
            _ = checkpoint.findings
            for record in checkpoint.values():
                record.dequantize()
        except CheckpointError as error:
            if not error.findings:
                raise RuntimeError("an error without findings") from error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rng = random.Random(options.seed)
    sources = [data for path in sorted(GOLDEN.glob("*.safetensors")) if len(data := path.read_bytes()) < LARGEST]
    end, told, count, crashes = time.monotonic() + options.seconds, time.monotonic(), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        while time.monotonic() < end:
            data = damaged(rng.choice(sources), rng)
            path.write_bytes(data)
            count += 1
            try:
                read_all(path)
            except Exception:
                crashes += 1
                kept = Path(f"fuzz-crash-{crashes}.safetensors")
                kept.write_bytes(data)
                traceback.print_exc()
                print(f"kept as {kept}", flush=True)
                if crashes >= 10:
                    break
            if time.monotonic() - told > 10:
                told = time.monotonic()
                print(f"{count} inputs, {crashes} crashes, {max(end - told, 0):.0f} s left", flush=True)
    print(f"{count} inputs, {crashes} crashes")
    return 1 if crashes else 0


if __name__ == "__main__":
    sys.exit(main())
