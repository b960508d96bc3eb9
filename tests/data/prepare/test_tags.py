"""Preparations with tags: ids in front of the sources, and text as it was."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.format import TokenLists
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.folder.split import Split
from dist_transformer.data.folder.subset import write_subset
from dist_transformer.data.vocabulary.m2m100 import MODEL_FILE, wrap_m2m100
from dist_transformer.data.vocabulary.sentence_piece import learn_sentence_piece
from tests.data.prepare.preparing import command, corpus, run, train_text, with_validation
from tests.small_model import restate

TAGS = ("<bt>", "<2de>")


def sources_of(split: Split) -> list[list[int]]:
    return sides_of(split)[0]


def sides_of(split: Split) -> list[list[list[int]]]:
    sides = split.tokens(np.arange(split.info.pairs))
    return [
        [row.tolist() for row in np.split(values, np.cumsum(lengths)[:-1])]
        for values, lengths in zip(sides[::2], sides[1::2], strict=True)
    ]


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
    assert "tags of every pair: <2de> <bt>" in report
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


def test_a_vocabulary_with_languages_puts_their_codes_in_front_of_both_sides(tmp_path: Path) -> None:
    pairs = corpus(30)
    model = learn_sentence_piece(
        (text for pair in pairs for text in pair),
        vocab_size=60,
        model_type="bpe",
        byte_fallback=False,
        character_coverage=1.0,
        normalization="nfkc",
    )
    entries = ["<s>", "<pad>", "</s>", "<unk>", *model.pieces[4:], "deu_Latn", "eng_Latn", "<mask>"]
    wrap_m2m100({MODEL_FILE: model.library_file}, entries).save(tmp_path / "tokenizer.json")
    languages = {"source_language": "eng_Latn", "target_language": "deu_Latn"}
    settings = {"tokenizer": tmp_path / "tokenizer.json", "vocab_size": None, "max_tokens": 40, **languages}
    index, report = run(tmp_path, pairs[4:], **settings, **with_validation(tmp_path, pairs[:4]))
    assert index.source_tags == ("eng_Latn", "deu_Latn")
    assert "tags of every pair: eng_Latn deu_Latn" in report
    data = DataFolder.open(tmp_path / "out")
    encode = model.encode_batch
    for split in (data.train, data.valid):
        sources, targets = sides_of(split)
        # deu_Latn is the first tag, and <mask> the last one; what follows has the ids of the model, and 3 more.
        assert {row[0] for row in sources} == {5}
        assert {row[0] for row in targets} == {4}
        texts = sorted([token - 3 for token in row[1:]] for row in sources)
        assert texts == sorted(encode([pair[0] for pair in (pairs[4:] if split is data.train else pairs[:4])]))
    # The code counts as a token, and so does the end.
    longest = max(len(row) for pair in pairs[4:] for row in encode(list(pair)))
    fits, _ = run(tmp_path, pairs[4:], "fits", **{**settings, "max_tokens": longest + 2})
    assert fits.dropped.get("too_long", 0) == 0
    with pytest.raises(UserError, match="too_long"):
        run(tmp_path, pairs[4:], "long", **{**settings, "max_tokens": longest + 1})
