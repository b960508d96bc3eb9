"""Operations of attention against those of the rest of a layer, by sentence length (section 4, Table 1)."""

from dataclasses import dataclass

import numpy as np

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.pictures.picture import Picture, draw_curves
from dist_transformer.reporting.figures import new_figure, picture_style

_LENGTHS = tuple(2**power for power in range(3, 15))
_TYPICAL = 32
_SHOWN = ("tiny", "base", "big")


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFlops:
    """Operations of one encoder layer in the forward pass of one sentence: 2 per multiply-add of its products."""

    projections: int
    """Products with the matrices of queries, keys, values and output: 2 · 4 · n · d_model · h · d_k."""
    feed_forward: int
    """Products with the two matrices of the feed-forward network: 2 · 2 · n · d_model · d_ff."""
    attention: int
    """Products Q K^T and weights · V of all heads, without weights of the model: 2 · 2 · n² · h · d_k."""


def layer_flops(config: ModelConfig, *, sentence_tokens: int) -> LayerFlops:
    """Count the operations that attention and the rest of an encoder layer need (sections 3.2, 3.3 and 4)."""
    inner = config.heads * config.attention_head_width
    return LayerFlops(
        projections=8 * sentence_tokens * config.width * inner,
        feed_forward=4 * sentence_tokens * config.width * config.ffn_width,
        attention=4 * sentence_tokens**2 * inner,
    )


def balanced_length(config: ModelConfig) -> float:
    """Return the sentence length at which attention needs as many operations as the rest of an encoder layer.

    4 n² h d_k = 8 n d_model h d_k + 4 n d_model d_ff, solved for n.
    """
    inner = config.heads * config.attention_head_width
    return config.width * (2 * inner + config.ffn_width) / inner


def attention_share(preset: str, sentence_tokens: int) -> float:
    """Return the share of a layer's operations that attention needs in a sentence of this length."""
    flops = layer_flops(PRESETS[preset].model, sentence_tokens=sentence_tokens)
    return flops.attention / (flops.attention + flops.projections + flops.feed_forward)


def cost_picture() -> Picture:
    """Draw the operations per token in a layer of the base model, and the share of attention for three presets."""
    found = [layer_flops(PRESETS["base"].model, sentence_tokens=length) for length in _LENGTHS]
    parts = {
        "attention: QKᵀ and weights · V": [flops.attention for flops in found],
        "projections": [flops.projections for flops in found],
        "feed-forward": [flops.feed_forward for flops in found],
    }
    per_token = {label: (_LENGTHS, np.array(values) / np.array(_LENGTHS) / 1e6) for label, values in parts.items()}
    balanced = {name: balanced_length(PRESETS[name].model) for name in _SHOWN}
    with picture_style():
        figure = new_figure(10.0, 3.8)
        operations, share = figure.subplots(1, 2)
        x = "tokens of the sentence"
        draw_curves(operations, per_token, "An encoder layer of the base model", x, "10⁶ operations per token")
        operations.set_yscale("log")
        operations.yaxis.set_major_formatter("{x:g}")
        shares = {
            f"{name}: half at {balanced[name]:,.0f} tokens": (
                _LENGTHS,
                np.array([100 * attention_share(name, length) for length in _LENGTHS]),
            )
            for name in _SHOWN
        }
        draw_curves(share, shares, "Share of attention", x, "attention, % of the operations")
        share.axhline(50, color="0.6", linewidth=1)
        share.set_ylim(0, 100)
        for axes in (operations, share):
            axes.set_xscale("log", base=2)
            axes.set_xticks(_LENGTHS[::2], [f"{length:,}" for length in _LENGTHS[::2]])
            axes.legend(frameon=False, fontsize=9, loc="upper left")
    return Picture(
        name="cost",
        title="Cost against length",
        section="4 and Table 1",
        caption=(
            "Operations of an encoder layer in the forward pass, counted without softmax, norms and activations. Per "
            "token, those of attention grow with the length of the sentence; those of the projections and the "
            "feed-forward network do not. In the base model attention needs "
            f"{attention_share('base', _TYPICAL):.1%} of them at {_TYPICAL} tokens, and as many as the rest at "
            f"{balanced['base']:,.0f} tokens."
        ),
        alt=(
            "Left: operations per token against sentence length; attention rises in proportion, the other parts are "
            "flat. Right: the share of attention for three models."
        ),
        figure=figure,
    )
