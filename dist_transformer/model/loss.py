"""Label-smoothed cross-entropy (section 5.4), in blocks, with its gradient computed in the forward pass.

    loss = (1 - ε) · -log p(y) + ε · mean over the vocabulary of -log p(v)
    d loss / d logits = p - (1 - ε) · onehot(y) - ε / V

Logits are the largest tensors of training: 32k tokens × 37k words are 4.7 GB in fp32. Only one block of them exists at
a time. Its gradient is formed in place, and at once turned into the gradients of the hidden states and the projection.
The smoothing term is the same for every word, so it needs no logits: the mean logit is hidden · mean(weight), and
ε / V is subtracted once per gradient. On a CPU the rows of a block pass through the fp32 softmax a few at a time, so
that they stay in the cache.

R-Drop (Liang et al. 2021, "R-Drop: Regularized Dropout for Neural Networks") adds the divergence of two passes P and Q
of the same tokens, under two dropout masks:

    loss = 1/2 · [loss of P + loss of Q + α/2 · (KL(P ‖ Q) + KL(Q ‖ P))]
    d (KL(P ‖ Q) + KL(Q ‖ P)) / d logits of P = p · (log p - log q - KL(P ‖ Q)) + p - q, and likewise for Q

The paper's loss is twice this one. Halved, it is the mean of two passes, comparable to the loss of one.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from dist_transformer.model import cpu_kernels
from dist_transformer.model.packed import IGNORED

# Minimum elements of a block of logits. CPU: 16 MB of bf16. GPU: 2 GiB, so that 25k tokens are one block.
_BLOCK_ELEMENTS = {"cpu": 2**23, "cuda": 2**30}
# Minimum rows of a block, divided by the width. Each block reads and writes the projection's gradient, (V, D), once.
_ROWS_PER_WIDTH = 2
# Elements that pass through the softmax at a time, in two buffers of fp32. CPU: 1 MB each, together a core's cache.
_SOFTMAX_ELEMENTS = {"cpu": 2**18, "cuda": 2**27}
# Elements of the projection and its gradient that are summed in fp32 at a time. On a CPU torch first copies them to
# fp32, which must stay in the cache; on a GPU one kernel reads and adds them.
_SUMMED_ELEMENTS = {"cpu": 2**17, "cuda": 2**62}
# Rows of logits begin at multiples of this number of elements, because GPU kernels read 16 bytes at a time if aligned.
_ROW_MULTIPLE = {"cpu": 1, "cuda": 64}
# Weights of links count as no less than this, so that their logarithm is finite.
_LEAST_WEIGHT = 1e-30


class LossSums(NamedTuple):
    """Sums over the real target tokens of a micro-batch, to be divided by the tokens of the step.

    The class is a tuple, because DeepSpeed finds the tensors of a model's output only in tuples.
    """

    loss: torch.Tensor
    """Label-smoothed loss, with the divergence under R-Drop; differentiable, fp32, shape ()."""
    nll: torch.Tensor
    """Negative log-likelihood -log p(y), unsmoothed; the mean of both passes under R-Drop; detached, fp32, shape ()."""
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
        alpha: float,
        needs_grad: bool,
        compiled: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device, (vocabulary, width) = hidden_TD.device, weight_VD.shape
        softmax_rows = _compiled_softmax_rows() if compiled else _softmax_rows
        if device.type == "cpu" and cpu_kernels.takes(weight_VD.dtype) and not compiled and not alpha:
            softmax_rows = _softmax_rows_in_one_pass
        is_real_T1 = (labels_T != IGNORED).unsqueeze(1)
        # Not a product with zero, because a dummy row must not decide whether a sum is finite.
        hidden_TD = torch.where(is_real_T1, hidden_TD, 0)
        picks_T1 = labels_T.clamp(min=0).unsqueeze(1)
        word_parts = _slices(vocabulary, max(1, _SUMMED_ELEMENTS[device.type] // width))
        sums_CD = torch.stack([weight_VD[part].sum(0, dtype=torch.float32) for part in word_parts])
        mean_weight_D = sums_CD.sum(0) / vocabulary
        log_totals, picked, divergences = [], [], []
        if needs_grad:
            grad_hidden_TD = torch.empty_like(hidden_TD)
            every_word_D = hidden_TD.sum(0, dtype=torch.float32) * (-smoothing / vocabulary)
            product_VD = torch.empty_like(weight_VD)
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        block_rows, part_rows = logit_rows(
            len(hidden_TD), vocabulary, width, device.type, compiled=compiled, multiple=2 if alpha else 1
        )
        row_size = -(-vocabulary // _ROW_MULTIPLE[device.type]) * _ROW_MULTIPLE[device.type]
        logits_CV = hidden_TD.new_empty(block_rows, row_size)[:, :vocabulary]
        for rows in _slices(len(hidden_TD), block_rows):
            hidden_CD, picks_C1 = hidden_TD[rows], picks_T1[rows]
            block_CV = torch.mm(hidden_CD, weight_VD.t(), out=logits_CV[: len(hidden_CD)])
            for part in _slices(len(hidden_CD), part_rows):
                log_total_R1, picked_R1, *divergence_R1 = softmax_rows(
                    block_CV[part], picks_C1[part], smoothing, needs_grad, *([alpha] if alpha else [])
                )
                log_totals.append(log_total_R1)
                picked.append(picked_R1)
                divergences += divergence_R1
            if needs_grad:
                torch.mm(block_CV, weight_VD, out=grad_hidden_TD[rows])
                torch.mm(block_CV.t(), hidden_CD, out=product_VD)
                for part in word_parts:
                    grad_weight_VD[part] += product_VD[part]
        if needs_grad:
            for part in word_parts:
                product_VD[part] = grad_weight_VD[part] + every_word_D
            grad_hidden_TD = torch.where(is_real_T1, grad_hidden_TD - smoothing * mean_weight_D, 0)
            ctx.save_for_backward(grad_hidden_TD.to(hidden_TD.dtype), product_VD)
        log_total_T1 = torch.cat(log_totals)
        mean_logit_T1 = (hidden_TD.float() @ mean_weight_D).unsqueeze(1)
        nll_T1 = log_total_T1 - torch.cat(picked)
        loss_T1 = (1 - smoothing) * nll_T1 + smoothing * (log_total_T1 - mean_logit_T1)
        if divergences:
            loss_T1 += 0.5 * alpha * torch.cat(divergences)
        loss, nll = (torch.where(is_real_T1, sum_T1, 0).sum() for sum_T1 in (loss_T1, nll_T1))
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scale = grad_loss.to(torch.float32)
        gradients = ((gradient * scale).to(gradient.dtype) for gradient in ctx.saved_tensors)
        return *gradients, None, None, None, None, None


def logit_rows(
    rows: int, vocabulary: int, width: int, device_type: str, *, compiled: bool = False, multiple: int = 1
) -> tuple[int, int]:
    """Compute the size of the blocks of logits, which bounds the memory of the loss.

    Args:
        rows: target tokens of a micro-batch.
        compiled: whether the softmax is compiled; it then needs no copy in fp32, and blocks of equal size.
        multiple: consecutive rows that stay together: 2 with R-Drop, whose pairs of rows are compared. Both results are
            multiples of it.

    Returns:
        Rows of a block in the training precision, and rows of it that pass through the softmax at a time.
    """
    groups, row_elements = rows // multiple, vocabulary * multiple
    block = max(1, _BLOCK_ELEMENTS[device_type] // row_elements, _ROWS_PER_WIDTH * width // multiple)
    block = min(groups, block)
    if compiled:
        block = _divisor(groups, at_most=block)
        return block * multiple, block * multiple
    part = min(block, max(1, _SOFTMAX_ELEMENTS[device_type] // row_elements))
    return block * multiple, part * multiple


def _divisor(count: int, *, at_most: int) -> int:
    """Return the largest divisor of `count` between half of `at_most` and `at_most`; otherwise `at_most`."""
    parts = range(-(-count // at_most), 2 * -(-count // at_most) + 1)
    return next((count // n for n in parts if count % n == 0), at_most)


def _slices(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _softmax_rows(
    logits_RV: torch.Tensor, picks_R1: torch.Tensor, smoothing: float, needs_grad: bool, alpha: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Return the log of the sum of exp, and the logit of the label, both (R, 1) in fp32.

    With `alpha`, rows 2i and 2i + 1 are the two passes of a token, and a third result is the divergence of each row
    from the other, (R, 1). With `needs_grad`, replace the logits by p - (1 - ε) · onehot(y), to which `alpha` adds α/2
    times the gradient of the divergences.
    """
    x_RV = logits_RV.float()
    picked_R1, highest_R1 = x_RV.gather(1, picks_R1), x_RV.amax(1, keepdim=True)
    p_RV = x_RV.softmax(1)
    # The highest p is at least 1 / V, so its logarithm is exact enough.
    log_total_R1 = highest_R1 - p_RV.amax(1, keepdim=True).log()
    divergence_R1 = _add_divergence(x_RV, p_RV, log_total_R1, alpha) if alpha else None
    if needs_grad:
        p_RV.scatter_add_(1, picks_R1, torch.full_like(picked_R1, smoothing - 1.0))
        logits_RV.copy_(p_RV)
    return (log_total_R1, picked_R1) if divergence_R1 is None else (log_total_R1, picked_R1, divergence_R1)


