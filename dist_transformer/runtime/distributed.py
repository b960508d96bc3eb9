"""Who am I: rank and world from any launcher, and collectives that do nothing in a world of one.

Launchers: `deepspeed` and `torchrun` (RANK, WORLD_SIZE, …), `srun` (SLURM_PROCID, …), `mpirun` (mpi4py), or none.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from dist_transformer.errors import UserError
from dist_transformer.runtime.allocator import keep_freed_memory
from dist_transformer.runtime.launch import (
    RANK_VARIABLES,
    free_port,
    load_mpi,
    mpi_tasks,
    needs_mpi,
    number_in,
    slurm_tasks,
)
from dist_transformer.runtime.rendezvous import meet

T = TypeVar("T")

_SETTLE_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process among its peers."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """Rank and world as the launcher gave them; sets MASTER_ADDR and MASTER_PORT where the launcher does not.

    Whatever starts the job, all ranks find the same world, or all are told which variables do not fit.

    Raises:
        UserError: the launcher's variables are incomplete, contradict each other or are not numbers.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _need_all("RANK", "WORLD_SIZE")
        # torchrun says LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
        world = _numbered("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
        _check_outer_launchers()
        if world.size > 1:
            _need_all("MASTER_ADDR", "MASTER_PORT")
        return world
    tasks = slurm_tasks()
    if tasks > 1 and not _mpirun_differs():
        per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
        os.environ.update(SLURM_LOCAL_SIZE=str(_most_tasks(per_node)), SLURM_NTASKS=str(tasks))
        world = _numbered("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_LOCAL_SIZE")
        _set_master_from_slurm()
        return world
    return _world_from_mpi() if needs_mpi() else World()


def _need_all(*names: str) -> None:
    """Of variables that belong together, all must be set."""
    given = [name for name in names if os.environ.get(name)]
    missing = [name for name in names if name not in given]
    if missing:
        instead = f"{given[0]} is set but {missing[0]} is not" if given else f"{' and '.join(missing)} are not set"
        raise UserError(f"{instead}: start the job by its launcher, or unset what an earlier one left")


def _mpirun_differs() -> bool:
    """Whether an mpirun inside a SLURM job started this process: the tasks of the step are its helpers then."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        mpi = (number_in("OMPI_COMM_WORLD_RANK"), number_in("OMPI_COMM_WORLD_SIZE"))
    elif "PMI_SIZE" in os.environ:
        mpi = (number_in("PMI_RANK"), number_in("PMI_SIZE"))
    else:
        return False
    return mpi != (number_in("SLURM_PROCID"), slurm_tasks())


def _check_outer_launchers() -> None:
    """RANK and WORLD_SIZE must come from the innermost launcher: what a shell left would make many worlds of one."""
    # A launcher that runs once a node says how many of its kind there are: torchrun and DeepSpeed's.
    parts = next((name for name in ("GROUP_WORLD_SIZE", "CROSS_SIZE") if name in os.environ), "WORLD_SIZE")
    outer = {"srun": slurm_tasks(), "mpirun": mpi_tasks()}
    for launcher, tasks in outer.items():
        if tasks > 1 and number_in(parts) != tasks:
            raise UserError(
                f"{parts} is {os.environ[parts]} but {launcher} started {tasks} tasks: unset RANK and WORLD_SIZE "
                f"before {launcher}, or start one torchrun or deepspeed a node that know of each other"
            )


def _most_tasks(per_node: str) -> int:
    """SLURM writes `2(x3),1`: two tasks on each of three nodes, one on the next."""
    return max(int(part.split("(")[0]) for part in per_node.split(","))


def _numbered(rank: str, size: str, local_rank: str, local_size: str) -> World:
    names = (rank, size, local_rank, local_size)
    defaults = (None, None, os.environ.get(rank), os.environ.get(size))
    try:
        values = [int(os.environ.get(name, default)) for name, default in zip(names, defaults, strict=True)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        shown = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
        raise UserError(f"the launcher's variables are not numbers ({shown}): start the job by its launcher") from None
    if not 0 <= values[0] < values[1]:
        raise UserError(f"{rank} is {values[0]} but {size} is {values[1]}: unset them or start the job by its launcher")
    if not 0 <= values[2] < values[3]:
        raise UserError(
            f"{local_rank} is {values[2]} but {local_size} is {values[3]}: unset them or start the job by its launcher"
        )
    return World(rank=values[0], size=values[1], local_rank=values[2], local_size=values[3])


def _set_master_from_slurm() -> None:
    address = os.environ.get("MASTER_ADDR")
    if number_in("SLURM_NODEID") and address in (socket.gethostname(), "localhost", "127.0.0.1", "::1"):
        raise UserError(
            f"MASTER_ADDR is {address} on {socket.gethostname()}, but rank 0 runs on another node: set it once before "
            "srun, to the first host of the job, or not at all"
        )
    if address is None:
        command = ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]]
        try:
            hosts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            raise UserError(
                f"scontrol cannot name the first host of {command[-1]} ({error}): set MASTER_ADDR in the job script"
            ) from None
        os.environ["MASTER_ADDR"] = hosts[0]
    # Every task must compute the same port without talking: the job and step number give one, below those that the
    # system hands out by itself.
    job, step = int(os.environ.get("SLURM_JOB_ID", "0")), int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(10_000 + (job * 31 + step) % 20_000))


def _world_from_mpi() -> World:
    MPI = load_mpi()
    everyone = MPI.COMM_WORLD
    node = everyone.Split_type(MPI.COMM_TYPE_SHARED)
    master = everyone.bcast((socket.gethostname(), free_port()) if everyone.rank == 0 else None)
    one_node = everyone.allreduce(int(node.size == everyone.size), op=MPI.MIN)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if one_node else master[0])
    os.environ.setdefault("MASTER_PORT", str(master[1]))
    return World(rank=everyone.rank, size=everyone.size, local_rank=node.rank, local_size=node.size)


@contextmanager
def process_group(
    world: World, *, join_minutes: float = 30.0, timeout_minutes: float = 30.0, single: bool = False
) -> Iterator[torch.device]:
    """Join the process group, give the device of this rank, and leave the group at the end.

    Args:
        join_minutes: how long to wait for ranks that have not begun.
        timeout_minutes: how long a collective waits for a rank.
        single: make a group for a world of one too; DeepSpeed asks for it.

    Raises:
        UserError: some ranks do not join, which it names; or the port of the group is taken.
    """
    device = _claim_device(world)
    with _restored(RANK_VARIABLES):
        if world.size > 1 or single:
            _join(world, device, timedelta(minutes=join_minutes), timedelta(minutes=timeout_minutes))
        try:
            yield device
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
                # A thread of gloo may still hold the tensors of the last collective. Freed while the interpreter shuts
                # down, they abort the process (1 run in 8 under ZeRO-3 on a CPU), and a run that is done counts as
                # failed.
                time.sleep(_SETTLE_SECONDS)


@contextmanager
def _restored(names: Sequence[str]) -> Iterator[None]:
    """Afterwards the environment says what it said before: what this process starts then is no rank of its group."""
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
        RANK=str(world.rank), WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(world.local_rank), LOCAL_WORLD_SIZE=str(world.local_size),
    )  # fmt: skip
    if world.size == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=meet(world.rank, world.size, patience),
        rank=world.rank,
        world_size=world.size,
        timeout=timeout,
    )


def _claim_device(world: World) -> torch.device:
    if torch.cuda.is_available():
        if world.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"local rank {world.local_rank} has no GPU: this node shows {torch.cuda.device_count()}; "
                "start at most one process a GPU, or set CUDA_VISIBLE_DEVICES"
            )
        device = torch.device("cuda", world.local_rank)
        torch.cuda.set_device(device)
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, cores // world.local_size))
    keep_freed_memory()
    return torch.device("cpu")


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def barrier() -> None:
    if world_size() > 1:
        dist.barrier()


def all_reduce_sum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum over ranks, in place; int64 wraps around, so hashes may be summed."""
    if world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def broadcast_object(value: T) -> T:
    """Rank 0's value, on every rank."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def gather_objects(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """Every rank's value, in order of rank, on every rank."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def new_cpu_group(timeout_minutes: float) -> dist.ProcessGroup | None:
    """All ranks once more, for collectives beside those of the training loop. A collective."""
    timeout = timedelta(minutes=timeout_minutes)
    return dist.new_group(backend="gloo", timeout=timeout) if world_size() > 1 else None


def begin_all_reduce_max(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start taking the maximum over ranks, in place; it is there when what this gives, if anything, was waited for."""
    if group is None:
        return None
    # Called in every step: `dist.all_reduce` takes twice as long to come to this (190 µs against 90).
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    return group.allreduce([tensor], options)


@contextmanager
def error_of_all(world: World) -> Iterator[None]:
    """A `UserError` that every rank raises in the block is printed once, and every rank ends with status 1."""
    try:
        yield
    except UserError as error:
        # Every rank is here. The first one speaks before any ends: a launcher kills the others then.
        if world.is_main:
            print(f"error: {error}", file=sys.stderr, flush=True)
        barrier()
        raise SystemExit(1) from None


def on_all_ranks(
    work: Callable[[], T],
    *,
    errors: tuple[type[Exception], ...] = (UserError,),
    describe: Callable[[Exception], str] = str,
    group: dist.ProcessGroup | None = None,
) -> T:
    """Do `work` on every rank; an error on one becomes the same error on all, so that none waits for the others.

    Args:
        group: of `new_cpu_group`, for another thread than that of the training loop.

    Returns:
        this rank's result.

    Raises:
        UserError: `describe` of the first rank's error among `errors`.
    """
    value, message = None, None
    try:
        value = work()
    except errors as error:
        message = describe(error)
    first = next((m for m in gather_objects(message, group) if m is not None), None)
    if first is not None:
        raise UserError(first)
    return cast(T, value)
