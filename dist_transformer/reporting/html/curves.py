"""Curves of a run, with all coordinates that the template draws. Long series are thinned to medians and ranges."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from dist_transformer.reporting.html.run import Run
from dist_transformer.reporting.html.summary import best_validation, superscript

# Points per line: two units per point are as fine as a screen can show.
_LONGEST_LINE, _THINNED = 400, 200
_MOST_DOTS = 40
# If a spike is this many times the 98th percentile, the axis ends at twice that percentile. Otherwise the rest would be
# a flat line.
_SPIKE = 5
# Least logged intervals in the second half of the run for a separate picture of it.
_ENOUGH_FOR_A_CLOSE_LOOK = 10

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Series:
    """A measure over steps; None where it was not finite."""

    label: str
    points: Sequence[tuple[int, float | None]]
    style: str
    """Class of the style sheet: `first`, `second` or `third`."""

    @cached_property
    def known(self) -> list[Point]:
        return [(x, y) for x, y in self.points if y is not None]

    @cached_property
    def parts(self) -> list[tuple[float, float, float, float]]:
        """Middle step, lowest, median and highest value of each part of a long series; empty for others."""
        return thin(self.known) if len(self.known) > _LONGEST_LINE else []

    @property
    def dots(self) -> list[Point]:
        return self.known if len(self.known) <= _MOST_DOTS else []


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A picture of series with the same steps and the same unit."""

    # Ends of the axes, in units of the SVG: about CSS pixels on a phone, and a fifth larger on a wide screen.
    left: ClassVar[int] = 54
    top: ClassVar[int] = 10
    bottom: ClassVar[int] = 212

    title: str
    unit: str
    series: Sequence[Series]
    """Series of which at least one has a value."""
    last: int
    """Last step of the axis."""
    first: int = 0
    from_zero: bool = True
    is_spiky: bool = False
    """Whether a few values may be far above the rest; the axis may leave them out, with a note."""
    has_perplexity: bool = False
    """Whether a second axis has the exponential of the values."""
    marked: tuple[int, float, str] | None = None
    """Step and value of a point with a ring, and its label."""

    @property
    def right(self) -> int:
        return 434 if self.has_perplexity else 466

    @cached_property
    def _range(self) -> tuple[float, float, str]:
        """Lowest and highest value of the axis, and a note if values lie beyond it."""
        values = sorted(y for series in self.series for _, y in series.known)
        low, high, usual, cut = values[0], values[-1], values[int(0.98 * (len(values) - 1))], ""
        if self.is_spiky and len(values) >= 20 and high > _SPIKE * usual > 0:
            cut = f"{sum(value > 2 * usual for value in values):,} above the picture, the highest {high:,.4g}"
            # With the padding below, this is twice the 98th percentile.
            high = 2 * usual / 1.06
        low = min(low, 0.0) if self.from_zero else low
        padding = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
        return low if self.from_zero and low == 0.0 else low - padding, high + padding, cut

    @property
    def notes(self) -> list[str]:
        ring = f"ring: {self.marked[2]}" if self.marked else ""
        longest = max((len(series.known) for series in self.series if series.parts), default=0)
        thinned = f"{longest:,} points: lines are medians of {_THINNED} stretches, bands their ranges"
        return [note for note in (ring, thinned if longest else "", self._range[2]) if note]

    def x(self, step: float) -> str:
        return f"{self.left + (step - self.first) / max(self.last - self.first, 1) * (self.right - self.left):.1f}"

    def y(self, value: float) -> str:
        low, high, _ = self._range
        # Values beyond the axis end a little above it.
        return f"{max(self.bottom - (value - low) / (high - low) * (self.bottom - self.top), self.top - 4):.1f}"

    def line(self, series: Series) -> str:
        """Return the path of points or medians: a missing value is a gap, and a point between two gaps is a dot."""
        points = [(x, median) for x, _, median, _ in series.parts] or series.points
        steps = pairwise([(0, None), *points])
        places = ((before, f"{self.x(x)},{self.y(y)}") for (_, before), (x, y) in steps if y is not None)
        return "".join(f"M{place}h0" if before is None else f"L{place}" for before, place in places)

    def band(self, series: Series) -> str:
        """Return the outline of the ranges of a long series."""
        outline = [(x, high) for x, _, _, high in series.parts] + [(x, low) for x, low, _, _ in reversed(series.parts)]
        return " ".join(f"{self.x(x)},{self.y(y)}" for x, y in outline)

    @property
    def value_ticks(self) -> list[tuple[float, str]]:
        values = ticks(*self._range[:2])
        return [(value, tick_text(value, values[-1])) for value in values]

    @property
    def step_ticks(self) -> list[tuple[float, str]]:
        last = max(self.last, self.first + 1)
        return [(step, tick_text(step, last)) for step in ticks(self.first, last, most=7) if step == int(step)]

    def perplexity(self, nll: float) -> str:
        perplexity = math.exp(min(nll, 700.0))
        return tick_text(perplexity, perplexity, digits=3)


