"""Conversion to Hugging Face's `MarianMTModel`.

Marian is the paper's post-norm model with one difference: its position vectors have all sines first, then all cosines;
the paper interleaves them. The order of the residual dimension is free, so the conversion permutes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import ModelConfig
from dist_transformer.data.vocabulary.marian import MarianVocabulary
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, PAD_ID, UNK_ID, Vocabulary
from dist_transformer.model.transformer import Transformer

if TYPE_CHECKING:
    from transformers import MarianMTModel

BIAS = "final_logits_bias"
_SHARED, _ENCODER, _DECODER, _OUTPUT = (
    "model.shared.weight",
    "model.encoder.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "lm_head.weight",
)

# Marian's constants, which have no counterpart among our weights.
_CONSTANTS = {
    "model.encoder.embed_positions.weight",
    "model.decoder.embed_positions.weight",
}


@dataclass(frozen=True, slots=True)
class Numbering:
    """Ids in a folder of MarianMT."""

    theirs: Sequence[int]
    """Id of each entry of our vocabulary. `<s>` shares that of `<pad>` if their decoder begins with `<pad>`."""

    @property
    def pad(self) -> int:
        return self.theirs[PAD_ID]

    @property
    def unknown(self) -> int:
        return self.theirs[UNK_ID]

    @property
    def begin(self) -> int:
        return self.theirs[BOS_ID]

    @property
    def end(self) -> int:
        return self.theirs[EOS_ID]

    def of(self, row: Sequence[int]) -> list[int]:
        return [self.theirs[token] for token in row]

    def ours(self) -> list[int]:
        """Return our id of each of theirs; one that `<s>` and `<pad>` share is that of `<pad>`."""
        found = {theirs: ours for ours, theirs in reversed([*enumerate(self.theirs)])}
        return [found[i] for i in range(len(found))]


Numberings = tuple[Numbering, Numbering]
"""Ids of sources and targets in a folder."""


def numberings_of(vocabulary: Vocabulary, config: ModelConfig) -> Numberings:
    """Return the ids of a model in a folder: those of the folder that it was imported from, or else our own."""
    if is_of_marian(vocabulary, config):
        source, target = vocabulary.their_ids
        return Numbering(source), Numbering(target)
    return own_numberings(config)


def own_numberings(config: ModelConfig) -> Numberings:
    """Return ids that are our own."""
    return Numbering(range(config.vocab_size)), Numbering(range(config.output_size))


def matrices_of(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """Return Marian's matrices with a row per entry: our name, and the side whose entries they have."""
    if config.tie_embeddings == "all":
        return dict.fromkeys((_SHARED, _ENCODER, _DECODER, _OUTPUT), ("embedding", 1))
    output = "target_embedding" if config.tie_embeddings == "target" else "output_projection"
    return {_ENCODER: ("embedding", 0), _DECODER: ("target_embedding", 1), _OUTPUT: (output, 1)}


def is_of_marian(vocabulary: Vocabulary, config: ModelConfig) -> TypeGuard[MarianVocabulary]:
    """Return whether a model can have a folder with the ids of a vocabulary's own table, which has no `<s>`."""
    return isinstance(vocabulary, MarianVocabulary) and config.begin_with_pad


