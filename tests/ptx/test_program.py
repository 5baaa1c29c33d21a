"""The evaluation of inline assembly: operands, predicates, branches, memory, and what it refuses."""

import ast
import importlib
import itertools

import numpy as np
import pytest

from tests.ptx.program import PtxError, assemble


def run(text, constraints, *inputs):
    """Outputs as lists, for one thread per entry of the inputs."""
    letters = [letter for letter in constraints.split(",") if "=" not in letter]
    given = [
        np.asarray(v, dtype=np.uint64 if letter == "l" else np.uint32)
        for v, letter in zip(inputs, letters, strict=True)
    ]
    return [output.tolist() for output in assemble(text, constraints)(given)]


def test_registers_and_constants():
    text = "{ .reg .b16 p, q; .reg .b32 t; mov.b32 {p, q}, $2; mov.b32 t, {q, p}; mov.b32 $0, t; mov.b32 $1, -1; }"
    assert run(text, "=r,=r,r", [0x11112222, 0xABCD0000]) == [[0x22221111, 0x0000ABCD], [0xFFFFFFFF] * 2]
    text = "{ .reg .b64 p; .reg .b32 a; mul.wide.u32 p, $2, 0x10000; mov.b64 {$0, a}, p; mov.b32 $1, a; }"
    assert run(text, "=&r,=&r,r", [0x12345678]) == [[0x56780000], [0x1234]]
    assert run("{ .reg .b16 p; mov.b16 p, 7; mov.b32 $0, {p, 0}; }", "=r,r", [0]) == [[7]]
    assert run("{ add.f32 $0, $1, 0f3F800000; }", "=r,r", [0x3F800000]) == [[0x40000000]]


def test_predicates_and_branches():
    text = "{ .reg .pred p; mov.b32 $0, 1; setp.eq.u32 p, $1, 5; @p mov.b32 $0, 2; @!p add.u32 $0, $0, 9; }"
    assert run(text, "=&r,r", [5, 6]) == [[2, 10]]
    text = (
        "{ .reg .pred p; mov.b32 $0, 0; setp.lt.s32 p, $1, 0; @!p bra ABOVE; mov.b32 $0, 1; @p bra END; "
        "ABOVE: add.u32 $0, $0, 4; END: add.u32 $0, $0, 16; }"
    )
    assert run(text, "=&r,r", [3, 0xFFFFFFFF]) == [[20, 17]]


