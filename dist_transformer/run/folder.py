"""Open a run folder for one run at a time, record its settings, and check what a resumed run may not change."""

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from dist_transformer.base.errors import UserError, failure
from dist_transformer.base.files import make_folder, remove, remove_unfinished, sha256_of, write_file
from dist_transformer.base.sole_writer import Fence, unfenced
from dist_transformer.config.plain import from_plain, omitted_defaults, read_json, to_plain
from dist_transformer.config.settings import RUN_IDENTITY, TrainConfig
from dist_transformer.data.folder.format import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.model_folder import WEIGHTS_FILE
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
)
from dist_transformer.run.ledger import GENESIS, follow_ledger, truncate_jsonl
from dist_transformer.run.lock import sole_training
from dist_transformer.run.lost import lost_checkpoint, lost_records, require_nothing_lost
from dist_transformer.run.warm_start import InitialWeights, read_initial_weights
from dist_transformer.runtime import distributed
from dist_transformer.runtime.agreement import flattened, require_agreement
from dist_transformer.runtime.device import kept_threads, threads_are_given

# Another value of one of these makes it another run. Every other setting may change on resume, and is reported.
_FIXED = ("model", "batch", "seed", "data_sha256", "data_weights", "data_temperature", "init_from", "freeze")
# It decides which dropout masks are drawn, and a resume on other hardware may choose another value.
_FREE = "batch.packs_per_micro_batch"
# Another kind has other state.
_KIND = "optimizer.kind"


def open_run(
    config: TrainConfig, described: dict[str, Any], data: DataFolder, held: ExitStack, *, cores: int | None = None
) -> tuple[CheckpointReader | InitialWeights | None, list[str], Fence]:
    """Lock the run folder, choose where to start, refuse settings that differ, and write the run's settings.

    Collective: every rank must call it.

    Args:
        described: the settings, as `describe_run` gives them; the hash of the initial weights is added.
        data: the data folder whose tokenizer the run uses.
        held: holds the lock of the folder until it is closed.
        cores: cores of a rank on CPUs, which keeps its earlier threads on a resume unless they are given; None on GPUs.

    Returns:
        the checkpoint or the initial weights that training starts from, lines for the user, and the fence of the
        folder, which is a no-op on all ranks but 0.

    Raises:
        UserError: on all ranks: the folder is in use or cannot be written, `--resume` forbids it, settings differ, or
            settings, checkpoint and ledger are not from one run.
    """
    folder = RunFolder(config, described)
    with ExitStack() as acquired:
        folder.lock(acquired)
        origin = folder.choose_start(data, cores)
        folder.begin(data.path / TOKENIZER_FILE, origin)
        held.push(acquired.pop_all())
    return origin, folder.notes, folder.fence


