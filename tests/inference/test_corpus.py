"""The corpus driver on one rank, with a translation that is made up: what it keeps, continues and refuses."""

import gzip
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.locks import exclusive
from dist_transformer.inference import corpus
from dist_transformer.inference.corpus import CorpusJob, translate_corpus
from dist_transformer.inference.translator import ScoredText, Translation

LINES = ["one", "two", "", "four", "five", "six", "seven"]


class StoppedError(Exception):
    """A kill, as far as the files see it."""


class Shouter:
    """Translates to capitals, and says which chunks it was given."""

    def __init__(self, *, stop_at: int | None = None, failure: Exception | None = None) -> None:
        self.firsts: list[int] = []
        self.stop_at, self.failure = stop_at, failure or StoppedError()

    def __call__(self, lines: list[str], first: int) -> Sequence[Translation]:
        if first == self.stop_at:
            raise self.failure
        self.firsts.append(first)
        return [Translation(hypotheses=(ScoredText(text=line.upper(), score=0.0, tokens=()),)) for line in lines]


def as_text(number: int, translation: Translation) -> str:
    return f"{number} {translation.text}\n"


EXPECTED = "".join(f"{number} {line.upper()}\n" for number, line in enumerate(LINES))


@pytest.fixture
def job(tmp_path: Path) -> CorpusJob:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text(name)
    inputs = [tmp_path / "first.gz", tmp_path / "second"]
    with gzip.open(inputs[0], "wt") as file:
        # The last line has no end; the next file's first line is not glued to it.
        file.write("\n".join(LINES[:3]) + "\nfour")
    inputs[1].write_text("\n".join(LINES[4:]) + "\n")
    settings: dict[str, Any] = {"--beam": 4, "--nbest": None, "--noise": False}
    return CorpusJob(model=model, inputs=inputs, output=tmp_path / "out" / "all.txt", chunk_lines=2, settings=settings)


def test_files_are_read_one_after_the_other(job: CorpusJob, capsys: pytest.CaptureFixture[str]) -> None:
    shouter = Shouter()
    translate_corpus(job, shouter, as_text)
    assert job.output.read_text() == EXPECTED
    assert shouter.firsts == [0, 2, 4, 6]
    assert os.listdir(job.output.parent) == ["all.txt"]
    (said,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(re.escape(f"{job.output}: 7 lines, 7 of them in this start, ") + r"[\d,.]+ lines/s", said)


def test_an_input_without_lines(job: CorpusJob) -> None:
    for path in job.inputs[1:]:
        path.write_text("")
    translate_corpus(replace(job, inputs=job.inputs[1:]), Shouter(), as_text)
    assert job.output.read_text() == ""


def test_what_is_finished_is_kept(job: CorpusJob, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(StoppedError):
        translate_corpus(job, Shouter(stop_at=4), as_text)
    assert not job.output.exists()
    assert (job.parts / "000001").read_text() == EXPECTED[len("0 ONE\n1 TWO\n") :][: len("2 \n3 FOUR\n")]
    # What a killed writer leaves.
    (job.parts / ".000002.abc.tmp").write_text("torn")
    begin(job)
    assert [path.name for path in job.parts.glob(".*")] == []
    rest = Shouter()
    translate_corpus(job, rest, as_text)
    assert rest.firsts == [4, 6]
    assert job.output.read_text() == EXPECTED
    assert os.listdir(job.output.parent) == ["all.txt"]
    assert f"resumes {job.output}: 4 of 7 lines are done" in capsys.readouterr().err


def test_each_rank_takes_its_share_of_what_is_left(job: CorpusJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoppedError):
        translate_corpus(job, Shouter(stop_at=2), as_text)
    monkeypatch.setattr(corpus, "world_size", lambda: 2)
    shares = []
    for number in (0, 1):
        monkeypatch.setattr(corpus, "rank", lambda number=number: number)
        start = corpus._Start(lines=7, sizes=(2, 2, 2, 1), finished=frozenset({0}))
        shares.append([chunk for chunk, _ in corpus._share(job, start)])
    assert shares == [[1, 3], [2]]


def begin(job: CorpusJob) -> None:
    with pytest.raises(StoppedError):
        translate_corpus(job, Shouter(stop_at=4), as_text)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"--beam": 5}, "with --beam 4, not 5"),
        ({"--nbest": 3}, "without --nbest"),
        ({"--beam": 1, "--noise": True}, "with --beam 4, not 1 and without --noise"),
    ],
)
def test_other_settings_are_refused(job: CorpusJob, settings: dict[str, Any], said: str) -> None:
    begin(job)
    with pytest.raises(UserError) as error:
        translate_corpus(replace(job, settings={**job.settings, **settings}), Shouter(), as_text)
    assert str(error.value) == (
        f"{job.parts} was started {said}: give what it was started with to resume it, or remove that folder to start "
        "again"
    )
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_other_inputs_models_and_chunks_are_refused(job: CorpusJob) -> None:
    begin(job)
    with pytest.raises(UserError, match=re.escape("was started with --chunk-lines 2, not 3: ")):
        translate_corpus(replace(job, chunk_lines=3), Shouter(), as_text)
    with pytest.raises(UserError, match="was started with other inputs, or with these before they changed: "):
        translate_corpus(replace(job, inputs=job.inputs[::-1]), Shouter(), as_text)
    (job.model / "model.safetensors").write_text("others")
    with pytest.raises(UserError, match="was started with another model: "):
        translate_corpus(job, Shouter(), as_text)
    (job.model / "model.safetensors").write_text("model.safetensors")
    job.inputs[1].write_text(job.inputs[1].read_text().replace("five", "FIVE"))
    with pytest.raises(UserError, match="was started with other inputs, or with these before they changed: "):
        translate_corpus(job, Shouter(), as_text)


