"""Multi-head attention over packed tokens (section 3.2).

    Attention(Q, K, V) = softmax(Q K^T / sqrt(d_k)) V

Only attention knows where sentences begin and end. On a CPU with a compiler, and on CUDA in half precision, kernels
read the offsets of the sentences. These kernels are our own; longer sentences on CUDA use FlashAttention through
`torch.nn.attention.varlen`. Elsewhere the sentences are split into groups of similar length, and each group is padded
and computed with plain matrix products. All paths give the same numbers up to rounding.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from dist_transformer.config.registry import ATTENTIONS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model import cpu_kernels, packed_attention, products
from dist_transformer.model.dropout import dropout
from dist_transformer.model.loss import loss_of_links
from dist_transformer.model.packed import PackedTokens
from dist_transformer.model.products import FusedLinear, Linear

# Each sentence of a group has at least this share of the group's longest length. A pack of 4,096 tokens of mixed text
# then has 5 groups; at 0.8 it has 12, and calls on small matrices cost more than padding. Target tokens per CPU second
# of `tiny` at 0.4, 0.5, 0.6, 0.7, 0.8: 5,598, 6,062, 5,948, 6,061, 5,776 (medians of six interleaved rounds on a busy
# AMD EPYC, 2026-11-22).
_GROUP_FILL = 0.5
# Keys of a group are padded to a multiple of this: softmax on a CPU takes 10 times as long on rows of fewer than 16.
_KEY_MULTIPLE = 16
# Tokens of the longest sentence that our own GPU kernel takes. It was measured up to 192 tokens, where it takes a third
# of FlashAttention's time. Its work grows with the square of the length, and its small tiles then become a drawback.
_SHORT = 512


class _MoveRows(torch.autograd.Function):
    """Gather rows in the forward pass, and gather them back in the backward pass.

    `index` and `back` are inverse to each other on real rows. Padding rows repeat row 0 and are masked, so their
    gradient is zero and can be dropped. The scatter-add that autograd would run is slower.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: torch.Tensor, back: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(back, valid)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        back, valid = ctx.saved_tensors
        moved = gradient.index_select(0, back)
        return torch.where(valid.view(-1, *[1] * (moved.dim() - 1)), moved, 0), None, None, None


class _WithoutKeys(torch.autograd.Function):
    """Pass the bias of queries, keys and values on, and no gradient back to the part of the keys.

    A constant added to all keys does not change the softmax, so its gradient consists of rounding errors. Adam divides
    a gradient by its size, so it would turn these errors into steps that depend on the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor) -> torch.Tensor:
        return bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        # In place: the sum over tokens that comes here belongs to nothing else.
        gradient.chunk(3)[1].zero_()
        return gradient


@dataclass(frozen=True, slots=True)
class _Side:
    """Packed rows of one side and their places in the padded groups."""

    to_padded_P: torch.Tensor
    to_packed_T: torch.Tensor
    is_real_T: torch.Tensor
    is_real_P: torch.Tensor

    def pad(self, rows: torch.Tensor) -> torch.Tensor:
        return _MoveRows.apply(rows, self.to_padded_P, self.to_packed_T, self.is_real_T)

    def unpad(self, rows: torch.Tensor) -> torch.Tensor:
        return _MoveRows.apply(rows, self.to_packed_T, self.to_padded_P, self.is_real_P)


@dataclass(frozen=True, slots=True)
class _Group:
    sentences: int
    queries: int
    keys: int
    mask_B1QK: torch.Tensor
    """Additive mask: 0 where a query sees the key, -inf elsewhere."""


Kernel = Literal["packed", "varlen", "groups"]
"""The implementation of attention (see the module docstring).

