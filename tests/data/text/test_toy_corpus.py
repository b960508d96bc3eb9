"""The toy grammar: its sentences are compared with some that were written by hand."""

import hashlib
import random
from pathlib import Path

import pytest

from dist_transformer.data.text import toy_lexicon as lexicon
from dist_transformer.data.text.toy_corpus import (
    Case,
    Clause,
    draw_pair,
    link,
    make_toy_corpus,
    noun_phrase,
    render,
    write_toy_corpus,
)
from dist_transformer.data.text.toy_lexicon import Pair

DETERMINERS = {word.english: word for word in lexicon.DETERMINERS}
ADJECTIVES = {word.english: word for words in lexicon.ADJECTIVES.values() for word in words}
NOUNS = {word.english: word for words in lexicon.NOUNS.values() for word in words}
VERBS = {word.english: word for word in lexicon.VERBS}
TODAY, YESTERDAY, TOMORROW = ("today", "heute"), ("yesterday", "gestern"), ("tomorrow", "morgen")
IN_THE_GARDEN = ("in the garden", "im Garten")


def phrase(words: str, case: Case = "nominative", *, plural: bool = False) -> Pair:
    """Build a phrase from its English words in the singular: `the old man`."""
    determiner, *adjective, noun = words.split()
    described = ADJECTIVES[adjective[0]] if adjective else None
    return noun_phrase(DETERMINERS[determiner], described, NOUNS[noun], plural=plural, case=case)


def clause(
    subject: str, verb: str, *phrases: Pair, tense: str = "present", time: Pair = ("", ""), opening: Pair = ("", "")
) -> Clause:
    pronouns = {pair[0]: (pair, form) for pair, form in lexicon.PRONOUNS}
    pair, form = pronouns[subject] if subject in pronouns else (phrase(subject), 1)
    return Clause(subject=pair, form=form, verb=VERBS[verb], tense=tense, phrases=phrases, time=time, opening=opening)


SMALL_DOG, GUEST = phrase("the small dog", "accusative"), phrase("the guest", "accusative")

SENTENCES = [
    (
        ("statement", clause("the old man", "see", SMALL_DOG)),
        ("The old man sees the small dog.", "Der alte Mann sieht den kleinen Hund."),
    ),
    (
        ("statement", clause("the man", "see", SMALL_DOG, IN_THE_GARDEN, opening=TODAY)),
        ("Today the man sees the small dog in the garden.", "Heute sieht der Mann den kleinen Hund im Garten."),
    ),
    (
        ("statement", clause("the man", "find", SMALL_DOG, IN_THE_GARDEN, tense="past", time=YESTERDAY)),
        (
            "The man found the small dog in the garden yesterday.",
            "Der Mann hat gestern den kleinen Hund im Garten gefunden.",
        ),
    ),
    (
        (
            "statement",
            clause("a friend", "give", phrase("the child", "dative", plural=True), phrase("a new book", "accusative")),
        ),
        ("A friend gives the children a new book.", "Ein Freund gibt den Kindern ein neues Buch."),
    ),
    (
        ("statement", clause("he", "invite", GUEST, opening=TODAY)),
        ("Today he invites the guest.", "Heute lädt er den Gast ein."),
    ),
    (
        ("statement", clause("they", "invite", GUEST, tense="must", time=TOMORROW)),
        ("They must invite the guest tomorrow.", "Sie müssen morgen den Gast einladen."),
    ),
    (
        ("question", clause("the woman", "buy", phrase("a fresh apple", "accusative"), tense="past")),
        ("Did the woman buy a fresh apple?", "Hat die Frau einen frischen Apfel gekauft?"),
    ),
    (
        ("question", clause("she", "be", ("tired", "müde"), tense="past", time=YESTERDAY)),
        ("Was she tired yesterday?", "War sie gestern müde?"),
    ),
    (
        (
            "because",
            clause("the man", "sleep"),
            clause("the woman", "write", phrase("a letter", "accusative"), tense="past"),
        ),
        (
            "The man sleeps because the woman wrote a letter.",
            "Der Mann schläft, weil die Frau einen Brief geschrieben hat.",
        ),
    ),
    (
        ("that", clause("the king", "hope"), clause("the woman", "call", GUEST, time=TODAY)),
        (
            "The king hopes that the woman calls the guest today.",
            "Der König hofft, dass die Frau heute den Gast anruft.",
        ),
    ),
    (
        (
            "if",
            clause("the woman", "be", IN_THE_GARDEN, tense="will", time=TOMORROW),
            clause("the man", "help", phrase("the goose", "dative", plural=True)),
        ),
        (
            "If the man helps the geese, the woman will be in the garden tomorrow.",
            "Wenn der Mann den Gänsen hilft, wird die Frau morgen im Garten sein.",
        ),
    ),
]

# Nominative, accusative, dative, and whether it is plural.
DECLENSIONS = [
    ("the old dog", False, "der alte Hund", "den alten Hund", "dem alten Hund"),
    ("the old cat", False, "die alte Katze", "die alte Katze", "der alten Katze"),
    ("the old book", False, "das alte Buch", "das alte Buch", "dem alten Buch"),
    ("the old man", True, "die alten Männer", "die alten Männer", "den alten Männern"),
    ("a tired horse", False, "ein müdes Pferd", "ein müdes Pferd", "einem müden Pferd"),
    ("a old dog", False, "ein alter Hund", "einen alten Hund", "einem alten Hund"),
    ("a old cat", False, "eine alte Katze", "eine alte Katze", "einer alten Katze"),
    ("a old dog", True, "alte Hunde", "alte Hunde", "alten Hunden"),
    ("this expensive clock", False, "diese teure Uhr", "diese teure Uhr", "dieser teuren Uhr"),
    ("this queen", True, "diese Königinnen", "diese Königinnen", "diesen Königinnen"),
    ("this ugly table", False, "dieser hässliche Tisch", "diesen hässlichen Tisch", "diesem hässlichen Tisch"),
    ("our new table", False, "unser neuer Tisch", "unseren neuen Tisch", "unserem neuen Tisch"),
    ("my big girl", True, "meine großen Mädchen", "meine großen Mädchen", "meinen großen Mädchen"),
]


