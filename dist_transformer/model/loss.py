"""Label-smoothed cross-entropy (section 5.4), in chunks, with its gradient computed on the way.

    loss = (1 - ε) · -log p(y) + ε · mean over the vocabulary of -log p(v)

Logits are the largest tensors of training: 32k tokens × 37k words are 4.7 GB in fp32. Only one chunk of them exists at
a time: its gradient is formed at once and kept as that of the hidden states and of the projection.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional

from dist_transformer.packed import IGNORED

# Elements of a chunk of logits: on a CPU 16 MB of fp32, which stays near the caches; a GPU wants large products.
_CHUNK_ELEMENTS = {"cpu": 2**22, "cuda": 2**29}


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = hidden_TD.device
        loss = torch.zeros((), dtype=torch.float32, device=device)
        nll = torch.zeros((), dtype=torch.float32, device=device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad else None
        chunk = max(1, _CHUNK_ELEMENTS[device.type] // len(weight_VD))
        for start in range(0, len(hidden_TD), chunk):
            rows = slice(start, start + chunk)
            hidden_CD, labels_C = hidden_TD[rows], labels_T[rows]
            real_C1 = (labels_C != IGNORED).unsqueeze(1)
            picks_C1 = labels_C.clamp(min=0).unsqueeze(1)
            logp_CV = torch.log_softmax(functional.linear(hidden_CD, weight_VD), dim=-1, dtype=torch.float32)
            nll_C1 = -logp_CV.gather(1, picks_C1)
            smooth_C1 = (1 - smoothing) * nll_C1 - smoothing * logp_CV.mean(dim=1, keepdim=True)
            # Selected, not multiplied by zero: a dummy row must not decide whether the sum is finite.
            nll += torch.where(real_C1, nll_C1, 0).sum()
            loss += torch.where(real_C1, smooth_C1, 0).sum()
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                grad_CV = _logit_gradient(logp_CV, picks_C1, smoothing).to(hidden_TD.dtype)
                grad_hidden_TD[rows] = torch.where(real_C1, grad_CV @ weight_VD, 0)
                grad_weight_VD += grad_CV.t() @ torch.where(real_C1, hidden_CD, 0)
        if grad_weight_VD is not None:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype))
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
        )


def _logit_gradient(logp_CV: torch.Tensor, picks_C1: torch.Tensor, smoothing: float) -> torch.Tensor:
    """d loss / d logits = p - (1 - ε) · onehot(y) - ε / V. Overwrites `logp_CV`."""
    grad_CV = logp_CV.exp_().sub_(smoothing / logp_CV.shape[1])
    return grad_CV.scatter_add_(1, picks_C1, torch.full_like(picks_C1, smoothing - 1, dtype=grad_CV.dtype))


def smoothed_cross_entropy(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, label_smoothing: float
) -> LossSums:
    """Loss of `softmax(hidden · weight^T)` against `labels_T`; rows labelled `IGNORED` do not count.

    Shapes: hidden (T, D), weight (V, D), labels (T,) int64.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    loss, nll = _SmoothedLoss.apply(hidden_TD, weight_VD, labels_T, label_smoothing, needs_grad)
    return LossSums(loss, nll, (labels_T != IGNORED).sum())
