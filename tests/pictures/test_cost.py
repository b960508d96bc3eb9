"""The share of attention in a layer's operations."""

import pytest

from dist_transformer.pictures.cost import attention_share, cost_picture


def test_attention_is_half_where_it_is_as_much_as_the_rest() -> None:
    """Base: 4 n² · 512 = 8 n · 512² + 4 n · 512 · 2048 at n = 3072."""
    assert attention_share("base", 3072) == pytest.approx(0.5)
    # n / (n + 3072)
    assert attention_share("base", 32) == pytest.approx(32 / 3104)


def test_the_picture_has_the_parts_per_token() -> None:
    picture = cost_picture()
    operations, share = picture.figure.axes
    attention, projections, feed_forward = (line.get_ydata() for line in operations.lines)
    # At 8 tokens: 4 · 8 · 512, 8 · 512² and 4 · 512 · 2048.
    assert (attention[0], projections[0], feed_forward[0]) == pytest.approx((0.016384, 2.097152, 4.194304))
    assert attention[-1] == pytest.approx(attention[0] * 2048)
    assert projections[-1] == projections[0]
    assert [line.get_label() for line in share.lines[:3]] == [
        "tiny: half at 512 tokens",
        "base: half at 3,072 tokens",
        "big: half at 6,144 tokens",
    ]
    assert "attention needs 1.0% of them at 32 tokens, and as many as the rest at 3,072" in picture.caption
