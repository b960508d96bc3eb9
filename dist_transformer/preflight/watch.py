"""The group of all ranks that check a job, and a watch that ends the program if a check hangs."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from dist_transformer.base.errors import UserError, logger
from dist_transformer.runtime.rendezvous import host_of, meet
from dist_transformer.runtime.world import World

# Rank 0 reports first; the other ranks wait this much longer.
_GRACE_SECONDS = 5.0


@contextmanager
def joined(world: World, *, seconds: float) -> Iterator["Watch"]:
    """Form a gloo group of all ranks for the block, and yield a watch over its stages.

    Collective: every rank must call it.

    Raises:
        UserError: not all ranks joined within `seconds`; rank 0 names the missing ones.
    """
    store = meet(world, timedelta(seconds=seconds))
    # A separate connection, because the main thread may be waiting in the other one.
    watch = Watch(world, store.clone(), seconds=seconds)  # type: ignore[attr-defined]
    try:
        if world.size > 1:
            with watch.stage("process group"):
                patience = timedelta(seconds=2 * seconds + _GRACE_SECONDS)
                dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=patience)
        yield watch
    except RuntimeError as error:
        if world.size == 1:
            raise
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f'"{watch.current}" failed on rank {world.rank} on {socket.gethostname()} ({reason:.200}), because another '
            "rank ended or the network broke: read the output of all ranks"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Watch:
    """End the program if a stage takes too long, because a dead file system or network raises nothing."""

    def __init__(self, world: World, store: dist.Store, *, seconds: float) -> None:
        self.world, self.store, self.seconds = world, store, seconds
        self.current, self._begun = "", 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block. All ranks must go through the same stages."""
        self._begun += 1
        self.current = name
        self.store.set(f"at/{self.world.rank}", f"{self._begun} {name}")
        timer = threading.Timer(self.seconds + (0 if self.world.is_main else _GRACE_SECONDS), self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        try:
            late = self._who_is_late()
        except RuntimeError as error:
            late = str(error).split("\n")[0]
        logger.error(
            f'error: "{self.current}" did not end within {self.seconds:g} s ({late}): check the disks and the network '
            "there, or raise --timeout"
        )
        # An exception would end only this thread.
        os._exit(1)

    def _who_is_late(self) -> str:
        if self.world.size == 1 or not self.world.is_main:
            return f"rank {self.world.rank} on {socket.gethostname()}"
        places = [self._place(rank) for rank in range(self.world.size)]
        behind = [
            f'rank {rank} on {host_of(self.store, rank)} is still at "{name}"'
            for rank, (number, name) in enumerate(places)
            if number < max(places)[0]
        ]
        return "; ".join(behind) or "all ranks wait in it"

    def _place(self, rank: int) -> tuple[int, str]:
        """Return number and name of a rank's current stage."""
        if not self.store.check([f"at/{rank}"]):
            return 0, "start"
        number, _, name = self.store.get(f"at/{rank}").decode().partition(" ")
        return int(number), name
