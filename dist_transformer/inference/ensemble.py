"""Ensembles: several models that decode together, each with caches of its own.

    p(token) = w_1 · p_1(token) + … + w_n · p_n(token)

In each step every model reads the same hypotheses, and the mean of their probabilities continues them. The weights w_i
are 1 / n, or as given. The mean is computed in fp32 as logsumexp(log p_i + log w_i). The models may differ in all but
the vocabulary.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.nn import functional

from dist_transformer.model.decoding import DecoderState
from dist_transformer.model.packed import PackedTokens
from dist_transformer.model.products import Linear
from dist_transformer.model.transformer import Transformer


@dataclass(frozen=True, kw_only=True, slots=True)
class JointSizes:
    """Sizes of an ensemble."""

    max_positions: int
    """Positions that every model has."""
    output_size: int
    width: int
    """Sum of the models' widths."""


class Ensemble(nn.Module):
    """Models of one vocabulary that decode together, with the interface of one.

    Hidden states and memories are those of all models, side by side. Logits are log probabilities: their softmax is the
    mean of the models' probabilities.

    Args:
        shares: share of each model, above 0; default: all are equal.
    """

    def __init__(self, models: Sequence[Transformer], shares: Sequence[float] | None = None) -> None:
        super().__init__()
        shares = shares or [1.0] * len(models)
        self._log_weights = [math.log(share / math.fsum(shares)) for share in shares]
        self.models = nn.ModuleList(models)
        self._widths = [model.config.width for model in models]
        self.config = JointSizes(
            max_positions=min(model.config.max_positions for model in models),
            output_size=models[0].config.output_size,
            width=sum(self._widths),
        )

    @property
    def in_int8(self) -> bool:
        return all(model.in_int8 for model in self.each)

    @property
    def device(self) -> torch.device:
        return self.each[0].device

    @property
    def each(self) -> list[Transformer]:
        return list(cast(Iterable[Transformer], self.models))

    def encode(self, source: PackedTokens) -> torch.Tensor:
        return torch.cat([model.encode(source) for model in self.each], dim=1)

    def decode(self, target: PackedTokens, memory_SD: torch.Tensor, source: PackedTokens) -> torch.Tensor:
        memories = memory_SD.split(self._widths, dim=1)
        hidden = [
            model.decode(target, memory.contiguous(), source) for model, memory in zip(self.each, memories, strict=True)
        ]
        return torch.cat(hidden, dim=1)

    def project(self, hidden: torch.Tensor, linear: Linear = functional.linear) -> torch.Tensor:
        """Return the logarithm of the mean of the models' probabilities, shape (…, V), in fp32."""
        logp_MTV = torch.stack(
            [
                model.project(part.contiguous(), linear).float().log_softmax(-1) + weight
                for model, part, weight in zip(
                    self.each, hidden.split(self._widths, dim=-1), self._log_weights, strict=True
                )
            ]
        )
        return logp_MTV.logsumexp(0)

    def new_decoder_state(self, *, linear: Linear = functional.linear, **sizes: Any) -> "JointState":
        return JointState([model.new_decoder_state(linear=linear, **sizes) for model in self.each], linear)

    def begin_sentences(self, state: "JointState", slots_n: torch.Tensor, source: PackedTokens) -> None:
        for model, own in zip(self.each, state.states, strict=True):
            model.begin_sentences(own, slots_n, source)

    def decode_step(self, tokens_B: torch.Tensor, state: "JointState") -> torch.Tensor:
        steps = zip(self.each, state.states, strict=True)
        return torch.cat([model.decode_step(tokens_B, own) for model, own in steps], dim=1)


class JointState:
    """States of all models of an ensemble, which are always at the same step."""

    def __init__(self, states: Sequence[DecoderState], linear: Linear) -> None:
        self.states, self.linear = states, linear
        self.positions_N = states[0].positions_N

    @property
    def end(self) -> int:
        return self.states[0].end

    def end_step(self, parents_Nk: torch.Tensor) -> None:
        for state in self.states:
            state.end_step(parents_Nk)

    def keep(self, order_N: torch.Tensor, moved: torch.Tensor) -> None:
        for state in self.states:
            state.keep(order_N, moved)
        self.positions_N = self.states[0].positions_N


DecodingModel: TypeAlias = Transformer | Ensemble
"""Model for search, sampling and scoring.

Hidden states are what `project` reads; their width is `config.width`. A state of decoding is one that the model itself
made.
"""
