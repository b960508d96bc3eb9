"""Cost of training on several ranks of this machine, compared with one rank: the same steps by each, in turns.

Each measure is a separate launch with one thread per rank, so that a rank always has the same part of the machine. The
time of several ranks beyond their share of one rank's step is communication, waiting for the slowest rank, and
contention for memory. Contention also slows processes that do not communicate.
"""

import dataclasses
import statistics
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from benchmarks.measure import Measure, answer, check_counts, measure_apart
from benchmarks.training.field import open_field
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import read_world

_WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RanksBenchmark:
    config: TrainConfig
    """Training settings, whose steps must divide into equally many packs per rank."""
    ranks: int
    steps: int
    """Optimizer steps per measure."""
    rounds: int

    def __post_init__(self) -> None:
        check_counts(self, ranks=2, steps=1, rounds=1)
        packs = self.config.batch.packs_per_step
        if packs % (self.ranks * self.config.batch.packs_at_once):
            raise UserError(
                f"--batch.packs-per-step is {packs}, which {self.ranks} ranks cannot share evenly: give a multiple"
            )


def run_ranks_benchmark(settings: RanksBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure wall seconds per step, the share of them that is not work, and the share of communication and waiting.

    `apart` is the time of as many independent processes as ranks, which run at the same time, each on one rank's share
    of the step. Each of them updates all weights, but a rank of ZeRO updates only its part. The share of communication
    is therefore underestimated by that difference, and the share that is not work is its upper bound.
    """
    ranks, batch = settings.ranks, settings.config.batch
    share = dataclasses.replace(batch, packs_per_step=batch.packs_per_step // ranks)
    apart = dataclasses.replace(settings.config, batch=share)
    measures: dict[str, Callable[[], float]] = {
        "one_rank": lambda: step_seconds(settings.config, ranks=1, steps=settings.steps),
        "apart": lambda: seconds_side_by_side(apart, processes=ranks, steps=settings.steps),
        "several_ranks": lambda: step_seconds(settings.config, ranks=ranks, steps=settings.steps),
    }
    seconds: dict[str, list[float]] = {name: [] for name in measures}
    for number in range(settings.rounds):
        # Every second round runs in reverse order, so that a machine that slows down favours no contender.
        for name in measures if number % 2 == 0 else reversed(measures):
            seconds[name].append(measures[name]())
        report(f"round {number + 1} of {settings.rounds}")
    rounds = list(zip(*seconds.values(), strict=True))
    return {
        "unit": "seconds per step",
        "precision": settings.config.arithmetic,
        "ranks": ranks,
        "steps": settings.steps,
        "packs_per_step": batch.packs_per_step,
        "max_target_tokens": batch.max_target_tokens,
        **{name: Measure(tuple(values)).to_json() for name, values in seconds.items()},
        "overhead_percent": Measure(tuple(100 * (1 - one / ranks / several) for one, _, several in rounds)).to_json(),
        "communication_percent": Measure(tuple(100 * (1 - apart / several) for _, apart, several in rounds)).to_json(),
    }


def seconds_side_by_side(config: TrainConfig, *, processes: int, steps: int) -> float:
    """Measure seconds per step of one-rank processes that train at the same time; return their mean."""
    with ThreadPoolExecutor(processes) as pool:
        started = [pool.submit(step_seconds, config, ranks=1, steps=steps) for _ in range(processes)]
        return statistics.mean(future.result() for future in started)


def step_seconds(config: TrainConfig, *, ranks: int, steps: int) -> float:
    """Measure seconds per optimizer step in a separate launch, as the mean of `steps`."""
    request = {"config": to_plain(config), "steps": steps}
    failure = f"training on {ranks} rank(s) failed"
    return measure_apart(
        __name__, request, failure=failure, remedy="try `python -m dist_transformer.train`", ranks=ranks
    )["seconds"]


def ranks_table(figures: dict[str, Any]) -> str:
    def spread(name: str, form: str) -> str:
        found = figures[name]
        return f"{found['median']:{form}} ({found['lowest']:.3g}–{found['highest']:.3g})"

    ranks, step = figures["ranks"], f"{figures['packs_per_step']} packs of {figures['max_target_tokens']:,} tokens"
    return "\n".join(
        [
            f"seconds per step, {step}; medians (lowest to highest)",
            f"1 rank                        {spread('one_rank', '8.3f')}",
            f"its share, {ranks} processes apart   {spread('apart', '8.3f')}",
            f"{ranks} ranks                       {spread('several_ranks', '8.3f')}",
            f"beyond their share of the work {spread('overhead_percent', '6.1f')}%",
            f"of it communication            {spread('communication_percent', '6.1f')}%",
        ]
    )


def _train(request: dict[str, Any]) -> dict[str, float]:
    config, world = from_plain(TrainConfig, request["config"], "request"), read_world()
    with process_group(world, single=True) as device:
        torch.set_num_threads(1)
        (contender,) = open_field(config, world, device).pick(["ours"]).values()
        contender.train(_WARM_UP_STEPS)
        timing = contender.train(request["steps"])
    return {"seconds": timing.seconds["wall"] / request["steps"]}


if __name__ == "__main__":
    answer(_train)
