"""Sums of gradients in fp32: DeepSpeed's at stage 1 in few kernels, and those to which a CUDA graph adds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Gradients in bf16 that are kept until they are added at once: at most 0.12 GB of `big`.
_WAITING_GRADIENTS = 32


def replace_those_of(stage_1: Any) -> None:
    """Replace the methods by which DeepSpeed's `BF16_Optimizer` sums gradients."""
    # The original copies each gradient to fp32 before it adds the copy, one by one.
    stage_1._update_hp_grad = _add_to_sum
    stage_1.update_hp_grads = _finish_sums
    # The original writes all sums, twice per step. A sum that gets a gradient is overwritten, so it may stay as it is.
    stage_1.clear_hp_grads = _forget_sums
    stage_1.get_grads_for_reduction = _sums_to_reduce


def accumulate_in_fp32(parameter: torch.Tensor) -> None:
    """Sum the gradients of a bf16 parameter in fp32. torch has this attribute since 2.11."""
    parameter.grad_dtype = torch.float32


def _add_to_sum(zero_optimizer: Any, lp: torch.Tensor, group_idx: int, param_idx: int, clear_lp_grads: bool) -> None:
    """Add a parameter's bf16 gradient to its fp32 sum, with others in few kernels; the rest is DeepSpeed's bookkeeping.

    DeepSpeed drops the gradient afterwards; until it is added it is kept here.
    """
    if lp.grad is None:
        return
    hp_grad = zero_optimizer.fp32_groups_gradients[group_idx][param_idx]
    has_gradients = zero_optimizer.fp32_groups_has_gradients[group_idx]
    waiting = zero_optimizer.__dict__.setdefault("_waiting_gradients", {True: [], False: []})
    # The sum holds the last step's values until the first gradient of this step.
    pairs = waiting[has_gradients[param_idx]]
    pairs.append((hp_grad, lp.grad.view(hp_grad.shape)))
    lp._hp_grad = hp_grad  # type: ignore[attr-defined]
    has_gradients[param_idx] = True
    if len(pairs) == _WAITING_GRADIENTS:
        _finish_sums(zero_optimizer)


@torch.no_grad()
def _finish_sums(zero_optimizer: Any, clear_lp_grads: bool = False) -> None:
    """Add the gradients that wait to their sums."""
    waiting = zero_optimizer.__dict__.get("_waiting_gradients", {})
    for has_sum, pairs in waiting.items():
        if pairs:
            sums, gradients = ([pair[place] for pair in pairs] for place in range(2))
            if has_sum:
                torch._foreach_add_(sums, gradients)
            else:
                torch._foreach_copy_(sums, gradients)
            pairs.clear()


def _forget_sums(zero_optimizer: Any) -> None:
    """Let the next gradients overwrite the fp32 sums of all groups."""
    for has_gradients in zero_optimizer.fp32_groups_has_gradients:
        has_gradients[:] = [False] * len(has_gradients)


@torch.no_grad()
def _sums_to_reduce(zero_optimizer: Any) -> tuple[Any, dict[str, Any]]:
    """Return the fp32 sums for the all-reduce at the end of a step; first set those without a gradient to zero."""
    groups = zip(zero_optimizer.fp32_groups_gradients, zero_optimizer.fp32_groups_has_gradients, strict=True)
    for sums, has_gradients in groups:
        for total, has_gradient in zip(sums, has_gradients, strict=True):
            if not has_gradient:
                total.zero_()
    return zero_optimizer.non_expert_gradients, {}


class GradientSums:
    """The sums to which a graph of a micro-batch adds its gradients, at stage 0, and in bf16 at stage 1.

    The graph always adds to the same memory, and DeepSpeed's hooks do not run with it: this class does what they do.

    Args:
        parameters: trained parameters by name.
        stage_1: the optimizer of stage 1; None at stage 0.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], stage_1: Any | None) -> None:
        self._parameters, self._stage_1 = parameters, stage_1
        if stage_1 is None:
            dtypes = {name: getattr(p, "grad_dtype", None) or p.dtype for name, p in parameters.items()}
            self._sums = {name: torch.zeros_like(p, dtype=dtypes[name]) for name, p in parameters.items()}
        else:
            groups = zip(stage_1.bf16_groups, stage_1.fp32_groups_gradients, strict=True)
            of = {id(p): total for ps, sums in groups for p, total in zip(ps, sums, strict=True)}
            self._sums = {name: of[id(p)] for name, p in parameters.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._sums

    @torch.no_grad()
    def begin(self) -> None:
        """Prepare the sums for another micro-batch: with those of this step so far, or zero."""
        if self._stage_1 is not None:
            if not any(map(any, self._stage_1.fp32_groups_has_gradients)):
                torch._foreach_zero_(self._stage_1.fp32_groups_gradients_flat)
                for flags in self._stage_1.fp32_groups_has_gradients:
                    flags[:] = [True] * len(flags)
            return
        fresh = []
        for name, p in self._parameters.items():
            total = self._sums[name]
            if p.grad is None:
                fresh.append(total)
            elif p.grad is not total:
                # That of a micro-batch that was computed without the graph.
                total.copy_(p.grad)
            p.grad = total
        if fresh:
            torch._foreach_zero_(fresh)

    def forget(self) -> None:
        """Let the next micro-batch be the first of a step."""
        if self._stage_1 is not None:
            _forget_sums(self._stage_1)
        for p in self._parameters.values():
            p.grad = None


@contextmanager
def without_communication(ds: Any) -> Iterator[None]:
    """Let DeepSpeed's backward pass at stages 0 and 1 leave the gradients of other ranks out."""
    ds.enable_backward_allreduce = False
    try:
        yield
    finally:
        ds.enable_backward_allreduce = True
