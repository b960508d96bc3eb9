"""The work folder: found again by the same preparation, discarded by another, and one at a time."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dist_transformer.base.errors import TransientError, UserError
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.work_dir import fingerprint, work_folder
from dist_transformer.data.text.pairs import LineFiles, TsvFile
from dist_transformer.data.text.tables import HubDataset


@pytest.fixture
def settings(tmp_path: Path) -> PrepareSettings:
    for name in ("t.en", "t.de", "tokenizer.json"):
        (tmp_path / name).write_text("text\n")
    source = LineFiles(source=tmp_path / "t.en", target=tmp_path / "t.de")
    return PrepareSettings(
        out=tmp_path / "out", sources=(source,), vocab_size=400, tokenizer=tmp_path / "tokenizer.json"
    )


def test_the_fingerprint_is_of_what_the_result_is_made_from(tmp_path: Path, settings: PrepareSettings) -> None:
    same = fingerprint(settings, 100)
    assert fingerprint(replace(settings, out=tmp_path / "elsewhere", workers=7), 100) == same
    (source,) = settings.sources
    tsv = TsvFile(path=tmp_path / "t.en")
    others = [
        fingerprint(settings, 101),
        fingerprint(replace(settings, seed=2), 100),
        fingerprint(replace(settings, vocab_sample_pairs=9), 100),
        fingerprint(replace(settings, tokenizer=None), 100),
        fingerprint(replace(settings, validation=(source,)), 100),
        fingerprint(replace(settings, sources=(source, source)), 100),
        fingerprint(replace(settings, sources=(tsv,)), 100),
        fingerprint(replace(settings, sources=(replace(tsv, target_column=2),)), 100),
    ]
    assert len({same, *others}) == 1 + len(others)


@pytest.mark.parametrize("name", ["t.en", "t.de", "tokenizer.json"])
def test_the_fingerprint_sees_a_file_change(tmp_path: Path, settings: PrepareSettings, name: str) -> None:
    path = tmp_path / name
    before, times = fingerprint(settings, 100), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    path.write_text("text, and more\n")
    os.utime(path, ns=times)
    larger = fingerprint(settings, 100)
    path.write_text("text\n")
    os.utime(path, ns=(times[0], times[1] + 1_000_000))
    later = fingerprint(settings, 100)
    os.utime(path, ns=times)
    assert fingerprint(settings, 100) == before
    assert len({before, larger, later}) == 3


def test_the_fingerprint_sees_the_files_of_a_dataset_folder(tmp_path: Path, settings: PrepareSettings) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    dataset = HubDataset(dataset=str(folder), source_language="en", target_language="de")
    changed = replace(settings, sources=(dataset,))
    before = fingerprint(changed, 100)
    (folder / "train.jsonl").write_text("{}\n")
    assert fingerprint(changed, 100) != before
    assert fingerprint(replace(settings, sources=(replace(dataset, streaming=True),)), 100) != before


def test_text_made_for_the_preparation_counts_by_its_content(tmp_path: Path, settings: PrepareSettings) -> None:
    found = []
    for folder, text in (("one", "text\n"), ("two", "text\n"), ("three", "other\n")):
        (tmp_path / folder).mkdir()
        for name in ("t.en", "t.de"):
            (tmp_path / folder / name).write_text(text)
        source = LineFiles(source=tmp_path / folder / "t.en", target=tmp_path / folder / "t.de")
        found.append(fingerprint(replace(settings, sources=(source,), keep_text=tmp_path / folder), 100))
    assert found[0] == found[1] != found[2]


@contextlib.contextmanager
def ended_by(error: BaseException) -> Iterator[None]:
    """The block must end in an error of this kind that says as much."""
    with pytest.raises(type(error)) as caught:
        yield
    assert str(error) in str(caught.value)


def test_results_are_kept_until_the_folder_is_whole(tmp_path: Path) -> None:
    out, lines = tmp_path / "new/out", list[str]()

    def interrupted(name: str) -> None:
        with ended_by(KeyboardInterrupt()), work_folder(out, name, lines.append) as work:
            assert work.result("a") is None
            work.keep_result("a", {"ü": [1, None]})
            raise KeyboardInterrupt

    interrupted("one")
    assert lines == []
    assert [path.name for path in (tmp_path / "new").iterdir()] == [".out.partial"]
    with ended_by(TransientError("out cannot be written (full)")), work_folder(out, "one", lines.append) as work:
        assert work.result("a") == {"ü": [1, None]}
        (work.folder / "results/b.json").write_bytes(b"")  # as a power cut leaves it
        assert work.result("b") is None
        raise OSError(28, "full")
    with ended_by(TransientError("a worker was killed")), work_folder(out, "one", print) as work:
        raise TransientError("a worker was killed")
    root = tmp_path / "new/.out.partial"
    assert work.result("a") == {"ü": [1, None]}
    assert lines == [f"resuming the interrupted preparation in {root}"]

    lines.clear()
    interrupted("two")
    assert lines == [f"discarded: an interrupted preparation in {root}, of other text or with other settings"]
    assert {path.name for path in root.iterdir()} == {"lock", "two"}

    with work_folder(out, "two", lines.append) as work:
        (work.data / "index.json").write_text("{}")
        work.data.rename(work.whole)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]
    assert [path.name for path in out.iterdir()] == ["index.json"]


def test_a_whole_folder_is_only_given_its_name(tmp_path: Path) -> None:
    with ended_by(KeyboardInterrupt()), work_folder(tmp_path / "out", "one", print) as work:
        (work.data / "index.json").write_text("{}")
        work.data.rename(work.whole)
        raise KeyboardInterrupt
    with work_folder(tmp_path / "out", "one", print) as work:
        assert (work.whole / "index.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_is_left_of_a_user_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="bad text"), work_folder(tmp_path / "new/er/out", "one", print):
        raise UserError("bad text")
    assert list(tmp_path.iterdir()) == []


def test_one_preparation_of_a_folder_at_a_time(tmp_path: Path) -> None:
    message = rf"out is being prepared by another command \(process {os.getpid()} on .*\): wait for its end"
    with work_folder(tmp_path / "out", "one", print) as work:
        with pytest.raises(UserError, match=message), work_folder(tmp_path / "out", "one", print):
            pytest.fail("two at once")
        # A refusal takes nothing from the one that runs.
        assert (work.folder / "results").is_dir()
        work.data.rename(work.whole)
