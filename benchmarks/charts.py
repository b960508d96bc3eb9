"""Pictures of measured figures: bars of rates, and the curves of a race."""

import textwrap
from typing import TYPE_CHECKING, Any

from benchmarks.decoding import LABELS as DECODING
from benchmarks.training.field import LABELS as TRAINING
from dist_transformer.reporting.figures import as_png, new_figure, picture_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LABEL_POINTS = 8
_DATA = {
    "tensors of a training, from planning on": {
        "feed": "ours, 1 pack per micro-batch",
        "feed_8_packs": "ours, 8 packs per micro-batch",
    },
    "text, prepared": {
        "prepare": "ours, to a data folder",
        "tokenizers_encode_batch": "tokenizers, encode_batch alone",
        "tokenizers_encode_batch_fast": "tokenizers, encode_batch_fast",
    },
}
Bars = dict[str, dict[str, Any]]
"""Rates with their spread by labels, and whether they are highlighted as `ours`."""


def bar_groups(figures: dict[str, Any]) -> list[tuple[str, Bars]]:
    """Collect the rates from a suite's figures, part by part: panels with their titles."""
    groups: list[tuple[str, Bars]] = []
    for part in figures.values():
        if rates := part.get("target_tokens_per_second"):
            for title, labels in _DATA.items():
                bars = {label: rates[name] | {"ours": label.startswith("ours")} for name, label in labels.items()}
                groups.append((f"{title}, one thread: target tokens per CPU second", bars))
        elif "contenders" in part:
            trains = "preset" in part
            labels, rate = (TRAINING, "rates") if trains else (DECODING, "sentences_per_second")
            decoding = "decoding, {parameters:,} parameters, beam {beam_size}"
            title = f"training, {part['preset']}" if trains else decoding.format_map(part)
            found = part["contenders"]
            bars = {labels[name]: found[name][rate] | {"ours": name.startswith("ours")} for name in found}
            groups.append((f"{title}, {part['precision']}: {part['unit']}", bars))
    return groups


def bar_picture(groups: list[tuple[str, Bars]], *, note: str) -> bytes:
    """Draw one panel per group and one bar per rate, with its spread as a line and `note` at the bottom, as PNG."""
    with picture_style():
        sizes = [len(bars) + 1.6 for _, bars in groups]
        figure = new_figure(8.0, 0.34 * sum(sizes) + 0.5)
        panels = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": sizes}).ravel()
        for (title, bars), panel in zip(groups, panels, strict=True):
            panel.set_title(title, fontsize=9, loc="left")
            _draw_bars(panel, bars)
        _write_note(figure, note)
    return as_png(figure)


def _draw_bars(panel: "Axes", bars: Bars) -> None:
    rates = [*bars.values()]
    places, best, values = range(len(rates)), max(rate["highest"] for rate in rates), [rate["median"] for rate in rates]
    spread = [[abs(rate["median"] - rate[end]) for rate in rates] for end in ("lowest", "highest")]
    colors = ["C0" if rate["ours"] else "0.75" for rate in rates]
    panel.barh(places, values, xerr=spread, color=colors, height=0.7, ecolor="0.3", capsize=2)
    for place, rate in zip(places, rates, strict=True):
        text = f"{rate['median']:,.0f}" if best >= 100 else f"{rate['median']:.1f}"
        panel.text(rate["highest"] + 0.01 * best, place, text, va="center", fontsize=_LABEL_POINTS)
    panel.set_yticks(places, [*bars], fontsize=_LABEL_POINTS)
    panel.invert_yaxis()
    panel.set_xlim(0, 1.15 * best)
    panel.xaxis.set_visible(False)
    panel.spines[["top", "right", "bottom"]].set_visible(False)
    panel.tick_params(left=False)


_AXES = {"cpu_seconds": "CPU seconds of all processes, start-up included", "tokens": "target tokens of the training"}


def race_picture(figures: dict[str, Any], *, note: str, by: str = "cpu_seconds") -> bytes:
    """Draw BLEU against CPU seconds or tokens, with a line per training of all toolkits that ran, as PNG."""
    with picture_style():
        figure = new_figure(8.0, 4.6)
        panel = figure.subplots()
        for number, found in enumerate(found for found in figures["toolkits"].values() if "curves" in found):
            for curve in found["curves"]:
                (line,) = panel.plot(curve[by], curve["bleu"], color=f"C{number}", linewidth=1.2)
            line.set_label(found["label"])
        for goal in figures["goals"]:
            panel.axhline(goal, color="0.85", linewidth=0.6, zorder=0)
        panel.set_xlim(left=0)
        panel.set_ylim(bottom=0)
        panel.set_xlabel(_AXES[by])
        panel.set_ylabel("BLEU of the validation text, greedy")
        panel.legend(frameon=False, loc="lower right", fontsize=_LABEL_POINTS)
        _write_note(figure, note)
    return as_png(figure)


def _write_note(figure: "Figure", note: str) -> None:
    figure.supxlabel("\n".join(textwrap.wrap(note, 130)), fontsize=6, color="0.4")
