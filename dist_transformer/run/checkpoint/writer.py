"""Write checkpoints in the background while training continues. Each is complete or absent, never partial.

A save copies all tensors to host memory; training waits for this part only. A thread on each rank does the rest, in
this order: temporary folder → the writers write, flush and hash their shares → all agree → rank 0 writes state,
manifest and the hash of the weight file → rename → the pointer `latest` moves → older checkpoints are pruned.
"""

import copy
import json
import threading
import time
import uuid
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file

from dist_transformer.base.errors import UserError, failure
from dist_transformer.base.files import make_folder, move, remove, remove_tree, sha256_of, sync, whole_path, write_file
from dist_transformer.base.sole_writer import Fence, unfenced
from dist_transformer.run.checkpoint.reader import FORMAT_VERSION, weight_hashes
from dist_transformer.run.checkpoint.state import EMA, ParameterState, Tensors, copy_tensors
from dist_transformer.run.layout import (
    CHECKPOINTS,
    MANIFEST_FILE,
    POINTER,
    STATE_FILE,
    WEIGHT_HASHES,
    WEIGHTS,
    checkpoints_of,
    step_name,
    step_of,
)
from dist_transformer.runtime import distributed
from dist_transformer.runtime.versions import versions

# Fields of the state that the manifest repeats, so that a reader can identify a checkpoint from one file.
_IDENTITY = ("step", "position", "tokenizer_sha256")

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Checkpoints and weight files to keep."""

    checkpoints: int
    """Number of newest checkpoints, and of newest files of averaged weights."""
    weights: int
    """Number of newest weight files."""
    best_steps: frozenset[int] = frozenset()
    """Steps whose weight files are kept in addition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A completed save."""

    step: int
    path: Path
    stall: float
    """Seconds that training waited for the save."""
    seconds: float
    """Seconds from the start of the save until it was on disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Snapshot:
    """The tensors and the state that this rank writes."""

    state: dict[str, Any]
    share: Tensors
    """Weights and moments of some parameters; none on a rank that is no writer."""
    weights: dict[str, Tensors]
    """Weight files by name: on rank 0 all weights, and the averaged ones if an average is kept; none on other ranks."""
    weights_metadata: dict[str, str]
    retention: Retention
    name: str
    """Name of the checkpoint's folder."""


@dataclass(kw_only=True, slots=True)
class _Save:
    """A save in progress. Its thread sets `seconds`, and `path` or `error`."""

    step: int
    started: float
    stall: float = 0.0
    seconds: float = 0.0
    path: Path | None = None
    error: BaseException | None = None
    thread: threading.Thread = field(init=False)

    @contextmanager
    def stalling(self) -> Iterator[None]:
        """Count the time inside as time that training waits."""
        started = time.monotonic()
        yield
        self.stall += time.monotonic() - started


