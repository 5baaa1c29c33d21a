"""The PTX text of an inline assembly, evaluated for many threads at once.

Registers are declared with ``.reg``, operands are ``$0`` .. ``$n`` by their constraints, a statement may hang on a
predicate (``@p``, ``@!p``), and branches lead forward only. Of what communicates there is what one thread of a program
does after another's has ended: loads, stores and atomics on real addresses; fences and waits for other launches do
nothing, prefetches are noted (`PREFETCHED`), and the number of the thread is 0. Clusters, shared memory and
asynchronous copies are not here.

What is wrong in any case is an error, by name: an unknown instruction or register, an operand of another width, a read
of what was never written, and an input read after an output that may share its register (``=r`` without ``&``).
"""

import ctypes
import functools
import re

import numpy as np

from tests.ptx.instructions import COMPUTE, SIGNED, UNSIGNED, permute_by_constant

WIDTHS = {"h": 16, "r": 32, "l": 64, "f": 32, "d": 64}
NOTHING = ("fence.acq_rel.gpu", "griddepcontrol.launch_dependents", "griddepcontrol.wait")
PREFETCH = ("prefetch.global.L2", "prefetch.global.L2::evict_last")
PREFETCHED: list[int] = []  # addresses asked for, in order
MEMORY = re.compile(
    r"(?P<what>ld|st|atom|red)(?:\.relaxed\.gpu)?\.global(?:\.L1::evict_last)?"
    r"(?:\.(?P<operation>add|max|exch))?(?:\.v(?P<count>[24]))?\.(?P<kind>[busf])(?P<width>\d+)"
)
STATEMENT = re.compile(
    r"(?:(?P<label>[A-Za-z_]\w*):(?!:)\s*)?(?:@(?P<guard>!?\w+)\s+)?"
    r"(?P<name>[a-z][\w.:]*)\s*(?P<operands>.*)"
)
OPERANDS = re.compile(r"\s*,\s*(?![^{]*\})")  # commas outside braces
POISON = 0xDEADBEEFDEADBEEF  # what a register holds where nothing was written to it


class PtxError(Exception):
    """Text that the model cannot evaluate, or that no assembler would take."""


@functools.cache
def assemble(text, constraints):
    """The program of a text, by the constraints of its operands."""
    return Program(text, constraints)


