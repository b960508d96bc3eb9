"""Translations of files that are killed, and whose parts, manifest and inputs are then damaged at random.

They run in this process, with a translation that is made up: a kill is an exception that no part of the code expects.
"""

import gzip
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from dist_transformer.base.errors import UserError
from dist_transformer.inference.files import corpus
from dist_transformer.inference.files.corpus import CorpusJob, translate_corpus
from dist_transformer.inference.translator import ScoredText, Translation

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

    def content_of(self, path: Path) -> bytearray:
        return bytearray(path.read_bytes() if path.is_file() else b"")


Harm = Callable[[Place], object]


def put(path: Path, content: bytes) -> None:
    """Write a file; a link is replaced, as by an editor."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def cut(place: Place) -> None:
    part = place.part()
    content = place.content_of(part)
    put(part, content[: place.generator.randrange(len(content) + 1)])


def cut_at_a_line(place: Place) -> None:
    """Leave whole lines only, as a full disk may."""
    part = place.part()
    lines = place.content_of(part).splitlines(keepends=True)
    put(part, b"".join(lines[: place.generator.randrange(len(lines) + 1)]))


def empty(place: Place) -> None:
    put(place.part(), b"")


def zeros(place: Place) -> None:
    part = place.part()
    put(part, bytes(len(place.content_of(part))))


def flip(place: Place) -> None:
    flip_bit(place.part(), place)


def flip_bit(path: Path, place: Place) -> None:
    content = place.content_of(path) or bytearray(1)
    content[place.generator.randrange(len(content))] ^= 1 << place.generator.randrange(8)
    put(path, content)


def append(place: Place) -> None:
    part = place.part()
    put(part, place.content_of(part) + b"one more\n")


def remove_part(place: Place) -> None:
    place.part().unlink(missing_ok=True)


def swap(place: Place) -> None:
    first, second = place.part(), place.part()
    contents = place.content_of(first), place.content_of(second)
    put(first, contents[1])
    put(second, contents[0])


def repeat(place: Place) -> None:
    """Copy a part to a place that has none yet."""
    put(place.job.parts / "000003", place.content_of(place.part()))


def take_part(place: Place) -> None:
    put(place.job.parts / "000000", (place.other / "000000").read_bytes())


def plain_text(place: Place) -> None:
    put(place.part(), b"a translation by hand\n" * place.generator.randrange(5))


def flip_manifest(place: Place) -> None:
    flip_bit(place.job.parts / "manifest.json", place)


def cut_manifest(place: Place) -> None:
    manifest = place.job.parts / "manifest.json"
    content = place.content_of(manifest)
    put(manifest, content[: place.generator.randrange(len(content) or 1)])


def take_manifest(place: Place) -> None:
    put(place.job.parts / "manifest.json", (place.other / "manifest.json").read_bytes())


def remove_manifest(place: Place) -> None:
    (place.job.parts / "manifest.json").unlink(missing_ok=True)


def edit_input(place: Place) -> None:
    """Change a character of an input; its size and its time stay."""
    path = place.job.inputs[1]
    before, content = path.stat(), bytearray(path.read_bytes())
    letters = [at for at, byte in enumerate(content) if chr(byte).isascii() and chr(byte).isalpha()]
    content[place.generator.choice(letters)] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def drop_line(place: Place) -> None:
    path = place.job.inputs[1]
    lines = path.read_bytes().splitlines(keepends=True)
    del lines[place.generator.randrange(len(lines))]
    path.write_bytes(b"".join(lines))


def touch_input(place: Place) -> None:
    """Change the time of an input alone."""
    os.utime(place.job.inputs[1], (1, 1))


def mark_complete(place: Place) -> None:
    """Claim that an output is complete that something else has written."""
    (place.job.parts / "complete").write_bytes(b"")
    place.job.output.write_text("mine\n", encoding="utf-8")


def edit_output(place: Place) -> None:
    """Change an output that a killed command has completed."""
    if place.job.output.exists():
        flip_bit(place.job.output, place)


def claim_completion(place: Place) -> None:
    """Leave the word that the output is complete."""
    (place.job.parts / "complete").write_text("mine\n", encoding="utf-8")


def remove_lock(place: Place) -> None:
    (place.job.parts / "lock").unlink(missing_ok=True)


HARMS: Mapping[str, tuple[Harm, ...]] = {
    "parts": (cut, cut_at_a_line, empty, zeros, flip, append, remove_part, swap, repeat, plain_text),
    "manifest": (flip_manifest, cut_manifest, take_manifest, remove_manifest),
    "inputs": (edit_input, drop_line, touch_input),
    "other commands": (take_part, mark_complete, edit_output, claim_completion, remove_lock),
}


def examine(folder: Path, kind: str, generator: random.Random) -> tuple[str, str]:
    """Do harm to one translation; return what is wrong then, and how the command ends."""
    job = make_job(folder, generator)
    other = replace(job, output=folder / "other", settings={"--beam": 5})
    place = Place(job=job, other=other.parts, generator=generator)
    harms = [generator.choice(HARMS[kind]) for _ in range(generator.choice((1, 1, 2)))]
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
    names = " and ".join(harm.__name__ for harm in harms)
    return f"{names}: {wrong}" if wrong else "", "completed" if error is None else "refused"


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


def shout(lines: list[str], first: int, prefixes: list[str] | None) -> Sequence[Translation]:
    return [Translation(hypotheses=(ScoredText(text=line.upper(), score=0.0, tokens=()),)) for line in lines]


def as_text(number: int, translation: Translation) -> str:
    return f"{translation.text}\n"


def harming(place: Place, harms: Sequence[Harm], *, at: int) -> Callable[[list[str], int], Sequence[Translation]]:
    """Translate, and do harm when line `at` is translated."""

    def translate(lines: list[str], first: int, prefixes: list[str] | None) -> Sequence[Translation]:
        if first == at:
            for harm in harms:
                harm(place)
        return shout(lines, first, prefixes)

    return translate


def kill(job: CorpusJob, function: str, generator: random.Random) -> None:
    """Start a translation that is killed where the driver calls a function, or while it translates some chunk."""
    last = job.chunk_lines * generator.randrange(1, 3)

    def stop(*_: Any) -> Any:
        raise KilledError

    def translate(lines: list[str], first: int, prefixes: list[str] | None) -> Sequence[Translation]:
        return stop() if function == _TRANSLATE and first == last else shout(lines, first, prefixes)

    with ExitStack() as patched, suppress(KilledError):
        if function != _TRANSLATE:
            patched.enter_context(mock.patch.object(corpus, function, stop))
        translate_corpus(job, translate, as_text)


def end_of(job: CorpusJob, translate: Callable[[list[str], int], Sequence[Translation]]) -> str | None:
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
