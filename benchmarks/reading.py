"""Cost of planning, reading and building for the processes of one node of a large cluster.

The processes are real and share a data folder, as in training. Only the rest of the cluster is simulated: each process
builds the micro-batches of its rank in a world of the given size. The other nodes would do the same work.
"""

import dataclasses
import itertools
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import answer, check_counts, measure_apart
from dist_transformer.config.settings import BatchConfig, DataConfig
from dist_transformer.data.folder.format import DataIndex, ShardInfo, write_index, write_split
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.prefetch import steps_of_a_block
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world

# Target tokens per second of 128 GPUs that train `base` at 400,000 each.
CLUSTER_SPEED = 51_200_000
_REMEDY = "lower --times"
# In the second epoch, shards come from memory if --memory-gib is large enough to hold them.
_EPOCHS = ("first epoch", "later epochs")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadingBenchmark:
    data: Path
    """Data folder."""
    ranks: int = 8
    """Processes of the node."""
    world: int = 128
    """Processes of the simulated cluster."""
    times: int = 20
    """Copies of the corpus in the corpus that is read."""
    packs_per_step: int = 1024
    seed: int = 1

    def __post_init__(self) -> None:
        check_counts(self, ranks=1, world=self.ranks, times=1, packs_per_step=self.world)


def run_reading_benchmark(settings: ReadingBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure two epochs on one process and on all processes of the node; `report` gets lines of progress."""
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as scratch:
        folder = Path(scratch) / "data"
        report(f"writing the corpus {settings.times} times")
        index = repeat_corpus(DataFolder.open(settings.data), folder, settings.times)
        found = {}
        for ranks in sorted({1, settings.ranks}):
            report(f"two epochs on {ranks} process(es)")
            request = {
                "data": str(folder),
                "packs_per_step": settings.packs_per_step,
                "world": settings.world,
                "seed": settings.seed,
            }
            epochs: dict[str, Any] = measure_apart(
                __name__, request, ranks=ranks, failure="reading failed", remedy=_REMEDY
            )
            found[str(ranks)] = {name: {**values, **_shares(values)} for name, values in epochs.items()}
    return {
        **{name: value for name, value in dataclasses.asdict(settings).items() if name != "data"},
        "max_target_tokens": BatchConfig().max_target_tokens,
        "cluster_speed": CLUSTER_SPEED,
        "pairs": index.train.pairs,
        "shard_bytes": sum(shard.bytes for shard in index.train.shards),
        "lengths_bytes": 4 * index.train.pairs,
        "processes": found,
    }


def reading_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    lines = [f"CPU per process, in % of a core, at {figures['cluster_speed']:,} target tokens/s"]
    lines += [
        f"{'':12} {'processes':>10} {'first plans':>12} {'reads':>7} {'others':>7} {'mean':>7} {'MB read':>8} "
        f"{'MiB, node':>10}"
    ]
    for ranks, epochs in figures["processes"].items():
        for name, found in epochs.items():
            lines.append(
                f"{name:12} {ranks:>10} {100 * found['planning_share']:12.1f} {100 * found['reading_share']:7.1f} "
                f"{100 * found['following_share']:7.2f} {100 * found['mean_share']:7.2f} "
                f"{found['node_bytes_read'] / 1e6:8,.0f} {found['node_mib']:10,.0f}"
            )
    return "\n".join(lines)


def repeat_corpus(folder: DataFolder, out: Path, times: int) -> DataIndex:
    """Write a data folder that holds the training pairs of another one several times."""
    shutil.copytree(folder.path, out, ignore=shutil.ignore_patterns("train-*"))
    shards: list[ShardInfo] = []
    for number, shard in enumerate(itertools.chain.from_iterable([folder.index.train.shards] * times)):
        shards.append(dataclasses.replace(shard, file=f"train-{number:05}.arrow"))
        shutil.copyfile(folder.path / shard.file, out / shards[-1].file)
    index = dataclasses.replace(folder.index, train=write_split(out, shards))
    write_index(out, index)
    return index


def read_epochs(request: dict[str, Any]) -> dict[str, Any]:
    """Draw the steps of two epochs in each process, and build its own micro-batches of them."""
    batch = BatchConfig(packs_per_step=request["packs_per_step"], window_shards=8)
    world = read_world()
    with process_group(world, device_name="cpu"):
        sharing = Sharing(skip=False, timeout_minutes=5.0)
        clock = _Clock(sharing)
        bytes_before = _bytes_read()
        data = sharing.load(DataConfig(data=(request["data"],)), batch, seed=request["seed"])
        # At the first shard, libraries import more modules: this takes half a second, once per process.
        data.folders[0].valid.read(0)
        data = data.at_once(max(1, batch.packs_per_step // request["world"]))
        draw = sharing.draw_from(
            itertools.takewhile(
                lambda step: step.epoch < len(_EPOCHS), data.plan.steps(data.plan.start(), batch.packs_per_step)
            )
        )
        epochs = [_Epoch() for _ in _EPOCHS]
        block_steps, current = 1, epochs[0]
        while True:
            began, reading_before = time.thread_time(), clock.reading
            if not (block := draw(block_steps)):
                break
            block_steps = steps_of_a_block(block, request["world"])
            # A block that ends an epoch and begins the next one counts for the first of them.
            current = epochs[block[0].epoch]
            drawn = time.thread_time()
            data.collator.micro_batches_of(block, rank=world.rank, world_size=request["world"])
            built = time.thread_time()
            data.collator.pairs.forget_past()
            current.reading_seconds += clock.reading - reading_before
            current.drawing_seconds += time.thread_time() - built + drawn - began - (clock.reading - reading_before)
            current.building_seconds += built - drawn
            current.steps += len(block)
            current.target_tokens += sum(step.target_tokens for step in block)
            current.bytes_read, bytes_before = current.bytes_read + _bytes_read() - bytes_before, _bytes_read()
            if current.steps % 100 < len(block):
                current.mib = max(current.mib, _proportional_mib())
        everyone = distributed.gather_objects([dataclasses.asdict(epoch) for epoch in epochs])
        sharing.close()
    return {name: _of_node(list(ranks)) for name, ranks in zip(_EPOCHS, zip(*everyone, strict=True), strict=True)}


@dataclass(kw_only=True, slots=True)
class _Epoch:
    """CPU seconds of a process in an epoch, with its steps, memory and bytes read."""

    steps: int = 0
    target_tokens: int = 0
    drawing_seconds: float = 0.0
    reading_seconds: float = 0.0
    building_seconds: float = 0.0
    mib: float = 0.0
    bytes_read: int = 0


def _of_node(ranks: list[dict[str, float]]) -> dict[str, float]:
    first, others = ranks[0], ranks[1:]
    return {
        "steps": first["steps"],
        "target_tokens": first["target_tokens"],
        "planning_seconds": first["drawing_seconds"],
        "reading_seconds": first["reading_seconds"],
        "following_seconds": float(np.mean([rank["drawing_seconds"] for rank in others])) if others else 0.0,
        "building_seconds": float(np.mean([rank["building_seconds"] for rank in ranks])),
        "ranks": len(ranks),
        "node_mib": sum(rank["mib"] for rank in ranks),
        "node_bytes_read": sum(rank["bytes_read"] for rank in ranks),
    }


class _Clock:
    """Measure the CPU seconds of reading and verifying, which are part of planning."""

    def __init__(self, sharing: Sharing) -> None:
        self.reading, self._admit = 0.0, sharing.admit
        sharing.admit = self._measured  # type: ignore[method-assign, assignment]

    def _measured(self, *arguments: Any) -> Any:
        started = time.thread_time()
        try:
            return self._admit(*arguments)
        finally:
            self.reading += time.thread_time() - started


def _shares(found: dict[str, float]) -> dict[str, float]:
    """Convert CPU seconds to shares of a core at the cluster's speed; the mean per process excludes building."""
    per_second = CLUSTER_SPEED / found["target_tokens"]
    planning, reading, following = (
        found[f"{name}_seconds"] * per_second for name in ("planning", "reading", "following")
    )
    ranks = found["ranks"]
    return {
        "planning_share": planning,
        "reading_share": reading,
        "following_share": following,
        "mean_share": (planning + reading + (ranks - 1) * following) / ranks,
        "building_share": found["building_seconds"] * per_second,
    }


def _bytes_read() -> int:
    """Count the bytes that this process has read from files and sockets."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _proportional_mib() -> float:
    """Measure the memory of this process; memory that several processes share counts in equal parts."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    answer(read_epochs)
