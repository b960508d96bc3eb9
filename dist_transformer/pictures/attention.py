"""Attention weights of every layer and head for one sentence pair (section 3.2.2 and the paper's appendix)."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.inference.trained_model import Attention
from dist_transformer.pictures.picture import Picture
from dist_transformer.reporting.figures import new_figure, picture_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 30
"""Pieces of the longest sentence; longer ones would make panels that no screen shows."""

_HEADS_PER_ROW = 8
# Inches: a row or column of a map, a character of a label, the frame around a panel.
_CELL, _CHARACTER, _FRAME = 0.13, 0.075, 0.16


def attention_pictures(attention: Attention) -> list[Picture]:
    """Draw one picture per kind of attention, with one panel per layer and head.

    Raises:
        UserError: a sentence is too long to draw, or the weights are not finite.
    """
    for side, pieces in (("source", attention.source), ("target", attention.target)):
        if len(pieces) > LONGEST:
            found = f"the {side} has {len(pieces)} pieces and a picture has room for {LONGEST}"
            raise UserError(f"{found}: use a shorter sentence")
    kinds = (
        (
            "encoder",
            "Encoder self-attention",
            "Row: a piece of the source. Column: the piece of the source that it attends to.",
            attention.encoder,
            (attention.source, attention.source),
        ),
        (
            "decoder",
            "Decoder self-attention",
            "Row: the step that produces a piece of the target. Column: the piece that the decoder has read, <s> "
            "first. The causal mask hides later pieces.",
            attention.decoder,
            (attention.target, attention.seen),
        ),
        (
            "cross",
            "Cross-attention",
            "Row: the step that produces a piece of the target. Column: the piece of the source that it attends to.",
            attention.cross,
            (attention.target, attention.source),
        ),
    )
    if not all(maps.isfinite().all() for *_, maps, _ in kinds):
        raise UserError("the model's attention weights are not finite: average weights from before it diverged")
    return [_picture(name, title, reading, maps.numpy(), *pieces) for name, title, reading, maps, pieces in kinds]


def _picture(
    name: str, title: str, reading: str, maps_LHTS: np.ndarray, queries: Sequence[str], keys: Sequence[str]
) -> Picture:
    layers, heads = maps_LHTS.shape[:2]
    return Picture(
        name=f"attention-{name}",
        title=title,
        section="3.2.2 and the appendix",
        caption=(
            f"{reading} One panel for each of {layers} layers and {heads} heads; a stronger colour is more. The "
            "weights of a row sum to 1. All panels have one scale."
        ),
        alt=f"{title}: {layers * heads} heat maps of {len(queries)} rows and {len(keys)} columns.",
        figure=head_figure(maps_LHTS, queries, keys),
    )


def head_figure(maps_LHTS: np.ndarray, queries: Sequence[str], keys: Sequence[str]) -> "Figure":
    """Draw one panel per layer and head, with the pieces at the left and lower edges only."""
    layers, heads = maps_LHTS.shape[:2]
    columns = min(heads, _HEADS_PER_ROW)
    rows_per_layer = math.ceil(heads / columns)
    rows = layers * rows_per_layer
    row_label, column_label = (_CHARACTER * max(map(len, pieces)) for pieces in (queries, keys))
    width = columns * (_CELL * len(keys) + _FRAME) + row_label + 1.3
    height = rows * (_CELL * len(queries) + _FRAME + 0.2) + column_label + 0.4
    with picture_style():
        figure = new_figure(max(width, 4.0), max(height, 2.5))
        grid = figure.subplots(rows, columns, squeeze=False)
        for place, axes in enumerate(grid.ravel()):
            row, column = divmod(place, columns)
            layer, head = row // rows_per_layer, row % rows_per_layer * columns + column
            if head >= heads:
                axes.set_axis_off()
                continue
            image = axes.imshow(maps_LHTS[layer, head], cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal")
            axes.set_title(f"Layer {layer + 1}, head {head + 1}", fontsize=8)
            axes.tick_params(length=2)
            # Without parse_math=False, a pair of dollar signs in a sentence would be a formula.
            is_lowest = layer == layers - 1 and head + columns >= heads
            style: dict[str, Any] = {"fontsize": 8, "parse_math": False}
            axes.set_xticks(range(len(keys)), keys if is_lowest else [""] * len(keys), rotation=90, **style)
            axes.set_yticks(range(len(queries)), queries if column == 0 else [""] * len(queries), **style)
        figure.colorbar(image, ax=grid, fraction=0.03, pad=0.01, label="attention weight")
        # The layout needs a second drawing; after the first one, labels can be outside.
        figure.draw_without_rendering()
    return figure
