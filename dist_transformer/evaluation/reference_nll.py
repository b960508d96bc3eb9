"""How probable a model finds the references of a test set."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from dist_transformer.data.tokenizer import BOS_ID, EOS_ID, Tokenizer
from dist_transformer.model.transformer import Transformer
from dist_transformer.packed import PackedBatch, PackedTokens, pack_side
from dist_transformer.runtime.distributed import gather_objects, rank, world_size

# Target tokens that are computed at a time.
_BATCH_TOKENS = 4096

IdPair = tuple[list[int], list[int]]


@torch.no_grad()
def reference_nll(
    model: Transformer, tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], *, tags: Sequence[str] = ()
) -> float:
    """-log p a target token, `</s>` included, not smoothed: the same number on every rank. A collective.

    Pairs that are too long for the model's positions are left out; not a number when none is left.

    Args:
        model: in evaluation mode.
        pairs: source and reference lines, the same on every rank.
        tags: in front of every source.
    """
    longest = model.config.max_positions - 1
    sources, targets = (tokenizer.encode_batch(list(side)) for side in zip(*pairs, strict=True))
    prefix = tokenizer.tag_ids(tags)
    tagged = [[*prefix, *source] for source in sources]
    ids = [pair for pair in zip(tagged, targets, strict=True) if max(map(len, pair)) <= longest]
    share = list(_batches(ids))[rank() :: world_size()]
    sums = [model(_packed(batch).to(model.embedding.device), 0.0) for batch in share]
    found = [(float(part.nll), int(part.tokens)) for part in sums]
    everything = [values for part in gather_objects(found) for values in part]
    tokens = sum(count for _, count in everything)
    # A sum that does not depend on the order, and so not on the number of ranks.
    return math.fsum(nll for nll, _ in everything) / tokens if tokens else math.nan


def _batches(ids: list[IdPair]) -> Iterator[list[IdPair]]:
    """Pairs of similar length together."""
    batch: list[IdPair] = []
    tokens = 0
    for pair in sorted(ids, key=lambda pair: (len(pair[1]), len(pair[0]))):
        size = max(map(len, pair)) + 1
        if batch and tokens + size > _BATCH_TOKENS:
            yield batch
            batch, tokens = [], 0
        batch.append(pair)
        tokens += size
    if batch:
        yield batch


def _packed(batch: list[IdPair]) -> PackedBatch:
    sources = [[*source, EOS_ID] for source, _ in batch]
    labels = [[*target, EOS_ID] for _, target in batch]
    return PackedBatch(
        source=_side(sources),
        target=_side([[BOS_ID, *target] for _, target in batch]),
        labels_T=torch.from_numpy(np.concatenate(labels).astype(np.int64)),
    )


def _side(sentences: list[list[int]]) -> PackedTokens:
    lengths = np.array([len(sentence) for sentence in sentences])
    tokens = np.concatenate(sentences).astype(np.int64)
    return pack_side(tokens, lengths, size=len(tokens), offset_count=len(sentences) + 1, max_length=int(lengths.max()))
