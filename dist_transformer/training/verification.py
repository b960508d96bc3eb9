"""Is a run folder sound? Checkpoints, weights, pointer and ledger; and, from the data alone, what each step trained on.

Everything in the folder is taken as possibly damaged or hostile: links are never followed, names never trusted, and
what one check finds does not stop the others.
"""

import dataclasses
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from dist_transformer.config import TrainConfig, from_plain, read_json
from dist_transformer.data.plan import Step
from dist_transformer.data.shards import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.data.training_data import open_folders, open_training_data
from dist_transformer.errors import UserError
from dist_transformer.files import is_pickle, sha256_of
from dist_transformer.training.checkpoint import CheckpointReader, checkpoint_problem
from dist_transformer.training.ledger import batch_hash, read_ledger
from dist_transformer.training.stored_tensors import (
    checkpoint_shapes,
    differing_weight,
    parameter_shapes,
    tensors_problem,
)

SETTINGS_FILE, LEDGER_FILE, POINTER_FILE = "config.json", "ledger.jsonl", "latest"

# What config.json states besides the settings.
_NO_SETTINGS = ("data_sha256", "init_from_sha256", "deepspeed")
_STEP_NAME = re.compile(r"step-(\d{8,})")
_WEIGHTS_NAME = re.compile(r"(step|ema)-(\d{8,})\.safetensors")
# What damaged or hostile content makes readers raise, besides errors in words.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    what: str
    passed: bool
    detail: str
    """What was found, or what is wrong and the remedy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedStep:
    """What a step of a run must have trained on."""

    step: Step
    pair_hash: str
    """As in the ledger: 16 hexadecimal digits."""


def verify_run(run_dir: Path, data: Sequence[str] = (), on_step: Callable[[], object] = lambda: None) -> list[Check]:
    """Check everything that a run folder holds, and with `data` every step against the plan.

    Args:
        data: the data folders that the run was trained on, in its order.
        on_step: called after each step that is compared with the plan.

    Raises:
        UserError: `run_dir` is not a run folder.
    """
    if not os.path.lexists(run_dir / SETTINGS_FILE):
        raise UserError(f"{run_dir} is not a run folder (it has no {SETTINGS_FILE}): give the --run-dir of a training")
    verification = _Verification(run_dir)
    verification.check("settings", verification.settings)
    verification.check("files", verification.files)
    verification.check("ledger", verification.ledger)
    for path in verification.checkpoint_folders():
        verification.check(f"checkpoint {path.name}", partial(verification.checkpoint, path))
    verification.check("latest", verification.pointer)
    verification.check("weights", verification.weights)
    if data:
        verification.check("data", lambda: verification.data(data))
        verification.check("sentences", lambda: verification.sentences(on_step))
    return verification.checks


def planned_steps(config: TrainConfig) -> Iterator[PlannedStep]:
    """The endless steps of a run, from the data alone: no model, no rank, no interruption."""
    packs = config.batch.packs_per_step
    # The hash does not depend on how a step was cut into micro-batches, so the whole step is one.
    whole = dataclasses.replace(config.batch, packs_per_micro_batch=packs)
    data = open_training_data(dataclasses.replace(config, batch=whole))
    for step in data.plan.steps(data.plan.start(), packs):
        pair_hash = int(batch_hash(data.stream.build(step.packs)))
        yield PlannedStep(step=step, pair_hash=f"{pair_hash % 2**64:016x}")


class _Verification:
    """The checks in order, and what later ones need of earlier ones. A check returns its detail or raises."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.checks: list[Check] = []
        self._config: TrainConfig | None = None
        self._described: dict[str, Any] = {}
        self._entries: list[dict[str, Any]] | None = None
        self._with_data: TrainConfig | None = None
        self._whole: dict[int, CheckpointReader] = {}

    def check(self, what: str, action: Callable[[], str]) -> None:
        try:
            found = Check(what=what, passed=True, detail=action())
        except UserError as error:
            found = Check(what=what, passed=False, detail=str(error))
        except _UNREADABLE as error:
            detail = f"cannot be read ({type(error).__name__}: {error}): restore it from a backup"
            found = Check(what=what, passed=False, detail=detail)
        self.checks.append(found)

    def settings(self) -> str:
        self._described = read_json(_plain_file(self.run_dir / SETTINGS_FILE))
        values = {name: value for name, value in self._described.items() if name not in _NO_SETTINGS}
        self._config = from_plain(TrainConfig, values, str(self.run_dir / SETTINGS_FILE))
        model, batch = self._config.model, self._config.batch
        return f"{SETTINGS_FILE} is complete: width {model.width}, {batch.packs_per_step} packs a step"

    def files(self) -> str:
        count = 0
        for parent, folders, files in os.walk(self.run_dir):
            for name in (*folders, *files):
                _require_known(Path(parent) / name, self.run_dir)
            count += len(files)
        return f"{count:,} files: no link, no pickle, nothing temporary"

    def ledger(self) -> str:
        path = _plain_file(self.run_dir / LEDGER_FILE)
        entries = read_ledger(path)
        if not entries:
            raise UserError(f"{path} is empty: no step of this run is proven")
        self._entries = entries
        return f"unbroken from step 1 to {len(entries):,}, {_target_tokens(entries):,} target tokens"

    def checkpoint_folders(self) -> list[Path]:
        """Those that have a checkpoint's name; `files` reports what else there is."""
        folder = self.run_dir / "checkpoints"
        if folder.is_symlink() or not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name))

    def checkpoint(self, path: Path) -> str:
        if path.is_symlink() or not path.is_dir():
            raise UserError(f"{path} is not a folder of its own: put the real folder there")
        for file in path.iterdir():
            _plain_file(file)
        if problem := checkpoint_problem(path):
            raise UserError(f"{problem}: remove the folder, and training resumes from an older checkpoint")
        parts = sorted(path.glob("part-*.safetensors"))
        shapes = parameter_shapes(self._known_config().model)
        averaged = read_json(path / "state.json").get("ema_decay", 0) > 0
        if problem := tensors_problem(parts, checkpoint_shapes(shapes, averaged=averaged)):
            raise UserError(f"{problem}: remove {path}, and training resumes from an older checkpoint")
        reader = CheckpointReader(path)
        self._require_state(path, reader.state)
        self._whole[_step_of(path.name)] = reader
        size = sum(file.stat().st_size for file in path.iterdir())
        return f"{len(parts)} part(s), {size:,} bytes as the manifest states, tensors and state sound"

    def _require_state(self, path: Path, state: dict[str, Any]) -> None:
        """The state belongs to this run: its step, its model, its tokenizer, and the ledger up to there."""
        step, entries = _step_of(path.name), self._known_entries()
        if state["step"] != step:
            raise UserError(f"{path / 'state.json'} states step {state['step']!r}: the folder was renamed")
        if state["model"] != self._described["model"]:
            raise UserError(f"{path / 'state.json'} states another model than {SETTINGS_FILE}: it is of another run")
        tokenizer = _plain_file(self.run_dir / TOKENIZER_FILE)
        if state["tokenizer_sha256"] != sha256_of(tokenizer):
            raise UserError(f"{path / 'state.json'} states another tokenizer than {tokenizer}: copy that of the data")
        if step > len(entries):
            raise UserError(f"{path} is of step {step:,}, and the ledger ends at step {len(entries):,}: lines are lost")
        chain, tokens = entries[step - 1]["chain"], _target_tokens(entries[:step])
        if (state["ledger_chain"], state["target_tokens"]) != (chain, tokens):
            raise UserError(
                f"{path / 'state.json'} does not continue the ledger at step {step:,} "
                f"({state['target_tokens']!r} target tokens, the ledger has {tokens:,}): one of them is of another run"
            )

    def pointer(self) -> str:
        if not self.checkpoint_folders():
            raise UserError(f"{self.run_dir / 'checkpoints'} holds no checkpoint: nothing can be resumed")
        path = _plain_file(self.run_dir / "checkpoints" / POINTER_FILE)
        name = path.read_text(encoding="utf-8").removesuffix("\n")
        if not _STEP_NAME.fullmatch(name):
            raise UserError(f"{path} holds {name!r:.60}, not the name of a checkpoint such as step-00001000")
        if _step_of(name) not in self._whole:
            what = "is not whole (above)" if (path.parent / name).exists() else "does not exist"
            raise UserError(f"{path} names {name}, which {what}: resume the training, which moves it")
        return f"names {name}, which is whole"

    def weights(self) -> str:
        folder = self.run_dir / "weights"
        if folder.is_symlink() or not folder.is_dir():
            raise UserError(f"{folder} is missing or a link: nothing can be averaged")
        shapes = parameter_shapes(self._known_config().model)
        files = sorted(file for file in folder.iterdir() if _WEIGHTS_NAME.fullmatch(file.name))
        compared = 0
        for file in files:
            self._require_weights(file, shapes)
            compared += _step_of(file.stem) in self._whole
        return f"{len(files)} file(s): the model's parameters, all finite; {compared} equal to a checkpoint's"

    def _require_weights(self, file: Path, shapes: Any) -> None:
        remedy = "restore it from a backup, or remove it"
        if problem := tensors_problem([_plain_file(file)], shapes):
            raise UserError(f"{problem}: {remedy}")
        with safe_open(file, framework="pt") as stored:
            stated = (stored.metadata() or {}).get("step")
        step = _step_of(file.stem)
        if stated != str(step):
            raise UserError(f"{file} states step {stated!r}: {remedy}")
        part = "weight" if file.name.startswith("step") else "ema"
        if step in self._whole and (name := differing_weight(file, self._whole[step], part=part)):
            raise UserError(f"{file}: {name!r} is not what the checkpoint of the step holds: {remedy}")

    def data(self, places: Sequence[str]) -> str:
        config = dataclasses.replace(self._known_config(), data=tuple(places), data_weights=())
        folders = open_folders(config)
        self._with_data = dataclasses.replace(self._known_config(), data=tuple(places))
        for folder in folders:
            folder.verify()
        if [sha256_of(folder.path / INDEX_FILE) for folder in folders] != self._described.get("data_sha256"):
            raise UserError(f"{', '.join(places)} is not the data that the run was trained on: give its --data")
        corpora = " + ".join(folder.index.corpus for folder in folders)
        pairs = sum(folder.index.train.pairs for folder in folders)
        return f"{corpora}, {pairs:,} pairs: the run's, and every file has its hash"

    def sentences(self, on_step: Callable[[], object]) -> str:
        """Compare every step of the ledger with the plan."""
        entries = self._known_entries()
        if self._with_data is None:
            raise UserError("not compared, for the data folder cannot be read (above)")
        wrong, planned = [], None
        for entry, planned in zip(entries, planned_steps(self._with_data), strict=False):
            number, step = entry["step"], planned.step
            if (entry["hash"], entry["target_tokens"]) != (planned.pair_hash, step.target_tokens):
                wrong.append(number)
            elif number in self._whole and self._whole[number].state["position"] != step.position.to_json():
                raise UserError(f"the checkpoint of step {number:,} continues at another place of the plan")
            on_step()
        if wrong:
            raise UserError(
                f"{len(wrong):,} of {len(entries):,} steps, the first of them step {wrong[0]:,}, trained on other "
                "sentences than the plan of this data gives"
            )
        assert planned is not None
        epoch = planned.step.epoch + 1
        return f"all {len(entries):,} steps trained on the planned sentences; the last in epoch {epoch}"

    def _known_config(self) -> TrainConfig:
        if self._config is None:
            raise UserError(f"not checked, for {SETTINGS_FILE} cannot be read (above)")
        return self._config

    def _known_entries(self) -> list[dict[str, Any]]:
        if self._entries is None:
            raise UserError("not checked against the ledger, which cannot be read (above)")
        return self._entries


