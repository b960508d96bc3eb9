import math
import re
from pathlib import Path
from typing import Any

import lxml.html
import pytest

from dist_transformer.reporting.html.curves import Chart, Series, charts, thin, tick_text, ticks
from dist_transformer.reporting.html.rendering import render_page
from dist_transformer.reporting.html.run import Run


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.3, 9.1, [2, 4, 6, 8]),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (1.43, 2.05, [1.5, 1.6, 1.7, 1.8, 1.9, 2.0]),
        (-3, 3, [-2, 0, 2]),
        (0, 5e-4, [0, 1e-4, 2e-4, 3e-4, 4e-4, 5e-4]),
        (0, 8000, [0, 2000, 4000, 6000, 8000]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected, abs=1e-12)


def test_ticks_are_few_and_inside_whatever_the_range() -> None:
    for power in range(-9, 10):
        for factor in (1.0, 1.7, 3.3, 7.9):
            low, high = factor * 10.0**power, 2.9 * factor * 10.0**power
            found = ticks(low, high)
            assert 2 <= len(found) <= 6, (low, high, found)
            assert all(low - 1e-9 * high <= value <= high * (1 + 1e-9) for value in found)


@pytest.mark.parametrize(
    ("value", "highest", "text"),
    [
        (0, 5e6, "0"),
        (0.25, 1, "0.25"),
        (1500, 3000, "1,500"),
        (12_500, 20_000, "12.5k"),
        (2e6, 2e7, "2M"),
        (5e-5, 2e-4, "0.5·10⁻⁴"),
        (3e9, 4e9, "3·10⁹"),
    ],
)
def test_tick_texts_suit_their_axis(value: float, highest: float, text: str) -> None:
    assert tick_text(value, highest) == text


def test_thin_gives_the_median_and_range_of_each_stretch() -> None:
    points = [(1.0, 5.0), (2.0, 1.0), (3.0, 2.0), (4.0, 7.0), (5.0, 7.0), (6.0, 100.0)]
    assert thin(points, parts=2) == [(2.0, 1.0, 2.0, 5.0), (5.0, 7.0, 7.0, 100.0)]
    assert len(thin([(float(x), 0.0) for x in range(1001)], parts=200)) == 200


@pytest.fixture
def figure(tmp_path: Path) -> Any:
    """Draws a chart by the template of the pages."""
    template = tmp_path / "chart.j2"
    template.write_text('{% from "parts.html.j2" import curves %}{{ curves(chart) }}')

    def drawn(*series: Series, last: int = 100, **options: Any) -> lxml.html.HtmlElement:
        chart = Chart(title="T", unit="u", series=series, last=last, **{"from_zero": False, **options})
        return lxml.html.fragment_fromstring(render_page(template, chart=chart).strip())

    return drawn


def series(points: list[tuple[int, float | None]], label: str = "s") -> Series:
    return Series(label=label, points=points, style="first")


