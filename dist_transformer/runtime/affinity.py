"""Run on the CPUs near a GPU: those of the NUMA node to which it is attached."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PCI = Path("/sys/bus/pci/devices")


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run this thread, and threads that it starts, on the CPUs near a GPU while the block lasts.

    On a machine with several sockets, kernel launches and copies from host memory otherwise cross the link between
    sockets if the process runs on the wrong one. Only CPUs that the launcher gave to the process are used; if none of
    them is near the GPU, nothing changes.
    """
    before = os.sched_getaffinity(0)
    near = before & cpus_beside(device) if device.type == "cuda" else set()
    if near:
        os.sched_setaffinity(0, near)
    try:
        yield
    finally:
        if near:
            os.sched_setaffinity(0, before)


def cpus_beside(device: torch.device) -> set[int]:
    """Read from the PCI bus which CPUs are near a GPU; none if it does not report them, as in some containers."""
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        return _members((_PCI / address / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return set()


def _members(ranges: str) -> set[int]:
    """Parse `0-2,8` as 0, 1, 2, 8."""
    numbers = set[int]()
    for span in filter(None, ranges.strip().split(",")):
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
