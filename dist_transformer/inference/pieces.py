"""Pieces of a sentence as a reader knows them."""

import re
from collections.abc import Sequence

from dist_transformer.data.tokenizer import SPECIALS, Tokenizer

BEGIN, END = SPECIALS[2:]
# Zero-width (non-)joiners: parts of words in Persian, Sinhala and others, though not printable to Python.
_JOINERS = "\u200c\u200d"


def readable_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Pieces as a reader knows them, `</s>` last: a space is `▁`, and `�` stands for a part of a character."""
    return [tokenizer.tag_of(i) or _readable(tokenizer.decode([i])) for i in ids] + [END]


def _readable(text: str) -> str:
    visible = "".join("▁" if c.isspace() else c if c.isprintable() or c in _JOINERS else "�" for c in text)
    # A part of a character, bytes of it, is one mark however many bytes.
    return re.sub("�+", "�", visible)
