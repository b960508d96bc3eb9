"""A loss of power at any moment of a start, a resume, a save, an average, a report and a preparation of data.

Nothing is killed: what the code asks of the file system is recorded once, every state that a disk may then hold is
derived from the record (tests/support/disk_states.py), and what reads the folders must find in each a sound older or
newer state.
"""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_transformer.averaging.choice import choose_weights
from dist_transformer.base import files
from dist_transformer.base.errors import UserError
from dist_transformer.config.settings import TrainConfig
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import line_files
from dist_transformer.data.text.toy_corpus import make_toy_corpus
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.model.transformer import Transformer
from dist_transformer.model_folder import ModelInfo, load_model, write_model_folder
from dist_transformer.reporting.html.page import write_report
from dist_transformer.run.checkpoint import writer
from dist_transformer.run.checkpoint.reader import (
    CheckpointReader,
    checkpoint_problem,
    newest_checkpoint,
    weights_problem,
)
from dist_transformer.run.layout import read_records, scan_records, weight_files
from dist_transformer.run.ledger import read_ledger
from dist_transformer.run.verify import verify_run
from tests.faults.campaign import Case, campaign
from tests.run.small_run import SmallRun, small_config, train_and_save
from tests.support.disk_states import Recorder, State, no_flushes, recording, states_after
from tests.support.tiny import tiny_config


class Scenario:
    """A record, and what must hold in every state after it.

    Args:
        record: does what is recorded, in the folder `root`.
        problems: of a state that was written to `root`, given its promises, and whether to look more closely.
    """

    def __init__(
        self,
        root: Path,
        record: Callable[[Recorder], None],
        problems: Callable[[Path, tuple[Any, ...], bool], Iterator[str]],
    ) -> None:
        self.root, self._problems = root, problems
        root.mkdir(parents=True, exist_ok=True)
        with recording(root) as recorder:
            record(recorder)
        self.recorder = recorder

    def check(self, state: State, closely: bool) -> list[str]:
        shutil.rmtree(self.root)
        self.root.mkdir()
        state.write_to(self.root)
        promised = f"after operation {state.at}, promised {state.promises[-1:]}"
        try:
            # A flush would be all that takes time here.
            with no_flushes():
                return [f"{promised}: {problem}" for problem in self._problems(self.root, state.promises, closely)]
        except Exception as error:
            return [f"{promised}: {type(error).__name__}: {error}"]


def whole_run(folder: Path) -> Scenario:
    """Start, save, resume under another setting, save and prune, end without a save, resume, report."""
    config = small_config(folder)

    def record(recorder: Recorder) -> None:
        disk = folder / "disk"
        settings = config.changed(run_dir=disk / "runs" / "run")
        train_promised(settings, recorder, 2, 2)
        longer = settings.changed(max_steps=2000)
        train_promised(longer, recorder, 2, rest=1)
        train_promised(longer, recorder, 2)
        write_report(settings.run_dir)

    return Scenario(folder / "disk", record, run_problems(config))


def fallen_back(folder: Path) -> Scenario:
    """Resume past a damaged checkpoint, and save its step again."""
    config = small_config(folder)
    disk = folder / "disk"
    settings = config.changed(run_dir=disk / "runs" / "run")
    train_and_save(settings, 2, 2)
    (settings.run_dir / "checkpoints" / "step-00000004" / "state.json").write_text("{}")

    def record(recorder: Recorder) -> None:
        recorder.promise(("saved", 2))
        train_promised(settings, recorder, 2, 1)

    return Scenario(disk, record, run_problems(config, damaged=4))


def train_promised(config: TrainConfig, recorder: Recorder, *steps: int, rest: int = 0) -> None:
    """Train and save; what is saved is promised. Then train on, and end without a save."""
    with ExitStack() as held:
        training = SmallRun(config, held)
        for count in steps:
            training.train(count)
            training.save()
            recorder.promise(("saved", training.progress.step))
        training.train(rest)
        training.reporter.close()


