"""A lane of a race: one training of one toolkit, what it used up to each of its weights, and their scores."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig

SIZES = {
    "tiny": ModelConfig(width=128, heads=4, ffn_width=512, encoder_layers=2, decoder_layers=2, dropout=0.1),
    "base_width": ModelConfig(width=512, heads=8, ffn_width=2048, encoder_layers=2, decoder_layers=2, dropout=0.1),
    "trial": ModelConfig(width=16, heads=1, ffn_width=16, encoder_layers=1, decoder_layers=1, dropout=0.1),
}
"""Networks: the paper's, with few layers; `trial` only counts tokens."""
LARGEST = 200
"""Longest sentence in tokens, for toolkits that leave longer ones out."""
BATCH = BatchConfig(max_target_tokens=1024, packs_per_step=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """Settings of a training; all toolkits have Adam with the paper's constants and label smoothing of 0.1."""

    size: str
    peak_lr: float
    warmup_steps: int
    """Steps of a linear rise; after it the rate falls with the inverse square root of the step."""
    seed: int
    steps: int
    every: int
    """Steps between weights that are scored."""

    @property
    def name(self) -> str:
        return f"{self.peak_lr:g}-{self.warmup_steps}-{self.seed}-{self.steps}"

    def model(self, vocab_size: int) -> ModelConfig:
        return dataclasses.replace(SIZES[self.size], vocab_size=vocab_size)

    def config(self, data: Path, run_dir: Path) -> TrainConfig:
        """Return the settings of our training."""
        return TrainConfig.of(
            data=(str(data),),
            run_dir=run_dir,
            model=SIZES[self.size],
            batch=BATCH,
            optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=self.peak_lr, warmup_steps=self.warmup_steps),
            seed=self.seed,
            max_steps=self.steps,
            save_every=self.every,
            keep_checkpoints=1,
            keep_weights=self.steps,
            validate_every=0,
        )
