"""Every python block of README.md and docs/ runs; every bash block names commands, files and extras that exist."""

import contextlib
import importlib.util
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tests import extent
from tests.docs.code_blocks import code_blocks
from tests.jax.effort import cheaper_passes
from tests.torch.distributed.world import end_group

ROOT = Path(__file__).parents[2]
PAGES = [
    path
    for path in (
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
    )
    if path.exists()
]
HAVE_JAX = importlib.util.find_spec("jax") is not None
OPTIONAL = {"torch", "jax", "flax", "triton", "matplotlib", "rich", "safetensors"}
OPTIONAL |= {"accelerate", "datasets", "peft", "transformers", "trl"}
WHY_SLOW = "needs a training package that make test does not install"
# Pages whose blocks compile one program after another. What they show has tests of its own, and their first blocks run.
WHY_COMPILING = "pages of which every block compiles programs"
COMPILING = dict.fromkeys(("design_a_format.md", "jax.md", "training.md", "watching.md", "migration.md"), WHY_COMPILING)
# transformers asks its models by a name that it deprecates itself.
NOISE = "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"


def pages(slow=None):
    """A test of every page, by the path from the root; `slow`: reasons by name of the page."""

    slow = {name: pytest.mark.slow(why) for name, why in (slow or {}).items()}

    def marks(name):
        return [kind[name] for kind in (slow,) if name in kind]

    ids = [page.relative_to(ROOT).as_posix() for page in PAGES]
    return pytest.mark.parametrize("page", [pytest.param(page, marks=marks(page.name)) for page in PAGES], ids=ids)


@pytest.fixture(autouse=True)
def world_of_one(request, monkeypatch):
    """For the page on ranks what torchrun tells a script of one rank; the process group of its blocks is ended."""
    if "distributed.md" not in request.node.name:
        yield
        return
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        monkeypatch.setenv(name, value)
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        end_group()  # the page's namespace, collected later, has a DistributedDataParallel


def refusal(block):
    """Reason why a python block may not stand as it is, or None."""
    tags = block.info[1:]
    unknown = [tag for tag in tags if tag != "no-run"]
    if unknown:
        return f"unknown tag {unknown[0]!r}; python blocks run, or are tagged no-run"
    if "no-run" in tags and not re.match(r"# no-run: \S+", block.source):
        return "a no-run block must begin with a comment `# no-run: the reason`"
    return None


def shortened(source):
    """A block with loops of three steps in place of a hundred, which say nothing more of whether it runs."""
    return source.replace("in range(100):", "in range(3):") if extent.is_quick() else source


def run_page(page):
    """Run the python blocks of a page in one namespace; raises what they raise."""
    namespace = {"__name__": "__main__"}
    for block in code_blocks(page, "python"):
        problem = refusal(block)
        if problem:
            raise ValueError(f"{page.name}:{block.line}: {problem}")
        if "no-run" not in block.info:
            exec(compile(shortened(block.padded), str(page), "exec"), namespace)


def missing_in(block, root):
    """Names of make targets, files and extras that a bash block uses and the repository does not have."""
    targets = set(re.findall(r"^([a-z][\w-]*):", (root / "Makefile").read_text(), re.MULTILINE))
    extras = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    for line in block.source.splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            yield from (f"make {word}" for word in words[1:] if "=" not in word and word not in targets)
        for word in words:
            if re.fullmatch(r"(?:\./)?[\w./-]+/[\w.-]+\.(?:py|sh|md|txt|toml)", word) and not (root / word).exists():
                yield word
            for extra in re.findall(r"^\.\[([\w,]+)\]$", word):
                yield from (f"extra {name}" for name in extra.split(",") if name not in extras)


@pytest.mark.filterwarnings(NOISE)
# torch's own, of what it compiles and exports.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")  # TRL's own words
@pages(slow={"integrations.md": WHY_SLOW, "experts.md": WHY_SLOW, "qat.md": WHY_SLOW, **COMPILING})
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        with cheaper_passes() if HAVE_JAX and "import microfloat.jax" in page.read_text() else contextlib.nullcontext():
            run_page(page)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"a block of {page.name} needs {error.name}, which is not installed")


def pasted_blocks():
    """The blocks that a reader pastes: all of README.md but the first, and the first one of each other page.

    README's first block runs with nothing before it where the page runs as a whole.
    """
    for page in PAGES:
        blocks = [block for block in code_blocks(page, "python") if "no-run" not in block.info]
        for block in blocks[1:] if page.name == "README.md" else blocks[:1]:
            yield pytest.param(block, id=f"{page.name}:{block.line}")


@pytest.mark.filterwarnings(NOISE)
@pytest.mark.slow_cases(WHY_SLOW, cases=("integrations.md:*", "experts.md:*", "qat.md:*", "jax.md:*"))
@pytest.mark.parametrize("block", list(pasted_blocks()))
def test_blocks_run_by_themselves(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    try:
        exec(compile(block.padded, str(block.path), "exec"), {"__name__": "__main__"})
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"it needs {error.name}, which is not installed")


@pages()
def test_bash_blocks_name_what_exists(page):
    missing = [
        f"{page.name}:{block.line}: {name}" for block in code_blocks(page, "bash") for name in missing_in(block, ROOT)
    ]
    assert not missing, "\n".join(missing)


def _page(tmp_path, text):
    path = tmp_path / "page.md"
    path.write_text(text)
    return path


def test_blocks_of_a_page_share_one_namespace(tmp_path):
    run_page(_page(tmp_path, "```python\nx = 1\n```\ntext\n```python\nassert x == 1\n```\n"))


def test_a_failing_block_fails_and_names_its_line(tmp_path):
    page = _page(tmp_path, "text\n\n```python\nx = 1\nassert x == 2\n```\n")
    with pytest.raises(AssertionError) as caught:
        run_page(page)
    assert caught.traceback[-1].lineno + 1 == 5


@pytest.mark.parametrize("opening", ["python no-run", "python skip", "python no-run\n# no-run:"])
def test_a_block_that_escapes_without_a_reason_is_refused(tmp_path, opening):
    with pytest.raises(ValueError, match=r"page\.md:2"):
        run_page(_page(tmp_path, f"```{opening}\nraise SystemExit\n```\n"))


def test_a_no_run_block_with_its_reason_is_not_run(tmp_path):
    run_page(_page(tmp_path, "```python no-run\n# no-run: needs eight GPUs\nraise SystemExit\n```\n"))


def test_an_open_fence_is_refused(tmp_path):
    with pytest.raises(ValueError, match="never closed"):
        code_blocks(_page(tmp_path, "```python\nx = 1\n"))


def test_indented_blocks_and_other_languages_are_told_apart(tmp_path):
    page = _page(tmp_path, "- item\n  ```python\n  if True:\n      x = 1\n  ```\n~~~text\n```\n~~~\n")
    assert [block.info for block in code_blocks(page)] == [("python",), ("text",)]
    assert code_blocks(page, "python")[0].source == "if True:\n    x = 1\n"


def test_bash_blocks_with_wrong_names_are_found(tmp_path):
    commands = [
        "make no-such-target PYTHON=python3  # remark",
        "make test",
        "python examples/no_such.py",
        'pip install ".[nope,torch]"',
    ]
    (block,) = code_blocks(_page(tmp_path, "\n".join(["```bash", *commands, "```"])), "bash")
    assert list(missing_in(block, ROOT)) == ["make no-such-target", "examples/no_such.py", "extra nope"]