def test_memory():
    words = np.array([5, 0xFFFFFFF0, 7, 8], dtype=np.uint32)
    at = words.ctypes.data
    assert run("ld.global.b32 $0, [$1 + 8];", "=r,l", [at]) == [[7]]
    four = "ld.global.L1::evict_last.v4.b32 {$0, $1, $2, $3}, [$4];"
    assert run(four, "=&r,=&r,=&r,=&r,l", [at])[2] == [7]
    assert run("st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at, at + 12], [70, 80]) == [[0, 0]]
    assert words.tolist() == [70, 0xFFFFFFF0, 7, 80]
    assert run("atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", "=r,l", [at, at]) == [[70, 71]]  # one after another
    assert run("atom.relaxed.gpu.global.exch.b32 $0, [$1], 0;", "=r,l", [at]) == [[72]]
    run("red.relaxed.gpu.global.max.s32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at + 4], [3])  # signed
    run("red.relaxed.gpu.global.max.u32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [at + 8], [0xFFFFFFFF])
    assert words.tolist() == [0, 3, 0xFFFFFFFF, 80]
    text = "{ .reg .pred p; setp.eq.u32 p, $2, 1; @p st.global.b64 [$1], $3; mov.b32 $0, 0; }"
    run(text, "=r,l,r,l", [at, 0], [1, 0], [(3 << 32) | 2, 9])  # the second thread stores nothing, nowhere
    assert words.tolist() == [2, 3, 0xFFFFFFFF, 80]
    run("st.global.v2.b32 [$1], {$2, $3}; mov.b32 $0, 0;", "=r,l,r,r", [at, at + 8], [5, 7], [6, 8])
    assert words.tolist() == [5, 6, 7, 8]
    assert run("{ .reg .b32 t; mov.u32 t, %tid.x; fence.acq_rel.gpu; mov.b32 $0, t; }", "=r,r", [1]) == [[0]]


@pytest.mark.parametrize(
    ("text", "constraints", "says"),
    [
        ("cvt.rn.e4m3x2.f32 $0, $1, $1;", "=h,r", "unknown instruction: cvt.rn.e4m3x2.f32"),
        ("max.nan.bf16x2 $0, $1, $1;", "=r,r", "unknown instruction: max.nan.bf16x2"),
        ("mov.b32 $0, there;", "=r,r", "unknown register: there"),
        ("mov.b32 $0, $1;", "=r,l", r"\$1 has 64 bits, needed 32"),
        ("xor.b32 $0, $1;", "=r,r", "takes 2 operands"),
        ("mov.b32 $0, $1; add.u32 $0, $0, $1;", "=r,r", "=r without &"),
        ("mov.b32 $1, 0; mov.b32 $0, 0;", "=r,r", r"\$1 is an input"),
        ("mov.b32 $0, 0x100000000;", "=r,r", "does not fit"),
        ("{ .reg .b32 t; add.u32 $0, t, 1; }", "=r,r", "t is read and was never written"),
        ("ld.global.add.b32 $0, [$1];", "=r,l", "unknown instruction"),
        ("bar.sync 0; mov.b32 $0, 0;", "=r,r", "unknown instruction: bar.sync"),
    ],
)
def test_what_is_wrong_is_refused_by_name(text, constraints, says):
    with pytest.raises(PtxError, match=says):
        run(text, constraints, [0])


def texts_of(module):
    """(line, text, constraints) of the assembly in a module of kernels: of a name every text of its last assignment."""
    nodes = list(ast.walk(ast.parse(module.read_text())))
    named = {}
    for node in sorted((n for n in nodes if isinstance(n, ast.AnnAssign)), key=lambda n: n.lineno):
        named.setdefault(node.target.id, []).append(node)

    def of_module(name):
        parts = module.with_suffix("").parts
        return getattr(importlib.import_module(".".join(parts[parts.index("microfloat") :])), name)

    def forms(text, line):
        if isinstance(text, ast.Call):  # of a number of bits and of a place
            return [ast.Constant(of_module(text.func.id)(bits, 0)) for bits in (8, 16, 128)]
        if not isinstance(text, ast.Name):
            return [text]
        if text.id not in named:  # made once for the module
            return [ast.Constant(of_module(text.id).value)]
        assigned = [node for node in named[text.id] if node.lineno < line][-1].value
        function = getattr(assigned.func, "id", "") if isinstance(assigned, ast.Call) else ""
        if function == "max_text":
            convert = importlib.import_module("microfloat.kernels.device.convert")
            more = [ast.literal_eval(argument) for argument in assigned.args[2:]]
            kinds = itertools.product((convert.WORDS_BF16, convert.WORDS_F16), (False, True))
            return [ast.Constant(convert.max_text(*kind, *more)) for kind in kinds]
        inner = [n for n in ast.walk(assigned) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        branches = [n for part in ast.walk(assigned) if isinstance(part, ast.IfExp) for n in (part.body, part.orelse)]
        names = [n for n in branches if isinstance(n, ast.Name)]
        both = [ast.Constant(form.value.replace("FP8", name)) for form in inner for name in ("e4m3", "e5m2")]
        if function == "in_last":  # what the last of all programs does
            reduction = importlib.import_module("microfloat.kernels.device.grid_reduction")
            names = names or assigned.args
            return [ast.Constant(reduction.in_last(form.value)) for name in names for form in forms(name, line)]
        return both + [form for name in names for form in forms(name, line)]

    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "inline_asm_elementwise":
            text, constraints = node.args[:2]
            for form in forms(text, node.lineno):
                yield node.lineno, form, constraints


_OF_WARPS = ("bar.warp.sync", "cp.async", "ld.shared", "mbarrier", "mma.sync", "shfl.sync", "wgmma.wait_group")


def test_all_assembly_of_the_kernels_is_known_but_that_of_warps(repository):
    known = set()
    for module in sorted((repository / "src/microfloat/kernels").rglob("*.py")):
        for line, text, constraints in texts_of(module):
            if isinstance(text, ast.Constant) and any(name in text.value for name in _OF_WARPS):
                continue  # of a whole warp or program, which one lane cannot run; test_decode.py compiles it
            assert isinstance(text, ast.Constant), f"{module.name}:{line} is no text"
            assemble(text.value, constraints.value)
            known.add((module.name, line))
    assert len(known) >= 45  # 49 pieces today: the walk has found those of every file
