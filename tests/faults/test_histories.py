"""Some histories under each kind of file system; `make faults` does hundreds. And bugs that must be found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.campaign import Case, campaign
from tests.faults.histories import LOCKS, examine, file_system
from tests.run.small_run import small_config

_AT_ONCE = 2


@campaign(dict.fromkeys(LOCKS, 200), each=_AT_ONCE, sample=(LOCKS[0], LOCKS[-1]))
def test_histories(case: Case, tmp_path: Path) -> None:
    """One of two or three trainings that want one folder commits at a time, and none after another has."""
    config = small_config(tmp_path)
    lost = took_over = 0
    with file_system(case.kind):
        for seed in range(case.number * _AT_ONCE, (case.number + 1) * _AT_ONCE):
            problems, *counts = examine(config, seed)
            assert problems == [], f"seed {seed}"
            lost, took_over = lost + counts[0], took_over + counts[1]
    assert case.number or min(lost, took_over) > 0


@pytest.mark.parametrize("bug", [lambda *_: True, lambda path, *_: path.exists()], ids=["no fence", "no token"])
def test_a_planted_bug_is_found(bug: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.base.sole_writer._is_held", bug)
    config = small_config(tmp_path)
    with file_system("none"):
        assert any(examine(config, seed)[0] for seed in range(20))
