"""Planning of corpora that do not fit this machine: an epoch of simulated lengths through the real code.

Lengths drawn from a real corpus simulate a corpus of a billion pairs. A separate process plans its epoch step by step:
every pair must appear once, and any number of ranks must train on the same sentences. Tokens are simulated too, because
only their identity matters to the ledger (the hashes of what each step trained on).
"""

import dataclasses
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.first_step import simulate_lengths
from benchmarks.measure import answer, check_counts, measure_apart, resident_mib
from dist_transformer.config.settings import BatchConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Memory
from dist_transformer.data.loading.collate import Collator
from dist_transformer.data.loading.plan import Plan, Position, Step, resolve_budgets
from dist_transformer.run.ledger import batch_hash

_SAMPLE = 2**20
_FIRST_WORD, _WORDS = 4, 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeBenchmark:
    data: Path
    """Data folder from whose lengths the simulated ones are drawn."""
    pairs: int
    worlds: tuple[int, ...]
    """Numbers of ranks that must train on the same sentences."""
    pairs_per_shard: int
    packs_per_step: int = 1024
    compared_steps: int = 3
    """Steps whose tensors are built for all ranks of each world."""
    seed: int = 1

    def __post_init__(self) -> None:
        check_counts(self, pairs=1, pairs_per_shard=1, packs_per_step=max(self.worlds), compared_steps=1)


