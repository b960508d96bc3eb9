"""Where every rank is, in small files of the run folder: what the others see when one of them is stuck or has failed.

Files and not the process group's store: its host may be the rank that is stopped, and every rank writes its part of
a checkpoint into this folder anyway.
"""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dist_transformer.files import make_folder, read_small, remove, write_file, write_new
from dist_transformer.run.layout import HEARTBEATS
from dist_transformer.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A rank at one moment."""

    rank: int
    count: int
    """Grows with every beat; one that stays is a rank that is stopped, dead, or cut off from the folder."""
    progress: int
    """Signs of progress so far. Ranks work in step: one that has given fewer holds up the others."""
    phase: str
    step: int
    where: str
    """The project's innermost function in its main thread."""
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"

    @property
    def place(self) -> str:
        return f"{self.phase}, step {self.step}, {self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a job ends, as the first rank found it."""

    rank: int
    reason: str
    is_hang: bool
    """The rank is the first to notice, and need not be the one that holds up the others."""

    def __str__(self) -> str:
        return f"rank {self.rank} {'found' if self.is_hang else 'failed'}: {self.reason}"


class Heartbeats:
    """The folder of a run's launches; a rank that ends well takes its file away.

    Args:
        launch: its name, part of every file's. Ranks of the launch before may still be leaving when this one begins:
            neither disturbs the other, and what went wrong there does not concern this one.
    """

    def __init__(self, run_dir: Path, world: World, launch: str) -> None:
        self.run_dir, self.world = run_dir, world
        self.folder = run_dir / HEARTBEATS
        self._launch = launch
        self._file = self.folder / f"rank-{world.rank:05d}-{launch}.json"
        self._failure = self.folder / f"failure-{launch}.json"

    def start_anew(self) -> None:
        """Forget earlier launches. For rank 0, while the others wait.

        The folder stays, and a file that cannot be removed does no harm: a rank that is still leaving may write here.
        """
        make_folder(self.folder)
        for file in self.folder.iterdir():
            with suppress(OSError):
                remove(file)

    def publish(self, beat: Beat) -> None:
        write_file(self._file, json.dumps(dataclasses.asdict(beat)), durable=False)

    def withdraw(self) -> None:
        remove(self._file)

    def who_is_behind(self, *, wait_seconds: float) -> str:
        """One line for each rank that holds up the others; `wait_seconds` are several beats."""
        before = self._read()
        time.sleep(wait_seconds)
        return who_is_behind(before, self._read(), self.world.size)

    def _read(self) -> dict[int, Beat]:
        """The last beat of every rank that has published one and has not ended well."""
        beats = dict[int, Beat]()
        for path in self.folder.glob(f"rank-*-{self._launch}.json"):
            # A rank takes its file away at any moment.
            with suppress(OSError):
                beat = Beat(**json.loads(read_small(path)))
                beats[beat.rank] = beat
        return beats

    def first_failure(self, failure: Failure) -> Failure:
        """Make `failure` known to all ranks, unless one is known already; gives the one that stands."""
        try:
            write_new(self._failure, json.dumps(dataclasses.asdict(failure)))
            return failure
        except FileExistsError:
            return self.known_failure() or failure

    def known_failure(self) -> Failure | None:
        try:
            return Failure(**json.loads(read_small(self._failure)))
        except (FileNotFoundError, json.JSONDecodeError):
            # There is none, or it is being written.
            return None


def who_is_behind(before: Mapping[int, Beat], after: Mapping[int, Beat], size: int) -> str:
    """One line for each rank that holds up the others, or for each when none does.

    Args:
        before, after: the last beats of all ranks, at two moments that are several beats apart.
        size: ranks in all.
    """
    lines = [f"rank {rank} never began" for rank in range(size) if rank not in after]
    beats = [beat for _, beat in sorted(after.items())]
    silent = [beat for beat in beats if beat.rank in before and before[beat.rank].count == beat.count]
    lines += [f"{beat} gives no sign of life; last seen in {beat.place}" for beat in silent]
    living = [beat for beat in beats if beat not in silent]
    furthest = max((beat.progress for beat in living), default=0)
    lines += [f"{beat} is behind, in {beat.place}" for beat in living if beat.progress < furthest]
    return "\n".join(lines or [f"{beat} is in {beat.place}" for beat in beats])
