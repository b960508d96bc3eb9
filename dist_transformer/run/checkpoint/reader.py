"""Choose, verify and read checkpoints: one fp32 tensor per parameter, for any world size and any ZeRO stage.

`layout` has the names of their files; `writer` writes them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import sha256_of
from dist_transformer.base.tensor_file import open_tensors
from dist_transformer.base.verified import Stated
from dist_transformer.config.plain import read_json
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.run.layout import CHECKPOINTS, MANIFEST_FILE, STATE_FILE, WEIGHT_HASHES, checkpoints_of, step_of
from dist_transformer.runtime import distributed

FORMAT_VERSION = 3
"""Version of the checkpoint format. Manifests of version 2 stated their own hash, which is not read."""
_HASH_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")


def checkpoint_problem(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if every file has the size and hash that its manifest states."""
    files, problem = _stated_files(path)
    return problem or next(filter(None, (_file_problem(path / name, files[name]) for name in files)), None)


def _stated_files(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read what the manifest states about each file, and describe what is wrong with the folder or the manifest."""
    try:
        manifest = read_json(path / MANIFEST_FILE)
        if manifest["format_version"] > FORMAT_VERSION:
            return {}, f"{path} was written by a newer version of dist_transformer"
        if manifest.get("step") not in (None, step_of(path.name)):
            return {}, f"{path} is not what its name says (its manifest is of step {manifest['step']!r:.20})"
        files = {name: {key: stated[key] for key in ("bytes", "sha256")} for name, stated in manifest["files"].items()}
        unlisted = {file.name for file in path.iterdir()} - files.keys() - {MANIFEST_FILE}
    except Exception as error:  # any byte of it may be damaged
        return {}, f"{path} has no usable manifest ({error})"
    if STATE_FILE not in files:
        return {}, f"{path} has no usable manifest (it does not list state.json)"
    return files, f"{path / min(unlisted)} is not in the manifest" if unlisted else None


def _file_problem(file: Path, stated: dict[str, Any]) -> str | None:
    try:
        if {"bytes": file.stat().st_size, "sha256": sha256_of(file)} != stated:
            return f"{file} is damaged (its size or SHA-256 is not what the manifest states)"
    except (OSError, ValueError) as error:
        return f"{file} cannot be read ({error})"
    return None


def newest_checkpoint(run_dir: Path, warn: Callable[[str], None]) -> Path | None:
    """Find the newest intact checkpoint, the same on all ranks, which share the hashing.

    Collective: every rank must call it.

    Args:
        warn: receives each newer checkpoint that is not used, and which steps are computed again.

    Raises:
        UserError: there are checkpoints, and all are damaged. Training does not silently start from the beginning.
    """
    names = distributed.broadcast_object([path.name for path in checkpoints_of(run_dir)])
    found = [run_dir / CHECKPOINTS / name for name in names]
    for path in found:
        problem = _agreed_problem(path)
        if problem is None:
            if path != found[0]:
                warn(f"falling back to {path}: every step after {step_of(path.name):,} is computed again")
            return path
        warn(f"{problem}: it is not used")
    if found:
        remedy = "restore one from a backup, or choose another --run-dir to start a new run"
        raise UserError(f"no checkpoint in {run_dir / CHECKPOINTS} is usable: {remedy}")
    return None


def _agreed_problem(path: Path) -> str | None:
    """Run `checkpoint_problem` with the hashing shared among ranks.

    Collective: every rank must call it.
    """
    files, problem = distributed.broadcast_object(_stated_files(path) if distributed.rank() == 0 else ({}, None))
    if problem:
        return problem
    own = list(enumerate(files))[distributed.rank() :: distributed.world_size()]
    first = next(((at, p) for at, name in own if (p := _file_problem(path / name, files[name]))), None)
    problems = [found for found in distributed.gather_objects(first) if found is not None]
    return min(problems)[1] if problems else None


def weight_hashes(folder: Path) -> dict[str, str]:
    """Read the SHA-256 of the files in a run's `weights/` by name, as recorded when they were written.

    Raises:
        UserError: the file of hashes cannot be read.
    """
    file = folder / WEIGHT_HASHES
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): restore it") from None
    return {match[2]: match[1] for line in lines if (match := _HASH_LINE.fullmatch(line))}


def stated_weights(file: Path) -> Stated:
    """Return the hash that is recorded for a weight file in its folder.

    Raises:
        UserError: no hash is recorded.
    """
    sha256 = weight_hashes(file.parent).get(file.name)
    if sha256 is None:
        raise UserError(
            f"{file} has no hash in {file.parent / WEIGHT_HASHES}, so it cannot be checked: use weight files in the "
            "folder that their run wrote, checkpoints or model folders"
        )
    return Stated(sha256, WEIGHT_HASHES, "leave it out, or restore it")


def weights_problem(file: Path) -> str | None:
    """Describe what is wrong with a weight file; None if it matches its recorded hash, or none is recorded."""
    stated = weight_hashes(file.parent).get(file.name)
    if stated is not None and sha256_of(file) != stated:
        return f"{file} is damaged (its SHA-256 is not what {WEIGHT_HASHES} states)"
    return None


class CheckpointReader:
    """Read a verified checkpoint, tensor by tensor."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_json(path / STATE_FILE)
        self._files: dict[str, Any] = {}
        for part in sorted(path.glob("part-*.safetensors")):
            opened = open_tensors(part)
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def settings(self) -> dict[str, Any] | None:
        """Return the run's settings when it was written, as config.json holds them; None if an old version wrote it."""
        return read_json(self.path / MANIFEST_FILE).get("config")

    def weight(self, name: str) -> torch.Tensor:
        return self.tensor("weight", name)

    def tensor(self, part: str, name: str) -> torch.Tensor:
        """Return the weight, a moment or the average of a parameter."""
        return self._files[f"{part}/{name}"].get_tensor(f"{part}/{name}")

    def parameter(self, name: str) -> ParameterState:
        kept = [key for key in (*MOMENTS, EMA) if f"{key}/{name}" in self._files]
        moments = {key: self.tensor(key, name) for key in kept}
        return ParameterState(name=name, weight=self.weight(name), moments=moments)

    def parameter_names(self) -> list[str]:
        return [key.removeprefix("weight/") for key in self._files if key.startswith("weight/")]
