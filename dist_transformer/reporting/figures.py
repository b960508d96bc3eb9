"""Pictures of a run and its data, as matplotlib figures without a window and without pyplot's global state."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_transformer.data.loading.statistics import Lengths
from dist_transformer.evaluation.samples import Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Fonts with Chinese, Japanese and Korean characters; those that are installed are used after matplotlib's own.
_CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei",
    "Droid Sans Fallback",
    "Microsoft YaHei",
    "SimHei",
    "PingFang SC",
    "Hiragino Sans GB",
    "Arial Unicode MS",
)
_LABEL_POINTS = 8
# Inches: a row or column of a map, wide enough for a label; a character of a label; the frame around the panels.
_CELL, _CHARACTER, _FRAME = 0.17, 0.085, 0.8
_DOTS_PER_INCH = 110
_SHOWN_POSITIONS = 128


def attention_picture(sample: Sample) -> "Figure":
    """Draw the cross-attention of a sample with maps: one panel per decoder layer, one row per produced piece."""
    if sample.attention_LTS is None:
        raise ValueError("the sample has no attention maps")
    maps_LTS = np.asarray(sample.attention_LTS)
    layers, steps, sources = maps_LTS.shape
    panel_rows = 1 if layers <= 3 else 2
    panel_columns = math.ceil(layers / panel_rows)
    row_label, column_label = (
        _CHARACTER * max(map(len, tokens)) for tokens in (sample.target_tokens, sample.source_tokens)
    )
    width = panel_columns * (_CELL * sources + row_label + _FRAME) + _FRAME
    height = panel_rows * (_CELL * steps + column_label + _FRAME)
    with picture_style():
        figure = new_figure(max(width, 4.0), max(height, 2.5))
        panels = figure.subplots(panel_rows, panel_columns, squeeze=False).ravel()
        for layer, panel in enumerate(panels):
            if layer >= layers:
                panel.remove()
                continue
            # All panels have one colour scale, so that a diffuse layer looks diffuse.
            image = panel.imshow(maps_LTS[layer], cmap="Blues", vmin=0.0, vmax=maps_LTS.max(), aspect="equal")
            panel.set_title(f"Decoder layer {layer + 1}")
            _label_tokens(panel, sample)
        bar = figure.colorbar(image, ax=list(panels[:layers]), fraction=0.03, pad=0.01)
        # In two lines, because a panel with few pieces is shorter than the text.
        bar.set_label("attention weight,\nmean over heads")
        # The layout needs a second drawing; after the first one, labels can be outside.
        figure.draw_without_rendering()
    return figure


def _label_tokens(panel: "Axes", sample: Sample) -> None:
    # Without parse_math=False, a pair of dollar signs in a sentence would be a formula.
    style: dict[str, Any] = {"fontsize": _LABEL_POINTS, "parse_math": False}
    panel.set_xticks(range(len(sample.source_tokens)), sample.source_tokens, rotation=90, **style)
    panel.set_yticks(range(len(sample.target_tokens)), sample.target_tokens, **style)
    panel.tick_params(length=2)
    panel.set_xlabel("source")
    panel.set_ylabel("produced")


def learning_rate_picture(steps: Sequence[int], rates: Sequence[float]) -> "Figure":
    """Draw the learning rate of each optimizer step, with its peak marked."""
    peak = int(np.argmax(rates))
    with picture_style():
        figure = new_figure(7.0, 3.5)
        axes = figure.add_subplot()
        axes.plot(steps, rates)
        axes.plot(steps[peak], rates[peak], "o")
        # Put the label on the side of the peak that has room.
        at_the_right = steps[peak] > (steps[0] + steps[-1]) / 2
        axes.annotate(
            f"peak {rates[peak]:.2e} at step {steps[peak]:,}",
            (steps[peak], rates[peak]),
            xytext=(-10 if at_the_right else 10, 0),
            textcoords="offset points",
            ha="right" if at_the_right else "left",
            va="center",
        )
        axes.set_title("Learning rate schedule")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel("learning rate")
        axes.set_ylim(bottom=0.0, top=1.1 * rates[peak])
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    return figure


def position_picture(table_PD: np.ndarray) -> "Figure":
    """Draw position vectors as a heat map of at most the first 128 positions; red above zero, blue below."""
    shown_PD = table_PD[:_SHOWN_POSITIONS]
    limit = float(np.abs(shown_PD).max()) or 1.0
    with picture_style():
        figure = new_figure(7.0, 4.5)
        axes = figure.add_subplot()
        image = axes.imshow(shown_PD, cmap="RdBu_r", vmin=-limit, vmax=limit, aspect="auto", interpolation="nearest")
        axes.set_title(f"Position encodings: {len(shown_PD):,} of {len(table_PD):,} positions")
        axes.set_xlabel("dimension")
        axes.set_ylabel("position")
        figure.colorbar(image, ax=axes, label="value")
    return figure


def length_picture(sides: Sequence[Lengths], names: Sequence[str]) -> "Figure":
    """Draw histograms of sentence lengths, with dashed lines at the means."""
    # The longest thousandth is left out, because it would take most of the width.
    shown = max(side.quantile(0.999) for side in sides)
    with picture_style():
        figure = new_figure(7.0, 3.5)
        axes = figure.add_subplot()
        for number, (side, name) in enumerate(zip(sides, names, strict=True)):
            shares = 100 * side.counts / side.sentences
            label = f"{name}: mean {side.mean:.1f}, 99% up to {side.quantile(0.99)}, longest {side.longest}"
            # One step per length, without smoothing.
            axes.stairs(shares, np.arange(len(shares) + 1) - 0.5, fill=True, alpha=0.4, color=f"C{number}", label=label)
            axes.axvline(side.mean, color=f"C{number}", linestyle="--", linewidth=1)
        axes.set_title("Length of sentences")
        axes.set_xlabel("tokens, the special token included")
        axes.set_ylabel("% of the sentences")
        axes.set_xlim(0, shown + 1)
        axes.set_ylim(bottom=0.0)
        axes.legend(frameon=False)
        axes.grid(alpha=0.3)
    return figure


def as_png(figure: "Figure") -> bytes:
    """Save a figure as PNG, for TensorBoard and files."""
    return _saved(figure, "png")


def as_svg(figure: "Figure") -> str:
    """Save a figure as an `<svg>` element without a ground, for a light or dark page. Equal figures give equal strings.

    Text stays text, so a browser shows characters for which this machine has no font.
    """
    text = _saved(figure, "svg").decode("utf-8")
    return text[text.index("<svg") :]


def new_figure(width: float, height: float) -> "Figure":
    """Make a figure of `width` × `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout="constrained")


def _saved(figure: "Figure", kind: str) -> bytes:
    buffer = io.BytesIO()
    with picture_style():
        # A time stamp in the file would make equal pictures differ.
        is_svg = kind == "svg"
        figure.savefig(buffer, format=kind, metadata={"Date": None} if is_svg else None, transparent=is_svg)
    return buffer.getvalue()


@contextmanager
def picture_style() -> Iterator[None]:
    """Set matplotlib's settings while a figure is made or saved."""
    import matplotlib
    from matplotlib import font_manager

    available = set(font_manager.fontManager.get_font_names())
    settings: Any = {
        "font.family": ["DejaVu Sans", *(name for name in _CJK_FONTS if name in available)],
        "svg.fonttype": "none",
        "svg.hashsalt": "dist_transformer",
        "text.usetex": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        # Characters without a font become boxes; a warning for each would flood the log.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield
