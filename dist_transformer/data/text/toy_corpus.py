"""A synthetic English–German corpus: any number of distinct sentence pairs, for demos and tests without a download.

Every English sentence has exactly one German translation and vice versa. What a model must learn is real: gender,
number and case of articles and adjectives, questions, verb-second and verb-final order, separable prefixes, and the
German perfect with haben or sein for the English past. The words are in `toy_lexicon.py`.
"""

import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from dist_transformer.base.files import make_folder, write_file
from dist_transformer.data.text import toy_lexicon as lexicon
from dist_transformer.data.text.toy_lexicon import MODALS, NOTHING, Adjective, Determiner, Noun, Pair, Verb

MOST_TOY_PAIRS = 1_000_000
"""Most training pairs that commands make, because they are held in memory."""
TENSES = ("present", "present", "past", "past", *MODALS)
NOT_PAST = ("present", *MODALS)

Case = Literal["nominative", "accusative", "dative"]
# Endings of dieser, and of an adjective that shows the gender because no article does.
STRONG_ENDINGS = {
    "nominative": {"der": "er", "die": "e", "das": "es", "plural": "e"},
    "accusative": {"der": "en", "die": "e", "das": "es", "plural": "e"},
    "dative": {"der": "em", "die": "er", "das": "em", "plural": "en"},
}
DEFINITE_ENDINGS = {"er": "er", "e": "ie", "es": "as", "en": "en", "em": "em"}
# Where ein, mein and unser have no ending.
ENDINGLESS = {("nominative", "der"), ("nominative", "das"), ("accusative", "das")}
# Where an adjective after an article with an ending has -e; it has -en in all other cases.
WEAK_E = {*ENDINGLESS, ("nominative", "die"), ("accusative", "die")}

# Words of both languages that share a mark, a character of Unicode's private area, translate each other. Each clause
# has marks of its own.
_MARK = re.compile("[\ue000-\uefff]")
_OF_TEMPLATE, _OF_CLAUSES = "\ue000", range(0xE100, 0xF000, 0x100)

Order = Literal["second", "first", "question", "final"]
"""Position of the German finite verb. A question has it first, and the auxiliary first in English."""

