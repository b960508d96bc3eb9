"""All ranks find each other, or those that are missing are named; and a check that does not end, ends the program."""

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from dist_transformer.errors import UserError
from dist_transformer.runtime.distributed import World
from dist_transformer.runtime.launch import port_remedy

# Rank 0 speaks first; the others wait so long before they do.
_GRACE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1


def as_ranges(ranks: Sequence[int]) -> str:
    """`0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


@contextmanager
def joined(world: World, *, seconds: float) -> Iterator["Watch"]:
    """A gloo group of all ranks, as long as the block lasts, and a watch over what is done in it.

    Raises:
        UserError: not all ranks came within `seconds`; rank 0 names those that are missing.
    """
    if world.size == 1:
        watch = Watch(world, None, seconds=seconds)
        try:
            yield watch
        finally:
            watch.close()
        return
    store = _connect(world, seconds)
    store.set(f"host/{world.rank}", socket.gethostname())
    _call_the_roll(store, world, seconds)
    watch = Watch(world, _connect(world, seconds, serve=False), seconds=seconds)
    try:
        with watch.stage("process group"):
            dist.init_process_group(
                "gloo", store=dist.PrefixStore("gloo", store), rank=world.rank, world_size=world.size,
                timeout=timedelta(seconds=2 * seconds + _GRACE_SECONDS),
            )  # fmt: skip
        yield watch
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f'"{watch.current}" failed on rank {world.rank} on {socket.gethostname()} ({reason:.200}): another rank '
            "ended, or the network broke: read the output of all ranks"
        ) from error
    finally:
        watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _connect(world: World, seconds: float, *, serve: bool = True) -> dist.Store:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        raise UserError("MASTER_ADDR and MASTER_PORT are not set: start the job by its launcher, or set them")
    # torchrun's agent serves at that port already.
    serves = serve and world.is_main and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    where = f"rank {world.rank} on {socket.gethostname()}"
    try:
        if not serves:
            _wait_for_server(host, int(port), seconds)
        store = dist.TCPStore(
            host, int(port), is_master=serves, timeout=timedelta(seconds=seconds), wait_for_workers=False
        )
    except (OSError, RuntimeError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        if serves:
            raise UserError(
                f"{where} cannot serve at {host}:{port} ({reason:.200}): see that MASTER_ADDR is this node; where the "
                f"port is taken, {port_remedy()}"
            ) from None
        raise UserError(
            f"{where} cannot reach rank 0 at {host}:{port} within {seconds:g} s ({reason:.200}): check that rank 0 "
            "runs, that MASTER_ADDR resolves here, and that no firewall is between"
        ) from None
    return dist.PrefixStore("preflight", store)


def _wait_for_server(host: str, port: int, seconds: float) -> None:
    """torch, which would try too, says a page when it fails."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(_PAUSE_SECONDS, deadline - time.monotonic())):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def _call_the_roll(store: dist.Store, world: World, seconds: float) -> None:
    """Rank 0 waits for all; what it finds, all raise."""
    if world.is_main:
        deadline = time.monotonic() + seconds
        missing = list(range(world.size))
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if not store.check([f"host/{rank}"])]
            time.sleep(_PAUSE_SECONDS)
        store.set("roll", _absence(store, world, missing, seconds) if missing else "complete")
    try:
        store.wait(["roll"], timedelta(seconds=seconds + _GRACE_SECONDS))
        found = store.get("roll").decode()
    except RuntimeError:
        found = f"rank 0 fell silent, said rank {world.rank} on {socket.gethostname()}: look at its output"
    if found != "complete":
        raise UserError(found)


def _absence(store: dist.Store, world: World, missing: Sequence[int], seconds: float) -> str:
    present: dict[str, list[int]] = {}
    for rank in range(world.size):
        if rank not in missing:
            present.setdefault(store.get(f"host/{rank}").decode(), []).append(rank)
    here = ", ".join(f"{as_ranges(ranks)} on {host}" for host, ranks in present.items())
    return (
        f"rank {as_ranges(missing)} of {world.size} did not come within {seconds:g} s (here: {here}): look at the "
        f"nodes of the missing ones, and whether they reach {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    )


class Watch:
    """Ends the program when a stage takes too long: a dead file system or network lets no exception through."""

    def __init__(self, world: World, store: dist.Store | None, *, seconds: float) -> None:
        """
        Args:
            store: a connection of its own, for the main thread may be waiting in the other one.
        """
        self.world, self.store, self.seconds = world, store, seconds
        self.current, self._deadline = "", float("inf")
        self._begun = 0
        self._closed = threading.Event()
        threading.Thread(target=self._look, daemon=True).start()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """All ranks go through the same stages."""
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
                    f'error: "{self.current}" did not end within {self.seconds:g} s ({late}): look at the disks and '
                    "the network there, or raise --timeout",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                # An exception would end this thread alone.
                os._exit(1)

    def _who_is_late(self) -> str:
        if self.store is None or not self.world.is_main:
            return f"rank {self.world.rank} on {socket.gethostname()}"
        places = [self._place(rank) for rank in range(self.world.size)]
        behind = [
            f'rank {rank} on {self.store.get(f"host/{rank}").decode()} is still at "{name}"'
            for rank, (number, name) in enumerate(places)
            if number < max(places)[0]
        ]
        return "; ".join(behind) or "all ranks wait in it"

    def _place(self, rank: int) -> tuple[int, str]:
        """Number and name of the stage where a rank is."""
        assert self.store is not None
        if not self.store.check([f"at/{rank}"]):
            return 0, "start"
        number, _, name = self.store.get(f"at/{rank}").decode().partition(" ")
        return int(number), name
