"""Time and memory until the first step of a corpus of any size, measured in a separate process.

The plan reads only lengths. Lengths alone therefore simulate a corpus of 100 million pairs. They are drawn from a real
corpus into a memory-mapped file, which is how a data folder keeps them.
"""

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import answer, measure_apart, resident_mib
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.loading.plan import Plan, Position, resolve_budgets

_CHUNK_PAIRS = 2**20


def simulate_lengths(lengths: np.ndarray, pairs: int, file: Path, *, seed: int) -> None:
    """Write the lengths of `pairs` pairs, drawn with replacement."""
    drawn = np.random.default_rng(seed)
    # Copy the lengths into memory first: random draws from a memory map would read it page by page.
    pool = np.array(lengths)
    try:
        simulated = np.lib.format.open_memmap(file, mode="w+", dtype=pool.dtype, shape=(pairs, 2))
        for start in range(0, pairs, _CHUNK_PAIRS):
            chunk = simulated[start : start + _CHUNK_PAIRS]
            chunk[:] = pool[drawn.integers(len(pool), size=len(chunk))]
        simulated.flush()
    except OSError as error:
        needed = pairs * 2 * pool.itemsize / 2**20
        raise UserError(
            f"{file} cannot be written ({error.strerror}): {needed:,.0f} MiB are needed, set TMPDIR to a folder with "
            "more room or lower --pairs"
        ) from None


def measure_first_step(file: Path, batch: BatchConfig, *, pairs_per_shard: int, seed: int) -> dict[str, float]:
    """Measure `seconds`, `peak_mib` and `before_mib` of a process that plans the first step.

    Pages of the memory-mapped lengths count as resident, although the system may reclaim them at any time.
    """
    request = {
        "file": str(file),
        "batch": dataclasses.asdict(batch),
        "pairs_per_shard": pairs_per_shard,
        "seed": seed,
    }
    return measure_apart(__name__, request, failure="planning the first step failed", remedy="lower --pairs")


def plan_first_step(request: dict[str, Any]) -> dict[str, float]:
    """Open the lengths, find the pairs that fit no pack, plan one step, and measure this process."""
    before = resident_mib("VmRSS")
    started = time.perf_counter()
    batch = BatchConfig(**request["batch"])
    lengths = np.load(request["file"], mmap_mode="r", allow_pickle=False)
    starts = np.append(np.arange(0, len(lengths), request["pairs_per_shard"]), len(lengths))
    source_tokens, target_tokens = (int(total) for total in lengths[:_CHUNK_PAIRS].sum(axis=0, dtype=np.int64))
    budgets = resolve_budgets(batch, source_tokens=source_tokens, target_tokens=target_tokens)
    plan = Plan(lengths, starts, budgets=budgets, window_shards=batch.window_shards, seed=request["seed"])
    next(plan.steps(Position(), batch.packs_per_step))
    return {
        "seconds": time.perf_counter() - started,
        "peak_mib": resident_mib("VmHWM"),
        "before_mib": before,
    }


if __name__ == "__main__":
    answer(plan_first_step)
