"""Rendezvous: all ranks of a launch meet at the store of rank 0, and ranks of other launches are kept out."""

import errno
import ipaddress
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from dist_transformer.base.errors import UserError, logger
from dist_transformer.runtime.launch import (
    LAUNCH_VARIABLE,
    NODE_LAUNCHER,
    command_of,
    parent_of,
    port_remedy,
    slurm_tasks,
)
from dist_transformer.runtime.world import World

# A rank 0 that finds its port taken ends its launch in this time, so that there is one message, not one per rank.
_RANK_0_FIRST_SECONDS = 10.0
# Time that the result of rank 0 needs at most to reach the other ranks.
_GRACE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
# All ranks of a launch on one machine start within seconds. A longer wait is explained once.
_NOTICE_SECONDS = 10.0
# A rank that cannot take part tells those ranks that come within this time.
_TELL_SECONDS = 3.0
_FAILED = "failed"
LAZY_GLOO = "TORCH_GLOO_LAZY_INIT"
"""Environment variable: gloo connects two ranks when they first talk to each other."""
LOOPBACK_IS_DOWN = "the loopback interface of this machine is down: bring it up with `ip link set lo up`"
# A machine that is up refuses connections to a port that no process serves: then rank 0 has not started yet, and is
# waited for. If nothing answers for this long, the address is wrong or a firewall is in between.
_UNANSWERED_SECONDS = 30.0