"packed" and "varlen" read offsets, so the shapes of their tensors do not depend on the sentences in the pack.
"""


def kernel_for(weight: torch.Tensor, head_width: int, *, longest: int) -> Kernel:
    """Choose the kernel for plain scores without dropout.

    Args:
        weight: any weight of the model; its device and dtype count.
        longest: upper bound of the tokens per sentence.
    """
    if weight.device.type != "cuda":
        return "packed" if weight.device.type == "cpu" and cpu_kernels.takes(weight.dtype) else "groups"
    if weight.dtype == torch.float32 or torch.cuda.get_device_capability(weight.device)[0] < 8:
        return "groups"
    if longest <= _SHORT and packed_attention.gpu_takes(head_width):
        return "packed"
    # The head widths that FlashAttention 2 supports.
    return "varlen" if head_width <= 256 and head_width % 8 == 0 else "groups"


class AttentionLayout:
    """Visibility of key tokens for each query token, computed once per micro-batch and shared by all layers."""

    def __init__(self, queries: PackedTokens, keys: PackedTokens, *, causal: bool, kernel: Kernel) -> None:
        self.causal = causal
        self.kernel = kernel
        self.query_offsets, self.key_offsets = queries.offsets_N, keys.offsets_N
        self.max_queries, self.max_keys = queries.max_length, keys.max_length
        self.key_positions_S = keys.positions_T
        if kernel == "groups":
            self._make_groups(queries, keys)

    def _make_groups(self, queries: PackedTokens, keys: PackedTokens) -> None:
        device = queries.tokens_T.device
        query_lengths, key_lengths = queries.lengths, keys.lengths
        if len(query_lengths) == 0:
            # A pack of weight zero still runs, so that every rank calls the same collectives.
            query_lengths = key_lengths = np.ones(1, dtype=np.int64)
        members = list(_similar_lengths(query_lengths, key_lengths))
        query_widths = [int(query_lengths[rows].max()) for rows in members]
        key_widths = [-(-int(key_lengths[rows].max()) // _KEY_MULTIPLE) * _KEY_MULTIPLE for rows in members]
        self.query_side = _make_side(members, query_lengths, query_widths, len(queries.tokens_T), device)
        self.key_side = _make_side(members, key_lengths, key_widths, len(keys.tokens_T), device)
        self.groups = [
            _make_group(key_lengths[rows], query_width, key_width, self.causal, device)
            for rows, query_width, key_width in zip(members, query_widths, key_widths, strict=True)
        ]


def _similar_lengths(query_lengths: np.ndarray, key_lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Group the sentences, longest first.

    A new group begins where a sentence would fill less than `_GROUP_FILL` of the group's width.
    """
    both = query_lengths + key_lengths
    order = np.argsort(-both, kind="stable")
    start = 0
    while start < len(order):
        sizes = both[order[start:]]
        count = int(np.searchsorted(-sizes, -sizes[0] * _GROUP_FILL, side="right"))
        yield order[start : start + count]
        start += count


def _make_side(
    members: list[np.ndarray], lengths: np.ndarray, widths: list[int], packed_rows: int, device: torch.device
) -> _Side:
    starts = np.cumsum(lengths) - lengths
    to_padded, real = [], []
    for rows, width in zip(members, widths, strict=True):
        steps = np.arange(width)
        inside = steps < lengths[rows, None]
        to_padded.append(np.where(inside, starts[rows, None] + steps, 0).ravel())
        real.append(inside.ravel())
    index, is_real = np.concatenate(to_padded), np.concatenate(real)
    back = np.zeros(packed_rows, dtype=np.int64)
    back[index[is_real]] = np.flatnonzero(is_real)
    covered = np.arange(packed_rows) < lengths.sum()
    return _Side(*(torch.from_numpy(array).to(device) for array in (index, back, covered, is_real)))


def _make_group(key_lengths: np.ndarray, queries: int, keys: int, causal: bool, device: torch.device) -> _Group:
    visible = np.broadcast_to(np.arange(keys) < key_lengths[:, None, None], (len(key_lengths), queries, keys))
    if causal:
        visible = visible & (np.arange(keys) <= np.arange(queries)[:, None])
    mask = torch.zeros(visible.shape).masked_fill_(torch.from_numpy(~visible), -torch.inf)
    return _Group(len(key_lengths), queries, keys, mask.unsqueeze(1).to(device))


Role = Literal["encoder", "decoder", "cross"]
"""Use of the attention: self-attention of the encoder, self-attention of the decoder, or cross-attention."""


