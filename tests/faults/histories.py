"""Random histories of trainings that want one folder: at any time one of them commits.

They start and stop, are suspended before each commit, lose their lock, and have their folder removed or replaced.
"""

import contextlib
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

from dist_transformer.base.errors import UserError
from dist_transformer.base.sole_writer import Fence
from dist_transformer.config.settings import TrainConfig
from dist_transformer.run.lock import sole_training
from dist_transformer.run.verify import verify_run
from tests.run.small_run import SmallRun, train_and_save

LOST = "whose lock file was removed or replaced; another training may use the folder"
LOCKS = ("file", "none")
"""Kinds of locks that a file system has."""


@contextlib.contextmanager
def file_system(locks: str) -> Iterator[None]:
    """One that locks so much, and flushes at once; nobody waits for a process that is about to end."""

    def unknown(*_: Any, **__: Any) -> None:
        raise OSError(38, "Function not implemented")

    with ExitStack() as patched:
        enter = patched.enter_context
        enter(mock.patch("dist_transformer.run.folder.sole_training", partial(sole_training, patience=0.0)))
        enter(mock.patch("os.fsync"))
        if locks == "none":
            enter(mock.patch("fcntl.flock", unknown))
        yield


def examine(config: TrainConfig, seed: int) -> tuple[list[str], int, int]:
    """Check one history; return its problems, how often a folder was lost, and how often it changed hands."""
    passed, errors = _history(config, seed)
    turns = [one for number, one in enumerate(passed) if number == 0 or passed[number - 1] != one]
    problems = [error for error in errors if LOST not in error and "is in use by" not in error]
    if len(turns) != len(set(turns)):
        problems.append(f"two commit in turns: {turns}")
    if not problems and (config.run_dir / "checkpoints").exists():
        notes = train_and_save(config, 1, keep=1).notes
        problems += [
            f"{check.name}: {check.found}, {notes}" for check in verify_run(config.run_dir) if not check.passed
        ]
    shutil.rmtree(config.run_dir, ignore_errors=True)
    return problems, sum(LOST in error for error in errors), len(turns) - 1


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

    def release(self) -> None:
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
    """Return who passed the fence, by starter and number of its start, and the errors that were reported."""
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
            for _ in range(generator.randint(1, 4)):
                starter.release()
    for starter in starters:
        starter.is_ended = True
        while starter.is_alive():
            starter.release()
            starter.join(0.001)
    return passed, [error for starter in starters for error in starter.errors]
