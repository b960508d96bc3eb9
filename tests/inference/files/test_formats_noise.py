"""Noise against its probabilities."""

from collections import Counter

import pytest

from dist_transformer.inference.files import formats
from dist_transformer.inference.files.formats import BLANK, add_noise

WORDS = [f"w{i}" for i in range(20)]


def test_words_are_dropped_and_blanked_one_time_in_ten() -> None:
    lines = [add_noise(" ".join(WORDS), seed=1, line=line).split() for line in range(1000)]
    words = Counter(word for line in lines for word in line)
    # 20,000 words; six standard deviations are 255.
    assert sum(words.values()) == pytest.approx(18_000, abs=255)
    assert words.pop(BLANK) == pytest.approx(1_800, abs=255)
    assert set(words) == set(WORDS)
    # Each word alike: 1,000 times 0.9 · 0.9, within five standard deviations.
    assert [words[word] for word in WORDS] == pytest.approx([810] * 20, abs=62)


def test_no_word_moves_by_more_than_three_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_DROPPED", 0.0)
    monkeypatch.setattr(formats, "_BLANKED", 0.0)
    moves = Counter[int]()
    for line in range(1000):
        found = [WORDS.index(word) for word in add_noise(" ".join(WORDS), seed=1, line=line).split()]
        assert sorted(found) == list(range(20))
        moves.update(abs(place - word) for place, word in enumerate(found))
    assert set(moves) == {0, 1, 2, 3}
    assert moves[0] < 10_000 < sum(moves.values())


def test_the_same_line_has_the_same_noise() -> None:
    text = " ".join(WORDS)
    assert add_noise(text, seed=1, line=5) == add_noise(text, seed=1, line=5)
    assert len({add_noise(text, seed=seed, line=line) for seed in (1, 2) for line in (5, 6)}) == 4


def test_one_word_is_left() -> None:
    found = Counter(add_noise("one two", seed=1, line=line) for line in range(2000))
    assert min(len(text.split()) for text in found) == 1
    assert {"one", "two", "one two", "two one", BLANK} <= set(found)
    assert add_noise("", seed=1, line=0) == ""
    assert add_noise("  ", seed=1, line=0) == "  "
