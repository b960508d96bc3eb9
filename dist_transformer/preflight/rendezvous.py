"""Rendezvous of all ranks, which names missing ranks, and a watch that ends the program if a check hangs."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.rendezvous import connect, host_of, meet
from dist_transformer.runtime.world import World

# Rank 0 reports first; the other ranks wait this much longer.
_GRACE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


@contextmanager
def joined(world: World, *, seconds: float) -> Iterator["Watch"]:
    """Form a gloo group of all ranks for the block, and yield a watch over its stages.

    Collective: every rank must call it.

    Raises:
        UserError: not all ranks joined within `seconds`; rank 0 names the missing ones.
    """
    if world.size == 1:
        watch = Watch(world, None, seconds=seconds)
        try:
            yield watch
        finally:
            watch.close()
        return
    patience = timedelta(seconds=seconds)
    store = meet(world, patience)
    watch = Watch(world, connect(world, patience, serve=False), seconds=seconds)
    try:
        with watch.stage("process group"):
            dist.init_process_group(
                "gloo",
                store=store,
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(seconds=2 * seconds + _GRACE_SECONDS),
            )
        yield watch
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f'"{watch.current}" failed on rank {world.rank} on {socket.gethostname()} ({reason:.200}), because another '
            "rank ended or the network broke: read the output of all ranks"
        ) from error
    finally:
        watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class Watch:
    """Thread that ends the program if a stage takes too long, because a dead file system or network raises nothing."""

    def __init__(self, world: World, store: dist.Store | None, *, seconds: float) -> None:
        """Start the thread.

        Args:
            store: a separate connection, because the main thread may be waiting in the other one.
        """
        self.world, self.store, self.seconds = world, store, seconds
        self.current, self._deadline = "", float("inf")
        self._begun = 0
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block. All ranks must go through the same stages."""
        self._begun += 1
        self.current, self._deadline = name, time.monotonic() + self.seconds
        if self.store is not None:
            self.store.set(f"at/{self.world.rank}", f"{self._begun} {name}")
        try:
            yield
        finally:
            self._deadline = float("inf")

    def close(self) -> None:
        self._closed.set()

    def _look(self) -> None:
        while not self._closed.wait(_PAUSE_SECONDS):
            grace = 0 if self.world.is_main else _GRACE_SECONDS
            if time.monotonic() > self._deadline + grace:
                try:
                    late = self._who_is_late()
                except RuntimeError as error:
                    late = str(error).split("\n")[0]
                print(
                    f'error: "{self.current}" did not end within {self.seconds:g} s ({late}): check the disks and '
                    "the network there, or raise --timeout",
                    file=sys.stderr,
                    flush=True,
                )
                # An exception would end only this thread.
                os._exit(1)

    def _who_is_late(self) -> str:
        if self.store is None or not self.world.is_main:
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
        assert self.store is not None
        if not self.store.check([f"at/{rank}"]):
            return 0, "start"
        number, _, name = self.store.get(f"at/{rank}").decode().partition(" ")
        return int(number), name
