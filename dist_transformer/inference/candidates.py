"""The best extensions of living hypotheses: softmax over the vocabulary, and the few largest of its values.

The vocabulary makes the largest tensors of decoding. On a CPU some rows at a time go all the way, projection, softmax
and selection, while they are in the cache: a third of the time of whole tensors.
"""

import numpy as np
import torch

from dist_transformer.data.tokenizer import EOS_ID
from dist_transformer.model.transformer import Transformer

# Logits that are computed at a time. CPU: 2 MB of fp32, a core's cache; a GPU wants large products.
_ELEMENTS = {"cpu": 2**19, "cuda": 2**31}
# Values of which one stands for all while the largest are looked for.
_BLOCK = 64


def best_extensions(
    model: Transformer,
    hidden_BD: torch.Tensor,
    alive_logp_Nk: torch.Tensor,
    *,
    count: int,
    never: torch.Tensor,
    ends_only: np.ndarray,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The `count` most probable extensions of each sentence's k hypotheses; equal ones by hypothesis, then by token.

    Args:
        hidden_BD: of the hypotheses, sentence-major: (N · k, D).
        alive_logp_Nk: log probability of the hypotheses.
        never: tokens that are not chosen; the probabilities of the others stay the model's.
        ends_only: shape (N,), host; sentences whose hypotheses are of full length and may only take `</s>`.

    Returns:
        log probability with the extension, hypothesis and token, each of shape (N, count).
    """
    sentences, beam = alive_logp_Nk.shape
    alive_logp_B1 = alive_logp_Nk.reshape(-1, 1)
    ends_only_B = torch.from_numpy(np.repeat(ends_only, beam)) if ends_only.any() else None
    values, tokens = [], []
    rows = max(1, _ELEMENTS[hidden_BD.device.type] // model.config.vocab_size)
    for start in range(0, len(hidden_BD), rows):
        part = slice(start, start + rows)
        total_RV = torch.log_softmax(model.logits(hidden_BD[part]), dim=-1)
        total_RV.index_fill_(1, never, -torch.inf).add_(alive_logp_B1[part])
        if ends_only_B is not None:
            _keep_ends(total_RV, ends_only_B[part].to(total_RV.device))
        value_Rc, token_Rc = best(total_RV, min(count, model.config.vocab_size))
        values.append(value_Rc)
        tokens.append(token_Rc)
    # Of the best of each hypothesis the best of the sentence.
    value_NX, token_NX = (torch.cat(found).view(sentences, -1) for found in (values, tokens))
    per_hypothesis = value_NX.shape[1] // beam
    value_NX, order_NX = value_NX.sort(dim=1, descending=True, stable=True)
    order_Nc = order_NX[:, :count]
    return value_NX[:, :count], order_Nc // per_hypothesis, token_NX.gather(1, order_Nc)


def _keep_ends(total_RV: torch.Tensor, ends_only_R: torch.Tensor) -> None:
    ends_R = total_RV[:, EOS_ID].clone()
    total_RV.masked_fill_(ends_only_R.unsqueeze(1), -torch.inf)
    total_RV[:, EOS_ID] = ends_R


def best(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest fp32 values of each row and their places; equal values in order of place.

    On CUDA by keys that hold the place: looking at values would make the host wait.
    """
    return best_by_key(values_RV, count) if values_RV.is_cuda else _best_by_topk(values_RV, count, count + 1)


def _best_by_topk(values_RV: torch.Tensor, count: int, taken: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from the `taken` largest values; more for rows where one that is left out may equal one that is in.

    `topk` promises no order among equal values, nor which of them it takes when not all fit. Keys would, in eight times
    the time. With fp32 logits hardly any row has equal values at the cut; with bf16 one in ten.
    """
    if taken >= values_RV.shape[1]:
        return best_by_key(values_RV, count)
    top_values, top_places = _topk(values_RV, taken)
    places_Rt, order_Rt = top_places.sort(dim=1)
    values_Rt = top_values.gather(1, order_Rt)
    order_Rc = values_Rt.sort(dim=1, descending=True, stable=True).indices[:, :count]
    values_Rc, places_Rc = values_Rt.gather(1, order_Rc), places_Rt.gather(1, order_Rc)
    last, cut = top_values[:, -1], top_values[:, count - 1]
    unsure = ((last == cut) & (cut > -torch.inf)).nonzero().flatten()
    if len(unsure):
        values_Rc[unsure], places_Rc[unsure] = _best_by_topk(values_RV[unsure], count, 8 * taken)
    return values_Rc, places_Rc


def _topk(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`topk` of long rows, where the largest are looked for in the blocks with the largest maxima only."""
    blocks = values_RV.shape[1] // _BLOCK
    if blocks < 4 * count:
        return tuple(values_RV.topk(count))  # type: ignore[return-value]
    body_RbX = values_RV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    chosen_Rc1 = body_RbX.amax(2).topk(count).indices.unsqueeze(2)
    inside_RcX = body_RbX.gather(1, chosen_Rc1.expand(-1, -1, _BLOCK))
    places_RcX = chosen_Rc1 * _BLOCK + torch.arange(_BLOCK, device=values_RV.device)
    # The vocabulary's end that fills no block takes part whole.
    tail = torch.arange(blocks * _BLOCK, values_RV.shape[1], device=values_RV.device)
    values = torch.cat([inside_RcX.flatten(1), values_RV[:, blocks * _BLOCK :]], dim=1)
    places = torch.cat([places_RcX.flatten(1), tail.expand(len(values_RV), -1)], dim=1)
    top = values.topk(count)
    return top.values, places.gather(1, top.indices)


def best_by_key(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by distinct int64 keys, in the order of the values, then of the places from last to first.

    The bits of fp32 numbers, read as integers, are in order for positive numbers and in reverse for negative ones.
    """
    bits = values_RV.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(values_RV.shape[1] - 1, -1, -1, device=values_RV.device)
    places_Rc = ((ordered.long() << 32) + places).topk(count).indices
    return values_RV.gather(1, places_Rc), places_Rc
