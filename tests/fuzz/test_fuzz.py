"""Damaged files of every format are read or refused, a few cases each; `make faults` tries thousands."""

import os
import signal
from dataclasses import replace

import pytest

from dist_transformer.data.text import lines
from tests.fuzz import hunt as module
from tests.fuzz.formats import FORMATS, Format, Lab
from tests.fuzz.hunt import hunt

KINDS = {kind.name: kind for kind in FORMATS}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(tmp_path_factory.mktemp("fuzz") / "formats")


@pytest.mark.system
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.name)
def test_a_damaged_file_is_read_or_refused_in_one_line(kind: Format, lab: Lab) -> None:
    # A vocabulary from elsewhere starts a process for each case.
    assert hunt(kind, lab, cases=3 if kind.name.startswith(("Marian", "Sentence")) else 12) is None


@pytest.mark.system
@pytest.mark.parametrize("name", [".gz", ".xz", ".zst"])
def test_a_check_that_is_taken_away_is_missed(name: str, lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "DAMAGED", ())
    assert "rror: " in (hunt(KINDS[name], lab, cases=30) or "")


def spin(_: Lab) -> None:
    while True:
        pass


@pytest.mark.system
@pytest.mark.parametrize(
    ("read", "found"),
    [
        (lambda _: os.kill(os.getpid(), signal.SIGSEGV), "ended by SIGSEGV"),
        (spin, "ended by SIGPROF"),
        (lambda _: bytes(2 * module.MEMORY), "MemoryError"),
        (lambda _: None, "read although its hash is recorded"),
    ],
    ids=["crash", "loop", "memory", "no check"],
)
def test_a_hunt_finds_what_no_reader_may_do(
    read: object, found: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CPU_SECONDS", 4)
    parent, kind = os.getpid(), replace(KINDS["tokenizer.json"])
    in_child = replace(kind, read=lambda lab: read(lab) if os.getpid() != parent else None)  # type: ignore[operator]
    assert found in (hunt(in_child, lab, cases=5) or "")
