"""Label-smoothed cross-entropy (section 5.4), in blocks, with its gradient computed on the way.

    loss = (1 - ε) · -log p(y) + ε · mean over the vocabulary of -log p(v)

Logits are the largest tensors of training: 32k tokens × 37k words are 4.7 GB in fp32. Only one block of them exists at
a time: its gradient is formed in place and at once kept as that of the hidden states and of the projection. On a CPU
the rows of a block pass through the fp32 softmax a few at a time, which stays in the cache: half the time of
`log_softmax` over a block, and no large tensor whose fresh pages the system must clear.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dist_transformer.packed import IGNORED

# Elements of a block of logits. CPU: 16 MB of bf16, which the allocator reuses; a GPU wants large products.
_BLOCK_ELEMENTS = {"cpu": 2**23, "cuda": 2**29}
# Elements that pass through the softmax at a time. CPU: 2 MB of fp32, a core's cache.
_SOFTMAX_ELEMENTS = {"cpu": 2**19, "cuda": 2**29}


class LossSums(NamedTuple):
    """Sums over the real target tokens of a micro-batch; divide by the tokens of the step.

    A tuple, because DeepSpeed looks for the tensors of a model's output in tuples only.
    """

    loss: torch.Tensor
    """Label-smoothed, differentiable, fp32, shape ()."""
    nll: torch.Tensor
    """-log p(y), not smoothed, detached, fp32, shape ()."""
    tokens: torch.Tensor
    """Real target tokens, int64, shape ()."""


class _SmoothedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_T: torch.Tensor,
        smoothing: float,
        needs_grad: bool,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, vocabulary = hidden_TD.device, len(weight_VD)
        softmax_rows = _compiled_softmax_rows() if compiled else _softmax_rows
        is_real_T1 = (labels_T != IGNORED).unsqueeze(1)
        # Selected, not multiplied by zero: a dummy row must not decide whether a sum is finite.
        hidden_TD = torch.where(is_real_T1, hidden_TD, 0)
        picks_T1 = labels_T.clamp(min=0).unsqueeze(1)
        sums_2 = torch.zeros(2, dtype=torch.float32, device=device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad else None
        for rows in _slices(len(hidden_TD), _BLOCK_ELEMENTS[device.type] // vocabulary):
            hidden_CD, picks_C1, is_real_C1 = hidden_TD[rows], picks_T1[rows], is_real_T1[rows]
            block_CV = hidden_CD.new_empty(len(hidden_CD), vocabulary)
            for part in _slices(len(hidden_CD), _SOFTMAX_ELEMENTS[device.type] // vocabulary):
                logits_RV = torch.mm(hidden_CD[part], weight_VD.t(), out=block_CV[part])
                sums_2 += softmax_rows(logits_RV, picks_C1[part], is_real_C1[part], smoothing, needs_grad)
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                grad_hidden_TD[rows] = block_CV @ weight_VD
                grad_weight_VD += block_CV.t() @ hidden_CD
        if grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype))
        loss, nll = sums_2.unbind()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        scale = grad_loss.to(torch.float32)
        return (
            (grad_hidden_TD * scale).to(grad_hidden_TD.dtype),
            (grad_weight_VD * scale).to(grad_weight_VD.dtype),
            None,
            None,
            None,
            None,
        )


def _slices(count: int, size: int) -> list[slice]:
    size = max(1, size)
    return [slice(start, start + size) for start in range(0, count, size)]


def _softmax_rows(
    logits_RV: torch.Tensor, picks_R1: torch.Tensor, is_real_R1: torch.Tensor, smoothing: float, needs_grad: bool
) -> torch.Tensor:
    """(loss sum, nll sum) of these rows; with `needs_grad`, puts the gradient of the loss in place of the logits."""
    x_RV = logits_RV.float()
    picked_R1, mean_R1 = x_RV.gather(1, picks_R1), x_RV.mean(1, keepdim=True)
    highest_R1 = x_RV.amax(1, keepdim=True)
    total_R1 = x_RV.sub_(highest_R1).exp_().sum(1, keepdim=True)
    log_total_R1 = total_R1.log() + highest_R1
    nll_R1 = log_total_R1 - picked_R1
    loss_R1 = (1 - smoothing) * nll_R1 + smoothing * (log_total_R1 - mean_R1)
    if needs_grad:
        logits_RV.copy_(_logit_gradient(x_RV, total_R1, picks_R1, is_real_R1, smoothing))
    return torch.stack([torch.where(is_real_R1, sum_R1, 0).sum() for sum_R1 in (loss_R1, nll_R1)])


@functools.cache
def _compiled_softmax_rows() -> Callable[..., torch.Tensor]:
    """A dozen passes over the logits become a few."""
    return torch.compile(_softmax_rows, dynamic=False)


def _logit_gradient(
    exp_RV: torch.Tensor, total_R1: torch.Tensor, picks_R1: torch.Tensor, is_real_R1: torch.Tensor, smoothing: float
) -> torch.Tensor:
    """d loss / d logits = p - (1 - ε) · onehot(y) - ε / V, zero in rows that are not real. Overwrites `exp_RV`."""
    vocabulary = exp_RV.shape[1]
    exp_RV.mul_(torch.where(is_real_R1, 1 / total_R1, 0)).sub_(torch.where(is_real_R1, smoothing / vocabulary, 0))
    return exp_RV.scatter_add_(1, picks_R1, torch.where(is_real_R1, smoothing - 1.0, 0).to(exp_RV.dtype))


def smoothed_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    label_smoothing: float,
    *,
    compiled: bool = False,
) -> LossSums:
    """Loss of `softmax(hidden · weight^T)` against `labels_T`; rows labelled `IGNORED` do not count.

    Shapes: hidden (T, D), weight (V, D), labels (T,) int64.

    Args:
        compiled: the softmax by torch.compile, which pays on a GPU where T stays the same.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    loss, nll = _SmoothedLoss.apply(hidden_TD, weight_VD, labels_T, label_smoothing, needs_grad, compiled)
    return LossSums(loss, nll, (labels_T != IGNORED).sum())
