"""Placeholders: entries of a vocabulary that stand for spans of text which are not translated, such as a URL.

They are the tags <ph1>, <ph2>, …, in front of nothing. In a text each of them is a noncharacter of Unicode, its mark.
Two more tags with marks are around the terms that a source has for its translation.
Text around a mark is encoded as it would be without it, so any kind of vocabulary can have placeholders.
"""

import re
from collections.abc import Callable, Iterable, Sequence

from dist_transformer.config.schema import require
from dist_transformer.data.vocabulary.tokenizer import Tokenizer, Vocabulary

MOST_PLACEHOLDERS = 32
"""Noncharacters from U+FDD0 to U+FDEF."""
_FIRST_MARK = 0xFDD0
_TAG = re.compile(r"<ph([1-9][0-9]*)>")
TERM_TAGS, TERM_MARKS = ("<term>", "<term-end>"), ("\ufffe", "\uffff")
_MARK = re.compile("([\ufdd0-\ufdef\ufffe\uffff])")


def placeholder_tags(count: int) -> tuple[str, ...]:
    """Return the tags of a vocabulary with this number of placeholders.

    Raises:
        UserError: there are not so many.
    """
    require(0 <= count <= MOST_PLACEHOLDERS, "placeholders", count, f"set 0 to {MOST_PLACEHOLDERS}, 8 is usual")
    return tuple(f"<ph{number}>" for number in range(1, count + 1))


def placeholders_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of a vocabulary's placeholders by their marks, in order."""
    tags = [tag for tag in placeholder_tags(MOST_PLACEHOLDERS) if tag in tokenizer.tags]
    return dict(zip(marks(len(tags)), tokenizer.tag_ids(tags), strict=True))


def term_marks_of(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids around terms by their marks; nothing if a vocabulary has none."""
    return dict(zip(TERM_MARKS, tokenizer.tag_ids(TERM_TAGS), strict=True)) if TERM_TAGS[0] in tokenizer.tags else {}


def shared_placeholders(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids of the placeholders of the targets which the sources have, too, by their marks."""
    of_sources = placeholders_of(vocabulary.source)
    return {mark: token for mark, token in placeholders_of(vocabulary.target).items() if mark in of_sources}


def marks(count: int) -> list[str]:
    return [chr(_FIRST_MARK + number) for number in range(count)]


def without_marks(text: str) -> str:
    """Replace what a text has of marks, which no text should have."""
    return _MARK.sub("\ufffd", text)


def split_at_marks(text: str) -> list[str]:
    """Split a text into texts and marks, by turns; the first and the last are texts."""
    return _MARK.split(text)


def encode_marked(tokenizer: Tokenizer, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Encode a text with marks.

    Args:
        encode: encodes a text without marks.
    """
    ids, known = [], placeholders_of(tokenizer) | term_marks_of(tokenizer)
    for number, part in enumerate(split_at_marks(text)):
        if number % 2:
            ids.append(known[part])
        elif part.strip():
            # After a mark, a word begins as within a text.
            ids += encode(" " * (number > 0 and part[0] == " ") + part.strip())
    return ids


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode texts, with or without marks."""
    found = tokenizer.encode_batch(texts)
    for place, text in enumerate(texts):
        if _MARK.search(text):
            found[place] = encode_marked(tokenizer, text, tokenizer.encode)
    return found


def decode_marked(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Decode ids to a text with marks."""
    known = {token: mark for mark, token in placeholders_of(tokenizer).items()}
    text, part = "", list[int]()
    for token in ids:
        if token in known:
            text, part = f"{text}{tokenizer.decode(part)}{known[token]}", []
        else:
            part.append(token)
    return text + tokenizer.decode(part)
