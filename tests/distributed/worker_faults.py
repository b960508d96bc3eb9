"""A rank of a training that does something to itself: FAULT=RANK:STEP:WHAT, and then the usual arguments.

`raise`: an error; a signal's name: sends it to itself, and once more, with SIGTERM, while it saves.
"""

import os
import signal
from typing import Any

from dist_transformer.errors import exit_on_user_error
from dist_transformer.train import main
from dist_transformer.training.trainer import Trainer

RANK, STEP, WHAT = os.environ["FAULT"].split(":")

train_step, save = Trainer._train_step, Trainer._save


def suffer(self: Trainer, *arguments: Any) -> None:
    if self.progress.step + 1 == int(STEP) and self.world.rank == int(RANK):
        if WHAT == "raise":
            raise ValueError("boom")
        signal.raise_signal(signal.Signals[WHAT])
    train_step(self, *arguments)


def save_in_a_storm(self: Trainer) -> None:
    if WHAT.startswith("SIG"):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.Signals[WHAT])
    save(self)


if __name__ == "__main__":
    Trainer._train_step, Trainer._save = suffer, save_in_a_storm  # type: ignore[method-assign]
    exit_on_user_error(main)
