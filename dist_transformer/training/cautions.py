"""Warn before training starts of settings that are valid, but probably not intended: one sentence for each."""

import math
from collections.abc import Iterator

from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.loading.loader import TrainingData

# Presets on the corpora that they are made for stay far below: `multi30k` plans about 170 epochs at most, WMT's `big`
# 60, the demo 6. Even a few thousand sentences are memorized long before. A preset on the wrong corpus is far above:
# `big` on 5,000 sentences plans tens of thousands.
ABSURD_EPOCHS = 1000
# Epochs that the remedy suggests: many for a small corpus, but a length that is used in practice.
_LONG_EPOCHS = 100


def planned_epochs(config: TrainConfig, data: TrainingData) -> float:
    """Compute how many epochs of all corpora together `max_steps` takes, assuming full packs.

    It needs only the totals of the corpora, so it is fast for any size.
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
    """Yield a warning with its remedy for each setting that makes no sense.

    Args:
        epochs: epochs that the run plans; None if there is no data to count them.
        target_tokens: target tokens of an epoch.
    """
    steps, warmup = config.max_steps, config.optimizer.warmup_steps
    # With patience, `max_steps` is only an upper limit: the run ends when validation stops improving.
    if epochs is not None and epochs > ABSURD_EPOCHS and config.validation.patience == 0:
        fewer = max(1, round(steps * _LONG_EPOCHS / epochs))
        yield (
            f"--max-steps {steps} means about {epochs:,.0f} epochs of {target_tokens:,} target tokens, which the "
            f"model would memorize: lower --max-steps ({fewer} is about {_LONG_EPOCHS} epochs), or use a "
            "smaller preset"
        )
    if warmup >= steps:
        yield (
            f"--optimizer.warmup-steps {warmup} is not below --max-steps {steps}, so the learning rate would rise "
            "until the end: lower --optimizer.warmup-steps, or raise --max-steps"
        )