def marian_model(model: Transformer, numberings: Numberings | None = None) -> "MarianMTModel":
    """Build a `MarianMTModel` that computes the same function; its parameters are copies.

    Args:
        numberings: ids of the folder; None: our own.

    Raises:
        UserError: it does not support the configuration.
    """
    from transformers import MarianConfig, MarianMTModel

    config = model.config
    refuse_what_marian_lacks(config)
    numberings = numberings or own_numberings(config)
    entries = [numbering.ours() for numbering in numberings]
    target = numberings[1]
    shares = config.tie_embeddings == "all"
    marian = MarianMTModel(
        MarianConfig(
            vocab_size=len(entries[0]),
            decoder_vocab_size=len(entries[1]),
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
            share_encoder_decoder_embeddings=shares,
            tie_word_embeddings=config.tie_embeddings != "none",
            # Both embeddings must have it; attention does not read it.
            pad_token_id=min(numbering.pad for numbering in numberings),
            bos_token_id=target.begin,
            eos_token_id=target.end,
            decoder_start_token_id=target.begin,
            forced_eos_token_id=None,
        )
    )
    weights = marian_weights(model)
    weights[BIAS] = weights[BIAS][:, entries[1]]
    if config.begin_with_pad:
        entries[1][target.begin] = PAD_ID
    for name, (_, side) in matrices_of(config).items():
        weights[name] = weights[name][entries[side]]
    left, unknown = marian.load_state_dict(weights, strict=False)
    if set(left) != _CONSTANTS or unknown:
        raise UserError(
            f"this version of transformers has other names for Marian's weights "
            f"({sorted({*left, *unknown} - _CONSTANTS)}): install 4.57 or later, or 5"
        )
    return marian


def refuse_what_marian_lacks(config: ModelConfig) -> None:
    """Raise a UserError that names a setting that `MarianMTModel` does not support."""
    wanted = {
        "norm": "post",
        "norm_epsilon": 1e-5,
        "positions": "sinusoidal",
        "attention": "softmax",
    }
    for name, value in wanted.items():
        if getattr(config, name) != value:
            raise UserError(f"MarianMTModel does not support {name} = {getattr(config, name)!r}: only {value!r}")
    if config.heads * config.attention_head_width != config.width:
        raise UserError("MarianMTModel has no separate head width: model.head_width must be width ÷ heads")


def marian_weights(model: Transformer) -> dict[str, torch.Tensor]:
    """Convert our parameters to Marian's names, with the residual dimension in Marian's order."""
    order = residual_order(model.config.width).to(model.embedding.device)
    out = {
        name: part if dim is None else part.index_select(dim, order)
        for name, (part, dim) in marian_parts(model).items()
    }
    out.setdefault(BIAS, model.embedding.detach().new_zeros(1, model.config.output_size))
    return out


def residual_order(width: int) -> torch.Tensor:
    """Return our place in the residual dimension of each of Marian's."""
    return torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])


def marian_parts(model: Transformer) -> dict[str, tuple[torch.Tensor, int | None]]:
    """Return the part of our parameters that each of Marian's weights is, as a view, by Marian's names.

    With it comes the dimension that Marian has in `residual_order`, or None.
    """
    state = model.state_dict()
    out: dict[str, tuple[torch.Tensor, int | None]] = {}

    def norm(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            out[f"{theirs}.{kind}"] = state[f"{ours}.norm.{kind}"], 0

    def attention(theirs: str, ours: str) -> None:
        for kind in ("weight", "bias"):
            for letter, part in zip("qkv", state[f"{ours}.qkv_{kind}"].chunk(3), strict=True):
                out[f"{theirs}.{letter}_proj.{kind}"] = part, 1 if kind == "weight" else None
            out[f"{theirs}.out_proj.{kind}"] = state[f"{ours}.output.{kind}"], 0

    def feed_forward(theirs: str, ours: str) -> None:
        out[f"{theirs}.fc1.weight"] = state[f"{ours}.feed_forward.inner.weight"], 1
        out[f"{theirs}.fc1.bias"] = state[f"{ours}.feed_forward.inner.bias"], None
        out[f"{theirs}.fc2.weight"] = state[f"{ours}.feed_forward.outer.weight"], 0
        out[f"{theirs}.fc2.bias"] = state[f"{ours}.feed_forward.outer.bias"], 0
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
    out |= {name: (state[ours], 1) for name, (ours, _) in matrices_of(model.config).items()}
    if "output_bias" in state:
        out[BIAS] = state["output_bias"][None], None
    return out
