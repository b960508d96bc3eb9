"""The result of a validation of several directions."""

import math

import pytest

from dist_transformer.config.directions import Direction
from dist_transformer.evaluation.samples import SampleSheet
from dist_transformer.training.validation import ValidationResult, summarize


def result(source: str, target: str, *, loss: float, nll: float, bleu: float | None) -> ValidationResult:
    sheet = None if bleu is None else SampleSheet(step=3, sentences=7, bleu=bleu, signature="s", samples=())
    direction = Direction(source_language=source, target_language=target)
    return ValidationResult(direction=direction, loss=loss, nll=nll, sheet=sheet)


def test_one_direction_has_no_name() -> None:
    values, text = summarize([result("en", "de", loss=2.5, nll=2.0, bleu=30.0)])
    assert values == {"loss": 2.5, "nll": 2.0, "ppl": math.exp(2), "bleu": 30.0}
    assert text == "nll 2.000, ppl 7.39, BLEU 30.0 (7 lines)"


def test_the_mean_over_directions_by_hand() -> None:
    """Every direction counts once, whatever the size of its set."""
    found = [result("en", "de", loss=2.5, nll=2.0, bleu=30.0), result("de", "en", loss=3.5, nll=1.0, bleu=36.0)]
    values, text = summarize(found)
    assert values == {
        **{"loss": 3.0, "nll": 1.5, "bleu": 33.0, "ppl": pytest.approx(math.exp(1.5))},
        **{"en-de/loss": 2.5, "en-de/nll": 2.0, "en-de/ppl": pytest.approx(math.exp(2)), "en-de/bleu": 30.0},
        **{"de-en/loss": 3.5, "de-en/nll": 1.0, "de-en/ppl": pytest.approx(math.exp(1)), "de-en/bleu": 36.0},
    }
    assert text == "nll 1.500, ppl 4.48, BLEU 33.0, mean of 2 directions"


def test_a_loss_alone_has_no_bleu() -> None:
    values, text = summarize([result("en", "de", loss=1.0, nll=1.0, bleu=None)] * 2)
    assert not [name for name in values if "bleu" in name]
    assert "BLEU" not in text
