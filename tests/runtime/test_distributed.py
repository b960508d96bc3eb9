"""The rank of a process: from the environments of the launchers, and in two real launches."""

import json
import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Store

from dist_transformer.base.errors import UserError
from dist_transformer.runtime import distributed, rendezvous
from dist_transformer.runtime import world as world_module
from dist_transformer.runtime.launch import RANK_VARIABLES, free_port
from dist_transformer.runtime.process_group import process_group
from dist_transformer.runtime.rendezvous import connect, meet
from dist_transformer.runtime.world import World, read_world
from tests.conftest import ROOT

WORKER = ROOT / "tests" / "distributed" / "worker_world.py"
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI", "CROSS_", "GROUP_")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher; what the test or the code sets is undone."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)})
    return monkeypatch


def launched(values: dict[str, object]) -> World:
    os.environ.update({name: str(value) for name, value in values.items()})
    return read_world()


MASTER = {"MASTER_ADDR": "a", "MASTER_PORT": 1}
TORCHRUN = {"RANK": 5, "WORLD_SIZE": 8, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 4, "GROUP_WORLD_SIZE": 2, **MASTER}
SRUN = {
    "SLURM_JOB_ID": 17,
    "SLURM_STEP_ID": 2,
    "SLURM_PROCID": 3,
    "SLURM_LOCALID": 1,
    "SLURM_NTASKS": 4,
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "n[1-2]",
}


