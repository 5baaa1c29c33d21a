"""Every command and every public function of torch, in processes that lack packages which nothing needs.

Each answers as usual, or names what it needs: an ImportError from inside is neither.
"""

import pytest

from tests import extent, processes
from tests.architecture import public_calls
from tests.cli.checkpoints import llama

pytest.importorskip("torch", reason="torch is not installed")

# What `pip install ".[torch,cli]"` brings nothing of, under the names by which it is imported.
OTHERS = (
    "triton", "jax", "jaxlib", "flax", "matplotlib", "safetensors", "transformers", "torchtitan", "huggingface_hub",
    "accelerate", "vllm",
)  # fmt: skip
_SINGLE = pytest.mark.slow("one package at a time, where all at once are tried")
each = pytest.mark.parametrize(
    "packages",
    [
        pytest.param(OTHERS, id="torch alone"),
        *(pytest.param((name,), id=f"no {name}", marks=_SINGLE) for name in ("triton", "matplotlib", "jax")),
    ],
)
# Words that a command line has where it needs a package -> that package.
NEEDS = {"--plot": "matplotlib", "--hub": "huggingface_hub"}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    llama(tmp_path / "model", blocks=1, shards=1)
    return tmp_path


@each
def test_every_command(folder, packages):
    pytest.importorskip("typer", reason="typer is not installed")
    answers = processes.once(public_calls.command_answers, packages, str(folder))
    from microfloat.cli.app import app

    assert {words.split()[0] for words in answers} == {command.callback.__name__ for command in app.registered_commands}
    for words, (code, out, said) in answers.items():
        needed = [package for word, package in NEEDS.items() if word in words.split() and package in packages]
        if not needed:
            if "--hub" in words:  # nothing asks the network here
                continue
            assert code == 0, f"{words}: {code}\n{said}"
            assert out
            continue
        assert code == 2, f"{words}: {code}"
        assert any(f"needs the package {package}, which is not installed" in said for package in needed), words
        assert "in a checkout" in said
        assert not out, f"{words} printed before it asked for {needed}"


@each
def test_every_public_function(folder, packages):
    import microfloat.torch as mf

    left = {"export"} if extent.is_quick() else set()  # torch's exporter takes as long as all others
    answers = processes.once(public_calls.call_answers, packages, str(folder), left)
    assert set(answers) == set(mf.__all__) - public_calls.CLASSES - public_calls.DATA - left
    missing = {name: answer for name, answer in answers.items() if answer}
    if "matplotlib" in packages:
        assert missing.pop("watch").startswith("missing: A picture needs the package matplotlib")
    assert missing == {}
