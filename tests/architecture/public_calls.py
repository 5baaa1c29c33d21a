"""A small call of everything public that can be called, and every command, for processes that lack some packages."""

import contextlib
import io
import warnings
from pathlib import Path

from tests.without import hide

CLASSES = {
    "AutocastState", "Cast", "ConversionReport", "Current", "Delayed", "Gemm", "Hadamard", "Placement",
    "QuantizedTensor", "Recipe", "Record", "Support", "WeightActivation", "WeightOnly",
}  # fmt: skip
DATA = {"FLOP_FORMULAS", "formats", "recipes"}


def torch_calls(folder):
    """Name in ``microfloat.torch.__all__`` -> a call that does a little of everything that it does."""
    import torch

    import microfloat.torch as mf

    x, w, ids = torch.randn(32, 64), torch.randn(48, 64), torch.tensor([12, 20])
    q, w_q, tokens = mf.quantize(x, "nvfp4"), mf.quantize(w, "nvfp4"), torch.randn(2, 16, 64)
    heads, nibbles = torch.randn(2, 16, 4, 16), torch.randint(0, 16, (4, 64), dtype=torch.uint8)

    def model():
        return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.GELU(), torch.nn.Linear(96, 64))

    kept = []

    def converted(recipe="delayed"):
        made = model()
        kept.append(made)  # its state is needed until backward is done
        print(mf.convert(made, recipe, fuse=True))
        return made

    def trained(layer, *inputs):
        with mf.autocast(recipe="nvfp4"):
            layer(*inputs).sum().backward()

    def under(context):
        with context:
            converted()(x).sum().backward()

    def watched():
        made = converted("mxfp8")
        with mf.watch(made) as watch:
            made(x).sum().backward()
            watch.step()
        print(watch.table())
        watch.plot(folder / "watch.png")

    def served():
        made = model()
        mf.quantize_(made, mf.WeightActivation("mxfp8"))
        path = folder / str(len(kept))
        kept.append(made)
        mf.save_quantized(made, path, format="microfloat:native")
        mf.load_quantized(path, model())

    def calibrated():
        made = model()
        mf.quantize_(made, mf.WeightActivation("fp8_tensor", scales="static"))
        with mf.calibrate(made):
            made(x)
        made(x)

    def cached():
        mf.KVCache(2, 32, 4, 16, format="mxfp8").update(heads, heads)

    def initialised(context=mf.quantized_model_init):
        with context(recipe="mxfp8"):
            made = mf.Linear(64, 48)
        mf.update_quantized(made.weight, w)

    return {
        "GroupedLinear": lambda: trained(mf.GroupedLinear(2, 64, 48), x, ids),
        "KVCache": cached,
        "LayerNorm": lambda: trained(mf.LayerNorm(64), x),
        "LayerNormLinear": lambda: trained(mf.LayerNormLinear(64, 48), x),
        "LayerNormMLP": lambda: trained(mf.LayerNormMLP(64, 96), x),
        "LayerOptions": lambda: trained(mf.TransformerLayer(64, 96, 4, options=mf.LayerOptions(dropout=0.1)), tokens),
        "Linear": lambda: trained(mf.Linear(64, 48), x),
        "MultiheadAttention": lambda: trained(mf.MultiheadAttention(64, 4), tokens),
        "RMSNorm": lambda: trained(mf.RMSNorm(64), x),
        "RotaryEmbedding": lambda: mf.RotaryEmbedding(16)(16),
        "TransformerLayer": lambda: trained(mf.TransformerLayer(64, 96, num_heads=4), tokens),
        "apply_rotary": lambda: mf.apply_rotary(heads, heads, *mf.RotaryEmbedding(16)(16)),
        "autocast": lambda: under(mf.autocast(recipe="mxfp8")),
        "calibrate": calibrated,
        "checkpoint": lambda: mf.checkpoint(converted("nvfp4"), x.clone().requires_grad_()).sum().backward(),
        "convert": lambda: converted()(x).sum().backward(),
        "dequantize": lambda: mf.dequantize(q),
        "explain": lambda: [print(mf.explain("delayed", device)) for device in ("h200", "b200", None)],
        "export": lambda: mf.export(converted("mxfp8"), (x,)),
        "compare": lambda: print(mf.compare(x, ["nvfp4", "int4:fp32:1x32"])),
        "fake_quantize": lambda: mf.fake_quantize(x, "mxfp6_e2m3"),
        "fp8_autocast": lambda: under(mf.fp8_autocast(enabled=True)),
        "fp8_model_init": lambda: initialised(mf.fp8_model_init),
        "from_blocked": lambda: mf.from_blocked(mf.to_blocked(q.scale), *q.scale.shape),
        "get_align_size_for_quantization": lambda: mf.get_align_size_for_quantization("mxfp8"),
        "get_autocast_recipe": mf.get_autocast_recipe,
        "get_autocast_state": mf.get_autocast_state,
        "get_default_recipe": mf.get_default_recipe,
        "grouped_matmul": lambda: mf.grouped_matmul(x, torch.randn(2, 48, 64), ids, recipe="mxfp8"),
        "is_autocast_enabled": mf.is_autocast_enabled,
        "is_fp8_available": mf.is_fp8_available,
        "is_fp8_block_scaling_available": mf.is_fp8_block_scaling_available,
        "is_mxfp8_available": mf.is_mxfp8_available,
        "is_nvfp4_available": mf.is_nvfp4_available,
        "linear_cross_entropy": lambda: mf.linear_cross_entropy(
            x.clone().requires_grad_(), w, torch.arange(32), recipe="nvfp4", chunk=16
        ).backward(),
        "linear": lambda: mf.linear(x, w.clone().requires_grad_(), recipe="nvfp4").sum().backward(),
        "load_quantized": served,
        "pack_fp4": lambda: mf.pack_fp4(nibbles),
        "pack_fp6": lambda: mf.pack_fp6(nibbles),
        "plain_state_dict": lambda: mf.plain_state_dict(converted()),
        "quantize": lambda: [mf.quantize(x, name) for name in ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4_2d")],
        "quantize_": lambda: mf.quantize_(model(), mf.WeightOnly("nvfp4")),
        "quantized_model_init": initialised,
        "register_experts": lambda: mf.register_experts("a:B", {"w": "ENK"}, lambda *given: given[0]),
        "reset_scaling": lambda: mf.reset_scaling(converted()),
        "revert": lambda: mf.revert(converted()),
        "save_quantized": served,
        "scaled_matmul": lambda: mf.scaled_matmul(q, w_q),
        "set_seed_rank": lambda: mf.set_seed_rank(None),
        "to_blocked": lambda: mf.to_blocked(q.scale),
        "unpack_fp4": lambda: mf.unpack_fp4(mf.pack_fp4(nibbles), 64),
        "unpack_fp6": lambda: mf.unpack_fp6(mf.pack_fp6(nibbles), 64),
        "update_quantized": initialised,
        "update_scaling": lambda: mf.update_scaling(converted()),
        "watch": watched,
    }  # fmt: skip


def commands(folder):
    """Every command with its ways to need a package; `folder` holds a checkpoint "model"."""
    model, made = str(folder / "model"), str(folder / "made")
    picture = str(folder / "picture.png")
    bench = ["bench", "--shapes", "32x32x32", "--formats", "mxfp8", "--device", "cpu", "--milliseconds", "1"]
    return [
        ["doctor"], ["doctor", "--check", "--device", "cpu"], ["doctor", "--device", "b200", "--json"],
        ["doctor", "--device", "cuda"],
        ["formats"], ["formats", "nvfp4", "--plot", picture], ["formats", "encode", "0.3", "--as", "e2m1"],
        ["inspect", model, "--format", "nvfp4"], ["inspect", model, "--plot", picture],
        ["inspect", "--hub", "owner/name"],
        ["convert", model, made, "--to", "ct:nvfp4"], ["diff", model, made, "--plot", picture],
        ["plan", model, "--bits", "6"], bench,
    ]  # fmt: skip


def answer_of(words):
    """Exit code of a command, or the exception that it raised as text; what it printed; what it said."""
    from microfloat.cli import main

    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as end:
            code = end.code
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    return code, out.getvalue(), said.getvalue()


def command_answers(packages, folder):
    """Command -> its answer, without these packages."""
    hide(*packages)
    return {" ".join(words): answer_of(words) for words in commands(Path(folder))}


def call_answers(packages, folder, left=frozenset()):
    """Name of a public function of torch -> "" or what it raised, without these packages; `left` are not called."""
    hide(*packages)
    from microfloat.errors import MissingPackageError

    answers = {}
    for name, call in torch_calls(Path(folder)).items():
        if name in left:
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # deprecated names, and torch's own of its exporter
                call()
            answers[name] = ""
        except MissingPackageError as error:
            answers[name] = f"missing: {error}"
        except Exception as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers
