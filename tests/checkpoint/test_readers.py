"""What `inspect` and `convert` say of the readers of a file: one table of facts."""

import pytest

from microfloat.checkpoint.families import FAMILIES
from microfloat.checkpoint.families.readers import FACTS, SOURCES, Layer, complaints, readers_of
from microfloat.formats import FP8_ROW, FP8_TENSOR, MXFP4, MXFP8, NVFP4, FP8_128x128

NAME, EXPERT = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.3.up_proj.weight"


def test_facts_are_about_families_and_readers_that_exist():
    names = {family.name for family in FAMILIES}
    for fact in FACTS:
        assert fact.reader in SOURCES
        assert fact.does in ("reads", "misreads", "refuses")
        assert set(fact.families.split()) <= names
        assert fact.what or fact.does == "reads"
    assert {fact.reader for fact in FACTS} == set(SOURCES)


def answers(*layers):
    return {(row["reader"].split()[0], row["does"], row["layers"]) for row in readers_of(layers)}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (Layer("ct:nvfp4", NVFP4, EXPERT, (128, 128), "mixtral", "static"),
         {"vLLM": "reads", "transformers": "misreads", "TensorRT-LLM": "reads"}),
        (Layer("ct:nvfp4", NVFP4, NAME, (128, 128), "llama", "unscaled"), {"vLLM": "misreads", "SGLang": "reads"}),
        (Layer("modelopt:nvfp4", NVFP4, NAME, (128, 128), "llama", "unscaled"), {"vLLM": "misreads"}),
        (Layer("modelopt:fp8", FP8_TENSOR, NAME, (128, 128), "llama", "none"), {"vLLM": "misreads", "SGLang": "reads"}),
        (Layer("modelopt:fp8", FP8_TENSOR, EXPERT, (128, 128), "mixtral", "unscaled"), {"vLLM": "misreads"}),
        (Layer("modelopt:fp8", FP8_TENSOR, NAME, (128, 128), "llama", "static"), {"vLLM": "reads"}),
        (Layer("ct:nvfp4", NVFP4, NAME, (128, 128), "llama", "none"), {"TensorRT-LLM": "refuses", "vLLM": "reads"}),
        (Layer("ct:mxfp4", MXFP4, EXPERT, (128, 128), "mixtral"), {"SGLang": "reads"}),
        (Layer("ct:mxfp4", MXFP4, NAME, (128, 128), "llama"), {"SGLang": "refuses", "vLLM": "reads"}),
        (Layer("ct:fp8", FP8_TENSOR, NAME, (128, 128), "llama", "dynamic"), {"TensorRT-LLM": "refuses"}),
        (Layer("ct:fp8", FP8_ROW, NAME, (128, 128), "llama", "dynamic"), {"TensorRT-LLM": "reads"}),
        (Layer("hf:mxfp8", MXFP8, NAME, (128, 128), "llama"), {"vLLM": "refuses", "SGLang": "reads"}),
        (Layer("hf:mxfp8", MXFP8, NAME, (128, 128), "minimax_m3_vl"), {"vLLM": "reads"}),
        (Layer("deepseek:fp8", FP8_128x128, NAME, (192, 128), "deepseek_v3"), {"transformers": "misreads"}),
        (Layer("ct:mxfp8", MXFP8, NAME, (128, 128), "llama", dtype="float32"), {"transformers": "refuses"}),
        (Layer("ct:mxfp4", MXFP4, NAME, (128, 128), "llama", dtype="float16"), {"transformers": "refuses"}),
        (Layer("ct:mxfp4", MXFP4, NAME, (128, 128), "llama", dtype="bfloat16"), {"transformers": "reads"}),
        (Layer("ct:fp8", FP8_ROW, NAME, (128, 128), "llama", dtype="float32"), {"transformers": "reads"}),
        (Layer("quark:mxfp4", MXFP4, NAME, (128, 128), "llama"), {"vLLM": "reads", "TensorRT-LLM": "not known"}),
    ],
)  # fmt: skip
def test_the_first_fact_that_fits_a_layer_is_the_answer(layer, expected):
    found = {reader: does for reader, does, _ in answers(layer)}
    assert {reader: found[reader] for reader in expected} == expected
    assert len(found) == len(SOURCES)


def test_layers_with_other_answers_have_rows_of_their_own():
    layers = [Layer("ct:nvfp4", NVFP4, name, (128, 128), "mixtral", "static") for name in (NAME, EXPERT, EXPERT)]
    assert answers(*layers) >= {("transformers", "misreads", 2), ("transformers", "reads", 1), ("vLLM", "reads", 3)}
    assert len(complaints(layers[1])) == 1
    assert complaints(layers[0]) == []
    assert readers_of([]) == []
