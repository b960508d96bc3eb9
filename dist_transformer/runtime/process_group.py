"""Join the process group of a launch, and claim the device of this rank."""

import atexit
import ctypes
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from dist_transformer.base.errors import UserError
from dist_transformer.runtime.device import beside, cores_of_rank, find_device, keep_freed_memory, threads_are_given
from dist_transformer.runtime.distributed import connect_ring
from dist_transformer.runtime.launch import RANK_VARIABLES
from dist_transformer.runtime.rendezvous import (
    LAZY_GLOO,
    LOOPBACK_IS_DOWN,
    address_is_here,
    end_launch,
    loopback_is_down,
    meet,
)
from dist_transformer.runtime.world import World

_SETTLE_SECONDS = 0.3
# Linux's name of the interface.
_LOOPBACK = "lo"
COLLECTIVE_ADVICE = (
    "A collective fails on all ranks when one of them dies or the network breaks: look in the log for the rank that "
    "failed first, and run dist-transformer doctor on the same nodes. If no rank failed, start again with "
    "NCCL_DEBUG=INFO, whose lines name the devices that NCCL uses, and set NCCL_SOCKET_IFNAME and NCCL_IB_HCA (on "
    "CPUs: GLOO_SOCKET_IFNAME) to those that connect the nodes."
)
"""Advice for a collective that fails or hangs."""


@contextmanager
def process_group(
    world: World,
    *,
    device_name: str | None = None,
    join_minutes: float = 30.0,
    timeout_minutes: float = 30.0,
    single: bool = False,
    ready: Callable[[], object] = lambda: None,
) -> Iterator[torch.device]:
    """Join the process group, yield the device of this rank, and leave the group at the end.

    Args:
        device_name: as for `find_device`.
        join_minutes: how long to wait for ranks that have not started.
        timeout_minutes: how long a collective waits for a rank.
        single: make a group for a world of one, too, which DeepSpeed requires.
        ready: checks what this rank can check alone, such as files, before it waits for the others; a UserError of one
            rank ends all of them.

    Raises:
        SystemExit: a rank was not ready; its error has been printed.
        UserError: this rank is not ready and is alone, or cannot reach rank 0; some ranks do not join (the error names
            them), the port of the group is taken, nothing answers at rank 0's address, or there is no such device.
    """
    device = _prepare(world, device_name, ready)
    with _restored((*RANK_VARIABLES, LAZY_GLOO, "GLOO_SOCKET_IFNAME")), beside(device):
        if world.size > 1 or single:
            _join(world, device, timedelta(minutes=join_minutes), timedelta(minutes=timeout_minutes))
        try:
            yield device
        except Exception as error:
            if isinstance(error, RuntimeError) and (isinstance(error, dist.DistError) or "gloo" in str(error)):
                error.add_note(COLLECTIVE_ADVICE)
            _keep_groups()
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                # A thread of gloo may still hold the tensors of the last collective. If they are freed while the
                # interpreter shuts down, they abort the process (1 run in 8 under ZeRO-3 on a CPU), and a complete run
                # counts as failed.
                time.sleep(_SETTLE_SECONDS)


def collective_record() -> bytes | None:
    """Return NCCL's record of its last collectives as JSON; None without NCCL, or if nothing is recorded."""
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    record: bytes = dump() if dump is not None else b""
    return record if b'"record_id"' in record else None


def _keep_groups() -> None:
    """Keep the groups of a failed launch until the process ends: to free one waits for collectives with lost ranks."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    if dist.is_initialized() and dist.get_world_size() > 1:
        atexit.register(_leave)


def _leave() -> None:
    """End this process before C++ frees the kept groups, whose threads may still run and would then abort it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(1)


@contextmanager
def _restored(names: Sequence[str]) -> Iterator[None]:
    """Restore these environment variables at the end, so that later child processes are not ranks of this group."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _join(world: World, device: torch.device, patience: timedelta, timeout: timedelta) -> None:
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank),
        LOCAL_WORLD_SIZE=str(world.local_size),
    )
    if address_is_here() and _LOOPBACK in (name for _, name in socket.if_nameindex()):
        # Otherwise gloo opens a port on the network, for ranks that are all on this machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    store = meet(world, patience)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=world.rank,
            world_size=world.size,
            timeout=timeout,
        )
    except RuntimeError:
        # gloo needs a network interface, even for one process.
        if not loopback_is_down():
            raise
        raise UserError(
            f"rank {world.rank} on {socket.gethostname()} finds no network interface for its process group: "
            f"{LOOPBACK_IS_DOWN}"
        ) from None
    if world.size > 1:
        connect_ring()


def _prepare(world: World, device_name: str | None, ready: Callable[[], object]) -> torch.device:
    try:
        device = _claim_device(world, device_name)
        ready()
    except UserError as error:
        if world.size == 1:
            raise
        end_launch(world, str(error))
    return device


def _claim_device(world: World, name: str | None) -> torch.device:
    device = find_device(name, world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return device
    if not threads_are_given():
        torch.set_num_threads(cores_of_rank(world.local_size))
    keep_freed_memory()
    return device
