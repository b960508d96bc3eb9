"""Processes of one command on this machine: what a launcher has set before, and what they inherit of it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.cli.command import run
from dist_transformer.runtime import processes
from dist_transformer.runtime.processes import run_processes
from dist_transformer.runtime.rendezvous import _has_agents
from dist_transformer.runtime.world import World, read_world
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
OF_DEEPSPEED = {"RANK": 1, "LOCAL_RANK": 1, "WORLD_SIZE": 2, "LOCAL_SIZE": 2, "CROSS_SIZE": 1}
PRINT_ENVIRONMENT = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


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
    seen = tmp_path / "seen.json"
    environment.setattr(processes, "deepspeed_command", lambda _: [sys.executable, "-c", PRINT_ENVIRONMENT, seen])
    set_variables(variables)
    assert run_processes(2, ["train"]) == 0
    inherited = json.loads(seen.read_text(encoding="utf-8"))
    assert inherited.keys() >= os.environ.keys() & {"PATH", "SLURM_JOB_ID", "SLURM_JOB_END_TIME"}
    os.environ.clear()
    set_variables({**inherited, **OF_DEEPSPEED, "MASTER_ADDR": "a", "MASTER_PORT": 1})
    assert read_world() == World(rank=1, size=2, local_rank=1, local_size=2)
    assert not _has_agents()
    # A single process that they start, such as one for data, is alone.
    os.environ.clear()
    set_variables(inherited)
    assert read_world() == World()


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("variables", "shown"),
    [
        (TORCHRUN, "WORLD_SIZE is 8"),
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


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_STEP_ID": 0, "SLURM_NTASKS": "x"},
        {"PMI_SIZE": "x"},
        {"RANK": 0},
        {"RANK": "x", "WORLD_SIZE": 1},
        {"RANK": 0, "WORLD_SIZE": 1, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 4},
    ],
)
def test_variables_that_no_launcher_sets_have_one_error(variables: dict[str, object]) -> None:
    set_variables(variables)
    with pytest.raises(UserError) as alone:
        read_world()
    with pytest.raises(UserError, match=f"^{re.escape(str(alone.value))}$"):
        run(["train", "--processes", "2"])