class CheckpointWriter:
    """Write the checkpoints and weight files of one run, one save at a time.

    One snapshot at a time is in host memory: 4 bytes per parameter for the weight and for each moment, divided by the
    number of writers, and on rank 0 another 4 bytes per parameter for the weights outside its own share. From a GPU the
    copies are in page-locked memory, which torch allocates in powers of 2.

    Args:
        config: the run's settings, for the manifests.
        flushed: files of the run that the state refers to; they are on disk before the checkpoint is.
        fence: check of the run folder's lock; used on rank 0, which alone commits.
        writers: ranks that write parts of the checkpoints; default: all.
        timeout_minutes: how long ranks wait for each other's writes.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        config: Mapping[str, Any] | None = None,
        flushed: tuple[Path, ...] = (),
        fence: Fence = unfenced,
        writers: Sequence[int] | None = None,
        timeout_minutes: float = 30.0,
    ) -> None:
        self.run_dir, self.config, self.flushed, self._fence = run_dir, config, flushed, fence
        self._writers = range(distributed.world_size()) if writers is None else writers
        # Collectives of the training loop run at the same time, so a save needs a process group of its own.
        self._group = distributed.new_cpu_group(timeout_minutes=timeout_minutes)
        # A rank that outlived an earlier start of the run must not write into a folder of this start.
        self._token = distributed.broadcast_object(uuid.uuid4().hex[:8])
        self._common = {"format_version": FORMAT_VERSION, "versions": versions()}
        self._save: _Save | None = None

    def start(
        self,
        states: Iterable[ParameterState],
        state: dict[str, Any],
        *,
        retention: Retention,
        weights_metadata: dict[str, str],
    ) -> None:
        """Copy everything and start writing it. No other save may be in progress.

        Collective: every rank must call it.

        Args:
            states: every parameter, as `Engine.parameter_states` gives them.
            state: plain JSON; step, position and counters.
            weights_metadata: strings for the header of the weight file.
        """
        assert self._save is None, "wait for the save before"
        save = _Save(step=state["step"], started=time.monotonic())
        with save.stalling():
            share, weights, averages = copy_tensors(states, self._writers)
        name = step_name(state["step"])
        files = {f"{name}.safetensors": weights, f"{name.replace('step', EMA)}.safetensors": averages}
        snapshot = _Snapshot(
            state=copy.deepcopy(state),
            share=share,
            weights={file: tensors for file, tensors in files.items() if tensors},
            weights_metadata=weights_metadata,
            retention=retention,
            name=name,
        )
        save.thread = threading.Thread(target=self._work, args=(save, snapshot), name="checkpoint", daemon=True)
        self._save = save
        save.thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part of a save is in progress."""
        return self._save is not None and self._save.thread.is_alive()

    def poll(self, *, all_written: bool) -> Saved | None:
        """Return the save that all ranks have finished, if there is one.

        Args:
            all_written: the ranks have agreed that none of them is writing.

        Raises:
            UserError: see `wait`.
        """
        # The ranks have not agreed on an error of another kind: the others still wait for this rank's share.
        is_lost = self._save is not None and not isinstance(self._save.error, UserError | None)
        return self.wait() if all_written or is_lost else None

    def wait(self) -> Saved | None:
        """Wait for the save in progress and return it; None if there is none.

        Raises:
            UserError: on all ranks, if one of them could not write. Earlier checkpoints are untouched.
        """
        if self._save is None:
            return None
        with self._save.stalling():
            self._save.thread.join()
        save, self._save = self._save, None
        if save.error is not None:
            raise save.error
        assert save.path is not None
        # If training did nothing but wait, the two clocks differ by the time that the thread takes to end.
        stall = min(save.stall, save.seconds)
        return Saved(step=save.step, path=save.path, stall=stall, seconds=save.seconds)

    def close(self) -> None:
        """Wait for the save in progress and ignore its result, when another error ends the run. Not a collective."""
        if self._save is not None:
            self._save.thread.join()

    def _work(self, save: _Save, snapshot: _Snapshot) -> None:
        try:
            save.path = self._write(snapshot)
        except BaseException as error:  # `wait` raises it
            save.error = error
        save.seconds = time.monotonic() - save.started

    def _write(self, snapshot: _Snapshot) -> Path:
        """Write a snapshot; runs in the thread of every rank."""
        temporary = self.run_dir / CHECKPOINTS / f".{snapshot.name}.{self._token}.tmp"
        is_main = distributed.rank() == 0
        try:
            self._agree(lambda: self._make_temporary(temporary) if is_main else None)
            written = self._agree(lambda: self._write_share(temporary, snapshot))
            files = dict(ChainMap(*distributed.gather_objects(written, self._group)))
            self._agree(lambda: self._commit(temporary, snapshot, files) if is_main else None)
        except UserError:
            # All ranks are here: no process writes into the folder any more.
            if is_main:
                self._clean_up(temporary, snapshot)
            # No rank may report the error and exit before the folder is clean.
            distributed.gather_objects(None, self._group)
            raise
        return self.run_dir / CHECKPOINTS / snapshot.name

    def _agree(self, action: Callable[[], T]) -> T:
        """Run `action` on every rank; if one cannot write, all raise its error."""
        remedy = "free space or fix the folder; older checkpoints are intact"
        return distributed.on_all_ranks(
            action,
            errors=(UserError, OSError, SafetensorError, MemoryError),
            describe=lambda error: failure(error, "cannot write the checkpoint", remedy),
            group=self._group,
        )

    def _make_temporary(self, temporary: Path) -> None:
        self._fence()
        remove_unfinished_saves(self.run_dir)
        make_folder(self.run_dir / WEIGHTS)
        make_folder(temporary)

    def _clean_up(self, temporary: Path, snapshot: _Snapshot) -> None:
        """Remove what a failed save left; if another training has the folder by now, only this save's own names."""
        for left in (temporary, *map(self._unnamed, snapshot.weights)):
            remove_tree(left, as_far_as_possible=True)
        with suppress(UserError, OSError):
            self._fence()
            if not (self.run_dir / CHECKPOINTS / snapshot.name).exists():
                for name in snapshot.weights:
                    remove_tree(self.run_dir / WEIGHTS / name, as_far_as_possible=True)

    def _write_share(self, temporary: Path, snapshot: _Snapshot) -> dict[str, Any]:
        """Write this rank's part, and on rank 0 the weight files; return what the manifest states about each."""
        files = {}
        if snapshot.share:
            part = temporary / f"part-{distributed.rank():05d}.safetensors"
            files[part.name] = _write_tensors(part, snapshot.share)
        for name, tensors in snapshot.weights.items():
            files[name] = _write_tensors(self._unnamed(name), tensors, snapshot.weights_metadata)
        return files

    def _commit(self, temporary: Path, snapshot: _Snapshot, files: dict[str, Any]) -> None:
        for file in self.flushed:
            sync(file)
        weights = {name: files.pop(name)["sha256"] for name in snapshot.weights}
        _write_json(temporary / STATE_FILE, {**self._common, **snapshot.state})
        files[STATE_FILE] = _describe(temporary / STATE_FILE)
        identity = {key: snapshot.state.get(key) for key in _IDENTITY}
        _write_json(temporary / MANIFEST_FILE, {**self._common, **identity, "config": self.config, "files": files})
        # All that takes long is done. A process that was suspended meanwhile may have lost the folder.
        self._fence()
        folder, final = self.run_dir / WEIGHTS, temporary.with_name(snapshot.name)
        for name in weights:
            remove(folder / name)
        # A weight file has its hash in SHA256SUMS even if the process is killed.
        _write_hashes(folder, weights)
        for name in weights:
            move(self._unnamed(name), folder / name)
        # A damaged checkpoint of the same step may be there if the run was resumed from an older one.
        _discard(final)
        move(temporary, final)
        move_pointer(final)
        self._prune(snapshot)

    def _unnamed(self, name: str) -> Path:
        """Return the place of a weight file until it is complete: in its folder, which may be a mount of its own."""
        return self.run_dir / WEIGHTS / f".{name}.{self._token}.tmp"

    def _prune(self, snapshot: _Snapshot) -> None:
        retention, newest = snapshot.retention, snapshot.state["step"]
        # Checkpoints newer than this one are damaged and the run was resumed from an older one: they do not count.
        older = [path for path in checkpoints_of(self.run_dir) if (step_of(path.name) or 0) <= newest]
        for path in older[retention.checkpoints :]:
            _discard(path)
        folder = self.run_dir / WEIGHTS
        best = set(map(step_name, retention.best_steps))
        files = sorted(folder.glob("step-*.safetensors"), reverse=True)
        pruned = [file for file in files[retention.weights :] if file.stem not in best]
        pruned += sorted(folder.glob(f"{EMA}-*.safetensors"), reverse=True)[retention.checkpoints :]
        for file in pruned:
            remove(file)
        if pruned:
            _write_hashes(folder, {})


