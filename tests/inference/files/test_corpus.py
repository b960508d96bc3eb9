"""The corpus driver on one rank, with a translation that is made up: what it keeps, continues and refuses."""

import gzip
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.base.locks import exclusive
from dist_transformer.base.sole_writer import unfenced
from dist_transformer.inference.files import corpus
from dist_transformer.inference.files.corpus import CorpusJob, translate_corpus
from dist_transformer.inference.files.parts import read_source
from dist_transformer.inference.translation import ScoredText, Translation

LINES = ["one", "two", "", "four", "five", "six", "seven"]


class StoppedError(Exception):
    """A kill, as far as the files see it."""


class Shouter:
    """Translates to capitals, and says which chunks it was given."""

    def __init__(self, *, stop_at: int | None = None, failure: Exception | None = None) -> None:
        self.firsts: list[int] = []
        self.stop_at, self.failure = stop_at, failure or StoppedError()

    def __call__(self, rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        if first == self.stop_at:
            raise self.failure
        self.firsts.append(first)
        texts = ["".join([*prefix, line.upper()]) for line, *prefix in rows]
        return [Translation(hypotheses=(ScoredText(text=text, score=0.0, tokens=()),)) for text in texts]


def as_text(number: int, translation: Translation) -> str:
    return f"{number} {translation.text}\n"


EXPECTED = "".join(f"{number} {line.upper()}\n" for number, line in enumerate(LINES))


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a process that is about to end."""
    monkeypatch.setattr(corpus, "PATIENCE_SECONDS", 0.0)


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
    return CorpusJob(
        models=[model], inputs=inputs, output=tmp_path / "out" / "all.txt", chunk_lines=2, settings=settings
    )


def test_prefixes_are_a_part_of_the_inputs(job: CorpusJob, tmp_path: Path) -> None:
    prefixes = [f"{number}-" if number % 3 else "" for number in range(len(LINES))]
    file = tmp_path / "prefixes"
    file.write_text("".join(f"{prefix}\n" for prefix in prefixes))
    job = replace(job, beside={"--prefix": file})
    with pytest.raises(StoppedError):
        translate_corpus(job, Shouter(stop_at=4), as_text)
    file.write_text(file.read_text().replace("1-", "9-"))
    with pytest.raises(UserError, match="was started with other inputs, or with these before they changed"):
        translate_corpus(job, Shouter(), as_text)
    file.write_text(file.read_text().replace("9-", "1-"))
    again = Shouter()
    translate_corpus(job, again, as_text)
    assert again.firsts == [4, 6]
    expected = [f"{i} {prefix}{line.upper()}\n" for i, (prefix, line) in enumerate(zip(prefixes, LINES, strict=True))]
    assert job.output.read_text() == "".join(expected)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (6, "^--prefix must have one line for each .* empty; .*prefixes ends after 6 lines, and the input has more$"),
        (8, "^--prefix must have one line for each .* empty; the input ends after 7 lines, and .*prefixes has more$"),
    ],
)
def test_prefixes_of_another_number_are_refused_before_anything_is_written(
    job: CorpusJob, tmp_path: Path, count: int, said: str
) -> None:
    file = tmp_path / "prefixes"
    file.write_text("a\n" * count)
    with pytest.raises(UserError, match=said):
        translate_corpus(replace(job, beside={"--prefix": file}), Shouter(), as_text)
    assert not job.parts.exists()


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
    seal, _, text = (job.parts / "000001").read_text().partition("\n")
    assert text == "2 \n3 FOUR\n"
    translation = hashlib.sha256((job.parts / "manifest.json").read_bytes()).hexdigest()
    source = hashlib.sha256(b"\nfour\n").hexdigest()
    assert seal == hashlib.sha256(f"{translation} 1 {source}\n{text}".encode()).hexdigest()
    # What a killed writer leaves.
    (job.parts / ".000002.abc.tmp").write_text("torn")
    (job.output.parent / ".all.txt.abc.tmp").write_text("torn")
    begin(job)
    assert [path.name for path in job.parts.glob(".*")] == []
    rest = Shouter()
    translate_corpus(job, rest, as_text)
    assert rest.firsts == [4, 6]
    assert job.output.read_text() == EXPECTED
    assert os.listdir(job.output.parent) == ["all.txt"]
    assert f"resumes {job.output}: 4 of 7 lines are done" in capsys.readouterr().err


def start_of(job: CorpusJob) -> corpus._Start:
    """Make the state after the first chunk."""
    source = read_source(corpus._lines(job), job.chunk_lines)
    return corpus._Start(folder=job.parts, source=source, translation="1", finished=frozenset({0}))


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
        f"{job.parts} was started {said}: use the same settings and files to resume it, or remove that folder to start "
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
    (job.models[0] / "model.safetensors").write_text("others")
    with pytest.raises(UserError, match="was started with another model: "):
        translate_corpus(job, Shouter(), as_text)
    (job.models[0] / "model.safetensors").write_text("model.safetensors")
    edit_unseen(job.inputs[1])
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
    with pytest.raises(UserError, match="would hold plain text: use a name without"):
        translate_corpus(replace(job, output=job.output.with_suffix(".gz")), Shouter(), as_text)


def test_a_kill_between_the_last_two_steps(job: CorpusJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object, **__: object) -> None:
        raise StoppedError

    with monkeypatch.context() as patched:
        patched.setattr(corpus, "remove_tree", stop)
        with pytest.raises(StoppedError):
            translate_corpus(job, Shouter(), as_text)
    # Another command, or another output, is not called complete.
    with pytest.raises(UserError, match="was started with --beam 4, not 5: "):
        translate_corpus(replace(job, settings={**job.settings, "--beam": 5}), Shouter(), as_text)
    job.output.write_text(EXPECTED.replace("ONE", "TWO"))
    with pytest.raises(UserError, match="exists already"):
        translate_corpus(job, Shouter(stop_at=0), as_text)
    job.output.write_text(EXPECTED)
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
    def shrink(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        job.inputs[1].write_text("")
        return Shouter()(rows, first)

    with pytest.raises(UserError, match="have changed while they were translated"):
        translate_corpus(job, shrink, as_text)


def test_a_rank_that_fails_stops_the_others(job: CorpusJob, monkeypatch: pytest.MonkeyPatch) -> None:
    for failure in (UserError("no memory"), TypeError("unexpected")):
        with pytest.raises(type(failure), match=str(failure)):
            translate_corpus(job, Shouter(stop_at=2, failure=failure), as_text)
        assert (job.parts / "failed").exists()
    other = Shouter()
    corpus._translate_share(job, start_of(job), other, as_text, unfenced)
    assert other.firsts == []
    # A new start tries again.
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_two_commands_and_folders_of_others(job: CorpusJob) -> None:
    begin(job)
    with (
        exclusive(job.parts / "lock"),
        pytest.raises(UserError, match=r"all\.txt is being written by .*: wait for its"),
    ):
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


def truncate(parts: Path) -> None:
    part = parts / "000001"
    part.write_bytes(part.read_bytes()[:-3])


def empty(parts: Path) -> None:
    (parts / "000001").write_bytes(b"")


def change_word(parts: Path) -> None:
    part = parts / "000001"
    part.write_bytes(part.read_bytes().replace(b"FOUR", b"FIVE"))


def swap(parts: Path) -> None:
    first, second = (parts / name for name in ("000000", "000001"))
    contents = first.read_bytes(), second.read_bytes()
    first.write_bytes(contents[1])
    second.write_bytes(contents[0])


@pytest.mark.parametrize("damage", [truncate, empty, change_word, swap])
def test_a_part_without_its_seal_is_translated_again(
    damage: Callable[[Path], None], job: CorpusJob, capsys: pytest.CaptureFixture[str]
) -> None:
    begin(job)
    damage(job.parts)
    rest = Shouter()
    translate_corpus(job, rest, as_text)
    assert job.output.read_text() == EXPECTED
    assert rest.firsts == ([0, 2, 4, 6] if damage is swap else [2, 4, 6])
    assert f"in {job.parts} are damaged and are translated again: 00000" in capsys.readouterr().err


def test_a_damaged_manifest_is_refused(job: CorpusJob) -> None:
    begin(job)
    manifest = job.parts / "manifest.json"
    content = manifest.read_bytes()
    for damaged in (b"", content[:-20], b"[1]", b'{"version": 3}', content.replace(b"inputs", b"input:")):
        manifest.write_bytes(damaged)
        with pytest.raises(
            UserError, match=r"manifest\.json is damaged, or of another version: remove .*to start again"
        ):
            translate_corpus(job, Shouter(), as_text)
    manifest.write_bytes(content)
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_an_input_that_was_only_touched_or_moved_is_the_same(job: CorpusJob, tmp_path: Path) -> None:
    begin(job)
    os.utime(job.inputs[0], (1, 1))
    moved = job.inputs[1].rename(tmp_path / "moved")
    translate_corpus(replace(job, inputs=[job.inputs[0], moved]), Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def edit_unseen(path: Path) -> None:
    """Edit a file so that its size and its time stay."""
    before = path.stat()
    path.write_text(path.read_text().replace("six", "SEX"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("at", [0, 2])
def test_an_edit_before_a_chunk_is_translated_gives_no_output(at: int, job: CorpusJob) -> None:
    shouter = Shouter()

    def edit(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        if first == at:
            edit_unseen(job.inputs[1])
        return shouter(rows, first)

    original = job.inputs[1].read_text()
    with pytest.raises(UserError, match=r"inputs of .*all\.txt have changed while they were translated: restore them"):
        translate_corpus(job, edit, as_text)
    assert not job.output.exists()
    job.inputs[1].write_text(original)
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_a_part_that_is_damaged_meanwhile_is_no_part_of_the_output(job: CorpusJob) -> None:
    def damage(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        if first == 6:
            change_word(job.parts)
        return Shouter()(rows, first)

    with pytest.raises(UserError, match=r"000001 was changed or removed by another program: rerun the same command"):
        translate_corpus(job, damage, as_text)
    assert not job.output.exists()
    translate_corpus(job, Shouter(), as_text)
    assert job.output.read_text() == EXPECTED


def test_a_translation_that_has_lost_its_folder_writes_nothing_more(job: CorpusJob) -> None:
    def lose(rows: Sequence[Sequence[str]], first: int) -> Sequence[Translation]:
        if first == 2:
            (job.parts / "lock").unlink()
        return Shouter()(rows, first)

    with pytest.raises(UserError, match=r"^lost the lock on .*, whose lock file was removed or replaced"):
        translate_corpus(job, lose, as_text)
    assert sorted(path.name for path in job.parts.iterdir()) == ["000000", "manifest.json"]