def lines(chart: lxml.html.HtmlElement) -> list[list[tuple[float, float]]]:
    """Coordinates of the points that are joined, for each stretch without gaps."""
    stretches = [part for path in chart.xpath(".//path[@class='line']/@d") for part in path.split("M")[1:]]
    return [[(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", part)] for part in stretches]


def test_a_line_is_where_its_axes_say(figure: Any) -> None:
    chart = figure(series([(0, 0.0), (50, 5.0), (100, 10.0)]), from_zero=True)
    ((start, middle, end),) = lines(chart)
    labels = {label.text: label for label in chart.xpath(".//text")}
    assert {"0", "2", "4", "6", "8", "10", "20", "40", "60", "80", "100", "step"} == set(labels)
    assert end[1] == pytest.approx(float(labels["10"].get("y")), abs=0.11)
    assert end[0] == pytest.approx(float(labels["100"].get("x")), abs=0.11)
    assert middle == pytest.approx(((start[0] + end[0]) / 2, (start[1] + end[1]) / 2), abs=0.11)
    assert start[1] > end[1]
    assert [title.text for title in chart.xpath(".//circle/title")] == [
        "s: 0 at step 0",
        "s: 5 at step 50",
        "s: 10 at step 100",
    ]


def test_a_missing_value_is_a_gap(figure: Any) -> None:
    chart = figure(series([(0, 1.0), (10, 2.0), (20, None), (30, 3.0), (40, None), (50, 4.0), (60, 5.0)]))
    # Each begins with a line of no length, which shows a point between two gaps.
    assert [len(line) for line in lines(chart)] == [2, 1, 2]
    assert chart.xpath(".//path[@class='line']/@d")[0].count("h0") == 3
    assert len(chart.xpath(".//circle")) == 5


@pytest.mark.parametrize("count", [1, 2, 40, 400, 401, 50_000])
def test_any_number_of_points(figure: Any, count: int) -> None:
    points: list[tuple[int, float | None]] = [(step, math.sin(step / count)) for step in range(1, count + 1)]
    chart = figure(series(points), last=count)
    assert [len(line) for line in lines(chart)] == [count if count <= 400 else 200]
    assert len(chart.xpath(".//circle")) == (count if count <= 40 else 0)
    assert (chart.xpath(".//polygon/@points")[0] != "") == (count > 400)
    notes = [note.text for note in chart.xpath("./p")]
    assert notes == ([f"{count:,} points: lines are medians of 200 stretches, bands their ranges"] * (count > 400))
    assert len(lxml.html.tostring(chart)) < 40_000


def test_a_long_curve_of_learning_rates_has_points_and_no_band() -> None:
    records = [{"step": step, "learning_rate": 1 / step} for step in range(1, 5001)]
    (chart,) = charts(Run(name="r", train=records))
    (rates,) = chart.series
    assert rates.parts == chart.notes == []
    assert 300 < len(rates.known) <= 400
    assert rates.known[0] == (1, 1.0)


def test_spikes_do_not_flatten_the_rest(figure: Any) -> None:
    points: list[tuple[int, float | None]] = [(step, 1.0) for step in range(100)]
    points[50] = (50, 1000.0)
    chart = figure(series(points), from_zero=True, is_spiky=True)
    assert [note.text for note in chart.xpath("./p")] == ["1 above the picture, the highest 1,000"]
    assert {"0", "0.5", "1", "1.5", "2"} <= {label.text for label in chart.xpath(".//text")}
    # The line ends above the axis.
    assert min(y for line in lines(chart) for _, y in line) == 6.0
    plain = figure(series(points))
    assert not plain.xpath("./p")
    assert "1,000" in {label.text for label in plain.xpath(".//text")}


def test_the_right_axis_says_the_same_otherwise(figure: Any) -> None:
    chart = figure(series([(0, 0.0), (100, 9.0)]), has_perplexity=True)
    labels = {float(label.get("y")): label.text for label in chart.xpath(".//text[@class='left']")}
    right = {float(label.get("y")): label.text for label in chart.xpath(".//text[not(@class)]")}
    assert {labels[y]: right[y] for y in right} == {"0": "1", "2": "7.39", "4": "54.6", "6": "403", "8": "2,981"}


def test_a_marked_point_has_a_ring(figure: Any) -> None:
    chart = figure(series([(0, 1.0), (50, 3.0), (100, 2.0)]), marked=(50, 3.0, "the top"))
    (ring,) = chart.xpath(".//circle[@class='ring']")
    (dot,) = [dot for dot in chart.xpath(".//circle") if dot.findtext("title") == "s: 3 at step 50"]
    assert (ring.get("cx"), ring.get("cy"), ring.findtext("title")) == (dot.get("cx"), dot.get("cy"), "the top")
    assert [note.text for note in chart.xpath("./p")] == ["ring: the top"]


def test_series_and_charts_without_a_value_are_left_out() -> None:
    run = Run(name="r", train=[{"step": 1, "nll": 2.0, "loss": None, "gradient_norm": None}])
    assert [(chart.title, [each.label for each in chart.series]) for chart in charts(run)] == [
        ("Loss", ["training nll"])
    ]
