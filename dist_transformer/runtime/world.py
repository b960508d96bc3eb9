"""Find rank and world size of this process under any launcher.

Launchers: `deepspeed` and `torchrun` (RANK, WORLD_SIZE, …), `srun` (SLURM_PROCID, …), `mpirun` (mpi4py), or none.
"""

import os
import socket
import subprocess
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from dist_transformer.base.errors import UserError
from dist_transformer.base.messages import pack, unpack
from dist_transformer.runtime.launch import free_port, load_mpi, mpi_tasks, needs_mpi, number_in, slurm_tasks

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """Rank and world size of this process."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    variables: tuple[str, ...] = field(default=(), compare=False)
    """Environment variables that claim that this process is one of several; without them it would run alone."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def read_world() -> World:
    """Read rank and world from the launcher's variables; set MASTER_ADDR and MASTER_PORT if the launcher does not.

    Raises:
        UserError: as `find_world`, or rank 0's address cannot be found.
    """
    world = find_world()
    if world.size > 1 and "RANK" not in os.environ:
        _set_master_from_slurm() if _is_task_of_slurm() else _set_master_from_mpi()
    return world


def find_world() -> World:
    """Read rank and world from the launcher's variables, for processes that do not use torch's process group.

    Under any launcher, all ranks find the same world, or all get an error that names the contradicting variables.

    Raises:
        UserError: the launcher's variables are incomplete, contradict each other or are not numbers.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        _need_all("RANK", "WORLD_SIZE")
        # torchrun sets LOCAL_WORLD_SIZE, DeepSpeed's launcher LOCAL_SIZE.
        local_size = "LOCAL_WORLD_SIZE" if "LOCAL_WORLD_SIZE" in os.environ else "LOCAL_SIZE"
        world = _numbered("RANK", "WORLD_SIZE", "LOCAL_RANK", local_size)
        _check_outer_launchers()
        if world.size > 1:
            _need_all("MASTER_ADDR", "MASTER_PORT")
        return replace(world, variables=("RANK", "WORLD_SIZE"))
    if _is_task_of_slurm():
        per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
        os.environ.update(SLURM_LOCAL_SIZE=str(_most_tasks(per_node)), SLURM_NTASKS=str(slurm_tasks()))
        world = _numbered("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_LOCAL_SIZE")
        return replace(world, variables=("SLURM_STEP_ID", "SLURM_NTASKS"))
    return _world_from_mpi() if needs_mpi() else World()


def require_no_launch(what: str) -> None:
    """Check, without loading MPI, that no launcher has started several processes of which this is one.

    Args:
        what: name of the part that starts processes itself, for the error.

    Raises:
        UserError: it belongs to a launch of several, or as `find_world`.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        sizes = ["WORLD_SIZE"] if find_world().size > 1 else []
    elif _is_task_of_slurm():
        sizes = ["SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"]
    else:
        sizes = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"] if needs_mpi() else []
    for name in sizes:
        if name in os.environ:
            raise UserError(
                f"{what} starts processes, but a launcher has started several already ({name} is {os.environ[name]}): "
                "use only one of the two, or unset the variables that an earlier launch left"
            )


def _is_task_of_slurm() -> bool:
    return slurm_tasks() > 1 and not _mpirun_differs()


def _need_all(*names: str) -> None:
    """Refuse a partial set of variables that belong together."""
    given = [name for name in names if os.environ.get(name)]
    missing = [name for name in names if name not in given]
    if missing:
        instead = f"{given[0]} is set but {missing[0]} is not" if given else f"{' and '.join(missing)} are not set"
        raise UserError(f"{instead}: start the job with its launcher, or unset variables that an earlier one left")


