"""Positions (section 3.5): the sinusoids of the paper, or a learned table."""

import math

import torch
from torch import nn


def sinusoidal_positions(count: int, width: int) -> torch.Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(pos / 10000^(2i/d)).

    Returns:
        float32, shape (count, width).
    """
    pos = torch.arange(count, dtype=torch.float64).unsqueeze(1)
    rate = torch.exp(torch.arange(0, width, 2, dtype=torch.float64) * (-math.log(10000.0) / width))
    table = torch.empty(count, width, dtype=torch.float64)
    table[:, 0::2] = torch.sin(pos * rate)
    table[:, 1::2] = torch.cos(pos * rate)
    return table.float()


class Positions(nn.Module):
    """Table of position vectors: a constant, or learned from N(0, 1 / width)."""

    table: torch.Tensor

    def __init__(self, *, count: int, width: int, learned: bool) -> None:
        super().__init__()
        if learned:
            self.table = nn.Parameter(torch.randn(count, width) * width**-0.5)
        else:
            self.register_buffer("table", sinusoidal_positions(count, width), persistent=False)

    def forward(self, positions_T: torch.Tensor) -> torch.Tensor:
        """Shape (T,) to (T, width)."""
        return nn.functional.embedding(positions_T, self.table)
