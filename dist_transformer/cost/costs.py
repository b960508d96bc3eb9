"""Training cost of the paper's models, counted as in the paper and as in this project.

Table 2 of Vaswani et al. 2017 counts device time: "we estimate the number of floating point operations … by multiplying
the training time, the number of GPUs used, and an estimate of the sustained single-precision floating-point capacity of
each GPU". `training_flops` counts the operations that the weights and tokens need.
"""

import dataclasses
from dataclasses import dataclass

from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import training_flops

GPUS = 8
SUSTAINED_FLOPS_PER_SECOND = 9.5e12
"""Rate of a P100 that the paper assumes (footnote of section 6.1)."""
TOKENS_PER_STEP = 25_000
"""Source tokens per step, and the same number of target tokens (section 5.1)."""
VOCAB_SIZE = 37_000


PAPER_HOURS = {"base": 12.0, "big": 3.5 * 24}
"""Training time of the models of Table 2."""


def device_flops(model: str) -> float:
    """Count the operations that the paper's GPUs could have computed in the training time of a model."""
    return PAPER_HOURS[model] * 3600 * GPUS * SUSTAINED_FLOPS_PER_SECOND


def work_flops(preset: str) -> int:
    """Count the operations of the preset's steps with the paper's batch and vocabulary."""
    config = PRESETS[preset]
    tokens = config.max_steps * TOKENS_PER_STEP
    model = dataclasses.replace(config.model, vocab_size=VOCAB_SIZE)
    return training_flops(model, source_tokens=tokens, target_tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFlops:
    """Operations of one encoder layer in the forward pass of one sentence: 2 per multiply-add of its products."""

    projections: int
    """Products with the matrices of queries, keys, values and output: 2 · 4 · n · d_model · h · d_k."""
    feed_forward: int
    """Products with the two matrices of the feed-forward network: 2 · 2 · n · d_model · d_ff."""
    attention: int
    """Products Q K^T and weights · V of all heads, without weights of the model: 2 · 2 · n² · h · d_k."""


def layer_flops(config: ModelConfig, *, sentence_tokens: int) -> LayerFlops:
    """Count the operations that attention and the rest of an encoder layer need (sections 3.2, 3.3 and 4)."""
    inner = config.heads * config.attention_head_width
    return LayerFlops(
        projections=8 * sentence_tokens * config.width * inner,
        feed_forward=4 * sentence_tokens * config.width * config.ffn_width,
        attention=4 * sentence_tokens**2 * inner,
    )


def balanced_length(config: ModelConfig) -> float:
    """Return the sentence length at which attention needs as many operations as the rest of an encoder layer.

    4 n² h d_k = 8 n d_model h d_k + 4 n d_model d_ff, solved for n.
    """
    inner = config.heads * config.attention_head_width
    return config.width * (2 * inner + config.ffn_width) / inner


def cost_table() -> str:
    """Lay out both counts as a Markdown table."""
    lines = [
        "| model | ours: work done | the paper's: device time | ours ÷ the paper's |",
        "|---|---|---|---|",
    ]
    for name, hours in PAPER_HOURS.items():
        device = device_flops(name)
        time = f"{hours:g} h × {GPUS} × {SUSTAINED_FLOPS_PER_SECOND / 1e12:g} TFLOP/s = {device:.1e}"
        ratio = work_flops(name) / device
        lines.append(f"| {name}, {PRESETS[name].max_steps:,} steps | {work_flops(name):.1e} | {time} | {ratio:.2f} |")
    return "\n".join(lines)
