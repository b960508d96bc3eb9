"""Choose, verify and read checkpoints: one fp32 tensor per parameter, for any world size and any ZeRO stage.

`layout` has the names of their files; `writer` writes them.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import LISTING_BYTES, read_small, sha256_of
from dist_transformer.base.tensor_file import open_tensors, values_problem
from dist_transformer.base.verified import Stated, has_own_hash
from dist_transformer.config.plain import read_json, read_json_with_bytes
from dist_transformer.run.checkpoint.state import EMA, MOMENTS, ParameterState
from dist_transformer.run.layout import CHECKPOINTS, MANIFEST_FILE, STATE_FILE, WEIGHT_HASHES, checkpoints_of, step_of
from dist_transformer.runtime import distributed

FORMAT_VERSION = 2
"""Version of the checkpoint format. Since version 2, a manifest states its own hash."""
_HASH_LINE = re.compile(r"([0-9a-f]{64})  ([^/\n]+)")


def checkpoint_problem(path: Path) -> str | None:
    """Describe what is wrong with a checkpoint; None if every file has the size and hash that its manifest states."""
    files, problem = _stated_files(path)
    return problem or next(filter(None, (_file_problem(path, name, files[name]) for name in files)), None)


def _stated_files(path: Path) -> tuple[dict[str, Any], str | None]:
    """Read what the manifest states about each file, and describe what is wrong with the folder or the manifest."""
    if path.is_symlink() or not path.is_dir():
        return {}, f"{path} is a link or not a folder"
    try:
        if (path / MANIFEST_FILE).is_symlink():
            return {}, f"{path / 'manifest.json'} is a link"
        manifest, content = read_json_with_bytes(path / MANIFEST_FILE, most=LISTING_BYTES)
        if manifest["format_version"] > FORMAT_VERSION:
            return {}, f"{path} was written by a newer version of dist_transformer"
        if manifest["format_version"] != 1 and not has_own_hash(content, manifest["sha256"]):
            raise UserError(f"{MANIFEST_FILE} is damaged (its SHA-256 is not what it states)")
        files = {name: (stated["bytes"], stated["sha256"]) for name, stated in manifest["files"].items()}
        if any((type(size), type(sha256)) != (int, str) for size, sha256 in files.values()):
            raise UserError("it does not state the size and the SHA-256 of each file")
        unlisted = {file.name for file in path.iterdir()} - files.keys() - {MANIFEST_FILE}
    except (UserError, OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return {}, f"{path} has no usable manifest ({error})"
    if STATE_FILE not in files:
        return {}, f"{path} has no usable manifest (it does not list state.json)"
    return files, f"{path / min(unlisted)} is not in the manifest" if unlisted else None


def stated_files(path: Path) -> dict[Path, Stated]:
    """List the files of a checkpoint with the hashes that its manifest states. The caller checks the hashes.

    Raises:
        UserError: there is no usable manifest, or a file is missing or not a regular file.
    """
    remedy = "choose another checkpoint"
    files, problem = _stated_files(path)
    if problem := problem or next(filter(None, (_name_problem(path, name) for name in files)), None):
        raise UserError(f"{problem}: {remedy}")
    return {path / name: Stated(sha256, MANIFEST_FILE, remedy) for name, (_, sha256) in files.items()}


def _name_problem(folder: Path, name: str) -> str | None:
    file = folder / name
    try:
        # A name with a slash would point outside the folder.
        is_own = Path(name).name == name and not file.is_symlink() and file.is_file()
    except (OSError, ValueError):
        # The name is too long or contains a null.
        is_own = False
    return None if is_own else f"{file} is missing or not a regular file"


def _file_problem(folder: Path, name: str, stated: tuple[Any, Any]) -> str | None:
    file = folder / name
    if problem := _name_problem(folder, name):
        return problem
    try:
        if (file.stat().st_size, sha256_of(file)) != stated:
            return f"{file} is damaged (its size or SHA-256 is not what the manifest states)"
        # An attacker who wrote the file may have written the manifest too.
        if file.suffix == ".json":
            read_json(file, most=LISTING_BYTES)
        else:
            return values_problem(file)
    except UserError as error:
        return str(error)
    except (SafetensorError, OSError, RuntimeError) as error:
        # torch opens the file once more, and raises RuntimeError if it was pruned in between.
        return f"{file} cannot be read ({error})"
    return None


def newest_checkpoint(
    run_dir: Path, warn: Callable[[str], None], judge: Callable[[Path], str | None] = lambda path: None
) -> Path | None:
    """Find the newest intact checkpoint, the same on all ranks, which share the hashing.

    Collective: every rank must call it.

    Args:
        warn: receives each newer checkpoint that is not used, and which steps are computed again.
        judge: called on rank 0 with an intact checkpoint; returns what else is wrong with it, or None.

    Raises:
        UserError: there are checkpoints, and all are damaged. Training does not silently start from the beginning.
    """
    folder = run_dir / CHECKPOINTS
    linked, found = distributed.broadcast_object((folder.is_symlink(), checkpoints_of(run_dir)))
    if linked:
        raise UserError(f"{folder} is a link: put the real folder there, or use the --run-dir that it belongs to")
    for path in found:
        problem = _agreed_problem(path, judge)
        if problem is None:
            if path != found[0]:
                warn(f"falling back to {path}: every step after {step_of(path.name):,} is computed again")
            return path
        warn(f"{problem}: it is not used")
    if found:
        remedy = "restore one from a backup, or choose another --run-dir to start a new run"
        raise UserError(f"no checkpoint in {folder} is usable: {remedy}")
    return None


def _agreed_problem(path: Path, judge: Callable[[Path], str | None]) -> str | None:
    """Run `checkpoint_problem` with the hashing shared among ranks, then `judge`.

    Collective: every rank must call it.
    """
    files, problem = distributed.broadcast_object(_stated_files(path) if distributed.rank() == 0 else ({}, None))
    if problem:
        return problem
    own = list(enumerate(files))[distributed.rank() :: distributed.world_size()]
    first = next(((at, p) for at, name in own if (p := _file_problem(path, name, files[name]))), None)
    problems = [found for found in distributed.gather_objects(first) if found is not None]
    if problems:
        return min(problems)[1]
    judged: str | None = distributed.broadcast_object(judge(path) if distributed.rank() == 0 else None)
    return judged


def weight_hashes(folder: Path) -> dict[str, str]:
    """Read the SHA-256 of the files in a run's `weights/` by name, as recorded when they were written.

    Raises:
        UserError: the file of hashes cannot be read.
    """
    file = folder / WEIGHT_HASHES
    try:
        lines = read_small(file, most=LISTING_BYTES).decode(errors="replace").splitlines() if file.is_file() else []
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): restore it") from None
    matches = (_HASH_LINE.fullmatch(line) for line in lines)
    return {match[2]: match[1] for match in matches if match}


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
    """Read a verified checkpoint, tensor by tensor.

    Raises:
        UserError: a part is not a safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state = read_json(path / STATE_FILE, most=LISTING_BYTES)
        self._files: dict[str, Any] = {}
        for part in sorted(path.glob("part-*.safetensors")):
            try:
                opened = open_tensors(part)
            except (SafetensorError, OSError, RuntimeError) as error:
                # The hash matches its manifest, but the file is not safetensors: training did not write it.
                raise UserError(f"{part} cannot be read ({error}): restore {path} from a backup") from None
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def settings(self) -> dict[str, Any] | None:
        """Return the run's settings when it was written, as config.json holds them; None if an old version wrote it."""
        settings = read_json(self.path / MANIFEST_FILE, most=LISTING_BYTES).get("config")
        return settings if isinstance(settings, dict) else None

    def weight(self, name: str) -> torch.Tensor:
        return self.tensor("weight", name)

    def tensor(self, part: str, name: str) -> torch.Tensor:
        """Return the weight, a moment or the average of a parameter."""
        return self._files[f"{part}/{name}"].get_tensor(f"{part}/{name}")

    def parameter(self, name: str) -> ParameterState:
        kept = (*MOMENTS, EMA) if f"{EMA}/{name}" in self._files else MOMENTS
        return ParameterState(
            name=name, weight=self.weight(name), moments={key: self.tensor(key, name) for key in kept}
        )

    def parameter_names(self) -> list[str]:
        return [key.removeprefix("weight/") for key in self._files if key.startswith("weight/")]
