"""Attention weights of every layer and head for one sentence pair (section 3.2.2 and the paper's appendix)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.inference.trained_model import Attention
from dist_transformer.pictures.picture import Picture
from dist_transformer.reporting.figures import heat_maps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST = 30
"""Pieces of the longest sentence; longer ones would make panels that no screen shows."""

_HEADS_PER_ROW = 8


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
    return heat_maps(
        [(f"Layer {i + 1}, head {j + 1}", maps_LHTS[i, j]) for i, j in np.ndindex(layers, heads)],
        rows=queries,
        columns=keys,
        panels_per_row=min(heads, _HEADS_PER_ROW),
        limit=1.0,
        bar="attention weight",
    )
