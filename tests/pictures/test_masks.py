"""Masks by hand, and against what the model's attention computes."""

import numpy as np
import pytest
import torch

from dist_transformer.inference.batches import pack_sentences
from dist_transformer.model.attention import AttentionLayout
from dist_transformer.model.packed import PackedTokens
from dist_transformer.model.transformer import Transformer
from dist_transformer.pictures.masks import mask_picture, packed_mask


def packed(*lengths: int) -> PackedTokens:
    return pack_sentences([range(length) for length in lengths], torch.device("cpu"))


def test_masks_by_hand() -> None:
    """Targets of 2 and 1 tokens, sources of 1 and 2."""
    targets, sources = packed(2, 1), packed(1, 2)
    assert packed_mask(targets, sources, causal=False).astype(int).tolist() == [[1, 0, 0], [1, 0, 0], [0, 1, 1]]
    assert packed_mask(targets, targets, causal=True).astype(int).tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]


@pytest.mark.parametrize("causal", [False, True])
def test_the_model_attends_to_what_the_mask_shows(random_model: Transformer, causal: bool) -> None:
    attention = random_model.decoder[0].self_attention
    side = packed(3, 1, 4)
    x_TD = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        q_HTK = attention.project_query(x_TD).transpose(0, 1)
        k_HSK, v_HSK = (projected.transpose(0, 1) for projected in attention.project_memory(x_TD))
        scores_HTS = q_HTK @ k_HSK.transpose(1, 2) * 8**-0.5
        hidden_TS = ~torch.from_numpy(packed_mask(side, side, causal=causal))
        mixed_HTK = torch.softmax(scores_HTS.masked_fill(hidden_TS, -torch.inf), dim=-1) @ v_HSK
        output = attention.output
        expected_TD = torch.nn.functional.linear(mixed_HTK.transpose(0, 1).flatten(1), output.weight, output.bias)
        layout = AttentionLayout(side, side, causal=causal, kernel="groups")
        torch.testing.assert_close(attention(x_TD, None, layout), expected_TD)


def test_the_picture_shows_padding_causal_both_and_packs() -> None:
    picture = mask_picture()
    panels = {axes.get_title(): np.asarray(axes.images[0].get_array()) for axes in picture.figure.axes}
    np.testing.assert_array_equal(panels["Padding"], [[1] * 4 + [0] * 3] * 7)
    np.testing.assert_array_equal(panels["Causal"], [[1] * i + [0] * (7 - i) for i in range(1, 8)])
    np.testing.assert_array_equal(panels["Padding and causal"], panels["Padding"] & panels["Causal"])
    # Sources of 3, 4 and 6 tokens, targets of 3, 4 and 7.
    assert int(panels["Packed: encoder"].sum()) == 9 + 16 + 36
    assert int(panels["Packed: decoder"].sum()) == 6 + 10 + 28
    assert int(panels["Packed: cross-attention"].sum()) == 9 + 16 + 42
    # 3 · 7² scores with padding; 3² + 4² + 7² without.
    assert "the padded batch has 147 scores, of the pack 74; 44 of them are visible" in picture.caption