def _add_divergence(x_RV: torch.Tensor, p_RV: torch.Tensor, log_total_R1: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return KL(P ‖ Q) of each pair's first row and KL(Q ‖ P) of its second, (R, 1).

    Add α/2 times the gradient of their sum to the probabilities, in place.
    """
    (x, x_other), (p, q), (total, total_other) = (
        rows.unflatten(0, (-1, 2)).unbind(1) for rows in (x_RV, p_RV, log_total_R1)
    )
    # log p - log q.
    ratio = x - x_other - (total - total_other)
    divergence, divergence_other = (p * ratio).sum(1, keepdim=True), (q * -ratio).sum(1, keepdim=True)
    both = p - q
    p += 0.5 * alpha * (p * (ratio - divergence) + both)
    q -= 0.5 * alpha * (q * (ratio + divergence_other) + both)
    return torch.stack((divergence, divergence_other), dim=1).flatten(0, 1)


def _softmax_rows_in_one_pass(
    logits_RV: torch.Tensor, picks_R1: torch.Tensor, smoothing: float, needs_grad: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `_softmax_rows` without `alpha`, in compiled code for a CPU."""
    labels_R = picks_R1.squeeze(1)
    log_total_R, picked_R = cpu_kernels.smoothed_softmax(logits_RV, labels_R, smoothing=smoothing, replace=needs_grad)
    return log_total_R.unsqueeze(1), picked_R.unsqueeze(1)


def _softmax_rows_without_scatter(
    logits_RV: torch.Tensor, picks_R1: torch.Tensor, smoothing: float, needs_grad: bool, alpha: float = 0.0
) -> tuple[torch.Tensor, ...]:
    """Compute the same as `_softmax_rows` in a form that torch compiles to fewer passes over the logits.

    A scatter would need all probabilities in memory.
    """
    x_RV = logits_RV.float()
    picked_R1 = x_RV.gather(1, picks_R1)
    log_total_R1 = x_RV.logsumexp(1, keepdim=True)
    p_RV = (x_RV - log_total_R1).exp()
    divergence_R1 = _add_divergence(x_RV, p_RV, log_total_R1, alpha) if alpha else None
    if needs_grad:
        is_label_RV = torch.arange(x_RV.shape[1], device=x_RV.device) == picks_R1
        logits_RV.copy_(p_RV - torch.where(is_label_RV, 1.0 - smoothing, 0.0))
    return (log_total_R1, picked_R1) if divergence_R1 is None else (log_total_R1, picked_R1, divergence_R1)


@functools.cache
def _compiled_softmax_rows() -> Callable[..., tuple[torch.Tensor, ...]]:
    """Compile the softmax, which reduces several passes over the logits to two."""
    return torch.compile(_softmax_rows_without_scatter, dynamic=False)


def smoothed_cross_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    label_smoothing: float,
    alpha: float = 0.0,
    *,
    compiled: bool = False,
) -> LossSums:
    """Compute the loss of `softmax(hidden · weight^T)` against `labels_T`; rows labelled `IGNORED` do not count.

    Shapes: hidden (T, D), weight (V, D), labels (T,) int64.

    Args:
        alpha: weight of R-Drop's divergence between the two rows of each pair of neighbours; 0: none.
        compiled: use torch.compile for the softmax, which is faster on a GPU if T is constant.
    """
    needs_grad = torch.is_grad_enabled() and (hidden_TD.requires_grad or weight_VD.requires_grad)
    loss, nll = _SmoothedLoss.apply(hidden_TD, weight_VD, labels_T, label_smoothing, alpha, needs_grad, compiled)
    return LossSums(loss, nll, (labels_T != IGNORED).sum())