def charts(run: Run) -> list[Chart]:
    """List the charts for which there are records."""
    train, valid, half = run.train, run.valid, run.step // 2
    has_close_look = sum(record["step"] >= half for record in train) >= _ENOUGH_FOR_A_CLOSE_LOOK
    # A rate is a smooth curve, whose points say more than medians.
    some = train[:: len(train) // _LONGEST_LINE + 1]
    norm, speed = (("training", train, name, "first") for name in ("gradient_norm", "target_tokens_per_second"))
    found = [
        _loss(run, "Loss", 0),
        *[_loss(run, "Loss, second half", half)] * has_close_look,
        _chart(run, "Validation BLEU", "0 to 100", ("validation", valid, "bleu", "second")),
        _chart(run, "Validation chrF", "0 to 100", ("validation", valid, "chrf", "second")),
        _chart(run, "Validation TER", "edits per 100 words, lower is better", ("validation", valid, "ter", "second")),
        _chart(run, "Validation command", "its score", ("validation", valid, "command", "second"), from_zero=False),
        _chart(run, "Learning rate", "of Adam", ("training", some, "learning_rate", "first")),
        _chart(run, "Gradient norm", "L2, before clipping", norm, is_spiky=True),
        _chart(run, "Throughput", "target tokens/s", speed, is_spiky=True),
    ]
    return [chart for chart in found if chart.series]


def saving(run: Run) -> Chart:
    return _chart(run, "Saving", "seconds per save", ("save", run.checkpoints, "seconds", "first"))


def _loss(run: Run, title: str, first: int) -> Chart:
    """Make the chart of training and validation nll from step `first` on, with the best validation marked."""
    train, valid = ([r for r in records if r["step"] >= first] for records in (run.train, run.valid))
    series = (
        ("training loss (label-smoothed)", train, "loss", "third"),
        ("training nll", train, "nll", "first"),
        ("validation nll", valid, "nll", "second"),
    )
    best, marked = best_validation(run), None
    if best in valid and (nll := best.get("nll")) is not None:
        marked = (best["step"], nll, f"best validation, nll {nll:.3f} at step {best['step']:,}")
    options = {"first": first, "from_zero": False, "has_perplexity": True, "marked": marked}
    return _chart(run, title, "nats per target token", *series, **options)


def _chart(
    run: Run, title: str, unit: str, *series: tuple[str, list[dict[str, Any]], str, str], **options: Any
) -> Chart:
    """Make a chart of series, given as label, records, name and style; those without a value are left out."""
    made = [
        Series(label=label, points=[(record["step"], record.get(name)) for record in records], style=style)
        for label, records, name, style in series
    ]
    return Chart(title=title, unit=unit, series=[each for each in made if each.known], last=run.step, **options)


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
        return f"{value / 10.0**exponent:.{digits}g}·10{superscript(exponent)}"
    for unit, factor in (("M", 1e6), ("k", 1e3)):
        if highest >= 10 * factor:
            return f"{value / factor:.{digits}g}{unit}"
    return f"{value:,.0f}" if highest >= 100 else f"{value:.{digits}g}"


def thin(points: Sequence[Point], parts: int = _THINNED) -> list[tuple[float, float, float, float]]:
    """Split points, in order of x, into `parts` runs of similar size: (middle x, lowest, median, highest) of each."""
    runs = np.array_split(np.array(points), parts)
    return [(np.median(x), y.min(), np.median(y), y.max()) for x, y in (run.T for run in runs)]
