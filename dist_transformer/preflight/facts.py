"""Facts that one rank gathers about its node: versions, GPUs, memory, disks, network names and NCCL's environment.

Gathering does not judge; `checks` judges the facts of all ranks.
"""

import os
import re
import resource
import shutil
import socket
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dist_transformer.runtime.versions import hash_of_code, versions
from dist_transformer.runtime.world import World

RUN_FOLDER, TEMPORARY_FOLDER, CACHE, SHARED_MEMORY = "run folder", "temporary folder", "cache", "/dev/shm"
# Folder and files of the memory of a control group, by the controllers of its line: version 2 names none.
_MEMORY_FILES = {
    "": ("sys/fs/cgroup", ("memory.max", "memory.current")),
    "memory": ("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU that a rank trains on."""

    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    """Memory in use by all processes, including this one's CUDA context."""
    has_bf16: bool
    problem: str | None = None
    """Reason why it cannot compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """A port of an InfiniBand device, an Ethernet card that speaks its protocol (RoCE), or an EFA."""

    name: str
    """Name such as `mlx5_0:1`."""
    is_active: bool
    rate: str
    """Nominal rate such as `400 Gb/sec (4X NDR)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A folder to write to, as this rank sees it."""

    path: str
    free_bytes: int = 0
    problem: str | None = None
    """Reason why it cannot be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """An all-reduce of `bytes` bytes, timed by this rank."""

    backend: str
    bytes: int
    seconds: float
    exact: bool
    """Whether every element was the sum over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """A data folder, as this rank sees it."""

    place: str
    index_sha256: str = ""
    problem: str | None = None
    """Reason why it cannot be used."""


def _versions() -> dict[str, str]:
    known = versions()
    found = {name: known[name] or "not installed" for name in ("python", "torch", "deepspeed", "dist_transformer")}
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or "none"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {**found, "code": hash_of_code()}


def _driver() -> str:
    with suppress(OSError):
        if found := re.search(r"\b\d{3}(\.\d+)+\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")):
            return found[0]
    return ""


def _gpu(local_rank: int) -> Gpu | None:
    """Test the device of this rank with a small product. Return None if the rank has no device."""
    if local_rank >= torch.cuda.device_count():
        return None
    device = torch.device("cuda", local_rank)
    properties = torch.cuda.get_device_properties(device)
    used, problem = 0, None
    try:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        ones = torch.ones(256, 256, device=device)
        if float((ones @ ones).sum()) != 256.0**3:
            problem = "a product of matrices is wrong"
    except RuntimeError as error:
        problem = str(error).strip().split("\n")[0]
    return Gpu(
        name=properties.name,
        uuid=str(properties.uuid),
        total_bytes=properties.total_memory,
        used_bytes=used,
        has_bf16=properties.major >= 8,
        problem=problem,
    )


def _available_memory() -> int:
    """Return the bytes that this node's processes can still allocate, within the limits of the control group."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    available = int(values["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *(limit - used for limit, used in _control_group_memory())]))


def _control_group_memory(root: Path = Path("/")) -> list[tuple[int, int]]:
    """Return (limit, used) in bytes for this process' control groups and their parents."""
    found = []
    with suppress(OSError):
        for group in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            _, controllers, path = group.split(":", 2)
            if controllers not in _MEMORY_FILES:
                continue
            mounted, names = _MEMORY_FILES[controllers]
            for folder in (Path(path), *Path(path).parents):
                place = root / mounted / str(folder).lstrip("/")
                with suppress(OSError):
                    limit, used = ((place / name).read_text().strip() for name in names)
                    if limit != "max":
                        found.append((int(limit), int(used)))
    return found


def look_at(path: Path) -> Volume:
    """Find the free bytes of a folder, or of its nearest existing parent, and try to write a file there."""
    place = existing(path)
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
        return Volume(path=str(path), free_bytes=shutil.disk_usage(place).free)
    except OSError as error:
        return Volume(path=str(path), problem=f"{place} cannot be written ({error.strerror or error})")


def existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def find_ports(folder: Path = Path("/sys/class/infiniband")) -> tuple[Port, ...]:
    """List the ports of all devices, by name."""
    found = []
    for port in sorted(folder.glob("*/ports/*")):
        with suppress(OSError):
            # `4: ACTIVE`
            state, rate = ((port / name).read_text(encoding="ascii").strip() for name in ("state", "rate"))
            if rate[:1].isdigit():
                name = f"{port.parts[-3]}:{port.name}"
                found.append(Port(name=name, is_active="ACTIVE" in state, rate=rate))
    return tuple(found)


def _nccl_settings() -> tuple[str, ...]:
    return tuple(sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith(("NCCL_", "GLOO_"))))


def _locked_bytes() -> int | None:
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _addresses(host: str) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)}))
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts of one rank. Those that need neither another rank nor a setting are gathered when it is made."""

    rank: int
    local_rank: int
    host: str = field(default_factory=socket.gethostname)
    versions: dict[str, str] = field(default_factory=_versions)
    """Versions of libraries, and a hash of the package's source files as the version of the code."""
    gpus_present: int = field(default_factory=lambda: len(list(Path("/dev").glob("nvidia[0-9]*"))))
    """Devices of the node, counted by the driver's files."""
    gpus_visible: int = field(default_factory=torch.cuda.device_count)
    """Devices that torch sees."""
    driver: str = field(default_factory=_driver)
    """Version of the NVIDIA driver."""
    built_for: str = torch.version.cuda or ""
    """Version of CUDA that torch is built for."""
    gpu: Gpu | None
    available_bytes: int
    """Memory that this process can still allocate: an equal share of the node's free memory per rank."""
    volumes: dict[str, Volume]
    interfaces: tuple[str, ...] = field(default_factory=lambda: tuple(name for _, name in socket.if_nameindex()))
    nccl_settings: tuple[str, ...] = field(default_factory=_nccl_settings)
    """Variables of NCCL and gloo as `NAME=VALUE`, sorted."""
    ports: tuple[Port, ...] = field(default_factory=find_ports)
    locked_bytes: int | None = field(default_factory=_locked_bytes)
    """Bytes of memory that this process may lock; None: no limit."""
    master: str
    """Value of MASTER_ADDR."""
    master_addresses: tuple[str, ...]
    run_folder_lock: str = ""
    """Result of asking for the lock that rank 0 holds in the run folder: `held`, `free`, `unseen` if its files do not
    appear on this node, or an error; "" if nobody asked."""
    data: tuple[DataFacts, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    network: str = ""
    """Network that NCCL chose between nodes, such as `IB` or `Socket`; "" if it is not known."""


def gather(world: World, *, run_dir: Path | None, cache_dir: Path | None) -> Facts:
    """Gather the facts that need no other rank. Ranks measure `run_folder_lock` and the fields after it together."""
    master = os.environ.get("MASTER_ADDR", "") if world.size > 1 else ""
    folders = {
        TEMPORARY_FOLDER: Path(tempfile.gettempdir()),
        CACHE: cache_dir or Path.home() / ".cache",
        SHARED_MEMORY: Path("/dev/shm"),
    }
    if run_dir is not None:
        folders[RUN_FOLDER] = run_dir
    return Facts(
        rank=world.rank,
        local_rank=world.local_rank,
        gpu=_gpu(world.local_rank),
        available_bytes=_available_memory() // world.local_size,
        volumes={name: look_at(path) for name, path in folders.items()},
        master=master,
        master_addresses=_addresses(master) if master else (),
    )