@pytest.fixture(scope="module")
def drawn() -> list[Pair]:
    rng = random.Random(7)
    return [draw_pair(rng) for _ in range(20_000)]


@pytest.mark.parametrize(("sentence", "expected"), SENTENCES, ids=[english for _, (english, _) in SENTENCES])
def test_sentences(sentence: tuple[str, *tuple[Clause, ...]], expected: Pair) -> None:
    assert render(*sentence) == expected


@pytest.mark.parametrize(("words", "plural", "nominative", "accusative", "dative"), DECLENSIONS)
def test_declension(words: str, plural: bool, nominative: str, accusative: str, dative: str) -> None:
    cases: tuple[Case, ...] = ("nominative", "accusative", "dative")
    assert [phrase(words, case, plural=plural)[1] for case in cases] == [nominative, accusative, dative]


def test_english_articles() -> None:
    assert [phrase(words)[0] for words in ("a apple", "a knife", "a red apple")] == [
        "an apple",
        "a knife",
        "a red apple",
    ]
    assert [phrase(words, plural=True)[0] for words in ("a old knife", "this mouse")] == ["old knives", "these mice"]


def test_translation_is_a_function_in_both_directions(drawn: list[Pair]) -> None:
    distinct = set(drawn)
    assert len({english for english, _ in distinct}) == len({german for _, german in distinct}) == len(distinct)
    assert len(distinct) > 19_500


def test_sentences_look_like_text(drawn: list[Pair]) -> None:
    lengths = [len(sentence.split()) for pair in drawn for sentence in pair]
    assert min(lengths) == 2
    assert 25 <= max(lengths) <= 31
    for sentence in (sentence for pair in drawn for sentence in pair):
        assert sentence[0].isupper()
        assert sentence[-1] in ".?"
        assert "  " not in sentence


def test_splits_are_disjoint_and_held_out_text_is_stable() -> None:
    corpus = make_toy_corpus(train_pairs=3000, valid_pairs=200, test_pairs=100)
    splits = (corpus.train, corpus.valid, corpus.test)
    assert [len(split) for split in splits] == [3000, 200, 100]
    for side in (0, 1):
        assert len({pair[side] for split in splits for pair in split}) == 3300
    larger = make_toy_corpus(train_pairs=4000, valid_pairs=200, test_pairs=100)
    assert (larger.valid, larger.test, larger.train[:3000]) == (corpus.valid, corpus.test, corpus.train)
    assert make_toy_corpus(train_pairs=3000, valid_pairs=200, test_pairs=100, seed=2).train != corpus.train
    # The figures of the demo are of this text.
    text = "".join(f"{english}\t{german}\n" for split in splits for english, german in split)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "770b84d08b6489c7"


def test_files_hold_one_sentence_a_line(tmp_path: Path) -> None:
    corpus = make_toy_corpus(train_pairs=50, valid_pairs=5, test_pairs=0)
    write_toy_corpus(tmp_path / "new" / "folder", corpus)
    for split, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        english, german = (
            (tmp_path / "new" / "folder" / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
            for language in ("en", "de")
        )
        assert list(zip(english, german, strict=True)) == pairs


def test_links_by_hand() -> None:
    """One clause after the other: "does he invite" is "lädt er … ein", and "invited" is "hat … eingeladen"."""
    asked = clause("he", "invite", phrase("the old guest", "accusative"))
    assert render("question", asked) == ("Does he invite the old guest?", "Lädt er den alten Gast ein?")
    assert link("question", asked) == "0-0 1-1 2-0 2-5 3-2 4-3 5-4"
    past = clause("she", "invite", phrase("the guest", "accusative"), tense="past", opening=YESTERDAY)
    later = clause("I", "look for", phrase("a cat", "accusative"), IN_THE_GARDEN, tense="must")
    english, german = render("because", past, later)
    pairs = (map(int, pair.split("-")) for pair in link("because", past, later).split())
    found = {(english.split()[i], german.split()[j]) for i, j in pairs}
    assert found == {
        *(("Yesterday", "Gestern"), ("she", "sie"), ("invited", "hat"), ("invited", "eingeladen,")),
        *(("the", "den"), ("guest", "Gast"), ("because", "weil"), ("I", "ich"), ("must", "muss.")),
        *(("look", "suchen"), ("for", "suchen"), ("a", "eine"), ("cat", "Katze")),
        *(("in", "im"), ("the", "im"), ("garden.", "Garten")),
    }


def test_links_are_written_if_asked_for(tmp_path: Path) -> None:
    corpus = make_toy_corpus(train_pairs=20, valid_pairs=2, test_pairs=2, links=True)
    plain = make_toy_corpus(train_pairs=20, valid_pairs=2, test_pairs=2)
    assert (plain.train, plain.links) == (corpus.train, {})
    write_toy_corpus(tmp_path, corpus)
    assert (tmp_path / "train.links").read_text().splitlines() == [corpus.links[pair] for pair in corpus.train]
