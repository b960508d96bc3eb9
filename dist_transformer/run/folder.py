"""A run folder: one run at a time, its settings, and what a resumed run may not change."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dist_transformer.config.plain import from_plain, omitted_defaults, read_json, to_plain
from dist_transformer.config.settings import RUN_IDENTITY, TrainConfig
from dist_transformer.data.folder.format import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.errors import UserError
from dist_transformer.files import make_folder, read_small, remove, remove_unfinished, sha256_of, write_file
from dist_transformer.links import guard, refuse_link
from dist_transformer.model_folder import WEIGHTS_FILE
from dist_transformer.run.checkpoint.content import content_problem
from dist_transformer.run.checkpoint.reader import CheckpointReader, newest_checkpoint
from dist_transformer.run.checkpoint.writer import move_pointer, remove_unfinished_saves
from dist_transformer.run.layout import (
    CHECKPOINTS,
    LEDGER_FILE,
    MANIFEST_FILE,
    METRICS_FILE,
    POINTER,
    SAMPLES,
    SETTINGS_FILE,
    WEIGHTS,
    WRITTEN_IN_PLACE,
    weight_files,
)
from dist_transformer.run.ledger import GENESIS, follow_ledger, truncate_jsonl
from dist_transformer.run.lock import Fence, sole_writer, unfenced
from dist_transformer.run.records import scan_records
from dist_transformer.run.warm_start import InitialWeights, read_initial_weights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.launch import as_typed, own_command

# Another value of one of these makes another run; everything else may change on resume and is reported.
_FIXED = ("model", "batch", "seed", "data_sha256", "data_weights", "data_temperature", "init_from")
# Of these, what may: it decides which dropout masks are drawn, and each start on other hardware may choose anew.
_FREE = "batch.packs_per_micro_batch"


def open_run(
    config: TrainConfig, described: dict[str, Any], data: DataFolder, held: ExitStack
) -> tuple[CheckpointReader | InitialWeights | None, list[str], Fence]:
    """Take the run folder, choose where to begin, refuse settings that differ, and write the run's. A collective.

    Args:
        described: the settings, as `describe_run` gives them; what the run begins with is added.
        data: whose tokenizer is that of the run.
        held: keeps the folder for this run until it is closed.

    Returns:
        the state or the weights that training goes on from, lines for the user, and the fence of the folder, which
        lets everything pass on other ranks than 0.

    Raises:
        UserError: on all ranks: the folder is in use or cannot be written, `--resume` forbids it, settings differ, or
            settings, checkpoint and ledger are not of one run.
    """
    run_dir, notes, fence = config.run_dir, list[str](), unfenced
    guard(run_dir)

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
        nonlocal fence
        _refuse_other_folder(run_dir)
        for name in WRITTEN_IN_PLACE:
            refuse_link(run_dir / name)
        if config.checkpoints.resume != "required" or run_dir.is_dir():
            fence = acquired.enter_context(sole_writer(run_dir, notes.append))

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
            before, rebuilt = settings_before(run_dir, path)
            described["init_from_sha256"] = before.get("init_from_sha256")
            notes += rebuilt
            notes += [f"setting changed: {line}" for line in check_settings(run_dir, described, before)]
            require_own_checkpoint(run_dir, reader, described)
            by_main(lambda: require_ledger(run_dir, reader))
            by_main(lambda: notes.extend(lost_records(run_dir, reader.state["step"])))
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
        by_main(lambda: _begin(run_dir, described, data.path / TOKENIZER_FILE, reader, fence))
        held.push(acquired.pop_all())
    return reader or initial, notes, fence


def _refuse_other_folder(run_dir: Path) -> None:
    """A run would write its settings over those of a model, and its tokenizer over that of data."""
    try:
        str(run_dir).encode()
    except UnicodeEncodeError:
        # `safetensors` would write files there, and could not read them.
        raise UserError(f"--run-dir {run_dir} has a name that is no UTF-8: choose another") from None
    for name, kind in ((INDEX_FILE, "a data"), (WEIGHTS_FILE, "a model")):
        if (run_dir / name).exists():
            raise UserError(f"--run-dir {run_dir} is {kind} folder (it has {name}): choose another, new or of a run")


def _begin(
    run_dir: Path, described: dict[str, Any], tokenizer: Path, reader: CheckpointReader | None, fence: Fence
) -> None:
    """Write the settings, and take away what is newer than the checkpoint or was left half written; for rank 0."""
    fence()
    for folder in (run_dir, run_dir / SAMPLES):
        remove_unfinished(folder)
    remove_unfinished_saves(run_dir)
    write_settings(run_dir, described, tokenizer, fence=fence)
    last_step = reader.state["step"] if reader else 0
    for name in (METRICS_FILE, LEDGER_FILE):
        truncate_jsonl(run_dir / name, last_step, fence=fence)
    if reader is not None:
        fence()
        # A folder without checkpoints may still hold the only weights of a run: those stay.
        remove_newer(run_dir, last_step)
        pointer = run_dir / CHECKPOINTS / POINTER
        if not pointer.is_file() or read_small(pointer) != f"{reader.path.name}\n".encode():
            move_pointer(reader.path, fence=fence)


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
    settings = _flatten({name: described[name] for name in _FIXED})
    settings.pop(_FREE, None)
    fixed = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(fixed.encode()).hexdigest()[:16]


def settings_before(run_dir: Path, checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the settings that a run was last started with; where `config.json` is lost, those of a sound checkpoint.

    Returns:
        the settings as `config.json` holds them, and lines for the user.

    Raises:
        UserError: `config.json` is lost, and the checkpoint does not repeat it.
    """
    try:
        return read_json(run_dir / SETTINGS_FILE), []
    except UserError as error:
        repeated = read_json(checkpoint / MANIFEST_FILE).get("config")
        if not isinstance(repeated, dict):
            raise
        return repeated, [f"{error}: it is rebuilt from {checkpoint / MANIFEST_FILE}"]


