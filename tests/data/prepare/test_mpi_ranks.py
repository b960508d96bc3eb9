"""The processes that form the ranks, without an MPI library: as after the plain installation."""

import os
import sys

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.prepare.mpi_ranks import MpiRanks

STEP = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}
TWO = {**STEP, "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_TASKS_PER_NODE": "2"}


@pytest.fixture(autouse=True)
def without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    launchers = ("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE")
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith(launchers)})


@pytest.mark.parametrize("variables", [{}, STEP, {"PMI_RANK": "0", "PMI_SIZE": "1"}])
def test_one_process_needs_no_mpi(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    assert MpiRanks.join().size == 1


@pytest.mark.parametrize("variables", [TWO, {"OMPI_COMM_WORLD_SIZE": "2"}])
def test_several_processes_are_told_how_to_get_it(variables: dict[str, str]) -> None:
    os.environ.update(variables)
    with pytest.raises(UserError, match=r"MPI cannot be loaded .*: install one \(pip install mpich\), or start one"):
        MpiRanks.join()
