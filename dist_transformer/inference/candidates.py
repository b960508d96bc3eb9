"""Best extensions of living hypotheses: softmax over the vocabulary, and selection of its few largest values.

The tensors over the vocabulary are the largest ones of decoding. On a CPU, projection, softmax and selection process a
few rows at a time, which stay in the cache. Compiled code reads a row twice; torch's operators read it many times.
"""

import torch
from torch.nn import functional

from dist_transformer.data.vocabulary.tokenizer import EOS_ID, PAD_ID
from dist_transformer.inference.interface import DecodingModel
from dist_transformer.model import cpu_kernels
from dist_transformer.model.products import Linear

# Logits that are computed at a time. On a CPU torch's operators read them many times, so 2 MB of fp32 should stay in
# the cache of a core. Compiled code reads them only twice, and the matrix product is faster with more rows. The same
# holds on a GPU.
_ELEMENTS = {"cpu": 2**19, "compiled": 2**22, "cuda": 2**31}
# Values per block in the search for the largest values: only the maximum of a block is compared at first.
_BLOCK = 64


def best_extensions(
    model: DecodingModel,
    hidden_BD: torch.Tensor,
    alive_logp_Nk: torch.Tensor,
    *,
    linear: Linear,
    count: int,
    never: torch.Tensor,
    ends_only_N: torch.Tensor,
    allowed_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Select the `count` most probable extensions of each sentence's k hypotheses.

    Extensions of equal probability are ordered by hypothesis, then by token.

    Args:
        model: projects hidden states to logits.
        hidden_BD: hidden states of the hypotheses, sentence-major: (N · k, D).
        alive_logp_Nk: log probability of the hypotheses.
        linear: computes the projection.
        never: tokens that are not chosen; the probabilities of the others stay the model's.
        allowed_BV: bool; the only tokens that each hypothesis may take; None: all.
        ends_only_N: bool; sentences whose hypotheses have the maximum length and may only take `</s>`.

    Returns:
        Log probability with the extension, hypothesis, token, and whether the hypothesis must end although another
        token is more probable than `</s>`; each of shape (N, count). If there are fewer extensions, the rest has a log
        probability of -inf.
    """
    sentences, beam = alive_logp_Nk.shape
    vocabulary = model.config.output_size
    compiled, count_of_row = allowed_BV is None and _compiles(hidden_BD), min(count, vocabulary)
    rows = max(1, _ELEMENTS["compiled" if compiled else hidden_BD.device.type] // vocabulary)
    found = []
    for row, hidden_RD in enumerate(hidden_BD.split(rows)):
        logits_RV = model.project(hidden_RD, linear)
        if compiled:
            found.append(_select_compiled(logits_RV, count_of_row, never))
        else:
            allowed_RV = None if allowed_BV is None else allowed_BV[row * rows : (row + 1) * rows]
            found.append(_select(logits_RV, count_of_row, never, allowed_RV))
    value_BX, token_BX, end_B = (torch.cat(parts) if len(parts) > 1 else parts[0] for parts in zip(*found, strict=True))
    value_NkX, token_NkX = value_BX.view(sentences, beam, -1), token_BX.view(sentences, beam, -1)
    end_Nk = end_B.view(sentences, beam)
    is_cut_Nk = ends_only_N.unsqueeze(1) & (token_NkX[:, :, 0] != EOS_ID)
    value_NkX, token_NkX = _replace_by_ends(value_NkX, token_NkX, end_Nk, ends_only_N)
    # The best of a sentence are among the best of its hypotheses.
    value_NX, order_NX = (value_NkX + alive_logp_Nk.unsqueeze(2)).flatten(1).sort(dim=1, descending=True, stable=True)
    order_Nc = order_NX[:, :count]
    parent_Nc = order_Nc // value_NkX.shape[2]
    token_Nc = token_NkX.flatten(1).gather(1, order_Nc)
    return value_NX[:, :count], parent_Nc, token_Nc, is_cut_Nk.gather(1, parent_Nc)


def _compiles(hidden: torch.Tensor) -> bool:
    return hidden.device.type == "cpu" and cpu_kernels.takes(hidden.dtype)


def _select_compiled(
    logits_RV: torch.Tensor, count: int, never: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return cpu_kernels.best_tokens(logits_RV, count=count, never=never, end=EOS_ID)


def _select(
    logits_RV: torch.Tensor, count: int, never: torch.Tensor, allowed_RV: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do what `cpu_kernels.best_tokens` does, on any device, and only with the tokens that are allowed."""
    logp_RV = torch.log_softmax(logits_RV.float(), dim=-1)
    if allowed_RV is not None:
        logp_RV.masked_fill_(~allowed_RV, -torch.inf)
    end_R = logp_RV[:, EOS_ID].clone()
    return *largest(logp_RV.index_fill_(1, never, -torch.inf), count), end_R


def _replace_by_ends(
    value_NkX: torch.Tensor, token_NkX: torch.Tensor, end_Nk: torch.Tensor, ends_only_N: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the extensions of sentences of maximum length by `</s>` alone."""
    only_end = functional.pad(end_Nk.unsqueeze(2), (0, value_NkX.shape[2] - 1), value=-torch.inf)
    only_token = torch.full_like(token_NkX, PAD_ID)
    only_token[:, :, 0] = EOS_ID
    ends_only_N11 = ends_only_N[:, None, None]
    return torch.where(ends_only_N11, only_end, value_NkX), torch.where(ends_only_N11, only_token, token_NkX)


def largest(values_RV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the `count` largest fp32 values of each row and their places; equal values in order of place.

    Blocks are ordered by their maxima, and by place if these are equal. Each of the first `count` blocks has a value
    that comes before any value of the other blocks, so only these blocks are searched. The host reads no value.
    """
    blocks = values_RV.shape[1] // _BLOCK
    if blocks < 4 * count:
        places_Rc = _order(values_RV, count)
        return values_RV.gather(1, places_Rc), places_Rc
    body_RbX = values_RV[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK))
    chosen_Rc1 = _order(body_RbX.amax(2), count).sort(dim=1).values.unsqueeze(2)
    inside_RcX = body_RbX.gather(1, chosen_Rc1.expand(-1, -1, _BLOCK))
    places_RcX = chosen_Rc1 * _BLOCK + torch.arange(_BLOCK, device=values_RV.device)
    # The end of the vocabulary, which does not fill a block, takes part as a whole.
    tail = torch.arange(blocks * _BLOCK, values_RV.shape[1], device=values_RV.device)
    values = torch.cat([inside_RcX.flatten(1), values_RV[:, blocks * _BLOCK :]], dim=1)
    places = torch.cat([places_RcX.flatten(1), tail.expand(len(values_RV), -1)], dim=1)
    order_Rc = _order(values, count)
    return values.gather(1, order_Rc), places.gather(1, order_Rc)


def _order(values_RX: torch.Tensor, count: int) -> torch.Tensor:
    """Find the places of the largest values, shape (R, count).

    They are compared by distinct int64 keys, because `topk` promises no order among equal values. The bits of fp32
    numbers, read as integers, are in order for positive numbers and in reverse order for negative ones.
    """
    bits = values_RX.contiguous().view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    places = torch.arange(values_RX.shape[1] - 1, -1, -1, device=values_RX.device)
    return ((ordered.long() << 32) + places).topk(count).indices
