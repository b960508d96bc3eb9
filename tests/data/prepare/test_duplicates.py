"""Exact duplicates are counted or dropped, and validation pairs are not trained on."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_transformer.data.folder.format import DataIndex, TokenLists
from dist_transformer.data.folder.reader import DataFolder
from dist_transformer.data.prepare import pipeline, shuffle
from dist_transformer.data.prepare.shuffle import pair_keys
from tests.data.prepare.preparing import files_of, run, train_text, with_validation

# NFKC makes the full-width letters plain, so the third pair is the first again.
PAIRS = [("one", "eins"), ("two", "zwei"), ("ｏｎｅ", "eins"), ("two", "zwei"), ("two", "zwo"), ("two", "zwei")]
VALID = [("three", "drei"), ("two", "zwo")]


def prepare(folder: Path, name: str, pairs: list[tuple[str, str]], **settings: Any) -> tuple[DataIndex, list[str]]:
    return run(folder, pairs, name, **{"vocab_size": 280, **with_validation(folder, VALID), **settings})


def test_validation_pairs_are_left_out_and_repetitions_counted(tmp_path: Path) -> None:
    index, said = prepare(tmp_path, "data", PAIRS)
    assert index.dropped == {"empty": 0, "too_long": 0, "length_ratio": 0, "in_validation": 1}
    # one/eins twice, two/zwei three times: 1 + 2 repeat another pair.
    assert (index.overlap, index.repeats, index.train.pairs) == (1, 3, 5)
    assert "overlap: 1 training pairs are also validation pairs, left out of training" in said
    assert "duplicates: 3 of the kept pairs repeat another one exactly (60.0%): --drop-repeats drops them" in said


def test_the_overlap_is_kept_on_demand(tmp_path: Path) -> None:
    index, said = prepare(tmp_path, "data", PAIRS, keep_overlap=True)
    assert (index.overlap, index.train.pairs, index.dropped["in_validation"]) == (1, 6, 0)
    assert "overlap: 1 training pairs are also validation pairs, kept" in said


def test_pairs_that_are_held_out_are_not_trained_on_by_a_repetition(tmp_path: Path) -> None:
    pairs = [(f"{i} dogs", f"{i} Hunde") for i in range(40)] * 2
    index, _ = prepare(tmp_path, "data", pairs, validation=(), valid_pairs=5)
    held = DataFolder.open(tmp_path / "data").valid_text()
    counts = Counter(zip(*held, strict=True))
    # Held out twice or once: what is not held out of these is left out of training.
    expected = sum(2 - count for count in counts.values())
    assert index.overlap == index.dropped["in_validation"] == expected > 0
    assert index.train.pairs == 80 - 2 * len(counts)
    assert index.repeats == 40 - len(counts)


@pytest.mark.parametrize("at_once", [1, 7, 10_000])
def test_repetitions_are_counted_in_parts_of_any_size(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of any size give the same counts; numpy counts the different pairs."""
    monkeypatch.setattr(shuffle, "_KEYS_AT_ONCE", at_once)
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 13)
    generator = np.random.default_rng(3)
    pairs = [(f"{a} dogs", f"{b} Hunde") for a, b in generator.integers(8, size=(90, 2))]
    index, _ = prepare(tmp_path, "data", pairs)
    assert index.repeats == 90 - len(set(pairs)) > 10


def test_repetitions_are_dropped_on_demand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the text stays, with the change that --augment draws for its number, for chunks of any size."""
    generator = np.random.default_rng(3)
    drawn = [(f"{a} dogs. They bark.", f"{b} Hunde") for a, b in generator.integers(5, size=(90, 2))]
    pairs = [*drawn, ("two", "zwei"), ("ｔｗｏ", "zwei")]
    changes = {"drop_repeats": True, "augment": ("upper:0.5",), "tokenizer": tmp_path / "all"}
    counted, said = prepare(tmp_path, "all", pairs)
    assert (counted.repeats, counted.several_sentences) == (92 - len({*drawn}) - 1, 90)
    index, said = prepare(tmp_path, "one", pairs, vocab_size=None, **changes)
    assert (index.dropped["repeats"], index.repeats) == (counted.repeats, 0)
    assert (index.train.pairs, index.several_sentences) == (len({*drawn}) + 1, len({*drawn}))
    assert any(f"kept: {len({*drawn}) + 1} of 92 pairs; dropped " in line and "repeats" in line for line in said)
    trained = train_text(DataFolder.open(tmp_path / "one"))
    different = {*drawn, ("two", "zwei")}
    assert sorted((a.lower(), b.lower()) for a, b in trained) == sorted((a.lower(), b.lower()) for a, b in different)
    index, _ = prepare(tmp_path, "short", PAIRS, drop_repeats=True)
    assert (index.dropped["repeats"], index.train.pairs, index.several_sentences) == (3, 2, 0)
    monkeypatch.setattr(pipeline, "CHUNK_PAIRS", 13)
    prepare(tmp_path, "two", pairs, vocab_size=None, **changes)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_the_key_of_a_pair_tells_sides_places_and_ends_apart() -> None:
    def keys(*pairs: tuple[list[int], list[int]]) -> list[int]:
        sides = (TokenLists.from_lists(side, np.uint16) for side in zip(*pairs, strict=True))
        return pair_keys(*sides).tolist()

    alike = [([1, 2], [3]), ([2, 1], [3]), ([1], [2, 3]), ([3], [1, 2]), ([1, 2], [3, 3]), ([1, 2, 3], []), ([], [])]
    assert len(set(keys(*alike))) == len(alike)
    # The same, whatever stands before it, and in wider ids.
    assert keys(*alike)[3] == keys(alike[3])[0]
    wide = (TokenLists.from_lists([row], np.uint32) for row in alike[0])
    assert pair_keys(*wide).tolist() == keys(alike[0])


def test_keys_of_many_pairs_are_spread_evenly() -> None:
    """Chi-squared over 64 ranges: its mean is 63, its standard deviation 11."""
    rows = TokenLists.from_lists([[i % 300, i // 300] for i in range(60_000)], np.uint16)
    keys = pair_keys(rows, rows)
    assert len(np.unique(keys)) == 60_000
    counts = np.bincount((keys >> np.uint64(58)).astype(np.int64), minlength=64)
    assert ((counts - 937.5) ** 2 / 937.5).sum() < 63 + 5 * 11.2
