"""Some translations that are harmed in each way; `make faults` does hundreds. And bugs that must be found."""

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from dist_transformer.inference.files import corpus, parts
from tests.faults.translation_parts import HARMS, examine


def harm(kind: str, folder: Path, count: int) -> tuple[list[str], set[str]]:
    """Return what is wrong, and the ways in which commands end."""
    generator = random.Random(kind)
    found = [examine(folder / str(number), kind, generator) for number in range(count)]
    return [problem for problem, _ in found if problem], {outcome for _, outcome in found}


@pytest.mark.parametrize("kind", HARMS)
def test_the_output_is_that_of_an_undisturbed_command_or_there_is_none(kind: str, tmp_path: Path) -> None:
    problems, outcomes = harm(kind, tmp_path, 30)
    assert problems == []
    assert outcomes == {"completed", "refused"}


def trust_every_part(part: parts.Part, whole: BinaryIO | None = None) -> int | None:
    if not part.path.exists():
        return None
    text = part.path.read_bytes().partition(b"\n")[2]
    if whole is not None:
        whole.write(text)
    return text.count(b"\n")


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
    problems, _ = harm(kind, tmp_path, 30)
    assert any("the output differs from that of an undisturbed command" in problem for problem in problems)
