"""NCCL's surroundings on a node, read from folders like the kernel's and from this process."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dist_transformer.preflight.nccl import Port, find_links, find_ports, find_settings, locked_bytes, network_in


def test_ports_as_the_kernel_shows_them(tmp_path: Path) -> None:
    assert find_ports(tmp_path / "none") == ()
    for device, state in (("mlx5_1", "1: DOWN"), ("mlx5_0", "4: ACTIVE")):
        folder = tmp_path / device / "ports" / "1"
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "mlx5_2" / "ports" / "1").mkdir(parents=True)
    (tmp_path / "drivers" / "efa").mkdir(parents=True)
    (tmp_path / "mlx5_1" / "device").mkdir()
    (tmp_path / "mlx5_1" / "device" / "driver").symlink_to(tmp_path / "drivers" / "efa")
    assert find_ports(tmp_path) == (
        Port(name="mlx5_0:1", is_active=True, rate="400 Gb/sec (4X NDR)"),
        Port(name="mlx5_1:1", is_active=False, rate="400 Gb/sec (4X NDR)", is_efa=True),
    )


def test_links_as_the_kernel_shows_them(tmp_path: Path) -> None:
    """A bridge has no card, a virtual card states no rate, and a link that is down has none."""
    for name, speed in (("eth1", "25000"), ("eth0", "-1"), ("br0", "10000"), ("eth2", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
        if name != "br0":
            (tmp_path / name / "device").mkdir()
    assert find_links(tmp_path) == (Port(name="eth1", is_active=True, rate="25 Gb/sec"),)
    assert find_links(tmp_path)[0].gigabytes == 25 / 8


def test_the_network_is_the_one_that_nccl_states() -> None:
    assert (
        network_in("n1:7:7 [0] NCCL INFO NET/IB : No device found.\nn1:7:7 [0] NCCL INFO Using network Socket\n")
        == "Socket"
    )
    assert network_in("") == ""


def test_variables_of_nccl_and_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("NCCL_IB_HCA", "=mlx5_0:1"), ("GLOO_SOCKET_IFNAME", "ib0"), ("NOT_NCCL_", "x")):
        monkeypatch.setenv(name, value)
    assert {"GLOO_SOCKET_IFNAME=ib0", "NCCL_IB_HCA==mlx5_0:1"} == set(find_settings())


def test_the_limit_of_locked_memory_is_that_of_the_process() -> None:
    program = (
        "import resource; from dist_transformer.preflight.nccl import locked_bytes; "
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536)); print(locked_bytes())"
    )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    assert locked_bytes() == (None if limit == resource.RLIM_INFINITY else limit)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "65536\n"
