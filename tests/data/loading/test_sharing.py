"""The processes of a node share what one of them reads and plans: real processes, on one machine that plays several."""

import json
import os
import re
import shutil
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.runtime.launch import free_port
from dist_transformer.runtime.node import _place
from tests.commands import Begun
from tests.conftest import ROOT, begin_python, scratch_folder

pytestmark = pytest.mark.slow

WORKER = ROOT / "tests" / "distributed" / "worker_sharing.py"
STEPS = 90


def start(ranks: int, data: Path, nodes: int, steps: int) -> list[Begun]:
    outputs = scratch_folder()
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        begin_python(
            *(WORKER, data, nodes, steps),
            output=outputs / f"output-{rank}",
            **{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(ranks)
    ]


def ends(processes: Sequence[Begun]) -> list[dict[str, Any]]:
    """The last line of each process."""
    return [json.loads(process.communicate(timeout=600)[0].splitlines()[-1]) for process in processes]


def run(ranks: int, data: Path, nodes: int = 1) -> list[dict[str, Any]]:
    return ends(start(ranks, data, nodes, STEPS))


@pytest.fixture(scope="module")
def alone(toy_data: DataFolder) -> dict[str, Any]:
    (found,) = run(1, toy_data.path)
    assert len(found["steps"]) == STEPS
    assert any(pairs for *_, pairs in found["steps"]), "an epoch ends"
    return found


def test_processes_of_one_machine_find_that_they_share_it() -> None:
    """The tests below say which node a rank is on; here the machine does."""
    assert _place(0) == _place(1)
    assert len(_place(0)) > 1


@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (4, 2), (2, 2)])
def test_every_rank_has_the_steps_of_a_run_alone(
    ranks: int, nodes: int, alone: dict[str, Any], toy_data: DataFolder
) -> None:
    """Their sentences, positions and events; and the first rank of each node alone reads."""
    found = run(ranks, toy_data.path, nodes)
    for rank, seen in enumerate(found):
        assert seen["steps"] == alone["steps"]
        assert (seen["ended"], seen["skipped"]) == (None, alone["skipped"])
        leads = rank % (ranks // nodes) == 0
        of_training = [name for name in seen["reads"] if name != "valid/lengths.npy"]
        assert of_training == ([name for name in alone["reads"] if name != "valid/lengths.npy"] if leads else [])


def test_a_shard_that_one_node_cannot_read_is_left_out_on_all(toy_data: DataFolder, tmp_path: Path) -> None:
    """The first node finds it damaged; the ranks of both say the same of it."""
    shutil.copytree(toy_data.path, tmp_path / "damaged")
    shard = tmp_path / "damaged" / "train-00002.arrow"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 4
    shard.write_bytes(content)
    one, *others = run(4, tmp_path / "damaged", nodes=2)
    assert any(left_out == [2] for *_, left_out, _ in one["steps"])
    assert "train-00002.arrow is damaged" in one["problems"]["(0, 2)"]
    for other in others:
        assert (other["steps"], other["problems"]) == (one["steps"], one["problems"])


def test_a_folder_that_cannot_be_opened_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    errors = [found["error"] for found in run(3, tmp_path)]
    assert "is not a data folder" in errors[0]
    assert errors == errors[:1] * 3


def shared_memory_of(processes: Sequence[Begun]) -> set[Path]:
    """Named files in shared memory that these processes map: after a kill they would stay."""
    maps = "".join(Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8") for process in processes)
    return {Path(line) for line in re.findall(r"(/dev/shm/\S+)", maps)}


def unix_sockets() -> dict[str, str]:
    """Names of the machine's Unix sockets that have one, by inode."""
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
    return {words[6]: words[7] for line in lines if len(words := line.split()) == 8}


def names_of_sockets(processes: Sequence[Begun]) -> set[str]:
    """Names of the sockets through which these processes share data."""
    named, found = unix_sockets(), set()
    for process in processes:
        for handle in Path(f"/proc/{process.pid}/fd").iterdir():
            # It opens and closes files meanwhile.
            with suppress(FileNotFoundError):
                inode = os.readlink(handle).removeprefix("socket:[").removesuffix("]")
                found.add(named.get(inode, ""))
    return {name for name in found if name.startswith("@dist_transformer-")}


@pytest.mark.parametrize("killed", [0, 1])
def test_when_a_process_is_killed_the_others_of_its_node_are_told_and_nothing_is_left(
    killed: int, toy_data: DataFolder
) -> None:
    processes = start(2, toy_data.path, 1, 0)
    try:
        for process in processes:
            assert "pid" in json.loads(process.first_line())
        sockets = names_of_sockets(processes)
        assert sockets
        assert not shared_memory_of(processes)
        processes[killed].send_signal(signal.SIGKILL)
        (left,) = ends([processes[1 - killed]])
    finally:
        # Without an end of one of them they draw without end.
        for process in processes:
            process.kill()
    reader = "rank 0, which reads the data for this node," if killed == 0 else "rank 1 of this node"
    assert left["ended"] == f"{reader} has ended: see its message; the last checkpoint is intact"
    assert processes[killed].wait() == -signal.SIGKILL
    assert not sockets & set(unix_sockets().values())
