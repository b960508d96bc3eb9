"""The CPUs beside a GPU, by a folder like the kernel's and a GPU whose place is written by hand."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dist_transformer.runtime import device
from dist_transformer.runtime.device import beside, cpus_beside

GPU = torch.device("cuda", 0)


@pytest.fixture
def pci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A bus with one GPU: domain 1, bus 0x1b, device 0."""
    place = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: place)
    monkeypatch.setattr(device, "_PCI", tmp_path)
    folder = tmp_path / "0001:1b:00.0"
    folder.mkdir()
    return folder


def test_a_list_of_cpus_is_read(pci: Path) -> None:
    (pci / "local_cpulist").write_text("0-3,8,64-65\n")
    assert cpus_beside(GPU) == {0, 1, 2, 3, 8, 64, 65}
    (pci / "local_cpulist").write_text("\n")
    assert cpus_beside(GPU) == set()


def test_a_bus_that_is_not_there_says_nothing(pci: Path) -> None:
    pci.rmdir()
    assert cpus_beside(GPU) == set()


def test_this_thread_and_those_it_starts_run_beside_the_gpu(pci: Path) -> None:
    before = os.sched_getaffinity(0)
    one = min(before)
    # One of ours, and one that the launcher has not given.
    (pci / "local_cpulist").write_text(f"{one},{max(before) + 1000}")
    seen = []
    with beside(GPU):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        assert os.sched_getaffinity(0) == {one}
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == before


def test_without_a_cpu_of_ours_beside_the_gpu_nothing_changes(pci: Path) -> None:
    before = os.sched_getaffinity(0)
    (pci / "local_cpulist").write_text(f"{max(before) + 1000}")
    with beside(GPU):
        assert os.sched_getaffinity(0) == before
    with beside(torch.device("cpu")):
        assert os.sched_getaffinity(0) == before
