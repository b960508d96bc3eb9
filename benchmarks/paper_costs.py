"""Training cost of the paper's models, counted as in the paper and as in this project.

Table 2 of Vaswani et al. 2017 counts device time: "we estimate the number of floating point operations … by multiplying
the training time, the number of GPUs used, and an estimate of the sustained single-precision floating-point capacity of
each GPU". `training_flops` counts the operations that the weights and tokens need.
"""

import dataclasses

from dist_transformer.config.presets import PRESETS
from dist_transformer.model.transformer import training_flops
from dist_transformer.preflight.run_plan import PAPER_VOCABULARY

GPUS = 8
SUSTAINED_FLOPS_PER_SECOND = 9.5e12
"""Rate of a P100 that the paper assumes (footnote of section 6.1)."""
TOKENS_PER_STEP = 25_000
"""Source tokens per step, and the same number of target tokens (section 5.1)."""

PAPER_HOURS = {"base": 12.0, "big": 3.5 * 24}
"""Training time of the models of Table 2."""


def device_flops(model: str) -> float:
    """Count the operations that the paper's GPUs could have computed in the training time of a model."""
    return PAPER_HOURS[model] * 3600 * GPUS * SUSTAINED_FLOPS_PER_SECOND


def work_flops(preset: str) -> int:
    """Count the operations of the preset's steps with the paper's batch and vocabulary."""
    config = PRESETS[preset]
    tokens = config.max_steps * TOKENS_PER_STEP
    model = dataclasses.replace(config.model, vocab_size=PAPER_VOCABULARY)
    return training_flops(model, source_tokens=tokens, target_tokens=tokens)


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
