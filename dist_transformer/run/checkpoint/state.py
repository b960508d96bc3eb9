"""A parameter in a checkpoint, and copies of parameters that later updates do not change."""

from collections.abc import Iterable, Sequence
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


def copy_tensors(states: Iterable[ParameterState], writers: Sequence[int]) -> tuple[Tensors, Tensors, Tensors]:
    """Copy this rank's share of the tensors, and on rank 0 all weights and averages.

    A parameter is in the share of the writer that has the fewest bytes so far, so that shares are about equal.

    Args:
        writers: ranks that have a share.

    Returns:
        the share, the weights and the averages; the last two are empty on other ranks than 0.
    """
    share: Tensors = {}
    weights: Tensors = {}
    averages: Tensors = {}
    loads, is_main, on_gpu = dict.fromkeys(writers, 0), distributed.rank() == 0, False
    for state in states:
        tensors = {"weight": state.weight, **state.moments}
        writer = min(loads, key=loads.__getitem__)
        loads[writer] += sum(tensor.nbytes for tensor in tensors.values())
        is_own = writer == distributed.rank()
        for key, tensor in tensors.items():
            into = {"weight": weights, EMA: averages}.get(key) if is_main else None
            if is_own or into is not None:
                copied, on_gpu = _begin_copy(tensor), on_gpu or tensor.is_cuda
                if is_own:
                    share[f"{key}/{state.name}"] = copied
                if into is not None:
                    into[state.name] = copied
    if on_gpu:
        torch.cuda.current_stream().synchronize()
    return share, weights, averages


def _begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to host memory. From a GPU the copy is complete when its stream is, in memory that later saves use again."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
