"""Curves as inline SVG that follows the page's colours. Long series are thinned to a median and its range."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dist_transformer.reporting.html.markup import Html, element, join

# Units of the SVG: about CSS pixels on a phone, and a fifth larger on a wide screen.
_WIDTH, _HEIGHT = 480, 250
_LEFT, _TOP, _BOTTOM = 54, 10, 38
_RIGHT, _RIGHT_WITH_AXIS = 14, 46
# Points per line: two units per point are as fine as a screen can show.
_LONGEST_LINE, _THINNED = 400, 200
_MOST_DOTS = 40
# If a spike is this many times the 98th percentile, the axis ends at twice that percentile. Otherwise the rest would be
# a flat line.
_SPIKE = 5

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A measure over steps; None where it was not finite."""

    label: str
    points: Sequence[tuple[int, float | None]]
    style: str
    """Class of the style sheet: `first`, `second` or `third`."""
    is_smooth: bool = False
    """Whether a long series is drawn from some of its points, without medians and ranges."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A picture of one or more series with the same steps and the same unit."""

    title: str
    unit: str
    series: Sequence[Series]
    steps: tuple[int, int]
    """First and last step of the axis."""
    from_zero: bool = False
    is_spiky: bool = False
    """Whether a few values may be far above the rest; the axis may leave them out, with a note."""
    right_axis: tuple[str, Callable[[float], float]] | None = None
    """Label of a second axis, and the function from the first axis to the second."""
    marked: tuple[int, float, str] | None = None
    """Step and value of a point with a ring, and its label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    """Map from values to coordinates of the SVG."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def ticks(low: float, high: float, *, most: int = 6) -> list[float]:
    """List at most `most` round numbers (1, 2 or 5 times a power of ten apart) from `low` to `high`."""
    exponent = math.floor(math.log10((high - low) / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = factor * 10.0**exponent
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first < most:
            return [index * step for index in range(first, last + 1)]
    raise AssertionError((low, high))


def tick_text(value: float, highest: float, *, digits: int = 4) -> str:
    """Format a value in the scale of the axis's highest value: `0`, `0.25`, `12.5k`, `0.5·10⁻⁴`."""
    if value == 0:
        return "0"
    if not 1e-3 <= highest < 1e9:
        exponent = math.floor(math.log10(highest) + 1e-9)
        return f"{value / 10.0**exponent:.{digits}g}·10{_superscript(exponent)}"
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if highest >= 10 * factor:
            return f"{value / factor:.{digits}g}{unit}"
    return f"{value:,.0f}" if highest >= 100 else f"{value:.{digits}g}"


def scientific(value: float, *, digits: int = 3) -> str:
    """Format a number as `2.45·10¹⁴`, without trailing zeros."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    return f"{mantissa}·10{_superscript(int(exponent))}"


def _superscript(number: int) -> str:
    return str(number).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def thin(points: Sequence[Point], parts: int = _THINNED) -> list[tuple[float, float, float, float]]:
    """Split points, in order of x, into `parts` runs of similar size: (middle x, lowest, median, highest) of each."""
    thinned = []
    for part in range(parts):
        run = points[part * len(points) // parts : (part + 1) * len(points) // parts]
        if run:
            values = [y for _, y in run]
            thinned.append((statistics.median(x for x, _ in run), min(values), statistics.median(values), max(values)))
    return thinned


def pick(points: Sequence[Point], most: int = _LONGEST_LINE) -> list[Point]:
    """Pick at most `most` points evenly, including the first, the last and the highest."""
    if len(points) <= most:
        return list(points)
    kept = {round(place * (len(points) - 1) / (most - 2)) for place in range(most - 1)}
    highest = max(range(len(points)), key=lambda index: points[index][1])
    return [points[index] for index in sorted(kept | {highest})]


def draw(chart: Chart) -> Html | None:
    """Draw the chart as a `<figure>`; None if it has no point."""
    known = [(x, y) for series in chart.series for x, y in series.points if y is not None]
    if not known:
        return None
    low, high, cut = _value_range(chart, [y for _, y in known])
    right = _RIGHT_WITH_AXIS if chart.right_axis else _RIGHT
    first, last = chart.steps
    x_scale = _Scale(low=first, high=max(last, first + 1), start=_LEFT, end=_WIDTH - right)
    y_scale = _Scale(low=low, high=high, start=_HEIGHT - _BOTTOM, end=_TOP)
    drawn = [series for series in chart.series if any(y is not None for _, y in series.points)]
    ring = f"ring: {chart.marked[2]}" if chart.marked else None
    notes = [note for note in (ring, _thinning_note(drawn), cut) if note]
    picture = element(
        "svg",
        element("title", f"{chart.title}, {chart.unit}, over steps {first:,} to {last:,}"),
        _axes(chart, x_scale, y_scale),
        _curves(drawn, x_scale, y_scale),
        _mark(chart, x_scale, y_scale),
        viewBox=f"0 0 {_WIDTH} {_HEIGHT}",
        role="img",
    )
    return element(
        "figure",
        element("figcaption", element("b", chart.title), element("span", chart.unit, class_="unit"), _legend(drawn)),
        picture,
        element("p", "; ".join(notes), class_="note") if notes else "",
        class_="chart",
    )


def _value_range(chart: Chart, values: list[float]) -> tuple[float, float, str | None]:
    """Return the lowest and highest value of the axis, and a note if values lie beyond it."""
    low, high = min(values), max(values)
    cut = None
    usual = sorted(values)[int(0.98 * (len(values) - 1))]
    if chart.is_spiky and len(values) >= 20 and high > _SPIKE * usual > 0:
        cut = f"{sum(value > 2 * usual for value in values):,} above the picture, the highest {high:,.4g}"
        # With the padding below, this is twice the 98th percentile.
        high = 2 * usual / 1.06
    low = min(low, 0.0) if chart.from_zero else low
    padding = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    at_zero = chart.from_zero and low == 0.0
    return (0.0 if at_zero else low - padding), high + padding, cut


def _thinning_note(drawn: Sequence[Series]) -> str | None:
    longest = max((len(series.points) for series in drawn if not series.is_smooth), default=0)
    if longest <= _LONGEST_LINE:
        return None
    return f"{longest:,} points: lines are medians of {_THINNED} stretches, bands their ranges"


def _legend(drawn: Sequence[Series]) -> Html:
    if len(drawn) < 2:
        return Html()
    keys = [element("span", element("i", class_=f"swatch {series.style}"), series.label) for series in drawn]
    return element("span", *keys, class_="legend")


def _place(value: float) -> str:
    """Format a coordinate to a tenth of a unit."""
    return f"{value:.1f}"


def _axes(chart: Chart, x_scale: _Scale, y_scale: _Scale) -> Html:
    left, right, bottom = x_scale.start, x_scale.end, y_scale.start
    parts = []
    values = ticks(y_scale.low, y_scale.high)
    for value in values:
        y = _place(y_scale(value))
        parts.append(element("line", x1=_place(left), x2=_place(right), y1=y, y2=y, class_="grid"))
        parts.append(element("text", tick_text(value, values[-1]), x=_place(left - 7), y=y, dy="0.32em", class_="left"))
        if chart.right_axis:
            other = chart.right_axis[1](value)
            other_text = tick_text(other, other, digits=3)
            parts.append(element("text", other_text, x=_place(right + 9), y=y, dy="0.32em", class_="right"))
    for value in ticks(x_scale.low, x_scale.high, most=7):
        if value == int(value):
            x = _place(x_scale(value))
            parts.append(
                element("line", x1=x, x2=x, y1=_place(bottom), y2=_place(bottom + 4), class_="axis"),
            )
            parts.append(element("text", tick_text(value, x_scale.high), x=x, y=_place(bottom + 17), class_="below"))
    parts.append(
        element("line", x1=_place(left), x2=_place(right), y1=_place(bottom), y2=_place(bottom), class_="axis")
    )
    parts.append(element("text", "step", x=_place((left + right) / 2), y=_place(_HEIGHT - 4), class_="below name"))
    if chart.right_axis:
        parts.append(element("text", chart.right_axis[0], x=_WIDTH - 2, y=_place(_HEIGHT - 4), class_="left name"))
    return join(*parts)


def _curves(drawn: Sequence[Series], x_scale: _Scale, y_scale: _Scale) -> Html:
    """Draw the curves in an inner `<svg>`, which clips them at the axes."""
    shapes = [shape for series in drawn for shape in _curve(series, x_scale, y_scale)]
    # Room for the dots on the border.
    x, y = x_scale.start - 4, y_scale.end - 4
    width, height = x_scale.end - x + 4, y_scale.start - y + 4
    return element(
        "svg",
        *shapes,
        x=_place(x),
        y=_place(y),
        width=_place(width),
        height=_place(height),
        viewBox=f"{_place(x)} {_place(y)} {_place(width)} {_place(height)}",
    )


def _curve(series: Series, x_scale: _Scale, y_scale: _Scale) -> list[Html]:
    style = series.style
    known: list[Point] = [(x, y) for x, y in series.points if y is not None]
    if len(known) > _LONGEST_LINE and series.is_smooth:
        return [element("polyline", points=_points(pick(known), x_scale, y_scale), class_=f"line {style}")]
    if len(known) > _LONGEST_LINE:
        runs = thin(known)
        outline = [(x, high) for x, _, _, high in runs] + [(x, low) for x, low, _, _ in reversed(runs)]
        band = element("polygon", points=_points(outline, x_scale, y_scale), class_=f"band {style}")
        line = [(x, median) for x, _, median, _ in runs]
        return [band, element("polyline", points=_points(line, x_scale, y_scale), class_=f"line {style}")]
    stretches = _stretches(series.points)
    shapes = [
        element("polyline", points=_points(stretch, x_scale, y_scale), class_=f"line {style}")
        for stretch in stretches
        if len(stretch) > 1
    ]
    # A point between two gaps has no line.
    alone = [stretch[0] for stretch in stretches if len(stretch) == 1]
    for x, y in known if len(known) <= _MOST_DOTS else alone:
        named = element("title", f"{series.label}: {y:.5g} at step {x:,.0f}")
        dot = element("circle", named, cx=_place(x_scale(x)), cy=_place(y_scale(y)), r=2.4, class_=f"dot {style}")
        shapes.append(dot)
    return shapes


def _stretches(points: Sequence[tuple[int, float | None]]) -> list[list[Point]]:
    """Split points at missing values."""
    stretches: list[list[Point]] = [[]]
    for x, y in points:
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append((x, y))
    return stretches


def _points(points: Sequence[Point], x_scale: _Scale, y_scale: _Scale) -> str:
    return " ".join(f"{_place(x_scale(x))},{_place(y_scale(y))}" for x, y in points)


def _mark(chart: Chart, x_scale: _Scale, y_scale: _Scale) -> Html:
    if chart.marked is None:
        return Html()
    step, value, label = chart.marked
    named = element("title", label)
    return element("circle", named, cx=_place(x_scale(step)), cy=_place(y_scale(value)), r=5, class_="ring")