def test_an_output_that_exists_stays(job: CorpusJob) -> None:
    job.output.parent.mkdir()
    job.output.write_text("mine")
    with pytest.raises(UserError, match="exists already: choose another --output, or remove it first"):
        translate_corpus(job, Shouter(), as_text)
    assert not job.parts.exists()
    job.output.unlink()
    begin(job)
    job.output.write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == "mine"
    with pytest.raises(UserError, match="would hold plain text: give a name without"):
        replace(job, output=job.output.with_suffix(".gz"))


def test_a_kill_between_the_last_two_steps(job: CorpusJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise StoppedError

    monkeypatch.setattr(corpus.shutil, "rmtree", stop)
    with pytest.raises(StoppedError):
        translate_corpus(job, Shouter(), as_text)
    monkeypatch.undo()
    assert job.parts.exists()
    translate_corpus(job, Shouter(stop_at=0), as_text)
    assert os.listdir(job.output.parent) == ["all.txt"]
    assert job.output.read_text() == EXPECTED


def test_inputs_that_are_unfit_are_refused_before_anything_is_made(job: CorpusJob, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path}/none does not exist"):
        translate_corpus(replace(job, inputs=[*job.inputs, tmp_path / "none"]), Shouter(), as_text)
    job.inputs[1].write_bytes(b"good\nbad \xff\n")
    with pytest.raises(UserError, match="second line 2 is not UTF-8"):
        translate_corpus(job, Shouter(), as_text)
    assert not job.output.parent.exists()


def test_an_input_that_shrinks_meanwhile_is_noticed(job: CorpusJob) -> None:
    def shrink(lines: list[str], first: int) -> Sequence[Translation]:
        job.inputs[1].write_text("")
        return Shouter()(lines, first)

    with pytest.raises(UserError, match="have changed meanwhile"):
        translate_corpus(job, shrink, as_text)


def test_a_rank_that_fails_stops_the_others(job: CorpusJob, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="no memory"):
        translate_corpus(job, Shouter(stop_at=2, failure=UserError("no memory")), as_text)
    assert (job.parts / "failed").exists()
    start = corpus._Start(lines=7, sizes=(2, 2, 2, 1), finished=frozenset({0}))
    other = Shouter()
    corpus._translate_share(job, start, other, as_text)
    assert other.firsts == []
    # A new start tries again.
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_two_commands_and_folders_of_others(job: CorpusJob) -> None:
    begin(job)
    with exclusive(job.parts / "lock"), pytest.raises(UserError, match="is being written by another command"):
        translate_corpus(job, Shouter(), as_text)
    for path in job.parts.iterdir():
        path.unlink()
    (job.parts / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="holds files that are not of a translation"):
        translate_corpus(job, Shouter(), as_text)


def test_a_place_that_cannot_be_written(job: CorpusJob, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot be written .*the same command then resumes"):
        translate_corpus(replace(job, output=tmp_path / "file" / "out.txt"), Shouter(), as_text)
