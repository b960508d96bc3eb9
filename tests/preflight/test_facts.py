import os
import resource
import socket
from pathlib import Path

import pytest

from dist_transformer.preflight import facts
from dist_transformer.preflight.facts import RUN_FOLDER, Port, find_ports, gather, look_at
from dist_transformer.runtime.world import World


def test_what_this_machine_is(tmp_path: Path) -> None:
    found = gather(World(), run_dir=tmp_path / "run", cache_dir=tmp_path)
    assert found.host == socket.gethostname()
    assert found.versions["torch"].startswith("2.")
    assert found.versions.keys() >= {"python", "torch", "deepspeed", "dist_transformer", "code"}
    assert 0 < found.available_bytes < 2**50
    assert "lo" in found.interfaces
    assert found.volumes[RUN_FOLDER].free_bytes > 0
    # What does not exist is not made.
    assert list(tmp_path.iterdir()) == []
    # Alone there is no address.
    assert found.master == ""


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
    # Below it nothing can be either.
    for path in (tmp_path / "file", tmp_path / "file" / "run"):
        assert look_at(path).problem == f"{tmp_path}/file cannot be written (Not a directory)"


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


def test_ports_as_the_kernel_shows_them(tmp_path: Path) -> None:
    assert find_ports(tmp_path / "none") == ()
    for device, state in (("mlx5_1", "1: DOWN"), ("mlx5_0", "4: ACTIVE")):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "mlx5_2" / "ports" / "1").mkdir(parents=True)
    assert find_ports(tmp_path) == (
        Port(name="mlx5_0:1", is_active=True, rate="400 Gb/sec (4X NDR)"),
        Port(name="mlx5_1:1", is_active=False, rate="400 Gb/sec (4X NDR)"),
    )


def test_the_environment_of_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("NCCL_IB_HCA", "=mlx5_0:1"), ("GLOO_SOCKET_IFNAME", "ib0"), ("NOT_NCCL_", "x")):
        monkeypatch.setenv(name, value)
    for limit, expected in ((65536, 65536), (resource.RLIM_INFINITY, None)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        found = gather(World(), run_dir=None, cache_dir=tmp_path)
        assert found.locked_bytes == expected
    assert found.nccl_settings == ("GLOO_SOCKET_IFNAME=ib0", "NCCL_IB_HCA==mlx5_0:1")
