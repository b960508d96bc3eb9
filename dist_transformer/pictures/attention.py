"""Attention weights of every layer and head for one sentence pair (section 3.2.2 and the paper's appendix)."""

import numpy as np

from dist_transformer.base.errors import UserError
from dist_transformer.inference.attention_maps import Attention
from dist_transformer.model.attention import Role
from dist_transformer.pictures.picture import Picture
from dist_transformer.reporting.figures import heat_maps

LONGEST = 30
"""Pieces of the longest sentence; longer ones would make panels that no screen shows."""

_HEADS_PER_ROW = 8
_KINDS: tuple[tuple[Role, str, str], ...] = (
    (
        "encoder",
        "Encoder self-attention",
        "Row: a piece of the source. Column: the piece of the source that it attends to.",
    ),
    (
        "decoder",
        "Decoder self-attention",
        "Row: the step that produces a piece of the target. Column: the piece that the decoder has read, <s> "
        "first. The causal mask hides later pieces.",
    ),
    (
        "cross",
        "Cross-attention",
        "Row: the step that produces a piece of the target. Column: the piece of the source that it attends to.",
    ),
)


def attention_pictures(attention: Attention) -> list[Picture]:
    """Draw one picture per kind of attention, with one panel per layer and head.

    Raises:
        UserError: a sentence is too long to draw, or the weights are not finite.
    """
    for side, pieces in (("source", attention.source), ("target", attention.target)):
        if len(pieces) > LONGEST:
            found = f"the {side} has {len(pieces)} pieces and a picture has room for {LONGEST}"
            raise UserError(f"{found}: use a shorter sentence")
    return [_picture(attention, *kind) for kind in _KINDS]


def _picture(attention: Attention, kind: Role, title: str, reading: str) -> Picture:
    rows, columns, maps_LHTS = attention.of_kind(kind)
    if not maps_LHTS.isfinite().all():
        raise UserError("the model's attention weights are not finite: average weights from before it diverged")
    layers, heads = maps_LHTS.shape[:2]
    return Picture(
        name=f"attention-{kind}",
        title=title,
        section="3.2.2 and the appendix",
        caption=(
            f"{reading} One panel for each of {layers} layers and {heads} heads; a stronger colour is more. The "
            "weights of a row sum to 1. All panels have one scale."
        ),
        alt=f"{title}: {layers * heads} heat maps of {len(rows)} rows and {len(columns)} columns.",
        # The pieces are at the left and lower edges only.
        figure=heat_maps(
            [(f"Layer {i + 1}, head {j + 1}", maps_LHTS[i, j].numpy()) for i, j in np.ndindex(layers, heads)],
            rows=rows,
            columns=columns,
            panels_per_row=min(heads, _HEADS_PER_ROW),
            limit=1.0,
            bar="attention weight",
        ),
    )
