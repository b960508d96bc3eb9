"""The presets: named sets of defaults for every setting."""

from pathlib import Path
from typing import Any

from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig


def _preset(**settings: Any) -> TrainConfig:
    return TrainConfig.of(data=("data",), run_dir=Path("run"), **settings)


# Training pairs from which multi30k and base are worth their steps.
_SMALL, _LARGE = 10_000, 1_000_000
_BIG = ModelConfig(width=1024, heads=16, ffn_width=4096, dropout=0.3)

PRESETS: dict[str, TrainConfig] = {
    # For the embedded corpus and smoke tests: minutes on two CPU cores.
    "tiny": _preset(
        model=ModelConfig(width=128, heads=4, ffn_width=256, encoder_layers=2, decoder_layers=2, dropout=0.1),
        batch=BatchConfig(max_target_tokens=1024, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=3e-3, warmup_steps=200),
        max_steps=1000,
        save_every=100,
        validate_every=200,
        validate_sentences=100,
        log_every=20,
    ),
    # Transformer-Tiny on Multi30k: 2 x 4096 tokens per step, at most 8,000 updates, patience 10.
    "multi30k": _preset(
        model=ModelConfig(width=128, heads=4, ffn_width=256, encoder_layers=4, decoder_layers=4, dropout=0.3),
        batch=BatchConfig(max_target_tokens=4096, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=5e-3, warmup_steps=2000),
        max_steps=8000,
        save_every=250,
        validate_every=250,
        patience=10,
    ),
    # Further training of a model: its network is that of --init-from. The constant rate is measured in
    # results/finetune.json.
    "finetune": _preset(
        batch=BatchConfig(max_target_tokens=2048, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="constant", peak_lr=5e-5, warmup_steps=200, max_grad_norm=1.0),
        max_steps=10_000,
        save_every=200,
        validate_every=200,
        patience=5,
        ema_decay=0.999,
    ),
    # 10k joint vocabulary, speeches or captions, English to Chinese.
    "ted_en_zh": _preset(
        model=ModelConfig(width=256, heads=4, ffn_width=1024, encoder_layers=4, decoder_layers=4, dropout=0.3),
        batch=BatchConfig(max_target_tokens=4096, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=2e-3, warmup_steps=2000),
        max_steps=20_000,
    ),
    # A tutorial's recipe for TED talks, English to Chinese (docs/ted.md), with a peak that trains this shape: the
    # tutorial's, 5e-3, does not. Its 2,048 pairs per step are 8 packs of 256 pairs, at 15.75 target tokens per pair:
    # 376,778 / 23,927 in the captions that were measured.
    "ted_tutorial": _preset(
        model=ModelConfig(width=512, heads=8, ffn_width=2048, encoder_layers=6, decoder_layers=6, dropout=0.1),
        batch=BatchConfig(max_target_tokens=4031, packs_per_step=8),
        optimizer=OptimizerConfig(
            schedule="cosine",
            peak_lr=2e-4,
            warmup_steps=1000,
            min_lr=1e-5,
            beta1=0.9,
            beta2=0.98,
            epsilon=1e-9,
            weight_decay=0.01,
            label_smoothing=0.1,
        ),
        max_steps=10_000,
        validate_every=100,
    ),
    # The paper's base: about 25k source and 25k target tokens per step, 100k steps.
    "base": _preset(),
    # Base with one decoder layer, which decodes faster; for text that a teacher translated (docs/students.md).
    "student": _preset(model=ModelConfig(decoder_layers=1)),
    # The paper's big: 300k steps, the last 20 weight files averaged.
    "big": _preset(model=_BIG, max_steps=300_000),
    # Ott et al. 2018, section 3: 3584 x 8 GPUs x accumulation 16, peak 1e-3.
    "big_large_batch": _preset(
        model=_BIG,
        batch=BatchConfig(max_target_tokens=3584, packs_per_step=128),
        optimizer=OptimizerConfig(schedule="inverse_sqrt", peak_lr=1e-3),
        max_steps=20_000,
        save_every=500,
    ),
}


def preset_for(pairs: int, *, on_gpu: bool) -> tuple[str, str]:
    """Choose the preset of a first training by the number of training pairs and the machine.

    Returns:
        the preset, and a phrase that says why.
    """
    if not on_gpu:
        # Times are those of results/demo.json and results/multi30k.json.
        better = "" if pairs < _SMALL else "; multi30k translates better, and takes about 2 hours"
        return "tiny", f"takes about 5 minutes on two CPU cores{better}"
    if pairs < _SMALL:
        return "tiny", f"suits fewer than {_SMALL:,} pairs"
    if pairs < _LARGE:
        return "multi30k", f"suits fewer than {_LARGE:,} pairs"
    return "base", f"suits a GPU and {_LARGE:,} pairs or more"
