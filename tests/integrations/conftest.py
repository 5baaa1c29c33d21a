"""Training packages, imported by the tests that use them and never while tests are collected; no network."""

import os
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _package(name):
    @pytest.fixture(name=name)
    def imported():
        return pytest.importorskip(name, reason=f"{name} is not installed")

    return imported


transformers, accelerate, lightning, peft = map(_package, ("transformers", "accelerate", "lightning", "peft"))


@pytest.fixture
def llama(transformers):
    """Make the same tiny language model again and again; another family by its name."""

    def make(family="Llama", **options):
        sizes = {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
        }  # fmt: skip
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes | options)
        return getattr(transformers, f"{family}ForCausalLM")(config)

    return make


@pytest.fixture(autouse=True)
def fresh_state():
    """Accelerate keeps its settings in a state for the whole process, and so does any Trainer, also one that fails."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


class Sequences(torch.utils.data.Dataset):
    """Arithmetic sequences modulo 64, which a tiny model learns within a few steps."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = (torch.arange(16) * (index % 4 + 1) + index) % 64
        return {"input_ids": ids, "labels": ids}


@pytest.fixture
def sequences():
    return Sequences()
