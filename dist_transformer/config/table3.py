"""The rows of Table 3 of Vaswani et al. 2017 as changes to a configuration.

A row is relative to the paper's base model ("half the feed-forward width"), so it can be trained at full size (preset
`base`) and at the size of any other preset. At full size each row has the paper's settings, except rows B.
"""

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.config.wrong_names import meant


@dataclass(frozen=True, kw_only=True, slots=True)
class PaperFigures:
    """The paper's results for a row: newstest2013 English-German, beam search, no averaging of checkpoints."""

    perplexity: float
    """Perplexity per token, with 37k byte pairs."""
    bleu: float
    parameters: int | None = None
    """Millions of parameters; None if the paper leaves the column empty because they are about those of base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A row: the paper's results, and factors and settings relative to base."""

    paper: PaperFigures
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


def _row(perplexity: float, bleu: float, parameters: int | None = None, **changes: Any) -> Variant:
    return Variant(paper=PaperFigures(perplexity=perplexity, bleu=bleu, parameters=parameters), **changes)


_DOUBLE, _HALF, _QUARTER = Fraction(2), Fraction(1, 2), Fraction(1, 4)

# Results: Table 3 of the proceedings (NeurIPS 2017, arXiv 1706.03762); rows are numbered in its order.
VARIANTS: dict[str, Variant] = {
    "base": _row(4.92, 25.8, 65),
    # (A) Number of heads; heads × head width stays constant.
    "A1": _row(5.29, 24.9, heads=None, head_width=None),
    "A2": _row(5.00, 25.5, heads=_HALF, head_width=None),
    "A3": _row(4.91, 25.8, heads=_DOUBLE, head_width=None),
    "A4": _row(5.01, 25.4, heads=Fraction(4), head_width=None),
    # (B) The paper makes only keys and queries narrower. This model has one head width, so values become narrower too,
    # and these rows have 7 and 5 million parameters fewer than the paper's.
    "B1": _row(5.16, 25.1, 58, head_width=_QUARTER),
    "B2": _row(5.01, 25.4, 60, head_width=_HALF),
    # (C) Size.
    "C1": _row(6.11, 23.7, 36, layers=Fraction(1, 3)),
    "C2": _row(5.19, 25.3, 50, layers=Fraction(2, 3)),
    "C3": _row(4.88, 25.5, 80, layers=Fraction(4, 3)),
    "C4": _row(5.75, 24.5, 28, width=_HALF, head_width=_HALF),
    "C5": _row(4.66, 26.0, 168, width=_DOUBLE, head_width=_DOUBLE),
    "C6": _row(5.12, 25.4, 53, ffn_width=_HALF),
    "C7": _row(4.75, 26.2, 90, ffn_width=_DOUBLE),
    # (D) Dropout 0 and 0.2, label smoothing 0 and 0.2. Dropout is added, not multiplied: twice 0.3 would be 0.6.
    "D1": _row(5.77, 24.6, more_dropout=None),
    "D2": _row(4.95, 25.5, more_dropout=0.1),
    "D3": _row(4.67, 25.3, label_smoothing=0.0),
    "D4": _row(5.47, 25.7, label_smoothing=0.2),
    # (E) Learned positions in place of sinusoids.
    "E": _row(4.92, 25.7, learned_positions=True),
    "big": _row(
        4.33,
        26.4,
        213,
        width=_DOUBLE,
        ffn_width=_DOUBLE,
        heads=_DOUBLE,
        more_dropout=0.2,
        steps=Fraction(3),
    ),
}


def find_variant(row: str) -> Variant:
    """Look up a row by name.

    Raises:
        UserError: there is no row of that name.
    """
    if row not in VARIANTS:
        raise UserError(f"--variant {row} is unknown: {meant(row, VARIANTS)}")
    return VARIANTS[row]


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
    variant, model, optimizer = find_variant(row), config.model, config.optimizer
    inner = model.heads * model.attention_head_width
    heads = 1 if variant.heads is None else _whole(model.heads, variant.heads, "heads", row)
    width = _whole(model.width, variant.width, "width", row)
    if variant.head_width is None:
        head_width = _whole(inner, Fraction(1, heads), "heads × head_width", row)
    else:
        head_width = _whole(model.attention_head_width, variant.head_width, "head_width", row)
    more = variant.more_dropout
    changed = dataclasses.replace(
        model,
        width=width,
        heads=heads,
        head_width=head_width if heads * head_width != width else None,
        ffn_width=_whole(model.ffn_width, variant.ffn_width, "ffn_width", row),
        encoder_layers=max(1, round(model.encoder_layers * variant.layers)),
        decoder_layers=max(1, round(model.decoder_layers * variant.layers)),
        dropout=0.0 if more is None else round(model.dropout + more, 6),
        positions="learned" if variant.learned_positions else model.positions,
    )
    smoothing = variant.label_smoothing
    return dataclasses.replace(
        config,
        model=changed,
        max_steps=round(config.max_steps * variant.steps),
        optimizer=dataclasses.replace(
            optimizer,
            peak_lr=optimizer.peak_lr if variant.width == 1 else optimizer.peak_lr * float(variant.width) ** -0.5,
            label_smoothing=optimizer.label_smoothing if smoothing is None else smoothing,
        ),
    )


def changes(base: TrainConfig, config: TrainConfig) -> str:
    """Describe how `config` differs from `base` in settings of rows: `heads 4 → 8, head width 32 → 16`, or `-`."""
    before, after = _settings(base), _settings(config)
    return ", ".join(f"{name} {before[name]} → {after[name]}" for name in before if before[name] != after[name]) or "-"


def _settings(config: TrainConfig) -> dict[str, object]:
    """Return the settings that rows may change, by the names that reports use."""
    model, optimizer = config.model, config.optimizer
    layers = (model.encoder_layers, model.decoder_layers)
    settings: dict[str, object] = {
        "layers": "{}+{}".format(*layers),
        "width": model.width,
        "feed-forward width": model.ffn_width,
        "heads": model.heads,
        "head width": model.attention_head_width,
        "dropout": model.dropout,
        "label smoothing": optimizer.label_smoothing,
        "positions": model.positions,
        "steps": config.max_steps,
    }
    if optimizer.schedule != "noam":
        settings["peak rate"] = f"{optimizer.peak_lr:.2g}"
    return settings


def _whole(size: int, factor: Fraction, name: str, row: str) -> int:
    """Multiply `size` by `factor`; the result must be a whole number."""
    result = size * factor
    if result.denominator != 1 or result < 1:
        raise UserError(f"variant {row} takes {factor} of {name} ({size}), which is not a whole number: choose another")
    return int(result)
