"""What the decoder looks at: the cross-attention weights of one sentence pair."""

from collections.abc import Iterable, Sequence
from typing import cast

import numpy as np
import torch

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID
from dist_transformer.model.attention import AttentionLayout, MultiHeadAttention
from dist_transformer.model.layers import DecoderLayer
from dist_transformer.model.transformer import Transformer
from dist_transformer.packed import PackedTokens, pack_side


@torch.no_grad()
def cross_attention_maps(model: Transformer, source: Sequence[int], target: Sequence[int]) -> torch.Tensor:
    """softmax(Q K^T / sqrt(d_k)) of every decoder layer and head, while the model reads `<s> target`.

    Computed beside the model's own forward pass, from what its layers are given, so training pays nothing for it.

    Args:
        source: ids, without special tokens.
        target: likewise; both with one special token fit the model's positions.

    Returns:
        fp32 on the CPU, shape (L, H, T, S): L decoder layers, T = len(target) + 1 steps, of which the last makes
        `</s>`, S = len(source) + 1 source tokens, `</s>` last.
    """
    maps: list[torch.Tensor] = []

    def keep(attention: MultiHeadAttention, inputs: tuple[torch.Tensor, torch.Tensor, AttentionLayout]) -> None:
        maps.append(attention.weights(*inputs[:2]))

    # Before the layer computes: that is when ZeRO-3 has gathered its parameters.
    layers = cast(Iterable[DecoderLayer], model.decoder)
    hooks = [layer.cross_attention.register_forward_pre_hook(keep) for layer in layers]
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
    return torch.stack(maps).cpu()


def _one_sentence(ids: list[int]) -> PackedTokens:
    length = len(ids)
    return pack_side(np.array(ids, dtype=np.int64), np.array([length]), size=length, offset_count=2, max_length=length)