class Program:
    """``program(inputs)``: its outputs. Inputs and outputs are arrays of unsigned registers, one entry per thread."""

    def __init__(self, text, constraints):
        letters = [letter.strip() for letter in constraints.split(",")]
        self.outputs = [f"${i}" for i, letter in enumerate(letters) if letter.startswith("=")]
        self.inputs = [f"${i}" for i, letter in enumerate(letters) if not letter.startswith("=")]
        self.widths = {f"${i}": WIDTHS[letter.strip("=&")] for i, letter in enumerate(letters)}
        self._early = {f"${i}" for i, letter in enumerate(letters) if "&" in letter}
        self._clobbered = set()  # widths of the outputs written so far that may share a register with an input
        text = text.strip()
        if text.startswith("{"):
            assert text.endswith("}"), f"one scope around all statements: {text}"
            text = text[1:-1]
        self._steps = [step for piece in text.split(";") if (step := self._step(piece.strip())) is not None]

    def __call__(self, inputs):
        assert len(inputs) == len(self.inputs)
        threads = _Threads(len(inputs[0]))
        threads.registers.update(zip(self.inputs, inputs, strict=True))
        with np.errstate(all="ignore"):
            for step in self._steps:
                step(threads)
        return [threads.read(name) for name in self.outputs]

    # ---------------------------------------------------------------------------------------------------- statements

    def _step(self, piece):
        if not piece:
            return None
        if piece.startswith("."):
            self._declare(piece)
            return None
        match = STATEMENT.fullmatch(piece)
        if match is None:
            raise PtxError(f"not a statement: {piece}")
        label, name = match["label"], match["name"]
        guard = self._guard(match["guard"])
        operands = OPERANDS.split(match["operands"].strip()) if match["operands"] else []
        run = self._operation(name, operands)

        def step(threads):
            if label is not None:
                threads.arrive(label)
            run(threads, threads.running(guard))

        return step

    def _declare(self, piece):
        match = re.fullmatch(r"\.reg\s+\.(pred|[bfus]\d+)\s+(.*)", piece)
        if match is None:
            raise PtxError(f"not a declaration: {piece}")
        width = 1 if match[1] == "pred" else int(match[1][1:])
        for name in match[2].split(","):
            self.widths[name.strip()] = width

    def _guard(self, text):
        if text is None:
            return None
        name = text.lstrip("!")
        self._check(name, 1)
        return name, text.startswith("!")

    def _operation(self, name, operands):
        if name == "bra":
            return lambda threads, mask: threads.jump(operands[0], mask)
        if name in NOTHING:
            return lambda threads, mask: None
        if name in PREFETCH:
            address = self._source(operands[0].strip("[] "), 64)
            return lambda threads, mask: PREFETCHED.extend(address(threads)[... if mask is None else mask].tolist())
        memory = MEMORY.fullmatch(name)
        if memory is not None:
            return self._memory(memory, operands)
        if name.startswith("mov.b") and operands[0].startswith("{"):
            return self._unpack(int(name[5:]), operands)
        if name.startswith("mov.b") and operands[1].startswith("{"):
            return self._pack(int(name[5:]), operands)
        if name not in COMPUTE:
            raise PtxError(f"unknown instruction: {name}")
        return self._compute(name, operands)

    def _compute(self, name, operands):
        width, widths, function = COMPUTE[name]
        if len(operands) != len(widths) + 1:
            raise PtxError(f"{name} takes {len(widths)} operands: {operands}")
        if name == "prmt.b32" and (selector := _constant(operands[3], 32)) is not None:
            operands, widths, function = operands[:3], widths[:2], permute_by_constant(selector)
        sources = [self._source(operand, w) for operand, w in zip(operands[1:], widths, strict=True)]
        write = self._target(operands[0], width)
        return lambda threads, mask: write(threads, mask, function(*[source(threads) for source in sources]))

    def _unpack(self, width, operands):
        names = [name.strip() for name in operands[0][1:-1].split(",")]
        part = width // len(names)
        source = self._source(operands[1], width)
        writes = [self._target(name, part) for name in names]

        def run(threads, mask):
            parts = np.ascontiguousarray(source(threads)).view(UNSIGNED[part]).reshape(-1, len(writes))
            for i, write in enumerate(writes):
                write(threads, mask, np.ascontiguousarray(parts[:, i]))

        return run

    def _pack(self, width, operands):
        names = [name.strip() for name in operands[1][1:-1].split(",")]
        part = width // len(names)
        sources = [self._source(name, part) for name in names]
        write = self._target(operands[0], width)

        def run(threads, mask):
            parts = np.stack([source(threads) for source in sources], axis=-1)
            write(threads, mask, parts.reshape(-1).view(UNSIGNED[width]))

        return run

    def _memory(self, match, operands):
        what, operation, width = match["what"], match["operation"], int(match["width"])
        if match["count"] is not None:
            return self._several(match, operands)
        if (operation is not None) != (what in ("atom", "red")):
            raise PtxError(f"unknown instruction: {match[0]}")
        target = operands.pop(0) if what in ("ld", "atom") else None
        address = re.fullmatch(r"\[\s*(\$?\w+)(?:\s*\+\s*(\d+))?\s*\]", operands[0])
        if address is None:
            raise PtxError(f"not an address: {operands[0]}")
        base, offset = self._source(address[1], 64), int(address[2] or 0)
        value = self._source(operands[1], width) if what != "ld" else (lambda threads: threads.filled(0, width))
        write = None if target is None else self._target(target, width)
        change = _changes(what, operation, match["kind"], width)

        def run(threads, mask):
            bases, values = base(threads), value(threads)
            before = np.zeros(threads.count, dtype=UNSIGNED[width])
            for i in range(threads.count) if mask is None else np.flatnonzero(mask):
                word = ctypes.c_uint32.from_address(int(bases[i]) + offset) if width == 32 else (
                    ctypes.c_uint64.from_address(int(bases[i]) + offset)
                )  # fmt: skip
                before[i] = word.value
                if what != "ld":
                    word.value = change(word.value, int(values[i]))
            if write is not None:
                write(threads, mask, before)

        return run

    def _several(self, match, operands):
        """A load of several words into as many registers, or a store: one of each."""
        what, width, is_load = match["what"], int(match["width"]), match["what"] == "ld"
        if what not in ("ld", "st"):
            raise PtxError(f"unknown instruction: {match[0]}")
        registers, place = operands if is_load else operands[::-1]
        names = [name.strip() for name in registers[1:-1].split(",")]
        if len(names) != int(match["count"]):
            raise PtxError(f"{match[0]} takes {match['count']} registers: {registers}")
        single = MEMORY.fullmatch(f"{what}.global.{match['kind']}{width}")
        address = re.fullmatch(r"\[\s*(\$?\w+)\s*\]", place)
        if address is None:
            raise PtxError(f"not an address: {place}")
        places = [f"[{address[1]} + {i * width // 8}]" for i in range(len(names))]
        pairs = zip(names, places, strict=True) if is_load else zip(places, names, strict=True)
        steps = [self._memory(single, list(pair)) for pair in pairs]

        def run(threads, mask):
            for step in steps:
                step(threads, mask)

        return run

    # ------------------------------------------------------------------------------------------------------ operands

    def _check(self, name, width):
        if name not in self.widths:
            raise PtxError(f"unknown register: {name}")
        if self.widths[name] != width:
            raise PtxError(f"{name} has {self.widths[name]} bits, needed {width}")

    def _source(self, operand, width):
        if operand == "%tid.x":
            return lambda threads: threads.filled(0, width)
        constant = _constant(operand, width)
        if constant is not None:
            return lambda threads: threads.filled(constant, width)
        self._check(operand, width)
        if operand in self.inputs and width in self._clobbered:
            raise PtxError(f"{operand} is read after an output that may share its register (=r without &)")
        return lambda threads: threads.read(operand)

    def _target(self, operand, width):
        self._check(operand, width)
        if operand in self.inputs:
            raise PtxError(f"{operand} is an input")
        if operand in self.outputs and operand not in self._early:
            self._clobbered.add(width)
        return lambda threads, mask, value: threads.write(operand, width, mask, value)


