"""features I9, B6: the serving example judges a format on held-out text, writes a file that loads, and writes text."""

import importlib

import pytest

from tests.examples.small_run import train

pytest.importorskip("torch", reason="torch is not installed")

import microfloat.torch as mf


def test_a_trained_model_is_quantized_judged_and_served(tmp_path, capsys) -> None:
    assert train(tmp_path, "--recipe bf16 --steps 2") == 0
    file, served = tmp_path / "small" / "checkpoints" / "bf16.zip", tmp_path / "served"
    generate = importlib.import_module("generate")
    capsys.readouterr()
    assert generate.main([str(file), "--save", str(served), "--bytes", "4", "--windows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "4 of 5 linear layers" in shown
    assert "bits per byte" in shown
    assert isinstance(mf.load_quantized(served)["blocks.0.qkv.weight"], mf.QuantizedTensor)
    assert generate.main([str(file), "--format", "nvfp5"]) == 2
    assert "Did you mean" in capsys.readouterr().err
    assert generate.main([str(tmp_path / "none.zip")]) == 2
    assert "Name a file that train_gpt.py wrote" in capsys.readouterr().err  # and nothing about --resume
    for wrong in (["--save", str(served)], ["--temperature", "0"], ["--prompt", ""]):
        with pytest.raises(SystemExit, match="2"):  # before the held-out text is read
            generate.main([str(file), *wrong])