class SimulatedPairs:
    """Pairs whose words are computed from pair id and position. Replaces a split."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.lengths = lengths
        self.longest = int(lengths[:, 0].max()), int(lengths[:, 1].max())

    def sizes(self, pair_ids: np.ndarray) -> np.ndarray:
        return self.lengths[pair_ids].T.astype(np.int64, order="C")

    def copy_tokens(self, pair_ids: np.ndarray, source: np.ndarray, target: np.ndarray, places: np.ndarray) -> None:
        for out, counts, starts in zip((source, target), self.sizes(pair_ids) - 1, places, strict=True):
            steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            words = (np.repeat(pair_ids, counts) * 31 + steps) % _WORDS + _FIRST_WORD
            out[np.repeat(starts, counts) + steps] = words

    def memory(self, pair_ids: np.ndarray) -> Memory:
        """Compute the ids of the given pairs, each in a shard of its own."""
        ids = np.unique(pair_ids)
        counts = self.sizes(ids) - 1
        ends = np.cumsum(counts, axis=1)
        source, target = (np.empty(total, dtype=np.uint32) for total in ends[:, -1].tolist())
        self.copy_tokens(ids, source, target, ends - counts)
        offsets = [np.append(0, stops).astype(np.int32) for stops in ends]
        table = np.empty((len(ids), 8), dtype=np.int64)
        table[:, 0], table[:, 1] = ids, ids + 1
        for side, (values, of_side) in enumerate(zip((source, target), offsets, strict=True)):
            table[:, 2 + 3 * side] = values.ctypes.data
            table[:, 3 + 3 * side] = of_side.ctypes.data + of_side.itemsize * np.arange(len(ids))
            table[:, 4 + 3 * side] = values.itemsize
        return Memory(table, (source, target, *offsets))

    def forget_past(self) -> None:
        pass


def run_size_benchmark(settings: SizeBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    folder = DataFolder.open(settings.data)
    with tempfile.TemporaryDirectory(prefix="dist_transformer-benchmark-") as scratch:
        file = Path(scratch) / "lengths.npy"
        report(f"lengths of {settings.pairs:,} pairs")
        simulate_lengths(folder.train.lengths, settings.pairs, file, seed=settings.seed)
        report("an epoch")
        request = {**dataclasses.asdict(settings), "data": "", "file": str(file)}
        found = measure_apart(__name__, request, failure="planning failed", remedy="lower --pairs")
    return {name: value for name, value in request.items() if name not in ("data", "file")} | found


def size_table(figures: dict[str, Any]) -> str:
    """Format the figures in lines of at most 80 characters."""
    return "\n".join(
        [
            f"{figures['pairs']:,} pairs in {figures['shards']:,.0f} shards, {figures['steps']:,.0f} steps of an epoch",
            f"start: {figures['start_seconds']:.1f} s; first step after {figures['first_step_seconds']:.2f} s more",
            f"planning: {1e6 * figures['planning_seconds'] / figures['steps']:,.0f} CPU µs per step, "
            f"{figures['target_tokens'] / figures['planning_seconds'] / 1e6:,.0f}M target tokens per CPU second",
            f"memory beyond the lengths ({figures['lengths_mib']:,.0f} MiB): {figures['plan_mib']:,.0f} MiB",
            f"each pair once: {bool(figures['each_pair_once'])}; "
            f"the same sentences on {', '.join(map(str, figures['worlds']))} ranks: {bool(figures['ledgers_equal'])}",
        ]
    )


def plan_epoch(request: dict[str, Any]) -> dict[str, float]:
    """Plan an epoch and measure this process."""
    before = resident_mib("VmRSS")
    started = time.perf_counter()
    batch = BatchConfig(packs_per_step=request["packs_per_step"])
    lengths = np.load(request["file"], allow_pickle=False)
    starts = np.append(np.arange(0, len(lengths), request["pairs_per_shard"]), len(lengths))
    source_tokens, target_tokens = (int(total) for total in lengths[:_SAMPLE].sum(axis=0, dtype=np.int64))
    budgets = resolve_budgets(batch, source_tokens=source_tokens, target_tokens=target_tokens)
    plan = Plan(lengths, starts, budgets=budgets, window_shards=batch.window_shards, seed=request["seed"])
    start_seconds = time.perf_counter() - started
    steps = plan.steps(Position(), batch.packs_per_step)
    first_seconds, planning, tokens, pairs, count = 0.0, 0.0, 0, 0, 0
    seen = np.zeros(len(lengths), dtype=np.uint8)
    compared: list[Step] = []
    while True:
        began = time.thread_time()
        step = next(steps)
        if step.epoch > 0:
            break
        planning += time.thread_time() - began
        first_seconds = first_seconds or time.thread_time() - began
        ids = step.packs.pair_ids
        seen[ids] += 1
        count, pairs, tokens = count + 1, pairs + len(ids), tokens + step.target_tokens
        if len(compared) < request["compared_steps"]:
            compared.append(step)
    lengths_mib, seen_mib = lengths.nbytes / 2**20, seen.nbytes / 2**20
    return {
        "shards": float(plan.shards),
        "steps": float(count),
        "target_tokens": float(tokens),
        "skipped_pairs": float(plan.skipped),
        "start_seconds": start_seconds,
        "first_step_seconds": first_seconds,
        "planning_seconds": planning,
        "lengths_mib": lengths_mib,
        "plan_mib": resident_mib("VmHWM") - before - lengths_mib - seen_mib,
        # No pair appears twice, and the counts match: each pair that fits a pack appears once.
        "each_pair_once": float(seen.max() == 1 and pairs + plan.skipped == len(lengths)),
        "ledgers_equal": float(_ledgers_equal(SimulatedPairs(lengths), budgets, compared, request["worlds"])),
    }


def _ledgers_equal(pairs: SimulatedPairs, budgets: Any, steps: list[Step], worlds: list[int]) -> bool:
    """Check that the ledger's hash of what all ranks compute is the same in all worlds."""
    found = []
    for world in (1, *worlds):
        collator = Collator(pairs, budgets, packs_per_micro_batch=max(1, len(steps[0].packs) // world))
        shares = (collator.micro_batches(step, rank=rank, world_size=world) for step in steps for rank in range(world))
        hashes = [torch.stack([batch_hash(micro.batch) for micro in share]).sum() for share in shares]
        found.append([int(total) for total in torch.stack(hashes).view(len(steps), world).sum(dim=1)])
    return all(sums == found[0] for sums in found) and len(set(found[0])) == len(steps)


if __name__ == "__main__":
    answer(plan_epoch)
