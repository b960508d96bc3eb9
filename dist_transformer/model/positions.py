"""Position encodings (section 3.5): the sinusoids of the paper, a learned table, and any that is registered.

An encoding is a module that maps positions_T, int64, to vectors of shape (T, width). It is made from a `ModelConfig`,
also on the meta device, and keeps constants in non-persistent buffers.
"""

import math
from typing import cast

import torch
from torch import nn

from dist_transformer.config.registry import POSITIONS
from dist_transformer.config.settings import ModelConfig


def sinusoidal_positions(count: int, width: int) -> torch.Tensor:
    """Compute the table PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Returns:
        float32, shape (count, width).
    """
    pos = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    table = torch.empty(count, width, dtype=torch.float64)
    table[:, 0::2] = torch.sin(pos * rate)
    table[:, 1::2] = torch.cos(pos * rate)
    return table.float()


class PositionEncoding(nn.Module):
    """Table of position vectors, shape (max_positions, width): constant, or learned from the given initial values."""

    table: torch.Tensor

    def __init__(self, table: torch.Tensor, *, learned: bool) -> None:
        super().__init__()
        if learned:
            self.table = nn.Parameter(table)
        else:
            # Not persistent: checkpoints and weight files hold parameters only.
            self.register_buffer("table", table, persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Look up the position vectors: (T,) to (T, width)."""
        return nn.functional.embedding(positions_T, self.table)


@POSITIONS.register("sinusoidal")
def _sinusoidal(config: ModelConfig) -> PositionEncoding:
    return PositionEncoding(sinusoidal_positions(config.max_positions, config.width), learned=False)


@POSITIONS.register("learned")
def _learned(config: ModelConfig) -> PositionEncoding:
    """Make a learned table, drawn from N(0, 1 / width), the scale of an embedding."""
    return PositionEncoding(torch.randn(config.max_positions, config.width) * config.width**-0.5, learned=True)


def make_positions(config: ModelConfig) -> nn.Module:
    """Make the position encoding that `config.positions` names."""
    return cast(nn.Module, POSITIONS[config.positions](config))
