"""Conversion to Hugging Face's `MarianMTModel`.

Marian is the paper's post-norm model with one difference: its position vectors have all sines first, then all cosines;
the paper interleaves them. The order of the residual dimension is free, so the conversion permutes it.
"""

from typing import TYPE_CHECKING

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID
from dist_transformer.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import MarianMTModel

# Marian's constants, which have no counterpart among our weights.
_CONSTANTS = {
    "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight",
}


def marian_model(model: Transformer) -> "MarianMTModel":
    """Build a `MarianMTModel` that computes the same function; its parameters are copies.

    Raises:
        UserError: Marian does not support the configuration.
    """
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    refuse_what_marian_lacks(config)
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=config.vocab_size,
            d_model=config.width,
            encoder_layers=config.encoder_layers,
            decoder_layers=config.decoder_layers,
            encoder_attention_heads=config.heads,
            decoder_attention_heads=config.heads,
            encoder_ffn_dim=config.ffn_width,
            decoder_ffn_dim=config.ffn_width,
            max_position_embeddings=config.max_positions,
            activation_function=config.activation,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            activation_dropout=config.ffn_dropout,
            scale_embedding=True,
            share_encoder_decoder_embeddings=True,
            tie_word_embeddings=True,
            pad_token_id=PAD_ID,
            bos_token_id=BOS_ID,
            eos_token_id=EOS_ID,
            decoder_start_token_id=BOS_ID,
            forced_eos_token_id=None,
        )
    )
    left, unknown = marian.load_state_dict(marian_weights(model), strict=False)
    if set(left) != _CONSTANTS or unknown:
        raise UserError(
            f"this version of transformers has other names for Marian's weights "
            f"({sorted({*left, *unknown} - _CONSTANTS)}): install 4.57 or later, or 5"
        )
    return marian


def refuse_what_marian_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that Marian does not support."""
    wanted = {"norm": "post", "positions": "sinusoidal", "attention": "softmax", "tie_embeddings": True}
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(f"Marian does not support {name} = {getattr(config, name)!r}: only {value!r}")
    if config.heads * config.attention_head_width != config.width:
        raise UserError("Marian has no separate head width: model.head_width must be width ÷ heads")


def marian_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """Convert our parameters to Marian's names, with the residual dimension in Marian's order."""
    width = model.config.width
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    state = model.state_dict()
    out: dict[str, torch.Tensor] = {}

    def norm(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{theirs}.{kind}"] = state[f"{ours}.norm.{kind}"][order]

    def attention(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            for letter, part in zip("qkv", state[f"{ours}.qkv_{kind}"].chunk(3), strict=True):
                out[f"{theirs}.{letter}_proj.{kind}"] = part[:, order] if kind == "weight" else part
            out[f"{theirs}.out_proj.{kind}"] = state[f"{ours}.output.{kind}"][order]

    def feed_forward(theirs: str, ours: str) -> None:
        out[f"{theirs}.fc1.weight"] = state[f"{ours}.feed_forward.inner.weight"][:, order]
        out[f"{theirs}.fc1.bias"] = state[f"{ours}.feed_forward.inner.bias"]
        out[f"{theirs}.fc2.weight"] = state[f"{ours}.feed_forward.outer.weight"][order]
        out[f"{theirs}.fc2.bias"] = state[f"{ours}.feed_forward.outer.bias"][order]
        norm(f"{theirs}.final_layer_norm", f"{ours}.ffn_residual")

    for side, count in (("encoder", model.config.encoder_layers), ("decoder", model.config.decoder_layers)):
        for i in range(count):
            theirs, ours = f"model.{side}.layers.{i}", f"{side}.{i}"
            attention(f"{theirs}.self_attn", f"{ours}.self_attention")
            norm(f"{theirs}.self_attn_layer_norm", f"{ours}.self_residual")
            if side == "decoder":
                attention(f"{theirs}.encoder_attn", f"{ours}.cross_attention")
                norm(f"{theirs}.encoder_attn_layer_norm", f"{ours}.cross_residual")
            feed_forward(theirs, ours)
    shared = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    out |= {f"{name}.weight": state["embedding"][:, order] for name in shared}
    out["final_logits_bias"] = state.get("output_bias", state["embedding"].new_zeros(model.config.vocab_size))[None]
    return out
