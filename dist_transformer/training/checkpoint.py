"""Checkpoints: whole or absent, one fp32 tensor a parameter, for any world and any ZeRO stage.

Commit order: temporary folder → every rank writes, flushes and hashes its share → rank 0 writes the state and the
manifest → rename → the pointer `latest` moves → older ones are pruned.
"""

import json
import platform
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dist_transformer import distributed
from dist_transformer.config import read_json
from dist_transformer.errors import UserError
from dist_transformer.files import sha256_of, sync, write_synced
from dist_transformer.training.engine import EMA, MOMENTS, ParameterState

FORMAT_VERSION = 1

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """What is kept."""

    checkpoints: int
    """So many of the newest; and of the files of averaged weights."""
    weights: int
    """So many of the newest."""
    best_steps: frozenset[int] = frozenset()
    """And the weights of these steps."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def versions() -> dict[str, str]:
    packages = ("dist_transformer", "torch", "deepspeed")
    return {"python": platform.python_version(), **{name: version(name) for name in packages}}


def save_checkpoint(
    run_dir: Path,
    states: Iterable[ParameterState],
    state: dict[str, Any],
    *,
    retention: Retention,
    weights_metadata: dict[str, str],
) -> Path:
    """Write checkpoint and weight file of `state["step"]`, and `ema-` where an average is kept. A collective.

    Args:
        states: every parameter, as `Engine.parameter_states` gives them.
        state: plain JSON; step, position and counters.
        weights_metadata: strings that go into the weight file's header.

    Raises:
        UserError: on all ranks, when one of them cannot write; what was there before is untouched.
    """
    name = step_name(state["step"])
    final, temporary = run_dir / "checkpoints" / name, run_dir / "checkpoints" / f".{name}.tmp"
    weights_file = run_dir / "weights" / f"{name}.safetensors"
    average_file = weights_file.with_name(weights_file.name.replace("step", EMA))

    def commit() -> None:
        _write_json(temporary / "state.json", {"format_version": FORMAT_VERSION, "versions": versions(), **state})
        files = {**dict(entries), "state.json": _describe(temporary / "state.json")}
        _write_json(temporary / "manifest.json", {"format_version": FORMAT_VERSION, "files": files})
        sync(temporary)
        _write_tensors(weights_file, weights, metadata=weights_metadata)
        if averages:
            _write_tensors(average_file, averages, metadata=weights_metadata)
        if final.exists():
            # A damaged checkpoint of the same step, which this run was resumed past.
            shutil.rmtree(final)
        temporary.rename(final)
        sync(final.parent)
        pointer = _beside(final.parent / "latest")
        write_synced(pointer, f"{name}\n".encode())
        pointer.replace(final.parent / "latest")
        sync(final.parent)
        _prune(run_dir, retention, name)

    try:
        _agree(lambda: _start_anew(temporary, weights_file.parent) if distributed.rank() == 0 else None)
        share, weights, averages = _collect(states)
        part = temporary / f"part-{distributed.rank():05d}.safetensors"
        entries = distributed.gather_objects(_agree(lambda: _write_tensors(part, share)))
        _agree(lambda: commit() if distributed.rank() == 0 else None)
    except UserError:
        # All ranks are here: nobody writes into the folder any more.
        if distributed.rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            for left in (_beside(weights_file), _beside(average_file), _beside(final.parent / "latest")):
                with suppress(OSError):
                    left.unlink()
        raise
    return final


def _collect(states: Iterable[ParameterState]) -> tuple[dict[str, torch.Tensor], ...]:
    """This rank's share of the tensors, and on rank 0 all weights and all averaged weights; on the host."""
    share, weights, averages = {}, {}, {}
    for number, state in enumerate(states):
        if number % distributed.world_size() == distributed.rank():
            share[f"weight/{state.name}"] = state.weight.cpu().clone()
            share.update({f"{key}/{state.name}": value.cpu().clone() for key, value in state.moments.items()})
        if distributed.rank() == 0:
            weights[state.name] = state.weight.cpu().clone()
            if EMA in state.moments:
                averages[state.name] = state.moments[EMA].cpu().clone()
    return share, weights, averages


def _agree(action: Callable[[], T]) -> T:
    """Run `action` on every rank; when one cannot write, all raise its error."""
    remedy = "free space or fix the folder; older checkpoints are intact"
    return distributed.on_all_ranks(
        action,
        errors=(OSError, SafetensorError),
        describe=lambda error: f"cannot write the checkpoint: {error}: {remedy}",
    )


