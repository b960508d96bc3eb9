"""Number of nodes on which a run is fast, by the model of `speed`."""

import dataclasses
from dataclasses import dataclass

from dist_transformer.config.settings import TrainConfig
from dist_transformer.cost.hardware import ENOUGH, MFU, GpuKind
from dist_transformer.cost.memory import ZeroSettings, model_sizes
from dist_transformer.cost.micro_batches import packs_that_fit
from dist_transformer.cost.speed import StepTime, predict_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Machines:
    """Nodes of equal GPUs."""

    gpu: GpuKind
    gpus_per_node: int
    nodes: int
    network_gbit: float | None = None
    """Network of a node, one way; default: that of the GPU maker's server."""
    mfu: float = MFU

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node


def fill_gpus(config: TrainConfig, zero: ZeroSettings, machines: Machines, *, source_budget: int) -> TrainConfig:
    """Set the packs that a GPU computes at once, unless they are set."""
    if config.batch.packs_per_micro_batch is not None:
        return config
    packs = packs_that_fit(
        config,
        zero,
        world_size=machines.world_size,
        source_budget=source_budget,
        memory_bytes=int(machines.gpu.memory_gib * 2**30),
    )
    return dataclasses.replace(config, batch=dataclasses.replace(config.batch, packs_per_micro_batch=packs))


def predict_step_on(config: TrainConfig, zero: ZeroSettings, machines: Machines, *, source_budget: int) -> StepTime:
    """Predict the time of a step of full packs.

    Args:
        config: settings that include the vocabulary size and the packs that a GPU computes at once.
        source_budget: source tokens per pack.
    """
    accumulation = config.batch.accumulation_steps(machines.world_size)
    packs = accumulation * config.batch.packs_at_once
    return predict_step(
        config.model,
        zero,
        machines.gpu,
        sizes=model_sizes(config.model, zero, config.freeze),
        gpus_per_node=machines.gpus_per_node,
        nodes=machines.nodes,
        network_gbit=machines.network_gbit or machines.gpu.node_gbit,
        precision=config.arithmetic,
        accumulation=accumulation,
        source_tokens=packs * source_budget,
        target_tokens=packs * config.batch.max_target_tokens,
        passes=config.optimizer.passes,
        mfu=machines.mfu,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChoice:
    """The best number of nodes, and the stage that suits it."""

    nodes: int
    """Fewest nodes with `ENOUGH` of the best speed."""
    stage: int
    """ZeRO stage: 2, which sends gradients while it computes, with one micro-batch per rank
    and step, otherwise 1, which sends them once per step. The model of `speed` leaves this overlap out."""
    seconds: dict[int, float]
    """Seconds per step by number of nodes. Left out are numbers that leave each rank as many packs as fewer nodes."""


def choose_nodes(config: TrainConfig, zero: ZeroSettings, machines: Machines, *, source_budget: int) -> NodeChoice:
    """Choose among 1 to `machines.nodes` nodes."""
    seconds, accumulation, share = dict[int, float](), dict[int, int](), 0
    for nodes in range(1, machines.nodes + 1):
        some = dataclasses.replace(machines, nodes=nodes)
        packs = -(-config.batch.packs_per_step // some.world_size)
        if packs != share:
            full = fill_gpus(config, zero, some, source_budget=source_budget)
            seconds[nodes] = predict_step_on(full, zero, some, source_budget=source_budget).total
            accumulation[nodes], share = full.batch.accumulation_steps(some.world_size), packs
    best = next(nodes for nodes, time in seconds.items() if ENOUGH * time <= min(seconds.values()))
    return NodeChoice(nodes=best, stage=2 if accumulation[best] == 1 else 1, seconds=seconds)


def fewer_nodes(config: TrainConfig, zero: ZeroSettings, machines: Machines, *, source_budget: int) -> str | None:
    """Describe the fewer nodes that would be as fast; None if there are none."""
    choice = choose_nodes(config, zero, machines, source_budget=source_budget)
    if choice.nodes == machines.nodes:
        return None
    share = choice.seconds[max(choice.seconds)] / choice.seconds[choice.nodes]
    return (
        f"{choice.nodes} node(s) would have {share:.0%} of the speed of these {machines.nodes}, by the model of "
        "dist-transformer plan: start on fewer nodes, or raise --batch.packs-per-step"
    )
