"""Spans of text that are not translated, such as URLs: a mark stands for each, and afterwards the span for the mark.

A line in capitals is translated in the usual case, and its translation is put in capitals again.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from dist_transformer.base.errors import UserError
from dist_transformer.data.vocabulary.placeholders import split_at_marks, without_marks

_PATTERNS = {
    "placeholders": r"\{\{[^{}]*\}\}|\$?\{[^{}\s]*\}|%\(\w+\)[sdfi]|%\d+\$[sd]|%[sdfi](?!\w)|</?[A-Za-z][\w-]*\s*/?>",
    "urls": r"(?:(?:https?|ftp)://|www\.)[^\s<>\"']*[^\s<>\"'.,;:!?()\[\]{}]/?",
    "emails": r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+",
    "numbers": r"(?<!\w)\d+(?:[.,:/-]\d+)*(?!\w)",
}
_SENTENCE = re.compile(r"((?:^|[.!?]\s)\W*)(\w)")


def parse_kinds(values: Sequence[str]) -> tuple[str, ...]:
    """Return kinds of spans, which are apart or separated by commas, in the order in which they are looked for.

    Raises:
        UserError: a kind is unknown.
    """
    given = ",".join(values).split(",") if values else []
    if unknown := [kind for kind in given if kind not in _PATTERNS]:
        raise UserError(f"protect {unknown[0]}: it must be one or more of {', '.join(_PATTERNS)}")
    return tuple(kind for kind in _PATTERNS if kind in given)


@dataclass(frozen=True, slots=True)
class ProtectedLine:
    """A line to translate."""

    text: str
    """Text with marks."""
    spans: dict[str, tuple[str, str, str]]
    """Protected spans by their marks, each with the characters before and after it."""
    is_raised: bool = False
    """Whether the line is in capitals, and the text is not."""

    @classmethod
    def of(cls, line: str, kinds: Sequence[str], marks: Sequence[str], *, recase: bool) -> "ProtectedLine":
        """Replace spans of these kinds by marks, as many as there are, and capitals by the usual case."""
        line = without_marks(line)
        spans: dict[str, tuple[str, str, str]] = {}

        def marked(found: re.Match[str]) -> str:
            if len(spans) == len(marks):
                return found[0]
            mark = marks[len(spans)]
            spans[mark] = (found[0], line[: found.start()][-1:] or " ", line[found.end() :][:1] or " ")
            return mark

        text = re.sub("|".join(_PATTERNS[kind] for kind in kinds), marked, line) if kinds else line
        # A word alone may be an abbreviation.
        is_raised = recase and text.isupper() and len(text.split()) > 1
        if is_raised:
            text = _SENTENCE.sub(lambda found: found[1] + found[2].upper(), text.lower())
        return cls(text, spans, is_raised)

    def restore(self, text: str, *, append: bool) -> tuple[str, int]:
        """Put the spans in place of the marks of a translation, each once, and count those without a mark.

        Args:
            append: whether these come at the end.
        """
        text = text.upper() if self.is_raised else text
        if not self.spans:
            return text, 0
        first, *parts = split_at_marks(text)
        left, result = dict(self.spans), first.strip()
        for mark, after in zip(parts[::2], parts[1::2], strict=True):
            if mark in left:
                span, before, behind = left.pop(mark)
                result = _join(result, span, beside=before)
                result = _join(result, after.strip(), beside=behind)
            else:
                result = _join(result, after.strip())
        for span, *_ in left.values() if append else ():
            result = _join(result, span)
        return result, len(left)


def _join(text: str, more: str, *, beside: str = " ") -> str:
    """Join texts by a space, but not beside characters of scripts without spaces, or before closing punctuation.

    Args:
        beside: character next to a span in the source; next to the same one here there is no space, either.
    """
    if not text or not more:
        return text + more
    ends = text[-1], more[0]
    glued = beside in ends or any(unicodedata.east_asian_width(end) in "WF" for end in ends)
    return text + " " * (not (glued or ends[0] in "([{«„" or ends[1] in ".,;:!?)]}»…")) + more