def _start_anew(temporary: Path, weights_folder: Path) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    weights_folder.mkdir(parents=True, exist_ok=True)


def _write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None
) -> tuple[str, dict[str, Any]]:
    temporary = _beside(path)
    save_file(tensors, temporary, metadata=metadata)
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)
    return path.name, _describe(path)


def _beside(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(f".{path.name}.tmp")


def _describe(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_synced(path, (json.dumps(values, indent=1) + "\n").encode())


def _prune(run_dir: Path, retention: Retention, newest: str) -> None:
    folders = _newest_first(run_dir / "checkpoints", "step-*")
    # Newer than the one just written are damaged ones that the run was resumed past: they do not count.
    for folder in [folder for folder in folders if folder.name <= newest][retention.checkpoints :]:
        shutil.rmtree(folder, ignore_errors=True)
    best = {f"{step_name(step)}.safetensors" for step in retention.best_steps}
    for file in _newest_first(run_dir / "weights", "step-*.safetensors")[retention.weights :]:
        if file.name not in best:
            file.unlink(missing_ok=True)
    for file in _newest_first(run_dir / "weights", f"{EMA}-*.safetensors")[retention.checkpoints :]:
        file.unlink(missing_ok=True)


def _newest_first(folder: Path, pattern: str) -> list[Path]:
    return sorted(folder.glob(pattern), reverse=True)


def checkpoint_problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file has the size and hash that its manifest states."""
    try:
        manifest = read_json(path / "manifest.json")
        if manifest.get("format_version", 0) > FORMAT_VERSION:
            return f"{path} was written by a newer version of dist_transformer"
        return _first_problem(path, manifest["files"])
    except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
        return f"{path} has no usable manifest ({error})"


def _first_problem(path: Path, files: dict[str, Any]) -> str | None:
    if "state.json" not in files:
        return f"{path} has no usable manifest (it states no state.json)"
    unlisted = {file.name for file in path.iterdir()} - files.keys() - {"manifest.json"}
    if unlisted:
        return f"{path / min(unlisted)} is not in the manifest"
    for name, expected in files.items():
        file = path / name
        if Path(name).name != name or file.is_symlink() or not file.is_file():
            return f"{file} is missing or not a plain file"
        if file.stat().st_size != expected["bytes"] or sha256_of(file) != expected["sha256"]:
            return f"{file} is damaged: its size or SHA-256 is not what the manifest states"
    return None


def newest_checkpoint(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is whole, chosen by rank 0 for all ranks. A collective.

    Raises:
        UserError: there are checkpoints, and all are damaged; training does not silently start anew.
    """

    def choose() -> tuple[Path | None, str | None]:
        folders = _newest_first(run_dir / "checkpoints", "step-*")
        for folder in folders:
            problem = checkpoint_problem(folder)
            if problem is None:
                return folder, None
            warn(f"{problem}; falling back to an older checkpoint")
        remedy = "restore one from a backup, or choose another --run-dir to start anew"
        return None, f"no checkpoint in {run_dir / 'checkpoints'} is usable: {remedy}" if folders else None

    chosen, error = distributed.broadcast_object(choose() if distributed.rank() == 0 else (None, None))
    if error:
        raise UserError(error)
    return chosen


class CheckpointReader:
    """Reads a verified checkpoint, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_json(path / "state.json")
        self._files: dict[str, Any] = {}
        for part in sorted(path.glob("part-*.safetensors")):
            opened = safe_open(part, framework="pt")
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def weight(self, name: str) -> torch.Tensor:
        return self.tensor("weight", name)

    def tensor(self, part: str, name: str) -> torch.Tensor:
        """Weight, moment or average of a parameter."""
        return self._files[f"{part}/{name}"].get_tensor(f"{part}/{name}")

    def parameter(self, name: str) -> ParameterState:
        kept = (*MOMENTS, EMA) if f"{EMA}/{name}" in self._files else MOMENTS
        return ParameterState(
            name=name, weight=self.weight(name), moments={key: self.tensor(key, name) for key in kept}
        )

    def parameter_names(self) -> list[str]:
        return [key.removeprefix("weight/") for key in self._files if key.startswith("weight/")]