def rdrop_cross_entropy(
    hidden_TD: torch.Tensor,
    other_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    label_smoothing: float,
    alpha: float,
    *,
    compiled: bool = False,
) -> LossSums:
    """Compute the loss of R-Drop from the hidden states of two passes of the same tokens, otherwise as above.

    Args:
        alpha: weight of the divergence, above 0; the paper has 5 for translation.
    """
    # The two rows of a token are neighbours, so a block of logits holds both.
    pairs_TD = torch.stack((hidden_TD, other_TD), dim=1).flatten(0, 1)
    pair_labels_T = torch.stack((labels_T, labels_T), dim=1).flatten()
    sums = smoothed_cross_entropy(pairs_TD, weight_VD, pair_labels_T, label_smoothing, alpha, compiled=compiled)
    return LossSums(sums.loss / 2, sums.nll / 2, (labels_T != IGNORED).sum())


def loss_of_links(
    attend: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    q_THK: torch.Tensor,
    kv_S2HK: torch.Tensor,
    positions_S: torch.Tensor,
    links_T: torch.Tensor,
    *,
    longest: int,
) -> torch.Tensor:
    """Return the sum of -log(weight) of the links in the first head (Garg et al. 2019), fp32, shape ().

    The weights are the output of attention whose values are the positions of the keys, one-hot. As many heads as hold
    all positions have the queries and keys of the first one, so all kernels of attention can compute it.

    Args:
        attend: attends from queries to keys with values.
        positions_S: positions of the keys in their sentences.
        links_T: position of the key that each query is linked to, or `IGNORED`.
        longest: most keys of a sentence.
    """
    width = q_THK.shape[-1]
    heads = -(-longest // width)
    is_key_SX = (positions_S.unsqueeze(1) == torch.arange(heads * width, device=links_T.device)).to(kv_S2HK.dtype)
    k_SHK = kv_S2HK[:, 0, :1].expand(-1, heads, -1)
    kv_S2HK = torch.stack([k_SHK, is_key_SX.unflatten(1, (heads, width))], dim=1)
    weights_TX = attend(q_THK[:, :1].expand(-1, heads, -1).contiguous(), kv_S2HK).flatten(-2).float()
    picked_T = weights_TX.gather(1, links_T.clamp(min=0).unsqueeze(1)).squeeze(1)
    return -torch.where(links_T != IGNORED, picked_T.clamp(min=_LEAST_WEIGHT).log(), 0).sum()
