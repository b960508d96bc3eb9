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


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperRun:
    """A model of the paper's Table 2."""

    hours: float
    printed_flops: float

    @property
    def device_flops(self) -> float:
        """Operations that the GPUs could have computed in the training time."""
        return self.hours * 3600 * GPUS * SUSTAINED_FLOPS_PER_SECOND


PAPER_RUNS = {
    "base": PaperRun(hours=12, printed_flops=3.3e18),
    "big": PaperRun(hours=3.5 * 24, printed_flops=2.3e19),
}


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
    for name, run in PAPER_RUNS.items():
        time = f"{run.hours:g} h × {GPUS} × {SUSTAINED_FLOPS_PER_SECOND / 1e12:g} TFLOP/s = {run.device_flops:.1e}"
        ratio = work_flops(name) / run.device_flops
        lines.append(f"| {name}, {PRESETS[name].max_steps:,} steps | {work_flops(name):.1e} | {time} | {ratio:.2f} |")
    return "\n".join(lines)
