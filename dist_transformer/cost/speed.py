"""Predicted time of a step: a model, not a measurement.

time = max(floating-point operations ÷ (peak · MFU) + bytes of the update ÷ memory bandwidth, kernel launches · time of
one) + bytes sent ÷ link + consecutive messages · latency. The host launches kernels while the GPU computes, and small
models wait for the host; nothing else overlaps.

Collectives are modelled as rings, which NCCL and gloo use for large tensors. `tests/distributed/test_traffic.py`
compares them with the calls of real ranks; docs/planning.md has steps with gloo on links of known rates, and the
published scaling of another trainer on GPUs.
"""

import math
from dataclasses import dataclass

from dist_transformer.config.settings import ModelConfig
from dist_transformer.cost.hardware import LINK_LATENCY, NETWORK_LATENCY, GpuKind
from dist_transformer.cost.memory import BYTES, STAGE_0_BUCKET, ModelSizes, ZeroSettings
from dist_transformer.model.transformer import training_flops

LAUNCH_SECONDS = 50e-6
"""Host time per kernel launch, with Python, autograd and DeepSpeed. A step of `big` in eight micro-batches took 415 ms
compiled and 358 ms not compiled on one H100, because of the host (2026-11-23); compiled it has 7,321 launches
(`results/speed/null-gpu.json`)."""
# Launches per sublayer and micro-batch, forward and backward, and per update, from the counts for `big` with its 30
# sublayers: 979 in one micro-batch, 7,321 in eight.
_SUBLAYER_LAUNCHES, _UPDATE_LAUNCHES = 30, 73

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


def launches_of_step(config: ModelConfig, *, accumulation: int) -> int:
    """Estimate the kernel launches of one step on each rank."""
    sublayers = 2 * config.encoder_layers + 3 * config.decoder_layers
    return accumulation * sublayers * _SUBLAYER_LAUNCHES + _UPDATE_LAUNCHES


def predict_step(
    config: ModelConfig,
    zero: ZeroSettings,
    gpu: GpuKind,
    *,
    sizes: ModelSizes,
    gpus_per_node: int,
    nodes: int,
    network_gbit: float,
    precision: str,
    accumulation: int,
    source_tokens: int,
    target_tokens: int,
    mfu: float,
    passes: int = 1,
) -> StepTime:
    """Predict the time of one optimizer step.

    Args:
        source_tokens: source tokens per rank and step, including empty places of packs; `target_tokens` likewise.
        passes: passes of each token through the model. They share the kernel launches and the communication.
    """
    peak = gpu.bf16_tflops if precision == "bf16" else gpu.fp32_tflops
    assert peak is not None
    world = nodes * gpus_per_node
    operations = training_flops(config, source_tokens=source_tokens, target_tokens=target_tokens, passes=passes)
    updated = sizes.trained / (world if zero.stage else 1)
    return StepTime(
        compute=operations / (peak * 1e12 * mfu),
        launches=launches_of_step(config, accumulation=accumulation) * LAUNCH_SECONDS,
        update=updated * _UPDATE_BYTES / (gpu.memory_gb_per_second * 1e9),
        communication=communication_seconds(
            zero,
            sizes=sizes,
            gpus_per_node=gpus_per_node,
            nodes=nodes,
            link_gb_per_second=gpu.link_gb_per_second,
            network_gbit=network_gbit,
            precision=precision,
            accumulation=accumulation,
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
    zero: ZeroSettings,
    *,
    sizes: ModelSizes,
    gpus_per_node: int,
    nodes: int,
    link_gb_per_second: float,
    network_gbit: float,
    precision: str,
    accumulation: int,
) -> float:
    """Predict the communication time of one step: its bytes ÷ the slowest link of the ring, and the messages' latency.

    The ring crosses each link once in each direction. Between nodes it uses the whole network of a node.
    """
    world = nodes * gpus_per_node
    if world == 1:
        return 0.0
    link = link_gb_per_second if nodes == 1 else min(link_gb_per_second, network_gbit / 8)
    sent = traffic(zero, sizes, precision=precision, accumulation=accumulation)
    # A ring over several nodes crosses the network once per node; the message that would close the ring is not sent.
    crossings = nodes - 1
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
