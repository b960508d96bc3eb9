"""Preparation with pairs that are changed: which they are, and what becomes of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline
from dist_transformer.data.vocabulary.placeholders import decode_marked, marks
from tests.data.prepare.preparing import corpus, files_of, run, train_text, with_validation
from tests.data.prepare.test_segmentations import rows_of

PAIRS = corpus(200)
CHANGED: dict[str, Any] = {
    "augment": ("upper:0.3", "copy:0.3"),
    "placeholders": 4,
    "segmentations": 3,
    "segmented_side": "none",
    "pairs_per_shard": 50,
}


def variants_of(folder: Path, count: int) -> list[list[tuple[str, ...]]]:
    """Texts of all pairs, with marks, of each variant."""
    data = DataFolder.open(folder)
    pairs, tokenizer = data.train.info.pairs, data.tokenizer().source
    rows = [rows_of(data, np.arange(pairs) + pairs * number) for number in range(count)]
    return [[*zip(*([decode_marked(tokenizer, ids) for ids in side] for side in sides), strict=True)] for sides in rows]


def plain(text: str) -> str:
    for mark in marks(4):
        text = text.replace(mark, " ")
    return " ".join(text.split())


def test_shares_of_pairs_are_changed_otherwise_in_each_variant(tmp_path: Path) -> None:
    index, report = run(tmp_path, PAIRS, **CHANGED)
    variants = variants_of(tmp_path / "out", 3)
    assert len({tuple(rows) for rows in variants}) == 3
    count = len(variants[0])
    upper, copied = np.zeros(3, int), np.zeros(3, int)
    for pairs in zip(*variants, strict=True):
        known = {(plain(source).lower(), plain(target).lower()) for source, target in pairs}
        assert len(known) == 1
        for number, (source, target) in enumerate(pairs):
            assert source.isupper() == target.isupper()
            upper[number] += source.isupper()
            copied[number] += source != plain(source)
            assert sorted(set(source) & {*marks(4)}) == sorted(set(target) & {*marks(4)})
    # Three standard deviations of 0.3 are 0.1.
    assert (abs(upper / count - 0.3) < 0.1).all()
    assert (abs(copied / count - 0.3) < 0.1).all()
    assert index.changed == {"upper": upper.sum(), "copy": copied.sum(), "unchanged": 0}
    line = f"changed in 3 variants: {upper.sum()} upper, {copied.sum()} copy, 0 unchanged"
    assert sum(each.startswith(line) for each in report) == 1


@pytest.mark.parametrize("change", ["punctuation", "upper"])
def test_a_change_that_leaves_nothing_or_too_much_is_not_made(tmp_path: Path, change: str) -> None:
    pairs = [("!", "?"), ("Yes", "Ja."), *PAIRS, ("word " * 20, "Wort " * 20)]
    # A text in capitals has a token for each letter.
    valid = with_validation(tmp_path, PAIRS[:9])
    index, _ = run(tmp_path, pairs, augment=(f"{change}:1",), max_tokens=16, **valid)
    # "YES" and "JA." are capitals that fit.
    made = int(change == "upper")
    assert index.changed == {change: made, "unchanged": index.train.pairs - made}
    assert (index.dropped["too_long"], index.dropped["in_validation"]) == (1, 9)
    kept = {pairs[0], ("YES", "JA.") if made else pairs[1], *PAIRS[9:]}
    assert {*train_text(DataFolder.open(tmp_path / "out"))} == kept


def test_the_result_does_not_depend_on_chunks_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, PAIRS, "first", **CHANGED)
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 7)
    run(tmp_path, PAIRS, "second", workers=2, **CHANGED)
    assert files_of(tmp_path / "first") == files_of(tmp_path / "second")


def test_terms_are_behind_their_sources_in_pairs_that_have_both(tmp_path: Path) -> None:
    (tmp_path / "terms").write_text("dog\tHund\n")
    pairs = [("the dog", "der Hund"), ("a dog", "ein Tier"), *PAIRS[:20]]
    index, _ = run(tmp_path, pairs, augment=("terms:1",), terms=tmp_path / "terms", **with_validation(tmp_path, PAIRS))
    data = DataFolder.open(tmp_path / "out")
    tokenizer = data.tokenizer().source
    sources = [[*map(tokenizer.tag_of, ids)] for ids in rows_of(data, np.arange(data.train.info.pairs))[0]]
    marked = [[tag for tag in tags if tag] for tags in sources if any(tags)]
    assert (marked, index.changed) == ([["<term>", "<term-end>"]], {"terms": 1, "unchanged": len(sources) - 1})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"augment": ("terms:0.1",)}, "terms and its share belong together"),
        ({"terms": Path("none")}, "terms and its share belong together"),
        ({"augment": ("copy:0.1",)}, "augment copy needs placeholders, and the vocabulary to be learned has none: set"),
        ({"augment": ("upper:0.1",), "lowercase": True}, "augment upper has no effect, because the vocabulary to be"),
        ({"augment": ("loud:0.1",)}, "augment loud:0.1: it must be one of upper"),
        ({"segmentations": 2, "segmented_side": "none"}, "segmented_side none leaves nothing to draw"),
        ({"placeholders": 33}, "placeholders .* 0 to 32"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        run(tmp_path, PAIRS, **settings)


def test_changes_that_an_existing_vocabulary_does_not_show(tmp_path: Path) -> None:
    run(tmp_path, PAIRS, "plain", lowercase=True)
    known = {"vocab_size": None, "tokenizer": tmp_path / "plain"}
    with pytest.raises(UserError, match=r"augment copy needs placeholders, and .*tokenizer.json has none: leave out"):
        run(tmp_path, PAIRS, augment=("copy:0.1",), **known)
    (tmp_path / "terms").write_text("dog\tHund\n")
    with pytest.raises(UserError, match=r"terms needs tags around terms, and .*tokenizer.json has none: leave"):
        run(tmp_path, PAIRS, augment=("terms:0.1",), terms=tmp_path / "terms", **known)
    with pytest.raises(UserError, match=r"augment title has no effect, because .*tokenizer.json is in lower case"):
        run(tmp_path, PAIRS, augment=("title:0.1",), **known)
    with pytest.raises(UserError, match="placeholders is for a new vocabulary, but --tokenizer names an existing one"):
        run(tmp_path, PAIRS, placeholders=2, **known)


def test_placeholders_that_no_text_has(tmp_path: Path) -> None:
    _, report = run(tmp_path, PAIRS, placeholders=2)
    assert sum(line.startswith("warning: no pair has placeholders") for line in report) == 1
