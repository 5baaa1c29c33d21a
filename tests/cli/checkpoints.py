"""Small checkpoints for the command line, as Llama's parameters are named."""

import json

import ml_dtypes
import numpy as np


def llama(folder, blocks=2, shards=2):
    """A sharded bfloat16 checkpoint of `blocks` blocks with 64 hidden features; returns its folder."""
    generator = np.random.default_rng(0)
    tensors = {"model.embed_tokens.weight": _matrix(generator, 320, 64)}
    for block in range(blocks):
        start = f"model.layers.{block}."
        shapes = {
            "self_attn.q_proj": (64, 64), "self_attn.k_proj": (64, 64), "self_attn.v_proj": (64, 64),
            "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64), "mlp.down_proj": (64, 96),
        }  # fmt: skip
        tensors |= {f"{start}{name}.weight": _matrix(generator, *shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{start}{norm}.weight"] = np.ones(64, ml_dtypes.bfloat16)
    tensors["model.norm.weight"] = np.ones(64, ml_dtypes.bfloat16)
    tensors["lm_head.weight"] = _matrix(generator, 320, 64)
    names, index = list(tensors), {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write(folder / file, {name: tensors[name] for name in part})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}))
    return folder


def _matrix(generator, rows, cols):
    return (generator.normal(size=(rows, cols)) / np.sqrt(cols)).astype(ml_dtypes.bfloat16)


_NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


def write(path, tensors):
    """A safetensors file, written by hand: the command line is tested without the library's own writer."""
    header, start = {}, 0
    for name, array in tensors.items():
        stop = start + array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype.name], "shape": list(array.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(array.tobytes() for array in tensors.values()))


def nvfp4_file(folder, leave_out=""):
    """One layer as compressed-tensors writes NVFP4; without one of its tensors where `leave_out` names it."""
    from microfloat import reference

    x = np.random.default_rng(1).normal(size=(16, 64)).astype(np.float32)
    q = reference.quantize(x, "nvfp4")
    tensors = {
        "weight_packed": q.codes, "weight_scale": q.scale.view(ml_dtypes.float8_e4m3fn),
        "weight_global_scale": 1 / np.array([q.tensor_scale], np.float32),
    }  # fmt: skip
    path = folder / "layer.safetensors"
    write(path, {f"model.layers.0.mlp.up_proj.{name}": array for name, array in tensors.items() if name != leave_out})
    return path
