"""The CPUs beside a GPU: those of the memory node to which it is attached."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_PCI = Path("/sys/bus/pci/devices")


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Run this thread, and threads that it starts, on the CPUs beside a GPU while the block lasts.

    On a machine with several sockets, the launch of a kernel and a copy from host memory otherwise cross the link
    between the sockets, when the process happens to run on the wrong one. CPUs that the launcher has not given stay out
    of it; where it has given none beside the GPU, nothing changes.
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
    """Read from the PCI bus which CPUs are beside a GPU; none where it does not report them, as in some containers."""
    properties = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"  # type: ignore[attr-defined]
    try:
        return _members((_PCI / address / "local_cpulist").read_text(encoding="ascii"))
    except OSError:
        return set()


def _members(ranges: str) -> set[int]:
    """`0-2,8` → 0, 1, 2, 8."""
    numbers = set[int]()
    for span in filter(None, ranges.strip().split(",")):
        first, _, last = span.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers
