"""Losses of power: a share of the states that `make faults` looks at, and bugs that must be found."""

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_transformer.base import files
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.run.checkpoint import writer
from tests.conftest import ROOT, run_command
from tests.disk_states import recording, states_after
from tests.faults.power_loss import CAMPAIGN, SCENARIOS, Scenario

# States that are looked at here: a minute on a busy machine.
_SHARE = {"run": 100, "run that fell back": 40, "model folder": 40, "data folder": 40}


def problems_of(scenario: Scenario, count: int, *, seed: int = 1) -> Iterator[str]:
    states = list(states_after(scenario.trace, random.Random(seed)))
    random.Random(seed).shuffle(states)
    for number, state in enumerate(states[:count]):
        yield from scenario.check(state, number % 10 == 0)


@pytest.mark.parametrize("kind", SCENARIOS)
def test_every_state_of_the_disk_is_sound(kind: str, tmp_path: Path) -> None:
    assert list(problems_of(SCENARIOS[kind](tmp_path), _SHARE[kind])) == []


def test_there_are_as_many_states_as_are_planned(tmp_path: Path) -> None:
    for number, (kind, planned) in enumerate(CAMPAIGN.full.items()):
        (tmp_path / str(number)).mkdir()
        trace = SCENARIOS[kind](tmp_path / str(number)).trace
        assert sum(1 for _ in states_after(trace, random.Random(kind), at_random=12)) >= planned


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
    assert next(problems_of(scenario, 1000), None) is not None


def test_what_may_be_on_a_disk_is_derived_from_the_record(tmp_path: Path) -> None:
    """A file is written beside another, and renamed without a flush: its name may come without its data."""
    (tmp_path / "file").write_text("old")
    with recording(tmp_path) as recorder:
        (tmp_path / "new").write_text("newer")
        (tmp_path / "new").rename(tmp_path / "file")
    trees = [state.tree for state in states_after(recorder.trace, random.Random(1))]
    assert {tree.get("file") for tree in trees} == {b"old", b"newer", b"", bytes(5)}
    assert not any(tree.keys() >= {"file", "new"} and tree["file"] != b"old" for tree in trees)


def test_what_is_flushed_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with recording(tmp_path) as recorder:
        files.write_file(tmp_path / "file", "newer")
        recorder.promise("done")
        handle = os.open(tmp_path, os.O_RDONLY)
        (tmp_path / "other").write_text("x")
        os.close(handle)
    states = list(states_after(recorder.trace, random.Random(1)))
    assert {state.tree["file"] for state in states} == {b"old", b"newer"}
    assert {state.tree["file"] for state in states if state.promises} == {b"newer"}
    assert {state.tree.get("other") for state in states} == {None, b"", b"x", b"\0"}


@pytest.mark.slice(name="campaigns")
def test_states_are_resumed_for_real(toy_data: DataFolder, tmp_path: Path) -> None:
    """Trainings whose weights and ledger end as those of the run to which nothing happened."""
    worker = ROOT / "tests" / "distributed" / "worker_power_loss.py"
    output = run_command(sys.executable, worker, toy_data.path, tmp_path, 20)
    found = json.loads(output.splitlines()[-1])
    assert found["problems"] == []
    assert len(found["resumed"]) == 20
    assert len(set(found["resumed"])) >= 3, "states from which the training starts at step 0, and resumes at two steps"