class RunFolder:
    """The folder of a run that starts. All ranks call its methods, in this order; rank 0 alone changes the folder."""

    def __init__(self, config: TrainConfig, described: dict[str, Any]) -> None:
        self.config, self.described, self.path = config, described, config.run_dir
        self.notes: list[str] = []
        self.fence: Fence = unfenced

    def lock(self, held: ExitStack) -> None:
        """Take the folder for this training, until `held` is closed."""

        def take() -> None:
            # A run would overwrite the model's settings or the data's tokenizer.
            for name, kind in ((INDEX_FILE, "a data"), (WEIGHTS_FILE, "a model")):
                if (self.path / name).exists():
                    raise UserError(
                        f"--run-dir {self.path} is {kind} folder (it has {name}): choose a new folder or a run folder"
                    )
            if self.config.checkpoints.resume != "required" or self.path.is_dir():
                self.fence = held.enter_context(sole_training(self.path, self.notes.append))

        self._by_main(take)

    def choose_start(self, data: DataFolder, cores: int | None) -> CheckpointReader | InitialWeights | None:
        """Return the newest checkpoint, or else the initial weights, if there are some."""
        resume, path = self.config.checkpoints.resume, newest_checkpoint(self.path, self.notes.append)
        self._by_main(
            lambda: self.notes.extend(lost_checkpoint(self.path, path) if path else require_nothing_lost(self.path))
        )
        if path is not None:
            if resume == "never":
                raise UserError(
                    f"--resume never, but {self.path} holds checkpoints: choose another --run-dir, or move them away"
                )
            return self._resume(CheckpointReader(path), cores)
        if resume == "required":
            raise UserError(
                f"--resume required, but {self.path} holds no checkpoint: check --run-dir, or use --resume auto"
            )
        return None if self.config.checkpoints.init_from is None else self._start_warm(data)

    def _resume(self, reader: CheckpointReader, cores: int | None) -> CheckpointReader:
        """Check that a checkpoint is of this run, and take over what belongs to it."""
        described, done = self.described, reader.state["step"]
        if done > self.config.max_steps:
            raise UserError(
                f"{self.path} is at step {done:,}, beyond --max-steps {self.config.max_steps:,}: raise --max-steps to "
                "continue, or choose another --run-dir"
            )
        before, rebuilt = settings_before(self.path, reader.path)
        described["init_from_sha256"] = before.get("init_from_sha256")
        self.notes += rebuilt
        if cores is not None and not threads_are_given() and (recorded := before.get("threads")):
            described["threads"], kept = kept_threads(recorded, chosen=described["threads"], cores=cores)
            self.notes += [kept] if kept else []
        self.notes += [f"setting changed: {line}" for line in check_settings(self.path, described, before)]
        # A number may be written in two ways, 0 and 0.0, and the identity of the run has one.
        for name in before.keys() & described.keys() & set(_FIXED):
            described[name] = _as_before(described[name], before[name])
        require_own_checkpoint(self.path, reader, described)
        require_same_measure(self.path, described, before, reader.state)
        self._by_main(lambda: require_ledger(self.path, reader))
        self._by_main(lambda: self.notes.extend(lost_records(self.path, done)))
        self.notes += [*average_notes(reader.state, self.config.ema_decay), f"resumed from {reader.path}"]
        return reader

    def _start_warm(self, data: DataFolder) -> InitialWeights:
        """Read the weights of `--init-from`."""
        settings = self.config.checkpoints
        assert settings.init_from is not None
        read = partial(read_initial_weights, settings.init_from, self.config.model)
        initial = distributed.on_all_ranks(lambda: read(data.tokenizer(), vocabulary=settings.init_vocabulary))
        require_agreement({"init_from_sha256": initial.sha256})
        self.described["init_from_sha256"] = initial.sha256
        note = f": {initial.note}" if initial.note else ""
        self.notes.append(f"starts with the weights of {settings.init_from}{note}")
        return initial

    def begin(self, tokenizer: Path, origin: CheckpointReader | InitialWeights | None) -> None:
        """Write the settings, and remove what is newer than the checkpoint or incomplete."""
        reader = origin if isinstance(origin, CheckpointReader) else None
        distributed.barrier()
        self._by_main(lambda: self._write(tokenizer, reader))

    def _write(self, tokenizer: Path, reader: CheckpointReader | None) -> None:
        self.fence()
        for folder in (self.path, self.path / SAMPLES):
            remove_unfinished(folder)
        # The initial weights may have been validated at step 0 before.
        last_step = reader.state["step"] if reader else -1
        # Before its temporary folder, which shows that a weight file is of an unfinished first save.
        remove_newer(self.path, last_step)
        remove_unfinished_saves(self.path)
        write_settings(self.path, self.described, tokenizer)
        for name in (METRICS_FILE, LEDGER_FILE):
            truncate_jsonl(self.path / name, last_step)
        if reader is not None:
            pointer = self.path / CHECKPOINTS / POINTER
            if not pointer.is_file() or pointer.read_bytes() != f"{reader.path.name}\n".encode():
                move_pointer(reader.path)

    def _by_main(self, action: Callable[[], object]) -> None:
        """Run an action on rank 0; all ranks raise its error."""
        what, remedy = f"cannot write in {self.path}", "fix the folder, or choose another --run-dir"
        errors = (UserError, OSError)
        distributed.by_main(action, errors=errors, describe=lambda error: failure(error, what, remedy))


