"""NCCL's environment on a node: its variables, InfiniBand ports, and the limit of locked memory."""

import ctypes
import os
import resource
from dataclasses import dataclass
from pathlib import Path

_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of an InfiniBand device, or of an Ethernet card that speaks its protocol (RoCE)."""

    name: str
    """Name such as `mlx5_0:1`."""
    is_active: bool
    rate: str
    """Rate such as `400 Gb/sec (4X NDR)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NcclFacts:
    """NCCL's environment on one rank."""

    settings: tuple[str, ...] = ()
    """Variables of NCCL and gloo as `NAME=VALUE`, sorted."""
    ports: tuple[Port, ...] = ()
    loads_verbs: bool = True
    """Whether the library through which NCCL uses these ports can be loaded."""
    locked_bytes: int | None = None
    """Bytes of memory that this process may lock; None: no limit."""


def look_at_nccl() -> NcclFacts:
    """Read NCCL's environment."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    settings = [f"{name}={value}" for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))]
    return NcclFacts(
        settings=tuple(sorted(settings)),
        ports=find_ports(),
        loads_verbs=_loads("libibverbs.so.1"),
        locked_bytes=None if limit == resource.RLIM_INFINITY else limit,
    )


def find_ports(folder: Path = _INFINIBAND) -> tuple[Port, ...]:
    """List the ports of all devices, by name."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        try:
            # `4: ACTIVE`
            state = (port / "state").read_text(encoding="ascii")
            rate = (port / "rate").read_text(encoding="ascii").strip()
        except OSError:
            continue
        found.append(Port(name=f"{port.parts[-3]}:{port.name}", is_active="ACTIVE" in state, rate=rate))
    return tuple(found)


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
