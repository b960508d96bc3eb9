"""Processes of one command on this machine: what a launcher has set before, and what they inherit of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import run
from dist_transformer.runtime import processes
from dist_transformer.runtime.launch import environment_of_child, without_place
from dist_transformer.runtime.processes import run_processes
from dist_transformer.runtime.rendezvous import _has_agents, _launch_name
from dist_transformer.runtime.world import World, read_world
from tests.conftest import allow_interrupts
from tests.runtime.test_distributed import SRUN, TORCHRUN, environment

__all__ = ["environment"]

# What `srun --pty bash` sets: a step of one task, also in a larger job.
INTERACTIVE = {**SRUN, "SLURM_STEP_NUM_TASKS": 1, "SLURM_PROCID": 0, "SLURM_LOCALID": 0, "SLURM_JOB_END_TIME": 99}
TORCHRUN_OF_ONE = {
    **TORCHRUN,
    "RANK": 0,
    "WORLD_SIZE": 1,
    "LOCAL_RANK": 0,
    "LOCAL_WORLD_SIZE": 1,
    "GROUP_WORLD_SIZE": 1,
}
AGENTS = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 3}
PRINT_ENVIRONMENT = (
    "import json, os, sys; json.dump(dict(os.environ), open(os.path.join(sys.argv[1], os.environ['RANK']), 'w'))"
)
RANK = """
import os, pathlib, signal, sys, time
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
def leave(number, frame):
    # SIGTERM follows as soon as the other has ended.
    if not (folder / f"signal-{rank}").exists(): (folder / f"signal-{rank}").write_text(str(number))
    sys.exit(75)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT): signal.signal(number, leave)
