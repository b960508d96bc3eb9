"""Words of the toy English–German grammar in `toy_corpus.py`.

Every English word has one German word and vice versa, so that a translation is either right or wrong. Not included are
nouns of the n-declension (der Junge, den Jungen), uncountable nouns, and words with several senses.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Case = Literal["nominative", "accusative", "dative"]
Gender = Literal["masculine", "feminine", "neuter"]
Kind = Literal["person", "animal", "food", "text", "thing"]
Agreement = Literal["first", "third", "plural"]
Complement = Literal["none", "destination", "price", "predicate"]

PERSON: tuple[Kind, ...] = ("person",)
ANIMATE: tuple[Kind, ...] = ("person", "animal")
OBJECT: tuple[Kind, ...] = ("food", "text", "thing")
ANYTHING: tuple[Kind, ...] = ANIMATE + OBJECT


@dataclass(frozen=True, slots=True)
class Phrase:
    """A word or words that never change form."""

    english: str
    german: str


@dataclass(frozen=True, slots=True)
class Noun:
    """A countable noun with its plurals."""

    english: str
    english_plural: str
    german: str
    german_plural: str
    gender: Gender
    kind: Kind


@dataclass(frozen=True, slots=True)
class Adjective:
    """An adjective, and the kinds of noun that it may describe."""

    english: str
    german: str
    german_stem: str
    """Stem to which endings are added: müde → müd-, teuer → teur-."""
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, slots=True)
class Preposition:
    """A preposition and the case that it governs in German."""

    english: str
    german: str
    case: Case


class Finite(NamedTuple):
    """Present-tense forms of a verb: I …, he …, we/they …."""

    first: str
    third: str
    plural: str


@dataclass(frozen=True, slots=True)
class Modal:
    """An auxiliary verb that takes an infinitive."""

    english: Finite
    german: Finite


@dataclass(frozen=True, kw_only=True, slots=True)
class Verb:
    """A full verb: its forms in both languages and the phrases that it requires."""

    english: Finite
    english_infinitive: str
    english_participle: str
    german: Finite
    """Forms without the separable prefix: (sie) laden."""
    german_infinitive: str
    german_participle: str
    german_prefix: str = ""
    german_auxiliary: Finite
    """Auxiliary of the perfect tense: haben or sein."""
    subject_kinds: tuple[Kind, ...] = PERSON
    object_kinds: tuple[Kind, ...] = ()
    object_case: Case = "accusative"
    takes_recipient: bool = False
    prepositions: tuple[Preposition, ...] = ()
    complement: Complement = "none"


@dataclass(frozen=True, slots=True)
class Determiner:
    """A determiner. `german_stem` takes endings; `declension` decides them and those of the adjective that follows."""

    english: str
    english_plural: str
    german_stem: str
    declension: Literal["definite", "weak", "mixed", "strong"]


@dataclass(frozen=True, slots=True)
class Pronoun:
    """A pronoun in subject position."""

    english: str
    german: str
    agreement: Agreement


HAVE = Finite("have", "has", "have")
DO = Finite("do", "does", "do")
HABEN = Finite("habe", "hat", "haben")
SEIN = Finite("bin", "ist", "sind")

WITH = Preposition("with", "mit", "dative")
WITHOUT = Preposition("without", "ohne", "accusative")
FOR = Preposition("for", "für", "accusative")

PRONOUNS = (
    Pronoun("I", "ich", "first"),
    Pronoun("he", "er", "third"),
    Pronoun("she", "sie", "third"),
    Pronoun("we", "wir", "plural"),
    Pronoun("they", "sie", "plural"),
)

THE = Determiner("the", "the", "d", "definite")
THIS = Determiner("this", "these", "dies", "weak")
EVERY = Determiner("every", "", "jed", "weak")
INDEFINITE = Determiner("a", "", "ein", "mixed")
NO = Determiner("no", "no", "kein", "mixed")
MY = Determiner("my", "my", "mein", "mixed")
OUR = Determiner("our", "our", "unser", "mixed")
BARE = Determiner("", "", "", "strong")

MODALS = {
    "future": Modal(Finite("will", "will", "will"), Finite("werde", "wird", "werden")),
    "can": Modal(Finite("can", "can", "can"), Finite("kann", "kann", "können")),
    "must": Modal(Finite("must", "must", "must"), Finite("muss", "muss", "müssen")),
    "should": Modal(Finite("should", "should", "should"), Finite("sollte", "sollte", "sollten")),
    "want": Modal(Finite("want to", "wants to", "want to"), Finite("will", "will", "wollen")),
}


def _nouns(kind: Kind, table: str) -> tuple[Noun, ...]:
    """Read lines of `english plural article German plural`."""
    genders: dict[str, Gender] = {"der": "masculine", "die": "feminine", "das": "neuter"}
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(Noun(en, en_plural, de, de_plural, genders[der], kind) for en, en_plural, der, de, de_plural in rows)


PEOPLE = _nouns(
    "person",
    """
    man men der Mann Männer
    woman women die Frau Frauen
    child children das Kind Kinder
    girl girls das Mädchen Mädchen
    teacher teachers der Lehrer Lehrer
    doctor doctors der Arzt Ärzte
    king kings der König Könige
    queen queens die Königin Königinnen
    baker bakers der Bäcker Bäcker
    brother brothers der Bruder Brüder
    sister sisters die Schwester Schwestern
    friend friends der Freund Freunde
    guest guests der Gast Gäste
    daughter daughters die Tochter Töchter
    """,
)
ANIMALS = _nouns(
    "animal",
    """
    dog dogs der Hund Hunde
    cat cats die Katze Katzen
    horse horses das Pferd Pferde
    bird birds der Vogel Vögel
    mouse mice die Maus Mäuse
    goose geese die Gans Gänse
    wolf wolves der Wolf Wölfe
    """,
)
FOODS = _nouns(
    "food",
    """
    apple apples der Apfel Äpfel
    egg eggs das Ei Eier
    cake cakes der Kuchen Kuchen
    onion onions die Zwiebel Zwiebeln
    cherry cherries die Kirsche Kirschen
    """,
)
TEXTS = _nouns(
    "text",
    """
    book books das Buch Bücher
    letter letters der Brief Briefe
    newspaper newspapers die Zeitung Zeitungen
    """,
)
THINGS = _nouns(
    "thing",
    """
    table tables der Tisch Tische
    chair chairs der Stuhl Stühle
    lamp lamps die Lampe Lampen
    clock clocks die Uhr Uhren
    box boxes die Kiste Kisten
    knife knives das Messer Messer
    key keys der Schlüssel Schlüssel
    picture pictures das Bild Bilder
    umbrella umbrellas der Regenschirm Regenschirme
    flower flowers die Blume Blumen
    bicycle bicycles das Fahrrad Fahrräder
    """,
)
NOUNS: dict[Kind, tuple[Noun, ...]] = {
    "person": PEOPLE,
    "animal": ANIMALS,
    "food": FOODS,
    "text": TEXTS,
    "thing": THINGS,
}

ADJECTIVES = (
    Adjective("old", "alt", "alt", ANYTHING),
    Adjective("small", "klein", "klein", ANYTHING),
    Adjective("big", "groß", "groß", ANYTHING),
    Adjective("beautiful", "schön", "schön", ANYTHING),
    Adjective("young", "jung", "jung", ANIMATE),
    Adjective("strong", "stark", "stark", ANIMATE),
    Adjective("sad", "traurig", "traurig", ANIMATE),
    Adjective("tired", "müde", "müd", ANIMATE),
    Adjective("hungry", "hungrig", "hungrig", ANIMATE),
    Adjective("rich", "reich", "reich", PERSON),
    Adjective("friendly", "freundlich", "freundlich", PERSON),
    Adjective("honest", "ehrlich", "ehrlich", PERSON),
    Adjective("new", "neu", "neu", ("text", "thing")),
    Adjective("expensive", "teuer", "teur", OBJECT),
    Adjective("cheap", "billig", "billig", OBJECT),
    Adjective("ugly", "hässlich", "hässlich", ("animal", "thing")),
    Adjective("useful", "nützlich", "nützlich", ("text", "thing")),
    Adjective("fresh", "frisch", "frisch", ("food",)),
    Adjective("boring", "langweilig", "langweilig", ("text",)),
)
COLOURS = (
    Adjective("red", "rot", "rot", ("thing", "food")),
    Adjective("black", "schwarz", "schwarz", ("animal", "thing")),
    Adjective("white", "weiß", "weiß", ("animal", "thing")),
    Adjective("brown", "braun", "braun", ("animal", "thing")),
)
ADJECTIVES_BY_KIND: dict[Kind, tuple[Adjective, ...]] = {
    kind: tuple(adjective for adjective in ADJECTIVES if kind in adjective.kinds) for kind in ANYTHING
}
COLOURS_BY_KIND: dict[Kind, tuple[Adjective, ...]] = {
    kind: tuple(colour for colour in COLOURS if kind in colour.kinds) for kind in ANYTHING
}

PLACES = (
    Phrase("in the garden", "im Garten"),
    Phrase("in the kitchen", "in der Küche"),
    Phrase("in the forest", "im Wald"),
    Phrase("in the village", "im Dorf"),
    Phrase("at the station", "am Bahnhof"),
    Phrase("in front of the school", "vor der Schule"),
    Phrase("behind the church", "hinter der Kirche"),
    Phrase("next to the river", "neben dem Fluss"),
    Phrase("under the bridge", "unter der Brücke"),
    Phrase("between the houses", "zwischen den Häusern"),
)
DESTINATIONS = (
    Phrase("to Berlin", "nach Berlin"),
    Phrase("to Munich", "nach München"),
    Phrase("to Vienna", "nach Wien"),
    Phrase("to Cologne", "nach Köln"),
    Phrase("to Switzerland", "in die Schweiz"),
    Phrase("to the city", "in die Stadt"),
)

TODAY = Phrase("today", "heute")
THIS_EVENING = Phrase("this evening", "heute Abend")
ON_SUNDAY = Phrase("on Sunday", "am Sonntag")
PRESENT_TIMES = (
    TODAY,
    ON_SUNDAY,
    Phrase("every day", "jeden Tag"),
    Phrase("in the morning", "am Morgen"),
    Phrase("at night", "in der Nacht"),
    Phrase("in summer", "im Sommer"),
    Phrase("in winter", "im Winter"),
)
PERFECT_TIMES = (TODAY, THIS_EVENING, Phrase("this week", "diese Woche"), Phrase("this year", "dieses Jahr"))
FUTURE_TIMES = (
    TODAY,
    THIS_EVENING,
    ON_SUNDAY,
    Phrase("tomorrow", "morgen"),
    Phrase("soon", "bald"),
    Phrase("next week", "nächste Woche"),
)


def _verb(
    english: str,
    german: str,
    *,
    prefix: str = "",
    auxiliary: Finite = HABEN,
    subjects: tuple[Kind, ...] = PERSON,
    objects: tuple[Kind, ...] = (),
    case: Case = "accusative",
    recipient: bool = False,
    prepositions: tuple[Preposition, ...] = (),
    complement: Complement = "none",
) -> Verb:
    """Build a verb with regular forms from `infinitive, third person, participle` in each language."""
    infinitive, third, participle = english.split(", ")
    german_infinitive, german_third, german_participle = german.split(", ")
    german_plural = german_infinitive.removeprefix(prefix)
    return Verb(
        english=Finite(infinitive, third, infinitive),
        english_infinitive=infinitive,
        english_participle=participle,
        german=Finite(german_plural.removesuffix("n"), german_third, german_plural),
        german_infinitive=german_infinitive,
        german_participle=german_participle,
        german_prefix=prefix,
        german_auxiliary=auxiliary,
        subject_kinds=subjects,
        object_kinds=objects,
        object_case=case,
        takes_recipient=recipient,
        prepositions=prepositions,
        complement=complement,
    )


BE = Verb(
    english=Finite("am", "is", "are"),
    english_infinitive="be",
    english_participle="been",
    german=SEIN,
    german_infinitive="sein",
    german_participle="gewesen",
    german_auxiliary=SEIN,
    subject_kinds=ANYTHING,
    complement="predicate",
)
KNOW = Verb(
    english=Finite("know", "knows", "know"),
    english_infinitive="know",
    english_participle="known",
    german=Finite("weiß", "weiß", "wissen"),
    german_infinitive="wissen",
    german_participle="gewusst",
    german_auxiliary=HABEN,
)
COST = _verb(
    "cost, costs, cost", "kosten, kostet, gekostet", subjects=("animal", "food", "text", "thing"), complement="price"
)
REPORTING_VERBS = (
    KNOW,
    _verb("say, says, said", "sagen, sagt, gesagt"),
    _verb("believe, believes, believed", "glauben, glaubt, geglaubt"),
    _verb("hope, hopes, hoped", "hoffen, hofft, gehofft"),
)
COMPANY = (WITH, WITHOUT)
INTRANSITIVE_VERBS = (
    _verb("sleep, sleeps, slept", "schlafen, schläft, geschlafen", subjects=ANIMATE),
    _verb("play, plays, played", "spielen, spielt, gespielt", subjects=ANIMATE, prepositions=COMPANY),
    _verb("stay, stays, stayed", "bleiben, bleibt, geblieben", auxiliary=SEIN, subjects=ANIMATE, prepositions=COMPANY),
    _verb("work, works, worked", "arbeiten, arbeitet, gearbeitet", prepositions=COMPANY),
    _verb("dance, dances, danced", "tanzen, tanzt, getanzt", prepositions=COMPANY),
    _verb("sing, sings, sung", "singen, singt, gesungen", prepositions=COMPANY),
)
MOTION_VERBS = (
    _verb(
        "travel, travels, travelled",
        "reisen, reist, gereist",
        auxiliary=SEIN,
        prepositions=COMPANY,
        complement="destination",
    ),
    _verb(
        "fly, flies, flown",
        "fliegen, fliegt, geflogen",
        auxiliary=SEIN,
        prepositions=COMPANY,
        complement="destination",
    ),
)
TRANSITIVE_VERBS = (
    _verb("see, sees, seen", "sehen, sieht, gesehen", subjects=ANIMATE, objects=ANYTHING),
    _verb("find, finds, found", "finden, findet, gefunden", subjects=ANIMATE, objects=ANYTHING),
    _verb("hear, hears, heard", "hören, hört, gehört", subjects=ANIMATE, objects=ANIMATE),
    _verb("look for, looks for, looked for", "suchen, sucht, gesucht", objects=ANYTHING),
    _verb("visit, visits, visited", "besuchen, besucht, besucht", objects=PERSON),
    _verb("invite, invites, invited", "einladen, lädt, eingeladen", prefix="ein", objects=PERSON),
    _verb("call, calls, called", "anrufen, ruft, angerufen", prefix="an", objects=PERSON),
    _verb("buy, buys, bought", "kaufen, kauft, gekauft", objects=("animal", *OBJECT), prepositions=(FOR,)),
    _verb("draw, draws, drawn", "zeichnen, zeichnet, gezeichnet", objects=ANYTHING, prepositions=(FOR,)),
    _verb("write, writes, written", "schreiben, schreibt, geschrieben", objects=("text",), prepositions=(FOR,)),
    _verb("read, reads, read", "lesen, liest, gelesen", objects=("text",)),
    _verb("eat, eats, eaten", "essen, isst, gegessen", subjects=ANIMATE, objects=("food",)),
    _verb("carry, carries, carried", "tragen, trägt, getragen", objects=OBJECT, prepositions=(FOR,)),
    _verb("forget, forgets, forgotten", "vergessen, vergisst, vergessen", objects=OBJECT),
    _verb("help, helps, helped", "helfen, hilft, geholfen", subjects=ANIMATE, objects=ANIMATE, case="dative"),
    _verb("thank, thanks, thanked", "danken, dankt, gedankt", objects=PERSON, case="dative"),
    _verb(
        "follow, follows, followed",
        "folgen, folgt, gefolgt",
        auxiliary=SEIN,
        subjects=ANIMATE,
        objects=ANIMATE,
        case="dative",
    ),
)
DITRANSITIVE_VERBS = (
    _verb("give, gives, given", "geben, gibt, gegeben", objects=OBJECT, recipient=True),
    _verb("show, shows, shown", "zeigen, zeigt, gezeigt", objects=("animal", *OBJECT), recipient=True),
    _verb("send, sends, sent", "schicken, schickt, geschickt", objects=OBJECT, recipient=True),
)
