"""The last stage: pairs are assigned to shards by their hash, so that a corpus sorted by domain is well shuffled.

Shard i of n holds the pairs with hashes from i · 2^64 / n up to the start of the next shard, in order of hash. The
files of the chunks are Parquet, sorted by hash, so that Arrow reads only the row groups of a range from each. A task
writes several neighbouring shards.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from dist_transformer.base.files import whole_path
from dist_transformer.data.folder import format as shards
from dist_transformer.data.folder.format import ShardInfo, TokenLists
from dist_transformer.data.prepare.ingest import Chunk
from dist_transformer.data.prepare.tasks import TaskRunner
from dist_transformer.data.prepare.work_dir import Work
from dist_transformer.data.prepare.worker_pool import Progress

# The tokens of a task are in memory together, up to three times: 64 million ids are 128 MB.
_TOKENS_AT_ONCE = 64_000_000
# Minimum number of tasks (if there are as many shards): more than the cores of a machine, so that all have work.
_LEAST_TASKS = 64
_ROW_GROUP = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteShards:
    """Task that writes neighbouring shards, in every segmentation. Its result is their infos; empty without pairs."""

    work: Work
    files: tuple[str, ...]
    first: int
    stop: int
    count: int
    """Total number of shards."""

    @property
    def name(self) -> str:
        return f"shards-{self.first:07}"

    def run(self, progress: Progress) -> list[list[dict[str, Any]]]:
        # The last hash of the shard before the first one, and of each shard.
        before, *lasts = (max(0, -(-(shard << 64) // self.count) - 1) for shard in range(self.first, self.stop + 1))
        chunks = ds.dataset([str(self.work.folder / file) for file in self.files], format="parquet")
        order, low, high = pc.field("order"), pa.scalar(before, pa.uint64()), pa.scalar(lasts[-1], pa.uint64())
        wanted = (order > low if self.first else order >= low) & (order <= high)
        pairs = chunks.to_table(filter=wanted, use_threads=False).sort_by("order")
        # As uint64: numpy would compare other integers with these as floats.
        places = np.searchsorted(pairs["order"].to_numpy(), np.array(lasts, dtype=np.uint64), "right")
        written: list[list[dict[str, Any]]] = []
        for shard, (start, stop) in enumerate(itertools.pairwise((0, *places)), self.first):
            columns = pairs.slice(start, stop - start).combine_chunks().columns[1:] if stop > start else ()
            # Copied, because a slice has the values of all rows.
            sides = [TokenLists.concatenate([TokenLists.from_arrow(column.combine_chunks())]) for column in columns]
            infos = [
                shards.write_shard(shard_path(self.work, shard, number), *both)
                for number, both in enumerate(zip(sides[::2], sides[1::2], strict=True))
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
    files = tuple(chunk.ids(runner.work).name for chunk in chunks)
    tasks = [
        WriteShards(work=runner.work, files=files, first=first, stop=min(first + at_once, count), count=count)
        for first in range(0, count, at_once)
    ]
    written: dict[int, list[list[dict[str, Any]]]] = {}
    sizes = [task.stop - task.first for task in tasks]
    runner.run("write", tasks, written.__setitem__, unit="shard", sizes=sizes)
    for others in runner.ranks.gather(list(written.items())):
        written.update(others)
    infos = itertools.chain.from_iterable(written[task] for task in range(len(tasks)))
    return [[ShardInfo(**info) for info in shard] for shard in infos]


def write_sorted(path: Path, order: np.ndarray, segmentations: Sequence[Sequence[TokenLists]]) -> None:
    """Write pairs that are sorted by their hashes.

    Args:
        segmentations: sources and targets of each segmentation.
    """
    columns = {
        f"{name}-{number}": side.to_arrow()
        for number, sides in enumerate(segmentations)
        for name, side in zip(("src", "tgt"), sides, strict=True)
    }
    with whole_path(path) as file:
        pq.write_table(pa.table({"order": order, **columns}), file, row_group_size=_ROW_GROUP, compression="none")


def shard_path(work: Work, shard: int, segmentation: int) -> Path:
    return work.folder / f"shard-{shard:07}-{segmentation}.arrow"
