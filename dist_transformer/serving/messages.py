"""Bodies of requests: untrusted JSON, checked before anything is computed."""

import json
import unicodedata
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from dist_transformer.base.errors import UserError

Kind = Literal["cross", "encoder", "decoder"]
"""Kind of attention: cross-attention, self-attention of the encoder, self-attention of the decoder."""
KINDS: tuple[Kind, ...] = get_args(Kind)
NO_TEXT = "there is no text: type a sentence"
"""Error for a text that has nothing to translate."""
# JSON may escape a character outside the Basic Multilingual Plane as \ud83d\ude00.
_BYTES_PER_CHARACTER = 12
# Room for names, numbers and the ids of a hypothesis that is short enough for a map.
_OTHER_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRequest:
    """A request for one layer's attention of one hypothesis."""

    model: int
    text: str
    tokens: tuple[int, ...]
    """Ids of the hypothesis."""
    kind: Kind
    layer: int


def most_bytes(max_characters: int) -> int:
    """Return the bytes of the longest body for a text and a prefix of `max_characters` characters each."""
    return 2 * _BYTES_PER_CHARACTER * max_characters + _OTHER_BYTES


def read_text(body: bytes, *, max_characters: int) -> tuple[str, str]:
    """Read the body of a request for translations, `{"text": …}` or `{"text": …, "prefix": …}`.

    Returns:
        The text, and what its translations begin with; empty for no prefix.

    Raises:
        UserError: the body is anything else; the message is one sentence.
    """
    fields = _fields(body, {"text"}, optional={"prefix"})
    prefix = fields.get("prefix", "")
    if not isinstance(prefix, str) or len(prefix) > max_characters:
        raise UserError(f"prefix must be a string of at most {max_characters:,} characters")
    return _checked_text(fields["text"], max_characters), checked_line(prefix)


def read_attention_request(body: bytes, *, models: int, max_characters: int) -> AttentionRequest:
    """Read the body of a request for attention: the fields of `AttentionRequest`.

    Raises:
        UserError: the body is anything else; the message is one sentence.
    """
    fields = _fields(body, {"model", "text", "tokens", "kind", "layer"})
    model, layer, tokens, kind = (fields[name] for name in ("model", "layer", "tokens", "kind"))
    if not _is_count(model) or model >= models:
        raise UserError(f"model must be a number from 0 to {models - 1}")
    if not _is_count(layer):
        raise UserError("layer must be a number from 0")
    if not isinstance(tokens, list) or not all(map(_is_count, tokens)):
        raise UserError("tokens must be a list of ids")
    if kind not in KINDS:
        raise UserError(f"kind must be one of {', '.join(KINDS)}")
    text = _checked_text(fields["text"], max_characters)
    return AttentionRequest(model=model, text=text, tokens=tuple(tokens), kind=cast(Kind, kind), layer=layer)


def read_json(body: bytes) -> Any:
    """Read a JSON value.

    Raises:
        UserError: the body is not JSON in UTF-8.
    """
    try:
        return json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        raise UserError("the request is not JSON in UTF-8") from None


def checked_line(text: str) -> str:
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


def _fields(body: bytes, names: set[str], *, optional: Set[str] = frozenset()) -> dict[str, Any]:
    fields = read_json(body)
    if not isinstance(fields, dict) or fields.keys() - optional != names:
        raise UserError(f"the request must be a JSON object with {', '.join(sorted(names))}")
    return fields


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _checked_text(text: object, max_characters: int) -> str:
    """Check a text and convert it to one line."""
    if not isinstance(text, str):
        raise UserError("text must be a string")
    if len(text) > max_characters:
        raise UserError(
            f"the text has {len(text):,} characters, and at most {max_characters:,} are allowed: send a shorter one"
        )
    line = checked_line(text)
    if not line.strip():
        raise UserError(NO_TEXT)
    return line
