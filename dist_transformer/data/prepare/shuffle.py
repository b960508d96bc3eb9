"""The last stage: pairs are assigned to shards by their hash, so that a corpus sorted by domain is well shuffled.

Shard i of n holds the pairs with hashes from i · 2^64 / n up to the start of the next shard, in order of hash. The ids
of a chunk are sorted by hash, so its pairs for several neighbouring shards are contiguous. A task writes several such
shards.

A large corpus has thousands of chunks and of tasks, and their product is millions of opened files. Passes before the
last one therefore merge files: a group of them is cut into a few ranges of hashes, and a task writes one range of a
group as one sorted file. No file is opened more than `_OPENS` times.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dist_transformer.base.files import remove
from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import ShardInfo, TokenLists
from dist_transformer.data.prepare.ingest import Chunk
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress

# The tokens of a task are in memory together, up to three times: 64 million ids are 128 MB. Few tasks of the last pass
# mean few passes; merges need not be as large.
_TOKENS_AT_ONCE, _MERGED_AT_ONCE = 64_000_000, 16_000_000
# Maximum number of tasks that open a file.
_OPENS = 10
# Minimum number of tasks (if there are as many shards): more than the cores of a machine, so that all have work.
_LEAST_TASKS = 64

_Sides = Sequence[TokenLists]
"""Sources and targets of the same pairs."""
_Pairs = tuple[np.ndarray, Sequence[_Sides]]
"""Hashes, and the sides of each segmentation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Range:
    """Shards from `first` up to `stop`, and the names of the files in the work folder that hold their pairs."""

    first: int
    stop: int
    files: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """Task that writes the pairs of a range as one file, sorted by hash."""

    work: Work
    pairs: _Range
    count: int
    """Total number of shards."""
    name: str

    def run(self, progress: Progress) -> int:
        parts = [_read(self.work, name, self.pairs, self.count) for name in self.pairs.files]
        order, segmentations = _merged(parts)
        write_sorted(self.work.folder / _file(self.name), order, segmentations)
        progress(len(order))
        return len(order)


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteShards:
    """Task that writes neighbouring shards, in every segmentation. Its result is their infos; empty without pairs."""

    work: Work
    pairs: _Range
    count: int
    """Total number of shards."""

    @property
    def name(self) -> str:
        return f"shards-{self.pairs.first:07}"

    def run(self, progress: Progress) -> list[list[dict[str, Any]]]:
        parts = [_read(self.work, name, self.pairs, self.count) for name in self.pairs.files]
        written: list[list[dict[str, Any]]] = []
        for shard in range(self.pairs.first, self.pairs.stop):
            order, segmentations = _merged([_cut(part, shard, shard + 1, self.count) for part in parts])
            infos = [
                shards.write_shard(shard_path(self.work, shard, number), *sides)
                for number, sides in enumerate(segmentations)
                if len(order)  # there may be none if shards have few pairs
            ]
            written.append(list(map(dataclasses.asdict, infos)))
            progress(1)
        return written


