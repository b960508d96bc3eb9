"""What one rank finds out about its node: versions, GPUs, memory, disks, names of the network.

Gathering asks and never judges; `checks` judges the facts of all ranks.
"""

import hashlib
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dist_transformer.preflight.nccl import NcclFacts, look_at_nccl
from dist_transformer.runtime.affinity import cpus_beside
from dist_transformer.runtime.world import World

PACKAGES = ("torch", "deepspeed", "dist_transformer")
RUN_FOLDER, TEMPORARY_FOLDER, CACHE, SHARED_MEMORY = "run folder", "temporary folder", "cache", "/dev/shm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """The GPU that a rank trains on."""

    name: str
    uuid: str
    total_bytes: int
    used_bytes: int
    """By all processes, this one's context included."""
    has_bf16: bool
    cpus_beside: int | None = None
    """How many of the CPUs beside it this process may use; None where they are not known."""
    problem: str | None = None
    """Why it cannot compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Volume:
    """A folder to write to, as this rank sees it."""

    path: str
    free_bytes: int = 0
    problem: str | None = None
    """Why it cannot be written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """An all-reduce of so many bytes, as this rank timed it."""

    backend: str
    bytes: int
    seconds: float
    exact: bool
    """Every element was the sum over ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedFolder:
    """What became of the files that ranks wrote for each other to the run folder."""

    sees_rank_0: bool
    seen_by_rank_0: bool = False
    lock: str = "held"
    """What this rank found when it asked for a lock that rank 0 held: `held`, `free`, or an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFacts:
    """A data folder, as this rank sees it."""

    place: str
    index_sha256: str = ""
    identity: tuple[int, ...] = ()
    """Of the index as a file: equal on all nodes where they share the folder, other where each has a copy."""
    problem: str | None = None
    verified_files: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Of one rank."""

    rank: int
    local_rank: int
    host: str
    versions: dict[str, str]
    code: str
    """Hash of the package's source files."""
    gpus_present: int = 0
    """Devices that the node has, by the driver's files."""
    gpus_visible: int = 0
    """Devices that torch sees."""
    driver: str = ""
    """Version of the NVIDIA driver."""
    built_for: str = ""
    """Version of CUDA that torch is built for."""
    gpu: Gpu | None = None
    cpus: int = 0
    """CPUs that this process may use."""
    available_bytes: int = 0
    """Memory that this process may still take, when the node's ranks share what is left."""
    open_files: int = 0
    volumes: dict[str, Volume] = field(default_factory=dict)
    interfaces: tuple[str, ...] = ()
    nccl: NcclFacts = field(default_factory=NcclFacts)
    master: str = ""
    """MASTER_ADDR."""
    master_addresses: tuple[str, ...] = ()
    clock_offset: float | None = None
    """Seconds ahead of rank 0, measured by one rank a node."""
    shared: SharedFolder | None = None
    data: tuple[DataFacts, ...] = ()
    reductions: tuple[Reduction, ...] = ()


def gather(world: World, *, run_dir: Path | None, cache_dir: Path | None) -> Facts:
    """What this rank finds without the others; `clock_offset` and the fields after it are measured together."""
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
        available_bytes=_available_memory() // world.local_size,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        volumes={name: look_at(path) for name, path in folders.items()},
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        nccl=look_at_nccl(),
        master=master,
        master_addresses=_addresses(master) if master else (),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    if torch.cuda.is_available():
        found["cuda"] = torch.version.cuda or "none"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _driver() -> str:
    try:
        line = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d{3}(\.\d+)+\b", line)
    return found[0] if found else ""


def hash_of_code() -> str:
    """Of the source files of this package, wherever it lies: what runs, committed or not."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _gpu(local_rank: int) -> Gpu | None:
    """The device of this rank, which computes a small product; None where it has none."""
    if local_rank >= torch.cuda.device_count():
        return None
    device = torch.device("cuda", local_rank)
    properties = torch.cuda.get_device_properties(device)
    used, problem = 0, None
    near = cpus_beside(device)
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
        cpus_beside=len(near & os.sched_getaffinity(0)) if near else None,
        problem=problem,
    )


def _available_memory() -> int:
    """Bytes that processes of this node may still take; a limit of the job's control group counts."""
    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    available = int(values["MemAvailable"].split()[0]) * 1024
    for limit, used in _control_group_memory():
        available = min(available, limit - used)
    return max(0, available)


def _control_group_memory() -> list[tuple[int, int]]:
    """(limit, used) of this process' control group and of those above it."""
    found = []
    try:
        groups = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
        path = next((line.partition("::")[2] for line in groups if line.startswith("0::")), "/")
        for folder in (Path(path), *Path(path).parents):
            place = Path("/sys/fs/cgroup") / str(folder).lstrip("/")
            try:
                limit, used = ((place / name).read_text().strip() for name in ("memory.max", "memory.current"))
            except OSError:
                continue
            if limit != "max":
                found.append((int(limit), int(used)))
    except (OSError, ValueError):
        return []
    return found


def look_at(path: Path) -> Volume:
    """Free bytes of a folder, and whether a file can be written there; of its nearest parent that exists."""
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            return Volume(path=str(path), problem=f"{place} is a file, not a folder")
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"x")
            file.flush()
        return Volume(path=str(path), free_bytes=shutil.disk_usage(place).free)
    except OSError as error:
        return Volume(path=str(path), problem=f"{place} cannot be written ({error.strerror or error})")


def _addresses(host: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(found[4][0]) for found in socket.getaddrinfo(host, None)}))
    except OSError:
        return ()
