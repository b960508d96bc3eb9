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


@pytest.mark.parametrize(
    ("by", "keep", "values", "best", "improved", "since_best"),
    [
        ("nll", 2, [3.0, 1.0, 2.0, 1.5], [(20, 1.0), (40, 1.5)], [True, True, False, False], 2),
        *((by, 2, [3.0, 1.0, 4.0], [(30, 4.0), (10, 3.0)], [True, False, True], 0) for by in ("bleu", "chrf")),
        ("ter", 2, [30.0, 10.0, 40.0], [(20, 10.0), (10, 30.0)], [True, True, False], 1),
        # A validation without the measure is not ranked, and does not count for patience.
        ("command", 2, [3.0, 2.0, None], [(10, 3.0), (20, 2.0)], [True, False, False], 1),
        # Equal to the best is not better.
        ("nll", 1, [2.0, 2.0], [(10, 2.0)], [True, False], 1),
        # Patience needs the best even when none is kept.
        ("nll", 0, [2.0, 1.0, 3.0], [(20, 1.0)], [True, True, False], 1),
    ],
)
def test_validations_are_ranked_best_first(
    by: str,
    keep: int,
    values: list[float | None],
    best: list[tuple[int, float]],
    improved: list[bool],
    since_best: int,
) -> None:
    progress, found = ranked(values, by, keep)
    assert (progress.best, found, progress.validations_since_best) == (best, improved, since_best)
    assert progress.validated_step == 10 * len(values)


def test_a_checkpoint_gives_it_back() -> None:
    progress, _ = ranked([2.0, 1.0], "nll", keep=2)
    progress.position = Position(epoch=1, window=2, packs_consumed=3, carry_over=(4, 5), left_out=((6, 0), (7, 2)))
    progress.left_out = [{"step": 9, "corpus": 0, "shard": 6, "epoch": 1, "window": 2, "packs": 0}]
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_a_checkpoint_of_an_earlier_version_was_validated_and_computed_each_token_once() -> None:
    progress = Progress(step=5, validated_step=3, source_tokens=7, target_tokens=8, computed_target_tokens=16)
    values = progress.to_json()
    assert Progress.from_json(values) == progress
    for name in ("validated_step", "computed_source_tokens", "computed_target_tokens"):
        del values[name]
    progress = Progress.from_json(values)
    assert (progress.validated_step, progress.computed_source_tokens, progress.computed_target_tokens) == (5, 7, 8)