def _require_known(path: Path, run_dir: Path) -> None:
    """A plain file or folder that is no pickle, not temporary, and in checkpoints/ and weights/ of a run's own kind."""
    mode = path.lstat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError(f"{path} is a link or no plain file: put the real file there, or remove it")
    if path.name.endswith(".tmp"):
        raise UserError(f"{path} was left by a writer that was killed, or is being written now: remove it in the first")
    if stat.S_ISREG(mode) and is_pickle(path):
        raise UserError(f"{path} is a pickle, which runs code when it is loaded, and no file of a run: remove it")
    place = path.relative_to(run_dir).parts
    known = {"checkpoints": re.compile(rf"{POINTER_FILE}|{_STEP_NAME.pattern}"), "weights": _WEIGHTS_NAME}
    if len(place) == 2 and place[0] in known and not known[place[0]].fullmatch(place[1]):
        raise UserError(f"{path} is no file of a run: move it away")


def _plain_file(path: Path) -> Path:
    """The path itself, when it is a file and no link."""
    if not os.path.lexists(path):
        raise UserError(f"{path} is missing: restore it from a backup")
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(f"{path} is a link, a folder or no plain file: put the real file there")
    return path


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def _target_tokens(entries: list[dict[str, Any]]) -> int:
    return sum(entry["target_tokens"] for entry in entries)
