"""Triton kernels: attention over short packed sentences, one program per sentence and head; and hashes of pairs.

FlashAttention computes in tiles of 128 × 128, of which a sentence of 13 to 29 tokens fills little; the tiles here are
32 × 32. No two programs add to the same memory, so a gradient is the same in every run. The gradients of queries, keys
and values are written in the layout of their projection.

With S = Q K^T / sqrt(K), P = softmax(S), O = P V:

    dV = P^T dO    dP = dO V^T    dS = P ∘ (dP - rowsum(dO ∘ O))    dQ = dS K / sqrt(K)    dK = dS^T Q / sqrt(K)

Names are those of `packed_attention`. `sums` holds the logarithm to base 2 of the sum of each softmax, shape (H, T),
fp32. Row strides are in elements; the heads of a row are contiguous. This module needs Triton, which is part of torch
for CUDA.
"""

# Triton's types are not Python's.
# mypy: allow-untyped-defs

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = tl.constexpr(-1e30)
# Those of `run.ledger`.
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MIX_2 = tl.constexpr(0x94D049BB133111EB - 2**64)


@triton.jit
def _places(first, start, head, stride, D: tl.constexpr, B: tl.constexpr):
    """Compute the places of rows `start` to `start + B` of one head of a sentence, shape (B, D)."""
    rows = (first + start + tl.arange(0, B)).to(tl.int64)
    return rows[:, None] * stride + head * D + tl.arange(0, D)[None]


@triton.jit
def _load(pointer, first, count, start, head, stride, D: tl.constexpr, B: tl.constexpr):
    """Load the rows at `_places`; zeros after the sentence's end."""
    inside = (start + tl.arange(0, B) < count)[:, None]
    return tl.load(pointer + _places(first, start, head, stride, D, B), mask=inside, other=0.0)


