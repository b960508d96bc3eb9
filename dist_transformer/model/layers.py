"""Encoder and decoder layers with their residual connections (section 3.1).

post-norm (the paper):  x = LayerNorm(x + Dropout(Sublayer(x))), on a CPU by compiled code
pre-norm:               x = x + Dropout(Sublayer(LayerNorm(x)))
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model import cpu_kernels
from dist_transformer.model.attention import AttentionLayout, by_sentence, make_attention
from dist_transformer.model.decoding import DecoderState, LayerCache
from dist_transformer.model.dropout import dropout, random_bits
from dist_transformer.model.products import FusedLinear, Linear

_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"gelu": functional.gelu, "swish": functional.silu}


class Residual(nn.Module):
    """Residual connection of a sublayer, in the order that `norm` names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = (nn.LayerNorm if config.norm == "pre" else PostNorm)(config.width, config.norm_epsilon)
        self.dropout = config.dropout

    def forward(self, x: torch.Tensor, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        if isinstance(self.norm, PostNorm):
            return self.norm(x, sublayer(x), self.dropout)
        return x + dropout(sublayer(self.norm(x)), self.dropout, self.training)


class PostNorm(nn.LayerNorm):
    """Normalisation of x + Dropout(y)."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, p: float) -> torch.Tensor:  # type: ignore[override]
        if x.device.type != "cpu" or not self._is_compiled_for(x, y):
            return super().forward(x + dropout(y, p, self.training))
        p = p if self.training else 0.0
        return cast(torch.Tensor, _AddAndNormalise.apply(x, y, self.weight, self.bias, p, self.eps))

    def _is_compiled_for(self, x: torch.Tensor, y: torch.Tensor) -> bool:
        # Each call takes longer than two operators, which matters for the few rows of a step of decoding. torch.compile
        # fuses the operators itself.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return False
        return x.dtype == y.dtype == self.weight.dtype and cpu_kernels.takes(x.dtype)


class _AddAndNormalise(torch.autograd.Function):
    """Compiled form of `PostNorm`, with the random numbers of `dropout` and sums in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: torch.Tensor, y_TD: torch.Tensor, gain: torch.Tensor, bias: torch.Tensor, p: float, eps: float
    ) -> torch.Tensor:
        x_TD, y_TD, ctx.keep = x_TD.contiguous(), y_TD.contiguous(), cpu_kernels.Keep.all_but(p)
        bits_TD = random_bits(y_TD.shape) if p > 0 else None
        out_TD, *statistics = cpu_kernels.add_and_normalise(x_TD, y_TD, bits_TD, gain, bias, ctx.keep, epsilon=eps)
        ctx.save_for_backward(x_TD, y_TD, bits_TD, gain, *statistics)
        return out_TD

    @staticmethod
    def backward(ctx: Any, gradient_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_TD, y_TD, bits_TD, gain, means_T, factors_T = ctx.saved_tensors
        kept = (x_TD, y_TD, bits_TD, gain, means_T, factors_T, ctx.keep)
        return *cpu_kernels.return_normalised(gradient_TD, *kept), None, None


class FeedForward(nn.Module):
    """FFN(x) = max(0, x W_1 + b_1) W_2 + b_2 (section 3.3), or with another activation in place of max."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = FusedLinear(config.width, config.ffn_width)
        self.outer = FusedLinear(config.ffn_width, config.width)
        # ReLU is part of the first product.
        self.activation = _ACTIVATIONS.get(config.activation)
        self.dropout = config.ffn_dropout

    def reset_parameters(self) -> None:
        for layer in (self.inner, self.outer):
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x, relu=self.activation is None)
        if self.activation is not None:
            inner = self.activation(inner)
        return self.outer(dropout(inner, self.dropout, self.training))

    def step(self, x_BD: torch.Tensor, linear: Linear) -> torch.Tensor:
        """Compute the same as `forward` without dropout, for decoding."""
        inner_BF = linear(x_BD, self.inner.weight, self.inner.bias)
        inner_BF = functional.relu(inner_BF, inplace=True) if self.activation is None else self.activation(inner_BF)
        return linear(inner_BF, self.outer.weight, self.outer.bias)


class EncoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention, self.self_residual = make_attention(config, "encoder"), Residual(config)
        self.feed_forward, self.ffn_residual = FeedForward(config), Residual(config)

    def forward(self, x_SD: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        x_SD = self.self_residual(x_SD, lambda x: self.self_attention(x, None, layout))
        return self.ffn_residual(x_SD, self.feed_forward)


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attention, self.self_residual = make_attention(config, "decoder"), Residual(config)
        self.cross_attention, self.cross_residual = make_attention(config, "cross"), Residual(config)
        self.feed_forward, self.ffn_residual = FeedForward(config), Residual(config)

    def forward(
        self,
        x_TD: torch.Tensor,
        memory_SD: torch.Tensor,
        self_layout: AttentionLayout,
        cross_layout: AttentionLayout,
        links_T: torch.Tensor | None = None,
    ) -> Any:
        """Return the hidden states; with `links_T`, alignments of `PackedBatch`, also their loss."""
        losses: list[torch.Tensor] = []

        def attend_memory(x: torch.Tensor) -> torch.Tensor:
            if links_T is None:
                return cast(torch.Tensor, self.cross_attention(x, memory_SD, cross_layout))
            mixed_TD, loss = self.cross_attention(x, memory_SD, cross_layout, links_T)
            losses.append(loss)
            return cast(torch.Tensor, mixed_TD)

        x_TD = self.self_residual(x_TD, lambda x: self.self_attention(x, None, self_layout))
        x_TD = self.ffn_residual(self.cross_residual(x_TD, attend_memory), self.feed_forward)
        return x_TD if links_T is None else (x_TD, *losses)

    def new_cache(self, *, slots: int, beam_size: int, source_room: int) -> LayerCache:
        """Make the empty cache of this layer for a `DecoderState`."""
        attention = self.self_attention
        sizes, width = (slots, attention.heads), attention.head_width
        like = attention.qkv_weight
        keys_NHCkK, values_NHCkK = like.new_empty(2, *sizes, 0, beam_size, width)
        memory_keys_NHSK, memory_values_NHSK = like.new_zeros(2, *sizes, source_room, width)
        return LayerCache(keys_NHCkK, values_NHCkK, memory_keys_NHSK, memory_values_NHSK)

    def step(
        self, x_BD: torch.Tensor, cache: LayerCache, state: DecoderState, history_NkX: torch.Tensor
    ) -> torch.Tensor:
        """Compute one more position of every hypothesis.

        Args:
            x_BD: hypotheses, sentence-major: (N · k, D), or one of each sentence in the first step.
            cache: the cache of this layer, part of `state`.
            history_NkX: additive mask of the cache's entries.
        """

        beam = len(x_BD) // len(state.positions_N)

        def attend_self(x: torch.Tensor) -> torch.Tensor:
            q_NHkK, k_NHkK, v_NHkK = (by_sentence(y, beam) for y in self.self_attention.project_one(x, state.linear))
            cache.add(state.place, k_NHkK, v_NHkK)
            return self.self_attention.attend_beams(
                q_NHkK, *cache.until(state.end), history_NkX[:, :beam], state.places_in_history, state.linear
            )

        def attend_memory(x: torch.Tensor) -> torch.Tensor:
            q_NHkK = by_sentence(self.cross_attention.project_query(x, state.linear), beam)
            memory = (cache.memory_keys_NHSK, cache.memory_values_NHSK)
            return self.cross_attention.attend_beams(
                q_NHkK, *memory, state.memory_mask_N1S, state.places_in_memory, state.linear
            )

        x_BD = self.self_residual(x_BD, attend_self)
        x_BD = self.cross_residual(x_BD, attend_memory)
        return self.ffn_residual(x_BD, lambda x: self.feed_forward.step(x, state.linear))
