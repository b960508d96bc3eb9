"""Who has lost the run folder commits nothing more, whatever happens to its lock and whenever it wakes up."""

import contextlib
import os
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from dist_transformer.config.settings import TrainConfig
from dist_transformer.errors import UserError
from dist_transformer.run import folder, lock
from dist_transformer.run.lock import Fence, sole_writer
from dist_transformer.run.verify import verify_run
from tests.run.small_run import SmallRun, small_config, train_and_save

LOST = "is no longer held by this training: its lock file was removed or replaced"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    """Nobody waits for a process that is about to end."""
    monkeypatch.setattr(folder, "sole_writer", partial(sole_writer, patience=0.0))
    return small_config(tmp_path)


@pytest.fixture
def no_folder_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that locks files alone."""

    @contextlib.contextmanager
    def unknown(_: Path) -> Iterator[None]:
        yield None

    monkeypatch.setattr(lock, "exclusive_folder", unknown)


def contents(run_dir: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}


def test_removing_the_lock_lets_nobody_in(config: TrainConfig) -> None:
    with ExitStack() as held:
        SmallRun(config, held)
        (config.run_dir / "lock").unlink()
        with ExitStack() as other, pytest.raises(UserError, match="is in use by another process"):
            SmallRun(config, other)


@pytest.mark.parametrize("commit", ["save", "train"])
def test_a_training_whose_lock_was_removed_ends_at_its_next_commit(config: TrainConfig, commit: str) -> None:
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.train(2)
        run.save()
        (config.run_dir / "lock").unlink()
        before = contents(config.run_dir)
        with pytest.raises(UserError, match=LOST) as refused:
            run.save() if commit == "save" else run.train(1)
        assert "\n" not in str(refused.value)
        assert contents(config.run_dir) == before
    # Neither does it touch the lock of the next one, which goes on from the last commit.
    assert train_and_save(config, 1).resumed_at == 2


@pytest.mark.usefixtures("no_folder_locks")
def test_a_training_that_wakes_up_beside_another_one_leaves_it_alone(config: TrainConfig) -> None:
    with ExitStack() as held, ExitStack() as other:
        asleep = SmallRun(config, held)
        asleep.train(2)
        asleep.save()
        asleep.train(1)
        (config.run_dir / "lock").unlink()
        awake = SmallRun(config, other)
        assert awake.resumed_at == 2
        awake.train(2)
        before = contents(config.run_dir)
        for commit in (asleep.save, partial(asleep.train, 1)):
            with pytest.raises(UserError, match=LOST):
                commit()
        held.close()
        assert contents(config.run_dir) == before
        awake.save()
    assert [check.found for check in verify_run(config.run_dir) if not check.passed] == []


@pytest.mark.parametrize("is_back", [False, True], ids=["deleted", "another one in its place"])
def test_a_training_whose_folder_is_gone_ends(config: TrainConfig, is_back: bool) -> None:
    with ExitStack() as held, ExitStack() as other:
        run = SmallRun(config, held)
        run.train(2)
        shutil.rmtree(config.run_dir)
        if is_back:
            SmallRun(config, other)
        before = contents(config.run_dir)
        for commit in (run.save, partial(run.train, 1)):
            with pytest.raises(UserError, match=LOST):
                commit()
        assert contents(config.run_dir) == before
        assert config.run_dir.exists() == is_back


def test_the_fence_stands_right_before_the_rename(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Suspended while the pointer is flushed: the one of the other training stays."""
    with ExitStack() as held:
        run = SmallRun(config, held)
        run.train(1)
        run.save()
        run.train(1)
        fsync, lock_file = os.fsync, config.run_dir / "lock"

        def suspended(handle: int) -> None:
            fsync(handle)
            if ".latest." in os.readlink(f"/proc/self/fd/{handle}"):
                lock_file.unlink()

        monkeypatch.setattr(os, "fsync", suspended)
        with pytest.raises(UserError, match=LOST):
            run.save()
    assert (config.run_dir / "checkpoints/latest").read_text() == "step-00000001\n"


