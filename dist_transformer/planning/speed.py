"""How long a step takes: a model, not a measurement.

time = floating-point operations ÷ (peak · MFU) + bytes of the update ÷ memory bandwidth + bytes sent ÷ link.
No part is taken to overlap with another.
"""

from dataclasses import dataclass

from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import training_flops
from dist_transformer.planning.hardware import GpuKind
from dist_transformer.planning.memory import BYTES, ZeroSettings

MFU = 0.33
"""Share of the peak that the model's operations reach, when nothing is said: what NVIDIA's DeepLearningExamples reach
with `big` on one A100 (its MLPerf v0.7 submission: 0.41). Ours reached 0.32 on one H100, compiled 0.38 (2026-11-23,
`results/gpu-check-h100.json`). Small models reach less."""

# Adam reads gradient, weight and both moments and writes the last three, in fp32, and the low-precision weight.
_UPDATE_BYTES = 4 * 4 + 3 * 4 + 2


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step."""

    compute: float
    update: float
    communication: float

    @property
    def total(self) -> float:
        return self.compute + self.update + self.communication


def predict_step(
    config: ModelConfig,
    zero: ZeroSettings,
    gpu: GpuKind,
    *,
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    network_gbit: float,
    precision: str,
    accumulation: int,
    source_tokens: int,
    target_tokens: int,
    mfu: float,
) -> StepTime:
    """
    Args:
        source_tokens: that one rank computes in a step, empty places of its packs included; `target_tokens` alike.
    """
    peak = gpu.bf16_tflops if precision == "bf16" else gpu.fp32_tflops
    assert peak is not None
    world = nodes * gpus_per_node
    operations = training_flops(config, source_tokens=source_tokens, target_tokens=target_tokens)
    updated = parameters / (world if zero.stage else 1)
    return StepTime(
        compute=operations / (peak * 1e12 * mfu),
        update=updated * _UPDATE_BYTES / (gpu.memory_gb_per_second * 1e9),
        communication=communication_seconds(
            zero,
            parameters=parameters,
            gpus_per_node=gpus_per_node,
            nodes=nodes,
            link_gb_per_second=gpu.link_gb_per_second,
            network_gbit=network_gbit,
            precision=precision,
            accumulation=accumulation,
        ),
    )


def communication_seconds(
    zero: ZeroSettings,
    *,
    parameters: int,
    gpus_per_node: int,
    nodes: int,
    link_gb_per_second: float,
    network_gbit: float,
    precision: str,
    accumulation: int,
) -> float:
    """Bytes of one step ÷ the slowest link of the ring, which crosses each once in each direction; between nodes it has
    the whole network of a node."""
    world = nodes * gpus_per_node
    link = link_gb_per_second if nodes == 1 else min(link_gb_per_second, network_gbit / 8)
    sent = bytes_per_parameter(zero.stage, accumulation, precision) * (world - 1) / world
    return sent * parameters / (link * 1e9)


def bytes_per_parameter(stage: int, accumulation: int, precision: str) -> int:
    """Bytes of one step that go round the ring, per parameter: gradients in fp32, weights in the training precision.

    DeepSpeed 0.19 all-reduces gradients below stage 3, which is two passes: once per step at stages 0 and 1, for each
    micro-batch at stage 2. Stages 1 and 2 then gather the updated weights. Stage 3 scatters the sums of gradients and
    gathers the weights twice for each micro-batch.
    """
    weights = BYTES[precision]
    if stage == 3:
        return accumulation * (4 + 2 * weights)
    return 8 * (accumulation if stage == 2 else 1) + (weights if stage else 0)