@triton.jit
def _store(pointer, rows, first, count, start, head, stride, D: tl.constexpr, B: tl.constexpr):
    inside = (start + tl.arange(0, B) < count)[:, None]
    tl.store(pointer + _places(first, start, head, stride, D, B), rows.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _visible(start_q, start_k, queries, keys, CAUSAL: tl.constexpr, B: tl.constexpr):
    """Return which query of a tile sees which key, shape (B, B)."""
    rows, columns = (start_q + tl.arange(0, B))[:, None], (start_k + tl.arange(0, B))[None]
    seen = (rows < queries) & (columns < keys)
    if CAUSAL:
        seen = seen & (columns <= rows)
    return seen


@triton.jit
def attend(
    q,
    k,
    v,
    out,
    sums,
    query_offsets,
    key_offsets,
    scale,
    tokens,
    q_stride,
    kv_stride,
    out_stride,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    sentence, head = tl.program_id(0), tl.program_id(1)
    q0, k0 = tl.load(query_offsets + sentence), tl.load(key_offsets + sentence)
    queries = tl.load(query_offsets + sentence + 1) - q0
    keys = tl.load(key_offsets + sentence + 1) - k0
    for m in range(0, queries, B):
        q_BD = _load(q, q0, queries, m, head, q_stride, D, B)
        highest_B = tl.full([B], _LOWEST, tl.float32)
        total_B = tl.zeros([B], tl.float32)
        mixed_BD = tl.zeros([B, D], tl.float32)
        end = tl.minimum(keys, m + B) if CAUSAL else keys
        for n in range(0, end, B):
            k_BD = _load(k, k0, keys, n, head, kv_stride, D, B)
            v_BD = _load(v, k0, keys, n, head, kv_stride, D, B)
            seen_BB = _visible(m, n, queries, keys, CAUSAL, B)
            scores_BB = tl.where(seen_BB, tl.dot(q_BD, tl.trans(k_BD)) * (scale * _LOG2_E), _LOWEST)
            above_B = tl.maximum(highest_B, tl.max(scores_BB, 1))
            p_BB = tl.where(seen_BB, tl.exp2(scores_BB - above_B[:, None]), 0.0)
            shrink_B = tl.exp2(highest_B - above_B)
            total_B = total_B * shrink_B + tl.sum(p_BB, 1)
            mixed_BD = mixed_BD * shrink_B[:, None] + tl.dot(p_BB.to(v_BD.dtype), v_BD)
            highest_B = above_B
        # A dummy sentence may have no keys; its sum and its output are then 0.
        some_B = tl.where(total_B > 0, total_B, 1.0)
        _store(out, mixed_BD / some_B[:, None], q0, queries, m, head, out_stride, D, B)
        rows = m + tl.arange(0, B)
        log_sums_B = tl.where(total_B > 0, highest_B + tl.log2(some_B), 0.0)
        tl.store(sums + head * tokens + q0 + rows, log_sums_B, mask=rows < queries)


@triton.jit
def _score_gradient(
    q_BD,
    k_BD,
    v_BD,
    out,
    grad_out,
    sums,
    q0,
    queries,
    keys,
    m,
    n,
    head,
    scale,
    tokens,
    out_stride,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    """Compute P and dS of a tile in fp32, and load its dO."""
    g_BD = _load(grad_out, q0, queries, m, head, out_stride, D, B)
    o_BD = _load(out, q0, queries, m, head, out_stride, D, B)
    rows = m + tl.arange(0, B)
    log_sums_B = tl.load(sums + head * tokens + q0 + rows, mask=rows < queries, other=0.0)
    scores_BB = tl.dot(q_BD, tl.trans(k_BD)) * (scale * _LOG2_E)
    seen_BB = _visible(m, n, queries, keys, CAUSAL, B)
    p_BB = tl.where(seen_BB, tl.exp2(scores_BB - log_sums_B[:, None]), 0.0)
    own_B = tl.sum(g_BD.to(tl.float32) * o_BD.to(tl.float32), 1)
    return p_BB, p_BB * (tl.dot(g_BD, tl.trans(v_BD)) - own_B[:, None]) * scale, g_BD


@triton.jit
def return_gradients(
    q,
    k,
    v,
    out,
    sums,
    grad_out,
    grad_q,
    grad_k,
    grad_v,
    query_offsets,
    key_offsets,
    scale,
    tokens,
    q_stride,
    kv_stride,
    out_stride,
    grad_q_stride,
    grad_kv_stride,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    B: tl.constexpr,
):
    sentence, head = tl.program_id(0), tl.program_id(1)
    q0, k0 = tl.load(query_offsets + sentence), tl.load(key_offsets + sentence)
    queries = tl.load(query_offsets + sentence + 1) - q0
    keys = tl.load(key_offsets + sentence + 1) - k0
    for n in range(0, keys, B):
        k_BD = _load(k, k0, keys, n, head, kv_stride, D, B)
        v_BD = _load(v, k0, keys, n, head, kv_stride, D, B)
        dk_BD = tl.zeros([B, D], tl.float32)
        dv_BD = tl.zeros([B, D], tl.float32)
        for m in range(n if CAUSAL else 0, queries, B):
            q_BD = _load(q, q0, queries, m, head, q_stride, D, B)
            p_BB, ds_BB, g_BD = _score_gradient(
                q_BD,
                k_BD,
                v_BD,
                out,
                grad_out,
                sums,
                q0,
                queries,
                keys,
                m,
                n,
                head,
                scale,
                tokens,
                out_stride,
                CAUSAL,
                D,
                B,
            )
            dv_BD += tl.dot(tl.trans(p_BB.to(q_BD.dtype)), g_BD)
            dk_BD += tl.dot(tl.trans(ds_BB.to(q_BD.dtype)), q_BD)
            if keys <= B:
                # This tile has all keys.
                _store(grad_q, tl.dot(ds_BB.to(q_BD.dtype), k_BD), q0, queries, m, head, grad_q_stride, D, B)
        _store(grad_k, dk_BD, k0, keys, n, head, grad_kv_stride, D, B)
        _store(grad_v, dv_BD, k0, keys, n, head, grad_kv_stride, D, B)
    if (keys > B) | (keys == 0):
        # A second pass for dQ, which several iterations would otherwise have to add up in memory.
        for m in range(0, queries, B):
            q_BD = _load(q, q0, queries, m, head, q_stride, D, B)
            dq_BD = tl.zeros([B, D], tl.float32)
            end = tl.minimum(keys, m + B) if CAUSAL else keys
            for n in range(0, end, B):
                k_BD = _load(k, k0, keys, n, head, kv_stride, D, B)
                v_BD = _load(v, k0, keys, n, head, kv_stride, D, B)
                _, ds_BB, _ = _score_gradient(
                    q_BD,
                    k_BD,
                    v_BD,
                    out,
                    grad_out,
                    sums,
                    q0,
                    queries,
                    keys,
                    m,
                    n,
                    head,
                    scale,
                    tokens,
                    out_stride,
                    CAUSAL,
                    D,
                    B,
                )
                dq_BD += tl.dot(ds_BB.to(q_BD.dtype), k_BD)
            _store(grad_q, dq_BD, q0, queries, m, head, grad_q_stride, D, B)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


@triton.jit
def hash_pairs(
    source,
    source_positions,
    source_offsets,
    target,
    target_positions,
    target_offsets,
    labels,
    total,
    B: tl.constexpr,
):
    """Add the hash of each pair to `total`, int64, as `run.ledger` defines it: one program per pair.

    Sums of integers do not depend on their order.
    """
    pair = tl.program_id(0)
    source_B, target_B = tl.zeros([B], tl.int64), tl.zeros([B], tl.int64)
    end = tl.load(source_offsets + pair + 1)
    for start in range(tl.load(source_offsets + pair), end, B):
        at = start + tl.arange(0, B)
        tokens_B = tl.load(source + at, mask=at < end, other=0)
        positions_B = tl.load(source_positions + at, mask=at < end, other=0)
        source_B += tl.where(at < end, _mix((tokens_B + 1) * _GAMMA + positions_B * 2), 0)
    end = tl.load(target_offsets + pair + 1)
    for start in range(tl.load(target_offsets + pair), end, B):
        at = start + tl.arange(0, B)
        tokens_B = tl.load(target + at, mask=at < end, other=0)
        positions_B = tl.load(target_positions + at, mask=at < end, other=0)
        labels_B = tl.load(labels + at, mask=at < end, other=0)
        hashed_B = _mix((tokens_B + 1) * _GAMMA + positions_B * 2 + 1) + _mix(labels_B * _GAMMA)
        target_B += tl.where(at < end, hashed_B, 0)
    tl.atomic_add(total, _mix(tl.sum(source_B) * _GAMMA + _mix(tl.sum(target_B))))
