"""The planner's seconds of communication, compared with those of real steps on links of known rates.

Each node is a network namespace of this machine with one rank of one thread, under gloo. The kernel limits the rate at
which a node sends. Latency is measured, not limited. The model is small and the links are slow, so that the links
determine the time.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import Measure, answer, check_counts, measure_apart
from benchmarks.training.contenders import copy_of
from benchmarks.training.namespaces import limit_link, namespace_nodes, sent_bytes
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import from_plain, to_plain
from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.memory import ZeroSettings, model_sizes
from dist_transformer.cost.speed import communication_seconds, traffic
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import TrainingData, open_training_data
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime import distributed
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.world import World, read_world
from dist_transformer.training.engine.ds_config import load_ds_config
from dist_transformer.training.engine.engine import Engine

STAGES = (0, 1, 2, 3)
_PINGS = 21
# Share of an Ethernet frame that is payload, not a header of Ethernet, IP or TCP.
_PAYLOAD = 1448 / 1514


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LinksBenchmark:
    config: TrainConfig
    ds_configs: Path
    """Folder with `zero0.json` to `zero3.json`."""
    nodes: Sequence[int]
    """Numbers of nodes, each of which is measured."""
    mbits: Sequence[float]
    """Rates of the links in Mbit/s, each of which is measured."""
    steps: int
    """Optimizer steps per measure."""

    def __post_init__(self) -> None:
        check_counts(self, steps=1)
        if min(self.nodes) < 2:
            raise UserError(f"--nodes has {min(self.nodes)}: give numbers of 2 and more")
        if min(self.mbits) <= 0:
            raise UserError(f"--mbits has {min(self.mbits)}: give rates above 0")
        for nodes in self.nodes:
            self.config.batch.accumulation_steps(nodes)


def run_links_benchmark(settings: LinksBenchmark, report: Callable[[str], None]) -> dict[str, Any]:
    """Measure and predict seconds and bytes by number of nodes, rate and stage; bytes are those of one node."""
    cases = []
    for count in settings.nodes:
        request = {
            "config": to_plain(settings.config),
            "ds_configs": str(settings.ds_configs),
            # An engine's first steps differ from later ones. On the fastest link they take little time.
            "mbits": sorted(settings.mbits, reverse=True),
            "steps": settings.steps,
        }
        failure, remedy = f"training on {count} nodes failed", "try `python -m dist_transformer.train`"
        with namespace_nodes(count) as nodes:
            found: Any = measure_apart(__name__, request, failure=failure, remedy=remedy, nodes=nodes)
        cases += [_beside_prediction(settings, case) for case in found["cases"]]
        report(f"{count} nodes")
    return {
        "unit": "seconds per step that nothing overlapped, and bytes that one node sends per step",
        "backend": "gloo",
        "precision": settings.config.arithmetic,
        "payload_share_of_a_frame": _PAYLOAD,
        "steps": settings.steps,
        "cases": cases,
    }


def _beside_prediction(settings: LinksBenchmark, case: dict[str, Any]) -> dict[str, Any]:
    config, nodes = settings.config, case["nodes"]
    vocab_size = DataFolder.open(config.corpora.data[0]).index.vocab_size
    zero = ZeroSettings.from_ds_config(load_ds_config(settings.ds_configs / f"zero{case['stage']}.json"))
    sizes = model_sizes(dataclasses.replace(config.model, vocab_size=vocab_size), zero)
    accumulation = config.batch.accumulation_steps(nodes)
    sent = traffic(zero, sizes, precision=config.arithmetic, accumulation=accumulation, backend="gloo")
    seconds = communication_seconds(
        zero,
        sizes=sizes,
        gpus_per_node=1,
        nodes=nodes,
        # One rank per node: there are no links inside a node.
        link_gb_per_second=float("inf"),
        network_gbit=_PAYLOAD * case["mbit"] / 1000,
        precision=config.arithmetic,
        accumulation=accumulation,
        backend="gloo",
        network_latency=case["latency_seconds"],
    )
    measured = Measure(tuple(case.pop("seconds")))
    return {
        **case,
        "micro_batches": accumulation,
        "parameters": sizes.parameters,
        "measured_seconds": measured.to_json(),
        "predicted_seconds": seconds,
        "predicted_to_measured": seconds / measured.median,
        "predicted_bytes": sent.bytes * (nodes - 1) / nodes,
    }


def links_table(figures: dict[str, Any]) -> str:
    lines = ["nodes  Mbit/s  ZeRO   measured s (lowest to highest)   predicted s   ratio   MB sent   predicted"]
    for case in figures["cases"]:
        seconds = case["measured_seconds"]
        spread = f"{seconds['median']:.3f} ({seconds['lowest']:.3f}–{seconds['highest']:.3f})"
        bytes_of = [f"{case[name] / 1e6:{width}.2f}" for name, width in (("measured_bytes", 7), ("predicted_bytes", 9))]
        lines.append(
            f"{case['nodes']:>5}  {case['mbit']:>6g}  {case['stage']:>4}   {spread:30}   "
            f"{case['predicted_seconds']:11.3f}   {case['predicted_to_measured']:5.2f}   {'   '.join(bytes_of)}"
        )
    return "\n".join(lines)


def _train(request: dict[str, Any]) -> dict[str, Any]:
    config, world = from_plain(TrainConfig, request["config"], "request"), read_world()
    with process_group(world, single=True):
        torch.set_num_threads(1)
        data = open_training_data(config.corpora, config.batch, seed=config.seed)
        vocab_size = data.first.index.vocab_size
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=vocab_size))
        torch.manual_seed(config.seed)
        model, cases = Transformer(config.model), []
        for stage in STAGES:
            ds_config = load_ds_config(Path(request["ds_configs"]) / f"zero{stage}.json")
            engine = Engine(copy_of(model), config, ds_config, world_size=world.size)
            steps = _steps(engine, data, config, world)
            # ZeRO-3 records in the first step which parameters are needed when.
            next(steps)
            for mbit in request["mbits"]:
                limit_link(mbit)
                latency = _latency(world)
                waited, sent = zip(*(next(steps) for _ in range(request["steps"])), strict=True)
                of_ranks = distributed.gather_objects((waited, sent))
                cases.append(
                    {
                        "nodes": world.size,
                        "mbit": mbit,
                        "stage": stage,
                        "latency_seconds": latency,
                        # The last rank to enter a collective waits only for the links.
                        "seconds": [
                            min(of_step) for of_step in zip(*(of_rank[0] for of_rank in of_ranks), strict=True)
                        ],
                        "measured_bytes": statistics.mean(statistics.median(of_rank[1]) for of_rank in of_ranks),
                    }
                )
    return {"cases": cases}


def _steps(engine: Engine, data: TrainingData, config: TrainConfig, world: World) -> Iterator[tuple[float, int]]:
    """Train, and yield for each step the seconds that this rank waited for collectives and the bytes that it sent."""
    for step in data.plan.steps(data.plan.start(), config.batch.packs_per_step):
        micro_batches = data.collator.micro_batches(step, rank=world.rank, world_size=world.size)
        distributed.barrier()
        waited, sent = engine.waited_seconds, sent_bytes()
        for micro in micro_batches:
            engine.forward_backward(micro.batch, step_tokens=step.target_tokens)
            engine.end_micro_batch()
        waited = engine.waited_seconds - waited
        # This rank may have received everything before its last bytes are sent. The barrier waits for them.
        distributed.barrier()
        yield waited, sent_bytes() - sent


def _latency(world: World) -> float:
    """Measure the seconds of one message: a ring of n ranks sums a number with 2 (n - 1) consecutive messages."""
    seconds = []
    for _ in range(_PINGS):
        started = time.monotonic()
        distributed.all_reduce_sum(torch.zeros(1))
        seconds.append(time.monotonic() - started)
    return statistics.median(seconds) / (2 * (world.size - 1))


if __name__ == "__main__":
    answer(_train)