# English and German template of a main and a second clause, and the order of each clause.
FORMS: dict[str, tuple[str, str, tuple[Order, ...]]] = {
    "statement": ("{}.", "{}.", ("second",)),
    "question": ("{}?", "{}?", ("question",)),
    "why": ("why {}?", "warum {}?", ("question",)),
    "and": ("{} and {}.", "{} und {}.", ("second", "second")),
    "but": ("{}, but {}.", "{}, aber {}.", ("second", "second")),
    "because": ("{} because {}.", "{}, weil {}.", ("second", "final")),
    "that": ("{} that {}.", "{}, dass {}.", ("second", "final")),
    "if": ("if {1}, {0}.", "wenn {1}, {0}.", ("first", "final")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ToyCorpus:
    """(English, German) pairs; no English and no German sentence occurs in two splits."""

    train: list[Pair]
    valid: list[Pair]
    test: list[Pair]
    links: dict[Pair, str]
    """Words of each pair that translate each other, as Pharaoh pairs `0-0 1-2`; empty if they are not asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """A verb and its phrases in both languages."""

    subject: Pair
    form: int
    """Form of the finite verb: 0 for I …, 1 for he …, 2 for we … and they …."""
    verb: Verb
    tense: str = "present"
    """present, past, or an English modal verb."""
    phrases: tuple[Pair, ...] = ()
    """Objects and complement, in the order of both languages."""
    time: Pair = NOTHING
    opening: Pair = NOTHING
    """A time before a main clause, so that the German subject comes after the verb."""
    marks: Pair = NOTHING
    """Marks of the English auxiliary and verb."""

    def marked(self, first: int) -> "Clause":
        """Return the clause with marks on all words, numbered from `first`."""
        subject, time, opening, *phrases = map(
            _marked_phrase, (self.subject, self.time, self.opening, *self.phrases), itertools.count(first + 16, 16)
        )
        marks = (chr(first), chr(first + 1))
        return replace(self, subject=subject, time=time, opening=opening, phrases=tuple(phrases), marks=marks)


def noun_phrase(
    determiner: Determiner, adjective: Adjective | None, noun: Noun, *, plural: bool = False, case: Case = "nominative"
) -> Pair:
    """Return the phrase in both languages, the German one declined."""
    words = _join([adjective.english if adjective else "", noun.english_plural if plural else noun.english])
    article = determiner.english_plural if plural else determiner.english
    english = _join(["an" if article == "a" and words[0] in "aeiou" else article, words])
    stem, gender = determiner.german_stem, "plural" if plural else noun.article
    strong, weak = STRONG_ENDINGS[case][gender], "e" if (case, gender) in WEAK_E else "en"
    if stem == "ein" and plural:
        article, ending = "", strong
    elif stem in ("ein", "mein", "unser") and (case, gender) in ENDINGLESS:
        article, ending = stem, strong
    else:
        article, ending = stem + (DEFINITE_ENDINGS[strong] if stem == "d" else strong), weak
    word = noun.german_plural if plural else noun.german
    if plural and case == "dative" and not word.endswith("n"):
        word += "n"
    return english, _join([article, adjective.german_stem + ending if adjective else "", word])


def _join(words: Iterable[str]) -> str:
    return " ".join(filter(None, words))


def _marked(text: str, marks: str) -> str:
    return " ".join(word + marks for word in text.split())


def _marked_phrase(pair: Pair, first: int) -> Pair:
    """Mark words from the last one on; the first of the shorter text is for all that are left of the longer one."""
    words = [text.split() for text in pair]
    most = min(map(len, words)) - 1
    english, german = (
        " ".join(word + chr(first + min(len(side) - 1 - i, most)) for i, word in enumerate(side)) for side in words
    )
    return english, german


def _verb_marks(clause: Clause, order: Order) -> Pair:
    """Return the marks of the German finite verb and of what closes the clause."""
    of_auxiliary, of_verb = clause.marks
    auxiliary, verb = _english_verb(clause, asked=order == "question")
    # In "does he invite", both words are "lädt".
    also = of_verb if auxiliary and verb and clause.tense == "present" else ""
    return (of_auxiliary if auxiliary else of_verb) + also, of_verb


def _english_clause(clause: Clause, order: Order) -> str:
    auxiliary, verb = map(_marked, _english_verb(clause, asked=order == "question"), clause.marks)
    subject = clause.subject[0]
    beginning = [auxiliary, subject] if order == "question" else [clause.opening[0], subject, auxiliary]
    return _join([*beginning, verb, *(english for english, _ in clause.phrases), clause.time[0]])


def _english_verb(clause: Clause, *, asked: bool) -> Pair:
    """Return the auxiliary, which may be none, and the full verb."""
    verb, tense, form = clause.verb, clause.tense, clause.form
    if tense in MODALS:
        return tense, verb.english
    if verb.english == "be":
        return lexicon.ENGLISH_BE[tense][form], ""
    if asked:
        return lexicon.ENGLISH_DO[tense][form], verb.english
    if tense == "past":
        return "", verb.english_past
    return "", verb.english_third if form == 1 else verb.english


def _german_clause(clause: Clause, order: Order) -> str:
    finite, closing = map(_marked, _german_verb(clause), _verb_marks(clause, order))
    subject, opening = clause.subject[1], clause.opening[1]
    middle = [clause.time[1], *(german for _, german in clause.phrases)]
    if order == "final":
        # A separable prefix rejoins its verb: …, weil er den Gast einlädt.
        return _join([subject, *middle, closing + finite if clause.tense == "present" else _join([closing, finite])])
    first, third = (opening or subject, subject if opening else "") if order == "second" else ("", subject)
    return _join([first, finite, third, *middle, closing])


def _german_verb(clause: Clause) -> Pair:
    """Return the finite verb, and the prefix, participle or infinitive that closes the clause."""
    verb, tense, form = clause.verb, clause.tense, clause.form
    prefix, _, infinitive = verb.german.rpartition("|")
    if tense in MODALS:
        return MODALS[tense][form], prefix + infinitive
    if verb.english == "be":
        return lexicon.GERMAN_SEIN[tense][form], ""
    if tense == "past":
        auxiliary = lexicon.GERMAN_HABEN if verb.german_auxiliary == "haben" else lexicon.GERMAN_SEIN["present"]
        return auxiliary[form], verb.german_participle
    return (infinitive.removesuffix("n"), verb.german_third, infinitive)[form], prefix


def render(form: str, *clauses: Clause) -> Pair:
    """Return the sentence of one of `FORMS` in both languages."""
    return _rendered(FORMS[form], clauses)


def _rendered(form: tuple[str, str, tuple[Order, ...]], clauses: Iterable[Clause]) -> Pair:
    english, german, orders = form
    english = english.format(*map(_english_clause, clauses, orders))
    german = german.format(*map(_german_clause, clauses, orders))
    return english[0].upper() + english[1:], german[0].upper() + german[1:]


def link(form: str, *clauses: Clause) -> str:
    """Return which words of the sentences of `render` translate each other, as Pharaoh pairs."""
    *templates, orders = FORMS[form]
    one, other = (re.sub("([a-z]+)", rf"\1{_OF_TEMPLATE}", template) for template in templates)
    marked = [clause.marked(first) for clause, first in zip(clauses, _OF_CLAUSES, strict=False)]
    sentences = _rendered((one, other, orders), marked)
    english, german = ([{*_MARK.findall(word)} for word in text.split()] for text in sentences)
    return " ".join(f"{i}-{j}" for i, one in enumerate(english) for j, other in enumerate(german) if one & other)


def draw_pair(rng: random.Random) -> Pair:
    form, clauses = draw_sentence(rng)
    return render(form, *clauses)


def draw_sentence(rng: random.Random) -> tuple[str, list[Clause]]:
    """Draw a random sentence, for `render`: half have two clauses."""
    form = rng.choice(("statement", "statement", *FORMS))
    orders = FORMS[form][2]
    main = _draw_clause(rng, NOT_PAST if form == "if" else TENSES, orders[0], reports=form == "that")
    others = [_draw_clause(rng, ("present",) if form == "if" else TENSES, order) for order in orders[1:]]
    return form, [main, *others]


def _draw_clause(rng: random.Random, tenses: tuple[str, ...], order: Order, *, reports: bool = False) -> Clause:
    verb = rng.choice([verb for verb in lexicon.VERBS if (verb.complement == "that") == reports])
    tense = rng.choice(tenses)
    subject, form = _draw_noun_phrase(rng, verb.subject_kinds, "nominative")
    if verb.subject_kinds[0] == "p" and rng.random() < 0.25:
        subject, form = rng.choice(lexicon.PRONOUNS)
    objects: list[tuple[str, Case]] = [(verb.dative_kinds, "dative"), (verb.accusative_kinds, "accusative")]
    phrases = [_draw_noun_phrase(rng, kinds, case)[0] for kinds, case in objects if kinds]
    time = rng.choice(lexicon.TIMES[tense]) if rng.random() < 0.4 else NOTHING
    opening, time = (time, NOTHING) if order == "second" and rng.random() < 0.5 else (NOTHING, time)
    phrases.append(rng.choice(lexicon.COMPLEMENTS[verb.complement]))
    return Clause(
        subject=subject, form=form, verb=verb, tense=tense, phrases=tuple(phrases), time=time, opening=opening
    )


def _draw_noun_phrase(rng: random.Random, kinds: str, case: Case) -> tuple[Pair, int]:
    """Return a phrase about one of the kinds, and the verb form that it requires as a subject."""
    kind, plural = rng.choice(kinds), rng.random() < 0.4
    determiner, noun = rng.choice(lexicon.DETERMINERS), rng.choice(lexicon.NOUNS[kind])
    adjective = rng.choice(lexicon.ADJECTIVES[kind]) if rng.random() < 0.6 else None
    return noun_phrase(determiner, adjective, noun, plural=plural, case=case), 2 if plural else 1


def make_toy_corpus(
    *, train_pairs: int, valid_pairs: int = 500, test_pairs: int = 500, seed: int = 1, links: bool = False
) -> ToyCorpus:
    """Make three splits from the seed alone; test and validation do not change when `train_pairs` grows.

    Args:
        links: also return the alignments of the words.
    """
    held_out = test_pairs + valid_pairs
    rng = random.Random(seed)
    english_of: dict[str, str] = {}
    linked: dict[Pair, str] = {}
    while len(english_of) < held_out + train_pairs:
        form, clauses = draw_sentence(rng)
        english, german = render(form, *clauses)
        english_of[german] = english
        if links:
            linked[english, german] = link(form, *clauses)
    pairs = [(english, german) for german, english in english_of.items()]
    return ToyCorpus(train=pairs[held_out:], valid=pairs[test_pairs:held_out], test=pairs[:test_pairs], links=linked)


def write_toy_corpus(folder: Path, corpus: ToyCorpus) -> None:
    """Write `train.en`, `train.de`, `valid.en` … `test.de`, and `train.links` … if there are alignments.

    They are UTF-8, with one sentence per line.
    """
    make_folder(folder)
    for split, pairs in (("train", corpus.train), ("valid", corpus.valid), ("test", corpus.test)):
        for language, side in (("en", 0), ("de", 1)):
            write_file(folder / f"{split}.{language}", "".join(pair[side] + "\n" for pair in pairs))
        if corpus.links:
            write_file(folder / f"{split}.links", "".join(corpus.links[pair] + "\n" for pair in pairs))
