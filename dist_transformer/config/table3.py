"""The rows of Table 3 of Vaswani et al. 2017 as changes to a configuration.

A row is relative to the paper's base model ("half the feed-forward width"), so it can be trained at full size (preset
`base`) and at the size of any other preset. At full size each row has the paper's settings, except rows B.
"""

import dataclasses
from dataclasses import dataclass
from fractions import Fraction

from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS
from dist_transformer.config.settings import TrainConfig
from dist_transformer.config.wrong_names import meant


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
    "big": Variant(
        width=_DOUBLE,
        ffn_width=_DOUBLE,
        heads=_DOUBLE,
        more_dropout=0.2,
        steps=Fraction(3),
    ),
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


def _whole(size: int, factor: Fraction, name: str, row: str) -> int:
    """Multiply `size` by `factor`; the result must be a whole number."""
    result = size * factor
    if result.denominator != 1 or result < 1:
        raise UserError(f"variant {row} takes {factor} of {name} ({size}), which is not a whole number: choose another")
    return int(result)
