"""Some histories under each kind of file system; `make faults` does hundreds. And bugs that must be found."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.histories import LOCKS, examine, file_system
from tests.run.small_run import small_config


@pytest.mark.parametrize("locks", LOCKS)
def test_at_any_time_one_process_commits(locks: str, tmp_path: Path) -> None:
    config = small_config(tmp_path)
    lost = took_over = 0
    with file_system(locks):
        for seed in range(4):
            problems, *counts = examine(config, seed)
            assert problems == []
            lost, took_over = lost + counts[0], took_over + counts[1]
    assert lost > 2
    assert took_over > 2


@pytest.mark.parametrize("bug", [lambda *_: True, lambda path, *_: path.exists()], ids=["no fence", "no token"])
def test_a_planted_bug_is_found(bug: Callable[..., bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.base.sole_writer._is_held", bug)
    config = small_config(tmp_path)
    with file_system("none"):
        assert any(examine(config, seed)[0] for seed in range(20))
