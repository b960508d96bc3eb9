"""Damaged files of every format are read or refused, a few cases each; `make faults` tries thousands."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base import tensor_file
from dist_transformer.base.errors import UserError
from dist_transformer.config import plain
from dist_transformer.data.vocabulary import byte_bpe
from dist_transformer.run import environment, ledger
from tests.fuzz import formats, harness, sizes
from tests.fuzz.formats import FORMATS, Format, Lab
from tests.fuzz.harness import READ, REFUSED, attempt
from tests.fuzz.hunt import hunt, sound_files

_CASES = 12
KINDS = {kind.name: kind for kind in FORMATS}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return sound_files(tmp_path_factory.mktemp("fuzz") / "formats")


@pytest.mark.system
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_damaged_files_are_read_or_refused_in_one_line(kind: Format, lab: Lab) -> None:
    result = hunt(kind, lab, cases=_CASES)
    assert result.found == {}
    assert result.cases >= _CASES // 2
    assert result.counts[REFUSED] > 0


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "place", "error"),
    [
        ("index.json", (formats.DataFolder.open.__func__.__globals__, "parse_json", json.loads), "RecursionError"),
        ("state.json", (vars(formats), "content_problem", lambda path: None), "Error"),
        ("tokenizer.json", (vars(byte_bpe), "check_byte_bpe_file", lambda *_: None), ""),
    ],
    ids=["deep JSON", "types of a state", "parts of a tokenizer"],
)
def test_a_check_that_is_taken_away_is_missed(
    name: str, place: tuple[dict[str, Any], str, Any], error: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(*place)
    result = hunt(KINDS[name], lab, cases=60 if KINDS[name].isolated else 200)
    assert result.failed > 0
    assert any(error in problem for problem in result.found), result.found


GROWN = {case.name: case for cases in sizes.KINDS.values() for case in cases}


@pytest.mark.system
@pytest.mark.parametrize("name", ["hole in index.json", "lists in index.json", "header in model.safetensors"])
def test_files_that_are_far_too_large_fill_no_memory(name: str, lab: Lab) -> None:
    """`make faults` tries all of `sizes.KINDS`."""
    assert sizes.outcome_of(GROWN[name], lab) in (READ, REFUSED)


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("hole in environment.json", (environment, "read_small", lambda path, most: path.read_bytes())),
        ("hole in ledger.jsonl", (ledger, "log_lines", lambda path, **_: path.read_text().splitlines())),
        ("header in step-00000004.safetensors", (tensor_file, "LARGEST_HEADER", 100_000_000)),
    ],
    ids=["a size", "lines of a log", "a header"],
)
def test_a_bound_that_is_taken_away_is_missed(
    name: str, place: tuple[Any, str, Any], lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place)
    assert sizes.outcome_of(GROWN[name], lab).startswith(("MemoryError", "ended by"))


def refuse() -> None:
    raise UserError("a\nb")


def spin() -> None:
    while True:
        pass


def hoard() -> None:
    kept = []
    # Zeroes that nobody reads take no time; one block may fit into what this process has freed before and keeps.
    while True:
        kept.append(bytes(harness.MEMORY))


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_case_has_one_of_few_outcomes(isolated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "CPU_SECONDS", 0.2)
    assert attempt(lambda: None, isolated=isolated) == READ
    assert attempt(refuse, isolated=isolated) == REFUSED
    assert attempt(lambda: {}["x"], isolated=isolated).startswith("KeyError: 'x'")
    began = time.monotonic()
    assert attempt(spin, isolated=isolated) == "ended by SIGPROF" if isolated else "takes more than 0.2 s"
    assert time.monotonic() - began < 10


def test_a_child_may_crash_or_take_too_much_memory() -> None:
    assert attempt(crash, isolated=True) == "ended by SIGSEGV"
    assert attempt(hoard, isolated=True).startswith("MemoryError")


def test_a_message_of_several_lines_is_no_good_refusal(tmp_path: Path) -> None:
    class LoudError(UserError):
        def __str__(self) -> str:
            return "a\nb"

    def shout() -> None:
        raise LoudError

    assert "not one line" in attempt(shout, isolated=False)
    assert plain.parse_json("{}") == {}
