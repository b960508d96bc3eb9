"""Predicted time of a step, and the number of nodes on which a run is fast: a model, not a measurement.

time = max(floating-point operations, Muon's too, ÷ (peak · MFU) + bytes of the update ÷ memory bandwidth, kernel
launches · time of one) + bytes sent ÷ link + consecutive messages · latency. The host launches kernels while the GPU
computes, and small models wait for the host; nothing else overlaps.

Collectives are modelled as rings, which NCCL and gloo use for large tensors. `tests/distributed/test_traffic.py`
compares them with the calls of real ranks; docs/planning.md has steps with gloo on links of known rates, and the
published scaling of another trainer on GPUs.
"""

import math
from dataclasses import dataclass, replace

from dist_transformer.config.settings import ModelConfig, TrainConfig
from dist_transformer.cost.hardware import ENOUGH, GPUS, LINK_LATENCY, NETWORK_LATENCY, Cluster
from dist_transformer.cost.memory import BYTES, STAGE_0_BUCKET, ModelSizes, ZeroSettings, model_sizes, packs_that_fit
from dist_transformer.model.transformer import training_flops

LAUNCH_SECONDS = 50e-6
"""Host time per kernel launch, with Python, autograd and DeepSpeed. A step of `big` in eight micro-batches took 415 ms
compiled and 358 ms not compiled on one H100, because of the host (2026-11-23); compiled it has 7,321 launches
(`results/speed/null-gpu.json`)."""
# Launches per sublayer and micro-batch, forward and backward, and per update, from the counts for `big` with its 30
# sublayers: 979 in one micro-batch, 7,321 in eight.
_SUBLAYER_LAUNCHES, _UPDATE_LAUNCHES = 30, 73

# Launches of a micro-batch that a graph starts: its inputs, the sums, the ledger's hash, and the graph.
_GRAPH_LAUNCHES = 15

# The norm of the gradient is an all-reduce of one number.
_NORM_PASSES = 2
# Bytes per parameter: Adam reads gradient, weight and both moments in fp32, writes the last three, and the bf16 weight.
_UPDATE_BYTES = 4 * 4 + 3 * 4 + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    update: float
    communication: float
    launches: float
    """Time in which the host launches the kernels."""

    @property
    def total(self) -> float:
        return max(self.compute + self.update, self.launches) + self.communication


def launches_of_step(config: ModelConfig, *, accumulation: int, graphs: bool = False) -> int:
    """Estimate the kernel launches of one step on each rank, with or without CUDA graphs of the micro-batches."""
    sublayers = 2 * config.encoder_layers + 3 * config.decoder_layers
    of_micro_batch = _GRAPH_LAUNCHES if graphs else sublayers * _SUBLAYER_LAUNCHES
    return accumulation * of_micro_batch + _UPDATE_LAUNCHES


def graph_problem(config: TrainConfig, zero: ZeroSettings) -> str | None:
    """Return why GPUs cannot start micro-batches by CUDA graphs, in a few words; None if they can."""
    if zero.stage > 1:
        return f"ZeRO-{zero.stage} communicates in each micro-batch"
    if zero.offload_optimizer:
        return "the optimizer is offloaded"
    if zero.stage == 1 and config.arithmetic == "fp32":
        return "ZeRO-1 in fp32 has other sums"
    return "R-Drop has two passes" if config.optimizer.passes > 1 else None


def uses_graphs(config: TrainConfig, zero: ZeroSettings) -> bool:
    """Return whether GPUs start micro-batches by CUDA graphs, if their check finds nothing."""
    return config.cuda_graphs == "yes" and graph_problem(config, zero) is None


