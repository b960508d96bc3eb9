import dataclasses
import io
import logging
import re
import subprocess
import sys
import warnings
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from dist_transformer.data.loading.statistics import Lengths
from dist_transformer.evaluation.samples import Sample
from dist_transformer.model.positions import sinusoidal_positions
from dist_transformer.reporting.figures import (
    as_png,
    as_svg,
    attention_picture,
    length_picture,
    position_picture,
)


def make_sample(layers: int = 2, sources: int = 5, targets: int = 4) -> Sample:
    """Pieces of 1 to 12 characters, weights that sum to 1."""
    rng = np.random.default_rng(1)
    maps = rng.dirichlet(np.full(sources, 0.2), size=(layers, targets)).round(3)
    words = ["▁a", "▁street", "s", "▁Donaudampfer", "ü", ","]
    return Sample(
        source="",
        reference="",
        hypothesis="",
        source_tokens=[words[i % 6] for i in range(sources - 1)] + ["</s>"],
        target_tokens=[words[(i + 3) % 6] for i in range(targets - 1)] + ["</s>"],
        attention_LTS=maps.tolist(),
    )


def drawn(figure: Figure) -> Figure:
    """Laid out, so that texts have places."""
    FigureCanvasAgg(figure).draw()
    return figure


def boxes(figure: Figure, texts: list[Text]) -> list[tuple[float, float, float, float]]:
    renderer = figure.canvas.get_renderer()
    return [text.get_window_extent(renderer).extents for text in texts if text.get_text()]


def overlap(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Boxes (left, bottom, right, top), a pixel of tolerance."""
    return all(first[i] + 1 < second[i + 2] and second[i] + 1 < first[i + 2] for i in (0, 1))


def panels(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_title()]


def column_labels(panel: Axes) -> list[Text]:
    """The labels of a panel's columns; the name of the axis stands on its place, labels hang from theirs."""
    return [text for text in panel.texts if text.get_va() == "top"]


def row_labels(panel: Axes) -> list[Text]:
    return [text for text in panel.texts if text.get_ha() == "right"]


@pytest.mark.parametrize(("layers", "rows"), [(1, 1), (3, 1), (4, 2), (12, 2)])
def test_a_panel_a_layer_in_at_most_two_rows(layers: int, rows: int) -> None:
    sample = make_sample(layers)
    figure = drawn(attention_picture(sample))
    assert [panel.get_title() for panel in panels(figure)] == [f"Decoder layer {i}" for i in range(1, layers + 1)]
    assert len({round(panel.get_position().y0, 2) for panel in panels(figure)}) == rows
    for panel, weights in zip(panels(figure), sample.attention_LTS, strict=True):
        # Row i is the step that produced piece i, from top to bottom.
        np.testing.assert_array_equal(panel.images[0].get_array(), weights)
        assert panel.yaxis_inverted()
        assert [text.get_text() for text in column_labels(panel)] == sample.source_tokens
        assert [text.get_text() for text in row_labels(panel)] == sample.target_tokens
        assert {"source", "produced"} <= {text.get_text() for text in panel.texts}
    # All panels and their colour bar share one scale, from no attention to the most.
    assert {panel.images[0].get_clim() for panel in panels(figure)} == {(0.0, np.max(sample.attention_LTS))}
    assert len(figure.axes) == layers + 1
    assert "attention weight" in figure.axes[-1].get_ylabel()


LONG = "▁Donaudampfschifffahrtsgesellschaft"


@pytest.mark.system
@pytest.mark.parametrize("word", ["▁a", LONG, "你好世界"])
@pytest.mark.parametrize(("layers", "sources", "targets"), [(1, 1, 1), (1, 2, 30), (2, 2, 3), (6, 60, 60)])
def test_every_text_can_be_read(layers: int, sources: int, targets: int, word: str) -> None:
    """Nothing is cut and nothing overlaps: titles, pieces beside their rows and columns, names, the colour bar."""
    sample = make_sample(layers, sources, targets)
    pieces = {"source_tokens": sample.source_tokens, "target_tokens": sample.target_tokens}
    long = {side: [word if i % 3 == 0 else piece for i, piece in enumerate(of)] for side, of in pieces.items()}
    figure = drawn(attention_picture(dataclasses.replace(sample, **long)))
    width, height = figure.canvas.get_width_height()
    found = []
    for panel in panels(figure):
        found += boxes(figure, [panel.title, *panel.texts])
        middles = panel.transData.transform([(i, i) for i in range(max(sources, targets))])
        for labels, side in ((column_labels(panel), 0), (row_labels(panel), 1)):
            for box, middle in zip(boxes(figure, labels), middles[:, side], strict=False):
                assert abs((box[side] + box[side + 2]) / 2 - middle) < 4
    assert len(found) == layers * (sources + targets + 3)
    bar = figure.axes[-1]
    # A colour bar has ticks beyond its ends that are not drawn.
    low, high = sorted(bar.get_ylim())
    ticks = zip(bar.get_yticks(), bar.get_yticklabels(), strict=True)
    found += boxes(figure, [bar.yaxis.label, *(label for place, label in ticks if low <= place <= high)])
    for i, box in enumerate(found):
        assert 0 <= box[0] < box[2] <= width
        assert 0 <= box[1] < box[3] <= height
        assert not any(overlap(box, other) for other in found[:i])


def test_dollar_signs_are_no_formula() -> None:
    sample = dataclasses.replace(make_sample(), source_tokens=["$", "▁$x^", r"$\frac$", "$$", "</s>"])
    figure = attention_picture(sample)
    assert as_png(figure)
    assert r"$\frac$" in as_svg(figure)


def test_characters_without_a_font_make_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    sample = dataclasses.replace(make_sample(), source_tokens=["你好", "▁世界", "猫", "\u1200", "</s>"])
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.WARNING):
        warnings.simplefilter("always")
        figure = attention_picture(sample)
        assert as_png(figure)
        # The page's reader may have the font that this machine lacks.
        assert "你好" in as_svg(figure)
    assert caplog.records == []
    assert warned == []


