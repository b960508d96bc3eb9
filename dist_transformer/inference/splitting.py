"""Splitting of texts that are too long for a model into parts, and joining of the translations."""

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence

from dist_transformer.data.vocabulary.tokenizer import Tokenizer

LEAST_LIMIT = 4
"""Smallest limit that every character fits: the most bytes of a character in UTF-8, and so the most tokens."""

# Han, kana, and the signs written with them; there is no space between their sentences.
_UNSPACED = "\u3000-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff01-\uff60\U00020000-\U0003ffff"
_UNSPACED_CHARACTER = re.compile(f"[{_UNSPACED}]")
# Signs that end a sentence, then closing quotes and brackets, then white space. Search takes linear time, because the
# expression matches wherever its first sign occurs.
_STOP = re.compile(r"""[.!?…。｡！？।॥؟۔።။។]+["'”’»›」』）)\]]*(?P<space>\s*)""")
# These end a sentence even without white space after them; a full stop may be part of a number.
_SURE_STOPS = frozenset("。｡！？।॥؟۔።။។")
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
_JOINERS = "\u200c\u200d"
# Characters per token in the first look ahead into a long sentence; the look-ahead doubles until it is enough.
_LOOK_AHEAD = 2


def split_text(text: str, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Cut a text into its sentences, and sentences of more than `limit` tokens into smaller parts.

    The parts hold all of the text in order, except white space between them, and joiners at a cut within a word. A long
    sentence is cut at the last white space within the limit. Without white space, it is cut between two characters, if
    possible not before a combining mark.

    Args:
        limit: maximum tokens per part, at least `LEAST_LIMIT`.

    Returns:
        Parts of at most `limit` tokens, none of them blank; a part of a long sentence is normalised.
    """
    sentences = split_sentences(text)
    parts: list[str] = []
    for sentence, ids in zip(sentences, tokenizer.encode_batch(sentences), strict=True):
        parts += [sentence] if len(ids) <= limit else _cut(tokenizer.normalize(sentence), tokenizer, limit)
    return parts


def split_sentences(text: str) -> list[str]:
    """Cut a text at the ends of its sentences. No part is blank, and they hold all of the text except white space.

    A full stop ends no sentence after an abbreviation, an initial or a short number, or before a small letter, unless
    the text has no capitals.
    """
    return [sentence.strip() for sentence in _sentences(text) if not sentence.isspace()]


def join_texts(texts: Sequence[str]) -> str:
    """Join translations with a space, or without one next to a Chinese or Japanese character."""
    texts = [text for text in texts if text]
    joined = texts[:1]
    for before, after in itertools.pairwise(texts):
        unspaced = _UNSPACED_CHARACTER.match(before[-1]) or _UNSPACED_CHARACTER.match(after[0])
        joined += ["" if unspaced else " ", after]
    return "".join(joined)


def _sentences(text: str) -> list[str]:
    ends = [0]
    has_capitals = text != text.lower()
    for stop in _STOP.finditer(text):
        following = text[stop.end() : stop.end() + 1]
        # Spaced dots, ". . .", belong to the sentence before them.
        if len(ends) > 1 and stop.start() == ends[-1]:
            ends.pop()
        spaced = stop["space"] and not _continues(text, stop, has_capitals=has_capitals)
        if spaced or not _SURE_STOPS.isdisjoint(stop.group()) or _UNSPACED_CHARACTER.match(following):
            ends.append(stop.end())
    return [text[start:end] for start, end in itertools.pairwise([*ends, len(text)]) if end > start]


def _continues(text: str, stop: re.Match[str], *, has_capitals: bool) -> bool:
    """Tell whether the sentence continues after a full stop, or dots, and white space."""
    if stop.group().strip().strip(".…"):
        return False
    if has_capitals and text[stop.end() : stop.end() + 1].islower():
        return True
    if stop.group().strip() != ".":
        return False
    behind = _WORD_BEFORE.search(text, max(0, stop.start() - _LOOK_BEHIND), stop.start())
    return behind is not None and _ABBREVIATION.fullmatch(behind.group()) is not None


def _cut(text: str, tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    """Cut a normalised sentence from its beginning, each part as long as possible."""
    start = 0
    while (start := _next_visible(text, start)) < len(text):
        end = start + _part_length(text, start, tokenizer, limit)
        yield text[start:end].rstrip()
        start = end


def _next_visible(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start


def _part_length(text: str, start: int, tokenizer: Tokenizer, limit: int) -> int:
    """Count the characters of the part that begins at `start`."""
    size = _LOOK_AHEAD * limit
    # Not the whole rest of the text: a long one would be encoded once per part.
    while len(token_starts := tokenizer.token_starts(text[start : start + size])) <= limit:
        if start + size >= len(text):
            return len(text) - start
        size *= 2
    ahead = text[start : start + size]
    length = _best_place(ahead, token_starts[limit])
    # A cut word may have other pieces, and more of them.
    for tokens in range(limit - 1, 0, -1):
        if len(tokenizer.encode(ahead[:length].rstrip())) <= limit:
            break
        length = _best_place(ahead, token_starts[tokens])
    return length


def _best_place(text: str, longest: int) -> int:
    """Find the last white space up to `longest`, otherwise the last character that is not a mark; at least 1."""
    places = range(longest, 0, -1)
    spaces = (place for place in places if text[place].isspace())
    others = (place for place in places if not (unicodedata.category(text[place])[0] == "M" or text[place] in _JOINERS))
    return next(itertools.chain(spaces, others), max(1, longest))