def _mpirun_differs() -> bool:
    """Decide whether an mpirun inside a SLURM job started this process; then the step's tasks are mpirun's helpers."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        mpi = (number_in("OMPI_COMM_WORLD_RANK"), number_in("OMPI_COMM_WORLD_SIZE"))
    elif "PMI_SIZE" in os.environ:
        mpi = (number_in("PMI_RANK"), number_in("PMI_SIZE"))
    else:
        return False
    return mpi != (number_in("SLURM_PROCID"), slurm_tasks())


def _check_outer_launchers() -> None:
    """Check that RANK and WORLD_SIZE come from the innermost launcher; a shell's leftovers would give worlds of one."""
    # A launcher that runs once per node sets the number of its instances: torchrun and DeepSpeed's.
    parts = next((name for name in ("GROUP_WORLD_SIZE", "CROSS_SIZE") if name in os.environ), "WORLD_SIZE")
    outer = {"srun": slurm_tasks(), "mpirun": mpi_tasks()}
    for launcher, tasks in outer.items():
        if tasks > 1 and number_in(parts) != tasks:
            raise UserError(
                f"{parts} is {os.environ[parts]} but {launcher} started {tasks} tasks: unset RANK and WORLD_SIZE "
                f"before {launcher}, or start one torchrun or deepspeed per node that know of each other"
            )


def _most_tasks(per_node: str) -> int:
    """Parse the largest number of tasks in SLURM's `2(x3),1`: two tasks on each of three nodes, one on the next."""
    return max(int(part.split("(")[0]) for part in per_node.split(","))


def _numbered(rank: str, size: str, local_rank: str, local_size: str) -> World:
    names = (rank, size, local_rank, local_size)
    defaults = (None, None, os.environ.get(rank), os.environ.get(size))
    try:
        values = [int(os.environ.get(name, default)) for name, default in zip(names, defaults, strict=True)]  # type: ignore[arg-type]
    except (TypeError, ValueError):
        shown = ", ".join(f"{name}={os.environ.get(name)}" for name in names)
        raise UserError(
            f"the launcher's variables are not numbers ({shown}): start the job with its launcher"
        ) from None
    for at in (0, 2):
        if not 0 <= values[at] < values[at + 1]:
            raise UserError(
                f"{names[at]} is {values[at]} but {names[at + 1]} is {values[at + 1]}: unset them or start the job "
                "with its launcher"
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
    # Every task must compute the same port without communication: the job and step numbers give one, below the range
    # from which the system assigns ports.
    job, step = int(os.environ.get("SLURM_JOB_ID", "0")), int(os.environ.get("SLURM_STEP_ID", "0"))
    os.environ.setdefault("MASTER_PORT", str(10_000 + (job * 31 + step) % 20_000))


def _communicators() -> tuple[Any, Any]:
    """Return MPI's communicators of all ranks and of those of this node."""
    MPI = load_mpi()
    return MPI.COMM_WORLD, MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)


def _world_from_mpi() -> World:
    everyone, node = _communicators()
    return World(rank=everyone.rank, size=everyone.size, local_rank=node.rank, local_size=node.size)


def _set_master_from_mpi() -> None:
    everyone, node = _communicators()
    own = (socket.gethostname(), free_port() if everyone.rank == 0 else None, node.size)
    (host, port, size), *_ = gather_by_mpi(everyone, own)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1" if size == everyone.size else host)
    os.environ.setdefault("MASTER_PORT", str(port))


def gather_by_mpi(communicator: Any, value: T) -> list[T]:
    """Return every rank's value, in order of rank, on every rank. Collective: every rank must call it.

    Args:
        communicator: communicator of mpi4py, whose own `allgather` would send pickles.
        value: JSON value; `base.messages.pack` says what it changes.
    """
    import numpy as np

    content = pack(value)
    sizes = np.empty(communicator.size, dtype=np.int64)
    communicator.Allgather(np.array([len(content)], dtype=np.int64), sizes)
    everything = np.empty(int(sizes.sum()), dtype=np.uint8)
    communicator.Allgatherv(np.frombuffer(content, dtype=np.uint8), [everything, sizes])
    ends = np.cumsum(sizes)
    return [unpack(everything[end - size : end].tobytes()) for size, end in zip(sizes, ends, strict=True)]
