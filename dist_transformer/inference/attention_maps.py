"""Attention weights of a model for one sentence pair."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.tokenizer import BOS_ID, EOS_ID, SPECIALS, Tokenizer, Vocabulary
from dist_transformer.inference.batches import evaluating, pack_sentences
from dist_transformer.inference.ensemble import DecodingModel
from dist_transformer.model.attention import AttentionLayout, MultiHeadAttention, Role
from dist_transformer.model.transformer import Transformer

BEGIN, END = SPECIALS[2:]
# Zero-width (non-)joiners: parts of words in Persian, Sinhala and others, although Python calls them not printable.
_JOINERS = "\u200c\u200d"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """Weights softmax(Q Kᵀ / √d_k) of every layer and head, fp32 on the CPU; every row sums to 1.

    L layers, H heads, S = len(source) pieces, T = len(target) pieces; both end with `</s>`.
    """

    source: list[str]
    """Pieces of the source in readable form: a space is `▁`."""
    target: list[str]
    """Pieces of the target: row i of `decoder` and `cross` is the step that produces `target[i]`."""
    seen: list[str]
    """Columns of `decoder`: the decoder's input pieces, `<s>` first."""
    encoder: torch.Tensor
    """Self-attention of the encoder, shape (L, H, S, S)."""
    decoder: torch.Tensor
    """Self-attention of the decoder, shape (L, H, T, T): zero above the diagonal."""
    cross: torch.Tensor
    """Attention of each step to the source, shape (L, H, T, S)."""

    def of_kind(self, kind: Role) -> tuple[list[str], list[str], torch.Tensor]:
        """Return the pieces of the rows and of the columns of one kind of attention, and its weights."""
        rows = self.source if kind == "encoder" else self.target
        return rows, self.seen if kind == "decoder" else self.source, getattr(self, kind)


def attention_of(
    model: DecodingModel, tokenizer: Vocabulary, source: Sequence[int], target: Sequence[int]
) -> Attention:
    """Return every kind of attention, with pieces, while the model reads a sentence and `<s> target`.

    Args:
        source: ids without special tokens.
        target: ids without special tokens. Each side, with one special token, must fit the model's positions.

    Raises:
        UserError: the model is an ensemble.
    """
    maps = attention_maps(model, source, target, "encoder", "decoder", "cross")
    pieces = readable_pieces(tokenizer.target, target)
    return Attention(
        source=readable_pieces(tokenizer.source, source), target=pieces, seen=[BEGIN, *pieces[:-1]], **maps
    )


def attention_maps(
    model: DecodingModel, source: Sequence[int], target: Sequence[int], *kinds: Role
) -> dict[Role, torch.Tensor]:
    """Return the weights of some kinds of attention, as `attention_of` does.

    They are computed in hooks of the forward pass, from the inputs of its layers, so that training costs no more.
    """
    if not isinstance(model, Transformer):
        raise UserError("attention is that of one model, and this is an ensemble: load one of its models alone")
    maps: dict[Role, list[torch.Tensor]] = {kind: [] for kind in kinds}

    def keep(attention: MultiHeadAttention, inputs: tuple[torch.Tensor, torch.Tensor | None, AttentionLayout]) -> None:
        x_TD, memory_SD, layout = inputs
        maps[attention.role].append(attention.weights(x_TD, memory_SD, causal=layout.causal))

    # The hooks run right before the layer computes, when ZeRO-3 has gathered its parameters.
    attentions = [each for each in model.modules() if isinstance(each, MultiHeadAttention) and each.role in maps]
    hooks = [attention.register_forward_pre_hook(keep) for attention in attentions]
    try:
        with evaluating(model), torch.no_grad():
            source_side = pack_sentences([[*source, EOS_ID]], model.device)
            target_side = pack_sentences([[BOS_ID, *target]], model.device)
            model.decode(target_side, model.encode(source_side), source_side)
    finally:
        for hook in hooks:
            hook.remove()
    return {kind: torch.stack(layers).cpu() for kind, layers in maps.items()}


def readable_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return pieces in readable form, `</s>` last: a space is `▁`, and a part of a character is `�`."""
    return [tokenizer.tag_of(i) or _readable(tokenizer.piece_text(i)) for i in ids] + [END]


def _readable(text: str) -> str:
    visible = "".join("▁" if c.isspace() else c if c.isprintable() or c in _JOINERS else "�" for c in text)
    # A part of a character is one mark, however many bytes it has.
    return re.sub("�+", "�", visible)
