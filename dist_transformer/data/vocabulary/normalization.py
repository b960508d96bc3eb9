"""Unicode normalization of text before it is split into pieces."""

import unicodedata
from typing import Literal

Normalization = Literal["nfkc", "nfc"]
"""Unicode normalization: nfkc replaces variants of a character, such as a full-width comma by `,` and ½ by 1⁄2; nfc
keeps them."""
DEFAULT_NORMALIZATION: Normalization = "nfkc"


def first_folded(text: str) -> str | None:
    """Return the first character of `text` that NFKC replaces and NFC keeps, such as a full-width comma, or None."""
    # Nearly every line of most languages is normalised already, so the quick check pays.
    return None if unicodedata.is_normalized("NFKC", text) else next(filter(_is_folded, text), None)


def _is_folded(character: str) -> bool:
    return unicodedata.normalize("NFKC", character) != unicodedata.normalize("NFC", character)
