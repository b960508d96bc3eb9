"""What training on several ranks of this machine costs beside one: the same steps by each, in turns.

Each measure is a launch of its own, one thread a rank, so that one rank has as much of the machine as each of several.
What a step of several ranks takes beyond its share of the step of one is communication, waiting for the slowest, and
memory that all use at once: an upper bound of what communication costs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from dist_transformer.benchmarks.measure import Measure, answer, measure_apart
from dist_transformer.benchmarks.training import open_field
from dist_transformer.config import TrainConfig, from_plain, to_plain
from dist_transformer.distributed import process_group, read_world
from dist_transformer.errors import UserError

_WARM_UP_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RanksBenchmark:
    config: TrainConfig
    """Its steps must have packs for all ranks, equally many."""
    ranks: int
    steps: int
    """Optimizer steps of each measure."""
    rounds: int

    def __post_init__(self) -> None:
        for name, least in (("ranks", 2), ("steps", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise UserError(f"--{name} is {getattr(self, name)}: give {least} or more")
        packs = self.config.batch.packs_per_step
        if packs % (self.ranks * self.config.batch.packs_per_micro_batch):
            raise UserError(
                f"--batch.packs-per-step is {packs}, which {self.ranks} ranks cannot share evenly: give a multiple"
            )


def run_ranks_benchmark(settings: RanksBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    """Seconds of a step on one rank and on several, by the wall's clock, and the share of it that is not work."""
    seconds: dict[int, list[float]] = {1: [], settings.ranks: []}
    for number in range(settings.rounds):
        # There and back: a machine that slows down favours nobody.
        for ranks in (1, settings.ranks) if number % 2 == 0 else (settings.ranks, 1):
            seconds[ranks].append(step_seconds(settings.config, ranks=ranks, steps=settings.steps))
        report(f"round {number + 1} of {settings.rounds}")
    pairs = zip(seconds[1], seconds[settings.ranks], strict=True)
    overhead = Measure(tuple(1 - one / (settings.ranks * several) for one, several in pairs))
    batch = settings.config.batch
    return {
        "unit": "seconds of a step",
        "precision": settings.config.precision,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "packs_per_step": batch.packs_per_step,
        "max_target_tokens": batch.max_target_tokens,
        "one_rank": Measure(tuple(seconds[1])).to_json(),
        "several_ranks": Measure(tuple(seconds[settings.ranks])).to_json(),
        "overhead_percent": Measure(tuple(100 * share for share in overhead.values)).to_json(),
    }


def step_seconds(config: TrainConfig, *, ranks: int, steps: int) -> float:
    """Seconds of an optimizer step, mean of `steps`, in a launch of its own."""
    request = {"config": to_plain(config), "steps": steps}
    failure = f"training on {ranks} rank(s) failed"
    return measure_apart(
        __name__, request, failure=failure, remedy="try `python -m dist_transformer.train`", ranks=ranks
    )["seconds"]


def ranks_table(figures: dict[str, Any]) -> str:
    one, several, overhead = (figures[name] for name in ("one_rank", "several_ranks", "overhead_percent"))
    step = f"{figures['packs_per_step']} packs of {figures['max_target_tokens']:,} tokens"
    return "\n".join([
        f"seconds of a step, {step}; medians (lowest to highest)",
        f"1 rank   {one['median']:8.3f} ({one['lowest']:.3f}–{one['highest']:.3f})",
        f"{figures['ranks']} ranks  {several['median']:8.3f} ({several['lowest']:.3f}–{several['highest']:.3f})",
        f"of which beyond their share of the work: {overhead['median']:.1f}% "
        f"({overhead['lowest']:.1f}–{overhead['highest']:.1f}%)",
    ])  # fmt: skip


def _train(request: dict[str, Any]) -> dict[str, float]:
    config, world = from_plain(TrainConfig, request["config"], "request"), read_world()
    with process_group(world, single=True) as device:
        torch.set_num_threads(1)
        (contender,) = open_field(config, world, device).pick(["ours"]).values()
        contender.train(_WARM_UP_STEPS)
        stretch = contender.train(request["steps"])
    return {"seconds": stretch.seconds["wall"] / request["steps"]}


if __name__ == "__main__":
    answer(_train)
