"""The result of a validation of several directions."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dist_transformer.config.directions import Direction
from dist_transformer.config.presets import PRESETS
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.packing import Budgets
from dist_transformer.evaluation.samples import SampleSheet
from dist_transformer.model.transformer import Transformer
from dist_transformer.runtime import distributed
from dist_transformer.training.validation import ValidationResult, Validator, summarize


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


def validated(
    data: DataFolder, budget: int, monkeypatch: pytest.MonkeyPatch, *, positions: int = 256, world: int = 1
) -> tuple[Validator, float]:
    """Return the validator, and the nll of a random model by packs of `budget` tokens; ranks run one after another."""
    torch.manual_seed(1)
    config = PRESETS["tiny"]
    model = Transformer(replace(config.model, max_positions=positions).for_vocabularies(*data.index.vocab_sizes))
    budgets = Budgets(max_source_tokens=budget, max_target_tokens=budget, max_sentences=9)
    validator = Validator(data, budgets, config.batch, positions=positions, sentences=0, named=False)
    engine: Any = SimpleNamespace(module=model, device=torch.device("cpu"), evaluate=lambda batch: model(batch, 0.1))
    sums: list[torch.Tensor] = []
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda own: sums.append(own) or torch.stack(sums).sum(0))
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        nll = validator.run(engine, step=1).nll
    assert nll > 0
    return validator, nll


def test_pairs_longer_than_a_pack_are_in_the_loss(toy_data: DataFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = toy_data.valid.lengths
    budget = int(np.median(lengths))
    longer = int((lengths > budget).any(axis=1).sum())
    assert 0 < longer < len(lengths)
    whole, expected = validated(toy_data, 512, monkeypatch)
    assert (whole.longer, whole.unscored) == (0, 0)
    for world in (1, 2, 3):
        parted, nll = validated(toy_data, budget, monkeypatch, world=world)
        assert (parted.longer, parted.unscored) == (longer, 0)
        assert nll == pytest.approx(expected, abs=1e-6)
    # No buffer of theirs is larger than the longest pair.
    assert parted.parts[1][1].sizes.tokens == tuple(-(-size // 8) * 8 for size in lengths.max(axis=0).tolist())


@pytest.mark.parametrize("budget", [8, 512])
def test_pairs_without_positions_are_counted(
    budget: int, toy_data: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = toy_data.valid.lengths.max(axis=1)
    positions = int(np.median(longest))
    unscored = int((longest > positions).sum())
    validator, nll = validated(toy_data, budget, monkeypatch, positions=positions)
    assert nll == pytest.approx(validated(toy_data, 64, monkeypatch, positions=positions)[1], abs=1e-6)
    assert validator.note == (
        f"validation set en-de: {unscored:,} of {len(longest):,} pairs are longer than model.max_positions, so the "
        "validation loss leaves them out"
    )
    values, _ = summarize([replace(result("en", "de", loss=1.0, nll=1.0, scores=None), unscored=unscored)] * 2)
    assert values["unscored_pairs"] == 2 * unscored