def _constant(operand, width):
    """The bits of an immediate operand, or None."""
    if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
        return int(operand[2:], 16)
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", operand):
        value = int(operand, 0)
        if not -(1 << (width - 1)) <= value < 1 << width:
            raise PtxError(f"{operand} does not fit in {width} bits")
        return value & ((1 << width) - 1)
    return None


def _changes(what, operation, kind, width):
    """``change(old, operand)``: what a store or an atomic leaves in memory."""
    if what == "ld":
        return None
    if what == "st" or operation == "exch":
        return lambda old, new: new
    if operation == "add":
        return lambda old, new: (old + new) & ((1 << width) - 1)
    if kind == "s":
        key = lambda value: int(UNSIGNED[width](value).view(SIGNED[width]))  # noqa: E731
        return lambda old, new: max(old, new, key=key)
    return max


class _Threads:
    """The registers of all threads, and which of them run."""

    def __init__(self, count):
        self.count, self.registers = count, {}
        self._active, self._waiting = None, {}

    def filled(self, value, width):
        return np.full(self.count, value, dtype=UNSIGNED[width])

    def read(self, name):
        if name not in self.registers:
            raise PtxError(f"{name} is read and was never written")
        return self.registers[name]

    def write(self, name, width, mask, value):
        if value.dtype != UNSIGNED[width]:
            raise PtxError(f"{name}: {value.dtype} in {width} bits")
        if mask is not None:
            before = self.registers.get(name)
            value = np.where(mask, value, self.filled(POISON & ((1 << width) - 1), width) if before is None else before)
        self.registers[name] = value

    def running(self, guard):
        """The threads that run a statement under a guard; None: all."""
        if guard is None:
            return self._active
        name, negated = guard
        predicate = self.read(name) ^ negated
        return predicate if self._active is None else predicate & self._active

    def jump(self, label, mask):
        mask = np.ones(self.count, dtype=bool) if mask is None else mask
        self._waiting[label] = self._waiting.get(label, False) | mask
        self._active = ~mask if self._active is None else self._active & ~mask

    def arrive(self, label):
        if label in self._waiting:
            self._active = self._active | self._waiting.pop(label)
