"""Preparations from end to end: what they depend on, where they write, how they end early."""

from pathlib import Path
from typing import Any

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import encode as encoding
from dist_transformer.data.prepare import pipeline as module
from dist_transformer.data.prepare.pipeline import prepare
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.text.pairs import line_files
from dist_transformer.data.vocabulary.tokenizer import UNK_ID
from tests.data.prepare.preparing import corpus, files_of, names, run


def test_result_depends_on_text_and_settings_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = corpus(300)
    run(tmp_path, pairs, "one", pairs_per_shard=64)
    monkeypatch.setattr(module, "CHUNK_PAIRS", 17)
    run(tmp_path, pairs, "two", pairs_per_shard=64)
    (tmp_path / "elsewhere").mkdir()
    run(tmp_path / "elsewhere", pairs, "three", pairs_per_shard=64)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(tmp_path / "elsewhere/three")
    run(tmp_path, pairs, "other-seed", pairs_per_shard=64, seed=2)
    assert files_of(tmp_path / "one")["lengths.npy"] != files_of(tmp_path / "other-seed")["lengths.npy"]
    assert files_of(tmp_path / "one")["valid/source.txt"] != files_of(tmp_path / "other-seed")["valid/source.txt"]


@pytest.mark.parametrize("existing", ["file", "full folder", "link"])
def test_existing_out_is_refused_and_kept(tmp_path: Path, existing: str) -> None:
    out = tmp_path / "out"
    if existing == "file":
        out.write_text("mine")
    elif existing == "link":
        out.symlink_to(tmp_path / "nowhere")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    before = names(tmp_path)
    with pytest.raises(UserError, match="out exists: choose another name, or remove it"):
        run(tmp_path, corpus(20))
    assert names(tmp_path) == before | {"train.en", "train.de"}


def test_empty_out_and_missing_parents_are_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run(tmp_path, corpus(20), "empty")
    run(tmp_path, corpus(20), "a/b/c")
    assert files_of(tmp_path / "empty") == files_of(tmp_path / "a/b/c")
    assert names(tmp_path / "empty") == {"index.json", "tokenizer.json", "lengths.npy", "train-00000.arrow", "valid"}


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), SystemExit(143), OSError(28, "No space left on device")])
def test_the_same_call_resumes_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def fail(*_: Any) -> None:
        raise failure

    index, _ = run(tmp_path, corpus(20), "straight")
    with monkeypatch.context() as broken:
        broken.setattr(module.shards, "write_index", fail)
        expected = UserError if isinstance(failure, OSError) else type(failure)
        with pytest.raises(expected, match="No space left .* resumes" if expected is UserError else None):
            run(tmp_path, corpus(20), "new/out")
    assert names(tmp_path / "new") == {".out.partial"}
    # Tokens are not made again: without the tokenizer no stage but the last could be done.
    monkeypatch.setattr(encoding, "words_of", lambda *_: pytest.fail("encoded again"))
    # The files keep their times: run would write them again.
    settings = {"sources": tuple(line_files([tmp_path / "train.en"], [tmp_path / "train.de"])), "vocab_size": 400}
    report: list[str] = []
    assert prepare(PrepareSettings(out=tmp_path / "new/out", **settings), report.append) == index
    assert report[0] == f"resuming the interrupted preparation in {tmp_path / 'new/.out.partial'}"
    assert files_of(tmp_path / "new/out") == files_of(tmp_path / "straight")
    assert names(tmp_path / "new") == {"out"}


def test_nothing_is_left_after_an_error_of_the_text(tmp_path: Path) -> None:
    pairs = [("a b c d e f", "x y z")] * 20
    with pytest.raises(UserError, match="no training pair is left"):
        run(tmp_path, pairs, "new/out", max_tokens=2)
    assert names(tmp_path) == {"train.en", "train.de"}


def test_bad_late_file_is_found_before_the_long_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_sources", lambda *_: pytest.fail("the text was read first"))
    validation = tuple(line_files([tmp_path / "missing.en"], [tmp_path / "missing.de"]))
    with pytest.raises(UserError, match=r"missing\.en does not exist"):
        run(tmp_path, corpus(20), validation=validation)


@pytest.mark.parametrize("kind", ["sentencepiece", "sentencepiece-bpe"])
def test_a_new_vocabulary_of_sentencepiece_loses_no_character(tmp_path: Path, kind: str) -> None:
    rare = "Où est l'œuvre 7 de K. Ä 京"
    pairs = [*[("the dog sees a cat and a bird", "der Hund sieht eine Katze und einen Vogel")] * 500, (rare, rare)]
    _, report = run(tmp_path, pairs, vocabulary=kind, vocab_size=310, valid_pairs=1)
    tokenizer = DataFolder.open(tmp_path / "out").tokenizer().source
    ids = tokenizer.encode(rare)
    assert UNK_ID not in ids
    assert tokenizer.decode(ids) == rare
    assert not [line for line in report if "<unk>" in line]
    _, report = run(tmp_path, pairs, "other", vocabulary=kind, vocab_size=45, valid_pairs=1, byte_fallback=False)
    assert any("became <unk>" in line for line in report)
