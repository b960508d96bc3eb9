"""A run folder: one run at a time, its settings, and what a resumed run may not change."""

import errno
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from dist_transformer.config.plain import from_plain, omitted_defaults, read_json, to_plain
from dist_transformer.config.settings import RUN_IDENTITY, TrainConfig
from dist_transformer.data.folder.format import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.errors import UserError
from dist_transformer.files import exclusive, read_small, remove_unfinished, sha256_of, write_file
from dist_transformer.model_folder import WEIGHTS_FILE
from dist_transformer.run.checkpoint import CheckpointReader, newest_checkpoint
from dist_transformer.run.checkpoint_content import content_problem
from dist_transformer.run.checkpoint_writer import move_pointer
from dist_transformer.run.layout import (
    CHECKPOINTS,
    LEDGER_FILE,
    LOCK_FILE,
    METRICS_FILE,
    POINTER,
    SAMPLES,
    SETTINGS_FILE,
    WEIGHTS,
    weight_files,
)
from dist_transformer.run.ledger import truncate_jsonl
from dist_transformer.run.warm_start import InitialWeights, read_initial_weights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.launch import as_typed, own_command

# A requeued job starts while the last ranks of its former start still end.
_PATIENCE_SECONDS = 5.0
# What file systems answer that know no locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# Another value of one of these makes another run; everything else may change on resume and is reported.
_FIXED = ("model", "batch", "seed", "data_sha256", "data_weights", "data_temperature", "init_from")


def open_run(
    config: TrainConfig, described: dict[str, Any], data: DataFolder, held: ExitStack
) -> tuple[CheckpointReader | InitialWeights | None, list[str]]:
    """Take the run folder, choose where to begin, refuse settings that differ, and write the run's. A collective.

    Args:
        described: the settings, as `describe_run` gives them; what the run begins with is added.
        data: whose tokenizer is that of the run.
        held: keeps the folder for this run until it is closed.

    Returns:
        the state or the weights that training goes on from, and lines for the user.

    Raises:
        UserError: on all ranks: the folder is in use or cannot be written, `--resume` forbids it, or settings differ.
    """
    run_dir, notes = config.run_dir, list[str]()

    def by_main(action: Callable[[], object]) -> None:
        distributed.on_all_ranks(
            lambda: action() if distributed.rank() == 0 else None,
            errors=(UserError, OSError),
            describe=lambda error: (
                str(error)
                if isinstance(error, UserError)
                else f"cannot write in {run_dir}: {error}: fix the folder, or choose another --run-dir"
            ),
        )

    def take() -> None:
        _refuse_other_folder(run_dir)
        if config.checkpoints.resume != "required" or run_dir.is_dir():
            acquired.enter_context(sole_writer(run_dir, notes.append))

    with ExitStack() as acquired:
        by_main(take)
        path = newest_checkpoint(run_dir, notes.append, content_problem)
        reader, initial = None, None
        if path is None and config.checkpoints.resume == "required":
            raise UserError(
                f"--resume required, but {run_dir} holds no checkpoint: check --run-dir, or use --resume auto"
            )
        if path is not None and config.checkpoints.resume == "never":
            raise UserError(
                f"--resume never, but {run_dir} holds checkpoints: choose another --run-dir, or move them away"
            )
        if path is not None:
            reader = CheckpointReader(path)
            described["init_from_sha256"] = read_json(run_dir / SETTINGS_FILE).get("init_from_sha256")
            notes += [f"setting changed: {line}" for line in check_settings(run_dir, described)]
            notes += average_notes(reader.state, config.ema_decay)
            notes.append(f"resumed from {path}")
        elif config.checkpoints.init_from is not None:
            source, vocabulary = config.checkpoints.init_from, config.checkpoints.init_vocabulary
            initial = distributed.on_all_ranks(
                lambda: read_initial_weights(source, config.model, data.tokenizer(), vocabulary=vocabulary)
            )
            described["init_from_sha256"] = initial.sha256
            notes.append(f"begins with the weights of {source}" + (f": {initial.note}" if initial.note else ""))
        distributed.barrier()
        by_main(lambda: _begin(run_dir, described, data.path / TOKENIZER_FILE, reader))
        held.push(acquired.pop_all())
    return reader or initial, notes


def _refuse_other_folder(run_dir: Path) -> None:
    """A run would write its settings over those of a model, and its tokenizer over that of data."""
    for name, kind in ((INDEX_FILE, "a data"), (WEIGHTS_FILE, "a model")):
        if (run_dir / name).exists():
            raise UserError(f"--run-dir {run_dir} is {kind} folder (it has {name}): choose another, new or of a run")


def _begin(run_dir: Path, described: dict[str, Any], tokenizer: Path, reader: CheckpointReader | None) -> None:
    """Write the settings, and take away what is newer than the checkpoint or was left half written; for rank 0."""
    for folder in (run_dir, run_dir / SAMPLES):
        remove_unfinished(folder)
    write_settings(run_dir, described, tokenizer)
    last_step = reader.state["step"] if reader else 0
    for name in (METRICS_FILE, LEDGER_FILE):
        truncate_jsonl(run_dir / name, last_step)
    if reader is not None:
        # A folder without checkpoints may still hold the only weights of a run: those stay.
        remove_newer(run_dir, last_step)
        pointer = run_dir / CHECKPOINTS / POINTER
        if not pointer.is_file() or read_small(pointer) != f"{reader.path.name}\n".encode():
            move_pointer(reader.path)


