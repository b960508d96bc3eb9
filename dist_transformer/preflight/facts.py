"""Facts that one rank gathers about its node: versions, GPUs, memory, disks, network names.

Gathering does not judge; `node_checks` and `network_checks` judge the facts of all ranks.
"""

import os
import re
import shutil
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dist_transformer.preflight import nccl
from dist_transformer.runtime.device import cpus_beside, load_of_machine
from dist_transformer.runtime.rendezvous import raise_open_files
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
    near_cpus: int | None = None
    """Number of CPUs close to the GPU that this process may use; None if they are not known."""
    problem: str | None = None
    """Reason why it cannot compute."""
    tflops: float | None = None
    """Measured rate of a product of matrices, in TFLOP/s; None if it was not measured."""


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
    network: str = ""
    """Network that NCCL chose between nodes, such as `IB` or `Socket`; "" if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFolder:
    """Result of the files that ranks wrote for each other to the run folder."""

    sees_rank_0: bool
    seen_by_rank_0: bool = False
    lock: str = "held"
    """Result of asking for a lock that rank 0 holds: `held`, `free`, or an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """A data folder, as this rank sees it."""

    place: str
    index_sha256: str = ""
    identity: tuple[int, ...] = ()
    """Identity of the index file: equal on all nodes if they share the folder, different if each has a copy."""
    problem: str | None = None
    verified_files: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts of one rank."""

    rank: int
    local_rank: int
    host: str
    versions: dict[str, str]
    code: str
    """Hash of the package's source files."""
    gpus_present: int = 0
    """Devices of the node, counted by the driver's files."""
    gpus_visible: int = 0
    """Devices that torch sees."""
    driver: str = ""
    """Version of the NVIDIA driver."""
    built_for: str = ""
    """Version of CUDA that torch is built for."""
    gpu: Gpu | None = None
    cpus: int = 0
    """CPUs that this process may use."""
    load: tuple[float, int] | None = None
    """Load average of the node in the last minute, and its cores; None if it is not known."""
    available_bytes: int = 0
    """Memory that this process can still allocate: an equal share of the node's free memory per rank."""
    open_files: int = 0
    """Limit of open files per process, raised as far as it may be."""
    volumes: dict[str, Volume] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    nccl_settings: tuple[str, ...] = ()
    """Variables of NCCL and gloo as `NAME=VALUE`, sorted."""
    ports: tuple[nccl.Port, ...] = ()
    links: tuple[nccl.Port, ...] = ()
    """Ethernet links of physical cards that are up."""
    loads_verbs: bool = True
    """Whether the library through which NCCL uses these ports can be loaded."""
    locked_bytes: int | None = None
    """Bytes of memory that this process may lock; None: no limit."""
    master: str = ""
    """Value of MASTER_ADDR."""
    master_addresses: tuple[str, ...] = ()
    shared: SharedFolder | None = None
    data: tuple[DataFacts, ...] = ()
    reductions: tuple[Reduction, ...] = ()


def gather(world: World, *, run_dir: Path | None, cache_dir: Path | None) -> Facts:
    """Gather the facts that need no other rank. Ranks measure `shared` and the fields after it together."""
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
        host=socket.gethostname(),
        versions=_versions(),
        code=hash_of_code(),
        gpus_present=len(list(Path("/dev").glob("nvidia[0-9]*"))),
        gpus_visible=torch.cuda.device_count(),
        driver=_driver(),
        built_for=torch.version.cuda or "",
        gpu=_gpu(world.local_rank),
        cpus=len(os.sched_getaffinity(0)),
        load=load_of_machine(),
        available_bytes=_available_memory() // world.local_size,
        open_files=raise_open_files(),
        volumes={name: look_at(path) for name, path in folders.items()},
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        nccl_settings=nccl.find_settings(),
        ports=nccl.find_ports(),
        links=nccl.find_links(),
        loads_verbs=nccl.loads_verbs(),
        locked_bytes=nccl.locked_bytes(),
        master=master,
        master_addresses=_addresses(master) if master else (),
    )


def _versions() -> dict[str, str]:
    known = versions()
    found = {name: known[name] or "not installed" for name in ("python", "torch", "deepspeed", "dist_transformer")}
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or "none"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


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
    used, problem, tflops = 0, None, None
    near = cpus_beside(device)
    try:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free
        ones = torch.ones(256, 256, device=device)
        if float((ones @ ones).sum()) != 256.0**3:
            problem = "a product of matrices is wrong"
        else:
            # All GPUs of a node compute at the same time, as in training.
            tflops = product_rate(device, torch.bfloat16 if properties.major >= 8 else torch.float16)
    except RuntimeError as error:
        problem = str(error).strip().split("\n")[0]
    return Gpu(
        name=properties.name,
        uuid=str(properties.uuid),
        total_bytes=properties.total_memory,
        used_bytes=used,
        has_bf16=properties.major >= 8,
        near_cpus=len(near & os.sched_getaffinity(0)) if near else None,
        problem=problem,
        tflops=tflops,
    )


def product_rate(device: torch.device, dtype: torch.dtype, *, size: int = 4096, seconds: float = 0.5) -> float:
    """Measure products of square matrices, and return TFLOP/s.

    Args:
        size: rows of each matrix.
        seconds: time of the measurement. Before it, the device computes for as long to reach its usual clock.
    """
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    products, spent = 1, 0.0
    for limit in (seconds, seconds):
        products, spent = 1, 0.0
        while spent < limit:
            products *= 2
            started = time.perf_counter()
            for _ in range(products):
                a @ b
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            spent = time.perf_counter() - started
    return products * 2 * size**3 / spent / 1e12


def _available_memory() -> int:
    """Return the bytes that this node's processes can still allocate, within the limits of the control group."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    available = int(values["MemAvailable"].split()[0]) * 1024
    for limit, used in _control_group_memory():
        available = min(available, limit - used)
    return max(0, available)


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
        if not place.is_dir():
            return Volume(path=str(path), problem=f"{place} is a file, not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
        return Volume(path=str(path), free_bytes=shutil.disk_usage(place).free)
    except OSError as error:
        return Volume(path=str(path), problem=f"{place} cannot be written ({error.strerror or error})")


def existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    return next((place for place in (path, *path.parents) if place.exists()), path)


def _addresses(host: str) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple(sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)}))
    return ()