def test_positions_are_a_heat_map() -> None:
    table = sinusoidal_positions(200, 32).numpy()
    figure = drawn(position_picture(table))
    axes, bar = figure.axes
    np.testing.assert_array_equal(axes.images[0].get_array(), table[:128])
    assert axes.images[0].get_clim() == (-1.0, 1.0)
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("dimension", "position", "value")
    assert "128 of 200 positions" in axes.get_title()


@pytest.mark.parametrize(("table", "most"), [(np.zeros((3, 2)), 1.0), (np.array([[0.5, -2.0]], dtype=np.float32), 2.0)])
def test_positions_of_any_table(table: np.ndarray, most: float) -> None:
    assert position_picture(table).axes[0].images[0].get_clim() == (-most, most)


def test_lengths_are_drawn_as_shares_of_each_side() -> None:
    """Source: 1 sentence of 1 token, 3 of 3; target: 2 of 2 tokens."""
    sides = [Lengths(counts=np.array([0, 1, 0, 3])), Lengths(counts=np.array([0, 0, 2]))]
    (axes,) = drawn(length_picture(sides, ["source, en", "target, de"])).axes
    values = [patch.get_data().values.tolist() for patch in axes.patches]
    assert values == [[0, 25, 0, 75], [0, 0, 100]]
    assert axes.patches[0].get_data().edges.tolist() == [-0.5, 0.5, 1.5, 2.5, 3.5]
    assert axes.get_xlim() == (0, 4)
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "source, en: mean 2.5, 99% up to 3, longest 3",
        "target, de: mean 2.0, 99% up to 2, longest 2",
    ]


def test_png_is_the_figure() -> None:
    figure = position_picture(sinusoidal_positions(64, 16).numpy())
    with Image.open(io.BytesIO(as_png(figure))) as image:
        assert image.size == tuple(round(inches * figure.dpi) for inches in figure.get_size_inches())
        colours = np.asarray(image.convert("RGB")).reshape(-1, 3)
    assert len(np.unique(colours, axis=0)) > 100


def test_svg_is_one_element_with_its_text() -> None:
    svg = as_svg(attention_picture(make_sample()))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts.count("▁Donaudampfer") >= 2
    # A page with it stands alone.
    assert not re.findall(r'(?:href|src)="(?!#|data:)', svg)


def test_equal_figures_give_equal_files_and_leave_the_settings_of_matplotlib() -> None:
    before = dict(matplotlib.rcParams)
    for write in (as_svg, as_png):
        assert write(attention_picture(make_sample())) == write(attention_picture(make_sample()))
    assert dict(matplotlib.rcParams) == before


@pytest.mark.system
def test_neither_window_nor_pyplot() -> None:
    """In a process of its own: this one has imported much already."""
    program = """
import sys
from dist_transformer.reporting import figures as pictures
assert "matplotlib" not in sys.modules, "a second at every start"
pictures.as_png(pictures.position_picture(pictures.np.eye(2)))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)