def run_problems(config: TrainConfig, *, damaged: int = 0) -> Callable[[Path, tuple[Any, ...], bool], Iterator[str]]:
    """Check a run folder after a loss of power: before it is resumed, after it, and after a save."""

    def problems(root: Path, promises: tuple[Any, ...], closely: bool) -> Iterator[str]:
        run_dir = root / "runs" / "run"
        settings = config.changed(run_dir=run_dir, max_steps=3000)
        saved = max((step for _, step in promises), default=0)
        if run_dir.exists():
            yield from at_rest(run_dir, saved, damaged)
        with ExitStack() as held:
            training = SmallRun(settings, held)
            training.reporter.close()
        resumed_at = training.resumed_at or 0
        if resumed_at < saved:
            yield f"resumed at step {resumed_at}, and step {saved} was promised"
        unexpected = [note for note in training.notes if not note.startswith(("resumed from", "setting changed"))]
        if not saved:
            unexpected = [note for note in unexpected if "none was saved" not in note]
        if damaged:
            unexpected = [n for n in unexpected if f"step-{damaged:08d}" not in n and "computed again" not in n]
        if unexpected:
            yield f"said: {unexpected}"
        yield from whole(run_dir, resumed_at, damaged)
        if closely:
            train_and_save(settings, 3)
            yield from whole(run_dir, resumed_at + 3, damaged)

    return problems


def at_rest(run_dir: Path, saved: int, damaged: int) -> Iterator[str]:
    """Read the folder before it is resumed: the content is complete, or the error is a sentence."""
    pointer = run_dir / "checkpoints" / "latest"
    if pointer.exists():
        named = pointer.with_name(pointer.read_text().strip())
        if named.name == pointer.name or (checkpoint_problem(named) and named.name != f"step-{damaged:08d}"):
            yield f"latest names {named.name}, which is not whole"
    elif saved:
        yield "latest is gone"
    for file in weight_files(run_dir).values():
        if problem := weights_problem(file):
            yield problem
    for step in (saved,) if saved else ():
        if step not in weight_files(run_dir):
            yield f"the weights of step {step} are gone"
    try:
        choose_weights(run_dir, last=1, every=None)
        choose_weights(run_dir, last=2, every=1.0)
    except UserError:
        pass
    for name in ("config.json", "environment.json"):
        if (run_dir / name).exists():
            json.loads((run_dir / name).read_text())
    if (run_dir / "metrics.jsonl").exists():
        read_records(run_dir, "train")
    if (page := run_dir / "report.html").exists() and not page.read_text().rstrip().endswith("</html>"):
        yield "report.html is not whole"


def whole(run_dir: Path, step: int, damaged: int) -> Iterator[str]:
    """Ledger, metrics and checkpoints agree."""
    if [entry["step"] for entry in read_ledger(run_dir / "ledger.jsonl")] != list(range(1, step + 1)):
        yield f"the ledger does not have the steps 1 to {step}"
    records, torn = scan_records(run_dir / "metrics.jsonl")
    if [record["step"] for record in records.get("train", [])] != list(range(1, step + 1)) or torn:
        yield f"metrics.jsonl does not have the steps 1 to {step}"
    newest = newest_checkpoint(run_dir, lambda _: None)
    if (CheckpointReader(newest).state["step"] if newest else 0) != step:
        yield f"the newest checkpoint is {newest}, not that of step {step}"
    for check in verify_run(run_dir) if step else ():
        if not check.passed and not (damaged and check.name == f"checkpoint step-{damaged:08d}"):
            yield f"{check.name}: {check.found}"


@cache
def _lines() -> tuple[list[str], list[str]]:
    pairs = make_toy_corpus(train_pairs=200, valid_pairs=10, test_pairs=10).train
    return [source for source, _ in pairs], [target for _, target in pairs]


def model_folders(folder: Path) -> Scenario:
    """A model folder is written, and replaced by another."""
    tokenizer = learn_byte_bpe([line for side in _lines() for line in side], vocab_size=300)
    file = folder / "tokenizer.json"
    tokenizer.save(file)
    config = tiny_config(width=8, ffn_width=8, vocab_size=tokenizer.vocab_size)

    def write(path: Path, steps: int) -> None:
        info = ModelInfo(
            model=config,
            tokenizer_sha256=tokenizer.sha256,
            source_language="en",
            target_language="de",
            corpus="toy grammar",
            synthetic=True,
            steps=(steps,),
        )
        weights = dict(Transformer(config).state_dict())
        write_model_folder(path, info=info, weights=weights, tokenizer_json=file.read_bytes())

    def record(recorder: Recorder) -> None:
        for steps in (1, 2):
            write(recorder.root / "model", steps)
            recorder.promise(steps)

    def problems(root: Path, promises: tuple[Any, ...], closely: bool) -> Iterator[str]:
        model = root / "model"
        if model.exists():
            _, _, info = load_model(model, torch.device("cpu"))
            if info.steps[0] < max(promises, default=0):
                yield f"the model of step {info.steps[0]} is there"
        elif promises and not list(root.glob(".model.*.old")):
            yield "the model is gone"
        if closely:
            write(model, 3)
            if load_model(model, torch.device("cpu"))[2].steps != (3,):
                yield "another model is there"
            if left := [path.name for path in root.iterdir() if path != model and path.name.endswith(".old")]:
                yield f"left: {left}"

    return Scenario(folder / "disk", record, problems)


