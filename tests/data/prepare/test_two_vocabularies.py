"""Preparation with a vocabulary for each language."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare.settings import PrepareSettings
from dist_transformer.data.prepare.vocabularies import normalizations
from dist_transformer.data.text.pairs import line_files
from dist_transformer.data.vocabulary.byte_bpe import learn_byte_bpe
from dist_transformer.data.vocabulary.kinds import load_vocabulary, wrap_pair
from dist_transformer.data.vocabulary.marian import wrap_marian
from dist_transformer.data.vocabulary.normalization import Normalization
from tests.data.prepare.preparing import corpus, run, with_validation, write_pairs
from tests.importing.marian_npz import learn, pieces_of, table_of

PAIRS = corpus(60)
TWO: dict[str, Any] = {"vocab_size": None, "source_vocab_size": 276, "target_vocab_size": 270}


def test_each_is_learned_from_its_own_language(tmp_path: Path) -> None:
    valid = with_validation(tmp_path, [("another here", "ein anderes da")])
    index, report = run(tmp_path, PAIRS, **TWO, **valid, tags=("<2de>",), source_tags=("<2de>",))
    data = DataFolder.open(tmp_path / "out")
    vocabulary = data.tokenizer()
    expected = [
        learn_byte_bpe([pair[side] for pair in PAIRS], vocab_size=size, tags=tags)
        for side, size, tags in ((0, 276, ("<2de>",)), (1, 270, ()))
    ]
    assert [vocabulary.source.pieces, vocabulary.target.pieces] == [side.pieces for side in expected]
    assert index.vocab_sizes == vocabulary.sizes == (276, 270)
    assert [line for line in report if line.startswith("vocabulary")] == [
        "vocabulary of en: 276 entries, byte-level BPE, clean text, NFKC, tags <2de>",
        "vocabulary of de: 270 entries, byte-level BPE, clean text, NFKC",
    ]
    ids = np.arange(data.train.info.pairs)
    source, source_lengths, target, target_lengths = data.train.tokens(ids)
    sides = [
        np.split(side, np.cumsum(lengths)[:-1])
        for side, lengths in ((source, source_lengths), (target, target_lengths))
    ]
    found = {(expected[0].decode(row), expected[1].decode(other)) for row, other in zip(*sides, strict=True)}
    assert found == {*PAIRS}
    assert all(row[0] == vocabulary.source.tag_ids(["<2de>"])[0] for row in sides[0])


def marian_tokenizer(folder: Path) -> Path:
    """Write a vocabulary of MarianMT with two tables."""
    models = [learn([pair[side] for pair in PAIRS]) for side in (0, 1)]
    entries = ([*table_of(pieces_of(model)), "<pad>"] for model in models)
    tables = [json.dumps({piece: i for i, piece in enumerate(each)}).encode() for each in entries]
    wrap_marian(source=models[0], target=models[1], table=tables[0], target_table=tables[1]).save(
        folder / "marian.json"
    )
    return folder / "marian.json"


@pytest.mark.parametrize("kind", ["learned", "marian"])
def test_marks_are_entries_of_the_sources(kind: str, tmp_path: Path) -> None:
    """Text on the wrong side is encoded with these."""
    given = TWO if kind == "learned" else {"vocab_size": None, "tokenizer": marian_tokenizer(tmp_path)}
    index, _ = run(tmp_path, PAIRS, **given)
    source = load_vocabulary(tmp_path / "out" / "tokenizer.json").source
    english, german = ([source.encode(pair[side]) for pair in PAIRS] for side in (0, 1))
    assert index.marks.side_of(english) == "source"
    # To pieces of English alone, most of the other text is unknown, which decides nothing.
    assert index.marks.side_of(german) == ("target" if kind == "learned" else None)
    assert not {*index.marks.target} - {token for row in german for token in row}


def test_one_may_exist_and_the_other_be_learned(tmp_path: Path) -> None:
    run(tmp_path, PAIRS, "first")
    joint = load_vocabulary(tmp_path / "first" / "tokenizer.json")
    mixed = {"vocab_size": None, "source_tokenizer": tmp_path / "first", "target_vocab_size": 270}
    index, report = run(tmp_path, PAIRS, "second", **mixed)
    second = load_vocabulary(tmp_path / "second" / "tokenizer.json")
    assert second.source.content == joint.content
    assert index.vocab_sizes == (joint.sizes[0], 270)
    assert any(line.startswith("vocabulary of en: ") for line in report)
    # Both sides of that pair.
    both = dict.fromkeys(("source_tokenizer", "target_tokenizer"), tmp_path / "second")
    run(tmp_path, PAIRS, "third", vocab_size=None, **both)
    assert load_vocabulary(tmp_path / "third" / "tokenizer.json").content == second.content


def test_each_side_of_a_given_pair_keeps_its_rule(tmp_path: Path) -> None:
    rules: tuple[Normalization, Normalization] = ("nfc", "clean")
    sides = (
        learn_byte_bpe([pair[side] for pair in PAIRS], vocab_size=270, normalization=rule)
        for side, rule in enumerate(rules)
    )
    wrap_pair(*sides).save(tmp_path / "pair.json")
    source, target = write_pairs(tmp_path, "train", PAIRS)
    sources = tuple(line_files([source], [target]))
    settings = PrepareSettings(out=tmp_path / "out", sources=sources, tokenizer=tmp_path / "pair.json")
    assert normalizations(settings) == rules