def raise_open_files() -> int:
    """Raise this process' limit of open files as far as it may; return the limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A container may state a limit that its kernel refuses.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def meet(world: World, patience: timedelta) -> dist.Store:
    """Return the store of rank 0 once all ranks have connected to it.

    If that takes long, it prints once which ranks are missing.

    Collective: every rank must call it, or `end_launch`.

    Raises:
        UserError: the port is taken, nothing answers at rank 0's address, or some ranks do not join within `patience`;
            the error names them.
        SystemExit: a rank called `end_launch`; rank 0 has printed its error.
    """
    if world.size == 1:
        # No other rank to meet: no port that could be taken, and no network that could be down.
        return dist.HashStore()
    # Rank 0 has a connection to every rank, and the groups have those that they use. gloo would connect all ranks of
    # every group: 348 open files per process at 64 ranks instead of 113.
    os.environ.setdefault(LAZY_GLOO, "1")
    raise_open_files()
    # The store, once this rank is connected: a thread explains a long wait, because a foreign server may not answer.
    stores: list[dist.Store] = []
    timer = threading.Timer(_NOTICE_SECONDS, _explain_wait, (world, stores))
    timer.daemon = True
    timer.start()
    try:
        return _meet(world, patience, stores)
    finally:
        timer.cancel()
        timer.join()


def end_launch(world: World, failure: str) -> NoReturn:
    """End this rank for an error that it found before it met the others, who end with it.

    Rank 0 prints the error once. Another rank prints its error itself if it does not reach rank 0 within seconds.

    Raises:
        UserError: `failure`, which has not been printed.
        SystemExit: it has been printed.
    """
    if world.is_main:
        logger.error(f"error: {failure}")
    try:
        _meet(world, timedelta(seconds=_TELL_SECONDS), [], failure)
    except UserError:
        if not world.is_main:
            raise UserError(failure) from None
    raise SystemExit(1)


def _meet(world: World, patience: timedelta, stores: list[dist.Store], failure: str | None = None) -> dist.Store:
    began = time.monotonic()
    store = connect(world, patience)
    stores.append(store)
    if not _has_agents() and _is_of_another_launch(store, world):
        time.sleep(_RANK_0_FIRST_SECONDS if failure is None else 0.0)
        raise UserError(f"port {_address()[1]} of {_address()[0]} is taken by another training: {port_remedy()}")
    if failure is not None:
        store.set(_FAILED, failure)
    store.set(_joined(world.rank), socket.gethostname())
    if world.is_main:
        # All ranks raise what rank 0 finds.
        missing = _find_missing(store, world, patience, began)
        if missing == _FAILED and failure is None:
            logger.error(f"error: {store.get(_FAILED).decode()}")
        store.set("met", missing or "all")
    try:
        store.wait(["met"], patience + timedelta(seconds=_GRACE_SECONDS))
        found = store.get("met").decode()
    except dist.DistError:
        found = f"rank 0 stopped responding to rank {world.rank} on {socket.gethostname()}: look at its output"
    if found == _FAILED:
        _leave_together(store, world)
    if found != "all":
        raise UserError(found)
    return store


def _leave_together(store: dist.Store, world: World) -> NoReturn:
    """End this rank. Rank 0, whose store the others read, stays until they have left, for a few seconds at most."""
    deadline = time.monotonic() + _TELL_SECONDS
    with suppress(dist.DistError):
        left = store.add("left", 1)
        while world.is_main and left < world.size and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS)
            left = store.add("left", 0)
    raise SystemExit(1)


def _explain_wait(world: World, stores: Sequence[dist.Store]) -> None:
    """Print what this rank waits for. Of the ranks of a node that wait for rank 0, one prints it."""
    try:
        if stores and world.is_main:
            awaited = f"rank {as_ranges(_missing(stores[0], world))} of {world.size}"
        elif not stores and (world.local_rank == 0 or world.rank == 1):
            server = "the agent of torchrun" if _has_agents() else f"rank 0 of {world.size}"
            awaited = f"{server} at {':'.join(map(str, _address()))}"
        else:
            return
    except dist.DistError:
        return
    claims = " and ".join(f"{name}={os.environ.get(name)}" for name in world.variables)
    why = f"; {claims} are set in the environment: unset them to run alone" if claims else ""
    logger.warning(f"note: waiting for {awaited}{why}")


def connect(world: World, patience: timedelta) -> dist.Store:
    """Connect to the store that rank 0 serves.

    Raises:
        UserError: rank 0 cannot serve, cannot be reached within `patience`, or cannot be reached at all.
    """
    host, port = _address()
    serves = world.is_main and not _has_agents()
    began, where = time.monotonic(), f"rank {world.rank} on {socket.gethostname()}"
    try:
        unreachable = _reach(host, port, patience, awaits_server=not serves)
        if unreachable is not None:
            raise UserError(f"{where} cannot {'serve' if serves else 'reach rank 0'} at {host}:{port}: {unreachable}")
        listener = _listen_here(host, port) if serves and is_loopback(host) else None
        store = dist.TCPStore(
            host, port, world.size, serves, timeout=patience, wait_for_workers=False, master_listen_fd=listener
        )
    except (OSError, RuntimeError) as error:
        reason = str(error).strip().split("\n")[0]
        if serves and ("EADDRINUSE" in reason or getattr(error, "errno", None) == errno.EADDRINUSE):
            said = f"port {port} of this machine is taken, perhaps by another training: {port_remedy()}"
        elif serves:
            said = f"{where} cannot serve at {host}:{port} ({reason:.200}): check that MASTER_ADDR is this node"
        else:
            said = (
                f"{where} cannot reach rank 0 at {host}:{port} in {_duration(began)} ({reason:.200}): check that it "
                "has started, that MASTER_ADDR and MASTER_PORT are the same on all ranks, and that no firewall is in "
                "between"
            )
        raise UserError(said) from None
    # An elastic launcher keeps its store when it restarts all ranks.
    return dist.PrefixStore(f"dist_transformer {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def address_is_here() -> bool:
    """Decide whether `MASTER_ADDR` leads only to this machine, so that no rank can be on another."""
    with suppress(UserError, OSError):
        return is_loopback(_address()[0])
    return False


def _listen_here(host: str, port: int) -> int:
    """Open the server's port on loopback alone, where torch would open it to every network; return its descriptor."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
        return listener.detach()


