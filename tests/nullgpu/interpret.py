"""Our kernels in Triton's interpreter: attention against plain products in fp32, and hashes. Prints relative errors.

In fp16, for the interpreter of Triton 3.6 takes bf16 for bits.
"""

import json
import os
from itertools import pairwise

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from dist_transformer.model.packed import PackedBatch, pack_side
from dist_transformer.model.packed_attention import cross_attention, self_attention
from dist_transformer.run.ledger import batch_hash, hash_by_kernel

_HEADS = 2
# One token, none, a tile and one more than it, several tiles.
_QUERIES, _KEYS = [5, 33, 1, 70, 0, 12, 32], [7, 31, 40, 65, 3, 0, 150]


def main() -> dict[str, float]:
    torch.manual_seed(1)
    found = {}
    for width in (16, 64):
        for causal in (False, True):
            name = f"{'causal ' if causal else ''}self-attention, heads of {width}"
            found[name] = self_error(width, causal)
        found[f"cross-attention, heads of {width}"] = cross_error(width)
    return {**found, "hashes that differ": hashes_that_differ()}


def hashes_that_differ() -> int:
    """Count packs whose hash differs from the definition's: of sentences of one token to two tiles, and of none."""
    rng = np.random.default_rng(1)
    packs = []
    for lengths in ([5, 33, 1, 64], [2, 31, 40, 17], [7], []):
        sides = [
            pack_side(rng.integers(4, 2**15, sum(own)), np.array(own), size=160, offset_count=9, max_length=70)
            for own in (lengths, lengths[::-1])
        ]
        packs.append(PackedBatch(source=sides[0], target=sides[1], labels_T=torch.from_numpy(rng.integers(0, 99, 160))))
    return sum(hash_by_kernel(pack).item() != batch_hash(pack).item() for pack in packs)


def self_error(width: int, causal: bool) -> float:
    qkv = torch.randn(sum(_QUERIES), 3, _HEADS, width).half().requires_grad_()
    exact = qkv.detach().float().requires_grad_()
    offsets = offsets_of(_QUERIES)
    wanted = plain(*exact.unbind(1), offsets, offsets, causal)
    return worst(self_attention(qkv, offsets, causal=causal), [qkv], wanted, [exact])


def cross_error(width: int) -> float:
    q, kv = (
        torch.randn(sum(lengths), *sides, _HEADS, width).half().requires_grad_()
        for lengths, sides in ((_QUERIES, ()), (_KEYS, (2,)))
    )
    exact = [x.detach().float().requires_grad_() for x in (q, kv)]
    offsets = offsets_of(_QUERIES), offsets_of(_KEYS)
    wanted = plain(exact[0], *exact[1].unbind(1), *offsets, False)
    return worst(cross_attention(q, kv, *offsets), [q, kv], wanted, exact)


def offsets_of(lengths: list[int]) -> torch.Tensor:
    """Return offsets with the last one repeated, as packs have it."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return torch.tensor([0, *ends, ends[-1]], dtype=torch.int32)


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor,
    causal: bool,
) -> torch.Tensor:
    mixed = []
    for (a, b), (c, d) in zip(pairwise(query_offsets.tolist()), pairwise(key_offsets.tolist()), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q[a:b], k[c:d]) * q.shape[-1] ** -0.5
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c, dtype=torch.bool).triu(1), -torch.inf)
        mixed.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[c:d]))
    return torch.cat(mixed)


def worst(found: torch.Tensor, inputs: list[torch.Tensor], wanted: torch.Tensor, exact: list[torch.Tensor]) -> float:
    """Return the largest error of the output and the gradients."""
    gradient = torch.randn_like(found)
    pairs = [
        (found, wanted),
        *zip(
            torch.autograd.grad(found, inputs, gradient),
            torch.autograd.grad(wanted, exact, gradient.float()),
            strict=True,
        ),
    ]
    return max(((one.float() - other).norm() / other.norm()).item() for one, other in pairs)


if __name__ == "__main__":
    print(json.dumps(main()))
