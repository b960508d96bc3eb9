"""Settings that can be trained with, and hardly are what was meant: one sentence for each, before training starts."""

import math
from collections.abc import Iterator

from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.loader import TrainingData

# No preset on the corpus that it is for comes near: `multi30k` plans about 170 epochs at most, WMT's `big` 60, the demo
# 6. Even a few thousand sentences are known by heart long before. A preset on the wrong corpus is far above:
# `big` on 5,000 sentences plans tens of thousands.
ABSURD_EPOCHS = 1000
# What the remedy names: many for a small corpus, and still a length that people train.
_LONG_EPOCHS = 100


def planned_epochs(config: TrainConfig, data: TrainingData) -> float:
    """Give the epochs of all corpora together that `max_steps` comes to, as if packs were full.

    It needs the totals of the corpora only, so it is known at once for any size.
    """
    budgets, packs = data.budgets, 0
    for folder in data.folders:
        split = folder.index.train
        shares = (
            split.source_tokens / budgets.max_source_tokens,
            split.target_tokens / budgets.max_target_tokens,
            split.pairs / budgets.max_sentences,
        )
        packs += math.ceil(max(shares))
    steps = packs / config.batch.packs_per_step
    # The last step of an epoch is filled from the next epoch in a mixture only.
    return config.max_steps / (math.ceil(steps) if len(data.folders) == 1 else steps)


def cautions(config: TrainConfig, *, epochs: float | None, target_tokens: int | None) -> Iterator[str]:
    """Name what is absurd in a plan, each with its remedy.

    Args:
        epochs: that the run plans; None where there is no data to count them.
        target_tokens: of an epoch.
    """
    steps, warmup = config.max_steps, config.optimizer.warmup_steps
    # With patience, `max_steps` is only an upper limit: the run ends when it gets no better.
    if epochs is not None and epochs > ABSURD_EPOCHS and config.validation.patience == 0:
        fewer = max(1, round(steps * _LONG_EPOCHS / epochs))
        yield (
            f"--max-steps {steps} means about {epochs:,.0f} epochs of {target_tokens:,} target tokens, which the "
            f"model would learn by heart: lower --max-steps ({fewer} is about {_LONG_EPOCHS} epochs), or take a "
            "smaller preset"
        )
    if warmup >= steps:
        yield (
            f"--optimizer.warmup-steps {warmup} is not below --max-steps {steps}, so the learning rate would rise "
            "until the end: lower --optimizer.warmup-steps, or raise --max-steps"
        )
