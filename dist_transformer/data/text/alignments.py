"""Alignments of words as Pharaoh pairs `0-0 1-2`, and of the tokens that stand for these words.

The words of a text are what white space separates, numbered from 0; the first number of a pair is the source's.
"""

import bisect
import codecs
import difflib
import functools
import itertools
import re
import unicodedata
from collections import defaultdict
from collections.abc import Mapping, Sequence

from dist_transformer.data.vocabulary.tokenizer import UNK_ID, Tokenizer

_WORD = re.compile(r"\S+")
_PAIR = re.compile("([0-9]{1,6})-([0-9]{1,6})")
_UNKNOWN = "\ufffd".encode()

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""


def parse_links(line: str, source: str, target: str) -> list[tuple[int, int]]:
    """Parse the alignment of two texts.

    Raises:
        ValueError: it is none of these texts; the message continues a sentence that begins with the line's place.
    """
    words = [len(text.split()) for text in (source, target)]
    found = []
    for pair in line.split():
        match = _PAIR.fullmatch(pair)
        if match is None or int(match[1]) >= words[0] or int(match[2]) >= words[1]:
            raise ValueError(
                f"has {pair[:40]!r}, and the lines have {words[0]:,} and {words[1]:,} words: write pairs of their "
                "words such as 0-0 1-2, numbered from 0"
            )
        found.append((int(match[1]), int(match[2])))
    return found


def link_tokens(
    sides: tuple[Tokenizer, Tokenizer],
    texts: tuple[str, str],
    line: str,
    ids: tuple[Sequence[int], Sequence[int]],
    placeholders: Mapping[int, int],
) -> list[int]:
    """Return the place in the source, from 1 on, of the token that each target token is linked to; 0: it has none.

    Tokens of a target word are spread evenly over those of all source words that it is linked to.

    Args:
        line: alignment of the words of the texts.
        ids: tokens of the texts, which may have changed since.
        placeholders: ids of the sources by those of the targets.
    """
    groups = [_tokens_of_words(*side) for side in zip(sides, ids, texts, strict=True)]
    found = [ids[0].index(placeholders[token]) + 1 if token in placeholders else 0 for token in ids[1]]
    linked = defaultdict[int, set[int]](set)
    for one, other in parse_links(line, *texts):
        linked[other].add(one)
    for other, words in linked.items():
        places, others = [place for one in sorted(words) for place in groups[0][one]], groups[1][other]
        for number, place in enumerate(others):
            if places:
                found[place] = places[((2 * number + 1) * len(places) - 1) // (2 * len(others))] + 1
    return found


def _tokens_of_words(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> defaultdict[int | None, list[int]]:
    """Return the places of the tokens of each word."""
    found = defaultdict[int | None, list[int]](list)
    for place, word in enumerate(words_of(text, token_spans(tokenizer, ids, text))):
        found[word].append(place)
    return found


def words_of(text: str, spans: Sequence[Span]) -> list[int | None]:
    """Return the number of the word that each part of a text begins in; None for an empty part.

    It is also None for punctuation beside a word, which would link "Haus." to the last word of the other text.
    """
    words = [*_WORD.finditer(text)]
    starts = [word.start() for word in words]
    found: list[int | None] = []
    for start, end in spans:
        part, number = text[start:end], bisect.bisect(starts, start) - 1
        is_beside = not any(map(str.isalnum, part)) and (not part or any(map(str.isalnum, words[number][0])))
        found.append(None if is_beside else number)
    return found


def token_spans(tokenizer: Tokenizer, ids: Sequence[int], text: str, marks: Mapping[int, str] = {}) -> list[Span]:
    """Find the part of a text that each of its tokens stands for; start and end are equal if there is none.

    Args:
        text: what the tokens were made from or became. Normalization, protection and splitting may have changed
            something: parts belong together by their characters without case, accents' forms and white space.
        marks: protected texts by the ids of their placeholders.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    own, parts = "", []
    for token in ids:
        if token in marks:
            piece = marks[token].encode()
        elif token < tokenizer.first_piece:
            piece = _UNKNOWN if token == UNK_ID else b""
        else:
            piece = tokenizer.piece_bytes(token)
        start = len(own)
        own += decoder.decode(piece)
        # A piece may end within a character.
        parts.append(slice(start, len(own) + bool(decoder.getstate()[0])))
    places = _places(own, text)
    covered = ([*filter(None, places[part])] for part in parts)
    return [(min(found)[0], max(end for _, end in found)) if found else (0, 0) for found in covered]


def _places(own: str, text: str) -> list[Span | None]:
    """Find the part of `text` that each character of `own` corresponds to."""
    ours, theirs = _folded(own), _folded(text)
    one, other = ("".join(character for character, _ in side) for side in (ours, theirs))
    # What both begin and end with needs no search, which takes quadratic time.
    head = _alike(one, other)
    tail = _alike(one[head:][::-1], other[head:][::-1])
    inner = one[head : len(one) - tail], other[head : len(other) - tail]
    blocks = [("equal", 0, head, 0, head), ("equal", len(one) - tail, len(one), len(other) - tail, len(other))]
    for what, first, stop, begin, end in difflib.SequenceMatcher(None, *inner, autojunk=False).get_opcodes():
        blocks.append((what, head + first, head + stop, head + begin, head + end))
    found: list[Span | None] = [None] * len(own)
    for kind, first, stop, begin, end in blocks:
        for i in range(first, stop if begin < end else first):
            at = begin + i - first
            start, last = (at, at) if kind == "equal" else (begin, end - 1)
            span, before = (theirs[start][1], theirs[last][1] + 1), found[ours[i][1]]
            found[ours[i][1]] = (min(span[0], before[0]), max(span[1], before[1])) if before else span
    return found


def _alike(one: str, other: str) -> int:
    """Count the characters with which both texts begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _folded(text: str) -> list[tuple[str, int]]:
    """Return the characters of a text that comparisons see, each with the place of what it is a part of."""
    return [(character, place) for place, each in enumerate(text) for character in _folded_character(each)]


@functools.lru_cache(maxsize=2**14)
def _folded_character(character: str) -> str:
    return "".join(unicodedata.normalize("NFKD", character.casefold()).split())