def remove_unfinished_saves(run_dir: Path) -> None:
    """Remove what a killed or failed save left. Only rank 0, which writes the run, may call it."""
    for folder in (CHECKPOINTS, WEIGHTS):
        for left in (run_dir / folder).glob(".*.tmp"):
            remove_tree(left, as_far_as_possible=True)


def move_pointer(checkpoint: Path) -> None:
    """Point `latest` to a checkpoint that is complete and has its final name."""
    write_file(checkpoint.with_name(POINTER), f"{checkpoint.name}\n")


def _write_tensors(path: Path, tensors: Tensors, metadata: dict[str, str] | None = None) -> dict[str, Any]:
    with whole_path(path) as file:
        save_file(tensors, file, metadata=metadata)
    return _describe(path)


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_file(path, json.dumps(values, indent=1) + "\n")


def _write_hashes(folder: Path, new: dict[str, str]) -> None:
    """Record the hashes of the existing weight files and of the `new` ones."""
    hashes = sorted({**weight_hashes(folder), **new}.items())
    lines = [f"{value}  {name}\n" for name, value in hashes if name in new or (folder / name).exists()]
    write_file(folder / WEIGHT_HASHES, "".join(lines))


def _discard(checkpoint: Path) -> None:
    """Rename a checkpoint, then remove it, so that a kill in between leaves no partial checkpoint under its name."""
    aside = checkpoint.with_name(f".{checkpoint.name}.removed.tmp")
    with suppress(FileNotFoundError):
        move(checkpoint, aside)
    remove_tree(aside, as_far_as_possible=True)
