"""Splitting of texts that are too long for a model into parts, and joining of the translations."""

import itertools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from dist_transformer.data.text.sentences import UNSPACED_CHARACTER, split_sentences
from dist_transformer.data.vocabulary.tokenizer import Tokenizer

_JOINERS = "\u200c\u200d"
_VISIBLE = re.compile(r"\S")
# Characters per token in the first look ahead into a long sentence; the look-ahead doubles until it is enough.
_LOOK_AHEAD = 2


def split_text(text: str, tokenizer: Tokenizer, limit: int) -> list[str]:
    """Cut a text into its sentences, and sentences of more than `limit` tokens into smaller parts.

    The parts hold all of the text in order, except white space between them, and joiners at a cut within a word. A long
    sentence is cut at the last white space within the limit. Without white space, it is cut between two characters, if
    possible not before a combining mark.

    Args:
        limit: maximum tokens per part, at least 4: the most bytes of a character in UTF-8, and so the most tokens.

    Returns:
        Parts of at most `limit` tokens, none of them blank; a part of a long sentence is normalised.
    """
    sentences = split_sentences(text)
    parts: list[str] = []
    for sentence, ids in zip(sentences, tokenizer.encode_batch(sentences), strict=True):
        parts += [sentence] if len(ids) <= limit else _cut(tokenizer.normalize(sentence), tokenizer, limit)
    return parts


def join_texts(texts: Sequence[str]) -> str:
    """Join translations with a space, or without one next to a Chinese or Japanese character."""
    texts = [text for text in texts if text]
    joined = texts[:1]
    for before, after in itertools.pairwise(texts):
        unspaced = UNSPACED_CHARACTER.match(before[-1]) or UNSPACED_CHARACTER.match(after[0])
        joined += ["" if unspaced else " ", after]
    return "".join(joined)


def join_hypotheses(parts: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Join the best hypotheses of all parts, the second best, and so on, as many as every part has.

    Args:
        parts: `ScoredText` of `translator.py`, which imports this module.
    """
    if len(parts) == 1:
        return parts[0]
    return tuple(
        replace(
            alike[0],
            text=join_texts([one.text for one in alike]),
            score=sum(one.score for one in alike) / len(alike),
            tokens=tuple(token for one in alike for token in one.tokens),
            is_cut=any(one.is_cut for one in alike),
        )
        for alike in zip(*parts, strict=False)
    )


def _cut(text: str, tokenizer: Tokenizer, limit: int) -> Iterator[str]:
    """Cut a normalised sentence from its beginning, each part as long as possible."""
    start = 0
    while (visible := _VISIBLE.search(text, start)) is not None:
        start = visible.start()
        end = start + _part_length(text, start, tokenizer, limit)
        yield text[start:end].rstrip()
        start = end


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