def describe_run(config: TrainConfig, folders: Sequence[Path], ds_config: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `config.json`: the resolved settings, the identity of the data, and the threads per rank.

    Args:
        folders: the data folders on local disk.
    """
    return {
        **to_plain(config),
        "data_sha256": [sha256_of(folder / INDEX_FILE) for folder in folders],
        "init_from_sha256": None,
        "deepspeed": ds_config,
        "threads": None,
    }


def settings_of(described: dict[str, Any], file: Path) -> TrainConfig:
    """Return the settings in `config.json`, without the identity of the data.

    Args:
        file: the file that `described` was read from, for errors.
    """
    values = {name: value for name, value in described.items() if name not in RUN_IDENTITY}
    return from_plain(TrainConfig, values, str(file))


def shareable_settings(described: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `describe_run` by dotted name, without the identity of the data and without any path."""
    flat = omitted_defaults(TrainConfig) | flattened(described)
    return {
        name: value
        for name, value in flat.items()
        if name not in ("data", "run_dir", "data_sha256", "init_from_sha256") and "/" not in str(value)
    }


def run_identity(described: dict[str, Any]) -> str:
    """Return 16 hexadecimal digits that are equal for two runs whose settings would let one resume the other."""
    fixed = {name: value for name, value in flattened(described).items() if _is_fixed(name)}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()[:16]


def _is_fixed(name: str) -> bool:
    return name == _KIND or (name.split(".", maxsplit=1)[0] in _FIXED and name != _FREE)


def is_of_another_run(stated: Any, described: dict[str, Any]) -> bool:
    """Return whether a file that states this `run_identity` is of a run with other settings; old files state None."""
    return stated is not None and stated != run_identity(described)


def settings_before(run_dir: Path, checkpoint: Path) -> tuple[dict[str, Any], list[str]]:
    """Read the settings of the run's last start; if `config.json` is lost, take them from an intact checkpoint.

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


def is_in_fp32(run_dir: Path) -> bool:
    """Return whether the run's last start computed in fp32."""
    with suppress(UserError):
        return bool(read_json(run_dir / SETTINGS_FILE).get("precision") == "fp32")
    return False


def _as_before(now: Any, before: Any) -> Any:
    """Write settings that are equal to earlier ones as these were written."""
    return now | {name: value for name, value in before.items() if now.get(name) == value} if now != before else before


def check_settings(run_dir: Path, wanted: dict[str, Any], before: dict[str, Any]) -> list[str]:
    """Compare the settings with those of the run's last start.

    Args:
        before: the earlier settings, as `settings_before` gives them.

    Returns:
        one line per setting that changed and may change.

    Raises:
        UserError: a setting that must not change has changed; the error names it.
    """
    before, now = (omitted_defaults(TrainConfig) | flattened(values) for values in (before, wanted))
    changed = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if old == new:
            continue
        if name == "data_sha256":
            raise UserError(_other_data(run_dir, before["data"], now["data"]))
        if _is_fixed(name):
            raise UserError(
                f"{run_dir} was trained with {name} = {old!r}, not {new!r}: use the old value, or another --run-dir"
            )
        changed.append(f"{name}: {old!r} -> {new!r}")
    return changed


def require_same_measure(run_dir: Path, wanted: dict[str, Any], before: dict[str, Any], state: dict[str, Any]) -> None:
    """Refuse to rank validations by another measure than the ones that the checkpoint has ranked.

    Args:
        state: the state in the checkpoint.

    Raises:
        UserError: the measure, or the program that computes it, has changed; the error names the setting.
    """
    names = ("best_by", "validation_command") if before.get("best_by") == "command" else ("best_by",)
    changed = [name for name in names if before.get(name) != wanted.get(name)]
    if state["best"] and changed:
        old, new = before.get(changed[0]), wanted.get(changed[0])
        raise UserError(
            f"{run_dir} has ranked its validations with {changed[0]} = {old!r}, not {new!r}, and two measures "
            "cannot be compared: use the old value, or another --run-dir"
        )


def require_own_checkpoint(run_dir: Path, reader: CheckpointReader, described: dict[str, Any]) -> None:
    """Refuse a checkpoint that another run wrote.

    Args:
        described: the run's settings, as `describe_run` gives them, and the hash of its initial weights.

    Raises:
        UserError: the checkpoint is from another run; the error names it and what differs.
    """
    path, state = reader.path, reader.state
    remedy = "move it out of the folder, then the run resumes from its own checkpoint"
    if (config := reader.settings()) is not None:
        theirs, own = (omitted_defaults(TrainConfig) | flattened(values) for values in (config, described))
        names = sorted(name for name in theirs.keys() | own.keys() if _is_fixed(name) or name == "init_from_sha256")
        if differing := next((name for name in names if theirs.get(name) != own.get(name)), None):
            raise UserError(
                f"{path} is from another run than {run_dir} and was trained with {differing} = "
                f"{theirs.get(differing)!r}, not {own.get(differing)!r}: {remedy}"
            )
    elif is_of_another_run(state.get("run"), described):
        raise UserError(f"{path} is from another run than {run_dir}: {remedy}")


def require_ledger(run_dir: Path, reader: CheckpointReader) -> None:
    """Refuse to resume if the ledger does not lead to the checkpoint: the proof of the training data is lost.

    Raises:
        UserError: the ledger does not fit; the error names it and what is wrong.
    """
    file, step = run_dir / LEDGER_FILE, reader.state["step"]
    remedy = (
        f"restore {LEDGER_FILE} from a backup, move {reader.path} away to resume from an older checkpoint, or start a "
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
        raise UserError(f"{file} and {reader.path} are from two runs, their chains differ at step {step:,}: {remedy}")


def _other_data(run_dir: Path, old: list[str], new: list[str]) -> str:
    given = " ".join(new)
    if old == new:
        return (
            f"--data {given} has changed since {run_dir} was trained on it: restore the earlier data, or choose "
            "another --run-dir"
        )
    return (
        f"{run_dir} was trained on other data ({' '.join(old)}) than --data {given}: pass the same data, which may "
        "have moved, or choose another --run-dir"
    )


def average_notes(state: dict[str, Any], ema_decay: float) -> list[str]:
    """Report what happens to the moving average of the weights if the checkpoint's run handled it differently.

    Args:
        state: the state in the checkpoint.
    """
    kept = state.get("ema_decay", 0.0) > 0
    if ema_decay > 0 and not kept:
        return [f"the moving average of the weights starts with the weights of step {state['step']}"]
    if kept and ema_decay == 0:
        return ["the moving average of the weights is no longer kept; its files in weights/ stay"]
    return []


def write_settings(run_dir: Path, described: dict[str, Any], tokenizer: Path) -> None:
    make_folder(run_dir)
    write_file(run_dir / SETTINGS_FILE, json.dumps(described, indent=1) + "\n")
    write_file(run_dir / TOKENIZER_FILE, tokenizer.read_bytes())


def remove_newer(run_dir: Path, step: int) -> None:
    """Remove weight files and samples after `step`, because a run that resumes there computes them again."""
    for file in (*run_dir.glob("weights/step-*"), *run_dir.glob("weights/ema-*"), *run_dir.glob("samples/step-*")):
        if int(file.stem.rpartition("-")[2]) > step:
            remove(file)