@contextmanager
def sole_writer(run_dir: Path, note: Callable[[str], None], *, patience: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Be the only process that writes a run folder.

    The lock is the kernel's: it ends with its process, however that ends, and nothing is ever left to remove. Between
    nodes it holds on file systems whose locks do: NFS, GPFS, Lustre mounted with `flock`.

    Args:
        note: told when the file system knows no locks.
        patience: seconds to wait for a process that is about to end.

    Raises:
        UserError: another process holds the folder; by host, process and time.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, deadline = run_dir / LOCK_FILE, time.monotonic() + patience
    with ExitStack() as stack:
        file: TextIO | None = None
        while file is None:
            try:
                file = stack.enter_context(exclusive(path, wait=False))
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(_in_use(run_dir, path)) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                note(f"{path} cannot be locked ({error}): make sure yourself that no other run writes to this folder")
                yield
                return
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": _now()}))
        file.flush()
        try:
            yield
        finally:
            # Nobody's any more; and a run folder that is handed on should name no host.
            file.truncate(0)


def _now() -> str:
    return datetime.now(UTC).isoformat(sep=" ", timespec="seconds")


def _in_use(run_dir: Path, lock: Path) -> str:
    try:
        holder = json.loads(read_small(lock))
        who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, LookupError, TypeError):
        who = "another process"
    return (
        f"{run_dir} is in use by {who}: wait until that run ends, or end it (ranks may outlive the launcher that "
        "started them), or choose another --run-dir"
    )


def describe_run(config: TrainConfig, folders: Sequence[Path], ds_config: dict[str, Any]) -> dict[str, Any]:
    """What `config.json` holds: the resolved settings and the identity of the data.

    Args:
        folders: the data folders on local disk.
    """
    return {
        **to_plain(config),
        "data_sha256": [sha256_of(folder / INDEX_FILE) for folder in folders],
        "init_from_sha256": None,
        "deepspeed": ds_config,
    }


def settings_of(described: dict[str, Any], file: Path) -> TrainConfig:
    """Give the settings that `config.json` holds, without the identity of the data.

    Args:
        file: where `described` was read, for errors.
    """
    values = {name: value for name, value in described.items() if name not in RUN_IDENTITY}
    return from_plain(TrainConfig, values, str(file))


def run_identity(described: dict[str, Any]) -> str:
    """Equal for two runs whose settings would let one resume the other: 16 hexadecimal digits."""
    fixed = json.dumps({name: described[name] for name in _FIXED}, sort_keys=True)
    return hashlib.sha256(fixed.encode()).hexdigest()[:16]


def check_settings(run_dir: Path, wanted: dict[str, Any]) -> list[str]:
    """Compare with the settings that the run began with.

    Returns:
        one line for each setting that changed and may.

    Raises:
        UserError: a setting that must not change, by name.
    """
    unwritten = omitted_defaults(TrainConfig)
    before = unwritten | _flatten(read_json(run_dir / SETTINGS_FILE))
    now = unwritten | _flatten(wanted)
    changed = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "data_sha256":
            raise UserError(_other_data(run_dir, before["data"], now["data"]))
        if name.split(".")[0] in _FIXED:
            raise UserError(
                f"{run_dir} was trained with {name} = {old!r}, not {new!r}: use the old value, or another --run-dir"
            )
        changed.append(f"{name}: {old!r} -> {new!r}")
    return changed


def _other_data(run_dir: Path, old: list[str], new: list[str]) -> str:
    given = " ".join(new)
    if old == new:
        return (
            f"{run_dir} was trained on other data: --data {given} has changed since: put back what was there, or "
            "choose another --run-dir"
        )
    return (
        f"{run_dir} was trained on other data ({' '.join(old)}) than --data {given}: give the same data, which may be "
        "elsewhere by now, or choose another --run-dir"
    )


def average_notes(state: dict[str, Any], ema_decay: float) -> list[str]:
    """What becomes of the moving average of the weights where a checkpoint's run did otherwise.

    Args:
        state: of the checkpoint.
    """
    kept = state.get("ema_decay", 0.0) > 0
    if ema_decay > 0 and not kept:
        return [f"the moving average of the weights begins with those of step {state['step']}"]
    if kept and ema_decay == 0:
        return ["the moving average of the weights is given up; its files in weights/ stay"]
    return []


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def write_settings(run_dir: Path, described: dict[str, Any], tokenizer: Path) -> None:
    run_dir.mkdir(parents=True, exist_ok=True)
    write_file(run_dir / SETTINGS_FILE, json.dumps(described, indent=1) + "\n")
    write_file(run_dir / TOKENIZER_FILE, read_small(tokenizer))


def next_command(run_dir: Path) -> str:
    """What a user does with a run that has ended, as two lines."""
    weights = min(5, len(weight_files(run_dir)))
    flags = ["--run-dir", run_dir, "--last", weights, "--out", run_dir / "model"]
    command = as_typed(own_command("average", *flags))
    return f"weights: {run_dir / WEIGHTS}\nnext:    {command}"


def remove_newer(run_dir: Path, step: int) -> None:
    """Remove weight files and samples after `step`: what a run that goes on from there computes anew."""
    for file in (*run_dir.glob("weights/step-*"), *run_dir.glob("weights/ema-*"), *run_dir.glob("samples/step-*")):
        if int(file.stem.rpartition("-")[2]) > step:
            file.unlink()
