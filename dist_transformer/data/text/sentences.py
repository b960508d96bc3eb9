"""Ends of sentences in a text."""

import itertools
import re
import unicodedata
from collections.abc import Mapping

from dist_transformer.data.vocabulary.placeholders import TERM_MARKS

# Han, kana, bopomofo, and the signs written with them; not Hangul, which has spaces.
_EAST_ASIAN = (
    r"\u2e80-\u2fff\u3001-\u312f\u3190-\u31ff\u3220-\u325f\u3280-\u33ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
    r"\ufe30-\ufe4f\uff01-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
# Thai, Lao, Myanmar, Khmer; not their digits.
_SOUTHEAST_ASIAN = (
    r"\u0e01-\u0e3a\u0e40-\u0e4f\u0e5a\u0e5b\u0e81-\u0ecf\u0edc-\u0edf\u1000-\u103f\u104a-\u108f\u109a-\u109f"
    r"\u1780-\u17dd\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f"
)
EAST_ASIAN, UNSPACED = f"[{_EAST_ASIAN}]", f"[{_EAST_ASIAN}{_SOUTHEAST_ASIAN}]"
"""Characters of scripts without spaces between words, for regular expressions; East Asian ones have none between
sentences, either, and each may be a word."""
EAST_ASIAN_CHARACTER, UNSPACED_CHARACTER = re.compile(EAST_ASIAN), re.compile(UNSPACED)
# All of Unicode's first plane but Han, Hangul and private characters.
_SCRIPTS = map(chr, (*range(0x300, 0x3100), *range(0xA000, 0xAC00), *range(0xFB00, 0xFE30)))
COMBINING = "\u200c\u200d" + "".join(each for each in _SCRIPTS if unicodedata.category(each)[0] == "M")
"""Characters that belong to the letter before them, such as vowel signs, for a set of a regular expression."""
# These end a sentence even without white space after them; a full stop may be part of a number.
_SURE_STOPS = "。｡！？।॥؟۔።။។"
STOPS = f".!?…{_SURE_STOPS}"
"""Signs that end a sentence."""
# Such signs, then closing quotes and brackets, then white space. Search takes linear time, because the expression
# matches wherever its first sign occurs.
_STOP = re.compile(rf"""[{STOPS}]+["'”’»›」』）)\]]*(?P<space>\s*)""")
# Before a full stop, these end no sentence: titles, references and what introduces more; a single letter (J. S. Bach,
# z. B.) and letters with full stops between them (e.g., u.a.); a number of one or two digits (am 3. Oktober).
_ABBREVIATION = re.compile(
    r"abb|abs|approx|bd|bsp|bzw|ca|capt|cf|dept|dipl|dr|eds|etw|evtl|ff|frl|ggf|gov|hr|ing|inkl|jr|lt|ltd|mio|mlle|mme"
    r"|mr|mrd|mrs|ms|nr|pp|prof|resp|rev|sgt|sog|sra|st|tel|univ|vgl|vs|zzgl|(?:[^\W\d]\.)*[^\W\d]|\d{1,2}",
    re.IGNORECASE,
)
_WORD_BEFORE = re.compile(r"""[^\s"'“‘„«‚(\[]*$""")
# Longer than any abbreviation.
_LOOK_BEHIND = 12


def split_sentences(text: str, spans: Mapping[str, str] = {}) -> list[str]:
    """Cut a text at the ends of its sentences. No part is blank, and they hold all of the text except white space.

    A full stop ends no sentence after an abbreviation, an initial or a short number, or before a small letter, unless
    the text has no capitals.

    Args:
        spans: what characters of the text stand for.
    """
    return [sentence.strip() for sentence in _sentences(text, spans) if not sentence.isspace()]


def has_several_sentences(text: str) -> bool:
    """Return whether `split_sentences` cuts a text; most lines of one sentence are found without it."""
    stop = _STOP.search(text)
    return stop is not None and stop.end() < len(text) and len(split_sentences(text)) > 1


def _sentences(text: str, spans: Mapping[str, str]) -> list[str]:
    ends = [0]
    has_capitals, has_terms = text != text.lower(), TERM_MARKS[0] in text
    for stop in _STOP.finditer(text):
        if has_terms and text.count(TERM_MARKS[0], 0, stop.end()) > text.count(TERM_MARKS[1], 0, stop.end()):
            # In a term for the translation.
            continue
        following = text[stop.end() : stop.end() + 1]
        # Spaced dots, ". . .", belong to the sentence before them.
        if len(ends) > 1 and stop.start() == ends[-1]:
            ends.pop()
        spaced = stop["space"] and not _continues(text, stop, spans, has_capitals=has_capitals)
        if spaced or any(sign in _SURE_STOPS for sign in stop.group()) or EAST_ASIAN_CHARACTER.match(following):
            ends.append(stop.end())
    return [text[start:end] for start, end in itertools.pairwise([*ends, len(text)]) if end > start]


def _continues(text: str, stop: re.Match[str], spans: Mapping[str, str], *, has_capitals: bool) -> bool:
    """Tell whether the sentence continues after a full stop, or dots, and white space."""
    if stop.group().strip().strip(".…"):
        return False
    if has_capitals and text[stop.end() : stop.end() + 1].islower():
        return True
    if stop.group().strip() != ".":
        return False
    behind = _WORD_BEFORE.search(text, max(0, stop.start() - _LOOK_BEHIND), stop.start())
    return behind is not None and _ABBREVIATION.fullmatch(spans.get(behind[0], behind[0])) is not None
