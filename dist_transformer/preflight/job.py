"""The check of a job: every rank gathers facts, some together with the others, and all facts are judged.

A watch ends the program if a check hangs.
"""

import fcntl
import hashlib
import os
import re
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError, logger
from dist_transformer.base.files import sha256_of
from dist_transformer.base.messages import as_kind
from dist_transformer.base.paths import refuse_secrets
from dist_transformer.base.urls import is_url, without_secrets
from dist_transformer.data.folder.format import INDEX_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.preflight.checks import judge
from dist_transformer.preflight.facts import DataFacts, Facts, Reduction, existing, gather
from dist_transformer.preflight.settings import PreflightSettings
from dist_transformer.runtime import distributed
from dist_transformer.runtime.rendezvous import host_of, meet
from dist_transformer.runtime.world import World

# A network file system may show a new file to other nodes with a delay.
_VISIBLE_WITHIN_SECONDS = 3.0
_PAUSE_SECONDS = 0.05
_ROUNDS = 5
# MiB. 48: about the default gradient bucket, 50 MB in bf16. The small sizes show latency, 256 the size of a model.
_REDUCED_MIB = {"gloo": (1, 16), "nccl": (1, 48, 256)}
# Rank 0 reports a check that hangs first; the other ranks wait this much longer.
_GRACE_SECONDS = 5.0


def check_job(world: World, settings: PreflightSettings) -> list[Check]:
    """Run the checks and return them on every rank. Collective: every rank must call it.

    Raises:
        UserError: the ranks did not find each other.
    """
    with joined(world, seconds=settings.timeout_seconds) as watch:
        with watch.stage("node"):
            own = gather(world, run_dir=settings.run_dir, cache_dir=settings.cache_dir)
        with watch.stage("data folder"):
            own = replace(own, data=tuple(map(_look_at_data, settings.data)))
        with watch.stage("facts of all ranks"):
            facts = _of_all_ranks(own)
        if world.size > 1:
            if settings.run_dir is not None:
                with watch.stage("run folder"):
                    own = replace(own, run_folder_lock=_try_shared_folder(world, settings.run_dir))
            with watch.stage("all-reduce"):
                uuids = {fact.gpu.uuid for fact in facts if fact.gpu is not None and fact.gpu.problem is None}
                has_gpus = len(uuids) == world.size
                device = torch.device("cuda", world.local_rank) if has_gpus else torch.device("cpu")
                reductions, network = _time_reductions(world, device)
                own = replace(own, reductions=reductions, network=network)
        with watch.stage("facts of all ranks"):
            return judge(_of_all_ranks(own), run_gib=settings.run_gib)


def _of_all_ranks(own: Facts) -> list[Facts]:
    return as_kind(list[Facts], distributed.gather_objects(own))


def _try_shared_folder(world: World, run_dir: Path) -> str:
    """Check that this rank sees the files and locks of rank 0 in the run folder; remove all of them afterwards.

    Collective: every rank must call it.
    """
    with ExitStack() as stack:
        # If rank 0 cannot make the folder, the others see nothing; `look_at` reports the reason.
        folder = Path(distributed.broadcast_object(_make_token(stack, run_dir) if world.is_main else ""))
        found = "held" if world.is_main else "unseen"
        if not world.is_main and folder.name and _appears(folder / "token", folder.name):
            found = _try_lock(folder / "lock")
        distributed.barrier()
    return found


def _make_token(stack: ExitStack, run_dir: Path) -> str:
    """Make a folder with token and lock, which `stack` removes. Return its path, or "" if it cannot be made."""
    folder = existing(run_dir) / f".preflight-{uuid.uuid4().hex}"
    with suppress(OSError):
        folder.mkdir()
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        lock = stack.enter_context((folder / "lock").open("w"))
        with suppress(OSError):
            # If the file system has no locks, the other ranks report it.
            fcntl.flock(lock, fcntl.LOCK_EX)
        (folder / "token").write_text(folder.name)
        return str(folder)
    return ""


def _appears(path: Path, content: str) -> bool:
    deadline = time.monotonic() + _VISIBLE_WITHIN_SECONDS
    while True:
        with suppress(OSError):
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


def _look_at_data(place: str) -> DataFacts:
    """Hash the index of a data folder, and check the size of every file unless it is behind a URL."""
    try:
        if is_url(place):
            refuse_secrets(place)
            import fsspec

            with fsspec.open(f"{place.rstrip('/')}/{INDEX_FILE}", "rb") as file:
                return DataFacts(place=place, index_sha256=hashlib.sha256(file.read()).hexdigest())
        found = DataFacts(place=place, index_sha256=sha256_of(Path(place) / INDEX_FILE))
        DataFolder.open(place).close()
        return found
    except UserError as error:
        return DataFacts(place=place, problem=str(error))
    except Exception as error:  # every kind of store raises its own
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
        return DataFacts(place=place, problem=f"{place}/{INDEX_FILE} cannot be read ({without_secrets(reason)})")


