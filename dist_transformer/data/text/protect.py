"""Spans of text that are not translated, such as URLs: a mark stands for each, and afterwards the span for the mark.

A line in capitals is translated in the usual case, and its translation is put in capitals again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from dist_transformer.config.language_codes import base_language
from dist_transformer.data.text.sentences import COMBINING, STOPS, UNSPACED, UNSPACED_CHARACTER
from dist_transformer.data.text.terms import Terms
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS, split_at_marks, without_marks

# Characters of scripts without spaces, and their punctuation, end a URL or a number as a space does.
_LETTER = rf"(?:(?!{UNSPACED})[\w{COMBINING}])"
_BEGIN = rf"(?<!{_LETTER})"
_BETWEEN = "[.,:/'’٫٬–-]"
_FORM = r"[-+0]*+\d*+(?:\.\d++)?+"
# Parentheses and braces belong to a URL in pairs, as in /Dog_(breed) and /{id}.
_INNER = rf"(?:(?!{UNSPACED})[^\s<>\"'(){{}}])*+"
_PAIR = rf"\({_INNER}\)|\{{\{{{_INNER}\}}\}}|\{{{_INNER}\}}"
_PATTERNS = {
    "urls": (
        rf"(?i:(?:https?|ftp)://|www\.)(?>{_PAIR}|(?!{UNSPACED})[^\s<>\"'])*"
        rf"(?>{_PAIR}|(?!{UNSPACED})[^\s<>\"'.,;:!?()\[\]{{}}…“”„‘’‚«»‹›])"
    ),
    # Only from the beginning of what could be a name, so that the time is linear.
    "emails": rf"{_BEGIN}(?<![.+-])(?a:[\w.+-]++@[\w-]+(?:\.[\w-]+)+)",
    # All of a number, or nothing of it, so that 1.5km stays.
    "numbers": rf"{_BEGIN}(?<!\d{_BETWEEN})\d++(?:{_BETWEEN}\d++)*+(?!{_LETTER})",
    "placeholders": (
        rf"\{{\{{[^{{}}]*\}}\}}|[$%#]?\{{[^{{}}\s]*\}}|%(?:\(\w+\)|\d+\$){_FORM}[sdfi@]|%{_FORM}(?:[sdfi](?!\w)|@)"
        r"|</?[A-Za-z][\w-]*\s*/?>"
    ),
}
KINDS, _ANY = tuple(_PATTERNS), re.compile("|".join(_PATTERNS.values()))
_NOT_WITHIN_A_WORD = rf"(?!(?<={_LETTER}){_LETTER})"
_CLOSING = frozenset(STOPS + ",;:)]}»،؛")
_SENTENCE = re.compile(r"((?:^|[.!?]\s)\W*)(\w)")
_TERM = re.compile(f"{TERM_MARKS[0]}[^{TERM_MARKS[1]}]*{TERM_MARKS[1]}")
# Languages in which I is the capital of another letter than i, and these letters.
_DOTTED = ("tr", "az")
_SMALL, _CAPITAL = str.maketrans("Iİ", "ıi"), str.maketrans("iı", "İI")


@dataclass(frozen=True, slots=True)
class ProtectedLine:
    """A line to translate."""

    text: str
    """Text with marks."""
    spans: dict[str, tuple[str, str, str]]
    """Protected spans by their marks, each with the characters before and after it."""
    whole: str = ""
    """Line of nothing but spans and signs, which is its own translation; the text is then empty."""
    is_raised: bool = False
    """Whether the line is in capitals, and the text is not."""
    terms: tuple[str, ...] = ()
    """Terms that the text has for its translation."""
    begun: str = ""
    """Span at the end of the prefix, of which the translation could make another one."""

    @classmethod
    def of(
        cls,
        line: str,
        kinds: Sequence[str],
        marks: Sequence[str],
        *,
        recase: bool,
        prefix: str = "",
        language: str = "",
        terms: Terms | None = None,
    ) -> "ProtectedLine":
        """Replace spans of these kinds by marks, as many as there are, and capitals by the usual case; write terms.

        Args:
            language: that of the line.
            prefix: text that the translation begins with, as it is; it may have some of the spans.
        """
        line = without_marks(line)
        spans: dict[str, tuple[str, str, str]] = {}

        def marked(found: re.Match[str]) -> str:
            if len(spans) == len(marks):
                return found[0]
            mark = marks[len(spans)]
            spans[mark] = (found[0], line[: found.start()][-1:] or " ", line[found.end() :][:1] or " ")
            return mark

        text = re.sub("|".join(_PATTERNS[kind] for kind in _PATTERNS if kind in kinds), marked, line) if kinds else line
        # A word alone may be an abbreviation, and so may some between letters that have no capitals. Many write STRAßE.
        letters = text.replace("ß", "ẞ")
        is_capital = all(map(str.isupper, filter(str.isalpha, letters))) and sum(map(str.isupper, letters.split())) > 1
        is_raised = recase and not prefix and is_capital
        chosen: list[str] = []
        if terms is not None:
            known = {mark: span for mark, (span, *_) in spans.items()}
            text, chosen = terms.annotate(text, in_capitals=is_raised, spans=known)
            spans = {mark: span for mark, span in spans.items() if mark in text}
        if spans and not prefix and not any(map(str.isalpha, text)):
            return cls("", {}, line)
        if is_raised:
            # Terms for the translation stay as they are, and none is a beginning of a sentence.
            written = iter(_TERM.findall(text))
            text = _lower(_TERM.sub(TERM_MARKS[0], text), language)
            text = _SENTENCE.sub(lambda found: found[1] + _upper(found[2], language), text)
            text = re.sub(TERM_MARKS[0], lambda _: next(written), text)
        begun = max((span for span, *_ in spans.values() if prefix.endswith(span)), key=len, default="")
        # Longer spans may hold shorter ones.
        for mark, (span, *_) in sorted(spans.items(), key=lambda each: -len(each[1][0])):
            rest = re.sub(f"{_NOT_WITHIN_A_WORD}{re.escape(span)}{_NOT_WITHIN_A_WORD}", " ", prefix, count=1)
            if rest != prefix:
                prefix = rest
                del spans[mark]
        begun *= begun not in (span for span, *_ in spans.values())
        return cls(text, spans, is_raised=is_raised, terms=tuple(chosen), begun=begun)

    def restore(self, text: str, *, append: bool, language: str = "") -> tuple[str, int]:
        """Put the spans in place of the marks of a translation, each once, and count those without a mark.

        Args:
            append: whether these come at the end.
            language: that of the translation.
        """
        first, *parts = split_at_marks(_upper(text, language) if self.is_raised else text)
        if not parts and not self.spans and not self.begun:
            return self.whole or first, 0
        left, result = dict(self.spans), first.strip()
        for mark, after in zip(parts[::2], parts[1::2], strict=True):
            if mark in left:
                span, before, behind = left.pop(mark)
                result = _join(result, span, beside=before)
                result = _join(result, after.strip(), beside=behind)
            else:
                result = _join(result, after.strip())
        if self.begun and self.begun not in (found[0] for found in _ANY.finditer(result)):
            left[""] = self.begun, " ", " "
        for span, *_ in left.values() if append else ():
            result = _join(result, span)
        return result, len(left)


def _lower(text: str, language: str) -> str:
    return (text.translate(_SMALL) if base_language(language) in _DOTTED else text).lower()


def _upper(text: str, language: str) -> str:
    return (text.translate(_CAPITAL) if base_language(language) in _DOTTED else text).upper()


def _join(text: str, more: str, *, beside: str = " ") -> str:
    """Join texts by a space, but not beside characters of scripts without spaces, or before closing punctuation.

    Args:
        beside: character next to a span in the source; next to the same one here there is no space, either, and next to
            any letter if it is one, as in <b>word</b>.
    """
    if not text or not more:
        return text + more
    ends = text[-1], more[0]
    is_letter = beside.isalnum() and not UNSPACED_CHARACTER.match(beside)
    glued = beside in ends or (is_letter and any(map(str.isalnum, ends)))
    # As in 15-Zoll.
    glued |= more[0] == "-" and more[1:2].isalnum()
    glued |= any(map(UNSPACED_CHARACTER.match, ends))
    return text + " " * (not (glued or ends[0] in "([{«„¿¡" or ends[1] in _CLOSING)) + more
