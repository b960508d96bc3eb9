"""Tasks for test_worker_pool.py, apart from it so that a process that does them imports little."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from dist_transformer.data.prepare.worker_pool import Progress


@dataclass(frozen=True)
class Square:
    number: int
    folder: Path
    """Gets an empty file for each process that has worked."""

    def run(self, progress: Progress) -> list[int | str]:
        (self.folder / str(os.getpid())).touch()
        if self.number == 0:
            # The other process must do the rest.
            deadline = time.monotonic() + 300
            while len(list(self.folder.iterdir())) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
        progress(self.number)
        return [self.number**2, os.environ.get("TOKENIZERS_PARALLELISM", "")]


@dataclass(frozen=True)
class Fail:
    folder: Path
    how: str

    def run(self, progress: Progress) -> None:
        (self.folder / str(os.getpid())).touch()
        if self.how == "bug":
            raise ZeroDivisionError("a bug")
        time.sleep(600)
