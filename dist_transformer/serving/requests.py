"""Requests of the page: untrusted, checked before anything is computed."""

import unicodedata
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt

from dist_transformer.base.errors import UserError

Kind = Literal["cross", "encoder", "decoder"]
"""Kind of attention: cross-attention, self-attention of the encoder, self-attention of the decoder."""
NO_TEXT = "there is no text: type a sentence"
"""Error for a text that has nothing to translate."""
# JSON may escape a character outside the Basic Multilingual Plane as \ud83d\ude00.
_BYTES_PER_CHARACTER = 12
# Room for names, numbers and the ids of a hypothesis that is short enough for a map.
_OTHER_BYTES = 4096


def most_bytes(max_characters: int) -> int:
    """Return the bytes of the longest body for a text and a prefix of `max_characters` characters each."""
    return 2 * _BYTES_PER_CHARACTER * max_characters + _OTHER_BYTES


def one_line(text: str) -> str:
    """Convert a text to one line.

    Raises:
        UserError: it holds a control character or half of a character.
    """
    line = " ".join(text.replace("\t", " ").splitlines())
    # Half of a surrogate pair is not a character and not valid UTF-8.
    bad = next((c for c in line if unicodedata.category(c) in ("Cc", "Cs")), None)
    if bad is not None:
        raise UserError(f"the text holds U+{ord(bad):04X}, which is a control character or half of one: leave it out")
    return line


def _not_blank(line: str) -> str:
    if not line.strip():
        raise UserError(NO_TEXT)
    return line


Line = Annotated[str, AfterValidator(one_line)]
Text = Annotated[Line, AfterValidator(_not_blank)]


class TextRequest(BaseModel):
    """A request for translations that begin with a prefix."""

    model_config = ConfigDict(strict=True, extra="forbid")
    text: Text
    prefix: Line = ""


class AttentionRequest(BaseModel):
    """A request for one layer's attention of one hypothesis, whose ids are `tokens`."""

    model_config = ConfigDict(strict=True, extra="forbid")
    model: NonNegativeInt
    text: Text
    tokens: list[NonNegativeInt]
    kind: Kind
    layer: NonNegativeInt


def check_length(text: str, max_characters: int) -> None:
    """Raise a UserError if a text is too long."""
    if len(text) > max_characters:
        raise UserError(
            f"the text has {len(text):,} characters, and at most {max_characters:,} are allowed: send a shorter one"
        )
