import json
from collections.abc import Sequence

import pytest

from dist_transformer.data.loading.plan import Position
from dist_transformer.run.progress import Progress


def ranked(values: Sequence[float | None], by: str, keep: int) -> tuple[Progress, list[bool]]:
    progress, improved = Progress(), []
    for number, value in enumerate(values, start=1):
        progress.step = 10 * number
        improved.append(progress.rank_validation(value, by=by, keep=keep))  # type: ignore[arg-type]
    return progress, improved


def test_the_lowest_losses_are_remembered_best_first() -> None:
    progress, improved = ranked([3.0, 1.0, 2.0, 1.5], "nll", keep=2)
    assert progress.best == [(20, 1.0), (40, 1.5)]
    assert improved == [True, True, False, False]
    assert progress.validations_since_best == 2


@pytest.mark.parametrize("by", ["bleu", "chrf", "command"])
def test_the_highest_score_is_the_best(by: str) -> None:
    progress, improved = ranked([3.0, 1.0, 4.0], by, keep=2)
    assert progress.best == [(30, 4.0), (10, 3.0)]
    assert improved == [True, False, True]
    assert progress.validations_since_best == 0


def test_the_lowest_ter_is_the_best() -> None:
    progress, improved = ranked([30.0, 10.0, 40.0], "ter", keep=2)
    assert progress.best == [(20, 10.0), (10, 30.0)]
    assert improved == [True, True, False]


def test_a_validation_without_the_measure_is_not_ranked_and_does_not_count_for_patience() -> None:
    progress, improved = ranked([3.0, 2.0, None], "command", keep=2)
    assert progress.best == [(10, 3.0), (20, 2.0)]
    assert improved == [True, False, False]
    assert (progress.validations_since_best, progress.validated_step) == (1, 30)


def test_equal_to_the_best_is_not_better() -> None:
    progress, improved = ranked([2.0, 2.0], "nll", keep=1)
    assert improved == [True, False]
    assert progress.best == [(10, 2.0)]


def test_patience_needs_the_best_even_when_none_is_kept() -> None:
    progress, improved = ranked([2.0, 1.0, 3.0], "nll", keep=0)
    assert improved == [True, True, False]
    assert progress.best == [(20, 1.0)]


def test_a_checkpoint_gives_it_back() -> None:
    progress, _ = ranked([2.0, 1.0], "nll", keep=2)
    progress.position = Position(epoch=1, window=2, packs_consumed=3, carry_over=(4, 5), left_out=((6, 0), (7, 2)))
    progress.left_out = [{"step": 9, "corpus": 0, "shard": 6, "epoch": 1, "window": 2, "packs": 0}]
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_a_checkpoint_of_an_earlier_version_was_validated() -> None:
    values = Progress(step=5, validated_step=3).to_json()
    assert Progress.from_json(values).validated_step == 3
    del values["validated_step"]
    assert Progress.from_json(values).validated_step == 5


def test_a_checkpoint_of_an_earlier_version_computed_each_token_once() -> None:
    values = Progress(source_tokens=7, target_tokens=8, computed_source_tokens=14, computed_target_tokens=16).to_json()
    assert Progress.from_json(values).computed_target_tokens == 16
    del values["computed_source_tokens"], values["computed_target_tokens"]
    progress = Progress.from_json(values)
    assert (progress.computed_source_tokens, progress.computed_target_tokens) == (7, 8)