@ATTENTIONS.register("softmax")
class MultiHeadAttention(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O (section 3.2.2).

    A variant is a subclass, registered in `ATTENTIONS`. It may override `adjust_scores`, which training, decoding and
    attention maps all call. It may add parameters in `__init__` and `reset_parameters`.
    """

    def __init__(self, config: ModelConfig, role: Role) -> None:
        super().__init__()
        self.role: Role = role
        self.heads, self.head_width = config.heads, config.attention_head_width
        self.dropout = config.attention_dropout
        inner = self.heads * self.head_width
        # W^Q, W^K and W^V are one matrix, so self-attention needs one product.
        self.qkv_weight = nn.Parameter(torch.empty(3 * inner, config.width))
        self.qkv_bias = nn.Parameter(torch.empty(3 * inner))
        self.output = FusedLinear(inner, config.width)

    def reset_parameters(self) -> None:
        """Initialize each of the four matrices by Xavier uniform, and the biases to zero."""
        for weight in (*self.qkv_weight.chunk(3), self.output.weight):
            nn.init.xavier_uniform_(weight)
        nn.init.zeros_(self.qkv_bias)
        nn.init.zeros_(self.output.bias)

    def adjust_scores(
        self, scores_BHQX: torch.Tensor, query_positions: torch.Tensor, key_positions: torch.Tensor
    ) -> torch.Tensor:
        """Change Q K^T / sqrt(d_k) before the mask and the softmax: a hook for subclasses.

        A subclass that overrides this method computes its scores by plain matrix products everywhere, because fused
        kernels cannot call it. This is slower on a GPU in half precision, and --compile has no effect.

        Args:
            scores_BHQX: fp32, one score per sentence, head, query and key.
            query_positions: positions of the queries in their sentences, int64, shape (B or 1, 1, Q, 1).
            key_positions: positions of the keys, shape (B or 1, 1, 1, X). Those of masked keys are arbitrary and may
                be negative.

        Returns:
            Finite fp32 scores of the same shape.
        """
        return scores_BHQX

    @property
    def is_plain(self) -> bool:
        """Whether the scores are those of the paper, which fused kernels can compute."""
        return type(self).adjust_scores is MultiHeadAttention.adjust_scores

    def forward(
        self,
        x_TD: torch.Tensor,
        memory_SD: torch.Tensor | None,
        layout: AttentionLayout,
        links_T: torch.Tensor | None = None,
    ) -> Any:
        """Attend from `x_TD` to `memory_SD`, or to `x_TD` itself when `memory_SD` is None (self-attention).

        Args:
            links_T: alignments that guide the first head of cross-attention, as in `PackedBatch`.

        Returns:
            Shape (T, D). Rows of dummy sentences are finite and have no meaning. With `links_T`, also their loss.
        """
        if memory_SD is None:
            qkv_T3HK = self._heads(products.linear(x_TD, self.qkv_weight, _WithoutKeys.apply(self.qkv_bias)))
            if layout.kernel == "packed":
                mixed_THK = packed_attention.self_attention(qkv_T3HK, layout.query_offsets, causal=layout.causal)
                return self.output(mixed_THK.flatten(-2))
            q_T1HK, kv_S2HK = qkv_T3HK.split([1, 2], dim=-3)
            q_THK = q_T1HK.squeeze(-3)
        else:
            # Split, because the gradient of each slice would be a zero tensor as large as the whole.
            sizes = [self.output.in_features, 2 * self.output.in_features]
            weights, biases = self.qkv_weight.split(sizes), _WithoutKeys.apply(self.qkv_bias).split(sizes)
            q_THK = self._heads(products.linear(x_TD, weights[0], biases[0])).squeeze(-3)
            kv_S2HK = self._heads(products.linear(memory_SD, weights[1], biases[1]))
        mixed_TD = self.output(self._attend(q_THK, kv_S2HK, layout, self.dropout).flatten(-2))
        if links_T is None:
            return mixed_TD
        # Without dropout: a link that is dropped would have no weight at all.
        attend = partial(self._attend, layout=layout, p=0.0)
        return mixed_TD, loss_of_links(attend, q_THK, kv_S2HK, layout.key_positions_S, links_T, longest=layout.max_keys)

    def _attend(self, q_THK: torch.Tensor, kv_S2HK: torch.Tensor, layout: AttentionLayout, p: float) -> torch.Tensor:
        """Attend by the kernel of the layout, with weights that are dropped with probability `p`; shape (T, H, K)."""
        if layout.kernel == "groups":
            return self._attend_groups(q_THK, kv_S2HK, layout, p)
        return {"packed": self._attend_packed, "varlen": self._attend_varlen}[layout.kernel](q_THK, kv_S2HK, layout)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Split the last dimension, n·H·K, into (n, H, K)."""
        return x.unflatten(-1, (-1, self.heads, self.head_width))

    def project_query(self, x_TD: torch.Tensor, linear: Linear = products.linear) -> torch.Tensor:
        """Project the queries, shape (T, H, K)."""
        inner = self.heads * self.head_width
        return self._heads(linear(x_TD, self.qkv_weight[:inner], self.qkv_bias[:inner])).squeeze(-3)

    def _project_key_value(self, memory: torch.Tensor, linear: Linear = products.linear) -> torch.Tensor:
        inner = self.heads * self.head_width
        return self._heads(linear(memory, self.qkv_weight[inner:], self.qkv_bias[inner:]))

    def _attend_packed(self, q_THK: torch.Tensor, kv_S2HK: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        return packed_attention.cross_attention(q_THK, kv_S2HK, layout.query_offsets, layout.key_offsets)

    def _attend_varlen(self, q_THK: torch.Tensor, kv_S2HK: torch.Tensor, layout: AttentionLayout) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if layout.causal else (-1, -1)
        k_SHK, v_SHK = kv_S2HK.unbind(1)
        offsets, limits = (layout.query_offsets, layout.key_offsets), (layout.max_queries, layout.max_keys)
        return cast(torch.Tensor, varlen_attn(q_THK, k_SHK, v_SHK, *offsets, *limits, window_size=window))

    def _attend_groups(
        self, q_THK: torch.Tensor, kv_S2HK: torch.Tensor, layout: AttentionLayout, p: float
    ) -> torch.Tensor:
        # Split, because the gradient of each slice would be a zero tensor as large as the whole.
        query_rows = [group.sentences * group.queries for group in layout.groups]
        key_rows = [group.sentences * group.keys for group in layout.groups]
        queries = layout.query_side.pad(q_THK * self.head_width**-0.5).split(query_rows)
        memories = layout.key_side.pad(kv_S2HK).split(key_rows)
        mixed = []
        for group, q, kv in zip(layout.groups, queries, memories, strict=True):
            q_BHQK = q.unflatten(0, (group.sentences, group.queries)).transpose(1, 2)
            k_BHSK, v_BHSK = kv.unflatten(0, (group.sentences, group.keys)).transpose(1, 3).unbind(2)
            attend = self._attend_fused if self.is_plain and q.device.type == "cuda" else self._attend_padded
            mixed.append(attend(q_BHQK, k_BHSK, v_BHSK, group, p).transpose(1, 2).flatten(0, 1))
        return layout.query_side.unpad(torch.cat(mixed))

    def _attend_padded(
        self, q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor, group: _Group, p: float
    ) -> torch.Tensor:
        scores_BHQS = q_BHQK @ k_BHSK.transpose(2, 3)
        if not self.is_plain:
            scores_BHQS = self.adjust_scores(scores_BHQS.float(), *_places(group.queries, group.keys, q_BHQK.device))
        # The mask is in fp32, so the softmax is too.
        weights_BHQS = torch.softmax(scores_BHQS + group.mask_B1QK, dim=-1).to(q_BHQK.dtype)
        return dropout(weights_BHQS, p, self.training) @ v_BHSK

    def _attend_fused(
        self, q_BHQK: torch.Tensor, k_BHSK: torch.Tensor, v_BHSK: torch.Tensor, group: _Group, p: float
    ) -> torch.Tensor:
        """Compute the same as `_attend_padded` in one GPU kernel, which also supports fp32 and dropout.

        The queries are scaled already.
        """
        mask, p = group.mask_B1QK.to(q_BHQK.dtype), p if self.training else 0.0
        return functional.scaled_dot_product_attention(q_BHQK, k_BHSK, v_BHSK, mask, dropout_p=p, scale=1.0)

    def project_memory(
        self, memory_SD: torch.Tensor, linear: Linear = products.linear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Project the keys and values of source tokens for decoding: (S, D) to two of (S, H, K)."""
        k_SHK, v_SHK = self._project_key_value(memory_SD, linear).unbind(1)
        return k_SHK, v_SHK

    def project_one(self, x_BD: torch.Tensor, linear: Linear) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Project the query, key and value of one position: (B, D) to three of (B, H, K)."""
        q_BHK, k_BHK, v_BHK = self._heads(linear(x_BD, self.qkv_weight, self.qkv_bias)).unbind(1)
        return q_BHK, k_BHK, v_BHK

    def attend_beams(
        self,
        q_NHkK: torch.Tensor,
        k_NHXK: torch.Tensor,
        v_NHXK: torch.Tensor,
        mask_NkX: torch.Tensor,
        places: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        linear: Linear,
    ) -> torch.Tensor:
        """Attend from the k hypotheses of each sentence to the X keys that they share, for decoding.

        Args:
            mask_NkX: 0 where a hypothesis sees the key, -inf elsewhere; (N, 1, X) if all see the same keys.
            places: returns the positions of queries (N,) and of keys (N or 1, X); called only if scores are adjusted.

        Returns:
            Shape (N · k, D).
        """
        if self.is_plain and q_NHkK.device.type == "cpu" and cpu_kernels.takes(q_NHkK.dtype):
            mixed_BD = cpu_kernels.attend_beams(q_NHkK, k_NHXK, v_NHXK, mask_NkX)
            return linear(mixed_BD, self.output.weight, self.output.bias)
        if self.is_plain:
            mixed_NHkK = functional.scaled_dot_product_attention(q_NHkK, k_NHXK, v_NHXK, mask_NkX.unsqueeze(1))
        else:
            scores_NHkX = (q_NHkK * self.head_width**-0.5 @ k_NHXK.transpose(2, 3)).float()
            queries_N, keys_NX = places()
            scores_NHkX = self.adjust_scores(scores_NHkX, queries_N[:, None, None, None], keys_NX[:, None, None])
            weights_NHkX = torch.softmax(scores_NHkX + mask_NkX.unsqueeze(1), dim=-1)
            mixed_NHkK = weights_NHkX.to(v_NHXK.dtype) @ v_NHXK
        mixed_BD = mixed_NHkK.transpose(1, 2).flatten(0, 1).flatten(1)
        return linear(mixed_BD, self.output.weight, self.output.bias)

    def weights(self, x_TD: torch.Tensor, memory_SD: torch.Tensor | None, *, causal: bool = False) -> torch.Tensor:
        """Return how much each token of one sentence attends to each token of its memory, fp32, shape (H, T, S).

        Args:
            memory_SD: None in self-attention, as in `forward`.
            causal: whether a token sees only itself and the tokens before it.
        """
        memory_SD = x_TD if memory_SD is None else memory_SD
        q_THK = self.project_query(x_TD)
        k_SHK, _ = self.project_memory(memory_SD)
        scores_HTS = q_THK.float().transpose(0, 1) @ k_SHK.float().permute(1, 2, 0) * self.head_width**-0.5
        places = _places(len(x_TD), len(memory_SD), x_TD.device)
        scores_HTS = self.adjust_scores(scores_HTS.unsqueeze(0), *places)[0]
        if causal:
            unseen_TS = torch.ones(scores_HTS.shape[1:], dtype=torch.bool, device=x_TD.device).triu(1)
            scores_HTS = scores_HTS.masked_fill(unseen_TS, -torch.inf)
        return torch.softmax(scores_HTS, dim=-1)


def _places(queries: int, keys: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the positions of queries and keys from 0 on, in the shapes that `adjust_scores` takes."""
    queries_Q, keys_X = (torch.arange(count, device=device) for count in (queries, keys))
    return queries_Q[None, None, :, None], keys_X[None, None, None]


def make_attention(config: ModelConfig, role: Role) -> MultiHeadAttention:
    """Make the attention that `config.attention` names."""
    return cast(MultiHeadAttention, ATTENTIONS[config.attention](config, role))


def by_sentence(x_BHK: torch.Tensor, beam_size: int) -> torch.Tensor:
    """Reshape sentence-major hypotheses to (N, H, k, K)."""
    return x_BHK.unflatten(0, (-1, beam_size)).transpose(1, 2)
