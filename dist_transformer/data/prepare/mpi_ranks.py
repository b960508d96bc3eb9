"""Ranks of a preparation that `mpirun` or `srun` started: what they tell each other, by MPI.

Separate from `dist_transformer.runtime.distributed`, because a preparation needs neither torch nor its process group.
Without a launcher there is one rank, and nothing is sent. Waiting ranks sleep: they leave their cores to the others,
and answer signals.
"""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from dist_transformer.errors import UserError
from dist_transformer.runtime.launch import load_mpi
from dist_transformer.runtime.world import find_world

T = TypeVar("T")

_SETTLE_SECONDS = 0.02
_STOP_TAG = 1


class StoppedError(Exception):
    """Another rank has an error; it is known when all have met."""


class MpiRanks:
    """The ranks of one launch; `communicator` is mpi4py's, or None for a rank alone."""

    def __init__(self, communicator: Any = None) -> None:
        self._all = communicator
        self._stops: list[Any] = []
        self.rank: int = communicator.rank if communicator else 0
        self.size: int = communicator.size if communicator else 1

    @classmethod
    def join(cls) -> "MpiRanks":
        """The ranks of this process, as its launcher started it.

        Raises:
            UserError: MPI cannot be loaded, or does not see the processes that the launcher started.
        """
        world = find_world()
        if world.size == 1:
            return cls()
        ranks = cls(load_mpi().COMM_WORLD)
        if (ranks.rank, ranks.size) != (world.rank, world.size):
            raise UserError(
                f"{world.size} processes were started but MPI sees {ranks.size}: start them by mpirun, or by srun with "
                "an MPI that it knows, srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows them)"
            )
        return ranks

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def cores(self) -> int:
        """Cores for each rank: those that the ranks of this machine may use, shared among them."""
        mine = os.sched_getaffinity(0)
        if self.size == 1:
            return len(mine)
        from mpi4py import MPI

        node = self._all.Split_type(MPI.COMM_TYPE_SHARED)
        return max(1, len(set().union(*node.allgather(mine))) // node.size)

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in order of rank, on every rank."""
        if self.size == 1:
            return [value]
        self._meet()
        return self._all.allgather(value)

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank; the first rank's error is raised on all, so that none waits for the others.

        Ranks that look (`poll`) leave their work as soon as another has failed.
        """
        value, error = None, None
        try:
            value = work()
        except StoppedError:
            pass
        except (UserError, OSError) as found:
            error = found
            self._stop_others()
        errors = self.gather(error)
        self._take_stops([rank for rank, found in enumerate(errors) if found is not None])
        first = next((found for found in errors if found is not None), None)
        if first is not None:
            raise first
        return cast(T, value)

    def lead(self, work: Callable[[], T]) -> T:
        """The result of `work`, done by rank 0 alone, on every rank; its error, too."""
        return cast(T, self.gather(self.together(lambda: work() if self.is_main else None))[0])

    def poll(self) -> None:
        """Raise `StoppedError` if another rank said so."""
        if self.size > 1 and self._all.iprobe(tag=_STOP_TAG):
            raise StoppedError

    def abort(self, status: int) -> None:
        """End every rank at once: for what the ranks cannot agree on, such as a signal to one of them."""
        if self.size > 1:
            self._all.Abort(status)

    def _meet(self) -> None:
        arrived = self._all.Ibarrier()
        while not arrived.Test():
            time.sleep(_SETTLE_SECONDS)

    def _stop_others(self) -> None:
        self._stops = [self._all.isend(None, other, _STOP_TAG) for other in range(self.size) if other != self.rank]

    def _take_stops(self, failed: list[int]) -> None:
        """Each failed rank has sent one message to each other: none may be left for the next stage."""
        for other in failed:
            if other != self.rank:
                self._all.recv(source=other, tag=_STOP_TAG)
        for sent in self._stops:
            sent.wait()
        self._stops = []
