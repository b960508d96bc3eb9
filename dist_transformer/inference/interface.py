"""The interface of a model for search, sampling and scoring: a `Transformer` and an `Ensemble` have it."""

from typing import Any, Protocol

import torch

from dist_transformer.model.packed import PackedTokens
from dist_transformer.model.products import Linear


class Sizes(Protocol):
    """Numbers that decoding needs of a model's configuration."""

    @property
    def max_positions(self) -> int: ...

    @property
    def output_size(self) -> int: ...

    @property
    def width(self) -> int: ...


class DecodingState(Protocol):
    """State while hypotheses are decoded, as `DecoderState` describes it."""

    linear: Linear
    positions_N: torch.Tensor

    @property
    def end(self) -> int: ...

    def end_step(self, parents_Nk: torch.Tensor) -> None: ...

    def keep(self, order_N: torch.Tensor, moved: torch.Tensor) -> None: ...


class DecodingModel(Protocol):
    """Model that decodes, with the methods that `Transformer` describes. Its modes are those of `nn.Module`.

    Hidden states are what `project` reads; their width is `config.width`. A state is one that the model itself made.
    """

    training: bool

    @property
    def in_int8(self) -> bool: ...

    @property
    def config(self) -> Sizes: ...

    @property
    def device(self) -> torch.device: ...

    def train(self, mode: bool = True) -> Any: ...

    def eval(self) -> Any: ...

    def to(self, device: torch.device) -> Any: ...

    def encode(self, source: PackedTokens) -> torch.Tensor: ...

    def decode(self, target: PackedTokens, memory_SD: torch.Tensor, source: PackedTokens) -> torch.Tensor: ...

    def project(self, hidden: torch.Tensor, linear: Linear) -> torch.Tensor: ...

    def new_decoder_state(
        self,
        *,
        slots: int,
        beam_size: int,
        source_room: int,
        longest: int,
        fixed_shapes: bool,
        linear: Linear,
    ) -> Any: ...

    def begin_sentences(self, state: Any, slots_n: torch.Tensor, source: PackedTokens) -> None: ...

    def decode_step(self, tokens_B: torch.Tensor, state: Any) -> torch.Tensor: ...
