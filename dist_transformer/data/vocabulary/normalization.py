"""Normalization of text before it is split into pieces.

The rules are those of the tokenizers library, so that its files hold them, and other programs apply them.
"""

import re
import unicodedata
from typing import Literal

from tokenizers import Regex, normalizers

Normalization = Literal["clean", "clean-nfc", "nfkc", "nfc"]
"""Rule for text. nfkc replaces variants of a character, such as a full-width comma by `,` and ½ by 1⁄2; nfc keeps them.
clean is nfkc, and clean-nfc is nfc, after characters that nobody sees are removed and every white space has become a
space."""
DEFAULT_NORMALIZATION: Normalization = "clean"
"""Rule of a vocabulary that is learned."""

_FORMS = {"clean": "nfkc", "clean-nfc": "nfc", "nfkc": "nfkc", "nfc": "nfc"}

# Scripts that join letters, or keep them apart, by U+200C and U+200D.
_SCRIPTS = (
    *("Arabic", "Bengali", "Devanagari", "Gujarati", "Gurmukhi", "Kannada", "Khmer", "Malayalam", "Mongolian"),
    *("Myanmar", "Nko", "Oriya", "Sinhala", "Syriac", "Tamil", "Telugu", "Tibetan"),
)
# Their marks and letters that Unicode counts to no single script: tatweel, vowel marks, Vedic signs.
_SHARED = r"\x{640}\x{64B}-\x{655}\x{670}\x{951}-\x{954}\x{1CD0}-\x{1CFA}"
_LETTER = "[" + "".join(rf"\p{{{script}}}" for script in _SCRIPTS) + _SHARED + r"&&[\p{L}\p{M}]]"
_PICTURE = r"\p{Extended_Pictographic}"
_SKIN = r"[\x{1F3FB}-\x{1F3FF}]"
_JOINERS = r"\x{200C}\x{200D}"
# Control and format characters, byte order marks, variation selectors, fillers; not white space, and not the joiners.
_UNSEEN = rf"[\p{{Cc}}\p{{Cf}}\p{{Default_Ignorable_Code_Point}}&&[^\t-\r\x{{85}}{_JOINERS}]]"
# Of several joiners in a row only the first can have a letter before it.
_REPEATED = rf"(?<=[{_JOINERS}])[{_JOINERS}]+"
# A joiner that is not between two letters of such a script, nor, for U+200D, between two pictures.
_LONE = (
    rf"(?<!{_LETTER})\x{{200C}}|\x{{200C}}(?!{_LETTER})"
    rf"|(?<!{_LETTER}|{_PICTURE}|{_SKIN})\x{{200D}}"
    rf"|(?<={_LETTER})\x{{200D}}(?!{_LETTER})|(?<={_PICTURE}|{_SKIN})\x{{200D}}(?!{_PICTURE})"
)
# White space except the space itself: replacing each space by a space took half of the time of cleaning.
_WHITE = r"[\t-\r\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}]"
_REPLACED = ((_UNSEEN, ""), (_REPEATED, ""), (_LONE, ""), (_WHITE, " "))

# Printable characters that are removed: those of Default_Ignorable_Code_Point (DerivedCoreProperties.txt).
_IGNORABLE = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")
# A letter, a digit or a sign that is not removed.
_VISIBLE = re.compile(r"[^\W\u115f\u1160\u3164\uffa0]")


def clean(text: str, normalization: Normalization | None) -> str:
    """Do the first step of a rule: remove characters that nobody sees, and make every white space a space.

    A text that is cleaned is split into the same pieces. nfkc and nfc clean nothing.
    """
    return _CLEANER.normalize_str(text) if cleans(normalization) and may_be_cleaned(text) else text


def may_be_cleaned(text: str) -> bool:
    """Return whether a text may hold a character that cleaning replaces; quick, and True for some others."""
    return not text.isprintable() or _IGNORABLE.search(text) is not None


def is_blank(text: str, normalization: Normalization | None) -> bool:
    """Return whether a rule leaves nothing of a text but white space."""
    # Nearly every text has a letter at its beginning, so the quick check pays.
    return _VISIBLE.search(text) is None and not clean(text, normalization).strip()


def cleans(normalization: Normalization | None) -> bool:
    """Return whether a rule removes what nobody sees."""
    return normalization in ("clean", "clean-nfc")


def folds(normalization: Normalization | None) -> bool:
    """Return whether a rule replaces variants of a character."""
    return normalization is not None and _FORMS[normalization] == "nfkc"


def rule_name(normalization: Normalization) -> str:
    """Return the name of a rule for reports, its steps in order."""
    return "clean text, " * cleans(normalization) + _FORMS[normalization].upper()


def normalizer_of(normalization: Normalization, *, lowercase: bool) -> normalizers.Sequence:
    """Return a rule as the tokenizers library applies it. It computes NFKC and NFC by Unicode 12."""
    steps: list[normalizers.Normalizer] = []
    if cleans(normalization):
        steps += _cleaning_steps()
    steps.append(normalizers.NFKC() if folds(normalization) else normalizers.NFC())
    if lowercase:
        steps.append(normalizers.Lowercase())
    return normalizers.Sequence(steps)


def _cleaning_steps() -> list[normalizers.Normalizer]:
    return [normalizers.Replace(Regex(pattern), content) for pattern, content in _REPLACED]


_CLEANER = normalizers.Sequence(_cleaning_steps())


def first_folded(text: str) -> str | None:
    """Return the first character of `text` that NFKC replaces and NFC keeps, such as a full-width comma, or None."""
    # Nearly every line of most languages is normalised already, so the quick check pays.
    return None if unicodedata.is_normalized("NFKC", text) else next(filter(_is_folded, text), None)


def _is_folded(character: str) -> bool:
    return unicodedata.normalize("NFKC", character) != unicodedata.normalize("NFC", character)