@pytest.mark.usefixtures("environment")
class TestReadWorld:
    @pytest.mark.parametrize(
        ("values", "world"),
        [
            ({}, World(rank=0, size=1, local_rank=0, local_size=1)),
            (TORCHRUN, World(rank=5, size=8, local_rank=1, local_size=4)),
            # DeepSpeed gives no local world size: one node is assumed then.
            (
                {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, **MASTER},
                World(rank=1, size=2, local_rank=1, local_size=2),
            ),
            # One torchrun a node: eight ranks, two tasks.
            (
                {**SRUN, "SLURM_NTASKS": 2, "SLURM_PROCID": 1, **TORCHRUN},
                World(rank=5, size=8, local_rank=1, local_size=4),
            ),
            # An address of the job script; MPI that srun offers.
            ({**SRUN, **MASTER, "PMI_RANK": 3, "PMI_SIZE": 4}, World(rank=3, size=4, local_rank=1, local_size=2)),
            ({**SRUN, **MASTER, "SLURM_STEP_TASKS_PER_NODE": "4"}, World(rank=3, size=4, local_rank=1, local_size=4)),
            ({**SRUN, **MASTER, "SLURM_TASKS_PER_NODE": "1,3"}, World(rank=3, size=4, local_rank=1, local_size=3)),
            # In a batch script SLURM_PROCID is set, and no step.
            ({name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}, World()),
        ],
    )
    def test_the_world_of_each_launcher(self, values: dict[str, object], world: World) -> None:
        assert launched(values) == world
        assert read_world().is_main == (world.rank == 0)
        if "MASTER_ADDR" in values:
            assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("a", "1")

    def test_srun(self, environment: pytest.MonkeyPatch) -> None:
        commands = []

        def scontrol(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            commands.append(command)
            return subprocess.CompletedProcess(command, 0, stdout="n1\nn2\n")

        environment.setattr(subprocess, "run", scontrol)
        assert launched(SRUN) == World(rank=3, size=4, local_rank=1, local_size=2)
        assert commands == [["scontrol", "show", "hostnames", "n[1-2]"]]
        assert os.environ["MASTER_ADDR"] == "n1"
        # Every task computes the same port from job and step: 10000 + 17 * 31 + 2.
        assert os.environ["MASTER_PORT"] == "10529"

    def test_mpirun_in_a_slurm_job_counts(self, environment: pytest.MonkeyPatch) -> None:
        """It starts a helper a node by srun, and the ranks inherit the helper's variables."""
        environment.setattr(world_module, "_world_from_mpi", lambda: World(rank=3, size=4))
        environment.setattr(world_module, "_set_master_from_mpi", lambda: None)
        assert launched({**SRUN, "SLURM_NTASKS": 2, "SLURM_PROCID": 1, "PMI_RANK": 3, "PMI_SIZE": 4}).size == 4

    @pytest.mark.parametrize(
        "mpi", [{}, {"PMI_RANK": 0, "PMI_SIZE": 1}, {"OMPI_COMM_WORLD_SIZE": 1, "PMIX_RANK": 0}, {"PMIX_RANK": 0}]
    )
    def test_one_task_is_a_world_of_one(self, mpi: dict[str, object], environment: pytest.MonkeyPatch) -> None:
        """Without MPI: `srun --mpi=pmi2` sets PMI_SIZE for one task too."""
        environment.setitem(sys.modules, "mpi4py", None)
        assert launched({**SRUN, "SLURM_NTASKS": 1, "SLURM_PROCID": 0, **mpi}) == World()

    @pytest.mark.parametrize("mpi", [{"PMI_SIZE": 2}, {"OMPI_COMM_WORLD_SIZE": 2}, {"PMIX_RANK": 0}])
    def test_several_tasks_of_mpirun_need_mpi(self, mpi: dict[str, object], environment: pytest.MonkeyPatch) -> None:
        environment.setitem(sys.modules, "mpi4py", None)
        with pytest.raises(
            UserError, match=r"MPI cannot be loaded \(.*\): install one \(pip install mpich\), or start"
        ):
            launched(mpi)

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (
                {"RANK": 0, "WORLD_SIZE": 1, "SLURM_STEP_ID": 0, "SLURM_NTASKS": 4},
                "WORLD_SIZE is 1 but srun started 4 tasks: unset RANK and WORLD_SIZE before srun",
            ),
            ({**SRUN, **TORCHRUN}, "GROUP_WORLD_SIZE is 2 but srun started 4 tasks"),
            (
                {**SRUN, "RANK": 0, "WORLD_SIZE": 4, "CROSS_SIZE": 1, **MASTER},
                "CROSS_SIZE is 1 but srun started 4 tasks: .* or start one torchrun or deepspeed per node",
            ),
            ({"RANK": 0, "WORLD_SIZE": 1, "PMI_RANK": 1, "PMI_SIZE": 3}, "WORLD_SIZE is 1 but mpirun started 3 tasks"),
            ({"RANK": 0}, "RANK is set but WORLD_SIZE is not: start the job with its launcher, or unset"),
            ({"WORLD_SIZE": 2}, "WORLD_SIZE is set but RANK is not"),
            ({"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "a"}, "MASTER_ADDR is set but MASTER_PORT is not"),
            ({"RANK": 0, "WORLD_SIZE": 2}, "MASTER_ADDR and MASTER_PORT are not set"),
            ({**SRUN, "SLURM_NODEID": 1, "MASTER_ADDR": "localhost"}, "MASTER_ADDR is localhost on .*another node"),
            ({**SRUN, "SLURM_NODEID": 1, "MASTER_ADDR": socket.gethostname()}, "rank 0 runs on another node"),
            ({"RANK": 2, "WORLD_SIZE": 2}, "RANK is 2 but WORLD_SIZE is 2: unset them or start the job with its"),
            (
                {"RANK": "one", "WORLD_SIZE": 2},
                r"not numbers \(RANK=one, WORLD_SIZE=2.*start the job with its launcher",
            ),
            ({"SLURM_STEP_ID": 0, "SLURM_NTASKS": "two"}, "SLURM_NTASKS is 'two', which is not a number"),
            (
                {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 2, "LOCAL_WORLD_SIZE": 2},
                "LOCAL_RANK is 2 but LOCAL_WORLD_SIZE is 2",
            ),
            ({**SRUN, "SLURM_PROCID": 4, "MASTER_ADDR": "n1"}, "SLURM_PROCID is 4 but SLURM_NTASKS is 4"),
        ],
    )
    def test_variables_that_contradict_each_other_are_refused(self, values: dict[str, object], message: str) -> None:
        with pytest.raises(UserError, match=message):
            launched(values)

    @pytest.mark.parametrize(
        "failure", [FileNotFoundError("scontrol"), subprocess.CalledProcessError(1, "scontrol")], ids=["none", "fails"]
    )
    def test_without_scontrol_the_remedy_is_named(self, failure: Exception, environment: pytest.MonkeyPatch) -> None:
        def fails(*_: Any, **__: Any) -> None:
            raise failure

        environment.setattr(subprocess, "run", fails)
        with pytest.raises(UserError, match="MASTER_ADDR"):
            launched(SRUN)


@pytest.mark.usefixtures("environment")
def test_collectives_do_nothing_in_a_world_of_one() -> None:
    with process_group(World()) as device:
        assert not torch.distributed.is_initialized()
        assert device.type in ("cpu", "cuda")
        tensor = torch.tensor([3])
        assert distributed.all_reduce_sum(tensor) is tensor
        assert tensor.tolist() == [3]
        assert distributed.broadcast_object("a") == "a"
        assert distributed.gather_objects("a") == ["a"]
        assert distributed.on_all_ranks(lambda: 3) == distributed.by_main(lambda: 3) == 3
        assert (distributed.rank(), distributed.world_size()) == (0, 1)
        distributed.barrier()


@pytest.mark.usefixtures("environment")
def test_a_group_of_one_and_its_end_after_an_error() -> None:
    def fail_inside() -> None:
        with process_group(World(), single=True):
            assert torch.distributed.get_world_size() == 1
            assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
            raise ValueError("inside")

    os.environ["RANK"] = "7"
    with pytest.raises(ValueError, match="inside"):
        fail_inside()
    assert not torch.distributed.is_initialized()
    # A launch that this process starts later is another job.
    assert {name: os.environ.get(name) for name in RANK_VARIABLES} == {**dict.fromkeys(RANK_VARIABLES), "RANK": "7"}


@pytest.mark.system
def test_ranks_that_do_not_join_are_named(environment: pytest.MonkeyPatch) -> None:
    port = free_port()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))

    def join(rank: int) -> None:
        with process_group(World(rank=rank, size=3, local_rank=rank, local_size=3), join_minutes=0.01):
            pass

    with pytest.raises(UserError, match=r"^rank 1-2 of 3 did not join in \d+ s \(this is 0 on .*\): "):
        join(0)
    with pytest.raises(UserError, match=rf"^rank 1 on .* cannot reach rank 0 at 127\.0\.0\.1:{port} in \d+ s "):
        join(1)