def write_shards(
    runner: TaskRunner, chunks: Sequence[Chunk], pairs: int, tokens: int, pairs_per_shard: int
) -> list[list[ShardInfo]]:
    """Write all training shards to the work folder; return the infos of each one's segmentations, none without pairs.

    Collective: every rank must call it.
    """
    count = -(-pairs // pairs_per_shard)
    at_once = max(1, min(_TOKENS_AT_ONCE * count // max(1, tokens), count // _LEAST_TASKS))
    files = [chunk.ids(runner.work).name for chunk in chunks]
    passes, ranges = plan_passes(files, count, at_once=at_once, tokens=tokens)
    for number, merges in enumerate(passes):
        tasks = [
            Merge(work=runner.work, pairs=merge, count=count, name=_merge_name(number, index))
            for index, merge in enumerate(merges)
        ]
        runner.run("merge", tasks, lambda *_: None)
        # All ranks have finished the pass, so its inputs are read no more.
        runner.ranks.lead(partial(_remove, runner.work, merges))
    last = [
        WriteShards(
            work=runner.work,
            pairs=_Range(first=first, stop=min(first + at_once, whole.stop), files=whole.files),
            count=count,
        )
        for whole in ranges
        for first in range(whole.first, whole.stop, at_once)
    ]
    written: dict[int, list[list[dict[str, Any]]]] = {}
    sizes = [task.pairs.stop - task.pairs.first for task in last]
    runner.run("write", last, written.__setitem__, unit="shard", sizes=sizes)
    for others in runner.ranks.gather(list(written.items())):
        written.update(others)
    infos = itertools.chain.from_iterable(written[task] for task in range(len(last)))
    return [[ShardInfo(**info) for info in shard] for shard in infos]


def plan_passes(
    files: Sequence[str], count: int, *, at_once: int, tokens: int
) -> tuple[list[list[_Range]], list[_Range]]:
    """Plan the merges before the last pass.

    Args:
        files: names of the chunks' files.
        count: number of shards.
        at_once: shards of a task of the last pass.
        tokens: tokens of all files together.

    Returns:
        The merges of each pass, and the ranges of the last pass with their files. Files of the merges are named by
        their pass and their place in it.
    """
    passes: list[list[_Range]] = []
    ranges = [_Range(first=0, stop=count, files=tuple(files))]
    tokens_per_file = tokens / max(1, len(files))
    while (tasks := max(-(-(whole.stop - whole.first) // at_once) for whole in ranges)) > _OPENS:
        parts = _root(tasks)
        together = max(1, int(_MERGED_AT_ONCE * parts / max(1.0, tokens_per_file)))
        tokens_per_file *= min(together, max(len(whole.files) for whole in ranges)) / parts
        merges: list[_Range] = []
        cut: list[_Range] = []
        for whole in ranges:
            size = -(-(whole.stop - whole.first) // at_once)
            edges = [min(whole.first + at_once * (size * part // parts), whole.stop) for part in range(parts)]
            for first, stop in itertools.pairwise([*edges, whole.stop]):
                if first < stop:
                    groups = [whole.files[i : i + together] for i in range(0, len(whole.files), together)]
                    names = [_file(_merge_name(len(passes), len(merges) + index)) for index in range(len(groups))]
                    merges += [_Range(first=first, stop=stop, files=group) for group in groups]
                    cut.append(_Range(first=first, stop=stop, files=tuple(names)))
        passes.append(merges)
        ranges = cut
    return passes, ranges


def _remove(work: Work, merges: Sequence[_Range]) -> None:
    for name in {name for merge in merges for name in merge.files}:
        remove(work.folder / name)


def _root(tasks: int) -> int:
    """Return the smallest number of parts, at most `_OPENS`, that needs no more passes than `_OPENS` parts do."""
    passes = next(n for n in itertools.count(1) if _OPENS**n >= tasks)
    return next(parts for parts in itertools.count(2) if parts**passes >= tasks)


def _merge_name(number: int, index: int) -> str:
    return f"merge-{number}-{index:06}"


def _file(name: str) -> str:
    return f"{name}.arrow"


def _read(work: Work, name: str, pairs: _Range, count: int) -> _Pairs:
    """Copy the pairs of a range from a file, because thousands of files must not stay mapped."""
    order, *columns = shards.read_batch(work.folder / name).columns
    sides = list(map(TokenLists.from_arrow, columns))
    whole = (order.to_numpy(), list(zip(sides[::2], sides[1::2], strict=True)))
    cut, segmentations = _cut(whole, pairs.first, pairs.stop, count)
    return cut.copy(), [[TokenLists.concatenate([side]) for side in sides] for sides in segmentations]


def write_sorted(path: Path, order: np.ndarray, segmentations: Sequence[_Sides]) -> None:
    """Write pairs that are sorted by their hashes.

    Args:
        segmentations: sources and targets of each segmentation.
    """
    columns = {
        f"{name}-{number}": side.to_arrow()
        for number, sides in enumerate(segmentations)
        for name, side in zip(("src", "tgt"), sides, strict=True)
    }
    shards.write_batch(path, {"order": pa.array(order), **columns})


def _merged(parts: Sequence[_Pairs]) -> _Pairs:
    """Join pairs in the order of their hashes."""
    order = np.concatenate([part[0] for part in parts])
    by_order = np.argsort(order)
    merged = [
        [TokenLists.concatenate(list(lists)).take(by_order) for lists in zip(*sides, strict=True)]
        for sides in zip(*(part[1] for part in parts), strict=True)
    ]
    return order[by_order], merged


def shard_path(work: Work, shard: int, segmentation: int) -> Path:
    return work.folder / f"shard-{shard:07}-{segmentation}.arrow"


def _edge(shard: int, count: int) -> int:
    return -(-(shard << 64) // count)


def _cut(part: _Pairs, first: int, stop: int, count: int) -> _Pairs:
    """Select the pairs of shards `first` up to `stop`."""
    order, segmentations = part
    start, end = (_place(order, _edge(shard, count)) for shard in (first, stop))
    return order[start:end], [[side.slice(start, end) for side in sides] for sides in segmentations]


def _place(order: np.ndarray, edge: int) -> int:
    return len(order) if edge == 2**64 else int(np.searchsorted(order, np.uint64(edge)))
