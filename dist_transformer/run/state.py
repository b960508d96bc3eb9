"""A parameter as a checkpoint keeps it."""

from dataclasses import dataclass

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")
EMA = "ema"
"""Beside Adam's moments, and partitioned as they are: the exponential moving average of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """One parameter with its optimizer state: full tensors, fp32."""

    name: str
    weight: torch.Tensor
    moments: dict[str, torch.Tensor]
    """Adam's, and under EMA the moving average of the weight, where the run keeps one."""
