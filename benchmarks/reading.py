"""What planning, reading and building cost the processes of one node of a large cluster.

The processes are real and share a data folder as in training. Only the rest of the cluster is simulated: each builds
the micro-batches of its rank in a world of the given size, and the other nodes, which do the same, are not there.
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
from dist_transformer.data.loading.plan import Step
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world

# Target tokens per second of 128 GPUs that train `base` at 400,000 each.
CLUSTER_SPEED = 51_200_000
# Steps that are drawn and built together.
_BLOCK = 4
_REMEDY = "lower --times"


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
    """An epoch on one process and on all of the node; `report` gets a line now and then."""
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as scratch:
        folder = Path(scratch) / "data"
        report(f"the corpus {settings.times} times")
        index = repeat_corpus(DataFolder.open(settings.data), folder, settings.times)
        found = {}
        for ranks in sorted({1, settings.ranks}):
            report(f"an epoch on {ranks} process(es)")
            request = {
                "data": str(folder),
                "packs_per_step": settings.packs_per_step,
                "world": settings.world,
                "seed": settings.seed,
            }
            values = measure_apart(__name__, request, ranks=ranks, failure="reading failed", remedy=_REMEDY)
            found[str(ranks)] = {**values, **_shares(values)}
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
    """What was measured, in at most 80 characters a line."""
    lines = [f"CPU of a process, in % of a core, at {figures['cluster_speed']:,} target tokens/s"]
    lines += [
        f"{'processes':>10} {'first plans':>12} {'reads':>8} {'others':>8} {'mean':>8} {'MB read':>9} {'MiB, node':>10}"
    ]
    for ranks, found in figures["processes"].items():
        lines.append(
            f"{ranks:>10} {100 * found['planning_share']:12.1f} {100 * found['reading_share']:8.1f} "
            f"{100 * found['following_share']:8.2f} {100 * found['mean_share']:8.2f} "
            f"{found['node_bytes_read'] / 1e6:9,.0f} {found['node_mib']:10,.0f}"
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


def read_epoch(request: dict[str, Any]) -> dict[str, float]:
    """What each process does: draw the steps of an epoch, and build its own micro-batches of them."""
    batch = BatchConfig(packs_per_step=request["packs_per_step"], window_shards=8)
    world = read_world()
    with process_group(world, device_name="cpu"):
        sharing = Sharing(skip=False, timeout_minutes=5.0)
        read_before = _bytes_read()
        clock = _Clock(sharing)
        data = sharing.load(DataConfig(data=(request["data"],)), batch, seed=request["seed"])
        # Libraries load parts of themselves at the first shard: half a second, once per process.
        data.folders[0].valid.read(0)
        data = data.at_once(max(1, batch.packs_per_step // request["world"]))
        draw = sharing.draw_from(
            itertools.takewhile(lambda step: step.epoch == 0, data.plan.steps(data.plan.start(), batch.packs_per_step))
        )
        steps = target_tokens = 0
        built, began, memory = 0.0, time.thread_time(), 0.0
        while block := draw(_BLOCK):
            started = time.thread_time()
            data.collator.micro_batches_of(block, rank=world.rank, world_size=request["world"])
            data.collator.pairs.forget_past()
            built += time.thread_time() - started
            steps += len(block)
            target_tokens += _target_tokens(block)
            memory = max(memory, _proportional_mib()) if steps % (25 * _BLOCK) == 0 else memory
        drawn = time.thread_time() - began - built
        mine = {
            "drawing_seconds": drawn - clock.reading,
            "reading_seconds": clock.reading,
            "building_seconds": built,
            "mib": max(memory, _proportional_mib()),
            "bytes_read": float(_bytes_read() - read_before),
        }
        everyone = distributed.gather_objects(mine)
        sharing.close()
    first, others = everyone[0], everyone[1:] or everyone
    return {
        "steps": steps,
        "target_tokens": target_tokens,
        "planning_seconds": first["drawing_seconds"],
        "reading_seconds": first["reading_seconds"],
        "following_seconds": float(np.mean([rank["drawing_seconds"] for rank in others])) if len(everyone) > 1 else 0.0,
        "building_seconds": float(np.mean([rank["building_seconds"] for rank in everyone])),
        "ranks": len(everyone),
        "node_mib": sum(rank["mib"] for rank in everyone),
        "node_bytes_read": sum(rank["bytes_read"] for rank in everyone),
    }


class _Clock:
    """CPU seconds that reading and verifying take, within planning."""

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
    """Of a core, at the speed of the cluster; the mean is per process of the node, building left out."""
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


def _target_tokens(block: list[Step]) -> int:
    return sum(step.target_tokens for step in block)


def _bytes_read() -> int:
    """Bytes that this process has asked the system for, from files and sockets."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar:"))


def _proportional_mib() -> float:
    """Memory of this process; what several share counts in equal parts."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


if __name__ == "__main__":
    answer(read_epoch)
