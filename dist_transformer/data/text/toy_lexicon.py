"""Words of the toy English–German grammar in `toy_corpus.py`.

Every English word has one German word and vice versa, so that a translation is either right or wrong. Not included are
nouns of the n-declension (der Junge, den Jungen), uncountable nouns, words with several senses, and words whose first
letter and sound differ (honest, useful).

In the tables, `-` is an empty field, and kinds are letters: p person, a animal, f food, w writing, t thing.
"""

from collections import namedtuple

Pair = tuple[str, str]
"""English and German."""
KINDS = "pafwt"


Determiner = namedtuple("Determiner", "english english_plural german_stem")
Noun = namedtuple("Noun", "kind english english_plural article german german_plural")
Adjective = namedtuple("Adjective", "kinds english german german_stem")
Verb = namedtuple(
    "Verb",
    "english english_third english_past german german_third german_participle german_auxiliary subject_kinds "
    "dative_kinds accusative_kinds complement",
)
"""Infinitive, third person, and past or participle in each language; `|` ends a separable prefix."""


def _rows(table: str) -> list[list[str]]:
    lines = table.strip().replace(",", "\n").splitlines()
    return [[field.strip("-").replace("_", " ") for field in line.split()] for line in lines]


def _pairs(text: str) -> list[Pair]:
    return [(english, german) for english, german in (words.split(" = ") for words in text.split(", "))]


_NOUNS = """
p man men der Mann Männer, p woman women die Frau Frauen, p child children das Kind Kinder
p girl girls das Mädchen Mädchen, p teacher teachers der Lehrer Lehrer, p doctor doctors der Arzt Ärzte
p king kings der König Könige, p queen queens die Königin Königinnen, p guest guests der Gast Gäste
p brother brothers der Bruder Brüder, p sister sisters die Schwester Schwestern
p daughter daughters die Tochter Töchter, p friend friends der Freund Freunde
a dog dogs der Hund Hunde, a cat cats die Katze Katzen, a horse horses das Pferd Pferde
a bird birds der Vogel Vögel, a mouse mice die Maus Mäuse, a goose geese die Gans Gänse
f apple apples der Apfel Äpfel, f onion onions die Zwiebel Zwiebeln, f egg eggs das Ei Eier
w letter letters der Brief Briefe, w newspaper newspapers die Zeitung Zeitungen, w book books das Buch Bücher
t table tables der Tisch Tische, t chair chairs der Stuhl Stühle, t lamp lamps die Lampe Lampen
t clock clocks die Uhr Uhren, t knife knives das Messer Messer, t picture pictures das Bild Bilder
t key keys der Schlüssel Schlüssel, t bicycle bicycles das Fahrrad Fahrräder
"""
# The last word takes the endings.
_ADJECTIVES = """
pafwt old alt alt, pafwt small klein klein, pafwt big groß groß, pafwt beautiful schön schön
pa young jung jung, pa strong stark stark, pa tired müde müd, pa hungry hungrig hungrig
p rich reich reich, p friendly freundlich freundlich, awt ugly hässlich hässlich, fwt expensive teuer teur
fwt cheap billig billig, wt new neu neu, f fresh frisch frisch, w boring langweilig langweilig
ft red rot rot, at black schwarz schwarz, at white weiß weiß
"""
_VERBS = """
be is was sein ist gewesen sein pa - - state
sleep sleeps slept schlafen schläft geschlafen haben pa - - place
work works worked arbeiten arbeitet gearbeitet haben p - - place
dance dances danced tanzen tanzt getanzt haben p - - place
stay stays stayed bleiben bleibt geblieben sein pa - - place
travel travels travelled reisen reist gereist sein p - - goal
fly flies flew fliegen fliegt geflogen sein p - - goal
see sees saw sehen sieht gesehen haben pa - pafwt place
find finds found finden findet gefunden haben pa - pafwt place
look_for looks_for looked_for suchen sucht gesucht haben p - pafwt place
visit visits visited besuchen besucht besucht haben p - p place
invite invites invited ein|laden lädt eingeladen haben p - p -
call calls called an|rufen ruft angerufen haben p - p -
buy buys bought kaufen kauft gekauft haben p - afwt place
write writes wrote schreiben schreibt geschrieben haben p - w place
eat eats ate essen isst gegessen haben pa - f place
forget forgets forgot vergessen vergisst vergessen haben p - fwt place
help helps helped helfen hilft geholfen haben pa pa - place
thank thanks thanked danken dankt gedankt haben p p - -
follow follows followed folgen folgt gefolgt sein pa pa - -
give gives gave geben gibt gegeben haben p p fwt -
show shows showed zeigen zeigt gezeigt haben p p afwt -
send sends sent schicken schickt geschickt haben p p fwt -
say says said sagen sagt gesagt haben p - - that
believe believes believed glauben glaubt geglaubt haben p - - that
hope hopes hoped hoffen hofft gehofft haben p - - that
"""
DETERMINERS = [Determiner(*row) for row in _rows("the the d, this these dies, a - ein, my my mein, our our unser")]
NOUNS = {kind: [Noun(*row) for row in _rows(_NOUNS) if kind == row[0]] for kind in KINDS}
ADJECTIVES = {kind: [Adjective(*row) for row in _rows(_ADJECTIVES) if kind in row[0]] for kind in KINDS}
VERBS = [Verb(*row) for row in _rows(_VERBS)]

# In these forms a verb goes with I, he, and we or they.
ENGLISH_BE = {"present": ("am", "is", "are"), "past": ("was", "was", "were")}
ENGLISH_DO = {"present": ("do", "does", "do"), "past": ("did", "did", "did")}
GERMAN_SEIN = {"present": ("bin", "ist", "sind"), "past": ("war", "war", "waren")}
GERMAN_HABEN = ("habe", "hat", "haben")
MODALS = {
    "will": ("werde", "wird", "werden"),
    "can": ("kann", "kann", "können"),
    "must": ("muss", "muss", "müssen"),
    "should": ("sollte", "sollte", "sollten"),
}
PRONOUNS = list(zip(_pairs("I = ich, he = er, she = sie, we = wir, they = sie"), (0, 1, 1, 2, 2), strict=True))
"""Pronouns, and the index of their verb form."""
NOTHING: Pair = ("", "")
PLACES = _pairs(
    "in the garden = im Garten, in the kitchen = in der Küche, in the forest = im Wald, at the station = am Bahnhof, "
    "in front of the school = vor der Schule, between the houses = zwischen den Häusern"
)
COMPLEMENTS = {
    "": [NOTHING],
    "that": [NOTHING],
    "place": PLACES + [NOTHING] * len(PLACES),
    "state": PLACES + _pairs("tired = müde, hungry = hungrig, old = alt, young = jung, strong = stark, sad = traurig"),
    "goal": _pairs("to Berlin = nach Berlin, to Munich = nach München, to Switzerland = in die Schweiz"),
}
TIMES = {
    "present": _pairs("today = heute, every day = jeden Tag, in the morning = am Morgen, in winter = im Winter"),
    "past": _pairs("yesterday = gestern, on Sunday = am Sonntag, last week = letzte Woche"),
    **dict.fromkeys(MODALS, _pairs("tomorrow = morgen, soon = bald, this evening = heute Abend")),
}
