"""Attention weights of a model for one sentence pair."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, SPECIALS, Tokenizer
from dist_transformer.inference.interface import DecodingModel
from dist_transformer.model.attention import AttentionLayout, MultiHeadAttention, Role
from dist_transformer.model.layers import DecoderLayer, EncoderLayer
from dist_transformer.model.packed import PackedTokens, pack_side
from dist_transformer.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMaps:
    """Weights softmax(Q K^T / sqrt(d_k)) of every layer and head, fp32 on the CPU; every row sums to 1.

    S = len(source) + 1 source tokens, `</s>` last; T = len(target) + 1 steps, the last of which produces `</s>`.
    """

    encoder_LHSS: torch.Tensor
    """Self-attention of the encoder."""
    decoder_LHTT: torch.Tensor
    """Self-attention of the decoder: row i produces token i of `target </s>` and sees tokens 0 to i of `<s> target`."""
    cross_LHTS: torch.Tensor
    """Cross-attention of the decoder."""


def attention_maps(model: DecodingModel, source: Sequence[int], target: Sequence[int]) -> AttentionMaps:
    """Return the weights of every kind of attention while the model reads a sentence and `<s> target`.

    Args:
        source: ids without special tokens.
        target: ids without special tokens. Each side, with one special token, must fit the model's positions.

    Raises:
        UserError: the model is an ensemble.
    """
    maps = _maps(model, source, target, "encoder", "decoder", "cross")
    return AttentionMaps(encoder_LHSS=maps["encoder"], decoder_LHTT=maps["decoder"], cross_LHTS=maps["cross"])


def cross_attention_maps(model: DecodingModel, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
    """Return `AttentionMaps.cross_LHTS` alone."""
    return _maps(model, source, target, "cross")["cross"]


@torch.no_grad()
def _maps(model: DecodingModel, source: Sequence[int], target: Sequence[int], *roles: Role) -> dict[Role, torch.Tensor]:
    """Compute the maps in hooks of the forward pass, from the inputs of its layers, so that training costs no more."""
    if not isinstance(model, Transformer):
        raise UserError("attention is that of one model, and this is an ensemble: load one of its models alone")
    maps: dict[Role, list[torch.Tensor]] = {role: [] for role in roles}

    def keep(attention: MultiHeadAttention, inputs: tuple[torch.Tensor, torch.Tensor | None, AttentionLayout]) -> None:
        x_TD, memory_SD, layout = inputs
        maps[attention.role].append(attention.weights(x_TD, memory_SD, causal=layout.causal))

    # The hooks run right before the layer computes, when ZeRO-3 has gathered its parameters.
    hooks = [attention.register_forward_pre_hook(keep) for attention in _attentions(model) if attention.role in maps]
    was_training = model.training
    model.eval()
    try:
        device = model.embedding.device
        source_side = _one_sentence([*source, EOS_ID]).to(device)
        target_side = _one_sentence([BOS_ID, *target]).to(device)
        model.decode(target_side, model.encode(source_side), source_side)
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    return {role: torch.stack(layers).cpu() for role, layers in maps.items()}


def _attentions(model: Transformer) -> Iterable[MultiHeadAttention]:
    for encoder_layer in cast(Iterable[EncoderLayer], model.encoder):
        yield encoder_layer.self_attention
    for decoder_layer in cast(Iterable[DecoderLayer], model.decoder):
        yield decoder_layer.self_attention
        yield decoder_layer.cross_attention


def _one_sentence(ids: list[int]) -> PackedTokens:
    length = len(ids)
    return pack_side(np.array(ids, dtype=np.int64), np.array([length]), size=length, offset_count=2, max_length=length)


BEGIN, END = SPECIALS[2:]
# Zero-width (non-)joiners: parts of words in Persian, Sinhala and others, although Python calls them not printable.
_JOINERS = "\u200c\u200d"


def readable_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return pieces in readable form, `</s>` last: a space is `▁`, and a part of a character is `�`."""
    return [tokenizer.tag_of(i) or _readable(tokenizer.piece_text(i)) for i in ids] + [END]


def _readable(text: str) -> str:
    visible = "".join("▁" if c.isspace() else c if c.isprintable() or c in _JOINERS else "�" for c in text)
    # A part of a character is one mark, however many bytes it has.
    return re.sub("�+", "�", visible)
