"""Training cost of the paper's models, counted as in the paper and as in this project.

Table 2 of Vaswani et al. 2017 counts device time: "we estimate the number of floating point operations … by multiplying
the training time, the number of GPUs used, and an estimate of the sustained single-precision floating-point capacity of
each GPU". `training_flops` counts the operations that the weights and tokens need.
"""

import dataclasses
from dataclasses import dataclass

from dist_transformer.config.presets import PRESETS
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
