"""A synthetic English–German corpus: any number of distinct sentence pairs, for demos and tests without a download.

Every English sentence has exactly one German translation and vice versa. What a model must learn is real: gender,
number and case agreement, weak, mixed and strong adjective endings, verb-second and verb-final order, separable
prefixes, the perfect with haben or sein, negation, and number words. Words are in `toy_lexicon.py`, rules in
`toy_grammar.py`; this module draws sentences.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dist_transformer.base.errors import UserError
from dist_transformer.base.files import make_folder, write_file
from dist_transformer.data.text import toy_lexicon as lexicon
from dist_transformer.data.text.toy_grammar import (
    AND,
    BECAUSE,
    BUT,
    IF,
    THAT,
    Clause,
    NounPhrase,
    Sentence,
    SentencePair,
    Tense,
    render,
)
from dist_transformer.data.text.toy_lexicon import Determiner, Kind, Phrase, Preposition, Pronoun, Verb

MAX_DRAWS = 10_000_000
MIN_WORDS, MAX_WORDS = 4, 20

ALL_TENSES: tuple[Tense, ...] = ("present", "present", "perfect", "perfect", "future", "can", "must", "should", "want")
IF_TENSES: tuple[Tense, ...] = ("present",)
AFTER_IF_TENSES: tuple[Tense, ...] = ("present", "future", "can", "must", "should")
# The modals are left out: "must not" is not "muss nicht".
DENIABLE_TENSES = ("present", "perfect", "future")

DEFINITE_DETERMINERS = (lexicon.THE, lexicon.THE, lexicon.THIS, lexicon.MY, lexicon.OUR)
DETERMINERS = (*DEFINITE_DETERMINERS, lexicon.INDEFINITE, lexicon.INDEFINITE, lexicon.EVERY)

VERBS = (
    *lexicon.INTRANSITIVE_VERBS,
    *lexicon.MOTION_VERBS,
    *lexicon.TRANSITIVE_VERBS,
    *lexicon.DITRANSITIVE_VERBS,
    lexicon.BE,
    lexicon.BE,
    lexicon.COST,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyCorpus:
    """(English, German) pairs; no English and no German sentence occurs in two splits."""

    train: list[SentencePair]
    valid: list[SentencePair]
    test: list[SentencePair]


def draw_sentence(rng: random.Random) -> Sentence:
    """Draw a random sentence: half are single clauses, the others join two."""
    connective = rng.choice((None, None, None, None, None, AND, BUT, BECAUSE, THAT, IF))
    if connective is None:
        return Sentence(_draw_clause(rng))
    if connective is IF:
        main = _draw_clause(rng, tenses=AFTER_IF_TENSES, may_front=False)
        return Sentence(main, IF, _draw_clause(rng, tenses=IF_TENSES, may_front=False))
    if connective is THAT:
        subject, verb = _draw_subject(rng, lexicon.PERSON, DETERMINERS), rng.choice(lexicon.REPORTING_VERBS)
        main = Clause(subject=subject, verb=verb, tense=rng.choice(("present", "perfect")))
    else:
        main = _draw_clause(rng)
    return Sentence(main, connective, _draw_clause(rng, may_front=connective.order == "verb_second"))


def _draw_clause(rng: random.Random, *, tenses: tuple[Tense, ...] = ALL_TENSES, may_front: bool = True) -> Clause:
    verb = rng.choice(VERBS)
    # Things, such as lamps, cannot want anything.
    tense = rng.choice([tense for tense in tenses if tense != "want" or "thing" not in verb.subject_kinds])
    denied = tense in DENIABLE_TENSES and verb is not lexicon.COST and rng.random() < 0.2
    with_kein = denied and bool(verb.object_kinds) and rng.random() < 0.5
    negated = denied and not with_kein
    # "ein Hund" or "jeder Hund" with a negation would leave its scope open.
    determiners = DEFINITE_DETERMINERS if denied else DETERMINERS
    subject = _draw_subject(rng, verb.subject_kinds, determiners)
    # "sieht den Hund nicht im Garten" would deny only the place.
    takes_place = verb.complement == "none" and not (negated and verb.object_kinds)
    place = rng.choice(lexicon.PLACES) if takes_place and rng.random() < 0.4 else None
    time = rng.choice(_times(tense)) if rng.random() < 0.4 else None
    return Clause(
        subject=subject,
        verb=verb,
        tense=tense,
        negated=negated,
        recipient=_draw_noun_phrase(rng, lexicon.PERSON, determiners) if verb.takes_recipient else None,
        object=_draw_object(rng, verb, (lexicon.NO,) if with_kein else determiners),
        company=_draw_company(rng, verb, determiners),
        place=place,
        complement=_draw_complement(rng, verb, subject),
        time=time,
        fronted=_draw_fronted(rng, place, time) if may_front else "subject",
    )


def _times(tense: Tense) -> tuple[Phrase, ...]:
    match tense:
        case "present":
            return lexicon.PRESENT_TIMES
        case "perfect":
            return lexicon.PERFECT_TIMES
    return lexicon.FUTURE_TIMES


def _draw_fronted(rng: random.Random, place: Phrase | None, time: Phrase | None) -> Literal["subject", "time", "place"]:
    chosen: Literal["subject", "time", "place"] = rng.choice(("subject", "time", "place"))
    is_there = {"subject": True, "time": time is not None, "place": place is not None}
    return chosen if is_there[chosen] else "subject"


def _draw_subject(
    rng: random.Random, kinds: tuple[Kind, ...], determiners: tuple[Determiner, ...]
) -> NounPhrase | Pronoun:
    if "person" in kinds and rng.random() < 0.2:
        return rng.choice(lexicon.PRONOUNS)
    return _draw_noun_phrase(rng, kinds, determiners)


def _draw_object(rng: random.Random, verb: Verb, determiners: tuple[Determiner, ...]) -> NounPhrase | None:
    return _draw_noun_phrase(rng, verb.object_kinds, determiners) if verb.object_kinds else None


def _draw_company(
    rng: random.Random, verb: Verb, determiners: tuple[Determiner, ...]
) -> tuple[Preposition, NounPhrase] | None:
    if not verb.prepositions or rng.random() < 0.7:
        return None
    preposition = rng.choice(verb.prepositions)
    kinds = lexicon.PERSON if preposition is lexicon.FOR else lexicon.ANIMATE
    return preposition, _draw_noun_phrase(rng, kinds, determiners)


def _draw_complement(rng: random.Random, verb: Verb, subject: NounPhrase | Pronoun) -> Phrase | None:
    match verb.complement:
        case "destination":
            return rng.choice(lexicon.DESTINATIONS)
        case "price":
            euros = 5 * rng.randrange(1, 20)
            return Phrase(f"{euros} euros", f"{euros} Euro")
        case "predicate":
            kind = subject.noun.kind if isinstance(subject, NounPhrase) else "person"
            said = subject.adjectives if isinstance(subject, NounPhrase) else ()
            adjective = rng.choice([word for word in lexicon.ADJECTIVES_BY_KIND[kind] if word not in said])
            return Phrase(adjective.english, adjective.german)
    return None


def _draw_noun_phrase(rng: random.Random, kinds: tuple[Kind, ...], determiners: tuple[Determiner, ...]) -> NounPhrase:
    kind = rng.choice(kinds)
    determiner = rng.choice(determiners)
    plural = determiner is not lexicon.EVERY and rng.random() < 0.4
    has_numeral = plural and determiner is not lexicon.NO and rng.random() < 0.25
    adjectives = [rng.choice(lexicon.ADJECTIVES_BY_KIND[kind])] if rng.random() < 0.5 else []
    colours = lexicon.COLOURS_BY_KIND[kind]
    if colours and rng.random() < 0.2:
        adjectives.append(rng.choice(colours))
    return NounPhrase(
        determiner=determiner,
        noun=rng.choice(lexicon.NOUNS[kind]),
        plural=plural,
        numeral=rng.randrange(2, 100) if has_numeral else None,
        adjectives=tuple(adjectives),
    )


def draw_pair(rng: random.Random) -> SentencePair:
    """Draw a random sentence of `MIN_WORDS` to `MAX_WORDS` words in both languages."""
    while True:
        pair = render(draw_sentence(rng))
        if all(MIN_WORDS <= len(sentence.split()) <= MAX_WORDS for sentence in pair):
            return pair


def generate_pairs(count: int, seed: int) -> list[SentencePair]:
    """Generate `count` distinct pairs from the seed alone; a smaller count gives a prefix of the same list.

    Raises:
        UserError: `count` is negative, or more than `MAX_DRAWS` draws can give.
    """
    if count < 0:
        raise UserError(f"the number of toy sentence pairs is {count}: ask for 0 or more")
    rng = random.Random(seed)
    english_of: dict[str, str] = {}
    for _ in range(MAX_DRAWS):
        if len(english_of) == count:
            break
        english, german = draw_pair(rng)
        english_of[german] = english
    if len(english_of) < count:
        raise UserError(f"the toy grammar gave only {len(english_of)} of {count} distinct pairs: ask for fewer")
    return [(english, german) for german, english in english_of.items()]


def make_toy_corpus(*, train_pairs: int, valid_pairs: int = 500, test_pairs: int = 500, seed: int = 1) -> ToyCorpus:
    """Make three splits that share no sentence; test and validation do not change when `train_pairs` grows.

    Raises:
        UserError: as `generate_pairs`, for any of the three numbers.
    """
    for name, count in (("train_pairs", train_pairs), ("valid_pairs", valid_pairs), ("test_pairs", test_pairs)):
        if count < 0:
            raise UserError(f"{name} is {count}: ask for 0 or more")
    pairs = generate_pairs(test_pairs + valid_pairs + train_pairs, seed)
    held_out = test_pairs + valid_pairs
    return ToyCorpus(train=pairs[held_out:], valid=pairs[test_pairs:held_out], test=pairs[:test_pairs])


def write_toy_corpus(folder: Path, corpus: ToyCorpus) -> None:
    """Write `train.en`, `train.de`, `valid.en` … `test.de`: UTF-8, one sentence per line."""
    make_folder(folder)
    for split, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        for language, side in (("en", 0), ("de", 1)):
            write_file(folder / f"{split}.{language}", "".join(pair[side] + "\n" for pair in pairs))
