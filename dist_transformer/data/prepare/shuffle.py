"""The last stage: pairs are assigned to shards by their hash, so that a corpus sorted by domain is well shuffled.

Shard i of n holds the pairs with hashes from i · 2^64 / n up to the start of the next shard, in order of hash. The
files of the chunks are sorted by hash, so that only the rows of a range are read from each. A task writes several
neighbouring shards.

Exact duplicates are counted in the same way, by a 64-bit key of the ids of a pair, so texts with the same normalised
form are equal. Two different pairs have the same key with a probability of 2^-64: among a billion pairs, 0.03 false
matches are expected.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import ShardInfo, TokenLists
from dist_transformer.data.prepare.ingest import Chunk, pair_hash
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress

# The tokens of a task are in memory together, up to three times: 64 million ids are 128 MB.
_TOKENS_AT_ONCE = 64_000_000
# Minimum number of tasks (if there are as many shards): more than the cores of a machine, so that all have work.
_LEAST_TASKS = 64
# Keys in memory at once: 64 MB, and twice as much while they are sorted.
_KEYS_AT_ONCE = 8_000_000
# Purposes of `pair_hash` for a token and its place, and for a whole row. Its other purposes are numbered from 1.
_SOURCE, _TARGET, _ROW = 101, 102, 103


def write_shards(
    runner: TaskRunner, chunks: Sequence[Chunk], pairs: int, tokens: int, pairs_per_shard: int, segmentations: int
) -> list[list[ShardInfo]]:
    """Write all training shards to the work folder; return the infos of each one's segmentations, none without pairs.

    Collective: every rank must call it.
    """
    count = -(-pairs // pairs_per_shard)
    at_once = max(1, min(_TOKENS_AT_ONCE * count // max(1, tokens), count // _LEAST_TASKS))
    paths = [chunk.ids(runner.work) for chunk in chunks]
    parts = [range(first, min(first + at_once, count)) for first in range(0, count, at_once)]
    tasks = {
        f"shards-{part.start:07}": functools.partial(_write, runner.work, paths, part, count, segmentations)
        for part in parts
    }
    written = runner.results("write", tasks, unit="shard", sizes=[len(part) for part in parts])
    return [[ShardInfo(**info) for info in shard] for shard in itertools.chain.from_iterable(written)]


def _write(
    work: Work, paths: Sequence[Path], part: range, count: int, segmentations: int, progress: Progress
) -> list[list[dict[str, Any]]]:
    """Write neighbouring shards, in every segmentation; return their infos, none without pairs.

    Args:
        paths: files of all chunks.
        count: total number of shards.
    """
    edges = [-(-(shard << 64) // count) for shard in range(part.start, part.stop + 1)]
    read = [_rows_between(path, edges[0], edges[-1] - 1) for path in paths]
    order = np.concatenate([hashes for hashes, _ in read])
    columns = [TokenLists.concatenate(column) for column in zip(*(lists for _, lists in read), strict=True)]
    # Only repeats that are dropped have the same hash; the first of the text is written.
    _, by_hash = np.unique(order, return_index=True)
    # As uint64: numpy would compare other integers with these as floats.
    inner = np.searchsorted(order[by_hash], np.array(edges[1:-1], dtype=np.uint64))
    written: list[list[dict[str, Any]]] = []
    for shard, rows in zip(part, np.split(by_hash, inner), strict=True):
        lists = [column.take(rows) for column in columns] if len(rows) else []
        size = len(lists) // segmentations
        infos = [
            shards.write_shard(shard_path(work, shard, start // size), *lists[start : start + size])
            for start in range(0, len(lists), size or 1)
        ]
        written.append(list(map(dataclasses.asdict, infos)))
        progress(1)
    return written


def _rows_between(path: Path, first: int, last: int) -> tuple[np.ndarray, list[TokenLists]]:
    """Read the rows of a chunk whose first column, by which it is sorted, is in a range."""
    column, *others = shards.read_batch(path).columns
    numbers = column.to_numpy()
    start = int(np.searchsorted(numbers, np.uint64(first)))
    stop = int(np.searchsorted(numbers, np.uint64(last), side="right"))
    lists = (TokenLists.from_arrow(column).slice(start, stop) for column in others)
    # Copied, because thousands of chunks must not stay mapped.
    return numbers[start:stop].copy(), [TokenLists.concatenate([rows]) for rows in lists]


def shard_path(work: Work, shard: int, segmentation: int) -> Path:
    return work.folder / f"shard-{shard:07}-{segmentation}.arrow"


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


def count_repeats(paths: Sequence[Path], pairs: int) -> int:
    """Count the pairs that exactly repeat another one, in memory that does not grow with their number.

    Args:
        paths: files of their keys.
    """
    parts, repeats = max(1, -(-pairs // _KEYS_AT_ONCE)), 0
    for first, after in itertools.pairwise(part * 2**64 // parts for part in range(parts + 1)):
        keys = np.sort(np.concatenate([_rows_between(path, first, after - 1)[0] for path in paths]))
        repeats += int((keys[1:] == keys[:-1]).sum())
    return repeats
