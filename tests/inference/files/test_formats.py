"""Lines of each format, and noise against its probabilities."""

from collections import Counter

import pytest

from dist_transformer.inference.files import formats
from dist_transformer.inference.files.formats import BLANK, Format, OutputFormat, add_noise
from dist_transformer.inference.translation import Alignment, ScoredText, Translation

EMPTY = Translation(hypotheses=(ScoredText(text="", score=0.0, tokens=()),))
TWO = Translation(
    hypotheses=(
        ScoredText(text='gut\tund "süß"', score=-0.12345678, tokens=(5,)),
        ScoredText(text="gut", score=-2.0, tokens=(6,)),
    )
)


@pytest.mark.parametrize(
    ("nbest", "two", "blank"),
    [
        (None, 'gut\tund "süß"\n', "\n"),
        ("moses", '7 ||| gut\tund "süß" ||| -0.123457\n7 ||| gut ||| -2.000000\n', "7 |||  ||| 0.000000\n"),
        ("tsv", '7\t0\t-0.123457\tgut und "süß"\n7\t1\t-2.000000\tgut\n', "7\t0\t0.000000\t\n"),
        (
            "jsonl",
            '{"line": 7, "translations": [{"text": "gut\\tund \\"süß\\"", "score": -0.123457}, '
            '{"text": "gut", "score": -2.0}]}\n',
            '{"line": 7, "translations": [{"text": "", "score": 0.0}]}\n',
        ),
    ],
)
def test_lines_of_each_format(nbest: str | None, two: str, blank: str) -> None:
    output = OutputFormat(nbest=nbest)
    assert output.text_of(7, TWO) == two
    assert output.text_of(7, EMPTY) == blank


@pytest.mark.parametrize(
    ("nbest", "expected"),
    [
        ("moses", "7 ||| a b ||| -1.000000 ||| 0-1 2-0\n7 ||| c ||| -2.000000 ||| \n"),
        ("tsv", "7\t0\t-1.000000\ta b\t0-1 2-0\n7\t1\t-2.000000\tc\t\n"),
        (
            "jsonl",
            '{"line": 7, "translations": [{"text": "a b", "score": -1.0, "alignment": "0-1 2-0"}, '
            '{"text": "c", "score": -2.0, "alignment": ""}]}\n',
        ),
    ],
)
def test_alignments_in_each_format(nbest: Format, expected: str) -> None:
    found = [
        ScoredText(text=text, score=score, tokens=(), alignment=Alignment((), words, True))
        for text, score, words in (("a b", -1.0, "0-1 2-0"), ("c", -2.0, ""))
    ]
    assert OutputFormat(nbest=nbest).text_of(7, Translation(hypotheses=tuple(found))) == expected


def test_noise_goes_by_seed_and_line() -> None:
    words = Translation(hypotheses=(ScoredText(text="a b c d e f g h", score=-1.0, tokens=()),))
    found = [OutputFormat(noise_seed=seed).text_of(line, words) for seed in (0, 1) for line in (0, 1)]
    assert found == [f"{add_noise('a b c d e f g h', seed=seed, line=line)}\n" for seed in (0, 1) for line in (0, 1)]
    assert OutputFormat(noise_seed=0).text_of(3, EMPTY) == "\n"


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


def test_one_word_is_left() -> None:
    found = Counter(add_noise("one two", seed=1, line=line) for line in range(2000))
    assert min(len(text.split()) for text in found) == 1
    assert {"one", "two", "one two", "two one", BLANK} <= set(found)
    assert add_noise("", seed=1, line=0) == ""
    assert add_noise("  ", seed=1, line=0) == "  "