def data_folders(folder: Path) -> Scenario:
    """A data folder is prepared from text files."""
    text = folder / "text"
    text.mkdir()
    for name, lines in zip(("a.en", "a.de"), _lines(), strict=True):
        (text / name).write_text("".join(f"{line}\n" for line in lines))
    sources = tuple(line_files([text / "a.en"], [text / "a.de"]))

    def make(path: Path) -> None:
        settings = PrepareSettings(out=path, sources=sources, vocab_size=300, valid_pairs=10, pairs_per_shard=100)
        prepare(settings, lambda _: None)

    def record(recorder: Recorder) -> None:
        make(recorder.root / "data")
        recorder.promise("data")

    def problems(root: Path, promises: tuple[Any, ...], closely: bool) -> Iterator[str]:
        data = root / "data"
        if data.exists():
            DataFolder.open(data).verify()
        elif promises:
            yield "the data is gone"
        elif closely:
            make(data)
            DataFolder.open(data).verify()

    return Scenario(folder / "disk", record, problems)


SCENARIOS: dict[str, Callable[[Path], Scenario]] = {
    "run": whole_run,
    "run that fell back": fallen_back,
    "model folder": model_folders,
    "data folder": data_folders,
}


_AT_ONCE = 50
# One state in this many is also trained on and saved.
_TRAINED_ON = 10


def problems_of(scenario: Scenario, kind: str, *, first: int = 0, count: int = _AT_ONCE) -> Iterator[str]:
    states = list(states_after(scenario.recorder, random.Random(kind), at_random=12))
    random.Random(kind).shuffle(states)
    for number, state in enumerate(states[first:][:count]):
        yield from scenario.check(state, number % _TRAINED_ON == 0)


@campaign({"run": 2000, "run that fell back": 500, "model folder": 50, "data folder": 300}, each=_AT_ONCE)
def test_power_loss(case: Case, tmp_path: Path) -> None:
    """Every reader finds a sound older or newer state: nothing that was promised is lost."""
    scenario = SCENARIOS[case.kind](tmp_path)
    assert list(problems_of(scenario, case.kind, first=case.number * _AT_ONCE)) == []


def no_flush_of_data(path: Path) -> None:
    if path.is_dir():
        sync(path)


def no_flush_of_names(path: Path) -> None:
    if not path.is_dir():
        sync(path)


def pointer_first(source: Path, target: Path) -> None:
    """The pointer moves before the checkpoint has its name."""
    if target.name.startswith("step-") and target.parent.name == "checkpoints":
        writer.move_pointer(target)
    move(source, target)


sync, move = files.sync, files.move


@pytest.mark.parametrize(
    ("name", "bug"), [("sync", no_flush_of_data), ("sync", no_flush_of_names), ("move", pointer_first)]
)
def test_a_planted_bug_is_found(
    name: str, bug: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, name, bug)
    monkeypatch.setattr(writer, name, bug)
    scenario = SCENARIOS["run"](tmp_path)
    monkeypatch.undo()
    assert next(problems_of(scenario, "run", count=1000), None) is not None


def test_what_may_be_on_a_disk_is_derived_from_the_record(tmp_path: Path) -> None:
    """A file is written beside another, and renamed without a flush: its name may come without its data."""
    (tmp_path / "file").write_text("old")
    with recording(tmp_path) as recorder:
        (tmp_path / "new").write_text("newer")
        (tmp_path / "new").rename(tmp_path / "file")
    trees = [state.tree for state in states_after(recorder, random.Random(1))]
    assert {tree.get("file") for tree in trees} == {b"old", b"newer", b"", bytes(5)}
    assert not any(tree.keys() >= {"file", "new"} and tree["file"] != b"old" for tree in trees)
