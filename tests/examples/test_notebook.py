"""examples/first_steps.ipynb: it runs from the first cell to the last, and nothing of a run is kept in it."""

import json

import pytest


@pytest.fixture
def cells(repository):
    path = repository / "examples" / "first_steps.ipynb"
    assert path.stat().st_size < 30_000
    book = json.loads(path.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    return book["cells"]


def test_no_output_of_a_run_is_kept(cells):
    assert len({cell["id"] for cell in cells}) == len(cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(code) > 5
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.slow("trains three small models and draws two sheets of pictures")
def test_every_cell_runs(cells, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    plt = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed")
    names: dict = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    plt.close("all")
    assert all(sum(curve[-10:]) < sum(curve[:10]) for curve in names["losses"].values())
    assert [path.name for path in sorted(names["folder"].iterdir())] == [
        "errors.png", "served.safetensors", "watching.png",
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "nan" not in printed
    assert "times that of normal data" in printed
    assert "quantized  WeightOnly(nvfp4)" in printed
