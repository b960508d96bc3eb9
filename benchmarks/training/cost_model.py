"""Predicted time of a step on a GPU that this machine lacks: a model, not a measurement.

Each kind of kernels takes operations ÷ (peak · share), or bytes ÷ (bandwidth · share). The shares are those that one
H100 reached (`results/gpu-check-h100.json`). Launches are counted on the null GPU, a stub of CUDA
(`results/null-gpu.json`). Device and host work in parallel, so a step takes as long as the slower of them. Bytes per
token in bf16, with width D, inner width I = heads · head width, feed-forward width F:

    residual connection   18 D   read and written forward and backward, with the dropout mask
    activation            10 F   read and written, and so is its gradient
    sums for biases        2 (3 I + 2 D + F), and 2 (I + D) more for cross-attention
    attention             24 I   four tensors forward, eight backward
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT
from dist_transformer.base.errors import UserError
from dist_transformer.config.plain import read_json
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.cost.hardware import gpu_kind
from dist_transformer.cost.memory import ZeroSettings, model_sizes
from dist_transformer.model.transformer import training_flops

# Shares of the peak or the bandwidth. An H100 took 41.8 ms for products (of 989 TFLOP/s), 11.9 for attention, 22.4 for
# elementwise work including that of the loss, and 3.3 for gradients and update (of 3.35 TB/s): `big`, 25k tokens.
PRODUCTS, ATTENTION, ELEMENTWISE, UPDATE = 0.78, 0.29, 0.47, 0.85
LAUNCH_SECONDS = 45e-6
"""Host time per launch, including Python: 415 ms for 9,381 launches on a Xeon."""
_VOCABULARY = 37_000
# Bytes per parameter. Gradients are read in bf16, added to fp32 sums, cleared, and read for their norm. Adam is as in
# `cost.speed`.
_GRADIENT_BYTES, _ADAM_BYTES = 2 + 8 + 4 + 4, 4 * 4 + 3 * 4 + 2
_NULL_GPU = ROOT / "results" / "null-gpu.json"


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts on the null GPU, for a compiled step of `big` in one micro-batch."""

    launches: int
    bytes_a_logit: float

    @classmethod
    def read(cls, file: Path = _NULL_GPU) -> "Counted":
        """Read the counts from a result file.

        Raises:
            UserError: nothing was counted yet.
        """
        if not file.exists():
            raise UserError(f"{file.name} does not exist: count launches with make null-gpu first")
        figures = read_json(file)["figures"]
        return cls(figures["steps"]["at once, compiled"]["launches"], figures["softmax"]["bytes_a_logit"])


def predict(preset: str, device: str, *, tokens: int, micro_batches: int, counted: Counted) -> dict[str, Any]:
    """Predict a step of `tokens` source tokens and as many target tokens.

    Raises:
        UserError: the GPU is unknown or has no bf16.
    """
    gpu = gpu_kind(device, "bf16")
    if gpu is None or gpu.bf16_tflops is None:
        raise UserError("--device cpu is measured, not modelled: leave --device out")
    config = dataclasses.replace(PRESETS[preset].model, vocab_size=_VOCABULARY)
    bandwidth = gpu.memory_gb_per_second * 1e9
    parameters = model_sizes(config, ZeroSettings(stage=1)).parameters
    moved = elementwise_bytes(config) * tokens + counted.bytes_a_logit * tokens * _VOCABULARY
    products = training_flops(config, source_tokens=tokens, target_tokens=tokens)
    inner = config.heads * config.attention_head_width
    attention = 24 * inner * tokens * (config.encoder_layers + 2 * config.decoder_layers)
    update = (_GRADIENT_BYTES * micro_batches + _ADAM_BYTES) * parameters
    kinds = {
        "matrix products": products / (gpu.bf16_tflops * 1e12 * PRODUCTS),
        "attention": attention / (bandwidth * ATTENTION),
        "elementwise work": moved / (bandwidth * ELEMENTWISE),
        "gradients and update": update / (bandwidth * UPDATE),
    }
    host = LAUNCH_SECONDS * counted.launches * micro_batches
    seconds = max(sum(kinds.values()), host)
    return {
        "preset": preset,
        "device": device,
        "tokens": tokens,
        "micro_batches": micro_batches,
        "milliseconds": {name: 1e3 * value for name, value in kinds.items()},
        "host_milliseconds": 1e3 * host,
        "target_tokens_per_second": tokens / seconds,
    }


def elementwise_bytes(config: ModelConfig) -> int:
    """Count the bytes of elementwise work for one source token and one target token together."""
    width, inner, ffn = config.width, config.heads * config.attention_head_width, config.ffn_width
    residual, activation, biases = 18 * width, 10 * ffn, 2 * (3 * inner + 2 * width + ffn)
    encoder = 2 * residual + activation + biases
    decoder = 3 * residual + activation + biases + 2 * (inner + width)
    return config.encoder_layers * encoder + config.decoder_layers * decoder


def run_cost_model(device: str, *, tokens: int = 25_088) -> dict[str, Any]:
    counted = Counted.read()
    steps = [
        predict(preset, device, tokens=tokens, micro_batches=count, counted=counted)
        for preset in ("base", "big")
        for count in (1, 8)
    ]
    return {"unit": "a model, not a measurement", "launches": counted.launches, "steps": steps}


def cost_model_table(figures: dict[str, Any]) -> str:
    """Format the prediction in lines of at most 80 characters."""
    lines = ["a model, not a measurement: target tokens/s of a step of 25k tokens, bf16, compiled", ""]
    for step in figures["steps"]:
        kinds = ", ".join(f"{name} {ms:.1f}" for name, ms in step["milliseconds"].items())
        lines += [
            f"{step['preset']} on one {step['device']}, {step['micro_batches']} micro-batch(es): "
            f"{step['target_tokens_per_second']:,.0f}",
            f"  device {sum(step['milliseconds'].values()):.1f} ms, host {step['host_milliseconds']:.1f} ms",
            f"  {kinds}",
        ]
    return "\n".join(
        [
            *lines,
            "",
            f"assumed: products at {PRODUCTS:.0%} of the peak; attention at {ATTENTION:.0%}, elementwise work at",
            f"{ELEMENTWISE:.0%} and the update at {UPDATE:.0%} of the bandwidth, as on one H100;",
            f"{figures['launches']:,} launches per micro-batch, at {1e6 * LAUNCH_SECONDS:.0f} µs of host time each",
        ]
    )
