"""Facts that ranks measure together: clocks, run folder, data, all-reduce."""

import contextlib
import fcntl
import hashlib
import itertools
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from dist_transformer.base.errors import UserError
from dist_transformer.base.paths import refuse_secrets
from dist_transformer.base.urls import is_url, without_secrets
from dist_transformer.data.folder.format import INDEX_FILE, index_states
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.preflight.facts import DataFacts, Facts, Reduction, SharedFolder
from dist_transformer.preflight.nccl import network_of_nccl
from dist_transformer.preflight.watch import Watch
from dist_transformer.runtime import distributed
from dist_transformer.runtime.world import World

# A network file system may show a new file to other nodes with a delay.
_VISIBLE_WITHIN_SECONDS = 3.0
_PAUSE_SECONDS = 0.05
_ROUNDS = 5
# MiB. 48: about the default gradient bucket, 50 MB in bf16. The small sizes show latency, 256 the size of a model.
_REDUCED_MIB = {"gloo": (1, 16), "nccl": (1, 48, 256)}


def first_ranks(facts: Sequence[Facts]) -> list[int]:
    """Return the lowest rank of each node."""
    first: dict[str, int] = {}
    for fact in facts:
        first.setdefault(fact.host, fact.rank)
    return sorted(first.values())


def clock_offsets(world: World, peers: Sequence[int]) -> dict[int, float]:
    """Measure on rank 0 by how many seconds the clock of each peer is ahead. Collective: every rank must call it."""
    # The peer's time is compared with the middle between request and answer, so the error is at most half the round
    # trip. The quickest of a few exchanges counts.
    offsets = {}
    message = torch.zeros(1, dtype=torch.float64)
    for peer in peers:
        if peer == 0 or world.rank not in (0, peer):
            continue
        samples = []
        for _ in range(_ROUNDS):
            if world.is_main:
                asked = time.time()
                dist.send(message, dst=peer)
                dist.recv(message, src=peer)
                answered = time.time()
                samples.append((answered - asked, message.item() - (asked + answered) / 2))
            else:
                dist.recv(message, src=0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), dst=0)
        if world.is_main:
            offsets[peer] = min(samples)[1]
    return offsets


def try_shared_folder(world: World, run_dir: Path) -> tuple[SharedFolder, list[bool]]:
    """Check that ranks see each other's files and locks in the run folder; remove all of them afterwards.

    Rank 0 writes a token and holds a lock, and the others look for both. Then each writes a file, and rank 0 looks for
    it. Collective: every rank must call it.

    Returns:
        what this rank saw, and, on rank 0, of which ranks it saw the files.
    """
    with contextlib.ExitStack() as stack:
        # If rank 0 cannot make the folder, the others see nothing; `look_at` reports the reason.
        name = _begin(stack, run_dir) if world.is_main else ""
        name = distributed.broadcast_object(name)
        folder = run_dir / name
        sees = bool(name) and _appears(folder / "token", name)
        lock = "not tried"
        if sees and not world.is_main:
            lock = _try_lock(folder / "lock")
            with contextlib.suppress(OSError):
                (folder / f"rank-{world.rank}").write_text(name)
        distributed.barrier()
        seen = []
        if world.is_main:
            seen = [rank == 0 or (sees and _appears(folder / f"rank-{rank}", name)) for rank in range(world.size)]
        distributed.barrier()
    return SharedFolder(sees_rank_0=sees, lock="held" if world.is_main else lock), seen


