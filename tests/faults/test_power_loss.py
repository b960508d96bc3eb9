"""Losses of power, and bugs that must be found."""

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dist_transformer.base import files
from dist_transformer.run.checkpoint import writer
from tests.faults.campaign import Case, campaign
from tests.faults.power_loss import SCENARIOS, Scenario
from tests.support.disk_states import recording, states_after

_AT_ONCE = 50
# One state in this many is also trained on and saved.
_TRAINED_ON = 10


def problems_of(scenario: Scenario, kind: str, *, first: int = 0, count: int = _AT_ONCE) -> Iterator[str]:
    states = list(states_after(scenario.trace, random.Random(kind), at_random=12))
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
