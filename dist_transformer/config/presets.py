"""The presets, named sets of defaults for every setting, and the rows of the paper's Table 3 as changes to one.

A row is relative to the paper's base model ("half the feed-forward width"), so it can be trained at full size (preset
`base`) and at the size of any other preset. At full size each row has the paper's settings, except rows B.
"""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import BatchConfig, ModelConfig, OptimizerConfig, TrainConfig
from dist_transformer.config.wrong_names import meant


def _preset(**settings: Any) -> TrainConfig:
    return TrainConfig.of(data=("data",), run_dir=Path("run"), **settings)


# Training pairs from which multi30k and base are worth their steps.
_SMALL, _LARGE = 10_000, 1_000_000
_BIG = ModelConfig(width=1024, heads=16, ffn_width=4096, dropout=0.3)

PRESETS: dict[str, TrainConfig] = {
    # For the embedded corpus and smoke tests: minutes on two CPU cores.
    "tiny": _preset(
        model=ModelConfig(width=128, heads=4, ffn_width=256, encoder_layers=2, decoder_layers=2),
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
    # results/quality/finetune.json.
    "finetune": _preset(
        batch=BatchConfig(max_target_tokens=2048, packs_per_step=2),
        optimizer=OptimizerConfig(schedule="constant", peak_lr=5e-5, warmup_steps=200, max_grad_norm=1.0),
        max_steps=10_000,
        save_every=200,
        validate_every=200,
        patience=5,
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
        batch=BatchConfig(max_target_tokens=4031, packs_per_step=8),
        optimizer=OptimizerConfig(schedule="cosine", peak_lr=2e-4, warmup_steps=1000, min_lr=1e-5, weight_decay=0.01),
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
        # Times are those of results/speed/demo.json and results/quality/multi30k.json.
        better = "" if pairs < _SMALL else "; multi30k translates better, and takes about 2 hours"
        return "tiny", f"takes about 5 minutes on two CPU cores{better}"
    if pairs < _SMALL:
        return "tiny", f"suits fewer than {_SMALL:,} pairs"
    if pairs < _LARGE:
        return "multi30k", f"suits fewer than {_LARGE:,} pairs"
    return "base", f"suits a GPU and {_LARGE:,} pairs or more"


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A row: factors and settings relative to base."""

    width: Fraction = Fraction(1)
    """Factor on d_model. `peak_lr` is divided by its square root, as d_model^-0.5 does in the paper's formula."""
    ffn_width: Fraction = Fraction(1)
    layers: Fraction = Fraction(1)
    """Factor on the layers of encoder and decoder, rounded."""
    heads: Fraction | None = Fraction(1)
    """Factor on the heads; None: a single head."""
    head_width: Fraction | None = Fraction(1)
    """Factor on the head width; None: heads × head width stays constant."""
    more_dropout: float | None = 0.0
    """Amount added to the residual dropout; None: no dropout."""
    label_smoothing: float | None = None
    """New value; None: unchanged."""
    learned_positions: bool = False
    steps: Fraction = Fraction(1)


_DOUBLE, _HALF, _QUARTER = Fraction(2), Fraction(1, 2), Fraction(1, 4)

# Table 3 of the proceedings (NeurIPS 2017, arXiv 1706.03762); rows are numbered in its order.
VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    # (A) Number of heads; heads × head width stays constant.
    "A1": Variant(heads=None, head_width=None),
    "A2": Variant(heads=_HALF, head_width=None),
    "A3": Variant(heads=_DOUBLE, head_width=None),
    "A4": Variant(heads=Fraction(4), head_width=None),
    # (B) The paper makes only keys and queries narrower. This model has one head width, so values become narrower too,
    # and these rows have 7 and 5 million parameters fewer than the paper's.
    "B1": Variant(head_width=_QUARTER),
    "B2": Variant(head_width=_HALF),
    # (C) Size.
    "C1": Variant(layers=Fraction(1, 3)),
    "C2": Variant(layers=Fraction(2, 3)),
    "C3": Variant(layers=Fraction(4, 3)),
    "C4": Variant(width=_HALF, head_width=_HALF),
    "C5": Variant(width=_DOUBLE, head_width=_DOUBLE),
    "C6": Variant(ffn_width=_HALF),
    "C7": Variant(ffn_width=_DOUBLE),
    # (D) Dropout 0 and 0.2, label smoothing 0 and 0.2. Dropout is added, not multiplied: twice 0.3 would be 0.6.
    "D1": Variant(more_dropout=None),
    "D2": Variant(more_dropout=0.1),
    "D3": Variant(label_smoothing=0.0),
    "D4": Variant(label_smoothing=0.2),
    # (E) Learned positions in place of sinusoids.
    "E": Variant(learned_positions=True),
    "big": Variant(width=_DOUBLE, ffn_width=_DOUBLE, heads=_DOUBLE, more_dropout=0.2, steps=Fraction(3)),
}


def preset_with_variant(preset: str, variant: str) -> TrainConfig:
    """Return the defaults that --preset and --variant choose.

    Raises:
        UserError: an unknown name.
    """
    if preset not in PRESETS:
        raise UserError(f"--preset {preset} is unknown: {meant(preset, PRESETS)}")
    return apply_variant(PRESETS[preset], variant)


def apply_variant(config: TrainConfig, row: str) -> TrainConfig:
    """Apply a row's changes to `config`, which takes the place of the paper's base model.

    Raises:
        UserError: no such row, or a size that the row cannot divide.
    """
    if row not in VARIANTS:
        raise UserError(f"--variant {row} is unknown: {meant(row, VARIANTS)}")
    variant, model, optimizer = VARIANTS[row], config.model, config.optimizer
    more, smoothing = variant.more_dropout, variant.label_smoothing
    inner = model.heads * model.attention_head_width
    heads = 1 if variant.heads is None else _whole(model.heads, variant.heads, "heads", row)
    width = _whole(model.width, variant.width, "width", row)
    if variant.head_width is None:
        head_width = _whole(inner, Fraction(1, heads), "heads × head_width", row)
    else:
        head_width = _whole(model.attention_head_width, variant.head_width, "head_width", row)
    changes = {
        "max_steps": round(config.max_steps * variant.steps),
        "model.width": width,
        "model.heads": heads,
        "model.head_width": head_width if heads * head_width != width else None,
        "model.ffn_width": _whole(model.ffn_width, variant.ffn_width, "ffn_width", row),
        "model.encoder_layers": max(1, round(model.encoder_layers * variant.layers)),
        "model.decoder_layers": max(1, round(model.decoder_layers * variant.layers)),
        "model.dropout": 0.0 if more is None else round(model.dropout + more, 6),
        "model.positions": "learned" if variant.learned_positions else model.positions,
        "optimizer.peak_lr": optimizer.peak_lr * float(variant.width) ** -0.5,
        "optimizer.label_smoothing": optimizer.label_smoothing if smoothing is None else smoothing,
    }
    return config.changed(**changes)


def _whole(size: int, factor: Fraction, name: str, row: str) -> int:
    """Multiply `size` by `factor`; the result must be a whole number."""
    result = size * factor
    if result.denominator != 1 or result < 1:
        raise UserError(f"variant {row} takes {factor} of {name} ({size}), which is not a whole number: choose another")
    return int(result)
