"""Translations of files that are killed, and whose parts, manifest and inputs are then damaged at random.

They run in this process, with a translation that is made up: a kill is an exception that no part of the code expects.
"""

import gzip
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.inference.files import corpus, parts
from dist_transformer.inference.files.corpus import CorpusJob, translate_corpus
from dist_transformer.inference.translation import ScoredText, Translation
from tests.faults.campaign import Case, campaign
from tests.support.damage import FAULTS, Fault, damage

_FOREIGN = b"mine\n"
_TRANSLATE = "translate"
# In the last three, all parts are there; in the last one, the output is complete.
_KILLED_IN = (_TRANSLATE, _TRANSLATE, _TRANSLATE, "_finish", "_completion", "_remove_parts")
_WORDS = ("a", "bird", "", "sings", "in", "trees", "§", "很", "good")


class KilledError(BaseException):
    """A kill, as far as the files see it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A killed translation, one of another job, and chance."""

    job: CorpusJob
    other: Path
    """Folder of parts of the same inputs with other settings."""
    generator: random.Random

    def part(self) -> Path:
        """Choose a part; if there is none, the place of the first."""
        parts = sorted(path for path in self.job.parts.glob("[0-9]*") if path.is_file())
        return self.generator.choice(parts or [self.job.parts / "000000"])


Harm = Callable[[Place], object]


def swap(place: Place) -> None:
    first, second = place.part(), place.part()
    for target, source in ((first, read(second)), (second, read(first))):
        damage(target, lambda *_, source=source: source, place.generator)


def edit_input(place: Place) -> None:
    """Change a character of an input; its size and its time stay."""
    path = place.job.inputs[1]
    before, content = path.stat(), bytearray(path.read_bytes())
    letters = [at for at, byte in enumerate(content) if chr(byte).isascii() and chr(byte).isalpha()]
    content[place.generator.choice(letters)] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def drop_line(content: bytes, generator: random.Random) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[generator.randrange(len(lines))]
    return b"".join(lines)


def some_lines(content: bytes, generator: random.Random) -> bytes:
    """Leave whole lines only, as a full disk may."""
    lines = content.splitlines(keepends=True)
    return b"".join(lines[: generator.randrange(len(lines) + 1)])


def mark_complete(place: Place) -> None:
    """Claim that an output is complete that something else has written."""
    (place.job.parts / "complete").write_bytes(b"")
    place.job.output.write_text("mine\n", encoding="utf-8")


def edit_output(place: Place) -> None:
    """Change an output that a killed command has completed."""
    if place.job.output.exists():
        damage(place.job.output, FAULTS["flipped"], place.generator)


