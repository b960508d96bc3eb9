"""The last stage: pairs are assigned to shards by their hash, so that a corpus sorted by domain is well shuffled.

Shard i of n holds the pairs with hashes from i · 2^64 / n up to the start of the next shard, in order of hash. The ids
of a chunk are sorted by hash, so its pairs for several neighbouring shards are contiguous. A task writes several such
shards and opens each chunk once.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import ShardInfo, TokenLists
from dist_transformer.data.prepare.ingest import Chunk
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress

# The shards of a task are in memory together: 64 million ids are 128 MB. Every task opens every chunk once.
_TOKENS_AT_ONCE = 64_000_000
# Minimum number of tasks (if there are as many shards): more than the cores of a machine, so that all have work.
_LEAST_TASKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteShards:
    """Task that writes neighbouring shards. Its result is their infos, None for a shard without pairs."""

    work: Work
    chunks: tuple[Chunk, ...]
    first: int
    stop: int
    count: int
    """Total number of shards."""

    @property
    def name(self) -> str:
        return f"shards-{self.first:07}"

    def run(self, progress: Progress) -> list[dict[str, Any] | None]:
        parts = [self._part(chunk) for chunk in self.chunks]
        written: list[dict[str, Any] | None] = []
        for shard in range(self.first, self.stop):
            slices = [_cut(part, _edge(shard, self.count), _edge(shard + 1, self.count)) for part in parts]
            orders, sources, targets = zip(*slices, strict=True)
            by_order = np.argsort(np.concatenate(orders))
            if len(by_order) == 0:  # only if shards have few pairs
                written.append(None)
            else:
                source, target = (TokenLists.concatenate(side).take(by_order) for side in (sources, targets))
                info = shards.write_shard(shard_path(self.work, shard), source, target)
                written.append(dataclasses.asdict(info))
            progress(1)
        return written

    def _part(self, chunk: Chunk) -> tuple[np.ndarray, TokenLists, TokenLists]:
        """Copy the pairs of these shards from a chunk, because thousands of chunks must not stay mapped."""
        batch = shards.read_batch(chunk.ids(self.work))
        whole = (
            batch.column("order").to_numpy(),
            TokenLists.from_arrow(batch.column("src")),
            TokenLists.from_arrow(batch.column("tgt")),
        )
        order, *sides = _cut(whole, _edge(self.first, self.count), _edge(self.stop, self.count))
        source, target = (TokenLists.concatenate([side]) for side in sides)
        return order.copy(), source, target


def write_shards(
    runner: TaskRunner, chunks: Sequence[Chunk], pairs: int, tokens: int, pairs_per_shard: int
) -> list[ShardInfo | None]:
    """Write all training shards to the work folder; return their infos, None for a shard without pairs.

    Collective: every rank must call it.
    """
    count = -(-pairs // pairs_per_shard)
    at_once = max(1, min(_TOKENS_AT_ONCE * count // max(1, tokens), count // _LEAST_TASKS))
    starts = range(0, count, at_once)
    tasks = [
        WriteShards(
            work=runner.work,
            chunks=tuple(chunks),
            first=start,
            stop=min(start + at_once, count),
            count=count,
        )
        for start in starts
    ]
    written: dict[int, list[dict[str, Any] | None]] = {}
    runner.run("write", tasks, written.__setitem__, unit="shard", sizes=[task.stop - task.first for task in tasks])
    for others in runner.ranks.gather(dict(written)):
        written.update(others)
    infos = itertools.chain.from_iterable(written[task] for task in range(len(tasks)))
    return [None if info is None else ShardInfo(**info) for info in infos]


def shard_path(work: Work, shard: int) -> Path:
    return work.folder / f"shard-{shard:07}.arrow"


def _edge(shard: int, count: int) -> int:
    return -(-(shard << 64) // count)


def _cut(
    part: tuple[np.ndarray, TokenLists, TokenLists], start: int, stop: int
) -> tuple[np.ndarray, TokenLists, TokenLists]:
    """Select the pairs whose hash is in [start, stop)."""
    order, source, target = part
    first = int(np.searchsorted(order, np.uint64(start)))
    last = len(order) if stop == 2**64 else int(np.searchsorted(order, np.uint64(stop)))
    return order[first:last], source.slice(first, last), target.slice(first, last)
