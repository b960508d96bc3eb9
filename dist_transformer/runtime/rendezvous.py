"""All ranks of one launch meet at the store of rank 0, and none of another launch among them."""

import json
import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from dist_transformer.errors import UserError
from dist_transformer.runtime.launch import command_of, parent_of, port_remedy, slurm_tasks

_NODE_LAUNCHER = "deepspeed.launcher.launch"
# A rank 0 that finds its port taken ends its launch meanwhile: one message, not one per rank.
_RANK_0_FIRST_SECONDS = 10.0


def meet(rank: int, size: int, patience: timedelta) -> dist.Store:
    """Give the store of the process group, once all ranks have come to it. Collective: every rank must call it.

    Raises:
        UserError: the port is taken, or some ranks do not come within `patience`; it names them.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun's agents have met at a store of their own, which its ranks use.
    has_agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    serves = rank == 0 and not has_agents
    began = time.monotonic()
    try:
        store = dist.TCPStore(address, port, size, serves, timeout=patience, wait_for_workers=False)
    except dist.DistError as error:
        reason = str(error).strip().split("\n")[0]
        if serves and "EADDRINUSE" in reason:
            raise UserError(
                f"port {port} of this machine is taken, perhaps by another training: {port_remedy()}"
            ) from None
        raise UserError(
            f"rank {rank} finds no rank 0 at {address}:{port} in {_duration(began)} ({reason:.200}): see whether it "
            "has begun, and whether MASTER_ADDR and MASTER_PORT are the same on all ranks"
        ) from None
    if size > 1 and not has_agents and _is_of_another_launch(store, rank, size):
        time.sleep(_RANK_0_FIRST_SECONDS)
        raise UserError(f"port {port} of {address} is taken by another training: {port_remedy()}")
    keys = [f"joined/{rank}" for rank in range(size)]
    store.set(keys[rank], socket.gethostname())
    try:
        store.wait(keys, patience)
    except dist.DistError:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise UserError(
            f"rank(s) {', '.join(map(str, missing))} of {size} did not join in {_duration(began)}: see in the logs why "
            "they have not begun"
        ) from None
    return store


def _is_of_another_launch(store: dist.Store, rank: int, size: int) -> bool:
    """Decide whether the rank 0 that answers is not ours: where our port is taken, another training's may answer."""
    ours = _launch_name(size)
    if rank == 0:
        store.set("launch", json.dumps([size, ours]))
    try:
        their_size, theirs = json.loads(store.get("launch"))
    except dist.DistError:
        return True
    if their_size != size or (ours and theirs and ours != theirs):
        return True
    # Where launches have no name, a rank's place that is taken is the sign. Nothing of theirs is written over.
    return store.add(f"taken/{rank}", 1) > 1


def _launch_name(size: int) -> str:
    """Name this launch, the same on all its ranks and on no other's; "" where the launcher gives nothing to go by."""
    process: int | None = os.getpid() if os.environ.get("CROSS_SIZE") == "1" else None
    while process and _NODE_LAUNCHER not in command_of(process):
        process = parent_of(process)
    if process:
        return f"deepspeed {socket.gethostname()} {process}"
    if slurm_tasks() == size:
        return f"srun {os.environ.get('SLURM_JOB_ID')}.{os.environ.get('SLURM_STEP_ID')}"
    return ""


def _duration(began: float) -> str:
    seconds = time.monotonic() - began
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
