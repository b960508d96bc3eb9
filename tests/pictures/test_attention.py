"""One panel per layer and head, with pieces at the edges."""

import numpy as np
import pytest
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.inference.attention_maps import Attention
from dist_transformer.pictures.attention import LONGEST, attention_pictures


def weights(layers: int, heads: int, rows: int, columns: int) -> torch.Tensor:
    """Rows that sum to 1."""
    rng = np.random.default_rng(1)
    return torch.from_numpy(rng.dirichlet(np.full(columns, 0.3), size=(layers, heads, rows)).astype(np.float32))


def made_attention(source: int = 3, target: int = 4, layers: int = 2, heads: int = 2) -> Attention:
    pieces = [f"▁$w{i}$" for i in range(max(source, target) - 1)]
    produced = [*pieces[: target - 1], "</s>"]
    return Attention(
        source=[*pieces[: source - 1], "</s>"],
        target=produced,
        seen=["<s>", *produced[:-1]],
        encoder=weights(layers, heads, source, source),
        decoder=weights(layers, heads, target, target).tril(),
        cross=weights(layers, heads, target, source),
    )


def test_one_picture_per_kind_shows_the_weights() -> None:
    attention = made_attention()
    pictures = {picture.name: picture for picture in attention_pictures(attention)}
    assert list(pictures) == ["attention-encoder", "attention-decoder", "attention-cross"]
    axes = {
        "attention-encoder": (attention.encoder, attention.source, attention.source),
        "attention-decoder": (attention.decoder, attention.target, attention.seen),
        "attention-cross": (attention.cross, attention.target, attention.source),
    }
    for name, (maps_LHTS, rows, columns) in axes.items():
        panels = {panel.get_title(): panel for panel in pictures[name].figure.axes if panel.images}
        assert list(panels) == ["Layer 1, head 1", "Layer 1, head 2", "Layer 2, head 1", "Layer 2, head 2"]
        for (layer, head), panel in zip(np.ndindex(2, 2), panels.values(), strict=True):
            np.testing.assert_array_equal(panel.images[0].get_array(), maps_LHTS[layer, head])
            assert panel.images[0].get_clim() == (0.0, 1.0)
            # Pieces at the left and lower edges only.
            below, left = columns * (layer == 1), rows * (head == 0)
            assert [text.get_text() for text in panel.texts] == [*below, *left]


def test_more_than_eight_heads_take_another_row() -> None:
    *_, picture = attention_pictures(made_attention(layers=1, heads=10))
    panels = [axes for axes in picture.figure.axes if axes.get_title()]
    assert [axes.get_title() for axes in panels] == [f"Layer 1, head {head}" for head in range(1, 11)]
    tops = [round(axes.get_position().y0, 2) for axes in panels]
    assert len({*tops[:8]}) == len({*tops[8:]}) == 1
    assert tops[0] > tops[8]
    # The lowest panel of each column has labels: heads 9 and 10, and above them nothing.
    has_labels = [any(text.get_rotation() == 90 for text in axes.texts) for axes in panels]
    assert has_labels == [False] * 2 + [True] * 8


def test_a_long_sentence_is_refused() -> None:
    assert len(attention_pictures(made_attention(LONGEST, 2, 1, 1))) == 3
    with pytest.raises(
        UserError, match="the target has 31 pieces and a picture has room for 30: use a shorter sentence"
    ):
        attention_pictures(made_attention(3, LONGEST + 1, 1, 1))


def test_weights_that_are_not_finite_are_refused() -> None:
    attention = made_attention()
    attention.cross[0, 0, 0, 0] = torch.nan
    with pytest.raises(UserError, match="attention weights are not finite"):
        attention_pictures(attention)
