"""Translations that are harmed in each way, and bugs that must be found."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dist_transformer.inference.files import corpus, parts
from tests.faults.campaign import Case, campaign
from tests.faults.translation_parts import HARMS, examine

_AT_ONCE = 20


def harm(generator: random.Random, kind: str, folder: Path, count: int) -> tuple[list[str], set[str]]:
    """Return what is wrong, and the ways in which commands end."""
    found = [examine(folder / str(number), kind, generator) for number in range(count)]
    return [problem for problem, _ in found if problem], {outcome for _, outcome in found}


@campaign(dict.fromkeys(HARMS, 200), each=_AT_ONCE)
def test_translation_parts(case: Case, tmp_path: Path) -> None:
    """The output is that of an undisturbed command, or there is none, and one sentence."""
    problems, outcomes = harm(case.generator(), case.kind, tmp_path, _AT_ONCE)
    assert problems == []
    assert case.number or outcomes == {"completed", "refused"}


def trust_every_part(part: parts.Part, whole: BinaryIO | None = None) -> bool:
    if part.path.exists() and whole is not None:
        whole.write(part.path.read_bytes().partition(b"\n")[2])
    return part.path.exists()


def count_lines_only(lines: Iterable[str]) -> bytes:
    return b"\n" * sum(1 for _ in lines)


def believe_the_mark(job: corpus.CorpusJob, start: Any) -> bool:
    return (job.parts / "complete").exists() and job.output.exists()


@pytest.mark.parametrize(
    ("kind", "place", "bug"),
    [
        ("parts", (parts.Part, "copy"), trust_every_part),
        ("inputs", (parts, "_as_bytes"), count_lines_only),
        ("other commands", (corpus, "_is_complete"), believe_the_mark),
    ],
    ids=["seals are not compared", "the text of inputs is not compared", "a mark makes an output complete"],
)
def test_a_planted_bug_is_found(
    kind: str, place: tuple[Any, str], bug: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*place, bug)
    problems, _ = harm(random.Random(kind), kind, tmp_path, 30)
    assert any("the output differs from that of an undisturbed command" in problem for problem in problems)