def _begin(stack: contextlib.ExitStack, run_dir: Path) -> str:
    """Make a folder with token and lock, which `stack` removes. Return its name, or "" if it cannot be made."""
    name = f".preflight-{uuid.uuid4().hex}"
    try:
        for missing in reversed([folder for folder in (run_dir, *run_dir.parents) if not folder.exists()]):
            missing.mkdir()
            stack.callback(_remove_empty, missing)
        (run_dir / name).mkdir()
        stack.callback(shutil.rmtree, run_dir / name, ignore_errors=True)
        lock = stack.enter_context((run_dir / name / "lock").open("w"))
        with contextlib.suppress(OSError):
            # If the file system has no locks, the other ranks report it.
            fcntl.flock(lock, fcntl.LOCK_EX)
        (run_dir / name / "token").write_text(name)
    except OSError:
        return ""
    return name


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _appears(path: Path, content: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while True:
        with contextlib.suppress(OSError):
            if path.read_text() == content:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(_PAUSE_SECONDS)


def _try_lock(path: Path) -> str:
    try:
        with path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return "free"
    except BlockingIOError:
        return "held"
    except OSError as error:
        return error.strerror or str(error)


def look_at_data(place: str, *, opens: bool) -> DataFacts:
    """Read the index of a data folder; with `opens`, also check the size of every file."""
    try:
        if is_url(place):
            refuse_secrets(place)
            import fsspec

            with fsspec.open(f"{place.rstrip('/')}/{INDEX_FILE}", "rb") as file:
                return DataFacts(place=place, index_sha256=hashlib.sha256(file.read()).hexdigest())
        path = Path(place) / INDEX_FILE
        content, status = path.read_bytes(), path.stat()
        if opens:
            DataFolder.open(place).close()
    except UserError as error:
        return DataFacts(place=place, problem=str(error))
    except Exception as error:  # every kind of store raises its own
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return DataFacts(place=place, problem=f"{place}/{INDEX_FILE} cannot be read ({without_secrets(reason)})")
    digest = hashlib.sha256(content).hexdigest()
    identity = (status.st_ino, status.st_mtime_ns, status.st_size)
    return DataFacts(place=place, index_sha256=digest, identity=identity)


def verify_data(
    own: Facts, facts: Sequence[Facts], watch: Watch, *, progress: Callable[[str], None]
) -> tuple[DataFacts, ...]:
    """Verify this rank's share of the files. Collective: every rank must call it.

    All ranks divide the files of a shared folder; the ranks of a node divide the files of its own copy.
    """
    # One file per stage, so that a disk that does not answer is noticed within the time limit of a stage.
    data = list(own.data)
    files = [(number, *file) for number in range(len(data)) for file in _share(own, facts, number, data)]
    for done in itertools.count(1):
        with watch.stage("hashes of the data"):
            for number, path, sha256 in files[done - 1 : done]:
                data[number] = _verify(data[number], path, sha256)
            left = distributed.all_reduce_sum(torch.tensor(max(0, len(files) - done)))
        progress(f"hashes of the data: {int(left):,} files left")
        if not left:
            break
    return tuple(data)


def _share(own: Facts, facts: Sequence[Facts], number: int, data: list[DataFacts]) -> list[tuple[Path, str]]:
    """List the files of a data folder that this rank verifies; record a folder that cannot be opened in `data`."""
    found = data[number]
    if found.problem or is_url(found.place):
        return []
    is_one = len({fact.data[number].identity for fact in facts}) == 1
    team = [fact.rank for fact in facts if is_one or fact.host == own.host]
    try:
        return list(DataFolder.open(found.place).files())[team.index(own.rank) :: len(team)]
    except UserError as error:
        data[number] = replace(found, problem=str(error))
        return []


def _verify(data: DataFacts, path: Path, sha256: str) -> DataFacts:
    try:
        index_states(sha256).check(path)
    except UserError as error:
        return replace(data, problem=data.problem or str(error))
    return replace(data, verified_files=data.verified_files + 1)


def time_reductions(world: World, device: torch.device) -> tuple[Reduction, ...]:
    """Time all-reduces on `device` (CPU: gloo, GPU: NCCL): the median of a few. Collective: every rank must call it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    with network_of_nccl() as network:
        group = dist.new_group(backend=backend)
        timed = [_time_reduction(world, device, group, backend, mib * 2**20) for mib in _REDUCED_MIB[backend]]
        return tuple(replace(reduction, network=network()) for reduction in timed)


def _time_reduction(world: World, device: torch.device, group: dist.ProcessGroup, backend: str, size: int) -> Reduction:
    times, exact = [], True
    tensor = torch.empty(size // 4, device=device)
    # The first round establishes connections and is not counted.
    for number in range(_ROUNDS + 1):
        tensor.fill_(world.rank + 1)
        _synchronize(device)
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(tensor, group=group)
        _synchronize(device)
        if number:
            times.append(time.perf_counter() - started)
        total = world.size * (world.size + 1) / 2
        exact = exact and bool((tensor == total).all())
    return Reduction(backend=backend, bytes=size, seconds=sorted(times)[len(times) // 2], exact=exact)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
