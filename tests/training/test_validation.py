"""The result of a validation of several directions."""

import math

import pytest

from dist_transformer.config.directions import Direction
from dist_transformer.evaluation.samples import SampleSheet
from dist_transformer.training.validation import ValidationResult, summarize


def result(
    source: str, target: str, *, loss: float, nll: float, scores: tuple[float, float, float] | None, **command: float
) -> ValidationResult:
    """Make a result; `scores` are BLEU, chrF and TER."""
    sheet = None
    if scores is not None:
        bleu, chrf, ter = scores
        sheet = SampleSheet(step=3, sentences=7, bleu=bleu, signature="s", chrf=chrf, ter=ter, samples=())
    direction = Direction(source_language=source, target_language=target)
    return ValidationResult(direction=direction, loss=loss, nll=nll, hypotheses=[], sheet=sheet, **command)


def test_one_direction_has_no_name() -> None:
    values, text = summarize([result("en", "de", loss=2.5, nll=2.0, scores=(30.0, 55.0, 60.0), command=0.81234)])
    scores = {"bleu": 30.0, "chrf": 55.0, "ter": 60.0, "command": 0.81234}
    assert values == {"loss": 2.5, "nll": 2.0, "ppl": math.exp(2), **scores}
    assert text == "nll 2.000, ppl 7.39, BLEU 30.0, chrF 55.0, TER 60.0, command 0.8123 (7 lines)"


def test_the_mean_over_directions_by_hand() -> None:
    """Every direction counts once, whatever the size of its set; the program had no score for one of them."""
    found = [
        result("en", "de", loss=2.5, nll=2.0, scores=(30.0, 50.0, 60.0), command=1.0),
        result("de", "en", loss=3.5, nll=1.0, scores=(36.0, 60.0, 50.0)),
    ]
    values, text = summarize(found)
    there = {"loss": 2.5, "nll": 2.0, "ppl": pytest.approx(math.exp(2)), "bleu": 30.0, "chrf": 50.0, "ter": 60.0}
    back = {"loss": 3.5, "nll": 1.0, "ppl": pytest.approx(math.exp(1)), "bleu": 36.0, "chrf": 60.0, "ter": 50.0}
    assert values == {
        **{"loss": 3.0, "nll": 1.5, "bleu": 33.0, "chrf": 55.0, "ter": 55.0, "ppl": pytest.approx(math.exp(1.5))},
        **{f"en-de/{name}": value for name, value in (there | {"command": 1.0}).items()},
        **{f"de-en/{name}": value for name, value in back.items()},
    }
    assert text == "nll 1.500, ppl 4.48, BLEU 33.0, chrF 55.0, TER 55.0, mean of 2 directions"


def test_a_loss_alone_has_no_scores() -> None:
    values, text = summarize([result("en", "de", loss=1.0, nll=1.0, scores=None)] * 2)
    assert {name.rpartition("/")[2] for name in values} == {"loss", "nll", "ppl"}
    assert text == "nll 1.000, ppl 2.72, mean of 2 directions"
