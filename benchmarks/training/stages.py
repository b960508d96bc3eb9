"""Comparison of ZeRO stages on several ranks of this machine: CPU time, bytes sent and memory of the same steps.

All stages train in one launch per round, one thread per rank, at several numbers of micro-batches per step.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.measure import Measure, answer, check_counts, measure_apart
from benchmarks.training.contenders import copy_of
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.data.loading.plan import Step
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.engine import Engine
from dist_transformer.training.engine.memory import state_bytes

STAGES = (0, 1, 2, 3)
# Passes around a ring of a collective's largest tensor: an all-reduce scatters the sums, then gathers them.
_PASSES = {"all_reduce": 2, "reduce_scatter_tensor": 1, "all_gather_into_tensor": 1}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StagesBenchmark:
    config: TrainConfig
    ds_configs: Path
    """Folder with `zero0.json` to `zero3.json`."""
    ranks: int
    micro_batches: Sequence[int]
    """Numbers of micro-batches per rank and step, each of which is measured."""
    steps: int
    """Optimizer steps per measure."""
    rounds: int

    def __post_init__(self) -> None:
        check_counts(self, ranks=2, steps=1, rounds=1)
        if min(self.micro_batches) < 1:
            raise UserError(f"--micro-batches has {min(self.micro_batches)}: give numbers above 0")


def run_stages_benchmark(settings: StagesBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure each number of micro-batches under each stage; bytes are those of one rank, per parameter."""
    request = {
        "config": to_plain(settings.config),
        "ds_configs": str(settings.ds_configs),
        "micro_batches": list(settings.micro_batches),
        "steps": settings.steps,
    }
    rounds: list[dict[str, Any]] = []
    for number in range(settings.rounds):
        failure, remedy = f"training on {settings.ranks} ranks failed", "try `python -m dist_transformer.train`"
        rounds.append(measure_apart(__name__, request, failure=failure, remedy=remedy, ranks=settings.ranks))
        report(f"round {number + 1} of {settings.rounds}")
    cases = {}
    for name, first in rounds[0].items():
        seconds = Measure(tuple(found[name]["cpu_seconds"] for found in rounds))
        cases[name] = {**first, "cpu_seconds": seconds.to_json()}
    return {
        "unit": "CPU seconds per step of one rank; bytes per parameter",
        "precision": settings.config.arithmetic,
        "ranks": settings.ranks,
        "steps": settings.steps,
        "max_target_tokens": settings.config.batch.max_target_tokens,
        "cases": cases,
    }


def stages_table(figures: dict[str, Any]) -> str:
    lines = ["micro-batches  stage   CPU s per step (lowest to highest)   sent   states at most"]
    for name, case in figures["cases"].items():
        micro_batches, stage = name.split("/")
        seconds = case["cpu_seconds"]
        spread = f"{seconds['median']:.3f} ({seconds['lowest']:.3f}–{seconds['highest']:.3f})"
        lines.append(f"{micro_batches:>13}  {stage:>5}   {spread:34}  {case['sent']:5.1f}  {case['state']:6.2f}")
    return "\n".join([*lines, "sent, states: bytes per parameter"])


@contextmanager
def counted_collectives() -> Iterator[list[int]]:
    """Count the bytes that collectives send around a ring of many ranks. The result is a list of one number.

    Enter it before DeepSpeed is imported, because DeepSpeed keeps references to some of the functions.
    """
    sent = [0]

    def counting(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            tensors = [value for value in (*arguments, *named.values()) if isinstance(value, torch.Tensor)]
            sent[0] += _PASSES[name] * max(tensor.nbytes for tensor in tensors)
            return collective(*arguments, **named)

        return count

    before = {name: getattr(dist, name) for name in _PASSES}
    try:
        for name, collective in before.items():
            setattr(dist, name, counting(name, collective))
        yield sent
    finally:
        for name, collective in before.items():
            setattr(dist, name, collective)


def _train(request: dict[str, Any]) -> dict[str, Any]:
    config, world = from_plain(TrainConfig, request["config"], "request"), read_world()
    with counted_collectives() as sent, process_group(world, single=True):
        torch.set_num_threads(1)
        data = open_training_data(config.corpora, config.batch, seed=config.seed)
        vocab_size = data.first.index.vocab_size
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
        torch.manual_seed(config.seed)
        model, found = Transformer(config.model), {}
        for micro_batches in request["micro_batches"]:
            packs = micro_batches * world.size * config.batch.packs_at_once
            batch = dataclasses.replace(config.batch, packs_per_step=packs)
            for stage in STAGES:
                ds_config = load_ds_config(Path(request["ds_configs"]) / f"zero{stage}.json")
                case = dataclasses.replace(config, batch=batch)
                engine = Engine(copy_of(model), case, ds_config, world_size=world.size)
                found[f"{micro_batches}/{stage}"] = _measure(engine, data, case, world, request["steps"], sent)
    return found


def _measure(
    engine: Engine, data: TrainingData, config: TrainConfig, world: World, steps: int, sent: list[int]
) -> dict[str, float]:
    planned = data.plan.steps(data.plan.start(), config.batch.packs_per_step)
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
    most = 0

    def take(step: Step, *, weigh: bool) -> None:
        nonlocal most
        for micro in data.collator.micro_batches(step, rank=world.rank, world_size=world.size):
            engine.forward_backward(micro.batch, step_tokens=step.target_tokens)
            if weigh:
                most = max(most, state_bytes(engine))
            engine.end_micro_batch()

    take(next(planned), weigh=True)
    before, started = sent[0], time.process_time()
    for _ in range(steps):
        take(next(planned), weigh=False)
    seconds = (time.process_time() - started) / steps
    return {"cpu_seconds": seconds, "sent": (sent[0] - before) / steps / parameters, "state": most / parameters}


if __name__ == "__main__":
    answer(_train)
