"""Preparations with tags: ids in front of the sources, and text as it was."""

import json
import shutil
from pathlib import Path

import numpy as np

from dist_transformer.data.folder.format import TokenLists
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.folder.subset import write_subset
from tests.data.prepare.preparing import command, corpus, run, train_text, with_validation
from tests.small_model import restate

TAGS = ("<bt>", "<2de>")


def sources_of(split: Split) -> list[list[int]]:
    values, lengths, *_ = split.tokens(np.arange(split.info.pairs))
    return [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])]


def test_rows_get_a_prefix() -> None:
    rows = TokenLists.from_lists([[9], [7, 8], [], [6]], np.uint16).slice(1, 4)
    longer = rows.prefixed([1, 2])
    assert longer.values.tolist() == [1, 2, 7, 8, 1, 2, 1, 2, 6]
    assert longer.offsets.tolist() == [0, 4, 6, 9]
    assert longer.values.dtype == np.uint16
    assert rows.prefixed([]) is rows


def test_tags_are_in_front_of_every_source_and_nowhere_else(tmp_path: Path) -> None:
    # Other pairs than those of the validation, which would be left out.
    pairs = [*corpus(34)[4:], ("<2de> spelled", "<bt> buchstabiert")]
    valid = with_validation(tmp_path, corpus(4))
    plain, _ = run(tmp_path, pairs, "plain", tags=TAGS, **valid)
    index, report = run(tmp_path, pairs, "tagged", tags=TAGS, source_tags=("<2de>", "<bt>"), **valid)
    assert "tags: <2de> <bt> in front of every en sentence" in report
    assert (plain.source_tags, index.source_tags) == ((), ("<2de>", "<bt>"))
    assert index.tokenizer_sha256 == plain.tokenizer_sha256
    # Tags are no sign of a language.
    assert index.marks == plain.marks
    assert min(*plain.marks.source, *plain.marks.target) >= 4 + len(TAGS)
    before, after = DataFolder.open(tmp_path / "plain"), DataFolder.open(tmp_path / "tagged")
    after.verify()
    for old, new in ((before.train, after.train), (before.valid, after.valid)):
        assert sources_of(new) == [[5, 4, *row] for row in sources_of(old)]
        assert min(min(row) for row in sources_of(old)) > 5
    assert index.train.target_tokens == plain.train.target_tokens
    assert index.train.source_tokens == plain.train.source_tokens + 2 * 31
    assert after.valid_text() == before.valid_text()
    assert sorted(train_text(after)) == sorted(pairs)
    # The small copies that --test-mode trains on say the same of themselves.
    write_subset(after, np.arange(5), tmp_path / "subset")
    subset = DataFolder.open(tmp_path / "subset")
    assert subset.index.source_tags == ("<2de>", "<bt>")
    assert sources_of(subset.train) == sources_of(after.train)[:5]
    assert "<" not in "".join(subset.valid_text()[0]).replace("<2de> spelled", "")


def test_an_index_without_tags_does_not_speak_of_them(tmp_path: Path) -> None:
    run(tmp_path, corpus(20))
    assert "source_tags" not in json.loads((tmp_path / "out/index.json").read_text())
    assert "tags" not in (tmp_path / "out/tokenizer.json").read_text()


def test_tags_count_for_the_length_and_not_for_the_ratio(tmp_path: Path) -> None:
    # With a vocabulary of the bytes and two tags alone, tokens are bytes.
    pairs = [
        ("a" * 13, "b" * 15),  # 16 tokens a side, tags and special token included: kept
        ("a" * 14, "b" * 15),  # 17: too long
        ("a" * 13, "b"),  # (13 + 5) / (1 + 5) = 3: kept, although 15 tokens come to the encoder
        ("a" * 14, "b"),  # too long and too unlike: said once
        ("b", "a" * 13),  # likewise the other way: the tags do not help
        ("b", "a" * 14),
        ("", "b"),
    ]
    valid = with_validation(tmp_path, [("c" * 13, "c"), ("c" * 14, "c")])
    settings = {"vocab_size": 262, "tags": TAGS, "source_tags": TAGS, "max_tokens": 16, **valid}
    index, _ = run(tmp_path, pairs, **settings)
    assert index.dropped == {"empty": 1, "too_long": 2, "length_ratio": 1, "in_validation": 0}
    assert index.valid_dropped["too_long"] == 1


def test_the_command_takes_tags_of_a_tokenizer(tmp_path: Path) -> None:
    run(tmp_path, corpus(20), tags=TAGS)
    text = ("--src", tmp_path / "train.de", "--tgt", tmp_path / "train.en")
    flags = ("--tokenizer", tmp_path / "out/tokenizer.json", "--src-tag", "<bt>", "<2de>", "--out", tmp_path / "more")
    result = command(*text, *flags)
    assert result.returncode == 0, result.stderr
    more = DataFolder.open(tmp_path / "more")
    assert more.index.source_tags == TAGS
    assert {tuple(row[:2]) for row in sources_of(more.train)} == {(4, 5)}
    result = command(*text, *flags[:2], "--src-tag", "<2fr>", "--out", tmp_path / "no")
    assert (result.returncode, result.stderr.count("\n"), (tmp_path / "no").exists()) == (1, 1, False)
    assert "has no tag <2fr>, its tags are <bt> <2de>" in result.stderr


def test_text_without_the_tags_of_its_model_or_data_is_named(model_folder: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(model_folder, tmp_path / "model"))
    restate(model, directions=[{"source_language": "en", "target_language": "deu", "tags": ["<2de>"]}])
    run(tmp_path, corpus(40), "tagged", tags=("<2de>",), source_tags=("<2de>",))
    for tokenizer in (model, tmp_path / "tagged/tokenizer.json"):
        place = tokenizer if tokenizer.is_dir() else tokenizer.parent
        files = ("--src", tmp_path / "train.en", "--tgt", tmp_path / "train.de", "--tokenizer", tokenizer)
        done = command(*files, "--out", tmp_path / f"of_{place.name}")
        assert done.returncode == 0, done.stderr
        (said,) = done.stderr.splitlines()
        assert said.startswith(f"warning: train.en + train.de (en-de) lacks the tags of {place} (en-de")
        assert said.endswith("prepare the text with --src-tag '<2de>', unless that is meant")
    done = command(*files, "--src-tag", "<2de>", "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
