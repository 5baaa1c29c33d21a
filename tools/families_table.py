"""The tables of the families of checkpoints and of their readers; from the rows of `microfloat.checkpoint.families`.

python tools/families_table.py           # print them
python tools/families_table.py --write   # rewrite the blocks in docs/checkpoints.md and docs/index.md
"""

import sys

from marked_block import ROOT, command, table

from microfloat.checkpoint.families import DIALECTS, FAMILIES, Dialect, Family
from microfloat.checkpoint.families.readers import FACTS, SOURCES, Layer, readers_of
from microfloat.checkpoint.families.writing import Written

PAGE, BLOCK = ROOT / "docs" / "checkpoints.md", "families"
_MOST_TARGETS = 4


def _quoted(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def targets(family: Family) -> str:
    """The targets that are written in a family."""
    names = list(family.writes)
    if len(names) > _MOST_TARGETS:
        return f"`{names[0].partition(':')[0]}:` and the name of any format"
    return _quoted(names) or "only read"


def tensors(family: Family, dialect: Dialect) -> str:
    """The names of the tensors of a parameter P, and the dtype of its scales where that is no usual float."""
    if dialect.parameters is not None:
        return "described in the metadata of the file"
    dtype = {"F8_E8M0": "E8M0", "F8_E4M3": "E4M3"}.get(family.scale[1][-1], "")
    return f"P{family.codes[0]}, P{family.scale[0]}" + (f" ({dtype})" if dtype else "")


def scale_of_tensors(family: Family) -> str:
    """The global scale of a parameter P."""
    if family.tensor_scale is None:
        return ""
    return f"P{family.tensor_scale}, {'divides' if family.divides else 'multiplies'}"


def families_table() -> str:
    """A row per family, in the order in which they are tried."""
    rows: dict[str, list[str]] = {}
    for dialect in DIALECTS:
        for family in dialect.families:
            named = [one for one in dialect.methods if one in family.name.split(":")]
            method = _quoted([*named, *dialect.methods][:1])
            made = [f"`{family.name}`", targets(family), tensors(family, dialect), scale_of_tensors(family), method]
            rows.setdefault(family.name, made)
    return table(["family", "targets", "tensors of a parameter P", "global scale", "quant_method"], [*rows.values()])


def readers_table() -> str:
    """A row per fact, in the order of the readers."""
    order = list(SOURCES)
    facts = sorted(FACTS, key=lambda one: order.index(one.reader))
    rows = [[one.reader, one.does, _quoted(one.families.split()), one.what] for one in facts]
    return table(["reader", "does", "families", "about"], rows)


# A column of the first page -> the elements of its formats, and whether they have scales of powers of two.
_COLUMNS = {
    "FP8 (units: Ada, Hopper, Blackwell)": (("E4M3",), "FP32"),
    "MXFP8 (Blackwell)": (("E4M3",), "E8M0"),
    "NVFP4 (Blackwell)": (("E2M1",), "E4M3"),
    "MXFP4, MXFP6 (Blackwell)": (("E2M1", "E2M3", "E3M2"), "E8M0"),
}
_STATIC, _STACKED, _ONLY_EXPERTS, _NOT_EXPERTS = "[1]", "[2]", "[3]", "[4]"  # as they come in the table


def read_by(reader: str, family: str, target: Written) -> str | None:
    """Marks of a target that the reader reads, one of them for static scales of inputs; None for any other."""
    name, inputs = "model.layers.0.self_attn.o_proj.weight", target.activation
    one = Layer(family, target.cast.format, name, (4096, 4096), "mixtral", inputs)
    expert = one._replace(name="model.layers.0.block_sparse_moe.experts.0.w1.weight")
    layer, of_experts = (
        any(row["reader"] == reader and row["does"] == "reads" and not row["what"] for row in readers_of([each]))
        for each in (one, expert)
    )
    if not (layer or of_experts):
        return None
    marks = ("" if of_experts else _NOT_EXPERTS) + ("" if layer else _ONLY_EXPERTS)
    marks += (_STATIC if target.activation == "static" else "") + (_STACKED if target.stacked == "any" else "")
    return f" {marks}" if marks else ""


def engines_table() -> str:
    """Engine and format, with the chips that have units for it -> targets of `convert` that the engine reads.

    Those that most engines read without a reservation come first.
    """
    targets = {name: (family.name, target) for family in FAMILIES for name, target in family.writes.items()}
    read = {name: {reader: read_by(reader, *one) for reader in SOURCES} for name, one in targets.items()}
    rows = []
    for reader in SOURCES:
        cells: dict[str, list[str]] = {title: [] for title in _COLUMNS}
        for name in sorted(read, key=lambda name: (bool(read[name][reader]), -[*read[name].values()].count(""))):
            marks, fmt = read[name][reader], targets[name][1].cast.format
            for title, (elements, scale) in _COLUMNS.items():
                if marks is not None and fmt.element.name in elements and fmt.scale.name == scale:
                    cells[title].append(f"`{name}`{marks}")
        rows.append([reader, *(", ".join(names) or "none known" for names in cells.values())])
    text = (
        f"{_STATIC} If the source has scales of inputs; from a plain one the result has quantized weights alone, which "
        f"engines may not take. {_STACKED} For models whose experts are one tensor for each layer, as in gpt-oss. "
        f"{_ONLY_EXPERTS} For experts that are stored one by one alone. {_NOT_EXPERTS} Not for models that have such. "
        "Looked up in the source of the version that is named, or found by running it; whether an engine has a kernel "
        "for your chip or knows your model is not said here. Shapes and models that make an exception, and all that is "
        "read besides: [checkpoints.md](checkpoints.md#what-readers-do); `microfloat inspect FILE` says it of a file."
    )
    return f"{table(['engine', *_COLUMNS], rows)}\n\n{text}"


BLOCKS = (
    (PAGE, BLOCK, families_table),
    (PAGE, "readers", readers_table),
    (ROOT / "docs" / "index.md", "targets by engine", engines_table),
)

if __name__ == "__main__":
    sys.exit(command(__doc__ or "", BLOCKS))
