"""Communication by MPI among the ranks of a preparation that `mpirun` or `srun` started.

This is separate from `dist_transformer.runtime.distributed`, because a preparation needs neither torch nor its process
group. Without a launcher there is one rank, and nothing is sent. Waiting ranks sleep, so that they leave their cores to
the others and answer signals.
"""

import os
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np

from dist_transformer.base.errors import TransientError, UserError, WriteError
from dist_transformer.runtime.launch import load_mpi
from dist_transformer.runtime.world import find_world, gather_by_mpi

T = TypeVar("T")

_SETTLE_SECONDS = 0.02
_STOP_TAG = 1
# The message that a rank has failed is its tag.
_NOTHING = np.empty(0, dtype=np.uint8)
# Errors that are sent to other ranks.
_KINDS: dict[str, type[UserError | OSError]] = {
    each.__name__: each for each in (WriteError, TransientError, UserError, OSError)
}


class StoppedError(Exception):
    """Another rank failed. Its error is known after the next `gather`."""


class MpiRanks:
    """Ranks of one launch.

    Args:
        communicator: communicator of mpi4py; None for a single rank.
    """

    def __init__(self, communicator: Any = None) -> None:
        self._all = communicator
        self._stops: list[Any] = []
        self.rank: int = communicator.rank if communicator else 0
        self.size: int = communicator.size if communicator else 1

    @classmethod
    def join(cls) -> "MpiRanks":
        """Join the ranks that the launcher of this process started.

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
        """Return the cores per rank: the cores that the ranks of this machine may use, divided among them.

        Collective: every rank must call it.
        """
        mine = os.sched_getaffinity(0)
        if self.size == 1:
            return len(mine)
        from mpi4py import MPI

        node = self._all.Split_type(MPI.COMM_TYPE_SHARED)
        return max(1, len(set().union(*gather_by_mpi(node, sorted(mine)))) // node.size)

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in order of rank, on every rank.

        Collective: every rank must call it.

        Args:
            value: JSON value; `base.messages.pack` says what it changes.
        """
        if self.size == 1:
            return [value]
        self._meet()
        return gather_by_mpi(self._all, value)

    def together(self, work: Callable[[], T]) -> T:
        """Do `work` on every rank. If it fails, raise the error of the lowest failed rank on all, so that none waits.

        Collective: every rank must call it. Ranks that call `poll` stop their work as soon as another one has failed.
        """
        value, error = None, None
        try:
            value = work()
        except StoppedError:
            pass
        except (UserError, OSError) as found:
            error = found
            self._stop_others()
        if self.size == 1 and error is not None:
            raise error
        errors = self.gather(None if error is None else _stated(error))
        self._take_stops([rank for rank, found in enumerate(errors) if found is not None])
        first = next((found for found in errors if found is not None), None)
        if first is not None:
            kind, arguments = first
            raise _KINDS[kind](*arguments)
        return cast(T, value)

    def lead(self, work: Callable[[], T]) -> T:
        """Do `work` on rank 0 alone, and return its result, a JSON value, or raise its error, on every rank.

        Collective: every rank must call it.
        """
        return cast(T, self.gather(self.together(lambda: work() if self.is_main else None))[0])

    def poll(self) -> None:
        """Raise `StoppedError` if another rank has failed."""
        if self.size > 1 and self._all.iprobe(tag=_STOP_TAG):
            raise StoppedError

    def abort(self, status: int) -> None:
        """End every rank at once, for events that only one rank sees, such as a signal."""
        if self.size > 1:
            self._all.Abort(status)

    def _meet(self) -> None:
        arrived = self._all.Ibarrier()
        while not arrived.Test():
            time.sleep(_SETTLE_SECONDS)

    def _stop_others(self) -> None:
        others = (other for other in range(self.size) if other != self.rank)
        self._stops = [self._all.Isend(_NOTHING, other, _STOP_TAG) for other in others]

    def _take_stops(self, failed: list[int]) -> None:
        """Receive the message that each failed rank sent to each other rank, so that none is left for later stages."""
        for other in failed:
            if other != self.rank:
                self._all.Recv(np.empty(0, dtype=np.uint8), other, _STOP_TAG)
        for sent in self._stops:
            sent.Wait()
        self._stops = []


def _stated(error: UserError | OSError) -> tuple[str, tuple[Any, ...]]:
    """Return the kind of an error and what it is made from, to send it to other ranks."""
    kind = next(name for name, kind in _KINDS.items() if isinstance(error, kind))
    if isinstance(error, OSError) and error.errno is not None:
        return kind, (error.errno, error.strerror, error.filename and str(error.filename))
    return kind, (str(error),)
