"""Bugs planted in real trainings: the test of a campaign must fail of each, with what it says about it."""

import re
from collections.abc import Callable

import pytest

from tests.faults.campaign import Case, Lab, campaign, in_slice
from tests.faults.test_disks import test_disks as meet_disks
from tests.faults.test_kills import test_kills as meet_kills
from tests.faults.test_ranks import test_lost_ranks as meet_lost_ranks

_RESTORED = """
from dist_transformer.training import assembly
original = assembly._restore
def restore(engine, data, origin):
    progress = original(engine, data, origin)
    progress.position = data.plan.start()
    return progress
assembly._restore = restore
"""
_NO_WATCH = """
from dist_transformer.training.fault_tolerance.launcher_watch import LauncherWatch
LauncherWatch.gone = lambda self: None
"""
_LEFT = """
from dist_transformer.run import folder
folder.remove_unfinished_saves = writer.remove_unfinished_saves = lambda *_: None
"""
_SWALLOWED = """
write = writer._write_tensors
def written(*arguments):
    try:
        return write(*arguments)
    except OSError:
        return {"bytes": 0, "sha256": ""}
writer._write_tensors = written
"""
_TOLD_NOBODY = """
from dist_transformer.training.fault_tolerance.heartbeats import Heartbeats
Heartbeats.first_failure = lambda self, failure: failure
"""
_BUGS: dict[str, tuple[Callable[[Case, Lab], None], str, int, str, str]] = {
    "a rank that fails does not tell the others": (meet_lost_ranks, "raises", 1, "failed: ValueError", _TOLD_NOBODY),
    "an error of a write is swallowed": (meet_disks, "EIO (injected)", 5, "assert 0 not in", _SWALLOWED),
    "a resumed run starts the data from the beginning": (meet_kills, "zero0", 7, "other weights", _RESTORED),
    "ranks do not see that their launcher is gone": (meet_kills, "zero0", 7, "without a launcher", _NO_WATCH),
    "what a killed save left is not removed": (meet_kills, "zero0", 7, "temporary files were left", _LEFT),
}
"""The campaign's test, the kind and number of a case that meets the bug, what the test says, and the bug."""


@in_slice
@campaign(dict.fromkeys(_BUGS, 1), sample=tuple(_BUGS)[:2])
def test_planted(case: Case, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    meet, kind, number, said, bug = _BUGS[case.kind]
    name = meet.__name__.removeprefix("test_")
    if name == "kills":
        lab.undisturbed(f"kills {kind}")
    met = Case(campaign=name, kind=kind, number=number)
    monkeypatch.setenv("PLANTED", bug)
    with pytest.raises(AssertionError, match=re.escape(said)):
        meet(met, lab)
