"""Position encodings (section 3.5): two kinds of sinusoids, a learned table, and any that is registered.

An encoding is a module that maps positions_T, int64, to vectors of shape (T, width). It is made from a `ModelConfig`,
also on the meta device, and keeps constants in non-persistent buffers.
"""

import math
from typing import cast

import torch
from torch import nn

from dist_transformer.config.registry import POSITIONS
from dist_transformer.config.settings import ModelConfig


def sinusoidal_positions(count: int, width: int, *, slowest: int | None = None, first: int = 0) -> torch.Tensor:
    """Compute the table PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Args:
        slowest: the i of 1 / 10000; default: d / 2, one more than the last.
        first: the first position.

    Returns:
        float32, shape (count, width).
    """
    if torch.get_default_device().type == "meta":
        # The first computation on the meta device loads 800 modules, for two seconds.
        return torch.empty(count, width)
    pos = torch.arange(first, first + count, dtype=torch.float64).unsqueeze(1)
    each = torch.arange(width // 2, dtype=torch.float64)
    rate = torch.exp(each * (-math.log(10000.0) / (width / 2 if slowest is None else slowest)))
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
    return _constant(config)


@POSITIONS.register("sinusoidal_t2t")
def _sinusoidal_t2t(config: ModelConfig) -> PositionEncoding:
    """Make the table of tensor2tensor, fairseq and Marian: the last sine and cosine have the rate 1 / 10000."""
    return _constant(config, slowest=max(config.width // 2 - 1, 1))


def _constant(config: ModelConfig, slowest: int | None = None) -> PositionEncoding:
    count, width, first = config.max_positions, config.width, config.first_position
    return PositionEncoding(sinusoidal_positions(count, width, slowest=slowest, first=first), learned=False)


@POSITIONS.register("learned")
def _learned(config: ModelConfig) -> PositionEncoding:
    """Make a learned table, drawn from N(0, 1 / width), the scale of an embedding."""
    return PositionEncoding(torch.randn(config.max_positions, config.width) * config.width**-0.5, learned=True)


def make_positions(config: ModelConfig) -> nn.Module:
    """Make the position encoding that `config.positions` names."""
    return cast(nn.Module, POSITIONS[config.positions](config))
