"""Pictures show what they are given, and need no window system."""

import itertools
import sys

import numpy as np
import pytest

from microfloat import pictures
from microfloat.errors import InvalidValueError, MissingPackageError
from microfloat.formats import E2M1, ELEMENTS, FORMATS, ElementFormat
from microfloat.pictures.checkpoints import Layer, overview
from microfloat.pictures.errors import ErrorCounts, error_against_magnitude
from microfloat.pictures.formats import magnitudes
from microfloat.pictures.speed import roofline
from microfloat.recipes import RECIPES

pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def test_a_tick_for_every_magnitude():
    figure = pictures.relative_gaps([E2M1])
    lines = figure.axes[0].collections
    places = sorted(2 ** segment[0][0] for collection in lines for segment in collection.get_segments())
    np.testing.assert_allclose(places, [0.5, 1, 1.5, 2, 3, 4, 6])
    np.testing.assert_array_equal(magnitudes(E2M1), [0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert len(pictures.number_lines().axes[0].get_yticklabels()) == len(ELEMENTS)


def test_layers_are_placed_by_block_and_kind():
    layer = Layer("model.layers.12.mlp.up_proj.weight", 1.0, 4.0)
    assert (layer.index, layer.kind) == (12, "mlp.up_proj")
    assert (Layer("lm_head.weight", 1.0, 4.0).index, Layer("lm_head.weight", 1.0, 4.0).kind) == (0, "lm_head")


def test_the_overview_has_a_panel_for_each_format_and_frames_the_worst():
    layers = [Layer(f"layers.{i}.{kind}.weight", 1.0, 4.0, {"nvfp4": 20.0 - i, "mxfp8": None if i else 31.0})
              for i in range(3) for kind in ("up", "down")]  # fmt: skip
    figure = overview(layers, {"as stored": 16.0, "nvfp4": 4.5}, {"nvfp4": {3: 0.25, 4: 0.75}}, "title")
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[:2] == ["nvfp4\nmedian 19.0 dB", "mxfp8\nmedian 31.0 dB"]
    frame = figure.axes[0].lines[0].get_xydata().mean(0)
    assert round(float(frame[0])) == 2  # the third block
    assert overview([], {}, {}, "nothing").axes


def test_titles_and_labels_of_many_formats_and_long_names_do_not_overlap():
    kinds = [f"layer.{j}.a_very_long_name_of_a_module.SelfAttention.query_projection" for j in range(2)]
    names = list(FORMATS)[:8]
    errors = dict.fromkeys(names, 20.0)
    layers = [Layer(f"block.{i}.{kind}.weight", 1.0, 4.0, errors) for i in range(40) for kind in kinds]
    figure = overview(layers, dict.fromkeys(names, 4.5), {}, "title")
    figure.canvas.draw()
    panels = figure.axes[: len(names)]
    rows = [[panel.title for panel in panels]] + [panel.get_xticklabels() for panel in panels]
    for row in rows:
        boxes = [text.get_window_extent() for text in row]
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes)), [text.get_text() for text in row]
    shown = panels[0].get_yticklabels()[1].get_text()
    assert len(shown) == 32
    assert shown.startswith("layer.1.a_...")
    assert shown.endswith("query_projection")


def test_values_that_become_zero_have_their_median_on_the_line_of_100_percent():
    counts, x = ErrorCounts(), np.array([1.0, 1.3, 3.0])
    counts.add(x, x)
    figure = error_against_magnitude(counts, {"w": 0.0})
    (middle,) = [line for line in figure.axes[0].lines if "median" in str(line.get_label())]
    assert {float(y) for y in middle.get_ydata() if y == y} == {0.0}


def test_a_result_that_is_nan_is_the_worst_and_shares_end_at_100():
    layers = [Layer(f"layers.{i}.up.weight", 1.0, 4.0, {"mxfp8": value}) for i, value in enumerate((9.0, np.nan, 31.0))]
    figure = overview(layers, {"as stored": 16.0}, {"mxfp8": {-3: 1.0}}, "title")
    assert [text.get_text() for text in figure.axes[0].texts] == ["9.0", "nan", "31.0"]
    assert round(float(figure.axes[0].lines[0].get_xydata().mean(0)[0])) == 1
    (histogram,) = [axes for axes in figure.axes if axes.get_xlabel() == "block scale"]
    assert max(histogram.get_yticks()) == 100