def check_settings(run_dir: Path, wanted: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Compare with the settings that the run began with.

    Args:
        before: those, as `settings_before` gives them.

    Returns:
        one line for each setting that changed and may.

    Raises:
        UserError: a setting that must not change, by name.
    """
    unwritten = omitted_defaults(TrainConfig)
    before = unwritten | _flatten(before)
    now = unwritten | _flatten(wanted)
    changed = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "data_sha256":
            raise UserError(_other_data(run_dir, before["data"], now["data"]))
        if name.split(".")[0] in _FIXED and name != _FREE:
            raise UserError(
                f"{run_dir} was trained with {name} = {old!r}, not {new!r}: use the old value, or another --run-dir"
            )
        changed.append(f"{name}: {old!r} -> {new!r}")
    return changed


def require_own_checkpoint(run_dir: Path, reader: CheckpointReader, described: dict[str, Any]) -> None:
    """Refuse a checkpoint that another run wrote.

    Args:
        described: the run's settings, as `describe_run` gives them, and the weights that it began with.

    Raises:
        UserError: it names the checkpoint, and what differs.
    """
    path, state = reader.path, reader.state
    remedy = "move it out of the folder, and the run resumes from its own"
    config = read_json(path / MANIFEST_FILE).get("config")
    if isinstance(config, dict):
        unwritten = omitted_defaults(TrainConfig)
        theirs, own = (unwritten | _flatten(values) for values in (config, described))
        names = sorted(
            name for name in theirs.keys() | own.keys() if name.split(".")[0] in (*_FIXED, "init_from_sha256")
        )
        if differing := next((name for name in names if theirs.get(name) != own.get(name)), None):
            raise UserError(
                f"{path} is of another run than {run_dir}: it was trained with {differing} = "
                f"{theirs.get(differing)!r}, not {own.get(differing)!r}: {remedy}"
            )
    elif state.get("run", run_identity(described)) != run_identity(described):
        raise UserError(f"{path} is of another run than {run_dir}: {remedy}")


def require_ledger(run_dir: Path, reader: CheckpointReader) -> None:
    """Refuse to resume where the ledger does not lead to the checkpoint: the proof of what was trained on is lost.

    Raises:
        UserError: it names the ledger, and what is wrong with it.
    """
    file, step = run_dir / LEDGER_FILE, reader.state["step"]
    remedy = (
        f"restore {LEDGER_FILE} from a backup, move {reader.path} away to resume from an older checkpoint, or begin a "
        "new run with --init-from a model of these weights"
    )
    known, chain = 0, GENESIS
    for entry in follow_ledger(file):
        if entry is None:
            raise UserError(f"{file} is damaged after step {known:,}, before step {step:,} of {reader.path}: {remedy}")
        known, chain = entry["step"], entry["chain"]
        if known == step:
            break
    if known < step:
        raise UserError(f"{file} ends at step {known:,}, before step {step:,} of {reader.path}: {remedy}")
    if chain != reader.state["ledger_chain"]:
        raise UserError(f"{file} and {reader.path} are of two runs, their chains differ at step {step:,}: {remedy}")


def lost_records(run_dir: Path, step: int) -> list[str]:
    """Say whether `metrics.jsonl` has lost what was logged until `step`: reports lack it, and training does not."""
    file = run_dir / METRICS_FILE
    records = scan_records(file)[0].get("train", []) if file.exists() else []
    if any(record["step"] == step for record in records):
        return []
    last = max((record["step"] for record in records if record["step"] < step), default=0)
    return [f"{file} has lost the records from step {last + 1:,} to {step:,}: reports lack them"]


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


def _flatten(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


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


def write_settings(run_dir: Path, described: dict[str, Any], tokenizer: Path, *, fence: Fence = unfenced) -> None:
    make_folder(run_dir)
    write_file(run_dir / SETTINGS_FILE, json.dumps(described, indent=1) + "\n", fence=fence)
    write_file(run_dir / TOKENIZER_FILE, read_small(tokenizer), fence=fence)


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
            remove(file)
