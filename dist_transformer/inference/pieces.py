"""Pieces of a sentence in readable form."""

import re
from collections.abc import Sequence

from dist_transformer.data.tokenizer import SPECIALS, Tokenizer

BEGIN, END = SPECIALS[2:]
# Zero-width (non-)joiners: parts of words in Persian, Sinhala and others, although Python calls them not printable.
_JOINERS = "\u200c\u200d"


def readable_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Return pieces in readable form, `</s>` last: a space is `▁`, and a part of a character is `�`."""
    return [tokenizer.tag_of(i) or _readable(tokenizer.decode([i])) for i in ids] + [END]


def _readable(text: str) -> str:
    visible = "".join("▁" if c.isspace() else c if c.isprintable() or c in _JOINERS else "�" for c in text)
    # A part of a character is one mark, however many bytes it has.
    return re.sub("�+", "�", visible)
