"""Pictures of a run and its data, as matplotlib figures without a window and without pyplot's global state."""

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

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
# Inches: a row or column of a map, wide enough for a label; the name next to labels, across and along; a gap.
_CELL, _NAME, _NAME_LENGTH, _GAP = 0.17, 0.25, 0.75, 0.1
# The colour bar with its label, across, and at least along.
_BAR_ROOM, _BAR_LENGTH = 1.1, 2.3
_DOTS_PER_INCH = 110
_SHOWN_POSITIONS = 128


def attention_picture(sample: Sample) -> "Figure":
    """Draw the cross-attention of a sample with maps: one panel per decoder layer, one row per produced piece."""
    maps_LTS = np.asarray(sample.attention_LTS)
    panels = [(f"Decoder layer {layer}", map_TS) for layer, map_TS in enumerate(maps_LTS, 1)]
    return heat_maps(
        panels,
        rows=sample.target_tokens,
        columns=sample.source_tokens,
        panels_per_row=len(panels) if len(panels) <= 3 else math.ceil(len(panels) / 2),
        # All panels have one colour scale, so that a diffuse layer looks diffuse.
        limit=maps_LTS.max(),
        names=("source", "produced"),
        # In two lines, because a panel with few pieces is shorter than the text.
        bar="attention weight,\nmean over heads",
    )


def heat_maps(
    panels: Sequence[tuple[str, np.ndarray]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    panels_per_row: int,
    limit: float,
    bar: str,
    names: tuple[str, str] | None = None,
) -> "Figure":
    """Draw heat maps from 0 to `limit` in a grid, with a colour bar.

    Every place is computed: matplotlib's layouts draw a figure four times until its labels have room.

    Args:
        panels: title and map of each, in the order of reading.
        rows: label of each row; likewise `columns`.
        names: what the columns and the rows are, next to the labels of every panel; without them, labels stand at the
            left and lower edges of the grid only.
    """
    everywhere, lines = names is not None, math.ceil(len(panels) / panels_per_row)
    title_size = 12 if everywhere else _LABEL_POINTS
    with picture_style():
        left, below = (_longest(labels) + (_NAME if everywhere else 0.0) + _GAP for labels in (rows, columns))
        title = title_size / 72 + _GAP
        # A title, or a name, may be longer than a map of few pieces.
        inner = [max(_CELL * len(columns), _width_of(panels[-1][0], title_size)), max(_CELL * len(rows), _NAME_LENGTH)]
        step = [inner[0] + _GAP + left * everywhere, inner[1] + title + _GAP + below * everywhere]
        origin = [_GAP + left * (not everywhere), _GAP + below * (not everywhere)]
        width = origin[0] + step[0] * panels_per_row + _BAR_ROOM
        height = max(origin[1] + step[1] * lines, _BAR_LENGTH) + _GAP
        figure = new_figure(width, height, layout=None)

        def axes_at(x: float, y: float, across: float, up: float) -> "Axes":
            return figure.add_axes((x / width, y / height, across / width, up / height))

        for place, (text, map_RC) in enumerate(panels):
            line, column = divmod(place, panels_per_row)
            x = origin[0] + step[0] * column + left * everywhere + (inner[0] - _CELL * len(columns)) / 2
            y = height - _GAP - step[1] * line - title - (inner[1] + _CELL * len(rows)) / 2
            axes = axes_at(x, y, _CELL * len(columns), _CELL * len(rows))
            image = axes.imshow(map_RC, cmap="Blues", vmin=0.0, vmax=limit, aspect="auto")
            axes.set_title(text, fontsize=title_size, pad=6 + 36 * (inner[1] - _CELL * len(rows)))
            # Texts, because a tick is four more objects. Without parse_math=False, two dollar signs would be a formula.
            axes.set_axis_off()
            style: dict[str, Any] = {"fontsize": _LABEL_POINTS, "parse_math": False}
            if everywhere or place + panels_per_row >= len(panels):
                for number, label in enumerate(columns):
                    axes.text(number, len(rows) - 0.3, label, rotation=90, ha="center", va="top", **style)
            if everywhere or column == 0:
                for number, label in enumerate(rows):
                    axes.text(-0.8, number, label, ha="right", va="center", **style)
            if names is not None:
                middle = (len(columns) - 1) / 2, (len(rows) - 1) / 2
                axes.text(middle[0], len(rows) - 0.5 + (below - _GAP) / _CELL, names[0], ha="center", va="bottom")
                axes.text(-0.5 - (left - _GAP) / _CELL, middle[1], names[1], rotation=90, ha="left", va="center")
        length = max(step[1] * lines - title - _GAP - below * everywhere, _BAR_LENGTH - 2 * title)
        scale = axes_at(width - _BAR_ROOM + _GAP, height - _GAP - title - length, 0.12, length)
        figure.colorbar(image, cax=scale, label=bar)
    return figure


def _longest(labels: Sequence[str]) -> float:
    """Return the length of the longest label, in inches."""
    return max(_width_of(label, _LABEL_POINTS) for label in set(labels))


def _width_of(text: str, points: float) -> float:
    """Measure a text, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, *_ = text_to_path.get_text_width_height_descent(text, FontProperties(size=points), ismath=False)
    return float(width) / 72


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


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = "constrained") -> "Figure":
    """Make a figure of `width` × `height` inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_PER_INCH, layout=layout)


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