os.write(1, f"rank {rank} {sys.stdin.readline().strip() if rank == '0' else ''}\\n".encode())
exec(sys.argv[2])
(folder / f"pid-{rank}").write_text(str(os.getpid()))
exec(sys.argv[3])
time.sleep(600)
"""
LAUNCH = """
import sys
from dist_transformer.runtime import processes
processes._PROGRAM = ("-c", sys.argv[1])
processes._GRACE_SECONDS = float(sys.argv[2])
sys.exit(processes.run_processes(2, sys.argv[3:]))
"""


def set_variables(values: dict[str, object]) -> None:
    os.environ.update({name: str(value) for name, value in values.items()})


@pytest.mark.parametrize(
    "variables",
    [
        {},
        INTERACTIVE,
        {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 1, "SLURM_PROCID": 0, "PMI_SIZE": 1, "PMI_RANK": 0},
        {"SLURM_STEP_ID": 0, "SLURM_NTASKS": 1, "PMIX_RANK": 0},
        {"OMPI_COMM_WORLD_SIZE": 1, "OMPI_COMM_WORLD_RANK": 0, "PMIX_RANK": 0},
        {"RANK": 0, "WORLD_SIZE": 1},
        {**TORCHRUN_OF_ONE, **AGENTS},
        {**INTERACTIVE, **TORCHRUN_OF_ONE, **AGENTS},
    ],
    ids=["plain", "srun --pty", "pmi2", "pmix", "open mpi", "a world of one", "torchrun", "torchrun in srun"],
)
def test_one_task_starts_processes_with_places_of_their_own(
    variables: dict[str, object], environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environment.setattr(processes, "_PROGRAM", ("-c", PRINT_ENVIRONMENT))
    set_variables(variables)
    outer = os.environ.keys() & {"PATH", "SLURM_JOB_ID", "SLURM_JOB_END_TIME"}
    assert run_processes(2, [str(tmp_path)]) == 0
    of_ranks = [json.loads((tmp_path / str(rank)).read_text(encoding="utf-8")) for rank in range(2)]
    names = set()
    for rank, inherited in enumerate(of_ranks):
        assert inherited.keys() >= outer
        os.environ.clear()
        set_variables(inherited)
        world = read_world()
        assert (world.rank, world.size, world.local_rank, world.local_size) == (rank, 2, rank, 2)
        assert not _has_agents()
        names.add(_launch_name(2))
        # A process that a rank starts, such as one for data, is alone.
        alone = without_place(environment_of_child())
        os.environ.clear()
        set_variables(alone)
        assert read_world() == World()
    assert len(names) == 1
    assert names != {""}


class Launch:
    """Two ranks of a program of few lines, in a process that launches them."""

    def __init__(self, folder: Path, program: str = "", *, first: str = "", grace: float = 300) -> None:
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, RANK, str(grace), str(folder), first, program],
            env=without_place(environment_of_child()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=allow_interrupts,  # noqa: PLW1509
        )

    def pids(self) -> list[int]:
        """Wait for the ranks."""
        files = [self.folder / f"pid-{rank}" for rank in range(2)]
        while not all(file.exists() and file.read_text() for file in files):
            assert self.process.poll() is None
            time.sleep(0.05)
        return [int(file.read_text()) for file in files]

    def signals(self) -> list[int | None]:
        files = [self.folder / f"signal-{rank}" for rank in range(2)]
        return [int(file.read_text()) if file.exists() else None for file in files]


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_signals_are_passed_on_and_the_status_is_that_of_the_ranks(number: int, status: int, tmp_path: Path) -> None:
    """SIGINT reaches the launcher alone, as `kill -INT` sends it."""
    launch = Launch(tmp_path)
    assert launch.process.stdin is not None
    launch.process.stdin.write("from the input\n")
    launch.process.stdin.flush()
    launch.pids()
    launch.process.send_signal(number)
    output, _ = launch.process.communicate(timeout=600)
    assert launch.process.returncode == status
    assert launch.signals() == [number, number]
    assert sorted(output.splitlines()) == ["rank 0 from the input", "rank 1 "]


@pytest.mark.parametrize(
    ("program", "status", "signals"),
    [
        ("if rank == '1': sys.exit(3)", 3, [signal.SIGTERM, None]),
        ("if rank == '0': os.kill(os.getpid(), signal.SIGKILL)", 137, [None, signal.SIGTERM]),
        # The other does not end in time.
        ("if rank == '1': sys.exit(4)", 4, [None, None]),
        ("sys.exit(0)", 0, [None, None]),
    ],
    ids=["fails", "is killed", "hangs", "all end"],
)
def test_when_a_rank_fails_the_others_are_ended(
    program: str, status: int, signals: list[int | None], tmp_path: Path
) -> None:
    # A rank fails when both are there.
    first, grace = ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", 0.5) if status == 4 else ("", 300)
    waits = (
        "def is_there(i): return (folder / f'pid-{i}').exists() and (folder / f'pid-{i}').read_text()\n"
        "while not all(map(is_there, '01')): time.sleep(0.05)\n"
    )
    launch = Launch(tmp_path, waits + program, first=first, grace=grace)
    launch.process.communicate("\n", timeout=600)
    assert launch.process.returncode == status
    assert launch.signals() == signals
    assert not any(Path(f"/proc/{(tmp_path / f'pid-{rank}').read_text()}").exists() for rank in range(2))


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        ({**INTERACTIVE, **TORCHRUN}, "WORLD_SIZE is 8"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": 4}, "SLURM_STEP_NUM_TASKS is 4"),
        (SRUN, "SLURM_NTASKS is 4"),
        ({"PMI_SIZE": 2, "PMI_RANK": 1}, "PMI_SIZE is 2"),
        ({**INTERACTIVE, "OMPI_COMM_WORLD_SIZE": 3, "OMPI_COMM_WORLD_RANK": 0}, "OMPI_COMM_WORLD_SIZE is 3"),
        ({"PMIX_RANK": 0}, "PMIX_RANK is 0"),
    ],
)
def test_several_tasks_are_refused(variables: dict[str, object], shown: str) -> None:
    set_variables(variables)
    said = (
        rf"^--processes starts processes, but a launcher has started several already \({shown}\): use only one of the "
        "two, or unset"
    )
    with pytest.raises(UserError, match=said):
        run(["evaluate", "--processes=2"])
    with pytest.raises(UserError, match=rf"^the demo starts processes, .*{shown}"):
        run(["demo"])