def read(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def of_parts(name: str, fault: Fault) -> Harm:
    """Do harm to a part, or to a file of the folder of parts if it has a name."""
    return lambda place: damage(place.job.parts / name if name else place.part(), fault, place.generator)


def take(name: str) -> Harm:
    """Take a file from the other translation."""
    return lambda place: of_parts(name, lambda *_: (place.other / name).read_bytes())(place)


HARMS: Mapping[str, Mapping[str, Harm]] = {
    "parts": {
        **{name: of_parts("", fault) for name, fault in FAULTS.items()},
        "some lines": of_parts("", some_lines),
        "append": of_parts("", lambda content, _: content + b"one more\n"),
        "swap": swap,
        # To a place that has none yet.
        "copy": lambda place: of_parts("000003", lambda *_: read(place.part()))(place),
        "plain text": of_parts("", lambda _, generator: b"a translation by hand\n" * generator.randrange(5)),
    },
    "manifest": {
        **{name: of_parts("manifest.json", FAULTS[name]) for name in ("missing", "cut", "flipped")},
        "another's": take("manifest.json"),
    },
    "inputs": {
        "a character": edit_input,
        "a line less": lambda place: damage(place.job.inputs[1], drop_line, place.generator),
        "the time alone": lambda place: os.utime(place.job.inputs[1], (1, 1)),
    },
    "other commands": {
        "another's part": take("000000"),
        "marked as complete": mark_complete,
        "edited output": edit_output,
        "a claim of completion": of_parts("complete", lambda *_: b"mine\n"),
        "no lock": of_parts("lock", FAULTS["missing"]),
    },
}


def examine(folder: Path, kind: str, generator: random.Random) -> tuple[str, str]:
    """Do harm to one translation; return what is wrong then, and how the command ends."""
    job = make_job(folder, generator)
    other = replace(job, output=folder / "other", settings={"--beam": 5})
    place = Place(job=job, other=other.parts, generator=generator)
    names = [generator.choice(list(HARMS[kind])) for _ in range(generator.choice((1, 1, 2)))]
    harms = [HARMS[kind][name] for name in names]
    with quiet():
        translate_corpus(replace(job, output=folder / "undisturbed"), shout, as_text)
        kill(other, "_finish", generator)
        victims = contents(other.parts)
        translate = shout
        if generator.random() < 0.3:
            translate = harming(place, harms, at=job.chunk_lines * generator.randrange(1, 3))
        else:
            kill(job, generator.choice(_KILLED_IN), generator)
            for harm in harms:
                harm(place)
        before = contents(job.output.parent).get(job.output.name)
        error = end_of(job, translate)
    expected = (folder / "undisturbed").read_bytes()
    wrong = judge(error, contents(job.output.parent).get(job.output.name), before, expected)
    if contents(other.parts) != victims:
        wrong = "a file of another translation was changed"
    return f"{' and '.join(names)}: {wrong}" if wrong else "", "completed" if error is None else "refused"


def judge(error: str | None, found: bytes | None, before: bytes | None, expected: bytes) -> str:
    """Return what must not be, or an empty text."""
    if error is None:
        return "" if found == expected else "the output differs from that of an undisturbed command"
    if "TRACEBACK" in error or len(error.splitlines()) != 1:
        return f"no sentence: {error}"
    # What another command has written stays.
    return "" if found in (None, before, _FOREIGN) else f"an output, although it was refused: {error}"


def make_job(folder: Path, generator: random.Random) -> CorpusJob:
    """Make two inputs, of which one is compressed, and a model that nobody loads."""
    for name in ("model", "out"):
        (folder / name).mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / "model" / name).write_text(name, encoding="utf-8")
    lines = [
        " ".join(["line", *generator.choices(_WORDS, k=generator.randrange(6))]) if generator.random() < 0.9 else ""
        for _ in range(generator.randrange(8, 20))
    ]
    inputs = [folder / "first.gz", folder / "second"]
    with gzip.open(inputs[0], "wt", encoding="utf-8") as file:
        file.write("\n".join(lines[:3]))
    inputs[1].write_text("\n".join(["line", *lines[3:]]) + "\n", encoding="utf-8")
    return CorpusJob(
        models=[folder / "model"],
        inputs=inputs,
        output=folder / "out" / "all",
        chunk_lines=generator.choice((1, 2, 3)),
        settings={"--beam": 4},
    )


def shout(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
    return [Translation(hypotheses=(ScoredText(text=line.upper(), score=0.0, tokens=()),)) for line, *_ in rows]


def as_text(number: int, translation: Translation) -> str:
    return f"{translation.text}\n"


def harming(place: Place, harms: Sequence[Harm], *, at: int) -> corpus.Translate:
    """Translate, and do harm when line `at` is translated."""

    def translate(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        if first == at:
            for harm in harms:
                harm(place)
        return shout(rows, first)

    return translate


def kill(job: CorpusJob, function: str, generator: random.Random) -> None:
    """Start a translation that is killed where the driver calls a function, or while it translates some chunk."""
    last = job.chunk_lines * generator.randrange(1, 3)

    def stop(*_: Any) -> Any:
        raise KilledError

    def translate(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        return stop() if function == _TRANSLATE and first == last else shout(rows, first)

    with ExitStack() as patched, suppress(KilledError):
        if function != _TRANSLATE:
            patched.enter_context(mock.patch.object(corpus, function, stop))
        translate_corpus(job, translate, as_text)


def end_of(job: CorpusJob, translate: corpus.Translate) -> str | None:
    """Translate to the end; return the error, or None."""
    try:
        translate_corpus(job, translate, as_text)
    except UserError as error:
        return str(error)
    except Exception as error:
        return f"TRACEBACK {type(error).__name__}: {error}"
    return None


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} if folder.exists() else {}


@contextmanager
def quiet() -> Iterator[None]:
    """Flush nothing, wait for nobody and print nothing."""
    with (
        mock.patch("os.fsync"),
        mock.patch.object(corpus, "PATIENCE_SECONDS", 0.0),
        mock.patch.object(corpus, "logger"),
    ):
        yield


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
