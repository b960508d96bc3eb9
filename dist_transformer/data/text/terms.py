"""Terms that a translation must have: each is written behind its source term, between marks.

A model that was trained on such text copies the term (Dinu et al. 2019, "Training Neural Machine Translation to Apply
Terminology Constraints").
"""

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dist_transformer.base.errors import UserError
from dist_transformer.data.text.lines import read_lines
from dist_transformer.data.text.sentences import COMBINING, UNSPACED
from dist_transformer.data.vocabulary.placeholders import TERM_MARKS, without_marks

TOKEN = re.compile(rf"{UNSPACED}[{COMBINING}]*|(?:(?!{UNSPACED})\w[{COMBINING}]*)+|[^\w\s]")


class Terms:
    """Terms by what they translate. A source term in lower case is found in any case, and another one as it is.

    Args:
        pairs: source and target terms. A source term may have several; a translation gets the first.
    """

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._targets: dict[tuple[str, ...], list[str]] = {}
        for source, target in pairs:
            self._targets.setdefault(tuple(_words(source)), []).append(target)
        self._longest = max(map(len, self._targets), default=0)
        # The first of those that are alike in capitals.
        self._capitals = {tuple(map(str.upper, words)): found for words, found in reversed(self._targets.items())}

    @classmethod
    def read(cls, path: Path) -> "Terms":
        """Read a file with a source term, a tab and a target term in each line.

        Raises:
            UserError: the file cannot be read or is empty, or a line is something else.
        """
        pairs = []
        for number, line in enumerate(read_lines(path), 1):
            source, *targets = map(str.strip, without_marks(line).split("\t"))
            if not TOKEN.search(source) or len(targets) != 1 or not targets[0]:
                raise UserError(f"{path}, line {number:,}: write a source term, one tab, and its target term")
            pairs.append((source, targets[0]))
        if not pairs:
            raise UserError(f"{path} has no terms: write a source term, one tab, and its target term in each line")
        return cls(pairs)

    def annotate(
        self, source: str, target: str | None = None, *, in_capitals: bool = False, spans: Mapping[str, str] = {}
    ) -> tuple[str, list[str]]:
        """Write the target terms behind the source terms of a text; return the text and the terms that it got.

        Longer terms come first, from the beginning of the text.

        Args:
            target: translation, if it is known; terms that do not occur there are left out.
            spans: what marks of the text stand for; terms that have such a text get it back, as the 11 of "Windows 11".
            in_capitals: whether the case of the text says nothing, so that any source term is found.
        """
        tokens, text, end, place, chosen = [*TOKEN.finditer(source)], "", 0, 0, list[str]()
        read = [_words(spans.get(token[0], token[0])) for token in tokens]
        while place < len(tokens):
            last = place
            for stop in range(min(len(tokens), place + self._longest), place, -1):
                words = tuple(itertools.chain.from_iterable(read[place:stop]))
                found = self._targets.get(words) or self._targets.get(tuple(map(str.lower, words)), [])
                found = found or (self._capitals.get(words, []) if in_capitals else [])
                if fitting := [one for one in found if target is None or _count(one, target)]:
                    begin, start, end, last = end, tokens[place].start(), tokens[stop - 1].end(), stop - 1
                    term = "".join(spans.get(character, character) for character in source[start:end])
                    text += f"{source[begin:start]}{term} {TERM_MARKS[0]} {fitting[0]} {TERM_MARKS[1]}"
                    chosen.append(fitting[0])
                    break
            place = last + 1
        return text + source[end:], chosen


def count_terms(terms: Sequence[str], translation: str) -> int:
    """Count the terms that a translation has, each as often as it is wanted at most."""
    return sum(min(count, _count(term, translation)) for term, count in Counter(terms).items())


def _count(term: str, text: str) -> int:
    """Count how often a term occurs in a text, in any case."""
    normal = (unicodedata.normalize("NFKC", each).lower() for each in (term, text))
    inner, outer = ("".join(f" {token} " for token in TOKEN.findall(each)) for each in normal)
    return outer.count(inner)


def _words(text: str) -> list[str]:
    """Return the words of a text in the form in which vocabularies see them, whatever form it has."""
    return [unicodedata.normalize("NFKC", token) for token in TOKEN.findall(text)]
