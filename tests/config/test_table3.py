"""The rows of the paper's Table 3: its column of parameters, its settings, and the same rows on a small model."""

import dataclasses

import pytest
import torch

from benchmarks.studies.table3 import PAPER, changes
from dist_transformer.base.errors import UserError
from dist_transformer.config.presets import PRESETS, VARIANTS, apply_variant
from dist_transformer.config.settings import ModelConfig
from dist_transformer.model.transformer import Transformer

# The paper's columns N, d_model, d_ff, h, d_k, P_drop, ε_ls, thousands of steps; rows B: d_v is 64 there, d_k here.
PAPER_SETTINGS = {
    "base": (6, 512, 2048, 8, 64, 0.1, 0.1, 100),
    "A1": (6, 512, 2048, 1, 512, 0.1, 0.1, 100),
    "A2": (6, 512, 2048, 4, 128, 0.1, 0.1, 100),
    "A3": (6, 512, 2048, 16, 32, 0.1, 0.1, 100),
    "A4": (6, 512, 2048, 32, 16, 0.1, 0.1, 100),
    "B1": (6, 512, 2048, 8, 16, 0.1, 0.1, 100),
    "B2": (6, 512, 2048, 8, 32, 0.1, 0.1, 100),
    "C1": (2, 512, 2048, 8, 64, 0.1, 0.1, 100),
    "C2": (4, 512, 2048, 8, 64, 0.1, 0.1, 100),
    "C3": (8, 512, 2048, 8, 64, 0.1, 0.1, 100),
    "C4": (6, 256, 2048, 8, 32, 0.1, 0.1, 100),
    "C5": (6, 1024, 2048, 8, 128, 0.1, 0.1, 100),
    "C6": (6, 512, 1024, 8, 64, 0.1, 0.1, 100),
    "C7": (6, 512, 4096, 8, 64, 0.1, 0.1, 100),
    "D1": (6, 512, 2048, 8, 64, 0.0, 0.1, 100),
    "D2": (6, 512, 2048, 8, 64, 0.2, 0.1, 100),
    "D3": (6, 512, 2048, 8, 64, 0.1, 0.0, 100),
    "D4": (6, 512, 2048, 8, 64, 0.1, 0.2, 100),
    "E": (6, 512, 2048, 8, 64, 0.1, 0.1, 100),
    "big": (6, 1024, 4096, 16, 64, 0.3, 0.1, 300),
}
WITH_PARAMETERS = [row for row, figures in PAPER.items() if figures.parameters is not None]
ATTENTIONS = 6 + 2 * 6


def count_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Transformer(model).parameters())


def millions(row: str, vocab_size: int) -> float:
    """Parameters of a full-size row, with the part of values and outputs that rows B have in the paper and not here."""
    model = dataclasses.replace(apply_variant(PRESETS["base"], row).model, vocab_size=vocab_size)
    missing = 8 * 64 - model.heads * model.attention_head_width if row.startswith("B") else 0
    # W^V and W^O lack `missing` of their 512 inner rows and columns each, W^V's bias too.
    return (count_parameters(model) + ATTENTIONS * missing * (2 * 512 + 1)) / 1e6


def test_every_row_of_the_paper_is_there() -> None:
    assert list(VARIANTS) == list(PAPER_SETTINGS)


@pytest.mark.parametrize("row", VARIANTS)
def test_full_size_settings_are_the_papers(row: str) -> None:
    config = apply_variant(PRESETS["base"], row)
    model = config.model
    settings = (model.encoder_layers, model.width, model.ffn_width, model.heads, model.attention_head_width)
    rest = (model.dropout, config.optimizer.label_smoothing, config.max_steps // 1000)
    assert (*settings, *rest) == PAPER_SETTINGS[row]
    assert model.decoder_layers == model.encoder_layers
    assert model.positions == ("learned" if row == "E" else "sinusoidal")
    assert config.batch == PRESETS["base"].batch


@pytest.mark.parametrize("row", WITH_PARAMETERS)
def test_parameters_are_the_papers_column(row: str) -> None:
    """At a vocabulary of 41,000 all rows but big agree to the last digit that the paper prints; big within 7%."""
    if row != "big":
        assert PAPER[row].parameters == round(millions(row, 41_000))
    assert millions(row, 37_000) == pytest.approx(PAPER[row].parameters, rel=0.03 if row == "base" else 0.07)


def test_no_row_without_a_printed_count_has_another_size() -> None:
    """The paper leaves the column empty where the size is base's; learned positions add 1,024 rows of 512."""
    base = count_parameters(dataclasses.replace(PRESETS["base"].model, vocab_size=37_000))
    for row in VARIANTS.keys() - WITH_PARAMETERS:
        model = dataclasses.replace(apply_variant(PRESETS["base"], row).model, vocab_size=37_000)
        assert count_parameters(model) == base + (1024 * 512 if row == "E" else 0), row


def test_rows_relative_to_the_multi30k_preset() -> None:
    """Computed by hand from width 128, 4 heads of 32, ffn 256, 4+4 layers, dropout 0.3, peak 5e-3, 8,000 steps."""
    expected = {
        "base": "-",
        "A1": "heads 4 → 1, head width 32 → 128",
        "A4": "heads 4 → 16, head width 32 → 8",
        "B1": "head width 32 → 8",
        "C1": "layers 4+4 → 1+1",
        "C2": "layers 4+4 → 3+3",
        "C3": "layers 4+4 → 5+5",
        "C4": "width 128 → 64, head width 32 → 16, peak rate 0.005 → 0.0071",
        "C7": "feed-forward width 256 → 512",
        "D1": "dropout 0.3 → 0.0",
        "D2": "dropout 0.3 → 0.4",
        "D4": "label smoothing 0.1 → 0.2",
        "E": "positions sinusoidal → learned",
    }
    base = PRESETS["multi30k"]
    assert {row: changes(base, apply_variant(base, row)) for row in expected} == expected
    for row in VARIANTS:
        assert count_parameters(dataclasses.replace(apply_variant(base, row).model, vocab_size=50)) > 0


def test_the_rate_follows_the_width_as_noam_does() -> None:
    """Twice the width: 1/√2 of the peak of inverse_sqrt; noam has the width in its formula and keeps its scale."""
    small, full = apply_variant(PRESETS["multi30k"], "C5").optimizer, apply_variant(PRESETS["base"], "C5").optimizer
    assert small.peak_lr == pytest.approx(5e-3 / 2**0.5)
    assert full.lr_scale == 1.0


def test_a_size_that_does_not_divide_is_refused_by_name() -> None:
    tiny = dataclasses.replace(PRESETS["tiny"].model, heads=1)
    with pytest.raises(UserError, match=r"^variant A2 takes 1/2 of heads \(1\), which is not a whole number"):
        apply_variant(dataclasses.replace(PRESETS["tiny"], model=tiny), "A2")
