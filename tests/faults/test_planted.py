"""Bugs that campaigns must find: each is known to be found, and can still be planted; none stays in this process."""

import inspect
import os
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.results_table import read_result
from dist_transformer.run.checkpoint import reader
from tests.conftest import ROOT, run_command
from tests.faults.__main__ import CAMPAIGNS
from tests.faults.planted import BUGS, IN_TESTS
from tests.faults.planting import Bug, planted

_EACH = 3


def test_every_campaign_has_three_bugs() -> None:
    of_campaigns = Counter(bug.campaign for bug in BUGS)
    assert of_campaigns.keys().isdisjoint(IN_TESTS)
    assert {*of_campaigns, *IN_TESTS} == {campaign.name for campaign in CAMPAIGNS}
    assert set(of_campaigns.values()) == {_EACH}
    for place in IN_TESTS.values():
        file, _, name = place.partition("::")
        test = getattr(import_module(file.removesuffix(".py").replace("/", ".")), name)
        (marks,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
        assert len(marks.args[1]) == _EACH, place


def test_every_bug_was_found_and_its_cases_pass_without_it() -> None:
    known = read_result(ROOT / "results" / "faults.json")["figures"]["campaigns"]
    for bug in BUGS:
        outcomes = {outcome["bug"]: outcome for outcome in known[bug.campaign]["planted"]["bugs"]}
        outcome = outcomes[bug.name]
        assert outcome["found"], bug.name
        assert outcome["without_the_bug"] == []
        assert (outcome["kind"], tuple(outcome["numbers"])) == (bug.kind, bug.numbers)
    recorded = [outcome for part in known.values() for outcome in part["planted"]["bugs"]]
    assert len(recorded) == len(BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_fits_the_code(bug: Bug) -> None:
    assert bug.kind in next(campaign.full for campaign in CAMPAIGNS if campaign.name == bug.campaign)
    for owner, name, replacement in bug.replacements():
        original = getattr(owner, name)
        assert replacement is not original
        taken = [*inspect.signature(bug.behave).parameters.values()][1:]
        if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in taken):
            continue
        accepted = inspect.Signature(taken)
        for parameter in inspect.signature(original).parameters.values():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            assert parameter.name in accepted.parameters or "options" in accepted.parameters


def test_a_bug_is_in_the_processes_that_are_started_and_then_gone(tmp_path: Path) -> None:
    bug = next(bug for bug in BUGS if bug.name == "the manifest's own hash is not compared")
    program = [
        sys.executable,
        "-c",
        "from dist_transformer.run.checkpoint import reader; print(reader.has_own_hash(b'', '0' * 64))",
    ]
    before = dict(os.environ)
    with planted(bug, tmp_path):
        assert reader.has_own_hash(b"", "0" * 64)
        assert run_command(*program).strip() == "True"
    assert not reader.has_own_hash(b"", "0" * 64)
    assert run_command(*program).strip() == "False"
    assert dict(os.environ) == before
