"""Encoder and decoder layers (section 3.1).

post-norm (the paper):  x = LayerNorm(x + Dropout(Sublayer(x)))
pre-norm:               x = x + Dropout(Sublayer(LayerNorm(x)))
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dist_transformer.config import ModelConfig
from dist_transformer.model.attention import Layout, MultiHeadAttention
from dist_transformer.model.dropout import dropout


class Residual(nn.Module):
    """The connection around a sublayer: dropout, addition and normalisation, in the order that `norm` names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width)
        self.dropout = config.dropout
        self.pre_norm = config.norm == "pre"

    def forward(self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if self.pre_norm:
            return x + dropout(sublayer(self.norm(x)), self.dropout, self.training)
        return self.norm(x + dropout(sublayer(x), self.dropout, self.training))


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (section 3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.width, config.ffn_width)
        self.outer = nn.Linear(config.ffn_width, config.width)
        self.activation = functional.relu if config.activation == "relu" else functional.gelu
        self.dropout = config.ffn_dropout

    def reset_parameters(self) -> None:
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(dropout(self.activation(self.inner(x)), self.dropout, self.training))


def _attention(config: ModelConfig) -> MultiHeadAttention:
    return MultiHeadAttention(
        width=config.width, heads=config.heads, head_width=config.attention_head_width, dropout=config.attention_dropout
    )


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention, self.self_residual = _attention(config), Residual(config)
        self.feed_forward, self.ffn_residual = FeedForward(config), Residual(config)

    def forward(self, x_SD: torch.Tensor, layout: Layout) -> torch.Tensor:
        x_SD = self.self_residual(x_SD, lambda x: self.self_attention(x, None, layout))
        return self.ffn_residual(x_SD, self.feed_forward)


@dataclass(slots=True)
class LayerCache:
    """What one decoder layer remembers while it decodes B hypotheses, C positions long."""

    keys_BHCK: torch.Tensor
    values_BHCK: torch.Tensor
    memory_keys_BHSK: torch.Tensor
    memory_values_BHSK: torch.Tensor

    def reserve(self, positions: int) -> None:
        """Make room for `positions` positions: short outputs then copy little when beams are reordered."""
        missing = positions - self.keys_BHCK.shape[2]
        if missing > 0:
            self.keys_BHCK = functional.pad(self.keys_BHCK, (0, 0, 0, missing))
            self.values_BHCK = functional.pad(self.values_BHCK, (0, 0, 0, missing))

    def select(self, rows: torch.Tensor) -> None:
        """Keep the hypotheses `rows`, in that order (survivors of a beam step)."""
        self.keys_BHCK = self.keys_BHCK.index_select(0, rows)
        self.values_BHCK = self.values_BHCK.index_select(0, rows)

    def select_memory(self, sentences: torch.Tensor) -> None:
        """Keep the source sentences `sentences`, in that order."""
        self.memory_keys_BHSK = self.memory_keys_BHSK.index_select(0, sentences)
        self.memory_values_BHSK = self.memory_values_BHSK.index_select(0, sentences)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention, self.self_residual = _attention(config), Residual(config)
        self.cross_attention, self.cross_residual = _attention(config), Residual(config)
        self.feed_forward, self.ffn_residual = FeedForward(config), Residual(config)

    def forward(
        self, x_TD: torch.Tensor, memory_SD: torch.Tensor, self_layout: Layout, cross_layout: Layout
    ) -> torch.Tensor:
        x_TD = self.self_residual(x_TD, lambda x: self.self_attention(x, None, self_layout))
        x_TD = self.cross_residual(x_TD, lambda x: self.cross_attention(x, memory_SD, cross_layout))
        return self.ffn_residual(x_TD, self.feed_forward)

    def start(self, memory_BSD: torch.Tensor, *, capacity: int, beam_size: int) -> LayerCache:
        """Project the memory once, and make room for `capacity` positions of B · beam_size hypotheses."""
        k_BHSK, v_BHSK = self.cross_attention.project_memory(memory_BSD)
        heads, head_width = k_BHSK.shape[1], k_BHSK.shape[3]
        shape = (len(memory_BSD) * beam_size, heads, capacity, head_width)
        return LayerCache(
            k_BHSK.new_zeros(shape), k_BHSK.new_zeros(shape), k_BHSK.contiguous(), v_BHSK.contiguous()
        )  # fmt: skip

    def step(self, x_BD: torch.Tensor, cache: LayerCache, position: int, memory_mask_B1S: torch.Tensor) -> torch.Tensor:
        """One more position for every hypothesis.

        The beams of a sentence share its memory: cross-attention runs with the beams as queries.

        Args:
            x_BD: hypotheses, sentence-major: (sentences · beam_size, D).
            position: how many positions the cache holds.
            memory_mask_B1S: additive mask of padded source tokens, (sentences, 1, S).
        """

        def attend_self(x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.self_attention.project_one(x)
            cache.keys_BHCK[:, :, position] = k
            cache.values_BHCK[:, :, position] = v
            end = position + 1
            return self.self_attention.attend_one(q, cache.keys_BHCK, cache.values_BHCK, end)

        def attend_memory(x: torch.Tensor) -> torch.Tensor:
            return self.cross_attention.attend_beams(
                x, cache.memory_keys_BHSK, cache.memory_values_BHSK, memory_mask_B1S
            )

        x_BD = self.self_residual(x_BD, attend_self)
        x_BD = self.cross_residual(x_BD, attend_memory)
        return self.ffn_residual(x_BD, self.feed_forward)