def predict_step(config: TrainConfig, zero: ZeroSettings, cluster: Cluster, *, source_budget: int) -> StepTime:
    """Predict the time of one optimizer step of full packs.

    The passes of R-Drop share the kernel launches and the communication.

    Args:
        config: settings that include the vocabulary size and the packs that a GPU computes at once.
        source_budget: source tokens per pack.
    """
    gpu, sizes = GPUS[cluster.gpu], model_sizes(config.model, zero, config.freeze)
    peak, accumulation = gpu.tflops(config.arithmetic), config.batch.accumulation_steps(cluster.world_size)
    assert peak is not None
    packs = accumulation * config.batch.packs_at_once
    operations = training_flops(
        config.model,
        source_tokens=packs * source_budget,
        target_tokens=packs * config.batch.max_target_tokens,
        passes=config.optimizer.passes,
    )
    ranks, rate = cluster.world_size if zero.stage else 1, peak * 1e12 * cluster.mfu
    update = sizes.trained / ranks * _UPDATE_BYTES / (gpu.memory_gb_per_second * 1e9)
    if config.optimizer.kind == "muon":
        # At stage 3 each rank has a piece of every matrix, so each computes all of them.
        update += sizes.muon_flops / (1 if zero.stage == 3 else ranks) / rate
    return StepTime(
        compute=operations / rate,
        launches=LAUNCH_SECONDS
        * launches_of_step(config.model, accumulation=accumulation, graphs=uses_graphs(config, zero)),
        update=update,
        communication=communication_seconds(
            zero, sizes, cluster, precision=config.arithmetic, accumulation=accumulation
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Traffic of one step's collectives, in rings of n ranks."""

    bytes: int
    """Bytes per link in the limit of many ranks; with n ranks, (n - 1) / n of it."""
    passes: int
    """Passes around the ring, each of n - 1 consecutive messages."""


def communication_seconds(
    zero: ZeroSettings, sizes: ModelSizes, cluster: Cluster, *, precision: str, accumulation: int
) -> float:
    """Predict the communication time of one step: its bytes ÷ the slowest link of the ring, and the messages' latency.

    The ring crosses each link once in each direction. Between nodes it uses the whole network of a node.
    """
    gpu, world, crossings = GPUS[cluster.gpu], cluster.world_size, cluster.nodes - 1
    if world == 1:
        return 0.0
    network = (cluster.network_gbit or gpu.node_gbit) / 8
    link = min(gpu.link_gb_per_second, network) if crossings else gpu.link_gb_per_second
    sent = traffic(zero, sizes, precision=precision, accumulation=accumulation)
    # A ring over several nodes crosses the network once per node; the message that would close the ring is not sent.
    latency = crossings * NETWORK_LATENCY + (world - 1 - crossings) * LINK_LATENCY
    return sent.bytes * (world - 1) / world / (link * 1e9) + sent.passes * latency


def traffic(zero: ZeroSettings, sizes: ModelSizes, *, precision: str, accumulation: int) -> Traffic:
    """Count the traffic of one step: gradients in fp32, weights in the training precision.

    Below stage 3, DeepSpeed 0.19 all-reduces gradients, which takes two passes: once per step at stages 0 and 1, once
    per micro-batch at stage 2. Stages 1 and 2 then all-gather the updated weights, all at once. Stage 0, and stage 1 in
    bf16 (`BF16_Optimizer`), reduce all gradients at once and compute the norm without a message. Stage 2, and stage 1
    in fp32, reduce bucket by bucket.

    Stage 3 reduce-scatters the gradients of each micro-batch and all-gathers the weights for its forward pass, those of
    the first layer on their own. It gathers them again for the backward pass only if they are more than both limits for
    keeping them. Parameters that stay on every rank are gathered once per step, one by one.

    Frozen parameters have no gradients and no updated weights; stage 3 gathers them as it gathers others.
    """
    weight = BYTES[precision]
    in_buckets = zero.stage >= 2 or (zero.stage == 1 and precision == "fp32")
    pieces = math.ceil(sizes.trained / (zero.reduce_bucket_size if in_buckets else STAGE_0_BUCKET))
    norm = _NORM_PASSES if in_buckets else 0
    if zero.stage == 3:
        large = sizes.parameters - sizes.persistent
        kept = sizes.parameters <= max(zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance)
        gathers = 1 if kept else 2
        pieces += gathers * (1 + math.ceil(large / zero.stage3_prefetch_bucket_size))
        return Traffic(
            bytes=accumulation * (4 * sizes.trained + gathers * weight * large) + weight * sizes.persistent,
            passes=accumulation * pieces + sizes.persistent_tensors + norm,
        )
    reductions = accumulation if zero.stage == 2 else 1
    gathered, gathers = (weight * sizes.trained, 1) if zero.stage else (0, 0)
    return Traffic(
        bytes=8 * reductions * sizes.trained + gathered,
        passes=2 * reductions * pieces + gathers + norm,
    )


def fill_gpus(config: TrainConfig, zero: ZeroSettings, cluster: Cluster, *, source_budget: int) -> TrainConfig:
    """Set the packs that a GPU computes at once, unless they are set."""
    if config.batch.packs_per_micro_batch is not None:
        return config
    memory = int(GPUS[cluster.gpu].memory_gib * 2**30)
    packs = packs_that_fit(
        config, zero, world_size=cluster.world_size, source_budget=source_budget, memory_bytes=memory
    )
    return replace(config, batch=replace(config.batch, packs_per_micro_batch=packs))


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeChoice:
    """The best number of nodes, and the stage that suits it."""

    nodes: int
    """Fewest nodes with `ENOUGH` of the best speed."""
    stage: int
    """ZeRO stage: 2, which sends gradients while it computes, with one micro-batch per rank
    and step and without CUDA graphs, otherwise 1, which sends them once per step. The model leaves this overlap out."""
    seconds: dict[int, float]
    """Seconds per step by number of nodes. Left out are numbers that leave each rank as many packs as fewer nodes."""


def choose_nodes(config: TrainConfig, zero: ZeroSettings, cluster: Cluster, *, source_budget: int) -> NodeChoice:
    """Choose among 1 to `cluster.nodes` nodes."""
    seconds, accumulation, share = dict[int, float](), dict[int, int](), 0
    for nodes in range(1, cluster.nodes + 1):
        some = replace(cluster, nodes=nodes)
        packs = -(-config.batch.packs_per_step // some.world_size)
        if packs != share:
            full = fill_gpus(config, zero, some, source_budget=source_budget)
            seconds[nodes] = predict_step(full, zero, some, source_budget=source_budget).total
            accumulation[nodes], share = full.batch.accumulation_steps(some.world_size), packs
    best = next(nodes for nodes, time in seconds.items() if ENOUGH * time <= min(seconds.values()))
    # At stage 2 no graphs can be used.
    overlaps = accumulation[best] == 1 and not uses_graphs(config, zero)
    return NodeChoice(nodes=best, stage=2 if overlaps else 1, seconds=seconds)


def fewer_nodes(config: TrainConfig, zero: ZeroSettings, cluster: Cluster, *, source_budget: int) -> str | None:
    """Describe the fewer nodes that would be as fast; None if there are none."""
    choice = choose_nodes(config, zero, cluster, source_budget=source_budget)
    if choice.nodes == cluster.nodes:
        return None
    share = choice.seconds[max(choice.seconds)] / choice.seconds[choice.nodes]
    return (
        f"{choice.nodes} node(s) would have {share:.0%} of the speed of these {cluster.nodes}, by the model of "
        "dist-transformer plan: start on fewer nodes, or raise --batch.packs-per-step"
    )
