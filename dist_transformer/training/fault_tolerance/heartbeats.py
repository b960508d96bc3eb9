"""Publish where every rank is in small files of the run folder, so that ranks can report one that hangs or has failed.

The process group's store is no alternative: its host may be the rank that is stopped. Every rank writes its part of a
checkpoint into the run folder anyway.
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

from dist_transformer.base.files import make_folder, remove, write_file, write_new
from dist_transformer.run.layout import HEARTBEATS
from dist_transformer.runtime.world import World


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The state of a rank at one moment."""

    rank: int
    count: int
    """Number of the beat. If it does not change, the rank is stopped, dead, or cut off from the folder."""
    progress: int
    """Signs of progress so far. Ranks work in step: one with fewer signs holds up the others."""
    phase: str
    step: int
    where: str
    """Innermost function of the project in the rank's main thread."""
    host: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}, process {self.process})"

    @property
    def place(self) -> str:
        return f"{self.phase}, step {self.step}, {self.where}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The reason why a job ends, as the first rank found it."""

    rank: int
    reason: str
    is_hang: bool
    """Whether the rank found a hang. It is the first to notice, but may not be the rank that holds up the others."""

    def __str__(self) -> str:
        return f"rank {self.rank} {'found' if self.is_hang else 'failed'}: {self.reason}"


class Heartbeats:
    """The heartbeat files of a run's launches. A rank that ends well removes its file.

    Args:
        launch: name of this launch, which is in the name of every file. Ranks of the previous launch may still be
            exiting when this one starts; the names keep their files and failures apart.
    """

    def __init__(self, run_dir: Path, world: World, launch: str) -> None:
        self.run_dir, self.world = run_dir, world
        self.folder = run_dir / HEARTBEATS
        self._launch = launch
        self._file = self.folder / f"rank-{world.rank:05d}-{launch}.json"
        self._failure = self.folder / f"failure-{launch}.json"

    def remove_earlier(self) -> None:
        """Remove the files of earlier launches. Rank 0 calls it while the others wait."""
        # The folder stays, because a rank that is still exiting may write here. A file that cannot be removed does no
        # harm.
        make_folder(self.folder)
        for file in self.folder.iterdir():
            with suppress(OSError):
                remove(file)

    def publish(self, beat: Beat) -> None:
        write_file(self._file, json.dumps(dataclasses.asdict(beat)), durable=False)

    def withdraw(self) -> None:
        remove(self._file)

    def who_is_behind(self, *, wait_seconds: float) -> str:
        """Return one line per rank that holds up the others; `wait_seconds` must cover several beats."""
        before = self._read()
        time.sleep(wait_seconds)
        return who_is_behind(before, self._read(), self.world.size)

    def _read(self) -> dict[int, Beat]:
        """Read the last beat of every rank that has published one and has not ended well."""
        beats = dict[int, Beat]()
        for path in self.folder.glob(f"rank-*-{self._launch}.json"):
            # A rank may remove its file at any moment.
            with suppress(OSError):
                beat = Beat(**json.loads(path.read_bytes()))
                beats[beat.rank] = beat
        return beats

    def first_failure(self, failure: Failure) -> Failure:
        """Publish `failure` to all ranks unless one is known already; return the one that counts."""
        try:
            write_new(self._failure, json.dumps(dataclasses.asdict(failure)))
            return failure
        except FileExistsError:
            return self.known_failure() or failure

    def known_failure(self) -> Failure | None:
        try:
            return Failure(**json.loads(self._failure.read_bytes()))
        except (FileNotFoundError, json.JSONDecodeError):
            # There is none, or it is being written.
            return None


def who_is_behind(before: Mapping[int, Beat], after: Mapping[int, Beat], size: int) -> str:
    """Return one line per rank that holds up the others, or one per rank if none does.

    Args:
        before, after: the last beats of all ranks, at two moments several beats apart.
        size: number of ranks.
    """
    lines = [f"rank {rank} never started" for rank in range(size) if rank not in after]
    beats = [beat for _, beat in sorted(after.items())]
    silent = [beat for beat in beats if beat.rank in before and before[beat.rank].count == beat.count]
    lines += [f"{beat} shows no sign of life; last seen in {beat.place}" for beat in silent]
    living = [beat for beat in beats if beat not in silent]
    furthest = max((beat.progress for beat in living), default=0)
    lines += [f"{beat} is behind, in {beat.place}" for beat in living if beat.progress < furthest]
    return "\n".join(lines or [f"{beat} is in {beat.place}" for beat in beats])