def meet_as(rank: int, size: int = 2) -> Store:
    return meet(World(rank=rank, size=size), timedelta(minutes=5))


@pytest.fixture
def port(environment: pytest.MonkeyPatch) -> int:
    """A port of a launch whose ranks this process plays."""
    environment.setattr(rendezvous, "_RANK_0_FIRST_SECONDS", 0.0)
    port = free_port()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return port


@pytest.mark.parametrize(
    ("launcher", "remedy"), [({}, r"MASTER_PORT="), ({"CROSS_SIZE": "1"}, r"deepspeed --master_port ")]
)
def test_a_port_that_is_taken_is_named_with_a_free_one(launcher: dict[str, str], remedy: str, port: int) -> None:
    os.environ.update(launcher)
    with socket.create_server(("", port)):
        said = rf"^port {port} of this machine is taken, perhaps by another training: use another one, such as {remedy}"
        with pytest.raises(UserError, match=rf"{said}\d+$") as error:
            meet_as(0)
    with socket.create_server(("", int(re.findall(r"\d+$", str(error.value))[0]))):
        pass


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_whose_place_is_taken_is_of_another_launch(size: int, port: int) -> None:
    """Its own rank 0 finds the port taken; nothing of the other launch is written over."""
    with ThreadPoolExecutor() as ranks:
        store, _ = ranks.map(meet_as, range(2))
    keys = store.num_keys()
    with pytest.raises(UserError, match=rf"^port {port} of 127\.0\.0\.1 is taken by another training: use another"):
        meet_as(1, size)
    assert store.num_keys() == keys
    assert store.get("joined/1").decode() == socket.gethostname()


def test_a_rank_of_another_launch_takes_nobodys_place(environment: pytest.MonkeyPatch, port: int) -> None:
    """It comes before the rank whose place it would be; launches with a name know their own."""
    os.environ.update(SLURM_JOB_ID="1", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2")
    with ThreadPoolExecutor() as ranks:
        rank_0 = ranks.submit(meet_as, 0)
        watching = connect(World(rank=1, size=2), timedelta(minutes=5))
        watching.wait(["joined/0"])
        os.environ["SLURM_JOB_ID"] = "2"
        with pytest.raises(UserError, match="taken by another training"):
            meet_as(1)
        os.environ["SLURM_JOB_ID"] = "1"
        meet_as(1)
        assert rank_0.result().check(["joined/1"])


@pytest.mark.system
@pytest.mark.parametrize(
    "launcher",
    [
        [str(Path(sys.executable).with_name("mpirun")), "-n", "2", sys.executable],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    ],
    ids=["mpirun", "torchrun"],
)
def test_two_real_ranks_find_each_other(launcher: list[str]) -> None:
    if not Path(launcher[0]).exists():
        pytest.skip("no mpirun beside the interpreter: install the extra [test]")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    done = subprocess.run(
        [*launcher, str(WORKER)],
        env={**clean, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ranks = sorted((json.loads(line) for line in done.stdout.splitlines()), key=lambda seen: seen["rank"])
    assert ranks == [
        {
            "rank": rank,
            "size": 2,
            "local_rank": rank,
            "local_size": 2,
            "is_main": rank == 0,
            "group": [rank, 2],
            "sums": [3, -2],
            "from_rank_0": "rank 0",
            "gathered": [0, 1],
            "lists": repr([[float("inf"), {"own": 0}], [float("inf"), {"own": 1}]]),
            "long": [0, 100_000],
            "own_result": rank,
            "error": "disk full",
            "left": True,
        }
        for rank in (0, 1)
    ]
