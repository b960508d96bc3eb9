"""The toy grammar: its German is held to sentences and tables written by hand."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dist_transformer.base.errors import UserError
from dist_transformer.data.text import toy_corpus
from dist_transformer.data.text import toy_lexicon as lexicon
from dist_transformer.data.text.toy_corpus import draw_pair, generate_pairs, make_toy_corpus, write_toy_corpus
from dist_transformer.data.text.toy_grammar import (
    BECAUSE,
    BUT,
    IF,
    THAT,
    Clause,
    NounPhrase,
    Sentence,
    english_noun_phrase,
    english_number,
    german_noun_phrase,
    german_number,
    render,
)
from dist_transformer.data.text.toy_lexicon import Adjective, Determiner, Noun, Phrase, Verb

NOUNS = {noun.english: noun for nouns in lexicon.NOUNS.values() for noun in nouns}
ADJECTIVES = {adjective.english: adjective for adjective in (*lexicon.ADJECTIVES, *lexicon.COLOURS)}
VERBS = {verb.english_infinitive: verb for verb in (*toy_corpus.VERBS, *lexicon.REPORTING_VERBS)}
PRONOUNS = {pronoun.english: pronoun for pronoun in lexicon.PRONOUNS}
TODAY = Phrase("today", "heute")
IN_THE_GARDEN = Phrase("in the garden", "im Garten")


def phrase(
    determiner: Determiner, adjectives: str, noun: str, *, plural: bool = False, numeral: int | None = None
) -> NounPhrase:
    return NounPhrase(
        determiner=determiner,
        adjectives=tuple(ADJECTIVES[word] for word in adjectives.split()),
        noun=NOUNS[noun],
        plural=plural,
        numeral=numeral,
    )


MAN, WOMAN = phrase(lexicon.THE, "", "man"), phrase(lexicon.THE, "", "woman")
GUEST, DOG = phrase(lexicon.THE, "", "guest"), phrase(lexicon.THE, "", "dog")

SINGLE_CLAUSES = {
    "accusative": (
        Clause(
            subject=phrase(lexicon.THE, "old", "man"),
            verb=VERBS["see"],
            object=phrase(lexicon.THE, "small", "dog"),
        ),
        "The old man sees the small dog.",
        "Der alte Mann sieht den kleinen Hund.",
    ),
    "verb second after a time": (
        Clause(subject=MAN, verb=VERBS["see"], object=DOG, place=IN_THE_GARDEN, time=TODAY, fronted="time"),
        "Today the man sees the dog in the garden.",
        "Heute sieht der Mann den Hund im Garten.",
    ),
    "verb second after a place": (
        Clause(subject=MAN, verb=VERBS["see"], object=DOG, place=IN_THE_GARDEN, time=TODAY, fronted="place"),
        "In the garden the man sees the dog today.",
        "Im Garten sieht der Mann heute den Hund.",
    ),
    "dative and accusative": (
        Clause(
            subject=WOMAN,
            verb=VERBS["give"],
            recipient=phrase(lexicon.THE, "", "child", plural=True),
            object=phrase(lexicon.INDEFINITE, "useful", "book"),
        ),
        "The woman gives the children a useful book.",
        "Die Frau gibt den Kindern ein nützliches Buch.",
    ),
    "dative verb, perfect with sein": (
        Clause(subject=DOG, verb=VERBS["follow"], tense="perfect", object=phrase(lexicon.MY, "young", "sister")),
        "The dog has followed my young sister.",
        "Der Hund ist meiner jungen Schwester gefolgt.",
    ),
    "perfect with haben": (
        Clause(subject=PRONOUNS["I"], verb=VERBS["eat"], tense="perfect", object=phrase(lexicon.INDEFINITE, "", "egg")),
        "I have eaten an egg.",
        "Ich habe ein Ei gegessen.",
    ),
    "separable prefix closes": (
        Clause(subject=PRONOUNS["he"], verb=VERBS["invite"], object=GUEST, time=TODAY),
        "He invites the guest today.",
        "Er lädt heute den Gast ein.",
    ),
    "modal with separable verb": (
        Clause(subject=PRONOUNS["they"], verb=VERBS["invite"], tense="want", object=GUEST),
        "They want to invite the guest.",
        "Sie wollen den Gast einladen.",
    ),
    "future": (
        Clause(
            subject=PRONOUNS["we"], verb=VERBS["fly"], tense="future", complement=Phrase("to Berlin", "nach Berlin")
        ),
        "We will fly to Berlin.",
        "Wir werden nach Berlin fliegen.",
    ),
    "company before the destination": (
        Clause(
            subject=phrase(lexicon.OUR, "", "friend", plural=True),
            verb=VERBS["travel"],
            company=(lexicon.WITH, phrase(lexicon.INDEFINITE, "big black", "dog", plural=True, numeral=3)),
            complement=Phrase("to Vienna", "nach Wien"),
        ),
        "Our friends travel to Vienna with three big black dogs.",
        "Unsere Freunde reisen mit drei großen schwarzen Hunden nach Wien.",
    ),
    "nicht after the object": (
        Clause(subject=PRONOUNS["she"], verb=VERBS["find"], negated=True, object=phrase(lexicon.MY, "", "key")),
        "She does not find my key.",
        "Sie findet meinen Schlüssel nicht.",
    ),
    "nicht before the place": (
        Clause(subject=MAN, verb=VERBS["work"], tense="perfect", negated=True, place=IN_THE_GARDEN),
        "The man has not worked in the garden.",
        "Der Mann hat nicht im Garten gearbeitet.",
    ),
    "kein": (
        Clause(subject=MAN, verb=VERBS["buy"], object=phrase(lexicon.NO, "red", "apple", plural=True)),
        "The man buys no red apples.",
        "Der Mann kauft keine roten Äpfel.",
    ),
    "negated predicate": (
        Clause(subject=PRONOUNS["I"], verb=lexicon.BE, negated=True, complement=Phrase("tired", "müde")),
        "I am not tired.",
        "Ich bin nicht müde.",
    ),
    "numbers in words and digits": (
        Clause(
            subject=phrase(lexicon.INDEFINITE, "new", "chair", plural=True, numeral=21),
            verb=lexicon.COST,
            complement=Phrase("95 euros", "95 Euro"),
        ),
        "Twenty-one new chairs cost 95 euros.",
        "Einundzwanzig neue Stühle kosten 95 Euro.",
    ),
}

# Nominative, accusative, dative.
DECLENSIONS = [
    (phrase(lexicon.THE, "old", "dog"), "der alte Hund", "den alten Hund", "dem alten Hund"),
    (phrase(lexicon.THE, "old", "cat"), "die alte Katze", "die alte Katze", "der alten Katze"),
    (phrase(lexicon.THE, "old", "book"), "das alte Buch", "das alte Buch", "dem alten Buch"),
    (phrase(lexicon.THE, "old", "man", plural=True), "die alten Männer", "die alten Männer", "den alten Männern"),
    (phrase(lexicon.INDEFINITE, "old", "dog"), "ein alter Hund", "einen alten Hund", "einem alten Hund"),
    (phrase(lexicon.INDEFINITE, "old", "cat"), "eine alte Katze", "eine alte Katze", "einer alten Katze"),
    (phrase(lexicon.INDEFINITE, "old", "book"), "ein altes Buch", "ein altes Buch", "einem alten Buch"),
    (phrase(lexicon.INDEFINITE, "old", "dog", plural=True), "alte Hunde", "alte Hunde", "alten Hunden"),
    (phrase(lexicon.EVERY, "tired", "man"), "jeder müde Mann", "jeden müden Mann", "jedem müden Mann"),
    (phrase(lexicon.THIS, "expensive", "clock"), "diese teure Uhr", "diese teure Uhr", "dieser teuren Uhr"),
    (phrase(lexicon.THIS, "", "queen", plural=True), "diese Königinnen", "diese Königinnen", "diesen Königinnen"),
    (phrase(lexicon.NO, "", "cake", plural=True), "keine Kuchen", "keine Kuchen", "keinen Kuchen"),
    (phrase(lexicon.OUR, "new", "table"), "unser neuer Tisch", "unseren neuen Tisch", "unserem neuen Tisch"),
    (
        phrase(lexicon.MY, "big", "girl", plural=True),
        "meine großen Mädchen",
        "meine großen Mädchen",
        "meinen großen Mädchen",
    ),
]

NUMBERS = {
    0: ("zero", "null"),
    1: ("one", "eins"),
    7: ("seven", "sieben"),
    11: ("eleven", "elf"),
    12: ("twelve", "zwölf"),
    16: ("sixteen", "sechzehn"),
    17: ("seventeen", "siebzehn"),
    20: ("twenty", "zwanzig"),
    21: ("twenty-one", "einundzwanzig"),
    30: ("thirty", "dreißig"),
    36: ("thirty-six", "sechsunddreißig"),
    40: ("forty", "vierzig"),
    61: ("sixty-one", "einundsechzig"),
    77: ("seventy-seven", "siebenundsiebzig"),
    99: ("ninety-nine", "neunundneunzig"),
}


@pytest.fixture(scope="module")
def drawn() -> list[tuple[str, str]]:
    rng = random.Random(7)
    return [draw_pair(rng) for _ in range(50_000)]


@pytest.mark.parametrize(("clause", "english", "german"), SINGLE_CLAUSES.values(), ids=SINGLE_CLAUSES.keys())
def test_single_clauses(clause: Clause, english: str, german: str) -> None:
    assert render(Sentence(clause)) == (english, german)


def test_verb_is_final_after_weil() -> None:
    main = Clause(subject=MAN, verb=VERBS["sleep"])
    second = Clause(subject=WOMAN, verb=VERBS["read"], tense="perfect", object=phrase(lexicon.INDEFINITE, "", "letter"))
    assert render(Sentence(main, BECAUSE, second)) == (
        "The man sleeps because the woman has read a letter.",
        "Der Mann schläft, weil die Frau einen Brief gelesen hat.",
    )


def test_prefix_rejoins_its_verb_after_dass() -> None:
    main = Clause(subject=PRONOUNS["I"], verb=lexicon.KNOW)
    second = Clause(subject=WOMAN, verb=VERBS["call"], object=GUEST, time=TODAY)
    assert render(Sentence(main, THAT, second)) == (
        "I know that the woman calls the guest today.",
        "Ich weiß, dass die Frau heute den Gast anruft.",
    )


def test_main_clause_starts_with_its_verb_after_a_leading_wenn() -> None:
    main = Clause(subject=WOMAN, verb=VERBS["sing"], tense="future", time=TODAY)
    second = Clause(subject=MAN, verb=VERBS["help"], object=phrase(lexicon.THE, "", "goose", plural=True))
    assert render(Sentence(main, IF, second)) == (
        "If the man helps the geese, the woman will sing today.",
        "Wenn der Mann den Gänsen hilft, wird die Frau heute singen.",
    )


def test_aber_keeps_verb_second() -> None:
    main = Clause(subject=MAN, verb=VERBS["dance"])
    second = Clause(subject=PRONOUNS["I"], verb=VERBS["work"], time=TODAY, fronted="time")
    assert render(Sentence(main, BUT, second)) == (
        "The man dances, but today I work.",
        "Der Mann tanzt, aber heute arbeite ich.",
    )


@pytest.mark.parametrize(("declined", "nominative", "accusative", "dative"), DECLENSIONS)
def test_declension(declined: NounPhrase, nominative: str, accusative: str, dative: str) -> None:
    assert german_noun_phrase(declined, "nominative") == nominative
    assert german_noun_phrase(declined, "accusative") == accusative
    assert german_noun_phrase(declined, "dative") == dative


@pytest.mark.parametrize(
    ("adjectives", "noun", "expected"),
    [
        ("", "apple", "an apple"),
        ("", "knife", "a knife"),
        ("red", "apple", "a red apple"),
        ("honest", "king", "an honest king"),
        ("useful", "box", "a useful box"),
    ],
)
def test_a_or_an(adjectives: str, noun: str, expected: str) -> None:
    assert english_noun_phrase(phrase(lexicon.INDEFINITE, adjectives, noun)) == expected


@pytest.mark.parametrize(("number", "words"), NUMBERS.items())
def test_number_words(number: int, words: tuple[str, str]) -> None:
    assert (english_number(number), german_number(number)) == words


def test_number_words_are_distinct() -> None:
    assert len({english_number(number) for number in range(100)}) == 100
    assert len({german_number(number) for number in range(100)}) == 100


@pytest.mark.parametrize(
    "words",
    [
        [noun for nouns in lexicon.NOUNS.values() for noun in nouns],
        [*set(toy_corpus.VERBS), *lexicon.REPORTING_VERBS],
        [*lexicon.ADJECTIVES, *lexicon.COLOURS],
        lexicon.PLACES,
        lexicon.DESTINATIONS,
        [*{*lexicon.PRESENT_TIMES, *lexicon.PERFECT_TIMES, *lexicon.FUTURE_TIMES}],
    ],
    ids=["nouns", "verbs", "adjectives", "places", "destinations", "times"],
)
def test_lexicon_has_no_word_twice(words: Sequence[Noun | Verb | Adjective | Phrase]) -> None:
    assert len({word.english for word in words}) == len({word.german for word in words}) == len(words)


def test_translation_is_a_function_in_both_directions(drawn: list[tuple[str, str]]) -> None:
    distinct = set(drawn)
    assert len({english for english, _ in distinct}) == len(distinct)
    assert len({german for _, german in distinct}) == len(distinct)
    assert len(distinct) > 49_000


def test_sentences_look_like_text(drawn: list[tuple[str, str]]) -> None:
    for sentence in (sentence for pair in drawn for sentence in pair):
        assert sentence[0].isupper()
        assert sentence.endswith(".")
        assert "  " not in sentence
        assert toy_corpus.MIN_WORDS <= len(sentence.split()) <= toy_corpus.MAX_WORDS


def test_every_lexicon_noun_and_verb_is_used(drawn: list[tuple[str, str]]) -> None:
    words = {word.strip(".,") for _, german in drawn for word in german.split()}
    assert {noun.german for noun in NOUNS.values()} <= words
    assert {verb.german_participle for verb in VERBS.values()} <= words


def test_generation_is_deterministic_and_distinct() -> None:
    pairs = generate_pairs(2000, seed=3)
    assert pairs == generate_pairs(2000, seed=3)
    assert pairs[:500] == generate_pairs(500, seed=3)
    assert pairs != generate_pairs(2000, seed=4)
    assert len({english for english, _ in pairs}) == len({german for _, german in pairs}) == 2000
    assert generate_pairs(0, seed=3) == []


def test_splits_are_disjoint_and_held_out_text_is_stable() -> None:
    corpus = make_toy_corpus(train_pairs=3000, valid_pairs=200, test_pairs=100)
    splits = (corpus.train, corpus.valid, corpus.test)
    assert [len(split) for split in splits] == [3000, 200, 100]
    for side in (0, 1):
        assert len({pair[side] for split in splits for pair in split}) == 3300
    larger = make_toy_corpus(train_pairs=4000, valid_pairs=200, test_pairs=100)
    assert (larger.valid, larger.test) == (corpus.valid, corpus.test)


def test_impossible_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="-1"):
        generate_pairs(-1, seed=1)
    with pytest.raises(UserError, match="valid_pairs is -5"):
        make_toy_corpus(train_pairs=10, valid_pairs=-5)
    monkeypatch.setattr(toy_corpus, "MAX_DRAWS", 100)
    with pytest.raises(UserError, match="of 101 distinct pairs: ask for fewer"):
        generate_pairs(101, seed=1)


def test_files_hold_one_sentence_a_line(tmp_path: Path) -> None:
    corpus = make_toy_corpus(train_pairs=50, valid_pairs=5, test_pairs=0)
    write_toy_corpus(tmp_path / "new" / "folder", corpus)
    for split, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        english, german = (
            (tmp_path / "new" / "folder" / f"{split}.{language}").read_text(encoding="utf-8").splitlines()
            for language in ("en", "de")
        )
        assert list(zip(english, german, strict=True)) == pairs
