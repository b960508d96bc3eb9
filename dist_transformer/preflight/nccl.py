"""NCCL's environment on a node: its variables, ports and links, locked memory, and the network that it chose."""

import ctypes
import os
import re
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_INFINIBAND, _NET = Path("/sys/class/infiniband"), Path("/sys/class/net")


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of an InfiniBand device, an Ethernet card that speaks its protocol (RoCE), an EFA, or Ethernet."""

    name: str
    """Name such as `mlx5_0:1`."""
    is_active: bool
    rate: str
    """Nominal rate such as `400 Gb/sec (4X NDR)`."""
    is_efa: bool = False
    """Whether NCCL needs Amazon's plugin to use it."""

    @property
    def gigabytes(self) -> float:
        """Nominal rate in GB/s."""
        return float(self.rate.split()[0]) / 8


def find_settings() -> tuple[str, ...]:
    """List the variables of NCCL and gloo as `NAME=VALUE`, sorted."""
    return tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))))


def locked_bytes() -> int | None:
    """Return the bytes of memory that this process may lock; None: no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def loads_verbs() -> bool:
    """Decide whether the library through which NCCL uses InfiniBand can be loaded."""
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1")
        return True
    return False


def find_ports(folder: Path = _INFINIBAND) -> tuple[Port, ...]:
    """List the ports of all devices, by name."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):
            # `4: ACTIVE`
            state, rate = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
            is_efa = (port.parents[1] / "device" / "driver").resolve().name == "efa"
            if rate[:1].isdigit():
                name = f"{port.parts[-3]}:{port.name}"
                found.append(Port(name=name, is_active="ACTIVE" in state, rate=rate, is_efa=is_efa))
    return tuple(found)


def find_links(folder: Path = _NET) -> tuple[Port, ...]:
    """List the Ethernet links of physical cards that are up and state their rate, by name."""
    found = []
    for link in sorted(folder.glob("*")):
        # A virtual card states no rate, or -1.
        with suppress(OSError, ValueError):
            megabits = int((link / "speed").read_text(encoding="ascii"))
            if megabits > 0 and (link / "device").exists():
                found.append(Port(name=link.name, is_active=True, rate=f"{megabits / 1000:g} Gb/sec"))
    return tuple(found)


@contextmanager
def network_of_nccl() -> Iterator[Callable[[], str]]:
    """Yield a function that returns the name of the network that NCCL chose in the block, such as `IB` or `Socket`.

    The name is "" if NCCL did not state it, or if the user reads NCCL's messages.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "nccl"
        if os.environ.get("NCCL_DEBUG") not in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in os.environ:
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(file))

        def chosen() -> str:
            return network_in(file.read_text(errors="replace")) if file.exists() else ""

        yield chosen


def network_in(messages: str) -> str:
    """Return the network that NCCL's messages name; "" if they name none."""
    found = re.search(r"Using network (\S+)", messages)
    return found[1] if found else ""
