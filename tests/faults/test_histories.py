"""Random histories of trainings that want one folder: at any time one of them commits. And bugs that must be found."""

import fcntl
import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.sole_writer import Fence
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run import folder
from dist_transformer.run.lock import sole_training
from dist_transformer.run.verify import verify_run
from tests.faults.campaign import Case, campaign
from tests.run.small_run import SmallRun, small_config, train_and_save

_AT_ONCE = 2
_LOST = "whose lock file was removed or replaced; another training may use the folder"
_LOCKS = ("file", "none")
"""Kinds of locks that a file system has."""


class History:
    """Trainings start and end, are suspended before each commit, lose their lock, and lose their folder."""

    def __init__(self, config: TrainConfig, seed: int) -> None:
        self.config, self.generator = config, random.Random(seed)
        self.idle: list[tuple[SmallRun, ExitStack]] = []
        self.passed: list[int] = []
        """Numbers of the starts that passed a fence, in order."""
        self.errors: list[str] = []
        self.starts = self.suspended = 0

    def act(self) -> None:
        """Let one thing happen."""
        run_dir, what = self.config.run_dir, self.generator.random()
        if what < 0.03:
            (run_dir / "lock").unlink(missing_ok=True)
        elif what < 0.05:
            shutil.rmtree(run_dir, ignore_errors=True)
        elif what < 0.06 and run_dir.exists():
            run_dir.rename(run_dir.with_name(f"aside-{self.generator.random()}"))
        else:
            try:
                self._run(what)
            except UserError as error:
                self.errors.append(str(error))
            except Exception as error:
                self.errors.append(f"TRACEBACK {type(error).__name__}: {error}")

    def _run(self, what: float) -> None:
        """Start a training, or let one train, save, and sometimes end."""
        with ExitStack() as held:
            if not self.idle or (what < 0.3 and len(self.idle) < 3):
                self.starts += 1
                run = SmallRun(self.config, held, fenced=partial(self._paused_before, self.starts), keep=1)
            else:
                run, its_own = self.idle.pop(self.generator.randrange(len(self.idle)))
                held.push(its_own)
                run.train(1)
                run.save()
            if what < 0.9:
                self.idle.append((run, held.pop_all()))

    def _paused_before(self, start: int, fence: Fence) -> Fence:
        def fenced() -> None:
            self.suspended += 1
            while self.suspended < 4 and self.generator.random() < 0.3:
                self.act()
            self.suspended -= 1
            fence()
            self.passed.append(start)

        return fenced

    def examine(self) -> list[str]:
        """Let many things happen; return the problems."""
        for _ in range(self.generator.randint(30, 120)):
            self.act()
        for _, held in self.idle:
            held.close()
        problems = [error for error in self.errors if _LOST not in error and "is in use by" not in error]
        if len(self.turns) != len(set(self.turns)):
            problems.append(f"two commit in turns: {self.turns}")
        if not problems and (self.config.run_dir / "checkpoints").exists():
            notes = train_and_save(self.config, 1, keep=1).notes
            failed = [check for check in verify_run(self.config.run_dir) if not check.passed]
            problems += [f"{check.name}: {check.found}, {notes}" for check in failed]
        shutil.rmtree(self.config.run_dir, ignore_errors=True)
        return problems

    @property
    def turns(self) -> list[int]:
        return [one for number, one in enumerate(self.passed) if number == 0 or self.passed[number - 1] != one]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """A file system flushes at once; nobody waits for a process that is about to end."""
    monkeypatch.setattr(folder, "sole_training", partial(sole_training, patience=0.0))
    monkeypatch.setattr("os.fsync", lambda _: None)
    return small_config(tmp_path)


def no_locks(*_: Any) -> None:
    raise OSError(38, "Function not implemented")


@campaign(dict.fromkeys(_LOCKS, 200), each=_AT_ONCE)
def test_histories(case: Case, config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the trainings that want one folder commits at a time, and none after another has."""
    if case.kind == "none":
        monkeypatch.setattr(fcntl, "flock", no_locks)
    lost = took_over = 0
    for seed in range(case.number * _AT_ONCE, (case.number + 1) * _AT_ONCE):
        history = History(config, seed)
        assert history.examine() == [], f"seed {seed}"
        lost += sum(_LOST in error for error in history.errors)
        took_over += len(history.turns) - 1
    assert case.number or min(lost, took_over) > 0


@pytest.mark.parametrize("bug", [lambda *_: True, lambda path, *_: path.exists()], ids=["no fence", "no token"])
def test_a_planted_bug_is_found(bug: Callable[..., bool], config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dist_transformer.base.sole_writer._is_held", bug)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert any(History(config, seed).examine() for seed in range(20))
