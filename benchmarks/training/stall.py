"""Waits for data of training at a given speed, measured with the real loader and steps that only sleep.

A sleep simulates a GPU, which computes without this machine's cores. Data that is ready in time costs nothing. Each
wait for data is counted like `data_stall` of a run.
"""

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.measure import Measured, TrainingPart
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.prefetch import Prefetcher
from dist_transformer.data.loading.sharing import Sharing
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class StallBenchmark(TrainingPart):
    """Waits for data of training at a given speed, for example from an object store."""

    rate: float = 600_000
    """Target tokens per second."""
    seconds: float = 60.0
    """Seconds of training."""

    def measure(self) -> Measured:
        config = self.config()
        figures = {"preset": self.preset, **run_stall_benchmark(self, config)}
        return Measured(
            what="waits for data in a training at a given speed, whose steps only sleep",
            figures=figures,
            table=stall_table(figures),
            seeds=[config.seed],
        )


def run_stall_benchmark(settings: StallBenchmark, config: TrainConfig) -> dict[str, Any]:
    """Measure one rank. The wait for the first step is separate, because nothing can be prefetched before it."""
    with process_group(World(), single=True):
        sharing = Sharing(skip=False, timeout_minutes=30.0)
        started = time.monotonic()
        data = sharing.load(config.corpora, config.batch, seed=config.seed)
        opening = time.monotonic() - started
        steps = data.plan.steps(data.plan.start(), config.batch.packs_per_step)
        draw = sharing.draw_from(steps)
        prefetcher = Prefetcher(draw, data.collator, rank=0, world_size=1, pin=False)
        stalls, tokens, epoch, free_at = [], 0, 0, time.monotonic()
        for step, _, stall in prefetcher:
            stalls.append(stall)
            tokens += step.target_tokens
            epoch = step.epoch
            # A sleep that is too long does not delay the next step, because a GPU would not be delayed either.
            free_at += stall + step.target_tokens / settings.rate
            time.sleep(max(0.0, free_at - time.monotonic()))
            if tokens > settings.seconds * settings.rate:
                break
        sharing.close()
        prefetcher.close()
    first, later = stalls[0], sum(stalls[1:])
    training = tokens / settings.rate
    return {
        "unit": "share of the time that training waits for data, after the first step",
        "target_tokens_per_second": settings.rate,
        "steps": len(stalls),
        "target_tokens": tokens,
        "epochs_begun": epoch + 1,
        "shards": sum(len(folder.index.train.shards) for folder in data.folders),
        "shard_bytes": sum(shard.bytes for folder in data.folders for shard in folder.index.train.shards),
        "training_seconds": training,
        "opening_seconds": opening,
        "first_wait_seconds": first,
        "later_wait_seconds": later,
        "longest_later_wait_seconds": max(stalls[1:], default=0.0),
        "data_stall": later / (training + later),
    }


def stall_table(figures: dict[str, Any]) -> str:
    form = """\
{steps:,} steps of training at {target_tokens_per_second:,.0f} target tokens/s, {epochs_begun} epoch(s), {shards} shards
opening the data         {opening_seconds:8.2f} s
wait for the first step  {first_wait_seconds:8.2f} s
waits after it           {later_wait_seconds:8.2f} s of {training_seconds:.1f} s: data stall {data_stall:.2%}"""
    return form.format_map(figures)
