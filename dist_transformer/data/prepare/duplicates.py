"""Exact duplicates: pairs that occur more than once, and training pairs that are also validation pairs.

A pair is identified by a 64-bit key of its ids, so texts with the same normalised form are equal. Two different pairs
have the same key with a probability of 2^-64: among a billion pairs, 0.03 false matches are expected.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import TokenLists
from dist_transformer.data.prepare.ingest import Chunk, pair_hash
from dist_transformer.data.prepare.work_dir import Work

# Keys in memory at once: 64 MB, and twice as much while they are sorted.
_KEYS_AT_ONCE = 8_000_000
# Purposes of `pair_hash` for a token and its place, and for a whole row. Its other purposes are numbered from 1.
_SOURCE, _TARGET, _ROW = 101, 102, 103


def pair_keys(source: TokenLists, target: TokenLists) -> np.ndarray:
    """Compute the key of each pair, uint64: a hash of the ids and places of both sides."""
    return pair_hash(_row_sums(source, _SOURCE) + _row_sums(target, _TARGET), 0, _ROW)


def _row_sums(rows: TokenLists, purpose: int) -> np.ndarray:
    """Sum the hashes of (id, place) over each row, modulo 2^64."""
    lengths = rows.lengths.astype(np.int64)
    tokens = rows.values[rows.offsets[0] : rows.offsets[-1]].astype(np.uint64)
    edges = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(len(tokens)) - np.repeat(edges[:-1], lengths)
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum(pair_hash(tokens << np.uint64(32) | places.astype(np.uint64), 0, purpose), out=sums[1:])
    # A difference is right even if the sums have overflowed.
    return sums[edges[1:]] - sums[edges[:-1]]


def write_keys(work: Work, chunk: Chunk, keys: np.ndarray) -> None:
    """Write the keys of the kept pairs of a chunk, sorted."""
    shards.write_batch(chunk.keys(work), {"key": pa.array(np.sort(keys))})


def count_repeats(work: Work, chunks: Sequence[Chunk], pairs: int) -> int:
    """Count the training pairs that exactly repeat another one, in memory that does not grow with their number."""
    parts, repeats = -(-pairs // _KEYS_AT_ONCE), 0
    edges = [part * 2**64 // parts for part in range(parts + 1)]
    for first, after in pairwise(edges):
        found = []
        for chunk in chunks:
            keys = shards.read_batch(chunk.keys(work)).column("key").to_numpy()
            start = np.searchsorted(keys, np.uint64(first))
            stop = np.searchsorted(keys, np.uint64(after - 1), side="right")
            # Copied, because thousands of chunks must not stay mapped.
            found.append(keys[start:stop].copy())
        part = np.sort(np.concatenate(found))
        repeats += int((part[1:] == part[:-1]).sum())
    return repeats