class _Starter(threading.Thread):
    """Starts a training, again when it is refused, and stops before each commit until it is let on."""

    def __init__(
        self, config: TrainConfig, number: int, passed: list[tuple[int, int]], generator: random.Random
    ) -> None:
        super().__init__(daemon=True)
        self.config, self.number, self.passed, self.generator = config, number, passed, generator
        self.start_number = 0
        self.errors: list[str] = []
        self.is_ended = False
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)

    def go_on(self) -> None:
        """Let it run until its next commit."""
        self._go.release()
        assert self._stopped.acquire(timeout=60)

    def _pause(self) -> None:
        self._stopped.release()
        self._go.acquire()

    def _paused_before(self, fence: Fence) -> Fence:
        start = self.start_number

        def fenced() -> None:
            self._pause()
            fence()
            self.passed.append((self.number, start))

        return fenced

    def run(self) -> None:
        self._go.acquire()
        while not self.is_ended:
            self.start_number += 1
            try:
                with ExitStack() as held:
                    run = SmallRun(self.config, held, fenced=self._paused_before, keep=1)
                    for _ in range(self.generator.randint(1, 3)):
                        run.train(1)
                        run.save()
            except UserError as error:
                self.errors.append(str(error))
            except BaseException as error:
                self.errors.append(f"TRACEBACK {type(error).__name__}: {error}")
            self._pause()
        self._stopped.release()


def _history(config: TrainConfig, seed: int) -> tuple[list[tuple[int, int]], list[str]]:
    """Who passed the fence, by starter and number of its start, and the errors that were told."""
    generator = random.Random(seed)
    passed: list[tuple[int, int]] = []
    starters = [
        _Starter(config, number, passed, random.Random(f"{seed} {number}"))
        for number in range(generator.choice((2, 3)))
    ]
    for starter in starters:
        starter.start()
    for _ in range(generator.randint(30, 120)):
        what = generator.random()
        if what < 0.03:
            (config.run_dir / "lock").unlink(missing_ok=True)
        elif what < 0.05:
            shutil.rmtree(config.run_dir, ignore_errors=True)
        elif what < 0.06 and config.run_dir.exists():
            config.run_dir.rename(config.run_dir.with_name(f"aside-{len(passed)}-{generator.random()}"))
        else:
            # One at a time runs for a while; the others are suspended.
            starter = generator.choice(starters)
            for _ in range(generator.randint(1, 12)):
                starter.go_on()
    for starter in starters:
        starter.is_ended = True
        while starter.is_alive():
            starter.go_on()
            starter.join(0.001)
    return passed, [error for starter in starters for error in starter.errors]


@pytest.mark.parametrize("locks", ["folder and file", "file", "none"])
def test_at_any_time_one_process_commits(
    locks: str, config: TrainConfig, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Random histories of starts, pauses before commits, removed locks, and removed and replaced folders."""
    if locks != "folder and file":
        request.getfixturevalue("no_folder_locks")
    if locks == "none":

        def unknown(*_: object, **__: object) -> None:
            raise OSError(38, "Function not implemented")

        monkeypatch.setattr("fcntl.flock", unknown)
    monkeypatch.setattr(os, "fsync", lambda _: None)
    lost = took_over = 0
    for seed in range(4):
        passed, errors = _history(config, seed)
        turns = [one for number, one in enumerate(passed) if number == 0 or passed[number - 1] != one]
        assert len(turns) == len(set(turns)), f"seed {seed}: two commit in turns: {turns}"
        for error in errors:
            assert LOST in error or "is in use by" in error, f"seed {seed}: {error}"
        lost += sum(LOST in error for error in errors)
        took_over += len(turns) - 1
        if (config.run_dir / "checkpoints").exists():
            run = train_and_save(config, 1, keep=1)
            assert [check.found for check in verify_run(config.run_dir) if not check.passed] == [], run.notes
        shutil.rmtree(config.run_dir, ignore_errors=True)
    assert lost > 2
    assert took_over > 2