def test_labels_of_values_do_not_overlap():
    for elements in ([E2M1], list(ELEMENTS.values())):
        figure = pictures.relative_gaps(elements)
        figure.canvas.draw()
        boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.x0)
        assert len(boxes) >= 3
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))


def test_errors_are_counted_by_magnitude():
    counts = ErrorCounts()
    counts.add(np.array([1.0, 1.0, 2.0, 0.0], np.float32), np.array([0.0, 0.25, 0.5, 9.0]))
    counts.add(np.array([2.0**-60]), np.array([2.0**-80]))  # beyond the picture: at its border
    assert counts.exact.sum() == 1
    assert counts.counts.sum() == 3
    np.testing.assert_array_equal(np.argwhere(counts.counts)[1:] - np.argwhere(counts.counts)[1], [[0, 0], [4, 0]])
    assert np.argwhere(counts.counts)[0].tolist() == [0, 0]
    assert error_against_magnitude(counts, {"w": float("nan"), "v": 20.0}, 21.0).axes


@pytest.mark.parametrize("fields", [("E3M4", 3, 4, 3, 31.0), ("E1M6", 1, 6, -1, 7.9375), ("E4M2", 4, 2, 7, 448.0)])
def test_no_curve_of_gaps_is_cut_off(fields):
    """Elements finer and coarser than the stock ones."""
    element = ElementFormat(*fields, False, False)
    (curve,) = (axes := pictures.relative_gaps([element]).axes[1]).lines
    gaps = curve.get_ydata()[:-1]
    low, high = axes.get_ylim()
    assert low < gaps.min() <= gaps.max() < high
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 2


def test_no_legend_covers_a_line_or_a_label():
    figure = pictures.number_lines([*ELEMENTS.values(), ElementFormat("E3M4", 3, 4, 3, 31.0, False, False)])
    figure.canvas.draw()
    (legend,) = [one.get_window_extent() for one in figure.legends]
    assert not any(legend.overlaps(axes.get_window_extent()) for axes in figure.axes)
    axes = pictures.relative_gaps().axes[1]
    axes.figure.canvas.draw()
    assert axes.get_legend().get_window_extent().x0 >= axes.get_window_extent().x1


def test_a_recipe_has_one_colour_everywhere():
    from microfloat.pictures.style import color_of, colors_of

    assert color_of("nvfp4_2d") == color_of("nvfp4") != color_of("mxfp4")
    assert color_of("fp8_current") == color_of("fp8_tensor_e5m2")
    assert color_of("custom") is None
    for names in (["bf16", "nvfp4"], ["mxfp8", "fp8_row", "nvfp4"], ["custom", "nvfp4", "mine"]):
        assert colors_of(names)["nvfp4"] == color_of("nvfp4")
    many = [*RECIPES, "nvfp4_2d", "custom"]
    assert len(set(colors_of(many).values())) == len(many)


def test_a_roofline_ends_at_its_roof_and_names_shapes():
    row = {
        "shape": "8x8x8", "format": "mxfp8", "intensity": 100.0, "tflops": 4.0, "bf16_intensity": 60.0,
        "bf16_tflops": 2.0,
    }  # fmt: skip
    axes = roofline([row, {**row, "shape": "9x9x9", "intensity": 300.0}], 40.0, "a GPU").axes[0]
    memory = axes.lines[0].get_xydata()
    assert memory[-1].tolist() == [100.0, 4.0]  # where a copy's rate allows the best product
    assert "8x8x8\n9x9x9" in {text.get_text() for text in axes.texts}  # their bf16 products have one mark
    apart = roofline([row, {**row, "shape": "9x9x9", "bf16_intensity": 80.0}], 40.0, "a GPU").axes[0]
    assert {"8x8x8", "9x9x9"} <= {text.get_text() for text in apart.texts}


def test_saving(tmp_path):
    figure = pictures.number_lines([E2M1])
    for ending in ("png", "svg", "pdf"):
        first, second = (pictures.save(figure, tmp_path / f"{name}.{ending}").read_bytes() for name in "ab")
        if ending != "svg":  # its identifiers are random
            assert first == second
    with pytest.raises(InvalidValueError, match=r"\.bmp"):
        pictures.save(figure, tmp_path / "a.bmp")
    with pytest.raises(InvalidValueError, match="Create"):
        pictures.save(figure, tmp_path / "no" / "a.png")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r'pip install "\.\[plot\]"'):
        pictures.number_lines()


def test_nothing_imports_matplotlib_before_a_picture_is_made(fresh_python):
    done = fresh_python("import sys, microfloat.pictures; print('matplotlib' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
