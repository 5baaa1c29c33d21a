"""Every path that CONTRIBUTING and the pages on the architecture name exists, and so does every layer."""

import re

import pytest

from tests.architecture.imports import LAYERS
from tests.docs.code_blocks import code_blocks

PAGES = ("CONTRIBUTING.md", "docs/architecture.md", "docs/adding_a_kernel.md", "docs/adding_a_backend.md")
# Where a page that speaks of one folder names files without it.
ROOTS = ("", "src/microfloat/", "src/microfloat/kernels/")
PATH = re.compile(r"`([\w.-]+(?:/[\w.-]*)+|[\w-]+\.(?:py|md|txt|toml|json))`")


def paths_in(text):
    """Every text between backquotes, outside of code blocks, that looks like a path."""
    return PATH.findall(re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("name", PAGES)
def test_named_paths_exist(name, repository):
    paths = paths_in((repository / name).read_text())
    assert len(paths) > 5
    missing = [path for path in paths if not any((repository / root / path).exists() for root in ROOTS)]
    assert not missing


def test_contributing_names_the_layers_that_exist(repository):
    text = (repository / "CONTRIBUTING.md").read_text()
    table = text.split("| layer |", 1)[1].split("\n\n", 1)[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    package = repository / "src" / "microfloat"
    existing = {
        name for row in LAYERS for name in row if (package / name).is_dir() or (package / f"{name}.py").exists()
    }
    assert named == existing - {"_version", "__main__"}


def test_the_printed_schedule_is_what_is_printed(repository):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import microfloat.torch as mf
    from microfloat.torch import backends

    (block,) = code_blocks(repository / "docs" / "architecture.md", "text")
    layer = mf.Linear(256, 128, dtype=torch.bfloat16, recipe="nvfp4")
    with backends.pretend(chip="h200", interpreted=False):
        printed = layer.schedule(torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=True))
    assert [line.rstrip() for line in str(printed).splitlines()] == block.source.splitlines()


def test_a_path_that_is_not_there_is_found():
    text = "`src/nope.py` and `nope.md`\n```bash\npython `x/y.py`\n```\nbut not `a.b` or `Pass(kernel)`"
    assert paths_in(text) == ["src/nope.py", "nope.md"]
