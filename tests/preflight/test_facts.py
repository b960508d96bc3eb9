import os
import socket
from pathlib import Path

import pytest
import torch

from dist_transformer.preflight import facts
from dist_transformer.preflight.facts import RUN_FOLDER, gather, look_at, product_rate
from dist_transformer.runtime.world import World


def test_what_this_machine_is(tmp_path: Path) -> None:
    found = gather(World(), run_dir=tmp_path / "run", cache_dir=tmp_path)
    assert found.host == socket.gethostname()
    assert found.versions["torch"].startswith("2.")
    assert found.versions.keys() >= {"python", "torch", "deepspeed", "dist_transformer"}
    assert 0 < found.available_bytes < 2**50
    assert "lo" in found.interfaces
    assert found.volumes[RUN_FOLDER].free_bytes > 0
    # What does not exist is not made.
    assert list(tmp_path.iterdir()) == []
    # Alone there is no address.
    assert found.master == ""


def test_the_rate_of_products_is_measured() -> None:
    rate = product_rate(torch.device("cpu"), torch.float32, size=128, seconds=0.01)
    assert 1e-4 < rate < 100


def test_the_ranks_of_a_node_share_its_memory(tmp_path: Path) -> None:
    alone, one_of_many = (
        gather(World(local_size=size), run_dir=None, cache_dir=tmp_path).available_bytes for size in (1, 1000)
    )
    assert one_of_many < alone / 100


def test_a_folder_that_is_not_there_is_judged_by_its_parent(tmp_path: Path) -> None:
    found = look_at(tmp_path / "a" / "b")
    assert found.problem is None
    assert found.free_bytes == pytest.approx(os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize, rel=0.1)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert look_at(tmp_path / "file").problem == f"{tmp_path}/file is a file, not a folder"
    # Below it nothing can be.
    assert "is a file" in str(look_at(tmp_path / "file" / "run").problem)


def test_a_folder_that_refuses_files_is_named() -> None:
    """Not even root writes here."""
    assert "/proc cannot be written" in str(look_at(Path("/proc")).problem)


def test_a_limit_of_the_job_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(facts, "_control_group_memory", lambda: [(3 * 2**20, 2**20)])
    assert gather(World(), run_dir=None, cache_dir=tmp_path).available_bytes == 2 * 2**20


@pytest.mark.parametrize(
    ("lines", "folder", "names"),
    [
        (["0::/job/step"], "", ("memory.max", "memory.current")),
        (
            ["4:cpu,cpuacct:/job/step", "3:memory:/job/step", "0::/other"],
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ),
    ],
)
def test_limits_of_control_groups_of_both_versions(
    lines: list[str], folder: str, names: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines))
    step = tmp_path / "sys" / "fs" / "cgroup" / folder / "job" / "step"
    step.mkdir(parents=True)
    for place, values in ((step, ("3000\n", "1000\n")), (step.parent, ("9000\n", "2000\n"))):
        for name, value in zip(names, values, strict=True):
            (place / name).write_text(value)
    assert facts._control_group_memory(tmp_path) == [(3000, 1000), (9000, 2000)]


def test_a_name_that_does_not_resolve_has_no_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    world = World(rank=0, size=2, local_rank=0, local_size=2)
    for name, expected in (("127.0.0.1", ("127.0.0.1",)), ("no.such.host.invalid", ())):
        monkeypatch.setenv("MASTER_ADDR", name)
        found = gather(world, run_dir=None, cache_dir=tmp_path)
        assert (found.master, found.master_addresses) == (name, expected)