def as_ranges(ranks: Sequence[int]) -> str:
    """Format ranks as `0-3, 6`."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def host_of(store: dist.Store, rank: int) -> str:
    """Return the host name of a rank that has joined."""
    return store.get(_joined(rank)).decode()


def _address() -> tuple[str, int]:
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise UserError("MASTER_ADDR and MASTER_PORT are not set: start the job with its launcher, or set them")
    return host, int(port)


def _has_agents() -> bool:
    """Decide whether torchrun's agents have met at a store of their own, which its ranks use."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _reach(host: str, port: int, patience: timedelta, *, awaits_server: bool) -> str | None:
    """Wait until the address answers. torch would wait, too, but prints a page at each attempt.

    Args:
        awaits_server: wait until the port is open; otherwise a machine that refuses it counts as an answer.

    Returns:
        reason and remedy if the address does not answer at all.

    Raises:
        OSError: rank 0 does not serve within `patience`.
    """
    now = answered = time.monotonic()
    deadline = now + patience.total_seconds()
    while True:
        unanswered_until = min(deadline, answered + _UNANSWERED_SECONDS)
        try:
            with socket.create_connection((host, port), timeout=max(_PAUSE_SECONDS, unanswered_until - now)):
                return None
        except ConnectionRefusedError:
            if not awaits_server:
                return None
            now = answered = time.monotonic()
            if now > deadline:
                raise
        except OSError as error:
            now = time.monotonic()
            if not isinstance(error, socket.gaierror) and is_loopback(host) and loopback_is_down():
                return f"{LOOPBACK_IS_DOWN}, or set MASTER_ADDR to another address of rank 0"
            if now > unanswered_until:
                return (
                    f"nothing answered for {now - answered:.0f} s ({error.strerror or error}): set MASTER_ADDR to "
                    "an address of rank 0 to which this machine has a route, and check that no firewall is in between"
                )
        time.sleep(_PAUSE_SECONDS)


def is_loopback(host: str) -> bool:
    """Decide whether a name or an address leads only to this machine."""
    return all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in socket.getaddrinfo(host, None))


def loopback_is_down() -> bool:
    """Decide whether this machine cannot even reach itself, as in a network namespace that was never set up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # This only looks up a route; nothing is sent.
            probe.connect(("127.0.0.1", 9))
        except OSError:
            return True
    return False


def _find_missing(store: dist.Store, world: World, patience: timedelta, began: float) -> str:
    """Wait for all ranks; describe those that do not join, or return an empty string. `_FAILED`: a rank has failed."""
    everyone = [_joined(rank) for rank in range(world.size)]
    # Poll, because a `wait` that times out prints a page.
    while not store.check([_FAILED]) and not store.check(everyone):
        if time.monotonic() - began > patience.total_seconds():
            break
        time.sleep(_PAUSE_SECONDS)
    if store.check([_FAILED]):
        return _FAILED
    missing = _missing(store, world)
    if not missing:
        return ""
    present: dict[str, list[int]] = {}
    for rank in range(world.size):
        if rank not in missing:
            present.setdefault(host_of(store, rank), []).append(rank)
    here = ", ".join(f"{as_ranges(ranks)} on {host}" for host, ranks in present.items())
    return (
        f"rank {as_ranges(missing)} of {world.size} did not join in {_duration(began)} (this is {here}): look in the "
        f"logs why they have not started, and check that their nodes reach {':'.join(map(str, _address()))}"
    )


def _missing(store: dist.Store, world: World) -> list[int]:
    return [rank for rank in range(world.size) if not store.check([_joined(rank)])]


def _is_of_another_launch(store: dist.Store, world: World) -> bool:
    """Decide whether the rank 0 that answers belongs to another training, which may hold our port."""
    ours = _launch_name(world.size)
    if world.is_main:
        store.set("launch", json.dumps([world.size, ours]))
    try:
        their_size, theirs = json.loads(store.get("launch"))
    except dist.DistError:
        return True
    if their_size != world.size or (ours and theirs and ours != theirs):
        return True
    # Launches without a name are recognized by a rank number that is already taken. Their entries are not overwritten.
    return store.add(f"taken/{world.rank}", 1) > 1


def _launch_name(size: int) -> str:
    """Return a name of this launch that is the same on all its ranks and no others; "" if the launcher gives none."""
    if LAUNCH_VARIABLE in os.environ:
        return os.environ[LAUNCH_VARIABLE]
    process: int | None = os.getpid() if os.environ.get("CROSS_SIZE") == "1" else None
    while process and NODE_LAUNCHER not in command_of(process):
        process = parent_of(process)
    if process:
        return f"deepspeed {socket.gethostname()} {process}"
    if slurm_tasks() == size:
        return f"srun {os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    return ""


def _duration(began: float) -> str:
    seconds = time.monotonic() - began
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
