"""Check a run folder: checkpoints, weights, pointer and ledger, and from the data alone what each step trained on.

Everything in the folder may be damaged: a failed check does not stop the others.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from dist_transformer.base.checks import Check
from dist_transformer.base.errors import UserError
from dist_transformer.base.files import is_pickle, sha256_of
from dist_transformer.base.locks import is_locked
from dist_transformer.base.sole_writer import LOCK_FILE
from dist_transformer.base.tensor_file import open_tensors, values_problem
from dist_transformer.config.plain import read_json
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.format import INDEX_FILE, TOKENIZER_FILE
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.loading.loader import open_folders
from dist_transformer.data.loading.mixture import position_from_json
from dist_transformer.data.loading.packing import LeftOut
from dist_transformer.model_folder import CONFIG_FILE, WEIGHTS_FILE, is_of_transformers, load_model
from dist_transformer.run.checkpoint.reader import CheckpointReader, checkpoint_problem, weight_hashes, weights_problem
from dist_transformer.run.folder import is_of_another_run, settings_of
from dist_transformer.run.layout import (
    CHECKPOINTS,
    FOLDERS,
    HANGS,
    LEDGER_FILE,
    POINTER,
    SETTINGS_FILE,
    WEIGHT_HASHES,
    WEIGHTS,
    checkpoints_of,
    step_of,
)
from dist_transformer.run.ledger import Proof, prove, read_ledger
from dist_transformer.run.replay import planned_steps

_SHOWN_PROBLEMS = 5
# Names that a run writes into these folders.
_NAMES = {
    CHECKPOINTS: re.compile(rf"{POINTER}|step-\d{{8,}}"),
    WEIGHTS: re.compile(rf"{WEIGHT_HASHES}|(step|ema)-\d{{8,}}\.safetensors"),
}


def verify_run(
    run_dir: Path,
    data: Sequence[str] = (),
    *,
    cache_dir: Path | None = None,
    on_step: Callable[[], object] = lambda: None,
) -> list[Check]:
    """Check everything that a run folder holds; with `data`, also compare every step with the plan.

    Args:
        data: the data folders that the run was trained on, in its order, or their URLs.
        cache_dir: cache for shards behind URLs; default: that of the run.
        on_step: called after each step that is compared with the plan.

    Raises:
        UserError: `run_dir` is not a run folder.
    """
    if not os.path.lexists(run_dir / SETTINGS_FILE):
        raise UserError(f"{run_dir} is not a run folder (it has no {SETTINGS_FILE}): use the --run-dir of a training")
    if os.path.lexists(run_dir / WEIGHTS_FILE):
        raise UserError(
            f"{run_dir} is not a run folder but a model folder (it has {WEIGHTS_FILE}): use the --run-dir of a training"
        )
    verification = _Verification(run_dir)
    if verification.in_progress:
        verification.checks.append(
            Check(name="run", found="in progress: only committed files are checked", state="warn")
        )
    verification.check("settings", verification.settings)
    verification.check("files", verification.files)
    verification.check("ledger", verification.ledger)
    for path in reversed(checkpoints_of(run_dir)):
        verification.check(f"checkpoint {path.name}", partial(verification.checkpoint, path))
        if verification.in_progress and not path.exists():
            # Pruned in the meantime.
            verification.checks.pop()
    verification.check("latest", verification.pointer)
    verification.check("weights", verification.weights)
    for path in _model_folders(run_dir):
        verification.check(f"{path.relative_to(run_dir)}/", partial(_check_model, path))
    if data:
        verification.check("data", lambda: verification.data(data, cache_dir))
        verification.check("sentences", lambda: verification.sentences(on_step))
    return verification.checks


class _Verification:
    """The checks in order, and what later checks need from earlier ones. A check returns its finding or raises."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.in_progress = is_locked(run_dir / LOCK_FILE) is True
        """Whether a training is writing files and pruning older ones at this time."""
        self.checks: list[Check] = []
        self._config: TrainConfig | None = None
        self._described: dict[str, Any] = {}
        self._proof: Proof | None = None
        self._with_data: TrainConfig | None = None
        self._folders: Sequence[DataFolder] = ()
        self._whole: dict[int, CheckpointReader] = {}

    def check(self, name: str, action: Callable[[], str]) -> None:
        try:
            check = Check(name=name, found=action())
        except UserError as error:
            check = Check(name=name, found=str(error), state="fail")
        except Exception as error:  # readers of damaged content raise errors of many types
            found = f"cannot be read ({type(error).__name__}: {error}): restore it from a backup"
            check = Check(name=name, found=found, state="fail")
        self.checks.append(check)

    def settings(self) -> str:
        self._described = read_json(self.run_dir / SETTINGS_FILE)
        self._config = settings_of(self._described, self.run_dir / SETTINGS_FILE)
        model, batch = self._config.model, self._config.batch
        return f"{SETTINGS_FILE} is complete: width {model.width}, {batch.packs_per_step} packs per step"

    def files(self) -> str:
        count, problems = 0, []
        for parent, folders, files in os.walk(self.run_dir, onerror=None if self.in_progress else _fail):
            if self.in_progress:
                # A checkpoint is written in such a folder.
                folders[:] = [name for name in folders if not name.endswith(".tmp")]
            for name in (*folders, *files):
                try:
                    self._require_known(Path(parent) / name)
                except UserError as error:
                    if not (self.in_progress and name.endswith(".tmp")):
                        problems.append(str(error))
                except FileNotFoundError:
                    if not self.in_progress:
                        raise
            count += len(files)
        if problems:
            more = len(problems) - _SHOWN_PROBLEMS
            raise UserError("; ".join([*problems[:_SHOWN_PROBLEMS], *([f"and {more} more"] if more > 0 else [])]))
        return f"{count:,} files: no pickles, no temporary files"

    def _require_known(self, path: Path) -> None:
        """Refuse pickles and temporary files, and in checkpoints/ and weights/ any name that a run does not write."""
        if path.name.endswith(".tmp"):
            raise UserError(f"{path} is being written now, or a killed process left it: remove it if no training runs")
        place = path.relative_to(self.run_dir).parts
        # NCCL's record of a hang is a pickle, which only torch's own tools read.
        if path.is_file() and place[0] != HANGS and is_pickle(path):
            raise UserError(f"{path} is a pickle, which can run code when it is loaded; a run writes none: remove it")
        if len(place) == 2 and place[0] in _NAMES and not _NAMES[place[0]].fullmatch(place[1]):
            raise UserError(f"{path} is not a file of a run: move it away")

    def ledger(self) -> str:
        path = self.run_dir / LEDGER_FILE
        if not path.exists():
            raise UserError(f"{path} is missing: restore it from a backup")
        proof = prove(path, {_step_of(folder.name) for folder in checkpoints_of(self.run_dir)}, self.in_progress)
        if not proof.steps:
            raise UserError(f"{path} is empty: no step of this run is proven")
        self._proof = proof
        shards = f", shards left out {len(proof.left_out):,} times" if proof.left_out else ""
        return f"unbroken from step 1 to {proof.steps:,}, {proof.target_tokens:,} target tokens{shards}"

    def checkpoint(self, path: Path) -> str:
        if problem := checkpoint_problem(path):
            raise UserError(f"{problem}: remove the folder, and training resumes from an older checkpoint")
        reader = CheckpointReader(path)
        self._require_state(path, reader.state)
        self._whole[_step_of(path.name)] = reader
        parts = len(list(path.glob("part-*.safetensors")))
        size = sum(file.stat().st_size for file in path.iterdir())
        return f"{parts} part(s), {size:,} bytes, hashes match the manifest"

    def _require_state(self, path: Path, state: dict[str, Any]) -> None:
        """Check that the state belongs to this run: its model and tokenizer, and the ledger up to its step."""
        step = _step_of(path.name)
        proof = self._known_proof(step)
        if is_of_another_run(state.get("run"), self._described):
            raise UserError(f"{path} is from another run than {SETTINGS_FILE}: move it out of the folder")
        if state["model"] != self._described["model"]:
            raise UserError(f"{path / 'state.json'} states another model than {SETTINGS_FILE}: it is from another run")
        tokenizer = self.run_dir / TOKENIZER_FILE
        if state["tokenizer_sha256"] != sha256_of(tokenizer):
            raise UserError(f"{path / 'state.json'} states another tokenizer than {tokenizer}: copy it from the data")
        if step not in proof.at:
            raise UserError(f"{path} is of step {step:,}, but the ledger ends at step {proof.steps:,}: lines are lost")
        chain, tokens = proof.at[step]
        if (state["ledger_chain"], state["target_tokens"]) != (chain, tokens):
            raise UserError(
                f"{path / 'state.json'} does not continue the ledger at step {step:,} "
                f"({state['target_tokens']!r} target tokens, the ledger has {tokens:,}): one is from another run"
            )
        if state["left_out"] != [record for record in proof.left_out if record["step"] <= step]:
            raise UserError(f"{path / 'state.json'} lists other left-out shards than the ledger: it was edited")

    def pointer(self) -> str:
        if not checkpoints_of(self.run_dir):
            raise UserError(f"{self.run_dir / 'checkpoints'} holds no checkpoint: nothing can be resumed")
        path = self.run_dir / CHECKPOINTS / POINTER
        name = path.read_bytes().decode().removesuffix("\n")
        if step_of(name) is None:
            raise UserError(f"{path} holds {name!r:.60}, not the name of a checkpoint such as step-00001000")
        if self.in_progress and _step_of(name) not in self._whole and (path.parent / name).is_dir():
            # Committed since the checkpoints were listed.
            self.checkpoint(path.parent / name)
        if _step_of(name) not in self._whole:
            what = "is not intact (see above)" if (path.parent / name).exists() else "does not exist"
            raise UserError(f"{path} names {name}, which {what}: resume the training, which moves it")
        return f"names {name}, which is intact"

    def weights(self) -> str:
        folder = self.run_dir / WEIGHTS
        if not folder.is_dir():
            raise UserError(f"{folder} is missing: nothing can be averaged")
        names = {file.name for file in folder.iterdir() if _NAMES[WEIGHTS].fullmatch(file.name)} - {WEIGHT_HASHES}
        files = [folder / name for name in sorted(names)]
        compared = 0
        for file in files:
            try:
                self._require_weights(file)
            except (UserError, OSError):
                if self.in_progress and not file.exists():
                    # Pruned in the meantime.
                    continue
                raise
            compared += _step_of(file.stem) in self._whole
        return f"{len(files)} file(s): hashes match {WEIGHT_HASHES}, all finite; {compared} equal to a checkpoint's"

    def _require_weights(self, file: Path) -> None:
        remedy = "restore it from a backup, or remove it"
        if problem := weights_problem(file) or values_problem(file):
            raise UserError(f"{problem}: {remedy}")
        with open_tensors(file) as stored:
            described = stored.metadata() or {}
        stated, run = (json.loads(described.get(name, "null")) for name in ("step", "run"))
        if stated != (step := _step_of(file.stem)):
            raise UserError(f"{file} states step {stated!r:.60}: {remedy}")
        if is_of_another_run(run, self._described):
            raise UserError(f"{file} is from another run than {SETTINGS_FILE}: move it out of the folder")
        if file.name not in weight_hashes(file.parent):
            raise UserError(f"{file} is not in {WEIGHT_HASHES}, so no save of this run wrote it: {remedy}")
        part = "weight" if file.name.startswith("step") else "ema"
        if (checkpoint := self._whole.get(step)) is not None:
            with open_tensors(file) as stored:
                for name in checkpoint.parameter_names():
                    if not stored.get_tensor(name).equal(checkpoint.tensor(part, name)):
                        raise UserError(f"{file} differs in {name!r} from the checkpoint of the same step: {remedy}")

    def data(self, places: Sequence[str], cache_dir: Path | None) -> str:
        known = self._known_config()
        if len(places) != len(known.corpora.data):
            raise UserError(
                f"the run was trained on {len(known.corpora.data)} data folder(s), not {len(places)}: pass its --data"
            )
        config = known.changed(data=tuple(places), cache_dir=cache_dir or known.corpora.cache_dir, on_bad_shard="skip")
        self._folders = open_folders(config.corpora)
        self._with_data = config
        if [sha256_of(folder.path / INDEX_FILE) for folder in self._folders] != self._described.get("data_sha256"):
            raise UserError(f"{', '.join(places)} is not the data that the run was trained on: pass its --data")
        for corpus, folder in enumerate(self._folders):
            # A left-out shard may be bad. If another epoch used it, `sentences` reads and verifies it.
            folder.verify(without={shard.shard for shard in self._left_out() if shard.corpus == corpus})
        corpora = " + ".join(folder.index.corpus for folder in self._folders)
        pairs = sum(folder.index.train.pairs for folder in self._folders)
        besides = " except shards that the run left out" if self._left_out() else ""
        return f"{corpora}, {pairs:,} pairs: the run's data; every file{besides} matches its hash"

    def sentences(self, on_step: Callable[[], object]) -> str:
        """Compare every step of the ledger with the plan."""
        proof = self._known_proof()
        if self._with_data is None:
            raise UserError("not compared: the data folder cannot be read (see above)")
        wrong, planned = [], None
        steps = planned_steps(self._with_data, self._left_out())
        for entry in itertools.islice(read_ledger(self.run_dir / LEDGER_FILE), proof.steps):
            number = entry["step"]
            try:
                planned = next(steps)
            except UserError as error:
                raise UserError(f"not compared from step {number:,} on: {error}") from None
            step = planned.step
            if (entry["hash"], entry["target_tokens"]) != (planned.pair_hash, step.target_tokens):
                wrong.append(number)
            elif number in self._whole:
                position = position_from_json(self._whole[number].state["position"])
                if position != step.position:
                    raise UserError(f"the checkpoint of step {number:,} continues at another position of the plan")
            on_step()
        if wrong:
            raise UserError(
                f"{len(wrong):,} of {proof.steps:,} steps, the first of them step {wrong[0]:,}, trained on other "
                "sentences than the plan of this data has"
            )
        assert planned is not None
        epoch = planned.step.epoch + 1
        return (
            f"all {proof.steps:,} steps trained on the planned sentences; the last in epoch {epoch}"
            f"{self._describe_left_out()}"
        )

    def _describe_left_out(self) -> str:
        """Describe the left-out shards by name, with their epochs."""
        epochs: dict[Path, list[int]] = {}
        for shard in self._left_out():
            split = self._folders[shard.corpus].train
            epochs.setdefault(split.folder / split.info.shards[shard.shard].file, []).append(shard.epoch + 1)
        shown = (f"{file} (epoch {', '.join(map(str, sorted({*numbers})))})" for file, numbers in epochs.items())
        return f"; left out: {', '.join(shown)}" if epochs else ""

    def _left_out(self) -> list[LeftOut]:
        return self._proof.shards if self._proof is not None else []

    def _known_config(self) -> TrainConfig:
        if self._config is None:
            raise UserError(f"not checked: {SETTINGS_FILE} cannot be read (see above)")
        return self._config

    def _known_proof(self, step: int | None = None) -> Proof:
        """Return what the ledger proves, at `step` too."""
        if self._proof is None:
            raise UserError("not checked against the ledger, which cannot be read (see above)")
        if self.in_progress and step is not None and step not in self._proof.at:
            # That checkpoint was committed since the ledger was read, and its lines were flushed before.
            self._proof = prove(self.run_dir / LEDGER_FILE, {step}, in_progress=True)
        return self._proof


def _model_folders(run_dir: Path) -> list[Path]:
    """List the models that were written into the run. Hidden folders are still being written, so they are left out."""
    found = []
    for parent, folders, files in os.walk(run_dir):
        path = Path(parent)
        own = FOLDERS if path == run_dir else ()
        folders[:] = sorted(name for name in folders if name not in own and not name.startswith("."))
        if path != run_dir and WEIGHTS_FILE in files and not is_of_transformers(path):
            found.append(path)
    return found


def _check_model(path: Path) -> str:
    """Load a model folder, which checks its hashes and weights; return a description."""
    # Every command that uses the model loads it this way.
    model, _, info = load_model(path, torch.device("cpu"))
    parameters = sum(parameter.numel() for parameter in model.state_dict().values())
    steps = f"step{'s' * (len(info.steps) > 1)} {', '.join(f'{step:,}' for step in info.steps)}"
    return f"model of {steps}: {parameters:,} parameters, all finite, hashes match {CONFIG_FILE}"


def _fail(error: OSError) -> None:
    raise error


def _step_of(name: str) -> int:
    return int(name.rpartition("-")[2])
