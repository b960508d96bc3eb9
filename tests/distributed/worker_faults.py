"""A rank of a training that does something to itself: FAULT=RANK:NUMBER:WHAT, and then the usual arguments.

`raise`: an error at that step; a signal's name: sends it to itself, and once more, with SIGTERM, while it saves;
`pace`: takes so many milliseconds more in each step; `EIO`: that write of its saves fails as on a broken disk, injected
where the program asks for the write. PLANTED=CODE: a bug, which every rank executes first.
"""

import errno
import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from dist_transformer.base.errors import exit_on_user_error
from dist_transformer.run.checkpoint import writer
from dist_transformer.train import main
from dist_transformer.training.fault_tolerance import preemption
from dist_transformer.training.trainer import Saver, Trainer

RANK, NUMBER, WHAT = os.environ["FAULT"].split(":")

train_step, save, save_file, fsync = Trainer._train_step, Saver.begin, writer.save_file, os.fsync
is_faulty = os.environ.get("RANK") == RANK
writes = itertools.count(1)


def suffer(self: Trainer, *arguments: Any) -> None:
    if self.progress.step + 1 == int(NUMBER) and is_faulty:
        if WHAT == "raise":
            raise ValueError("boom")
        if WHAT.startswith("SIG"):
            signal.raise_signal(signal.Signals[WHAT])
    if WHAT == "pace" and is_faulty:
        time.sleep(int(NUMBER) / 1000)
    train_step(self, *arguments)


def save_in_a_storm(self: Saver, *, interrupted: bool) -> None:
    if WHAT.startswith("SIG"):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.Signals[WHAT])
    save(self, interrupted=interrupted)


def failing(write: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        if next(writes) == int(NUMBER):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(*arguments, **options)

    return wrapped


if __name__ == "__main__":
    exec(os.environ.get("PLANTED", ""))
    Trainer._train_step, Saver.begin = suffer, save_in_a_storm  # type: ignore[method-assign]
    if WHAT.startswith("SIG"):
        # All ranks vote in each step, so that the step of the stop is known.
        preemption.VOTE_SECONDS = 0.0
    if is_faulty and WHAT == "EIO":
        writer.save_file, os.fsync = failing(save_file), failing(fsync)  # type: ignore[attr-defined]
    exit_on_user_error(main)
