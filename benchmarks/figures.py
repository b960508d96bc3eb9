"""Pictures of rates and costs that were measured."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dist_transformer.reporting.figures import new_figure, picture_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_POINTS = 8
_NOTE_CHARACTERS = 130


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A rate that was measured several times."""

    label: str
    value: float
    lowest: float
    highest: float
    stressed: bool = False
    """Whether the bar is highlighted among the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BarGroup:
    """Rates in one unit."""

    title: str
    unit: str
    bars: tuple[Bar, ...]


def bar_picture(groups: Sequence[BarGroup], *, note: str) -> "Figure":
    """Draw one panel per group and one bar per rate, with its spread as a line and `note` at the bottom."""
    with picture_style():
        sizes = [len(group.bars) + 1.6 for group in groups]
        figure = new_figure(8.0, 0.34 * sum(sizes) + 0.5)
        panels = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": sizes}).ravel()
        for group, panel in zip(groups, panels, strict=True):
            _draw_bars(panel, group)
        figure.supxlabel("\n".join(textwrap.wrap(note, _NOTE_CHARACTERS)), fontsize=6, color="0.4")
    return figure


def _draw_bars(panel: "Axes", group: BarGroup) -> None:
    places, best = range(len(group.bars)), max(bar.highest for bar in group.bars)
    values = [bar.value for bar in group.bars]
    spread = [
        [bar.value - bar.lowest for bar in group.bars],
        [bar.highest - bar.value for bar in group.bars],
    ]
    colors = ["C0" if bar.stressed else "0.75" for bar in group.bars]
    panel.barh(places, values, xerr=spread, color=colors, height=0.7, ecolor="0.3", capsize=2)
    for place, bar in zip(places, group.bars, strict=True):
        text = f"{bar.value:,.0f}" if best >= 100 else f"{bar.value:.1f}"
        panel.text(bar.highest + 0.01 * best, place, text, va="center", fontsize=_LABEL_POINTS)
    panel.set_yticks(places, [bar.label for bar in group.bars], fontsize=_LABEL_POINTS)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.15 * best)
    panel.set_title(f"{group.title}: {group.unit}", fontsize=9, loc="left")
    panel.xaxis.set_visible(False)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.tick_params(left=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """Values on one axis, with time and memory at each value."""

    label: str
    values: tuple[float, ...]
    seconds: tuple[tuple[float, float, float], ...]
    """Median, lowest and highest time at each value."""
    mib: tuple[float, ...]


def cost_picture(curves: Sequence[Curve], scaling: Sequence[tuple[int, float]], *, unit: str, note: str) -> "Figure":
    """Draw one panel per curve, with time on the left axis and memory on the right.

    The last panel shows the predicted target tokens per second over the number of devices.
    """
    with picture_style():
        figure = new_figure(9.0, 6.4)
        panels = figure.subplots(2, 2).ravel()
        for curve, panel in zip(curves, panels, strict=False):
            middle, lowest, highest = (np.array(values) for values in zip(*curve.seconds, strict=True))
            panel.errorbar(curve.values, middle, yerr=[middle - lowest, highest - middle], marker="o", capsize=2)
            panel.set_xscale("log", base=2)
            panel.set_xticks(curve.values, [f"{value:,.0f}" for value in curve.values])
            panel.set_xlabel(curve.label)
            panel.set_ylabel(f"{unit} per step", color="C0")
            panel.set_ylim(0.0, 1.15 * max(highest))
            memory = panel.twinx()
            memory.plot(curve.values, curve.mib, "s--", color="C1")
            memory.set_ylabel("MiB", color="C1")
            memory.set_ylim(0.0, 1.25 * max(curve.mib))
        devices, rates = zip(*scaling, strict=True)
        panel = panels[len(curves)]
        panel.plot(devices, rates, "o-", color="C2", label="model")
        panel.plot(devices, [rates[0] * count / devices[0] for count in devices], ":", color="0.5", label="linear")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.set_xticks(devices, [str(count) for count in devices])
        panel.set_yticks(rates, [f"{rate:,.0f}" for rate in rates])
        panel.yaxis.set_minor_formatter("")
        panel.set_xlabel("devices, 8 per node")
        panel.set_ylabel("target tokens/s")
        panel.set_title("Scaling: a model, not a measurement", fontsize=9)
        panel.legend(frameon=False)
        figure.supxlabel("\n".join(textwrap.wrap(note, _NOTE_CHARACTERS)), fontsize=6, color="0.4")
    return figure
