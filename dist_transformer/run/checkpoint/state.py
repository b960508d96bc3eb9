"""A parameter in a checkpoint, and copies of parameters that later updates do not change."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dist_transformer.runtime import distributed

Tensors = dict[str, torch.Tensor]

MOMENTS = ("exp_avg", "exp_avg_sq")
EMA = "ema"
"""Key of the exponential moving average of the weights, which is stored and partitioned like Adam's moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterState:
    """One parameter with its optimizer state: full tensors, fp32."""

    name: str
    weight: torch.Tensor
    moments: dict[str, torch.Tensor]
    """Adam's moments, or the first alone for Muon, and under EMA the moving average if the run keeps one."""


def copy_tensors(states: Iterable[ParameterState]) -> tuple[Tensors, Tensors, Tensors]:
    """Copy this rank's share of the tensors, and on rank 0 all weights and averages.

    Returns:
        the share, the weights and the averages; the last two are empty on other ranks.
    """
    share: Tensors = {}
    weights: Tensors = {}
    averages: Tensors = {}
    is_main = distributed.rank() == 0
    for number, state in enumerate(states):
        is_own = number % distributed.world_size() == distributed.rank()
        tensors = {"weight": state.weight, **state.moments}
        for key, tensor in tensors.items():
            into = {"weight": weights, EMA: averages}.get(key) if is_main else None
            if is_own or into is not None:
                copied = tensor.to("cpu", copy=True)
                if is_own:
                    share[f"{key}/{state.name}"] = copied
                if into is not None:
                    into[state.name] = copied
    return share, weights, averages