def _time_reductions(world: World, device: torch.device) -> tuple[tuple[Reduction, ...], str]:
    """Time all-reduces on `device` (CPU: gloo, GPU: NCCL). Collective: every rank must call it.

    Returns:
        the median of a few for each size, and the network that NCCL chose: "" if it did not state it, or if the user
        reads NCCL's messages.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    total, reductions = world.size * (world.size + 1) / 2, list[Reduction]()
    with tempfile.TemporaryDirectory() as folder:
        messages = Path(folder) / "nccl"
        if os.environ.get("NCCL_DEBUG") not in ("INFO", "TRACE") and "NCCL_DEBUG_FILE" not in os.environ:
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(messages))
        group = dist.new_group(backend=backend)
        for size in (mib * 2**20 for mib in _REDUCED_MIB[backend]):
            times, exact, tensor = list[float](), True, torch.empty(size // 4, device=device)
            for _ in range(1 + _ROUNDS):
                # To read a number waits for the device.
                tensor.fill_(world.rank + 1)[0].item()
                dist.barrier()
                started = time.perf_counter()
                dist.all_reduce(tensor, group=group)
                tensor[0].item()
                times.append(time.perf_counter() - started)
                exact = exact and bool((tensor == total).all())
            # The first round establishes connections and is not counted.
            reductions.append(Reduction(backend=backend, bytes=size, seconds=median(times[1:]), exact=exact))
        return tuple(reductions), network_in(messages.read_text(errors="replace")) if messages.exists() else ""


def network_in(messages: str) -> str:
    """Return the network that NCCL's messages name, such as `IB` or `Socket`; "" if they name none."""
    found = re.search(r"Using network (\S+)", messages)
    return found[1] if found else ""


@contextmanager
def joined(world: World, *, seconds: float) -> Iterator["Watch"]:
    """Form a gloo group of all ranks for the block, and yield a watch over its stages.

    Collective: every rank must call it.

    Raises:
        UserError: not all ranks joined within `seconds`; rank 0 names the missing ones.
    """
    store = meet(world, timedelta(seconds=seconds))
    # A separate connection, because the main thread may be waiting in the other one.
    watch = Watch(world, store.clone(), seconds=seconds)  # type: ignore[attr-defined]
    try:
        if world.size > 1:
            with watch.stage("process group"):
                patience = timedelta(seconds=2 * seconds + _GRACE_SECONDS)
                dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=patience)
        yield watch
    except RuntimeError as error:
        if world.size == 1:
            raise
        reason = str(error).strip().split("\n")[0]
        raise UserError(
            f'"{watch.current}" failed on rank {world.rank} on {socket.gethostname()} ({reason:.200}), because another '
            "rank ended or the network broke: read the output of all ranks"
        ) from error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


class Watch:
    """End the program if a stage takes too long, because a dead file system or network raises nothing."""

    def __init__(self, world: World, store: dist.Store, *, seconds: float) -> None:
        self.world, self.store, self.seconds = world, store, seconds
        self.current, self._begun = "", 0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Limit the time of the block. All ranks must go through the same stages."""
        self._begun += 1
        self.current = name
        self.store.set(f"at/{self.world.rank}", f"{self._begun} {name}")
        timer = threading.Timer(self.seconds + (0 if self.world.is_main else _GRACE_SECONDS), self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        try:
            late = self._who_is_late()
        except RuntimeError as error:
            late = str(error).split("\n")[0]
        logger.error(
            f'error: "{self.current}" did not end within {self.seconds:g} s ({late}): check the disks and the network '
            "there, or raise --timeout"
        )
        # An exception would end only this thread.
        os._exit(1)

    def _who_is_late(self) -> str:
        if self.world.size == 1 or not self.world.is_main:
            return f"rank {self.world.rank} on {socket.gethostname()}"
        places = [self._place(rank) for rank in range(self.world.size)]
        behind = [
            f'rank {rank} on {host_of(self.store, rank)} is still at "{name}"'
            for rank, (number, name) in enumerate(places)
            if number < max(places)[0]
        ]
        return "; ".join(behind) or "all ranks wait in it"

    def _place(self, rank: int) -> tuple[int, str]:
        """Return number and name of a rank's current stage."""
        if not self.store.check([f"at/{rank}"]):
            return 0, "start"
        number, _, name = self.store.get(f"at/{rank}").decode().partition(" ")
        return int(number), name
