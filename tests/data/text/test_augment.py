"""Changes of training pairs, by hand."""

from collections import Counter
from random import Random

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.augment import MODIFIERS, Neighbours, parse_rates
from dist_transformer.data.vocabulary.placeholders import marks, split_at_marks

PAIR = ("Two dogs aren't here, he said.", "Zwei Hunde sind nicht hier, sagte er!")
TEXTS = """
a dog runs / ein Hund rennt
a cat runs / eine Katze rennt
a dog sleeps / ein Hund schläft
a cat sleeps / eine Katze schläft
the dog sees a cat / der Hund sieht die Katze
the cat sees a dog / die Katze sieht den Hund
dog / Hund
cat / Katze
"""
PAIRS = [(source, target) for source, _, target in (line.partition(" / ") for line in TEXTS.split("\n")) if source]


def test_capitals_and_punctuation_of_both_texts() -> None:
    changed = {name: MODIFIERS[name](*PAIR, Random(1)) for name in ("upper", "title", "punctuation")}
    assert changed == {
        "upper": ("TWO DOGS AREN'T HERE, HE SAID.", "ZWEI HUNDE SIND NICHT HIER, SAGTE ER!"),
        "title": ("Two Dogs Aren't Here, He Said.", "Zwei Hunde Sind Nicht Hier, Sagte Er!"),
        "punctuation": (PAIR[0][:-1], PAIR[1][:-1]),
    }
    assert MODIFIERS["punctuation"]("Yes.", "Ja", Random(1)) == ("Yes.", "Ja")
    assert MODIFIERS["punctuation"]("Yes?", "هل؟", Random(1)) == ("Yes", "هل")
    assert MODIFIERS["title"]("it’s cafe\u0301s 3d", "o'clock", Random(1)) == ("It’s Cafe\u0301s 3d", "O'clock")


def test_typos_are_in_the_source_alone_and_few() -> None:
    found = [MODIFIERS["typos"](*PAIR, Random(seed)) for seed in range(200)]
    assert {target for _, target in found} == {PAIR[1]}
    sources = {source for source, _ in found}
    assert PAIR[0] not in sources
    assert len(sources) > 60
    assert {len(source) - len(PAIR[0]) for source in sources} == {-1, 0, 1}
    assert any(source.count(" ") < PAIR[0].count(" ") for source in sources)


def test_places_are_before_a_translation_or_behind_one() -> None:
    # dog: Hund, cat and a: Katze; the other words are too rare.
    before_dog, before_sees = ((4, True), (4, True)), ((8, True), (8, False))
    before_a, before_cat, end = ((13, True), (19, True)), ((15, True), (19, True)), ((18, False), (24, False))
    assert Neighbours(PAIRS).places(*PAIRS[4]) == [before_dog, before_sees, before_a, before_cat, end]


def test_of_equal_words_those_at_the_same_place_translate_each_other() -> None:
    pair = ("dog and dog", "Hund und Hund")
    assert [target for _, target in Neighbours(PAIRS).places(*pair)] == [(0, True), (4, False), (9, True), (13, False)]


def test_copies_are_in_the_order_of_the_source() -> None:
    neighbours, known = Neighbours(PAIRS), marks(8)
    found = [MODIFIERS["copy"](*PAIRS[4], Random(seed), neighbours, known) for seed in range(400)]
    sides = [[split_at_marks(text) for text in pair] for pair in found]
    for pair in sides:
        assert [" ".join("".join(side[::2]).split()) for side in pair] == [*PAIRS[4]]
        assert pair[0][1::2] == pair[1][1::2] == known[: len(pair[0]) // 2]
    counts = Counter(len(source) // 2 for source, _ in sides)
    # One of two pairs has one mark, one of four has two; there are five places.
    shares = [counts[count] / 400 for count in (1, 2, 3, 4, 5)]
    assert shares == pytest.approx([0.5, 0.25, 0.125, 0.0625, 0.0625], abs=0.04)
    assert ("the dog sees a cat \ufdd0", "der Hund sieht die Katze \ufdd0") in found


def test_copies_are_at_the_ends_of_texts_without_known_words() -> None:
    neighbours = Neighbours([("Hi", ""), ("", "!")])
    found = {MODIFIERS["copy"]("Hi .", "你好", Random(seed), neighbours, ["\ufdd0"]) for seed in range(9)}
    # There is no space beside characters that are written without.
    assert found == {("\ufdd0 Hi .", "\ufdd0你好"), ("Hi . \ufdd0", "你好\ufdd0")}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["loud:0.1"], "augment loud:0.1: it must be one of upper, title, typos, punctuation, copy, terms"),
        (["upper:0.1", "upper:0.2"], "each once"),
        (["upper"], "augment upper: it needs a share of the pairs, such as upper:0.05"),
        (["upper:0.6", "title:0.6"], "at most 1 together"),
        (["upper:nan"], "shares must be above 0"),
    ],
)
def test_wrong_shares(values: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_rates(values)


def test_a_sign_is_no_word() -> None:
    places = Neighbours([("狗。", "Hund。")] * 5).places("狗。", "Hund。")
    assert places == [((0, True), (0, True)), ((1, False), (4, False))]
