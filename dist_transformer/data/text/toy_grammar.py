"""Syntax trees of the toy English–German grammar, and their rendering in both languages.

One tree gives both sentences, so English and German agree by construction.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from dist_transformer.data.text import toy_lexicon as lexicon
from dist_transformer.data.text.toy_lexicon import (
    Adjective,
    Agreement,
    Case,
    Determiner,
    Gender,
    Noun,
    Phrase,
    Preposition,
    Pronoun,
    Verb,
)

SentencePair = tuple[str, str]
WordOrder = Literal["verb_first", "verb_second", "verb_final"]
Tense = Literal["present", "perfect", "future", "can", "must", "should", "want"]


def _words(text: str) -> list[str]:
    return text.split()


def _join(words: Iterable[str | None]) -> str:
    return " ".join(filter(None, words))


# Endings of dieser, and of an adjective without a determiner.
STRONG_ENDINGS: dict[Case, dict[Gender | Literal["plural"], str]] = {
    "nominative": {"masculine": "er", "feminine": "e", "neuter": "es", "plural": "e"},
    "accusative": {"masculine": "en", "feminine": "e", "neuter": "es", "plural": "e"},
    "dative": {"masculine": "em", "feminine": "er", "neuter": "em", "plural": "en"},
}
DEFINITE_ENDINGS = {"er": "er", "e": "ie", "es": "as", "en": "en", "em": "em"}
# Cases in which ein, kein and mein have no ending, so the adjective shows the gender: ein alter Mann, ein altes Buch.
ENDINGLESS = {("nominative", "masculine"), ("nominative", "neuter"), ("accusative", "neuter")}
# Cases in which an adjective after der or dieser ends in -e; it ends in -en in all others.
WEAK_E = {*ENDINGLESS, ("nominative", "feminine"), ("accusative", "feminine")}

ENGLISH_ONES = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
ENGLISH_TENS = _words("- - twenty thirty forty fifty sixty seventy eighty ninety")
GERMAN_ONES = _words(
    "null eins zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn siebzehn "
    "achtzehn neunzehn"
)
GERMAN_TENS = _words("- - zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig")


@dataclass(frozen=True, kw_only=True, slots=True)
class NounPhrase:
    """A determiner, an optional numeral, adjectives and a noun."""

    determiner: Determiner
    noun: Noun
    plural: bool = False
    numeral: int | None = None
    adjectives: tuple[Adjective, ...] = ()

    @property
    def agreement(self) -> Agreement:
        """The verb form that this phrase requires as a subject."""
        return "plural" if self.plural else "third"


@dataclass(frozen=True, kw_only=True, slots=True)
class Clause:
    """A verb with its arguments. `fronted` is the phrase before the finite verb of a German main clause."""

    subject: NounPhrase | Pronoun
    verb: Verb
    tense: Tense = "present"
    negated: bool = False
    recipient: NounPhrase | None = None
    object: NounPhrase | None = None
    company: tuple[Preposition, NounPhrase] | None = None
    place: Phrase | None = None
    complement: Phrase | None = None
    time: Phrase | None = None
    fronted: Literal["subject", "time", "place"] = "subject"


@dataclass(frozen=True, slots=True)
class Connective:
    """A connective that joins a second clause to the main clause."""

    english: str
    german: str
    order: WordOrder
    leads: bool = False
    """Whether the second clause comes before the main clause, which then starts with its verb: Wenn …, lacht …."""


@dataclass(frozen=True, slots=True)
class Sentence:
    """A main clause, alone or with a second clause."""

    main: Clause
    connective: Connective | None = None
    second: Clause | None = None


AND = Connective(" and ", " und ", "verb_second")
BUT = Connective(", but ", ", aber ", "verb_second")
BECAUSE = Connective(" because ", ", weil ", "verb_final")
THAT = Connective(" that ", ", dass ", "verb_final")
IF = Connective("if ", "wenn ", "verb_final", leads=True)


def english_number(number: int) -> str:
    """Write 0 to 99 in words: 21 → twenty-one."""
    tens, ones = divmod(number, 10)
    if tens < 2:
        return ENGLISH_ONES[number]
    return f"{ENGLISH_TENS[tens]}-{ENGLISH_ONES[ones]}" if ones else ENGLISH_TENS[tens]


def german_number(number: int) -> str:
    """Write 0 to 99 in words: 21 → einundzwanzig."""
    tens, ones = divmod(number, 10)
    if tens < 2:
        return GERMAN_ONES[number]
    unit = "ein" if ones == 1 else GERMAN_ONES[ones]
    return f"{unit}und{GERMAN_TENS[tens]}" if ones else GERMAN_TENS[tens]


def english_noun_phrase(phrase: NounPhrase | Pronoun) -> str:
    """Render the phrase in English, with a or an by the sound of the next word."""
    if isinstance(phrase, Pronoun):
        return phrase.english
    words = [english_number(phrase.numeral)] if phrase.numeral else []
    words += [adjective.english for adjective in phrase.adjectives]
    words.append(phrase.noun.english_plural if phrase.plural else phrase.noun.english)
    determiner = phrase.determiner.english_plural if phrase.plural else phrase.determiner.english
    if determiner == "a":
        vowel_sound = words[0] == "honest" or (words[0][0] in "aeiou" and words[0] != "useful")
        determiner = "an" if vowel_sound else "a"
    return _join([determiner, *words])


def german_noun_phrase(phrase: NounPhrase | Pronoun, case: Case) -> str:
    """Render the phrase in German, declined."""
    if isinstance(phrase, Pronoun):
        return phrase.german
    noun = phrase.noun
    gender: Gender | Literal["plural"] = "plural" if phrase.plural else noun.gender
    bare = phrase.plural and phrase.determiner is lexicon.INDEFINITE
    determiner = lexicon.BARE if bare else phrase.determiner
    ending = adjective_ending(determiner, case, gender)
    words = [german_determiner(determiner, case, gender)]
    if phrase.numeral:
        words.append(german_number(phrase.numeral))
    words += [adjective.german_stem + ending for adjective in phrase.adjectives]
    words.append(german_noun(noun, case, plural=phrase.plural))
    return _join(words)


def german_noun(noun: Noun, case: Case, *, plural: bool) -> str:
    """Decline a noun: the dative plural adds -n unless the plural ends in -n: den Hunden, den Frauen."""
    if not plural:
        return noun.german
    needs_n = case == "dative" and not noun.german_plural.endswith("n")
    return noun.german_plural + "n" * needs_n


def german_determiner(determiner: Determiner, case: Case, gender: Gender | Literal["plural"]) -> str:
    """Return the determiner with its ending; empty for the bare one."""
    ending = STRONG_ENDINGS[case][gender]
    match determiner.declension:
        case "definite":
            return determiner.german_stem + DEFINITE_ENDINGS[ending]
        case "weak":
            return determiner.german_stem + ending
        case "mixed":
            return determiner.german_stem + ("" if (case, gender) in ENDINGLESS else ending)
    return ""


def adjective_ending(determiner: Determiner, case: Case, gender: Gender | Literal["plural"]) -> str:
    """Return the ending: weak after der and dieser, mixed after ein and mein, strong without a determiner."""
    shows_gender = determiner.declension == "mixed" and (case, gender) in ENDINGLESS
    if determiner.declension == "strong" or shows_gender:
        return STRONG_ENDINGS[case][gender]
    return "e" if (case, gender) in WEAK_E else "en"


def english_clause(clause: Clause) -> str:
    """Order subject, verb, recipient, object, complement, company, place, time; a fronted phrase goes first."""
    place, time = (phrase.english if phrase else None for phrase in (clause.place, clause.time))
    company = clause.company
    return _join(
        [
            {"subject": None, "time": time, "place": place}[clause.fronted],
            english_noun_phrase(clause.subject),
            _english_verb_group(clause),
            english_noun_phrase(clause.recipient) if clause.recipient else None,
            english_noun_phrase(clause.object) if clause.object else None,
            clause.complement.english if clause.complement else None,
            f"{company[0].english} {english_noun_phrase(company[1])}" if company else None,
            None if clause.fronted == "place" else place,
            None if clause.fronted == "time" else time,
        ]
    )


def _english_verb_group(clause: Clause) -> str:
    verb, agreement = clause.verb, clause.subject.agreement
    negation = "not" if clause.negated else None
    match clause.tense:
        case "perfect":
            words = [getattr(lexicon.HAVE, agreement), negation, verb.english_participle]
        case "present" if clause.negated and verb is not lexicon.BE:
            words = [getattr(lexicon.DO, agreement), negation, verb.english_infinitive]
        case "present":
            words = [getattr(verb.english, agreement), negation]
        case modal:
            words = [getattr(lexicon.MODALS[modal].english, agreement), negation, verb.english_infinitive]
    return _join(words)


def german_clause(clause: Clause, order: WordOrder) -> str:
    """Put subject and middle field around the finite verb; a participle, infinitive or separable prefix goes last."""
    subject = german_noun_phrase(clause.subject, "nominative")
    finite, closing = _german_verb_group(clause)
    middle = _german_middle_field(clause)
    if order == "verb_final":
        # A separable prefix rejoins its verb: …, weil er den Gast einlädt.
        ending = closing + finite if clause.tense == "present" else f"{closing} {finite}"
        return _join([subject, middle, ending])
    if order == "verb_first":
        return _join([finite, subject, middle, closing])
    if clause.fronted == "subject":
        return _join([subject, finite, middle, closing])
    fronted = clause.time if clause.fronted == "time" else clause.place
    return _join([fronted.german if fronted else None, finite, subject, middle, closing])


def _german_middle_field(clause: Clause) -> str:
    """Order time, dative, accusative, nicht, company, place, complement, without the fronted phrase."""
    place, time = (phrase.german if phrase else None for phrase in (clause.place, clause.time))
    company = clause.company
    return _join(
        [
            None if clause.fronted == "time" else time,
            german_noun_phrase(clause.recipient, "dative") if clause.recipient else None,
            german_noun_phrase(clause.object, clause.verb.object_case) if clause.object else None,
            "nicht" if clause.negated else None,
            f"{company[0].german} {german_noun_phrase(company[1], company[0].case)}" if company else None,
            None if clause.fronted == "place" else place,
            clause.complement.german if clause.complement else None,
        ]
    )


def _german_verb_group(clause: Clause) -> tuple[str, str]:
    """Return the finite verb, and the prefix, participle or infinitive that closes the clause."""
    verb, agreement = clause.verb, clause.subject.agreement
    match clause.tense:
        case "present":
            return getattr(verb.german, agreement), verb.german_prefix
        case "perfect":
            return getattr(verb.german_auxiliary, agreement), verb.german_participle
        case modal:
            return getattr(lexicon.MODALS[modal].german, agreement), verb.german_infinitive


def render(sentence: Sentence) -> SentencePair:
    """Render the sentence in English and in German."""
    main, connective, second = sentence.main, sentence.connective, sentence.second
    english, german = english_clause(main), german_clause(main, "verb_second")
    if connective and second:
        english_second, german_second = english_clause(second), german_clause(second, connective.order)
        if connective.leads:
            english = f"{connective.english}{english_second}, {english}"
            german = f"{connective.german}{german_second}, {german_clause(main, 'verb_first')}"
        else:
            english += connective.english + english_second
            german += connective.german + german_second
    return f"{english[0].upper()}{english[1:]}.", f"{german[0].upper()}{german[1:]}."
